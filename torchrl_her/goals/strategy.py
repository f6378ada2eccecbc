"""The base class of strategies, and the transitions for which they select goals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_her.goals.table import GoalTable

# The name under which strategies refer to the desired goal, whatever its key is.
DESIRED = "desired_goal"
# The name of a goal: the episode and the step that achieved it, int64 [n] each.
Goal: TypeAlias = tuple[Tensor, Tensor]


class Transitions(NamedTuple):
    """The transitions for which a strategy selects goals.

    Attributes:
        episode (Tensor): the id of each transition's episode, ``int64 [n]``.
        step (Tensor): the step t of each transition in its episode, from 0 on, ``int64 [n]``.
        length (Tensor): the number T of steps of each episode so far, ``int64 [n]``.
        oldest (Tensor): the first step of each episode that can be in the goal table, ``int64 [n]``.
        table (GoalTable): the goal table, for `any_goal`.
        drawn (Mapping[NestedKey, tuple[Tensor, Tensor]]): the episode and step of the goals that were selected before,
            for each entry in ``refers_to``.
    """

    episode: Tensor
    step: Tensor
    length: Tensor
    oldest: Tensor
    table: GoalTable
    drawn: Mapping[NestedKey, Goal] = {}

    def any_goal(self, draws: int | None = None) -> Goal:
        """Draw goals from the goal table, uniformly.

        Args:
            draws (int, optional): the number of draws for each transition. Default: one, without a dimension.

        Returns:
            tuple[Tensor, Tensor]: the episode and the step that achieved each goal, ``int64 [n]`` or ``[draws, n]``.
        """
        return self.table.any_goal(self.step.shape if draws is None else (draws, *self.step.shape))


class GoalStrategy(ABC):
    """Base class of strategies. A strategy selects the episode and the step whose achieved goal is the new goal.

    In the docstrings of strategies, t is the step of the transition, and T is the number of steps of its episode. For a
    running episode, T counts the steps so far. The new goal is the goal that step j achieved.

    Step -1 of an episode is its desired goal, and step -2 the goal achieved in its first state, if the strategy lists
    them in ``needs``. A transition keeps its goal if the selected goal is not in the goal table.

    Attributes:
        needs (tuple[str, ...]): ``"desired"`` if the strategy selects desired goals of episodes, ``"initial"`` if it
            selects the goals of first states. Default: none.
        refers_to (tuple[NestedKey, ...]): the entries whose goals the strategy reads from ``transitions.drawn``, like
            `Subgoal`. Default: none.

    Examples:
        A strategy that looks at most ten steps ahead:

        >>> import torch
        >>> from torchrl_her import GoalStrategy, HERTransform, SparseReward, uniform
        >>> class NearFuture(GoalStrategy):
        ...     def select(self, transitions):
        ...         end = torch.minimum(transitions.step + 10, transitions.length)
        ...         return transitions.episode, uniform(transitions.step, end)
        >>> HERTransform(SparseReward(0.05), strategy=NearFuture())
        HERTransform(SparseReward, strategy=NearFuture())
    """

    needs: tuple[str, ...] = ()
    refers_to: tuple[NestedKey, ...] = ()

    @abstractmethod
    def select(self, transitions: Transitions) -> Goal:
        """Select a goal for each transition.

        Draw random numbers from torch's default generator. Do not read tensor values in Python (``.item()``,
        ``if tensor``), because that synchronizes sampling on a GPU.

        Args:
            transitions (Transitions): the transitions.

        Returns:
            tuple[Tensor, Tensor]: the episode and the step that achieved each goal, ``int64 [n]`` each.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def select_goals(strategy: GoalStrategy, transitions: Transitions) -> Goal:
    """Return the goals that a strategy selects.

    Raises:
        ValueError: if they are not one episode and one step per transition, ``int64 [n]`` each.
    """
    goal = strategy.select(transitions)
    expected = transitions.step
    is_pair = isinstance(goal, tuple) and len(goal) == 2
    if not is_pair or any(
        not isinstance(each, Tensor) or each.shape != expected.shape or each.dtype != expected.dtype for each in goal
    ):
        parts = goal if isinstance(goal, tuple) else (goal,)
        got = [
            f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in parts
        ]
        raise ValueError(
            f"{strategy!r} must select the episode and the step of one goal per transition, two tensors "
            f"{expected.dtype} {tuple(expected.shape)}, but select() returned {', '.join(got)}."
        )
    return goal


def goals_apart(strategies: Iterable[GoalStrategy]) -> int:
    """Return the ``apart`` of a `GoalTable` for strategies."""
    needs = {kind for strategy in strategies for kind in strategy.needs}
    return 2 if "initial" in needs else 1 if needs else 0


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
