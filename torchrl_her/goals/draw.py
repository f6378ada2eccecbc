"""Draws goals with a strategy: from the goal table when sampling, from ended episodes when writing."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her.goals.reservoir import GoalReservoir
from torchrl_her.goals.strategies import GoalStrategy, StrategyInput
from torchrl_her.goals.table import GoalTable


def draw_from_table(
    strategy: GoalStrategy, table: GoalTable, her_ratio: float, episode: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw goals for transitions of which some are to be relabelled.

    Args:
        strategy: selects rows of the table.
        table: the goal table, which other threads and processes may be writing to.
        her_ratio: the probability that a transition is relabelled.
        episode: the ids of the transitions' episodes, ``int64 [n]``.
        step: their steps in the episodes, ``int64 [n]``.

    Returns:
        Goals ``[n, *goal]``, and which transitions get them, ``bool [n]``.
    """
    start, length = table.find(episode)
    rows = strategy.select(StrategyInput(episode, step, start, length, table.owners, table.size))
    check_rows(rows, step, strategy)
    drawn = (torch.rand(step.shape, device=step.device) < her_ratio) & (step < length)
    goals, owners = table.read(rows)
    if strategy.same_episode:
        relabelled = drawn & (owners == episode) & table.start_at(episode, start)
    else:
        drawn = drawn & (table.owners_of(start + step) == episode)
        relabelled = drawn & (owners > 0)
    table.last_draw = drawn, relabelled
    return goals, relabelled


class DrawnGoals(NamedTuple):
    """The goals of copies."""

    goals: Tensor  # [n, copies, *goal]
    steps: Tensor  # int64 [n, copies], the steps that achieved the goals
    left_out: Tensor | None  # bool [n, copies], copies without a valid goal; None if all are valid


def draw_from_episodes(
    strategy: GoalStrategy,
    goals: Tensor,
    episodes: Sequence[int],
    lengths: Sequence[int],
    copies: int,
    reservoir: GoalReservoir | None,
) -> DrawnGoals:
    """Draw goals for the copies of each transition of ended episodes.

    Args:
        strategy: selects goals of the episodes, which it sees as the rows of a goal table.
        goals: the goals achieved by the steps, ``[n, *goal]``, episode after episode.
        episodes: the ids of the episodes.
        lengths: the number of steps of each episode.
        copies: how many goals to draw for each transition.
        reservoir: the goals of past episodes, for a strategy that draws from them. They are the first rows.
    """
    owners, steps, starts, of_length = _columns_of(episodes, lengths, goals.device)
    count, size = len(goals), torch.tensor(len(goals), device=goals.device)
    if reservoir is not None:
        reservoir.add(goals, owners, steps)
        starts, size = starts + reservoir.size, torch.tensor(reservoir.filled, device=goals.device)
        goals = torch.cat([reservoir.goals_like(goals), goals])
        owners = torch.cat([reservoir.episodes, owners])
        steps = torch.cat([reservoir.steps, steps])
    columns = torch.stack([owners[-count:], steps[-count:], starts, of_length])
    episode, step, start, length = columns.repeat_interleave(copies, dim=1)
    rows = strategy.select(StrategyInput(episode, step, start, length, owners, size))
    check_rows(rows, step, strategy)
    outside = (rows < start) | (rows >= start + length) if strategy.same_episode else None
    rows = rows % len(goals)
    is_wrong = owners.index_select(0, rows) < 0 if outside is None else outside
    return DrawnGoals(
        goals.index_select(0, rows).unflatten(0, (count, copies)),
        steps.index_select(0, rows).view(count, copies),
        is_wrong.view(count, copies) if is_wrong.any() else None,
    )


def _columns_of(episodes: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return each step's episode, its step in it, and the start and length of the episode: ``int64 [4, n]``."""
    ends = np.cumsum(lengths)
    columns = np.repeat(np.stack([episodes, ends, ends - lengths, lengths]), lengths, axis=1)
    columns[1] = np.arange(len(columns[1])) - columns[2]
    return torch.from_numpy(columns).to(device)


def check_rows(rows: Tensor, steps: Tensor, strategy: object) -> None:
    """Check that a strategy returned one row per transition."""
    if rows.shape != steps.shape or rows.dtype != steps.dtype:
        raise ValueError(
            f"{strategy!r} must select one row of the goal table per transition, {steps.dtype} {tuple(steps.shape)}, "
            f"and returned {rows.dtype} {tuple(rows.shape)}."
        )


def check_her_ratio(her_ratio: float) -> float:
    """Check that ``her_ratio`` is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions to each original one it is k / (k + 1)."
        )
    return her_ratio
