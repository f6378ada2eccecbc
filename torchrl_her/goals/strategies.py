"""Which goal a transition is relabelled with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, unravel_key
from torch import Tensor

# The name of the desired goal for strategies that refer to the goal drawn for it, whatever its key is.
DESIRED = "desired_goal"


class StrategyInput(NamedTuple):
    """The input of a strategy: a batch of transitions, their episodes and the goal table.

    All tensors are ``int64``. ``start`` and ``length`` are arbitrary for transitions that cannot be relabelled because
    their episode is not in the table (yet or any more); the rows selected for them are not used.
    """

    episode: Tensor  # [batch], the id of each transition's episode, at least 1
    step: Tensor  # [batch], the transition's step t in its episode
    start: Tensor  # [batch], the row of the table at which the episode starts; step j is at start + j
    length: Tensor  # [batch], how many steps of the episode are in the table
    # [rows], the episode in which the goal of each row was achieved; 0 for an empty row, and minus the episode for a
    # row that holds the desired goal of an episode. Index it with owners[rows]; owners.take(rows) copies the column.
    owners: Tensor
    size: Tensor  # [], how many rows of the table are filled, from row 0 on
    starts: Tensor  # [rows], the row at which the episode with id e starts is at index e modulo the number of rows
    desired_before: int = 0  # how many rows before its start the desired goal of an episode is; 0 if it is not kept
    has_gaps: bool = False  # whether some of the filled rows can be empty again, or hold desired goals
    # The step of the transition's own episode whose goal was drawn for each earlier entry, [batch]; -1 if the goal is
    # not of this episode. It has the entries that strategies name in `refers_to`.
    goal_steps: Mapping[NestedKey, Tensor] = {}


class Selection(NamedTuple):
    """The rows of the goal table that a strategy selects, and the condition that each has to meet.

    A transition is not relabelled if its row belongs to another episode than it should (a writer works at the same
    time, or the goal has left the table).
    """

    rows: Tensor  # int64 [batch], taken modulo the capacity of the table
    is_own: Tensor | bool  # bool [batch], the row must belong to the transition's own episode
    is_desired: Tensor | bool = False  # bool [batch], the row must hold the desired goal of another episode
    # Of a mixture: for each member but the last, whether it or one before it selected the row, bool [batch] each.
    below: Sequence[Tensor] | None = None

    def member(self) -> Tensor | None:
        """Return which member of a mixture selected each row, ``int64 [batch]``."""
        if self.below is None:
            return None
        return torch.zeros_like(self.rows) + sum((~each).long() for each in self.below)


class GoalStrategy(ABC):
    """Selects for each transition the row of the goal table that holds its new goal.

    Examples:
        A strategy that looks at most ten steps ahead:

        >>> import torch
        >>> from torchrl_her import GoalStrategy, uniform
        >>> class NearFuture(GoalStrategy):
        ...     def select(self, choice):
        ...         end = torch.minimum(choice.step + 10, choice.length)
        ...         return choice.start + uniform(choice.step, end)

    Attributes:
        same_episode (bool): whether all goals come from the transition's own episode. If True, a transition whose row
            belongs to another episode is not relabelled. Default: True.
        uses_initial_goal (bool): whether row ``start - 1`` holds the achieved goal of the state in which the episode
            began. Each episode then takes one more row of the table. Default: False.
        uses_desired_goals (bool): whether the selected rows hold desired goals of other episodes, as those of
            `PastDesired` do. Each episode then takes one more row of the table. Default: False.
        refers_to (tuple): the entries whose goals the strategy reads from ``choice.goal_steps``, as `Subgoal` does.
            Default: none.
    """

    same_episode = True
    uses_initial_goal = False
    uses_desired_goals = False
    refers_to: tuple[NestedKey, ...] = ()

    @abstractmethod
    def select(self, choice: StrategyInput) -> Tensor:
        """Return rows ``int64 [batch]`` of the goal table, which are taken modulo its capacity.

        Draw from torch's default random generator. Do not read tensor values in Python (``.item()``, ``if tensor``):
        that synchronises sampling on a GPU.
        """

    def draw(self, choice: StrategyInput) -> Selection:
        """Return the selected rows with the condition that they have to meet."""
        rows, step = self.select(choice), choice.step
        if not isinstance(rows, Tensor) or rows.shape != step.shape or rows.dtype != step.dtype:
            got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"{self!r} must select one row of the goal table per transition, {step.dtype} {tuple(step.shape)}, "
                f"and returned {got}."
            )
        return Selection(rows, is_own=self.same_episode, is_desired=self.uses_desired_goals)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Current(GoalStrategy):
    """The transition's own outcome: j = t."""

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        return choice.start + choice.step


class Future(GoalStrategy):
    """A step from the transition's own on: j uniform on {t, ..., T-1}.

    Keyword Args:
        own (bool): whether the transition's own outcome can be drawn. If False, j is uniform on {t+1, ..., T-1}, and
            the last transition of an episode keeps its own outcome. Default: True.
    """

    def __init__(self, *, own: bool = True):
        self.own = own

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        first = choice.step if self.own else torch.minimum(choice.step + 1, choice.length - 1)
        return choice.start + uniform(first, choice.length)

    def __repr__(self) -> str:
        return "Future()" if self.own else "Future(own=False)"


