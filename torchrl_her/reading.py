"""Reads what is written to a buffer: its entries, checked, as the episode tracker takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her import checks
from torchrl_her.episodes import Written
from torchrl_her.keys import Keys


def read_written(
    tensordict: TensorDictBase,
    keys: Keys,
    goal_fn: Callable[[Tensor], Tensor] | None,
    goal_of_table: Tensor | None,
) -> tuple[Written, np.ndarray | None]:
    """Check transitions ``[*batch]`` and flatten them, in the order of writing.

    Returns:
        What of them counts, and which these are, ``bool [n]``; None for all.
    """
    checks.check_is_tensordict(tensordict)
    checks.check_single_steps(tensordict)
    batch, count = tensordict.batch_size, tensordict.batch_size.numel()
    achieved = checks.get_entry(tensordict, keys.achieved, "achieved_goal_key")
    desired = checks.get_entry(tensordict, keys.desired, "desired_goal_key")
    next_achieved = checks.get_entry(tensordict, keys.next_achieved, "achieved_goal_key")
    next_desired = checks.get_entry(tensordict, keys.next_desired, "desired_goal_key")
    checks.check_same_kind("achieved goal", achieved, next_achieved)
    checks.check_same_kind("desired goal", desired, next_desired)
    goals = next_achieved.reshape(count, *next_achieved.shape[len(batch) :])  # [n, *state]
    goals = map_goals(goals, goal_fn)  # [n, *goal]
    checks.check_goals(goals[0], desired.reshape(count, *desired.shape[len(batch) :])[0], goal_of_table)
    exact = goals.detach()
    goals = exact.to(desired.dtype)

    done = _flatten(tensordict, keys.done, np.bool_, "done_key")
    trajectory = None
    if keys.trajectory is not None and tensordict.get(keys.trajectory, None) is not None:
        trajectory = _flatten(tensordict, keys.trajectory, np.int64, "trajectory_key")
    start, outcome = _as_bytes(count, achieved, desired, next_achieved, next_desired)
    row_length = batch[-1] if len(batch) > 1 else count
    begins = np.arange(count) % row_length == 0
    written = Written(goals, start, outcome, done, begins, trajectory)
    kept = None
    if keys.mask is not None:
        kept = _flatten(tensordict, keys.mask, np.bool_, "mask_key")
        written = written.at(kept)
        exact = exact[torch.from_numpy(kept).to(exact.device)]
    checks.check_exact(exact, written.goals)
    ends = (done if kept is None else done & kept).nonzero()[0]
    ends = ends[~_any(outcome[ends])]  # hardly ever any
    if len(ends):
        checks.check_last_steps(tensordict.reshape(-1), keys, ends)
    checks.check_finite(written.goals)
    return written, kept


def map_goals(states: Tensor, goal_fn: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the goals ``[n, *goal]`` that were achieved in states ``[n, *state]``."""
    return states if goal_fn is None else checks.check_mapped(goal_fn(states), len(states))


def _any(values: np.ndarray) -> np.ndarray:
    """Say which values, ``void [n]``, have a byte that is not 0."""
    return np.any(values.view(np.uint8).reshape(len(values), values.itemsize), axis=1)


def _flatten(tensordict: TensorDictBase, key: NestedKey, dtype: Any, argument: str) -> np.ndarray:
    """Get a flag or an id of each transition, ``[n]``."""
    value = checks.get_entry(tensordict, key, argument)
    checks.check_one_per_transition(key, value, tensordict.batch_size.numel())
    return value.reshape(-1).numpy(force=True).astype(dtype, copy=False)


def _as_bytes(count: int, *entries: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Put entries of ``count`` transitions next to each other: the first half of them, and the other, ``void [n]``."""
    rows = [entry.reshape(count, -1) for entry in entries]
    if len({row.dtype for row in rows}) > 1:
        rows = [row.contiguous().view(torch.uint8) for row in rows]
    joined = torch.cat(rows, dim=1).view(torch.uint8).numpy(force=True)  # [n, bytes]
    halves = joined.view(f"V{joined.shape[1] // 2}")  # [n, 2]
    return halves[:, 0], halves[:, 1]
