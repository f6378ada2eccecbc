"""Reads what is written to a buffer: its entries, checked, as the episode tracker takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.keys import HERKeys, get_entry


class WrittenTransitions(NamedTuple):
    """The transitions of one write, in the order of writing."""

    goals: Tensor  # [n, *goal], the achieved goals under "next"
    start: np.ndarray  # void [n], the bytes that stand under the goals' keys at the root, achieved and desired
    outcome: np.ndarray  # void [n], the same under "next"
    done: np.ndarray  # bool [n], the transition ends its episode
    begins: np.ndarray  # bool [n], it does not continue the one before it; not used where there are ids
    trajectory: np.ndarray | None  # int64 [n], trajectory ids

    def at(self, index: np.ndarray) -> WrittenTransitions:
        """Return the transitions at an index, or where a mask is True."""
        return WrittenTransitions(
            goals=self.goals[torch.from_numpy(index).to(self.goals.device)],
            start=self.start[index],
            outcome=self.outcome[index],
            done=self.done[index],
            begins=self.begins[index],
            trajectory=None if self.trajectory is None else self.trajectory[index],
        )


def read_written(
    tensordict: TensorDictBase,
    keys: HERKeys,
    goal_fn: Callable[[Tensor], Tensor] | None,
    goal_of_table: Tensor | None,
) -> tuple[WrittenTransitions, np.ndarray | None]:
    """Check transitions ``[*batch]`` and flatten them, in the order of writing.

    Returns:
        What of them counts, and which these are, ``bool [n]``; None for all.
    """
    check_is_tensordict(tensordict)
    check_single_steps(tensordict)
    batch, count = tensordict.batch_size, tensordict.batch_size.numel()
    achieved = get_entry(tensordict, keys.achieved, "achieved_goal_key")
    desired = get_entry(tensordict, keys.desired, "desired_goal_key")
    next_achieved = get_entry(tensordict, keys.next_achieved, "achieved_goal_key")
    next_desired = get_entry(tensordict, keys.next_desired, "desired_goal_key")
    check_same_kind("achieved goal", achieved, next_achieved)
    check_same_kind("desired goal", desired, next_desired)
    goals = next_achieved.reshape(count, *next_achieved.shape[len(batch) :])  # [n, *state]
    goals = map_goals(goals, goal_fn)  # [n, *goal]
    check_goals(goals[0], desired.reshape(count, *desired.shape[len(batch) :])[0], goal_of_table)
    exact = goals.detach()
    goals = exact.to(desired.dtype)

    done = _flatten(tensordict, keys.done, np.bool_, "done_key")
    trajectory = None
    if keys.trajectory is not None and tensordict.get(keys.trajectory, None) is not None:
        trajectory = _flatten(tensordict, keys.trajectory, np.int64, "trajectory_key")
    start, outcome = _as_bytes(count, achieved, desired, next_achieved, next_desired)
    row_length = batch[-1] if len(batch) > 1 else count
    begins = np.arange(count) % row_length == 0
    written = WrittenTransitions(goals, start, outcome, done, begins, trajectory)
    kept = None
    if keys.mask is not None:
        kept = _flatten(tensordict, keys.mask, np.bool_, "mask_key")
        written = written.at(kept)
        exact = exact[torch.from_numpy(kept).to(exact.device)]
    check_exact(exact, written.goals)
    ends = (done if kept is None else done & kept).nonzero()[0]
    ends = ends[~_any(outcome[ends])]  # hardly ever any
    if len(ends):
        check_last_steps(tensordict.reshape(-1), keys, ends)
    check_finite(written.goals)
    return written, kept


def map_goals(states: Tensor, goal_fn: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the goals ``[n, *goal]`` that were achieved in states ``[n, *state]``."""
    return states if goal_fn is None else check_mapped(goal_fn(states), len(states))


def _any(values: np.ndarray) -> np.ndarray:
    """Say which values, ``void [n]``, have a byte that is not 0."""
    return np.any(values.view(np.uint8).reshape(len(values), values.itemsize), axis=1)


def _flatten(tensordict: TensorDictBase, key: NestedKey, dtype: Any, argument: str) -> np.ndarray:
    """Get a flag or an id of each transition, ``[n]``."""
    value = get_entry(tensordict, key, argument)
    check_one_per_transition(key, value, tensordict.batch_size.numel())
    return value.reshape(-1).numpy(force=True).astype(dtype, copy=False)


