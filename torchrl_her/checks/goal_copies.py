"""Finds entries that contain a copy of the desired goal, which relabelling does not replace."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import ExcludeTransform, RenameTransform, Transform

from torchrl_her._private import warn_user
from torchrl_her.keys import SELECTION, HERKeys

OWN_GOAL = (SELECTION, "desired_goal")
SEARCHED_ROWS = 64  # rows that are searched for new goals in each write
GOALS_OF_A_COPY = 8  # an entry that equals this many different goals is a copy
ALL_SEARCHED, SEARCHED_EVERY = 32, 8  # the first 32 writes are searched, then one in 8
SEARCHED_WRITES = 1000  # the search ends after this many writes if the goal hardly ever changes


class GoalCopiesCheck:
    """Warns if written entries contain a copy of the desired goal.

    A transition of each goal is kept, until there are eight different goals.

    Args:
        keys (HERKeys): the keys of the entries.
        replaced (frozenset[NestedKey]): entries that relabelling replaces besides the goals.
    """

    def __init__(self, keys: HERKeys, replaced: frozenset[NestedKey]):
        self._keys = keys
        goals = (keys.achieved_goal, keys.desired_goal, OWN_GOAL)
        self._replaced = {*replaced, *goals, *(unravel_key(("next", goal)) for goal in goals)}
        # Transitions with the desired goal, and with the environment's goal, which GoalSelection can replace.
        self._rows: dict[NestedKey, dict[bytes, TensorDictBase]] = {keys.desired_goal: {}, OWN_GOAL: {}}
        self._writes = 0
        self.is_over = False

    def search(self, tensordict: TensorDictBase, later: Iterable[Transform]) -> None:
        """Search transitions ``[*batch]`` for entries that contain the desired goal.

        An environment that concatenates observation and goal stores the goal twice. Relabelling does not replace the
        copy, and a network that reads it learns the original goal with the new goal's reward. Copies are harmless in
        entries that relabelling replaces, and in entries that ``later`` transforms rewrite in every sample.
        """
        self._writes += 1
        self.is_over = self._writes >= SEARCHED_WRITES
        if self._writes > ALL_SEARCHED and self._writes % SEARCHED_EVERY:
            return
        for key, kept in [*self._rows.items()]:
            goals = tensordict.get(key, None)
            if goals is None:
                continue
            for goal, row in _rows_of_goals(goals, tensordict.numel()).items():
                if goal not in kept:
                    kept[goal] = tensordict.reshape(-1)[row].clone().to("cpu")
            if len(kept) < GOALS_OF_A_COPY:
                continue
            del self._rows[key]
            found = LazyStackedTensorDict.lazy_stack([*kept.values()])
            rewritten = _rewritten_by(later) | self._replaced
            entries = found.keys(include_nested=True, leaves_only=True)
            kept_entries = [each for each in entries if not rewritten.issuperset((each, unravel_key(("next", each))))]
            if names := [each for each in kept_entries if _contains(found, each, key)]:
                self.is_over = True
                self._warn(names, len(kept))
                return

    def _warn(self, names: list[NestedKey], goals: int) -> None:
        warn_user(
            f"A copy of the desired goal is in {' and '.join(map(repr, names))} (equal for {goals} different goals, "
            "bit for bit). Relabelling does not replace it, so the copy would keep the original goal. Do not "
            f"concatenate in the environment, and let networks read {self._keys.desired_goal!r} in addition to the "
            "observation. Or add, after the hindsight transform, a transform that rewrites the copy at the root and "
            "under 'next' (CatTensors) or removes it (ExcludeTransform).",
        )


def _rows_of_goals(goals: Tensor, count: int) -> dict[bytes, int]:
    """Return a row of each goal, given the goals ``[*batch, *goal]`` of ``count`` transitions.

    At most 64 rows are searched. They are evenly spaced, with the first and the last one.
    """
    rows = torch.linspace(0, count - 1, min(count, SEARCHED_ROWS)).long()
    values = goals.detach().reshape(count, -1)[rows.to(goals.device)].contiguous().view(torch.uint8).cpu().numpy()
    return {value.tobytes(): row for value, row in zip(values, rows.tolist(), strict=True)}


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


def _contains(rows: TensorDictBase, key: NestedKey, goal: NestedKey) -> bool:
    """Return whether an entry of transitions ``[n]`` contains the goal, at the root and under ``"next"``."""
    places = torch.ones((), dtype=torch.bool)
    for pair in ((key, goal), (("next", key), ("next", goal))):
        try:
            value, goals = (rows.get(unravel_key(each), None) for each in pair)
        except RuntimeError:  # its shape differs from row to row
            return False
        if not isinstance(value, Tensor) or not _can_contain(value.dtype, goals.dtype):
            return False
        stride = math.prod(goals.shape[2:])
        values, goals = (each.reshape(len(rows), -1) for each in (value, goals.to(value.dtype)))
        last = values.shape[1] - goals.shape[1]  # the last position at which the goal can start
        if last < 0:
            return False
        for feature in range(goals.shape[1]):  # one at a time, because [rows, places, goal] can take gigabytes
            column = values[:, feature : feature + last + 1 : stride]  # [rows, places]
            places = places & (column == goals[:, feature, None]).all(dim=0)
            if not places.any():
                return False
    return True


def _can_contain(dtype: torch.dtype, goal: torch.dtype) -> bool:
    """Return whether a concatenation with goals can have this dtype, perhaps after a cast."""
    return torch.promote_types(dtype, goal) == dtype or (dtype.is_floating_point and goal.is_floating_point)
