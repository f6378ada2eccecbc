"""Finds entries that contain a copy of the desired goal, which relabelling does not replace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import ExcludeTransform, RenameTransform, Transform

from torchrl_her._private import warn_user
from torchrl_her.keys import SELECTION, HERKeys

OWN_GOAL = (SELECTION, "desired_goal")
SEARCHED_ROWS = 64  # rows that are searched in each write
GOALS_OF_A_COPY = 8  # an entry that equals this many different goals is a copy
SEARCHED_WRITES = 1000  # the search ends after this many writes if the goal hardly ever changes


class GoalCopies(NamedTuple):
    """The entries that contained a goal in all writes so far."""

    places: dict[NestedKey, set[int]] | None = None  # where the goal starts in each entry; None before the first write
    goals: frozenset[bytes] = frozenset()  # the different goals so far
    writes: int = 0


class GoalCopiesCheck:
    """Warns if written entries contain a copy of the desired goal.

    Args:
        keys (HERKeys): the keys of the entries.
        replaced (frozenset[NestedKey]): entries that relabelling replaces besides the goals.
    """

    def __init__(self, keys: HERKeys, replaced: frozenset[NestedKey]):
        self._keys = keys
        self._replaced = replaced
        # Copies of the desired goal, and of the environment's goal, which GoalSelection can replace.
        self._found = {keys.desired_goal: GoalCopies(), OWN_GOAL: GoalCopies()}

    def search(self, tensordict: TensorDictBase, later: Iterable[Transform]) -> None:
        """Search transitions ``[*batch]`` for entries that contain the desired goal.

        An environment that concatenates observation and goal stores the goal twice. Relabelling does not replace the
        copy, and a network that reads it learns the original goal with the new goal's reward. Copies are harmless in
        entries that relabelling replaces, and in entries that ``later`` transforms rewrite in every sample.
        """
        if not self._found:
            return
        rewritten = _rewritten_by(later) | self._replaced
        for goal in (self._keys.achieved_goal, self._keys.desired_goal, OWN_GOAL):
            rewritten |= {goal, unravel_key(("next", goal))}
        for key, copies in list(self._found.items()):
            if tensordict.get(key, None) is None or tensordict.get(unravel_key(("next", key)), None) is None:
                continue
            found = _search(copies, tensordict, key, rewritten)
            self._found[key] = found
            if found.places and len(found.goals) >= GOALS_OF_A_COPY:
                self._found = {}
                self._warn(found)
                return
            if not found.places or found.writes >= SEARCHED_WRITES:
                self._found.pop(key, None)

    def _warn(self, copies: GoalCopies) -> None:
        names = " and ".join(map(repr, copies.places or ()))
        warn_user(
            f"A copy of the desired goal is in {names} (equal for {len(copies.goals)} different goals, bit for bit). "
            "Relabelling does not replace it, so the copy would keep the original goal. Do not concatenate in the "
            f"environment, and let networks read {self._keys.desired_goal!r} in addition to the observation. Or add, "
            "after the hindsight transform, a transform that rewrites the copy at the root and under 'next' "
            "(CatTensors) or removes it (ExcludeTransform).",
        )


def _search(copies: GoalCopies, tensordict: TensorDictBase, goal: NestedKey, rewritten: set[NestedKey]) -> GoalCopies:
    """Return which of the entries contain the goals of these transitions, too."""
    goals = [_rows(tensordict, tensordict.get(each)) for each in (goal, unravel_key(("next", goal)))]
    stride = math.prod(tensordict.get(goal).shape[tensordict.ndim + 1 :])
    places: dict[NestedKey, set[int]] = {}
    for key in copies.places or tensordict.keys(include_nested=True, leaves_only=True):
        pair = (key, unravel_key(("next", key)))
        if not rewritten.issuperset(pair):
            found = _places(tensordict, pair, goals, stride)
            places[key] = found if copies.places is None else found & copies.places[key]
    places = {key: each for key, each in places.items() if each}
    if not places:
        return GoalCopies(places)
    rows = goals[0].contiguous().view(torch.uint8).numpy(force=True)
    return GoalCopies(places, copies.goals.union(row.tobytes() for row in rows), copies.writes + 1)


def _rewritten_by(transforms: Iterable[Transform]) -> set[NestedKey]:
    """Return the entries that transforms write, rename or drop."""
    keys: set[NestedKey] = set()
    for transform in transforms:
        # A transform that reads and writes an entry keeps the goal in it.
        written = set(transform.out_keys or ()) - set(transform.in_keys or ())
        if getattr(transform, "writes_next", False):
            written |= {unravel_key(("next", key)) for key in written}
        keys.update(written)
        if isinstance(transform, RenameTransform):
            keys.update(transform.in_keys)
        if isinstance(transform, ExcludeTransform):
            keys.update(map(unravel_key, transform.excluded_keys))
    return keys


def _rows(tensordict: TensorDictBase, value: Tensor) -> Tensor:
    """Return at most 64 rows of an entry ``[rows, features]``, evenly spaced, with the first and the last."""
    count = tensordict.batch_size.numel()
    rows = min(count, SEARCHED_ROWS)
    index = (torch.arange(rows, device=value.device) * (count - 1)) // max(1, rows - 1)
    return value.reshape(count, -1)[index]


def _places(tensordict: TensorDictBase, pair: Iterable[NestedKey], goals: list[Tensor], stride: int) -> set[int]:
    """Return where the goals ``[rows, goal]`` start in an entry, in all rows, at the root and under ``"next"``."""
    places = torch.ones((), dtype=torch.bool)
    for key, goal in zip(pair, goals, strict=True):
        try:
            value = tensordict.get(key, None)
        except RuntimeError:  # its shape differs from row to row
            return set()
        if not isinstance(value, Tensor) or not _can_contain(value.dtype, goal.dtype):
            return set()
        values, goal = _rows(tensordict, value), goal.to(value.dtype)
        last = values.shape[1] - goal.shape[1]  # the last position at which the goal can start
        if last < 0:
            return set()
        for feature in range(goal.shape[1]):  # one at a time, because [rows, places, goal] can take gigabytes
            column = values[:, feature : feature + last + 1 : stride]  # [rows, places]
            places = places & (column == goal[:, feature, None]).all(dim=0)
            if not places.any():
                return set()
    return set(places.nonzero().flatten().tolist())


def _can_contain(dtype: torch.dtype, goal: torch.dtype) -> bool:
    """Return whether a concatenation with goals can have this dtype, perhaps after a cast."""
    return torch.promote_types(dtype, goal) == dtype or (dtype.is_floating_point and goal.is_floating_point)
