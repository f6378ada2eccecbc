"""Draws new goals for the transitions of episodes that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her import checks
from torchrl_her.reservoir import GoalReservoir
from torchrl_her.strategies import Choice, GoalStrategy


class Ended(NamedTuple):
    """Episodes that have ended, one after the other, step by step."""

    goals: Tensor  # [n, *goal], what each step achieved
    episodes: Tensor  # int64 [n], ids
    steps: Tensor  # int64 [n], in the episode
    starts: Tensor  # int64 [n], the place of the episode's first step
    lengths: Tensor  # int64 [n], of the episode

    @classmethod
    def of(cls, goals: Tensor, episodes: Sequence[int], lengths: Sequence[int]) -> Ended:
        """Lay out episodes with their ids and lengths, whose steps achieved ``goals [n, *goal]``."""
        ends = np.cumsum(lengths)
        columns = np.repeat(np.stack([episodes, ends - lengths, lengths]), lengths, axis=1)
        columns = np.concatenate([columns, np.arange(len(goals))[None] - columns[1]])
        ids, starts, of_length, steps = torch.from_numpy(columns).to(goals.device)
        return cls(goals, ids, steps, starts, of_length)


class Drawn(NamedTuple):
    """The goals of copies."""

    copies: Tensor  # int64 [m], which copies got one: all, but where a strategy left the episode
    goals: Tensor  # [m, *goal]
    steps: Tensor  # int64 [m], the steps that achieved them


def draw_goals(strategy: GoalStrategy, ended: Ended, copies: int, reservoir: GoalReservoir | None) -> Drawn:
    """Draw goals for ``copies`` copies of each of n transitions: those of all first copies, of all second ones, ...

    Args:
        strategy: chooses among the goals of the episodes, which it sees as a goal table.
        ended: the episodes.
        copies: how many goals each transition gets.
        reservoir: the goals of past episodes, for a strategy that draws from them; they come first in that table.
    """
    goals, owners, steps, first = ended.goals, ended.episodes, ended.steps, 0
    size = len(goals)
    if reservoir is not None:
        reservoir.add(goals, owners, steps)
        first, size = reservoir.size, reservoir.filled
        goals = torch.cat([reservoir.goals_like(goals), goals])
        owners = torch.cat([reservoir.episodes, owners])
        steps = torch.cat([reservoir.steps, steps])
    choice = Choice(
        episode=ended.episodes.repeat(copies),
        step=ended.steps.repeat(copies),
        start=(ended.starts + first).repeat(copies),
        length=ended.lengths.repeat(copies),
        owners=owners,
        size=torch.tensor(size, device=goals.device),
    )
    rows = strategy.select(choice)
    checks.check_rows(rows, choice.step, strategy)
    rows = rows % len(goals)
    is_right = owners[rows] == choice.episode if strategy.same_episode else owners[rows] > 0
    if not is_right.all():  # a strategy of the user's left the episode
        rows = rows[is_right]
    return Drawn(is_right.nonzero().squeeze(-1), goals[rows], steps[rows])
