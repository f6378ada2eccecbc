"""Draws goals with strategies."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_her.goals.strategies import DESIRED, Goal, GoalStrategy, Mixture, Transitions, select_goals
from torchrl_her.goals.table import GoalTable

# The strategy of each goal entry, in the order in which they are drawn. The first is the desired goal.
Strategies: TypeAlias = Mapping[NestedKey, GoalStrategy]


class Draw(NamedTuple):
    """The goals of transitions (or of the last transitions of sequences), and which transitions are relabelled."""

    table: GoalTable  # the goal table
    episode: Tensor  # int64 [n]
    step: Tensor  # int64 [n]
    to_relabel: Tensor  # bool [n], True with the probability her_ratio
    relabelled: Tensor  # bool [n], True if to_relabel is True and the goals are in the table
    goals: list[Tensor]  # [n, *goal] for each strategy
    goal_episode: Tensor  # int64 [n], the episode that achieved the new desired goal
    goal_step: Tensor  # int64 [n], the step that achieved it
    member: Tensor | None  # int64 [n], the member of a mixture that selected the goal


def draw_goals(strategies: Strategies, table: GoalTable, her_ratio: float, episode: Tensor, step: Tensor) -> Draw:
    """Draw goals from the table, and the transitions to relabel.

    Other threads and processes may write to the table at the same time.

    Args:
        strategies (Strategies): the strategies.
        table (GoalTable): the goal table.
        her_ratio (float): the probability that a transition is relabelled.
        episode (Tensor): the episode id of each transition, ``int64 [n]``.
        step (Tensor): the step of each transition in its episode, ``int64 [n]``.
    """
    found = table.find(episode)
    drawn: dict[NestedKey, Goal] = {}
    member = None
    transitions = Transitions(episode, step, found.length, found.oldest, table, drawn)
    for name, strategy in strategies.items():
        if name == DESIRED and isinstance(strategy, Mixture):
            drawn[name], member = strategy.select_with_member(transitions)
        else:
            drawn[name] = select_goals(strategy, transitions)
    to_relabel = torch.rand(step.shape, device=step.device) < her_ratio
    relabelled = to_relabel & found.is_known & (step < found.length)
    goals = []
    for goal_episode, goal_step in drawn.values():
        if goal_episode is episode:  # most strategies return the episodes of the transitions
            goal, is_in_table = table.read(found, episode, goal_step)
        else:
            goal, is_in_table = table.read_any(goal_episode, goal_step)
        goals.append(goal)
        relabelled = relabelled & is_in_table
    return Draw(table, episode, step, to_relabel, relabelled, goals, *drawn[DESIRED], member)


def draw_for_sequences(
    strategies: Strategies, table: GoalTable, her_ratio: float, episode: Tensor, step: Tensor, length: int
) -> tuple[Draw, Draw]:
    """Draw one goal for each sequence, for its last transition.

    Only transitions of the same episode as the last one get the goal.

    Args:
        strategies (Strategies): as for `draw_goals`.
        table (GoalTable): as for `draw_goals`.
        her_ratio (float): as for `draw_goals`.
        episode (Tensor): the episode ids, ``int64 [sequences * length]``.
        step (Tensor): the steps, ``int64 [sequences * length]``.
        length (int): the number of transitions in each sequence.

    Returns:
        tuple[Draw, Draw]: the draw of the sequences, and the same draw repeated for all their transitions.
    """
    if len(step) % length:
        raise ValueError(
            f"The sampled batch has {len(step)} transitions, which is not a multiple of sequence_length={length}. "
            "Set sequence_length to the slice length of the sampler."
        )
    last = slice(length - 1, None, length)
    drawn = draw_goals(strategies, table, her_ratio, episode[last], step[last])

    def repeated(column: Any) -> Any:
        return None if column is None else column.repeat_interleave(length, dim=0)

    columns = {name: repeated(column) for name, column in drawn._asdict().items() if name not in ("table", "goals")}
    columns["relabelled"] &= columns["episode"] == episode
    return drawn, Draw(table, goals=[repeated(goals) for goals in drawn.goals], **columns)


def steps_to_goal(draw: Draw, episode: Tensor, step: Tensor) -> Tensor:
    """Return the number of steps from transitions to their goals, or -1 if a goal is not ahead, ``int64 [n]``.

    ``episode`` and ``step``, ``int64 [n]`` each, are those of the transitions.
    """
    return torch.where(draw.goal_episode == episode, draw.goal_step - step, -1).clamp_min(-1)


def check_her_ratio(her_ratio: float) -> float:
    """Check that ``her_ratio`` is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions per original transition, pass k / (k + 1)."
        )
    return her_ratio