class Geometric(GoalStrategy):
    """A geometrically distributed number of steps ahead: j = min(t + K, T-1), P(K = k) = (1-γ) γ^(k-1) for k ≥ 1.

    The distance to a state that is drawn from the discounted future, as in OGBench (Park et al. 2025,
    arXiv:2410.20092).

    Args:
        discount (float): γ, at least 0 and less than 1. The mean of K is 1 / (1-γ).
    """

    def __init__(self, discount: float):
        self.discount = _check_discount(discount)

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        share = torch.rand(choice.step.shape, dtype=torch.float64, device=choice.step.device)
        scale = 1 / math.log(self.discount) if self.discount else 0.0
        ahead = share.neg_().log1p_().mul_(scale).to(torch.int64) + 1  # P(K > k) = γ^k
        return choice.start + torch.minimum(choice.step + ahead, choice.length - 1)

    def __repr__(self) -> str:
        return f"Geometric({self.discount!r})"


class Final(GoalStrategy):
    """The last step of the episode: j = T-1."""

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        return choice.start + choice.length - 1


class Episode(GoalStrategy):
    """Any step of the episode: j uniform on {0, ..., T-1}."""

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        return choice.start + uniform(torch.zeros_like(choice.step), choice.length)


class Random(GoalStrategy):
    """Any step of any episode in the table, uniformly."""

    same_episode = False

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        if not choice.has_gaps:
            return uniform(torch.zeros_like(choice.step), choice.size)
        rows = _random_rows(choice)
        return _first_that_meets(values_at(choice.owners, rows) > 0, rows)


class PastDesired(GoalStrategy):
    """The desired goal of another episode: that of an episode whose step is drawn uniformly from the table.

    So an episode is drawn with a probability proportional to its length. If the desired goal changes within an episode,
    the first one counts. A transition keeps its goal if 32 draws find no other episode, as with a single one.
    """

    same_episode = False
    uses_desired_goals = True

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        rows = _random_rows(choice)
        owners = values_at(choice.owners, rows)  # [32, batch]
        episode = _first_that_meets((owners > 0) & (owners != choice.episode), owners)
        return choice.starts.take(episode.abs() % len(choice.starts)) - choice.desired_before


class Subgoal(GoalStrategy):
    """The outcome some steps ahead, or the goal itself if that is nearer: j = min(t + steps, T-1, g).

    g is the step whose outcome is the goal that was drawn for another entry, if it is t or later and of the same
    episode; otherwise j = min(t + steps, T-1). These are the subgoals of HIQL (Park et al. 2023, arXiv:2307.11949).

    Args:
        steps (int): how many steps ahead the subgoal is, at least 1.

    Keyword Args:
        limit (NestedKey, optional): the entry of the goal that limits the subgoal: ``"desired_goal"`` (default) for the
            desired goal, whatever its key is, the key of an extra goal that is listed before, or None for no limit. As
            the desired goal itself, a subgoal has no limit.
    """

    def __init__(self, steps: int, *, limit: NestedKey | None = DESIRED):
        self.steps = _check_steps(steps)
        self.limit = None if limit is None else unravel_key(limit)
        self.refers_to = () if self.limit is None else (self.limit,)

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        step = torch.minimum(choice.step + self.steps, choice.length - 1)
        goal_step = None if self.limit is None else choice.goal_steps.get(self.limit)
        if goal_step is not None:
            step = torch.where(goal_step >= choice.step, torch.minimum(step, goal_step), step)
        return choice.start + step

    def __repr__(self) -> str:
        return f"Subgoal({self.steps}{'' if self.limit == DESIRED else f', limit={self.limit!r}'})"


STRATEGIES: dict[str, type[GoalStrategy]] = {
    "current": Current,
    "future": Future,
    "final": Final,
    "episode": Episode,
    "random": Random,
    "past_desired": PastDesired,
}


def make_strategy(strategy: str | GoalStrategy) -> GoalStrategy:
    """Return the strategy with a name, or the strategy itself."""
    if isinstance(strategy, GoalStrategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(f"strategy must be a name or a GoalStrategy, got {strategy!r}. Pass, say, strategy=Future().")
    if strategy.lower() not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(
            f"Unknown strategy {strategy!r}: use one of {known}, or a GoalStrategy. Those with arguments are objects: "
            "Geometric(0.99), Subgoal(25), Mixture({...})."
        )
    return STRATEGIES[strategy.lower()]()


def uniform(low: Tensor, high: Tensor) -> Tensor:
    """Draw integers uniformly from ``{low, ..., high - 1}``, elementwise, with the shape of ``low``."""
    share = torch.rand(low.shape, dtype=torch.float64, device=low.device)  # in float32, long spans would be biased
    return low + share.mul_(high - low).to(torch.int64)


def values_at(column: Tensor, rows: Tensor) -> Tensor:
    """Return the values of a column ``[rows]`` of the table at rows of any shape, from 0 to its size - 1.

    ``column.take(rows)`` would copy a column that is not contiguous, and ``column[rows]`` takes several times as long.
    """
    return column.index_select(0, rows.reshape(-1)).view_as(rows)


def _check_discount(discount: Any) -> float:
    if isinstance(discount, bool) or not isinstance(discount, Real) or not 0.0 <= float(discount) < 1.0:
        raise ValueError(f"discount must be at least 0 and less than 1, got {discount!r}.")
    return float(discount)


def _check_steps(steps: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}.")
    return int(steps)


def _random_rows(choice: StrategyInput) -> Tensor:
    """Draw rows uniformly from the filled part of the table, ``int64 [32, batch]``.

    Running episodes that are published again leave up to two thirds of the rows empty, so there are 32 for each
    transition, of which the first that is not empty counts.
    """
    return uniform(torch.zeros_like(choice.step).expand(32, -1), choice.size)


def _first_that_meets(condition: Tensor, values: Tensor) -> Tensor:
    """Return the first of the values ``[32, batch]`` that meets a condition, or the first of all: ``[batch]``."""
    return values.gather(0, condition.to(torch.uint8).argmax(dim=0, keepdim=True)).squeeze(0)
