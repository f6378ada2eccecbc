"""Draws goals with strategies: from the goal table when sampling, and from ended episodes when writing."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_her.goals.reservoir import GoalReservoir
from torchrl_her.goals.strategy import GoalStrategy, Selection, StrategyInput, values_at
from torchrl_her.goals.table import GoalTable

# The strategy of each goal entry, in the order in which they are drawn. The first is the desired goal.
Strategies: TypeAlias = Mapping[NestedKey, GoalStrategy]


class Draw(NamedTuple):
    """The goals of a sample's transitions (or of the last transitions of its sequences), and which are relabelled."""

    episode: Tensor  # int64 [n]
    step: Tensor  # int64 [n]
    length: Tensor  # int64 [n], the number of the episode's steps in the table; arbitrary for evicted episodes
    to_relabel: Tensor  # bool [n], True with the probability her_ratio
    relabelled: Tensor  # bool [n], True if to_relabel is True and the goals are in the table
    goals: list[Tensor]  # [n, *goal] for each strategy
    # The last two are None unless requested.
    goal_step: Tensor | None  # int64 [n], the step of the transition's own episode that achieved the goal, or -1
    member: Tensor | None  # int64 [n], the member of a mixture that selected the goal


def draw_from_table(
    strategies: Strategies,
    table: GoalTable,
    her_ratio: float,
    episode: Tensor,
    step: Tensor,
    with_steps: bool = False,
) -> Draw:
    """Draw goals from the table, and the transitions to relabel.

    Other threads and processes may write to the table at the same time.

    Args:
        strategies (Strategies): the strategies.
        table (GoalTable): the goal table.
        her_ratio (float): the probability that a transition is relabelled.
        episode (Tensor): the episode id of each transition, ``int64 [n]``.
        step (Tensor): the step of each transition in its episode, ``int64 [n]``.
        with_steps (bool): whether `Draw.goal_step` and `Draw.member` are computed. Default: False.
    """
    version = table.version
    start, length = table.find(episode)
    desired_before = table.rows_before.rows if table.rows_before.desired else 0
    places = episode, step, start, length
    has_gaps = table.has_gaps or torch.compiler.is_compiling()  # a compiled graph must work for every table
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
    """Draw one goal for each sequence, for its last transition.

    Only transitions of the same episode as the last one get the goal.

    Args:
        draw (Callable[[Tensor, Tensor], Draw]): draws goals for episode ids and steps, ``int64 [n]`` each.
        length (int): the number of transitions in each sequence.
        episode (Tensor): the episode ids, ``int64 [sequences * length]``.
        step (Tensor): the steps, ``int64 [sequences * length]``.

    Returns:
        tuple[Draw, Draw]: the draw of the sequences, and the same draw repeated for all their transitions.
    """
    if len(step) % length:
        raise ValueError(
            f"The sampled batch has {len(step)} transitions, which is not a multiple of sequence_length={length}. "
            "Set sequence_length to the slice length of the sampler."
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
    """Return the selection of each strategy, and the goal steps of the entries in ``wanted`` or in any ``refers_to``.

    ``step_of`` returns the step of the transition's own episode that achieved the goal in each selected row, or -1.
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
            # If the row held a goal of the transition's own episode, it must still hold one when it is read.
            if selection.is_own is not True:
                selection = selection._replace(is_own=(step >= 0) | selection.is_own)
        selections.append(selection)
    return selections, goal_steps


def _step_in_table(selection: Selection, choice: StrategyInput) -> Tensor:
    """Return the step of the transition's own episode that achieved each selected goal, or -1: ``int64 [n]``."""
    rows, count = selection.rows, len(choice.owners)
    step = (rows - choice.start) % count
    inside = step < choice.length
    if selection.is_own is not True:
        inside &= values_at(choice.owners, rows % count) == choice.episode
    # If a desired goal has left the table, its row can hold an achieved goal of this episode.
    if isinstance(selection.is_desired, Tensor):
        inside &= ~selection.is_desired
    elif selection.is_desired:
        inside = torch.zeros_like(inside)
    return torch.where(inside, step, -1)


def _is_met(selection: Selection, owner: Tensor, episode: Tensor, is_same_start: Tensor | bool) -> Tensor:
    """Return whether the selected rows, whose owners are ``int64 [n]``, meet the condition of their selection.

    ``is_same_start``, ``bool [n]``, is whether the transition's own episode still starts at the same row.
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
    """The goals of the copies of transitions."""

    goals: Tensor  # [strategies, n, copies, *goal]
    steps: Tensor  # int64 [n, copies], the steps that achieved the desired goals
    ahead: Tensor  # int64 [n, copies], the number of steps to the goal; -1 if no later step of the episode achieved it
    valid: Tensor  # bool [n, copies], whether the selected goals are valid; other copies are not stored


def draw_from_episodes(
    strategies: Strategies,
    goals: Tensor,
    episodes: Sequence[int],
    lengths: Sequence[int],
    copies: int,
    reservoir: GoalReservoir | None,
) -> DrawnGoals:
    """Draw goals for the copies of all transitions of ended episodes.

    The rows of the table that strategies see are the goals of the reservoir, if any, followed by ``goals``.

    Args:
        strategies (Strategies): the strategies.
        goals (Tensor): the achieved goals of all transitions, ``[n, *goal]``, episode after episode.
        episodes (Sequence[int]): the ids of the episodes.
        lengths (Sequence[int]): the number of steps of each episode.
        copies (int): the number of copies of each transition.
        reservoir (GoalReservoir or None): past goals, to which ``goals`` are added.
    """
    columns = _columns_of(episodes, lengths, goals.device)
    episode, step, start, length = columns.repeat_interleave(copies, dim=1)
    owners, steps, count, size = columns[0], columns[1], len(goals), len(goals)
    if reservoir is not None:
        reservoir.add(goals, owners, steps)
        start, size = start + reservoir.size, reservoir.filled
        goals = torch.cat([reservoir.goals, goals])
        owners = torch.cat([reservoir.episodes, owners])
        steps = torch.cat([reservoir.steps, steps])
    first = next(iter(strategies))
    choice = StrategyInput(episode, step, start, length, owners, torch.tensor(size, device=goals.device), starts=None)

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
    """Split the values of the joined rows by selection."""
    return [values] if len(selections) == 1 else list(values.chunk(len(selections)))


def _columns_of(episodes: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the episode id, the step, and the start and length of the episode of each step, ``int64 [4, n]``."""
    ends = np.cumsum(lengths)
    columns = np.repeat(np.stack([episodes, ends, ends - lengths, lengths]), lengths, axis=1)
    columns[1] = np.arange(len(columns[1])) - columns[2]
    return torch.from_numpy(columns).to(device)


def check_her_ratio(her_ratio: float) -> float:
    """Check that ``her_ratio`` is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions per original transition, pass k / (k + 1)."
        )
    return her_ratio
