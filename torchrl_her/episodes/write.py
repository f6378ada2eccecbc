"""The transitions of a write, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.goals.table import to_device
from torchrl_her.keys import MASK, HERKeys, get_entry


class RowNames(NamedTuple):
    """The names of the rows of a write in error messages."""

    numbers: Sequence[int] | np.ndarray | None = None  # the positions of the rows in the flattened data set, if any
    batch: torch.Size = torch.Size()  # the batch size of the data set

    def name(self, row: int) -> str:
        """Return the name of a row, given its number among all rows of the write, flattened."""
        if self.numbers is None:
            return f"transition {row} of this write"
        index = np.unravel_index(self.numbers[row], self.batch)
        place = str(index[0]) if len(index) == 1 else str([int(each) for each in index])
        return f"row {place} of the data"


THIS_WRITE = RowNames()


class Write(NamedTuple):
    """The transitions of one write without padding, in the order of writing."""

    goals: Tensor  # [n, *goal], the achieved goals under "next"
    start: np.ndarray  # void [n], the bytes of the achieved and the desired goal at the root
    outcome: np.ndarray  # void [n], the bytes of both goals under "next"
    done: np.ndarray  # bool [n], whether the transition ends its episode
    begins: np.ndarray  # bool [n], whether it is the first of its row; used only without trajectory ids
    row_length: int  # steps per row; 1 if each transition can belong to another environment, 0 if rows are incomplete
    trajectory: np.ndarray | None  # int64 [n], the trajectory ids
    rewards: Tensor | None  # [n, agents], on the host; None without rewards
    mask: np.ndarray | None  # bool [rows of the write], False for padding; None without padding
    names: RowNames = THIS_WRITE

    @classmethod
    def read(
        cls,
        tensordict: TensorDictBase,
        keys: HERKeys,
        goal_fn: Callable[[Tensor], Tensor] | None,
        earlier_goals: Tensor | None,
        names: RowNames = THIS_WRITE,
    ) -> Write:
        """Validate transitions ``[*batch]`` and flatten them, in the order of writing.

        It runs before any state changes, so a refused write leaves no trace.

        Args:
            tensordict (TensorDictBase): transitions ``[*batch]``; with several dimensions, the last one is time.
            keys (HERKeys): the keys of the entries.
            goal_fn (Callable[[Tensor], Tensor] or None): maps achieved entries ``[n, *state]`` to goals ``[n, *goal]``.
            earlier_goals (Tensor or None): goals ``[n, *goal]`` of earlier writes, whose shape and dtype must match.
            names (RowNames): the names of the rows in error messages.

        Raises:
            ValueError: if goals, flags or ids have a wrong shape or dtype, or if an achieved goal is NaN or was lost.
            TypeError: if an entry is not a tensor.
            KeyError: if an entry is missing.
        """
        check_single_steps(tensordict)
        batch, count = tensordict.batch_size, tensordict.batch_size.numel()
        achieved, next_achieved = _get_goals(tensordict, "achieved", keys.achieved_goal, keys.next_achieved_goal)
        desired, next_desired = _get_goals(tensordict, "desired", keys.desired_goal, keys.next_desired_goal)
        states = next_achieved.reshape(count, *next_achieved.shape[len(batch) :])  # [n, *state]
        exact = map_goals(states, goal_fn).detach()  # [n, *goal]
        _check_shapes(exact.shape[1:], desired.shape[len(batch) :], desired.dtype, earlier_goals)
        goals = exact.to(desired.dtype)

        columns = get_columns(tensordict, keys)
        check_last_dimension(keys.next_done, columns["done"], batch)
        if isinstance(reward := tensordict.get(keys.next_reward, None), Tensor):
            columns["rewards"] = reward
        of_goals = [each.reshape(count, -1) for each in (achieved, desired, next_achieved, next_desired)]
        host = _to_host([*of_goals, *columns.values()], count)
        on_host = dict(zip(columns, host[4:], strict=True))
        done = as_array(on_host["done"], np.bool_)
        trajectory = as_array(on_host["trajectory"], np.int64) if "trajectory" in columns else None
        mask = as_array(on_host["mask"], np.bool_) if "mask" in columns else None
        rewards = on_host["rewards"].detach().reshape(count, -1) if "rewards" in columns else None
        joined = _join(host[:4])
        start, outcome = _halves(joined)
        begins = np.zeros(count, np.bool_)
        begins[:: batch[-1] if len(batch) > 1 else count] = True
        _check_last_steps(tensordict, keys, outcome, done if mask is None else done & mask, names)
        if goal_fn is not None or not joined.is_floating_point() or _has_nan(joined):
            achieved_goals = [host[0], host[2]] if goal_fn is None else [exact]
            _check_not_nan({"desired": [host[1], host[3]], "achieved": achieved_goals}, count, mask, names)
        if mask is not None:
            kept = np.flatnonzero(mask)
            index = to_device(kept, goals.device)
            goals, exact = goals[index], exact[index]
            start, outcome, done, begins = start[mask], outcome[mask], done[mask], begins[mask]
            trajectory = None if trajectory is None else trajectory[mask]
            rewards = None if rewards is None else rewards[kept]
        row_length = 0 if mask is not None else batch[-1] if len(batch) > 1 else 1
        written = cls(goals, start, outcome, done, begins, row_length, trajectory, rewards, mask, names)
        _check_representable(exact, written)
        return written

    @property
    def rows(self) -> int:
        """The number of rows if each can be an environment, otherwise 0."""
        return len(self.done) // self.row_length if self.row_length else 0

    def check_like(self, arrived: np.ndarray) -> None:
        """Check that goals have as many bytes as those at which running episodes arrived, ``void [lanes]``."""
        if self.outcome.dtype != arrived.dtype:
            raise ValueError(
                f"The goals of this write take {self.outcome.itemsize} bytes per transition, and those of the running "
                f"episodes {arrived.itemsize}, so steps cannot be compared. Convert achieved and desired goals to the "
                "dtypes and shapes of earlier writes, or call flush() first."
            )

    def name(self, position: int) -> str:
        """Return the name of a transition in error messages, given its position among the transitions."""
        return self.names.name(position if self.mask is None else int(self.mask.nonzero()[0][position]))

    def with_padding(self, names: np.ndarray) -> np.ndarray:
        """Return the names of all rows of the write, given those of its transitions, ``int64 [n]``. Padding has 0."""
        if self.mask is None:
            return names
        rows = np.zeros(len(self.mask), np.int64)
        rows[self.mask] = names
        return rows

    @property
    def is_dummy(self) -> bool:
        """Whether this looks like the dummy, transitions of zeros with which collectors set up a shared buffer.

        Real transitions whose goals are all zeros look the same.
        """
        if not len(self.done) or self.start[:1].tobytes().strip(b"\0"):  # the first transition decides quickly
            return False
        return not (self.start.tobytes() + self.outcome.tobytes()).strip(b"\0")

    def rows_of(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the transitions ``[*batch]`` of the write as ``[n]``, flattened and without padding."""
        rows = tensordict.reshape(-1)
        return rows if self.mask is None else rows[to_device(np.flatnonzero(self.mask), self.goals.device)]


