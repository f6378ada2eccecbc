"""Finds rewards whose threshold is far smaller than a step of the achieved goal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

ENOUGH_MOVED = 32  # transitions that move the achieved goal are judged together when there are this many
PART = 100  # a goal at this part of a step should be reached
REPEATED = 3  # goals are discrete if their values occur this many times on average

Evaluate = Callable[[TensorDictBase, Tensor | None], Tensor]
Kept = tuple[TensorDictBase, Tensor, Tensor]  # transitions [n], and the goals achieved before and after the step


class ReachCheck:
    """Finds out whether goals at a hundredth of a step from the outcome of a transition are missed.

    Only the transition that achieved a goal itself can then reach it. Transitions that do not move the achieved goal
    are left out. Discrete goals are not judged, because they can be reached exactly.

    Attributes:
        step (float, optional): the median distance by which a step moves the achieved goal, if most goals at a
            hundredth of a step are missed; otherwise None.
        is_over (bool): whether the result is final.
    """

    def __init__(self) -> None:
        self.step: float | None = None
        self.is_over = False
        self._kept: list[Kept] = []

    def check(self, rows: TensorDictBase, root: Tensor, outcomes: Tensor, evaluate: Evaluate) -> None:
        """Keep transitions ``[n]`` until there are enough of them, then judge all of them.

        ``root`` and ``outcomes`` are the goals achieved before and after the step, ``[n, *goal]``. ``evaluate`` returns
        the rewards ``[n, agents]`` of transitions ``[n]``, with other desired goals if they are given.
        """
        if not outcomes.is_floating_point():
            self.is_over = True
            return
        moved = (root != outcomes).reshape(len(rows), -1).any(1)
        kept = self._kept  # other threads may write, and replace the list, at the same time
        if bool(moved.any()):
            kept.append((rows[moved].clone(), root[moved], outcomes[moved]))
        if sum(len(goals) for *_, goals in kept) >= ENOUGH_MOVED:
            self.is_over, self._kept = True, []
            self._judge(list(kept), evaluate)

    def _judge(self, kept: list[Kept], evaluate: Evaluate) -> None:
        root, outcomes = (torch.cat([each[place] for each in kept]).double() for place in (1, 2))
        steps = (outcomes - root).reshape(len(root), -1)
        if _are_discrete(steps, outcomes.view_as(steps)):
            return
        missed, near_missed = 0, 0
        for rows, before, after in kept:
            far, near = evaluate(rows, None), evaluate(rows, after + (before - after) / PART)
            is_missed = is_better(evaluate(rows, after), far)
            missed += int(is_missed.sum())
            near_missed += int((is_missed & ~is_better(near, far)).sum())
        if near_missed > missed / 2:
            self.step = float(steps.norm(dim=1).median())


def is_better(reward: Tensor, other: Tensor) -> Tensor:
    """Return whether a reward is higher than another one by more than a rounding error, ``bool [n]``.

    Both are ``[n, agents]``; one agent is enough.
    """
    return ((reward > other) & ~torch.isclose(reward, other, rtol=1e-6, atol=0.0)).any(1)


def _are_discrete(steps: Tensor, goals: Tensor) -> bool:
    """Return whether goals ``[n, features]`` are on a grid or repeat, given the steps that lead to them."""
    sizes = steps.abs()
    units = sizes.where(sizes > 0, torch.inf).amin(0)  # of the grid, [features]
    parts = sizes / units
    moved = goals[sizes > 0]
    return bool(((parts - parts.round()).abs() < 0.05).all()) or REPEATED * moved.unique().numel() <= moved.numel()
