"""Reads and checks the transitions of a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.keys import MASK, HERKeys, get_entry


class RowNames(NamedTuple):
    """What messages call the rows of a write."""

    numbers: Sequence[int] | np.ndarray | None = None  # in the flattened data set that the rows are a part of
    batch: torch.Size = torch.Size()  # the batch size of the data set

    def name(self, row: int) -> str:
        """Return the name of a row, given its number among all rows, flattened."""
        if self.numbers is None:
            return f"transition {row} of this write"
        index = np.unravel_index(self.numbers[row], self.batch)
        place = str(index[0]) if len(index) == 1 else str([int(each) for each in index])
        return f"row {place} of the data"


THIS_WRITE = RowNames()


class WrittenTransitions(NamedTuple):
    """The transitions of one write without padding, in the order of writing."""

    goals: Tensor  # [n, *goal], the achieved goals under "next"
    start: np.ndarray  # void [n], the bytes of the achieved and the desired goal at the root
    outcome: np.ndarray  # void [n], the bytes of both goals under "next"
    done: np.ndarray  # bool [n], the transition ends its episode
    begins: np.ndarray  # bool [n], it is the first of its row of the write; used only without trajectory ids
    row_length: int  # 1 if each transition can be of another environment, 0 if rows are incomplete
    trajectory: np.ndarray | None  # int64 [n], trajectory ids
    mask: np.ndarray | None  # bool [rows of the write], False for padding; None without padding
    names: RowNames = THIS_WRITE

    def name(self, position: int) -> str:
        """Return what messages call a transition, given its position among those without padding."""
        return self.names.name(position if self.mask is None else int(self.mask.nonzero()[0][position]))

    @property
    def is_dummy(self) -> bool:
        """Whether this looks like the transition of zeros with which collectors set up a buffer that processes share.

        A real transition whose goals are all zeros looks the same.
        """
        return len(self.done) == 1 and not any(self.start[0].tobytes() + self.outcome[0].tobytes())

    def rows_of(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the entries of the write, ``[*batch]``, in one dimension and without padding, ``[n]``."""
        rows = tensordict.reshape(-1)
        return rows if self.mask is None else rows[torch.from_numpy(self.mask).to(self.goals.device)]


def read_transitions(
    tensordict: TensorDictBase,
    keys: HERKeys,
    goal_fn: Callable[[Tensor], Tensor] | None,
    earlier_goals: Tensor | None,
    names: RowNames = THIS_WRITE,
) -> WrittenTransitions:
    """Check transitions ``[*batch]`` and flatten them to one dimension, in the order of writing.

    A write that is refused here has changed nothing. Goals must have the shape and dtype of
    ``earlier_goals [n, *goal]``.
    """
    check_single_steps(tensordict)
    batch, count = tensordict.batch_size, tensordict.batch_size.numel()
    achieved, next_achieved = _get_goals(tensordict, "achieved", keys.achieved, keys.next_achieved)
    desired, next_desired = _get_goals(tensordict, "desired", keys.desired, keys.next_desired)
    states = next_achieved.reshape(count, *next_achieved.shape[len(batch) :])  # [n, *state]
    exact = map_goals(states, goal_fn).detach()  # [n, *goal]
    _check_shapes(exact.shape[1:], desired.shape[len(batch) :], desired.dtype, earlier_goals)
    goals = exact.to(desired.dtype)

    done = flatten_entry(tensordict, keys.done, np.bool_, "done_key")
    trajectory = mask = None
    if keys.trajectory is not None and tensordict.get(keys.trajectory, None) is not None:
        trajectory = flatten_entry(tensordict, keys.trajectory, np.int64, "trajectory_key")
    if keys.mask is not None and (keys.mask != MASK or tensordict.get(MASK, None) is not None):
        mask = flatten_entry(tensordict, keys.mask, np.bool_, "mask_key")
    start, outcome = _as_bytes(count, achieved, desired, next_achieved, next_desired)
    begins = np.arange(count) % (batch[-1] if len(batch) > 1 else count) == 0
    _check_last_steps(tensordict, keys, outcome, done if mask is None else done & mask, names)
    if mask is not None:
        on_device = torch.from_numpy(mask).to(goals.device)
        goals, exact = goals[on_device], exact[on_device]
        start, outcome, done, begins = start[mask], outcome[mask], done[mask], begins[mask]
        trajectory = None if trajectory is None else trajectory[mask]
    row_length = 0 if mask is not None else batch[-1] if len(batch) > 1 else 1
    written = WrittenTransitions(goals, start, outcome, done, begins, row_length, trajectory, mask, names)
    _check_values(exact, written)
    return written


