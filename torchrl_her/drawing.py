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


class Drawn(NamedTuple):
    """The goals of copies."""

    goals: Tensor  # [n, copies, *goal]
    steps: Tensor  # int64 [n, copies], the steps that achieved them
    left_out: Tensor | None  # bool [n, copies], which got none, since the strategy left the episode; None for none


def draw_goals(
    strategy: GoalStrategy,
    goals: Tensor,
    episodes: Sequence[int],
    lengths: Sequence[int],
    copies: int,
    reservoir: GoalReservoir | None,
) -> Drawn:
    """Draw goals for the copies of each transition of ended episodes.

    Args:
        strategy: chooses among the goals of the episodes, which it sees as a goal table.
        goals: what the steps achieved, ``[n, *goal]``, episode after episode.
        episodes: the ids of the episodes.
        lengths: how many steps each has.
        copies: how many goals each transition gets.
        reservoir: the goals of past episodes, for a strategy that draws from them; they come first in that table.
    """
    owners, steps, starts, of_length = _lay_out(episodes, lengths, goals.device)
    count, size = len(goals), torch.tensor(len(goals), device=goals.device)
    if reservoir is not None:
        reservoir.add(goals, owners, steps)
        starts, size = starts + reservoir.size, torch.tensor(reservoir.filled, device=goals.device)
        goals = torch.cat([reservoir.goals_like(goals), goals])
        owners = torch.cat([reservoir.episodes, owners])
        steps = torch.cat([reservoir.steps, steps])
    columns = torch.stack([owners[-count:], steps[-count:], starts, of_length])
    episode, step, start, length = columns.repeat_interleave(copies, dim=1)
    choice = Choice(episode, step, start, length, owners, size)
    rows = strategy.select(choice)
    checks.check_rows(rows, step, strategy)
    outside = (rows < start) | (rows >= start + length) if strategy.same_episode else None
    rows = rows % len(goals)
    is_wrong = owners.index_select(0, rows) < 0 if outside is None else outside
    return Drawn(
        goals.index_select(0, rows).unflatten(0, (count, copies)),
        steps.index_select(0, rows).view(count, copies),
        is_wrong.view(count, copies) if is_wrong.any() else None,
    )


def _lay_out(episodes: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the episode, the step, the place of the first step and the length for each step: ``int64 [4, n]``."""
    ends = np.cumsum(lengths)
    columns = np.repeat(np.stack([episodes, ends, ends - lengths, lengths]), lengths, axis=1)
    columns[1] = np.arange(len(columns[1])) - columns[2]
    return torch.from_numpy(columns).to(device)
