"""Strategies: which goal replaces the desired goal of a transition."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from tensordict import NestedKey, unravel_key

from torchrl_her.goals.names import DESIRED_STEP
from torchrl_her.goals.strategy import DESIRED, Goal, GoalStrategy, Transitions, uniform


class Current(GoalStrategy):
    """The goal that the transition achieved itself: j = t.

    Examples:
        >>> from torchrl_her import Current, HERTransform, SparseReward
        >>> her = HERTransform(SparseReward(0.05), strategy={"desired_goal": "future", "value_goal": Current()})
        >>> her.strategies
        {'desired_goal': Future(), 'value_goal': Current()}
    """

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        return transitions.episode, transitions.step


class Future(GoalStrategy):
    """The same or a later step of the episode: j uniform on {t, ..., T-1}.

    The ``future`` strategy of [Andrychowicz et al. (2017)](https://arxiv.org/abs/1707.01495).

    Keyword Args:
        own (bool): whether the goal that the transition achieved itself can be drawn. If False, j is uniform on
            {t+1, ..., T-1}, except for the last transition of an episode, for which j = t. Default: True.

    Examples:
        >>> from torchrl_her import Future, HERTransform, SparseReward
        >>> HERTransform(SparseReward(0.05), strategy=Future(own=False))
        HERTransform(SparseReward, strategy=Future(own=False))
    """

    def __init__(self, *, own: bool = True):
        self.own = own

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        step, length = transitions.step, transitions.length
        first = step if self.own else torch.minimum(step + 1, length - 1)
        return transitions.episode, uniform(first, length)

    def __repr__(self) -> str:
        return "Future()" if self.own else "Future(own=False)"


class Geometric(GoalStrategy):
    """A geometrically distributed number of steps ahead: j = min(t + K, T-1), P(K = k) = (1-γ) γ^(k-1) for k ≥ 1.

    The selected steps follow the distribution of discounted future states, as in OGBench
    ([Park et al., 2024](https://arxiv.org/abs/2410.20092)). In short episodes, most of them are the last step: 80% if
    an episode has 50 steps and γ is 0.99.

    Args:
        discount (float): γ, at least 0 and less than 1. The mean of K is 1 / (1-γ) steps.

    Keyword Args:
        truncated (bool): whether to draw j from {t, ..., T-1} with P(j) ∝ γ^j instead, as JaxGCRL does ([Bortkiewicz et
            al., 2024](https://arxiv.org/abs/2408.11052)). Default: False.

    Raises:
        ValueError: if ``discount`` is out of range.

    Examples:
        >>> from torchrl_her import Geometric, HERTransform, SparseReward
        >>> HERTransform(SparseReward(0.05), strategy=Geometric(0.99))
        HERTransform(SparseReward, strategy=Geometric(0.99))
    """

    def __init__(self, discount: float, *, truncated: bool = False):
        self.discount = _check_discount(discount)
        self.truncated = truncated

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        step, length = transitions.step, transitions.length
        share = torch.rand(step.shape, dtype=torch.float64, device=step.device)
        if self.truncated:
            share *= 1 - self.discount ** (length - step).double()  # P(K ≤ T-t)
        scale = 1 / math.log(self.discount) if self.discount else 0.0
        ahead = share.neg_().log1p_().mul_(scale).to(torch.int64) + 1  # P(K > k) = γ^k
        start = step - 1 if self.truncated else step
        return transitions.episode, torch.minimum(start + ahead, length - 1)

    def __repr__(self) -> str:
        return f"Geometric({self.discount!r}{', truncated=True' if self.truncated else ''})"


class Final(GoalStrategy):
    """The last step of the episode: j = T-1.

    The ``final`` strategy of [Andrychowicz et al. (2017)](https://arxiv.org/abs/1707.01495).

    Examples:
        >>> from torchrl_her import Final, HERTransform, SparseReward
        >>> HERTransform(SparseReward(0.05), strategy=Final())
        HERTransform(SparseReward, strategy=Final())
    """

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        return transitions.episode, transitions.length - 1


class Episode(GoalStrategy):
    """Any step of the episode: j uniform on {0, ..., T-1}.

    If an episode is longer than the goal table, j is not less than the first step that can be in the table.

    The ``episode`` strategy of [Andrychowicz et al. (2017)](https://arxiv.org/abs/1707.01495).

    Examples:
        >>> from torchrl_her import Episode, HERTransform, SparseReward
        >>> HERTransform(SparseReward(0.05), strategy=Episode())
        HERTransform(SparseReward, strategy=Episode())
    """

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        return transitions.episode, uniform(transitions.oldest, transitions.length)


class Random(GoalStrategy):
    """Any step of any episode in the goal table, uniformly.

    The ``random`` strategy of [Andrychowicz et al. (2017)](https://arxiv.org/abs/1707.01495).

    Examples:
        >>> from torchrl_her import HERTransform, Random, SparseReward
        >>> HERTransform(SparseReward(0.05), strategy=Random())
        HERTransform(SparseReward, strategy=Random())
    """

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        return transitions.any_goal()


class PastDesired(GoalStrategy):
    """The desired goal of another episode, drawn with a probability proportional to the episode's length.

    If the desired goal changes within an episode, its first one is used. A transition keeps its goal if eight draws
    find no other episode, for example because the table holds only one.

    Examples:
        >>> from torchrl_her import HERTransform, PastDesired, SparseReward
        >>> HERTransform(SparseReward(0.05), strategy=PastDesired())
        HERTransform(SparseReward, strategy=PastDesired())
    """

    needs = ("desired",)

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        drawn, _ = transitions.any_goal(draws=8)  # [8, n]
        first = (drawn != transitions.episode).to(torch.uint8).argmax(dim=0, keepdim=True)
        episode = drawn.gather(0, first).squeeze(0)
        is_own = episode == transitions.episode
        return torch.where(is_own, 0, episode), torch.full_like(episode, DESIRED_STEP)  # episode 0: none


class Subgoal(GoalStrategy):
    """The goal achieved some steps ahead, but not beyond another goal: j = min(t + steps, T-1, g).

    g is the step that achieved the goal drawn for the entry ``limit``. If that goal comes from an earlier step or
    another episode, j = min(t + steps, T-1). These are the subgoals of HIQL
    ([Park et al., 2023](https://arxiv.org/abs/2307.11949)).

    Args:
        steps (int): the number of steps ahead, at least 1.

    Keyword Args:
        limit (NestedKey, optional): the entry of the goal that limits the subgoal: ``"desired_goal"`` for the desired
            goal, whatever its key is, or the key of an additional goal that comes earlier in ``strategy``. None sets no
            limit. A subgoal that is itself the desired goal has no limit. Default: ``"desired_goal"``.

    Raises:
        ValueError: if ``steps`` is not an integer of at least 1.

    Examples:
        >>> from torchrl_her import HERTransform, SparseReward, Subgoal
        >>> strategies = {"desired_goal": "future", "actor_goal": Subgoal(25)}
        >>> HERTransform(SparseReward(0.05), strategy=strategies).strategies["actor_goal"]
        Subgoal(25)
    """

    def __init__(self, steps: int, *, limit: NestedKey | None = DESIRED):
        self.steps = check_at_least(1, "steps", steps)
        self.limit = None if limit is None else unravel_key(limit)
        self.refers_to = () if self.limit is None else (self.limit,)

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        step = torch.minimum(transitions.step + self.steps, transitions.length - 1)
        if self.limit in transitions.drawn:
            episode, goal_step = transitions.drawn[self.limit]
            is_ahead = (episode == transitions.episode) & (goal_step >= transitions.step)
            step = torch.where(is_ahead, torch.minimum(step, goal_step), step)
        return transitions.episode, step

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
    """Return a strategy, given its name or the strategy itself."""
    if isinstance(strategy, GoalStrategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(
            f"strategy must be a name or a GoalStrategy, got {strategy!r}. For example, pass strategy=Future()."
        )
    if strategy.lower() not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(
            f"Unknown strategy {strategy!r}: use one of {known}, or a GoalStrategy. Strategies with arguments have no "
            "name: pass Geometric(0.99), Subgoal(25) or Mixture({...})."
        )
    return STRATEGIES[strategy.lower()]()


def _check_discount(discount: Any) -> float:
    if isinstance(discount, bool) or not isinstance(discount, Real) or not 0.0 <= float(discount) < 1.0:
        raise ValueError(f"discount must be at least 0 and less than 1, got {discount!r}.")
    return float(discount)


def check_at_least(least: int, name: str, value: int) -> int:
    """Check that an argument is an integer of at least ``least``, and return it as an ``int``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)
