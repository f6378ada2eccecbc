"""Looks for entries that contain the desired goal, and would keep the original one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

ROWS = 64  # of a write are looked at
GOALS = 8  # an entry that followed the desired goal through so many of them did not do so by chance
WRITES = 10_000  # after so many, with a goal that hardly ever changes, nothing is looked for any more


class GoalCopies:
    """The entries that contained the desired goal, bit for bit, in all that was written so far.

    An environment that concatenates goal and observation writes the goal a second time. Relabelling does not
    replace it there, and a network that reads it would learn the original goal with the new one's reward.

    Only an entry that contains the goal in the first write is looked at again. One that does so by chance
    (both are zero, say) is told apart when the goal changes; one that still does after ``GOALS`` goals is a copy.
    """

    def __init__(self) -> None:
        self.undecided = True
        # Where in an entry the goal stands, bool [places]; None before the first write.
        self._suspects: dict[NestedKey, Tensor] | None = None
        self._goals: set[bytes] = set()
        self._writes = 0

    def check(
        self, tensordict: TensorDictBase, achieved: NestedKey, desired: NestedKey, written_after: set[NestedKey]
    ) -> None:
        """Look at written transitions ``[*batch]``.

        Args:
            tensordict: the transitions.
            achieved: where the achieved goal stands at the root.
            desired: where the desired goal stands at the root.
            written_after: the entries that sampling writes anew after relabelling, or takes away.

        Raises:
            ValueError: if an entry is a copy of the desired goal, or contains one.
        """
        goals = [_rows(tensordict, tensordict.get(key)) for key in (desired, _under_next(desired))]  # [rows, goal]
        stride = math.prod(tensordict.get(desired).shape[tensordict.ndim + 1 :])
        suspects, earlier = {}, self._suspects  # which another thread may replace
        for key in _leaves(tensordict) if earlier is None else earlier:
            if key in (achieved, desired) or {key, _under_next(key)} <= written_after:
                continue
            places = _places(tensordict, key, goals, stride)
            if earlier is not None:
                before = earlier[key].to(places.device)
                places = places & before if places.shape == before.shape else torch.zeros_like(places)
            if bool(places.any()):
                suspects[key] = places
        self._writes += 1
        self._suspects, self.undecided = suspects, bool(suspects) and self._writes < WRITES
        for key in suspects:
            self._goals.update(goal.tobytes() for goal in goals[0].contiguous().view(torch.uint8).numpy(force=True))
            if len(self._goals) >= GOALS:
                raise ValueError(
                    f"The entry {key!r} contains the desired goal (it followed {len(self._goals)} different ones, bit "
                    "for bit) and would keep the original one where HERTransform replaces it. Let the networks read "
                    f"{desired!r} besides the observation and do not concatenate in the environment; or list "
                    f"transforms after HERTransform that write {key!r} and {_under_next(key)!r} anew (CatTensors) or "
                    "take them away (ExcludeTransform)."
                )


def _under_next(key: NestedKey) -> NestedKey:
    return unravel_key(("next", key))


def _leaves(tensordict: TensorDictBase) -> Iterable[NestedKey]:
    """The entries that stand at the root and under ``"next"``."""
    keys = dict.fromkeys(tensordict.keys(include_nested=True, leaves_only=True))
    return [key for key in keys if _under_next(key) in keys]


def _rows(tensordict: TensorDictBase, value: Tensor) -> Tensor:
    """Return some of the rows of an entry, ``[rows, features]``."""
    count = tensordict.batch_size.numel()
    rows = min(count, ROWS)
    index = (torch.arange(rows, device=value.device) * (count - 1)) // max(1, rows - 1)  # with the first and the last
    return value.reshape(count, -1)[index]


def _places(tensordict: TensorDictBase, key: NestedKey, goals: Iterable[Tensor], stride: int) -> Tensor:
    """Tell at which places of an entry, bool [places], the goal stands in all rows, at the root and under "next"."""
    places, nowhere = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    for where, goal in zip((key, _under_next(key)), goals, strict=True):
        try:
            value = tensordict.get(where)
        except RuntimeError:  # one of another shape in each row
            return nowhere
        if not isinstance(value, Tensor) or not _can_hold(value.dtype, goal.dtype):
            return nowhere
        values = _rows(tensordict, value)
        if values.shape[1] < goal.shape[1]:
            return nowhere
        goal, places = goal.to(values.dtype), places.to(values.device)
        last = values.shape[1] - goal.shape[1]  # where the goal can begin at most
        for feature in range(goal.shape[1]):  # one after the other: [rows, places, goal] can be gigabytes
            column = values[:, feature : feature + last + 1 : stride]  # [rows, places]
            places = places & (column == goal[:, feature, None]).all(dim=0)
            if not places.any():
                return nowhere
    return places


def _can_hold(dtype: torch.dtype, goal: torch.dtype) -> bool:
    """Whether a concatenation with goals has this dtype, or had it before a cast."""
    return torch.promote_types(dtype, goal) == dtype or (dtype.is_floating_point and goal.is_floating_point)
