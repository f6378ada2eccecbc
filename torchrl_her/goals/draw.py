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
    """Draw goals ``[n, *goal]`` for steps of episodes, ``int64 [n]`` each; return them and which apply, ``bool [n]``.

    Other threads and processes may be writing to the table.
    """
    start, length = table.find(episode)
    rows = _select(strategy, StrategyInput(episode, step, start, length, table.owners, table.size))
    drawn = (torch.rand(step.shape, device=step.device) < her_ratio) & (step < length)
    goals, owners = table.read(rows)
    if strategy.same_episode:
        relabelled = drawn & (owners == episode) & table.start_at(episode, start)
    else:
        drawn = drawn & (table.owners.take((start + step) % table.capacity) == episode)
        relabelled = drawn & (owners > 0)
    table.last_draw = drawn, relabelled
    return goals, relabelled


class DrawnGoals(NamedTuple):
    """The goals of copies."""

    goals: Tensor  # [n, copies, *goal]
    steps: Tensor  # int64 [n, copies], the steps that achieved the goals
    valid: Tensor  # bool [n, copies], whether the strategy selected a goal that a copy may get


def draw_from_episodes(
    strategy: GoalStrategy,
    goals: Tensor,
    episodes: Sequence[int],
    lengths: Sequence[int],
    copies: int,
    reservoir: GoalReservoir | None,
) -> DrawnGoals:
    """Draw goals for the copies of each transition of ended episodes, which achieved ``goals [n, *goal]`` in order.

    The strategy sees the goals as the rows of a table, after those of the reservoir of past goals, if there is one.
    """
    owners, steps, starts, of_length = _columns_of(episodes, lengths, goals.device)
    count, size = len(goals), torch.tensor(len(goals), device=goals.device)
    if reservoir is not None:
        reservoir.add(goals, owners, steps)
        starts, size = starts + reservoir.size, torch.tensor(reservoir.filled, device=goals.device)
        goals = torch.cat([reservoir.goals, goals])
        owners = torch.cat([reservoir.episodes, owners])
        steps = torch.cat([reservoir.steps, steps])
    columns = torch.stack([owners[-count:], steps[-count:], starts, of_length])
    episode, step, start, length = columns.repeat_interleave(copies, dim=1)
    rows = _select(strategy, StrategyInput(episode, step, start, length, owners, size))
    inside = (rows >= start) & (rows < start + length)
    rows = rows % len(goals)
    valid = inside if strategy.same_episode else owners.take(rows) >= 0
    return DrawnGoals(
        goals.index_select(0, rows).unflatten(0, (count, copies)),
        steps.index_select(0, rows).view(count, copies),
        valid.view(count, copies),
    )


def _columns_of(episodes: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return each step's episode, its step in it, and the start and length of the episode: ``int64 [4, n]``."""
    ends = np.cumsum(lengths)
    columns = np.repeat(np.stack([episodes, ends, ends - lengths, lengths]), lengths, axis=1)
    columns[1] = np.arange(len(columns[1])) - columns[2]
    return torch.from_numpy(columns).to(device)


def _select(strategy: GoalStrategy, choice: StrategyInput) -> Tensor:
    """Return the rows that a strategy selects, after a check that there is one per transition: ``int64 [n]``."""
    rows, step = strategy.select(choice), choice.step
    if rows.shape != step.shape or rows.dtype != step.dtype:
        raise ValueError(
            f"{strategy!r} must select one row of the goal table per transition, {step.dtype} {tuple(step.shape)}, "
            f"and returned {rows.dtype} {tuple(rows.shape)}."
        )
    return rows


def check_her_ratio(her_ratio: float) -> float:
    """Check that ``her_ratio`` is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions to each original one it is k / (k + 1)."
        )
    return her_ratio
