"""Finds entries that contain the desired goal and keep the original one when a transition is relabelled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.keys import HERKeys

ROWS = 64  # of each write
GOALS = 8  # an entry that follows so many different goals contains them on purpose
WRITES = 1000  # the search ends here if the goal hardly ever changes


class GoalCopies(NamedTuple):
    """The entries that contained the desired goal in all writes so far."""

    places: dict[NestedKey, Tensor] | None = None  # where in each entry, bool [places]; None before the first write
    goals: frozenset[bytes] = frozenset()  # the different desired goals so far
    writes: int = 0


def warn_if_goal_is_copied(
    tensordict: TensorDictBase, keys: HERKeys, rewritten: set[NestedKey], copies: GoalCopies
) -> GoalCopies | None:
    """Search one of the first writes for entries that contain the desired goal, and warn when they are certain.

    An environment that concatenates observation and goal stores the goal twice. Relabelling does not replace the copy,
    and a network that reads it learns the original goal with the new goal's reward.

    Args:
        tensordict: written transitions ``[*batch]``.
        keys: the keys of their entries.
        rewritten: entries that transforms write or drop after relabelling, which cannot keep the original goal.
        copies: the result for the previous write.

    Returns:
        What is known after this write, or None if the search is over.
    """
    desired = [_rows(tensordict, tensordict.get(key)) for key in (keys.desired, keys.next_desired)]  # [rows, goal]
    stride = math.prod(tensordict.get(keys.desired).shape[tensordict.ndim + 1 :])
    places: dict[NestedKey, Tensor] = {}
    for key in _leaves(tensordict) if copies.places is None else copies.places:
        if key in (keys.achieved, keys.desired) or {key, _under_next(key)} <= rewritten:
            continue
        found = _places(tensordict, key, desired, stride)
        if copies.places is not None:
            earlier = copies.places[key].to(found.device)
            found = found & earlier if found.shape == earlier.shape else torch.zeros_like(found)
        if bool(found.any()):
            places[key] = found
    goals = copies.goals.union(goal.tobytes() for goal in desired[0].contiguous().view(torch.uint8).numpy(force=True))
    if places and len(goals) >= GOALS:
        names = " and ".join(map(repr, places))
        warnings.warn(
            f"The entry {names} contains the desired goal (it followed {len(goals)} different ones, bit for bit) and "
            f"would keep the original one: relabelling does not replace this copy. Let networks read {keys.desired!r} "
            "besides the observation and do not concatenate in the environment. Or list transforms after the one that "
            "relabels that rewrite the entry at the root and under 'next' (CatTensors) or drop it (ExcludeTransform).",
            stacklevel=2,
        )
    is_over = not places or len(goals) >= GOALS or copies.writes + 1 >= WRITES
    return None if is_over else GoalCopies(places, goals, copies.writes + 1)


def _under_next(key: NestedKey) -> NestedKey:
    return unravel_key(("next", key))


def _leaves(tensordict: TensorDictBase) -> Iterable[NestedKey]:
    """Return the entries that are present at the root and under ``"next"``."""
    keys = dict.fromkeys(tensordict.keys(include_nested=True, leaves_only=True))
    return [key for key in keys if _under_next(key) in keys]


def _rows(tensordict: TensorDictBase, value: Tensor) -> Tensor:
    """Return at most `ROWS` rows of an entry ``[rows, features]``, evenly spaced, with the first and the last."""
    count = tensordict.batch_size.numel()
    rows = min(count, ROWS)
    index = (torch.arange(rows, device=value.device) * (count - 1)) // max(1, rows - 1)
    return value.reshape(count, -1)[index]


def _places(tensordict: TensorDictBase, key: NestedKey, goals: Iterable[Tensor], stride: int) -> Tensor:
    """Return where an entry contains the goal in all rows, at the root and under ``"next"``: ``bool [places]``."""
    places, nowhere = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    for entry, goal in zip((key, _under_next(key)), goals, strict=True):
        try:
            value = tensordict.get(entry)
        except RuntimeError:  # its shape differs from row to row
            return nowhere
        if not isinstance(value, Tensor) or not _can_hold(value.dtype, goal.dtype):
            return nowhere
        values = _rows(tensordict, value)
        if values.shape[1] < goal.shape[1]:
            return nowhere
        goal, places = goal.to(values.dtype), places.to(values.device)
        last = values.shape[1] - goal.shape[1]  # the last place at which the goal can begin
        for feature in range(goal.shape[1]):  # one at a time: [rows, places, goal] can take gigabytes
            column = values[:, feature : feature + last + 1 : stride]  # [rows, places]
            places = places & (column == goal[:, feature, None]).all(dim=0)
            if not places.any():
                return nowhere
    return places


def _can_hold(dtype: torch.dtype, goal: torch.dtype) -> bool:
    """Return whether a concatenation with goals can have this dtype, perhaps after a cast."""
    return torch.promote_types(dtype, goal) == dtype or (dtype.is_floating_point and goal.is_floating_point)
