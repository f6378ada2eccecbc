"""Reads and checks the transitions of a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.keys import HERKeys, get_entry


class WrittenTransitions(NamedTuple):
    """The transitions of one write without padding, in the order of writing."""

    goals: Tensor  # [n, *goal], the achieved goals under "next"
    start: np.ndarray  # void [n], the bytes of the achieved and the desired goal at the root
    outcome: np.ndarray  # void [n], the bytes of both goals under "next"
    done: np.ndarray  # bool [n], the transition ends its episode
    begins: np.ndarray  # bool [n], it is the first of its row of the write; used only without trajectory ids
    trajectory: np.ndarray | None  # int64 [n], trajectory ids
    mask: np.ndarray | None  # bool [rows of the write], False for padding; None without padding


def read_transitions(
    tensordict: TensorDictBase,
    keys: HERKeys,
    goal_fn: Callable[[Tensor], Tensor] | None,
    earlier_goal: Tensor | None,
) -> WrittenTransitions:
    """Check transitions ``[*batch]`` and flatten them to one dimension, in the order of writing.

    Args:
        tensordict: the transitions.
        keys: the keys of their entries.
        goal_fn: maps achieved goals to goals.
        earlier_goal: a goal ``[*goal]`` of an earlier write, whose shape and dtype goals must have.

    Raises:
        KeyError, TypeError, ValueError: if an entry is missing or wrong.
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
    states = next_achieved.reshape(count, *next_achieved.shape[len(batch) :])  # [n, *state]
    exact = map_goals(states, goal_fn).detach()  # [n, *goal]
    check_goals(exact[0], desired.reshape(count, *desired.shape[len(batch) :])[0], earlier_goal)
    goals = exact.to(desired.dtype)

    done = _flatten(tensordict, keys.done, np.bool_, "done_key")
    trajectory = mask = None
    if keys.trajectory is not None and tensordict.get(keys.trajectory, None) is not None:
        trajectory = _flatten(tensordict, keys.trajectory, np.int64, "trajectory_key")
    start, outcome = _as_bytes(count, achieved, desired, next_achieved, next_desired)
    row_length = batch[-1] if len(batch) > 1 else count
    begins = np.arange(count) % row_length == 0
    ends = done
    if keys.mask is not None:
        mask = _flatten(tensordict, keys.mask, np.bool_, "mask_key")
        ends = done & mask
    empty_ends = ends.nonzero()[0]
    empty_ends = empty_ends[~_is_nonzero(outcome[empty_ends])]  # both goals are zeros: hardly ever the case
    if mask is not None:
        on_device = torch.from_numpy(mask).to(goals.device)
        goals, exact = goals[on_device], exact[on_device]
        start, outcome, done, begins = start[mask], outcome[mask], done[mask], begins[mask]
        trajectory = None if trajectory is None else trajectory[mask]
    check_exact(exact, goals)
    if len(empty_ends):
        check_last_steps(tensordict.reshape(-1), keys, empty_ends)
    check_finite(goals)
    return WrittenTransitions(goals, start, outcome, done, begins, trajectory, mask)


