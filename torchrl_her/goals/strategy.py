"""The base class of strategies, its input and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey
from torch import Tensor

# The name under which strategies refer to the desired goal, whatever its key is.
DESIRED = "desired_goal"


class StrategyInput(NamedTuple):
    """The input of a strategy: a batch of transitions, their episodes and the goal table.

    All tensors are ``int64``. ``start`` and ``length`` are arbitrary for transitions whose episode is not in the table.
    Such transitions are never relabelled.

    Attributes:
        episode (Tensor): the id of each transition's episode, at least 1, or 0 for padding, ``[batch]``.
        step (Tensor): the step t of each transition in its episode, ``[batch]``.
        start (Tensor): the row of the table at which each episode starts, ``[batch]``. Row ``start + j`` holds the goal
            that step j achieved.
        length (Tensor): the number T of the episode's steps in the table, ``[batch]``.
        owners (Tensor): the id of the episode that achieved the goal in each row of the table, ``[rows]``. It is 0 for
            an empty row and negative for a row with the desired goal of an episode. Read it with
            ``owners.index_select(0, rows % len(owners))``: ``owners.take(rows)`` copies the whole column.
        size (Tensor): the number of rows written so far, from row 0 on, ``[]``. With `HindsightAugmentation`, the
            number of goals in its reservoir, which is in the first rows. If all strategies have ``same_episode=True``,
            there is no reservoir, and ``size`` is the number of transitions of the ended episodes.
        starts (Tensor or None): the start of the episode with id e, at index e modulo the number of rows, ``[rows]``.
            None with `HindsightAugmentation`.
        desired_before (int): the distance in rows from an episode's start back to the row with its desired goal; 0 if
            desired goals are not kept.
        has_gaps (bool): whether some of the first ``size`` rows can be empty or can hold desired goals.
        goal_steps (Mapping[NestedKey, Tensor]): for each entry in ``refers_to``, the step of the transition's own
            episode that achieved the goal drawn for that entry, ``[batch]``; -1 for a goal of another episode.

    Examples:
        An episode with id 1 and two steps, and an episode with id 2 and three steps:

        >>> import torch
        >>> from torchrl_her import Final, StrategyInput
        >>> owners, starts = torch.tensor([1, 1, 2, 2, 2]), torch.tensor([0, 0, 2, 0, 0])
        >>> episode, step = torch.tensor([1, 2, 2]), torch.tensor([0, 0, 1])
        >>> start, length = starts[episode], torch.tensor([2, 3, 3])
        >>> Final().select(StrategyInput(episode, step, start, length, owners, torch.tensor(5), starts))
        tensor([1, 4, 4])
    """

    episode: Tensor
    step: Tensor
    start: Tensor
    length: Tensor
    owners: Tensor
    size: Tensor
    starts: Tensor | None
    desired_before: int = 0
    has_gaps: bool = False
    goal_steps: Mapping[NestedKey, Tensor] = {}


class Selection(NamedTuple):
    """The rows of the goal table that a strategy selects, and the condition that each row must meet.

    A transition whose row does not meet it is not relabelled: a writer changed the row, or the goal left the table.
    """

    rows: Tensor  # int64 [batch], taken modulo the capacity of the table
    is_own: Tensor | bool  # bool [batch], the row must belong to the transition's own episode
    is_desired: Tensor | bool = False  # bool [batch], the row must hold the desired goal of another episode
    # For a mixture: for each member except the last, whether it or an earlier one selected the row, bool [batch] each.
    below: Sequence[Tensor] | None = None

    def member(self) -> Tensor | None:
        """Return the index of the mixture's member that selected each row, ``int64 [batch]``, or None."""
        if self.below is None:
            return None
        return torch.zeros_like(self.rows) + sum((~each).long() for each in self.below)