def map_goals(states: Tensor, goal_fn: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Map states ``[n, *state]`` to the goals ``[n, *goal]`` that they achieve."""
    if goal_fn is None:
        return states
    count = len(states)
    goals = goal_fn(states)
    if not isinstance(goals, Tensor):
        raise TypeError(f"goal_fn must return a tensor with one goal per row, but it returned {type(goals).__name__}.")
    if goals.shape[:1] != (count,):
        raise ValueError(
            f"goal_fn must return one goal per row, but it returned the shape {tuple(goals.shape)} for {count} rows."
        )
    return goals


def check_single_steps(tensordict: object) -> None:
    """Check that transitions are a TensorDict, which accepts new entries, and span one step each."""
    if not isinstance(tensordict, TensorDictBase):
        raise TypeError(
            "Hindsight adds entries to transitions, so they must be a TensorDict, got a "
            f"{type(tensordict).__name__}. Convert a tensorclass with to_tensordict()."
        )
    if tensordict.get("steps_to_next_obs", None) is not None:
        raise ValueError(
            "These are n-step transitions (they have an entry 'steps_to_next_obs'), whose rewards were summed under "
            "the original goal. Remove MultiStep from the collector and sum the rewards in the buffer instead: "
            "Compose(MultiStepTransform(n_steps, gamma), HERTransform(...))."
        )


def _get_goals(tensordict: TensorDictBase, name: str, key: NestedKey, next_key: NestedKey) -> tuple[Tensor, Tensor]:
    """Return the goals at the root and under ``"next"``, and check that shape and dtype are the same."""
    root, under_next = get_entry(tensordict, key, f"{name}_goal"), get_entry(tensordict, next_key, f"{name}_goal")
    if root.shape != under_next.shape:
        raise ValueError(
            f"The {name} goal has the shape {tuple(root.shape)} at the root and {tuple(under_next.shape)} under "
            "'next': the two shapes must be the same."
        )
    if root.dtype != under_next.dtype:
        raise ValueError(
            f"The {name} goal is {root.dtype} at the root and {under_next.dtype} under 'next': the two dtypes must be "
            "the same, since consecutive steps are matched by comparing bytes."
        )
    return root, under_next


def check_last_dimension(key: NestedKey, value: Any, batch: torch.Size) -> None:
    """Check that a flag or a reward, if it is present, has one dimension more than the batch, as in TorchRL."""
    if isinstance(value, Tensor) and value.ndim == len(batch):
        raise ValueError(
            f"The entry {key!r} has the shape {tuple(value.shape)}, but flags and rewards need a last dimension, "
            f"{(*batch, 1)}: samples would mix both shapes. Store data[{key!r}].unsqueeze(-1)."
        )


def get_columns(tensordict: TensorDictBase, keys: HERKeys) -> dict[str, Tensor]:
    """Return the done flags, the trajectory ids and the mask, if present, ``[*batch]`` or ``[*batch, 1]`` each."""
    columns, count = {}, tensordict.batch_size.numel()
    for name, key in (("done", keys.next_done), ("trajectory", keys.trajectory), ("mask", keys.mask)):
        value = None if key is None else tensordict.get(key, None)
        if value is None and (key in (None, MASK) or name == "trajectory"):
            continue
        if not isinstance(value, Tensor):
            value = get_entry(tensordict, key, name)  # raises the error
        if value.numel() != count:
            raise ValueError(
                f"The entry {key!r} has the shape {tuple(value.shape)} for {count} transitions: it must have one value "
                f"per transition. Set keys=HERKeys({name}=...) to the correct key."
            )
        columns[name] = value
    return columns


def as_array(column: Tensor, dtype: Any) -> np.ndarray:
    """Return a column as an array ``[n]``."""
    return column.numpy(force=True).reshape(-1).astype(dtype, copy=False)


def _to_host(entries: list[Tensor], count: int) -> list[Tensor]:
    """Return entries of ``count`` rows on the CPU. One copy fetches all those that are on another device."""
    away = [place for place, entry in enumerate(entries) if not entry.is_cpu]
    if away:
        rows = [entries[place].detach().reshape(count, -1).contiguous().view(torch.uint8) for place in away]
        copied = torch.cat(rows, dim=1).cpu().split([row.shape[1] for row in rows], dim=1)
        for place, row in zip(away, copied, strict=True):
            row = row.clone(memory_format=torch.contiguous_format)  # a slice of one row counts as contiguous
            entries[place] = row.view(entries[place].dtype)
    return entries


def _join(rows: list[Tensor]) -> Tensor:
    """Join achieved and desired goals, ``[n, items]`` each; as bytes, ``uint8 [n, bytes]``, if their dtypes differ."""
    if rows[0].dtype != rows[1].dtype:
        rows = [row.contiguous().view(torch.uint8) for row in rows]
    return torch.cat(rows, dim=1)


def _halves(joined: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the first half of each row, and of the second half, ``void [n]`` each."""
    rows = joined.detach().view(torch.uint8).numpy()  # [n, bytes]
    halves = rows.view(f"V{rows.shape[1] // 2}")  # [n, 2]
    return halves[:, 0], halves[:, 1]


def _check_shapes(
    achieved_shape: torch.Size, desired_shape: torch.Size, dtype: torch.dtype, earlier: Tensor | None
) -> None:
    """Check that achieved goals can replace desired goals, and that shape and dtype are as in earlier writes.

    ``achieved_shape`` and ``desired_shape`` are the shapes of one goal; ``earlier`` is ``[n, *goal]``.
    """
    if achieved_shape != desired_shape:
        raise ValueError(
            f"An achieved goal has the shape {tuple(achieved_shape)} and a desired goal {tuple(desired_shape)}: the "
            "shapes must be the same, since achieved goals replace desired goals. Pass goal_fn to map achieved entries "
            "to goals."
        )
    if not desired_shape.numel():
        raise ValueError(f"Goals have the shape {tuple(desired_shape)} and contain no number: check the goal keys.")
    if earlier is None:
        return
    if desired_shape != earlier.shape[1:]:
        raise ValueError(
            f"Goals have the shape {tuple(desired_shape)}, but goal_spec or an earlier write has "
            f"{tuple(earlier.shape[1:])}. Pass the goal_spec of a single goal, without the batch of environments."
        )
    if dtype != earlier.dtype:
        raise ValueError(
            f"Goals are {dtype}, but {earlier.dtype} in goal_spec or an earlier write: convert the goals to one dtype."
        )


def _check_representable(exact: Tensor, written: Write) -> None:
    """Check that the dtype of desired goals can represent the achieved goals. Floats may be rounded."""
    goals = written.goals
    if exact.dtype == goals.dtype:
        return
    if all(each.is_floating_point() or each.is_complex() for each in (exact, goals)):
        differs = goals.isinf() & ~exact.isinf()
    else:
        differs = goals.to(exact.dtype) != exact
    if bool(differs.any()):
        row = _first_row(differs)
        raise ValueError(
            f"Achieved goals are {exact.dtype} and desired goals {goals.dtype}: the conversion would change achieved "
            f"goals, for example of {written.name(row)}. Nothing was stored. Store both goals in one dtype, or map the "
            "achieved goals with goal_fn."
        )


def _check_not_nan(goals: dict[str, list[Tensor]], count: int, mask: np.ndarray | None, names: RowNames) -> None:
    """Check that no desired or achieved goals ``[*batch, *goal]`` are NaN, which would make losses NaN."""
    for kind, entries in goals.items():
        for entry in filter(_has_nan, entries):
            is_nan = entry.reshape(count, -1).isnan().any(1).numpy(force=True)
            rows = np.flatnonzero(is_nan if mask is None else is_nan & mask)
            if len(rows):
                raise ValueError(
                    f"The {kind} goal of {names.name(int(rows[0]))} is NaN. Nothing was stored. Check the values that "
                    "the environment (or goal_fn) returned."
                )


def _has_nan(goals: Tensor) -> bool:
    """Return whether a goal is NaN. NumPy is faster, but lacks some dtypes."""
    if goals.is_cpu and goals.dtype in (torch.float32, torch.float64):
        values = goals.numpy(force=True)
        return math.isnan(np.vdot(values, values))  # a sum of squares is NaN only if a number is
    return (goals.is_floating_point() or goals.is_complex()) and bool(goals.isnan().any())


def _first_row(where: Tensor) -> int:
    """Return the first row of ``bool [n, ...]`` that contains True."""
    return int(where.reshape(len(where), -1).any(dim=1).nonzero()[0])


def _check_last_steps(
    tensordict: TensorDictBase, keys: HERKeys, outcome: np.ndarray, ends: np.ndarray, names: RowNames
) -> None:
    """Check that the final observations of episodes, which end at ``ends``, ``bool [n]``, are not all zeros."""
    index = ends.nonzero()[0]
    if len(index):
        index = index[outcome[index] == np.zeros((), outcome.dtype)]  # both goals are zeros, which is rare
    if not len(index):
        return
    rows = tensordict.reshape(-1)[torch.from_numpy(index)]
    lost = rows.get(keys.desired_goal).reshape(len(index), -1).any(1)
    of_step = {keys.next_reward, *keys.next_flags, keys.next_achieved_goal, keys.next_desired_goal}
    observations = {unravel_key(("next", key)) for key in rows.keys(include_nested=True, leaves_only=True)} - of_step
    observed = [value for key in observations if isinstance(value := rows.get(key, None), Tensor)]
    for value in observed:
        lost &= ~value.reshape(len(index), -1).any(1)
    if observed and bool(lost.any()):
        raise ValueError(
            "The final observation of an episode is all zeros, although its desired goal is not "
            f"({names.name(int(index[_first_row(lost)]))}): the environment dropped it, as GymEnv(..., num_envs=n) "
            "does. Nothing was stored. Use SerialEnv or ParallelEnv."
        )