def read_root_goals(
    tensordict: TensorDictBase,
    written: WrittenTransitions,
    keys: HERKeys,
    goal_fn: Callable[[Tensor], Tensor] | None,
    *,
    desired: bool,
    initial: bool,
) -> Tensor | None:
    """Return the desired or the achieved goals at the root of written transitions, or both: ``[n, rows, *goal]``."""
    rows, goals = written.rows_of(tensordict.select(keys.achieved, keys.desired)), []
    if desired:
        goals.append(rows.get(keys.desired))
    if initial:
        goals.append(map_goals(rows.get(keys.achieved), goal_fn).detach().to(written.goals.dtype))
    return torch.stack(goals, dim=1) if goals else None


def map_goals(states: Tensor, goal_fn: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the goals ``[n, *goal]`` that were achieved in states ``[n, *state]``."""
    if goal_fn is None:
        return states
    count = len(states)
    goals = goal_fn(states)
    if not isinstance(goals, Tensor):
        raise TypeError(f"goal_fn must return a tensor with one goal per row, and returned {type(goals).__name__}.")
    if goals.shape[:1] != (count,):
        raise ValueError(f"goal_fn returned the shape {tuple(goals.shape)} for {count} rows: one goal each is needed.")
    return goals


def check_single_steps(tensordict: object) -> None:
    """Check that transitions are a TensorDict, to which entries can be added, of single steps."""
    if not isinstance(tensordict, TensorDictBase):
        raise TypeError(
            f"Hindsight adds entries to transitions, and a {type(tensordict).__name__} takes none: write a TensorDict "
            "(of a tensorclass, its to_tensordict())."
        )
    if tensordict.get("steps_to_next_obs", None) is not None:
        raise ValueError(
            "These are n-step transitions ('steps_to_next_obs' is among their entries), whose rewards were summed "
            "under the original goal. Leave the collector's MultiStep out and let the buffer do it: "
            "Compose(MultiStepTransform(n_steps, gamma), HERTransform(...))."
        )


def _get_goals(tensordict: TensorDictBase, name: str, key: NestedKey, next_key: NestedKey) -> tuple[Tensor, Tensor]:
    """Return the goals at the root and under ``"next"``, which must have one shape and dtype."""
    root, under_next = (get_entry(tensordict, each, f"{name}_goal_key") for each in (key, next_key))
    if root.shape != under_next.shape:
        raise ValueError(
            f"The {name} goal has the shape {tuple(root.shape)} at the root and {tuple(under_next.shape)} under "
            "'next': both must be the same."
        )
    if root.dtype != under_next.dtype:
        raise ValueError(
            f"The {name} goal is {root.dtype} at the root and {under_next.dtype} under 'next': both must be the same. "
            "Consecutive steps are matched by comparing their bytes."
        )
    return root, under_next


def flatten_entry(tensordict: TensorDictBase, key: NestedKey, dtype: Any, argument: str) -> np.ndarray:
    """Return a flag or an id of each transition, ``[n]``."""
    value, count = get_entry(tensordict, key, argument), tensordict.batch_size.numel()
    if value.numel() != count:
        raise ValueError(
            f"The entry {key!r} has the shape {tuple(value.shape)} for {count} transitions: one value each is needed."
        )
    return value.reshape(-1).numpy(force=True).astype(dtype, copy=False)


def _as_bytes(count: int, *entries: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Join the bytes of the first half of entries ``[*batch, ...]``, and of the second half: ``void [n]`` each."""
    rows = [entry.reshape(count, -1) for entry in entries]
    if len({row.dtype for row in rows}) > 1:
        rows = [row.contiguous().view(torch.uint8) for row in rows]
    joined = torch.cat(rows, dim=1).view(torch.uint8).numpy(force=True)  # [n, bytes]
    halves = joined.view(f"V{joined.shape[1] // 2}")  # [n, 2]
    return halves[:, 0], halves[:, 1]


def _check_shapes(
    achieved_shape: torch.Size, desired_shape: torch.Size, dtype: torch.dtype, earlier: Tensor | None
) -> None:
    """Check that achieved goals can replace desired ones of this dtype, and that goals are like earlier ones.

    The shapes are those of one goal; the earlier goals are ``[n, *goal]``.
    """
    if achieved_shape != desired_shape:
        raise ValueError(
            f"One achieved goal has the shape {tuple(achieved_shape)} and one desired goal {tuple(desired_shape)}: "
            "an achieved goal takes the place of a desired one, so they must agree. goal_fn maps one to the other."
        )
    if earlier is None:
        return
    if desired_shape != earlier.shape[1:]:
        raise ValueError(
            f"Goals have the shape {tuple(desired_shape)}, but goal_spec or an earlier write has "
            f"{tuple(earlier.shape[1:])}. goal_spec is the spec of one goal, without the batch of environments."
        )
    if dtype != earlier.dtype:
        raise ValueError(f"Goals are {dtype}, but {earlier.dtype} in goal_spec or an earlier write.")


def _check_values(exact: Tensor, written: WrittenTransitions) -> None:
    """Check that achieved goals keep their values in the dtype of desired goals, and that none is NaN."""
    goals = written.goals
    if exact.is_floating_point() and not goals.is_floating_point() and not torch.equal(goals.to(exact.dtype), exact):
        row = _first_row(goals.to(exact.dtype) != exact)
        raise ValueError(
            f"Achieved goals are {exact.dtype} and desired ones {goals.dtype}: converting the achieved goals, such as "
            f"that of {written.name(row)}, would change them. Nothing was stored: store both in one dtype, or map them "
            "with goal_fn."
        )
    if goals.is_floating_point() and _has_nan(goals):  # as a desired goal it would make losses NaN
        raise ValueError(
            f"The achieved goal of {written.name(_first_row(goals.isnan()))} is NaN. Nothing was stored: look at what "
            "the environment (or goal_fn) returned."
        )


def _has_nan(goals: Tensor) -> bool:
    """Return whether a goal is NaN. NumPy finds out faster, and does not know every dtype."""
    if goals.is_cpu and goals.dtype in (torch.float32, torch.float64):
        return bool(np.isnan(goals.numpy()).any())
    return bool(goals.isnan().any())


def _first_row(where: Tensor) -> int:
    """Return the first row of ``bool [n, ...]`` that has a True."""
    return int(where.reshape(len(where), -1).any(dim=1).nonzero()[0])


def _check_last_steps(
    tensordict: TensorDictBase, keys: HERKeys, outcome: np.ndarray, ends: np.ndarray, names: RowNames
) -> None:
    """Check that the last observations of episodes, at steps ``bool [n]``, were not replaced by zeros."""
    index = ends.nonzero()[0]
    index = index[outcome[index] == np.zeros((), outcome.dtype)]  # both goals are zeros: hardly ever the case
    if not len(index):
        return
    rows = tensordict.reshape(-1)[torch.from_numpy(index)]
    lost = rows.get(keys.desired).reshape(len(index), -1).any(1)
    of_step = {keys.reward, keys.done, keys.terminated, keys.truncated, keys.next_achieved, keys.next_desired}
    observations = {unravel_key(("next", key)) for key in rows.keys(include_nested=True, leaves_only=True)} - of_step
    observed = [value for key in observations if isinstance(value := rows.get(key, None), Tensor)]
    for value in observed:
        lost &= ~value.reshape(len(index), -1).any(1)
    if observed and bool(lost.any()):
        raise ValueError(
            "The final observation of an episode is all zeros, although its desired goal is not "
            f"({names.name(int(index[_first_row(lost)]))}): the environment dropped it. GymEnv(..., num_envs=n) does "
            "that: use SerialEnv or ParallelEnv. Nothing was stored."
        )
