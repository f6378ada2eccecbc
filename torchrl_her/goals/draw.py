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


class Draw(NamedTuple):
    """The transitions of a sample, or the last ones of its sequences, and which of them are relabelled."""

    episode: Tensor  # int64 [n]
    step: Tensor  # int64 [n]
    length: Tensor  # int64 [n], the steps of the episode that were in the table; arbitrary for evicted episodes
    to_relabel: Tensor  # bool [n], chosen with the probability her_ratio
    relabelled: Tensor  # bool [n], of these, transitions whose goals are in the table


def draw_from_table(
    strategy: GoalStrategy, table: GoalTable, her_ratio: float, episode: Tensor, step: Tensor
) -> tuple[Tensor, Draw]:
    """Draw goals ``[n, *goal]`` for steps of episodes, ``int64 [n]`` each; return them and which transitions get one.

    Other threads and processes may be writing to the table.
    """
    start, length = table.find(episode)
    rows, own = _select(strategy, StrategyInput(episode, step, start, length, table.owners, table.size))
    to_relabel = torch.rand(step.shape, device=step.device) < her_ratio
    goals, owners = table.read(rows)
    relabelled = to_relabel & (step < length)
    if own is not False:
        is_own = (owners == episode) & table.start_at(episode, start)
    if own is True:
        relabelled &= is_own
    else:
        relabelled &= table.owners.take((start + step) % table.capacity) == episode
        relabelled &= owners > 0 if own is False else torch.where(own, is_own, owners > 0)
    return goals, Draw(episode, step, length, to_relabel, relabelled)


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
    rows, own = _select(strategy, StrategyInput(episode, step, start, length, owners, size))
    inside = (rows >= start) & (rows < start + length)
    rows = rows % len(goals)
    valid = inside if own is True else owners.take(rows) >= 0
    if isinstance(own, Tensor):
        valid = torch.where(own, inside, valid)
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


def _select(strategy: GoalStrategy, choice: StrategyInput) -> tuple[Tensor, Tensor | bool]:
    """Return the rows that a strategy selects, ``int64 [n]``, and whether they must be of the transitions' episodes."""
    selected, step = strategy.select(choice), choice.step
    rows, own = selected if isinstance(selected, tuple) else (selected, strategy.same_episode)
    if rows.shape != step.shape or rows.dtype != step.dtype:
        raise ValueError(
            f"{strategy!r} must select one row of the goal table per transition, {step.dtype} {tuple(step.shape)}, "
            f"and returned {rows.dtype} {tuple(rows.shape)}."
        )
    return rows, own


def check_her_ratio(her_ratio: float) -> float:
    """Check that ``her_ratio`` is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions to each original one it is k / (k + 1)."
        )
    return her_ratio