def map_goals(states: Tensor, goal_fn: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the goals ``[n, *goal]`` that were achieved in states ``[n, *state]``."""
    return states if goal_fn is None else check_mapped(goal_fn(states), len(states))


def _is_nonzero(values: np.ndarray) -> np.ndarray:
    """Return which values, ``void [n]``, have a nonzero byte: ``bool [n]``."""
    return np.any(values.view(np.uint8).reshape(len(values), values.itemsize), axis=1)


def _flatten(tensordict: TensorDictBase, key: NestedKey, dtype: Any, argument: str) -> np.ndarray:
    """Return a flag or an id of each transition, ``[n]``."""
    value = get_entry(tensordict, key, argument)
    check_one_per_transition(key, value, tensordict.batch_size.numel())
    return value.reshape(-1).numpy(force=True).astype(dtype, copy=False)


def _as_bytes(count: int, *entries: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Join the bytes of the first half of entries ``[*batch, ...]``, and of the second half: ``void [n]`` each."""
    rows = [entry.reshape(count, -1) for entry in entries]
    if len({row.dtype for row in rows}) > 1:
        rows = [row.contiguous().view(torch.uint8) for row in rows]
    joined = torch.cat(rows, dim=1).view(torch.uint8).numpy(force=True)  # [n, bytes]
    halves = joined.view(f"V{joined.shape[1] // 2}")  # [n, 2]
    return halves[:, 0], halves[:, 1]


# Input validation. A write that is refused here has changed nothing.


def check_is_tensordict(written: object) -> None:
    """Check that transitions are a TensorDict, to which entries can be added."""
    if not isinstance(written, TensorDictBase):
        raise TypeError(
            f"Hindsight adds entries to transitions, and a {type(written).__name__} takes none: write a TensorDict "
            "(of a tensorclass, its to_tensordict())."
        )


def check_mapped(goals: object, count: int) -> Tensor:
    """Check that ``goal_fn`` returned one goal for each of ``count`` achieved goals."""
    if not isinstance(goals, Tensor):
        raise TypeError(f"goal_fn must return a tensor with one goal per row, and returned {type(goals).__name__}.")
    if goals.shape[:1] != (count,):
        raise ValueError(f"goal_fn returned the shape {tuple(goals.shape)} for {count} rows: one goal each is needed.")
    return goals


def check_single_steps(tensordict: TensorDictBase) -> None:
    """Check that transitions are single steps, not n-step transitions of the collector."""
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
            f"The {name} is {at_root.dtype} at the root and {under_next.dtype} under 'next': both must be the same. "
            "Consecutive steps are matched by comparing their bytes."
        )


def check_goals(achieved: Tensor, desired: Tensor, earlier: Tensor | None) -> None:
    """Check that achieved goals can replace desired ones, and that goals have the shape and dtype of earlier writes."""
    if achieved.shape != desired.shape:
        raise ValueError(
            f"One achieved goal has the shape {tuple(achieved.shape)} and one desired goal {tuple(desired.shape)}: an "
            "achieved goal takes the place of a desired one, so they must agree. goal_fn maps one to the other."
        )
    if earlier is not None and desired.shape != earlier.shape:
        raise ValueError(
            f"Goals have the shape {tuple(desired.shape)}, but goal_spec or an earlier write has "
            f"{tuple(earlier.shape)}. goal_spec is the spec of one goal, without the batch of environments."
        )
    if earlier is not None and desired.dtype != earlier.dtype:
        raise ValueError(f"Goals are {desired.dtype}, but {earlier.dtype} in goal_spec or an earlier write.")


def check_finite(goals: Tensor) -> None:
    """Check that no achieved goal is NaN: as a desired goal it would make losses NaN."""
    if goals.is_floating_point() and bool(goals.isnan().any()):
        row = int(goals.reshape(len(goals), -1).isnan().any(dim=1).nonzero()[0])
        raise ValueError(
            f"The achieved goal of transition {row} of this write is NaN. Nothing was stored: look at what the "
            "environment (or goal_fn) returned."
        )


def check_exact(goals: Tensor, stored: Tensor) -> None:
    """Check that achieved goals ``[n, *goal]`` keep their values in the dtype of desired goals."""
    if goals.is_floating_point() and not stored.is_floating_point() and not torch.equal(stored.to(goals.dtype), goals):
        raise ValueError(
            f"Achieved goals are {goals.dtype} and desired ones {stored.dtype}: converting the achieved goals of this "
            "write would change them. Nothing was stored: store both in one dtype, or map them with goal_fn."
        )


def check_last_steps(tensordict: TensorDictBase, keys: HERKeys, ends: np.ndarray) -> None:
    """Check that the last observations of episodes were not replaced by zeros.

    Args:
        tensordict: written transitions ``[n]``.
        keys: the keys of their entries.
        ends: indices ``int64`` of last steps whose goals under ``"next"`` are all zeros.
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
            "The final observation of an episode is all zeros, although its desired goal is not: the environment "
            "dropped it. GymEnv(..., num_envs=n) does that: use SerialEnv or ParallelEnv. Nothing was stored."
        )


def check_one_per_transition(key: NestedKey, value: Tensor, count: int) -> None:
    """Check that a flag or an id has one value per transition."""
    if value.numel() != count:
        raise ValueError(
            f"The entry {key!r} has the shape {tuple(value.shape)} for {count} transitions: one value each is needed."
        )