class GoalStrategy(ABC):
    """Base class of strategies. A strategy selects, for each transition, the row of the goal table with its new goal.

    In the docstrings of strategies, t is the step of the transition, and T is the number of steps of its episode. For a
    running episode, T counts the steps in the goal table. The new goal is the goal that step j achieved.

    Attributes:
        same_episode (bool): whether all goals come from the transition's own episode. If True, a transition whose row
            belongs to another episode is not relabelled. Default: True.
        uses_initial_goal (bool): whether the strategy needs the achieved goal of the state in which the episode began,
            in row ``start - 1``. Each episode then takes one more row of the table. Default: False.
        uses_desired_goals (bool): whether the strategy selects rows with desired goals of other episodes, like
            `PastDesired`. Each episode then takes one more row of the table. Default: False.
        refers_to (tuple[NestedKey, ...]): the entries whose goal steps the strategy reads from ``choice.goal_steps``,
            like `Subgoal`. Default: none.

    Examples:
        A strategy that looks at most ten steps ahead:

        >>> import torch
        >>> from torchrl_her import GoalStrategy, HERTransform, SparseReward, uniform
        >>> class NearFuture(GoalStrategy):
        ...     def select(self, choice):
        ...         end = torch.minimum(choice.step + 10, choice.length)
        ...         return choice.start + uniform(choice.step, end)
        >>> HERTransform(SparseReward(0.05), strategy=NearFuture())
        HERTransform(SparseReward, strategy=NearFuture(), her_ratio=0.8, capacity=1000000)
    """

    same_episode = True
    uses_initial_goal = False
    uses_desired_goals = False
    refers_to: tuple[NestedKey, ...] = ()

    @abstractmethod
    def select(self, choice: StrategyInput) -> Tensor:
        """Select a row of the goal table for each transition.

        Draw random numbers from torch's default generator. Do not read tensor values in Python (``.item()``,
        ``if tensor``), because that synchronizes sampling on a GPU.

        Args:
            choice (StrategyInput): the transitions, their episodes and the goal table.

        Returns:
            Tensor: rows ``int64 [batch]``, which are taken modulo the capacity of the table. The class has an example.
        """

    def draw(self, choice: StrategyInput) -> Selection:
        """Return the selected rows and the condition that they must meet.

        Args:
            choice (StrategyInput): as for `select`.

        Returns:
            Selection: the rows and the condition.

        Raises:
            ValueError: if `select` does not return one row per transition, ``int64 [batch]``.
        """
        rows, step = self.select(choice), choice.step
        if not isinstance(rows, Tensor) or rows.shape != step.shape or rows.dtype != step.dtype:
            got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"{self!r} must select one row of the goal table per transition, {step.dtype} {tuple(step.shape)}, "
                f"but select() returned {got}."
            )
        return Selection(rows, is_own=self.same_episode, is_desired=self.uses_desired_goals)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def uniform(low: Tensor, high: Tensor) -> Tensor:
    """Draw integers uniformly from ``{low, ..., high - 1}``, elementwise, with torch's default generator.

    Args:
        low (Tensor): the smallest integers, ``int64 [*shape]``.
        high (Tensor): the largest integers plus 1, ``int64``, of a shape that broadcasts to ``[*shape]``.

    Returns:
        Tensor: integers ``int64 [*shape]``.

    Examples:
        >>> import torch
        >>> from torchrl_her import uniform
        >>> uniform(torch.tensor([0, 5, 9]), torch.tensor([1, 6, 10]))
        tensor([0, 5, 9])
    """
    share = torch.rand(low.shape, dtype=torch.float64, device=low.device)  # float32 would be biased for long spans
    return low + share.mul_(high - low).to(torch.int64)


def values_at(column: Tensor, rows: Tensor) -> Tensor:
    """Return the values of a column ``[rows]`` of the table at the given rows, from 0 on, of any shape.

    ``column.take(rows)`` copies a column that is not contiguous, and ``column[rows]`` takes several times as long.
    """
    return column.index_select(0, rows.reshape(-1)).view_as(rows)