def _as_bytes(count: int, *entries: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Put entries of ``count`` transitions next to each other: the first half of them, and the other, ``void [n]``."""
    rows = [entry.reshape(count, -1) for entry in entries]
    if len({row.dtype for row in rows}) > 1:
        rows = [row.contiguous().view(torch.uint8) for row in rows]
    joined = torch.cat(rows, dim=1).view(torch.uint8).numpy(force=True)  # [n, bytes]
    halves = joined.view(f"V{joined.shape[1] // 2}")  # [n, 2]
    return halves[:, 0], halves[:, 1]


def check_is_tensordict(written: object) -> None:
    """Check that transitions come as a TensorDict, to which entries can be added."""
    if not isinstance(written, TensorDictBase):
        raise TypeError(
            f"Hindsight adds entries to transitions, and a {type(written).__name__} takes none: write a TensorDict "
            "(of a tensorclass, its to_tensordict())."
        )


def check_mapped(goals: object, count: int) -> Tensor:
    """Check what the user's function returned for so many achieved goals."""
    if not isinstance(goals, Tensor):
        raise TypeError(f"goal_fn must return a tensor with one goal per row, and returned {type(goals).__name__}.")
    if goals.shape[:1] != (count,):
        raise ValueError(f"goal_fn returned the shape {tuple(goals.shape)} for {count} rows: one goal each is needed.")
    return goals


def check_single_steps(tensordict: TensorDictBase) -> None:
    """Check that transitions are single steps, whose reward depends on one outcome."""
    if tensordict.get("steps_to_next_obs", None) is not None:
        raise ValueError(
            "These are n-step transitions ('steps_to_next_obs' is among their entries), whose rewards were summed "
            "under the original goal. Leave the collector's MultiStep out and let the buffer do it: "
            "Compose(MultiStepTransform(n_steps, gamma), HERTransform(...))."
        )


def check_same_kind(name: str, at_root: Tensor, under_next: Tensor) -> None:
    """Check that a goal has one shape and dtype at the root and under ``"next"``."""
    if at_root.shape != under_next.shape:
        raise ValueError(
            f"The {name} has the shape {tuple(at_root.shape)} at the root and {tuple(under_next.shape)} under "
            "'next': both must be the same."
        )
    if at_root.dtype != under_next.dtype:
        raise ValueError(
            f"The {name} is {at_root.dtype} at the root and {under_next.dtype} under 'next': both must be the same, so "
            "that one step is found to follow another."
        )


def check_goals(achieved: Tensor, desired: Tensor, table: Tensor | None) -> None:
    """Check that an achieved goal can stand in for a desired one, and that goals are as they were before."""
    if achieved.shape != desired.shape:
        raise ValueError(
            f"One achieved goal has the shape {tuple(achieved.shape)} and one desired goal {tuple(desired.shape)}: an "
            "achieved goal takes the place of a desired one, so they must agree. goal_fn maps one to the other."
        )
    if table is not None and desired.shape != table.shape:
        raise ValueError(
            f"One goal has the shape {tuple(desired.shape)}, and goal_spec, or the first write, {tuple(table.shape)}. "
            "goal_spec is that of one goal, without the batch of environments."
        )
    if table is not None and desired.dtype != table.dtype:
        raise ValueError(f"Goals are {desired.dtype}, and {table.dtype} in goal_spec, or the first write.")


def check_finite(goals: Tensor) -> None:
    """Check that no achieved goal is NaN: relabelled with it, a transition would spoil the training."""
    if goals.is_floating_point() and bool(goals.isnan().any()):
        row = int(goals.reshape(len(goals), -1).isnan().any(dim=1).nonzero()[0])
        raise ValueError(
            f"The achieved goal of transition {row} of this write is NaN. Nothing was stored: look at what the "
            "environment (or goal_fn) returned."
        )


def check_exact(goals: Tensor, stored: Tensor) -> None:
    """Check that achieved goals ``[n, *goal]`` are the same in the dtype of desired ones, in which they are kept."""
    if goals.is_floating_point() and not stored.is_floating_point() and not torch.equal(stored.to(goals.dtype), goals):
        raise ValueError(
            f"Achieved goals are {goals.dtype} and desired ones {stored.dtype}, in which those of this write would be "
            "others. Nothing was stored: store both in one dtype, or map them with goal_fn."
        )


def check_last_steps(tensordict: TensorDictBase, keys: HERKeys, ends: np.ndarray) -> None:
    """Check that the last steps of episodes led somewhere.

    Args:
        tensordict: written transitions ``[n]``.
        keys: where their entries stand.
        ends: which are last steps and have zeros for both goals under ``"next"``, ``int64``.
    """
    rows = tensordict[torch.from_numpy(ends)]
    lost = rows.get(keys.desired).reshape(len(ends), -1).any(1)
    of_step = {keys.reward, keys.done, keys.terminated, keys.truncated, keys.next_achieved, keys.next_desired}
    observations = {unravel_key(("next", key)) for key in rows.keys(include_nested=True, leaves_only=True)} - of_step
    observed = [value for key in observations if isinstance(value := rows.get(key, None), Tensor)]
    for value in observed:
        lost &= ~value.reshape(len(ends), -1).any(1)
    if observed and bool(lost.any()):
        raise ValueError(
            "After the last step of an episode, all that was observed is zeros, and the desired goal was another: what "
            "was achieved there is lost. GymEnv(..., num_envs=n) does that: use SerialEnv or ParallelEnv. Nothing was "
            "stored."
        )


def check_one_per_transition(key: NestedKey, value: Tensor, count: int) -> None:
    """Check that a flag or an id has one value for each transition."""
    if value.numel() != count:
        raise ValueError(
            f"The entry {key!r} has the shape {tuple(value.shape)} for {count} transitions: one value each is needed."
        )
