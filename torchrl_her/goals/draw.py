"""Draws goals with strategies: from the goal table when sampling, from ended episodes when writing."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_her.goals.reservoir import GoalReservoir
from torchrl_her.goals.strategies import GoalStrategy, Selection, StrategyInput, values_at
from torchrl_her.goals.table import GoalTable

# The strategy of each entry that gets a goal; the first is the desired goal. Entries are drawn in this order.
Strategies: TypeAlias = Mapping[NestedKey, GoalStrategy]


class Draw(NamedTuple):
    """The transitions of a sample, or the last ones of its sequences, their goals, and which are relabelled."""

    episode: Tensor  # int64 [n]
    step: Tensor  # int64 [n]
    length: Tensor  # int64 [n], the steps of the episode that were in the table; arbitrary for evicted episodes
    to_relabel: Tensor  # bool [n], chosen with the probability her_ratio
    relabelled: Tensor  # bool [n], of these, transitions whose goals are in the table
    goals: list[Tensor]  # [n, *goal] for each strategy
    # Both are None if they were not asked for: the step of the transition's own episode that achieved the goal, or -1,
    # and the member of a mixture that selected the goal, int64 [n] each.
    goal_step: Tensor | None
    member: Tensor | None


def draw_from_table(
    strategies: Strategies,
    table: GoalTable,
    her_ratio: float,
    episode: Tensor,
    step: Tensor,
    with_steps: bool = False,
) -> Draw:
    """Draw goals for steps of episodes, ``int64 [n]`` each, and the transitions that get them.

    ``with_steps`` asks for `Draw.goal_step` and `Draw.member`. Other threads and processes may be writing to the table.
    """
    version = table.version
    start, length = table.find(episode)
    desired_before = table.before.rows if table.before.desired else 0
    places = episode, step, start, length
    has_gaps = table.has_gaps or torch.compiler.is_compiling()  # a compiled graph is for every table
    choice = StrategyInput(*places, table.owners, table.size, table.starts, desired_before, has_gaps)
    first = next(iter(strategies))
    selections, goal_steps = _select(strategies, choice, {first} if with_steps else (), _step_in_table)
    to_relabel = torch.rand(step.shape, device=step.device) < her_ratio
    goals, owners = table.read(_joined([selection.rows for selection in selections]), version)

    relabelled = to_relabel & (step < length)
    is_any_own = any(selection.is_own is not False for selection in selections)
    is_same_start = table.start_at(episode, start, version) if is_any_own else True
    for selection, owner in zip(selections, _of_strategies(owners, selections), strict=True):
        relabelled &= _is_met(selection, owner, episode, is_same_start)
    if any(selection.is_own is not True for selection in selections):
        relabelled &= values_at(table.owners, (start + step) % table.capacity) == episode
    member = selections[0].member() if with_steps else None
    goals_of = _of_strategies(goals, selections)
    return Draw(episode, step, length, to_relabel, relabelled, goals_of, goal_steps.get(first), member)


def draw_for_sequences(
    draw: Callable[[Tensor, Tensor], Draw], length: int, episode: Tensor, step: Tensor
) -> tuple[Draw, Draw]:
    """Draw goals for sequences of this length, each for its last transition: ``int64 [sequences * length]`` each.

    ``draw`` draws goals for episodes and steps, ``int64 [n]`` each. Return the draw of the sequences, and that of all
    their transitions. Of these, only those of the last one's episode get the goal.
    """
    if len(step) % length:
        raise ValueError(
            f"sequence_length={length} and the sampled batch has {len(step)} transitions: it must be a multiple. "
            "Set it to the slice length of the sampler."
        )
    last = slice(length - 1, None, length)
    drawn = draw(episode[last], step[last])

    def repeated(column: Any) -> Any:
        return None if column is None else column.repeat_interleave(length, dim=0)

    columns = {name: repeated(column) for name, column in drawn._asdict().items() if name != "goals"}
    columns["relabelled"] &= columns["episode"] == episode
    return drawn, Draw(goals=[repeated(goals) for goals in drawn.goals], **columns)


def _select(
    strategies: Strategies,
    choice: StrategyInput,
    wanted: Container[NestedKey],
    step_of: Callable[[Selection, StrategyInput], Tensor],
) -> tuple[list[Selection], dict[NestedKey, Tensor]]:
    """Return the selection of each strategy, and the steps of the goals that are wanted or that strategies refer to.

    ``step_of`` returns the step of the transition's own episode whose outcome a selected row holds, or -1.
    """
    needed = {name for strategy in strategies.values() for name in strategy.refers_to}
    selections: list[Selection] = []
    goal_steps: dict[NestedKey, Tensor] = {}
    for name, strategy in strategies.items():
        selection = strategy.draw(choice)
        if name in needed or name in wanted:
            step = step_of(selection, choice)
            goal_steps = goal_steps | {name: step}
            choice = choice._replace(goal_steps=goal_steps)
            if selection.is_own is not True:  # a row that counts as an own outcome must still be one when it is read
                selection = selection._replace(is_own=(step >= 0) | selection.is_own)
        selections.append(selection)
    return selections, goal_steps


def _step_in_table(selection: Selection, choice: StrategyInput) -> Tensor:
    """Return the step of the own episode whose outcome a selected row holds, or -1: ``int64 [n]``."""
    rows, count = selection.rows, len(choice.owners)
    step = (rows - choice.start) % count
    inside = step < choice.length
    if selection.is_own is not True:
        inside &= values_at(choice.owners, rows % count) == choice.episode
    # The row of a desired goal that has left the table can hold an outcome of this episode.
    if isinstance(selection.is_desired, Tensor):
        inside &= ~selection.is_desired
    elif selection.is_desired:
        inside = torch.zeros_like(inside)
    return torch.where(inside, step, -1)


def _is_met(selection: Selection, owner: Tensor, episode: Tensor, is_same_start: Tensor | bool) -> Tensor:
    """Return whether rows that have these owners, ``int64 [n]``, meet the condition of their selection.

    ``is_same_start`` is whether the rows of the own episode are still where they were, ``bool [n]``.
    """
    if selection.is_own is True:
        met = owner == episode
        return met if is_same_start is True else met & is_same_start
    met = owner > 0
    if selection.is_desired is not False:
        of_another = (owner < 0) & (owner != -episode)
        met = of_another if selection.is_desired is True else torch.where(selection.is_desired, of_another, met)
    if selection.is_own is False:
        return met
    return torch.where(selection.is_own, (owner == episode) & is_same_start, met)


class DrawnGoals(NamedTuple):
    """The goals of copies."""

    goals: Tensor  # [strategies, n, copies, *goal]
    steps: Tensor  # int64 [n, copies], the steps that achieved the desired goals
    ahead: Tensor  # int64 [n, copies], how many steps ahead in the own episode these are; -1 for other goals
    valid: Tensor  # bool [n, copies], whether the strategies selected goals that a copy may get


def draw_from_episodes(
    strategies: Strategies,
    goals: Tensor,
    episodes: Sequence[int],
    lengths: Sequence[int],
    copies: int,
    reservoir: GoalReservoir | None,
) -> DrawnGoals:
    """Draw goals for the copies of each transition of ended episodes, which achieved ``goals [n, *goal]`` in order.

    Strategies see the goals as the rows of a table, after those of the reservoir of past goals, if there is one.
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
    first = next(iter(strategies))
    choice = StrategyInput(episode, step, start, length, owners, size, starts)

    def step_of(selection: Selection, choice: StrategyInput) -> Tensor:
        rows = selection.rows % len(goals)
        return torch.where(owners.take(rows) == episode, steps.take(rows), -1)

    selections, goal_steps = _select(strategies, choice, {first}, step_of)
    rows = _joined([selection.rows for selection in selections]) % len(goals)
    valid = torch.ones_like(step, dtype=torch.bool)
    for selection, owner in zip(selections, owners.take(rows).view(len(selections), -1), strict=True):
        valid &= _is_met(selection, owner, episode, is_same_start=True)
    goal_step = goal_steps[first]
    return DrawnGoals(
        goals.index_select(0, rows).unflatten(0, (len(selections), count, copies)),
        steps.take(rows[: len(step)]).view(count, copies),
        torch.where(goal_step >= step, goal_step - step, -1).view(count, copies),
        valid.view(count, copies),
    )


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _of_strategies(values: Tensor, selections: list[Selection]) -> list[Tensor]:
    """Cut values of the joined rows into those of each selection."""
    return [values] if len(selections) == 1 else list(values.chunk(len(selections)))


def _columns_of(episodes: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return each step's episode, its step in it, and the start and length of the episode: ``int64 [4, n]``."""
    ends = np.cumsum(lengths)
    columns = np.repeat(np.stack([episodes, ends, ends - lengths, lengths]), lengths, axis=1)
    columns[1] = np.arange(len(columns[1])) - columns[2]
    return torch.from_numpy(columns).to(device)


def check_her_ratio(her_ratio: float) -> float:
    """Check that ``her_ratio`` is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions to each original one it is k / (k + 1)."
        )
    return her_ratio
