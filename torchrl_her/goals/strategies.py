"""Strategies: which goal replaces the desired goal of a transition."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.goals.names import DESIRED_STEP
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import HERKeys, is_key, path_of

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
    goal, expected = strategy.select(transitions), transitions.step
    if isinstance(goal, tuple) and len(goal) == 2:
        episode, step = goal
        are_tensors = isinstance(episode, Tensor) and isinstance(step, Tensor)
        if are_tensors and episode.shape == step.shape == expected.shape and episode.dtype == step.dtype == torch.int64:
            return goal
    got = [
        f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        for each in (goal if isinstance(goal, tuple) else (goal,))
    ]
    raise ValueError(
        f"{strategy!r} must select the episode and the step of one goal per transition, two tensors {expected.dtype} "
        f"{tuple(expected.shape)}, but select() returned {', '.join(got)}."
    )


def goals_apart(strategies: Iterable[GoalStrategy]) -> tuple[str, ...]:
    """Return the ``apart`` of a `GoalTable` for strategies."""
    needs = {kind for strategy in strategies for kind in strategy.needs}
    return ("desired", "initial") if "initial" in needs else tuple(needs)


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


class Mixture(GoalStrategy):
    """One of several strategies, drawn for each transition.

    Args:
        members (Mapping[str | GoalStrategy, float]): strategies (built-in or your own), or their names, and their
            probabilities, which must sum to 1.

    Raises:
        ValueError: if there are no members, a probability is outside [0, 1], the sum is not 1, or a name is unknown.
        TypeError: if a member is neither a name nor a `GoalStrategy`.

    Examples:
        The goals of value functions in OGBench ([Park et al., 2024](https://arxiv.org/abs/2410.20092)): from the same
        step, a later step, or any step of any episode:

        >>> from torchrl_her import Current, Geometric, Mixture, Random
        >>> Mixture({Current(): 0.2, Geometric(0.99): 0.5, Random(): 0.3})
        Mixture({Current(): 0.2, Geometric(0.99): 0.5, Random(): 0.3})
    """

    def __init__(self, members: Mapping[str | GoalStrategy, float]):
        if not isinstance(members, Mapping) or not members:
            raise ValueError(
                f"A Mixture needs strategies and their probabilities, such as {{Future(): 1.0}}, got {members!r}."
            )
        self.members = [make_strategy(member) for member in members]
        self.probabilities = [_check_probability(value) for value in members.values()]
        total = sum(self.probabilities)
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"The probabilities of {self!r} must sum to 1, got the sum {total:.6g}.")
        # A uniform number in [0, 1) selects the first member whose bound is larger.
        self._bounds = [bound / total for bound in accumulate(self.probabilities)][:-1]
        self.needs = tuple({kind: None for member in self.members for kind in member.needs})
        self.refers_to = tuple(dict.fromkeys(name for member in self.members for name in member.refers_to))

    def select(self, transitions: Transitions) -> Goal:  # noqa: D102
        goal, _ = self.select_with_member(transitions)
        return goal

    def select_with_member(self, transitions: Transitions) -> tuple[Goal, Tensor]:
        """Return the selected goals, and the index of the member that selected each, ``int64 [n]``."""
        step = transitions.step
        share = torch.rand(step.shape, device=step.device)
        member = torch.zeros_like(step) + sum((share >= bound).long() for bound in self._bounds)
        selected = torch.stack([torch.stack(select_goals(each, transitions)) for each in self.members])
        episode, step = selected.gather(0, member.expand(1, 2, -1))[0]  # of [members, 2, n]
        return (episode, step), member

    def __repr__(self) -> str:
        pairs = zip(self.members, self.probabilities, strict=True)
        return f"Mixture({{{', '.join(f'{member!r}: {probability:g}' for member, probability in pairs)}}})"


def _check_probability(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ValueError(f"The probability of a member of a Mixture must be in [0, 1], got {value!r}.")
    return float(value)


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


# The strategy of the desired goal, or the strategies of several goals by their keys.
AnyStrategy: TypeAlias = str | GoalStrategy | Mapping[NestedKey, str | GoalStrategy]
BY_BUFFERS = ("index", "_weight", "priority_weight")  # keys of the entries that buffers add to samples


def make_strategies(strategy: AnyStrategy, keys: HERKeys) -> dict[NestedKey, GoalStrategy]:
    """Return the strategy of the desired goal, under the name `DESIRED`, then of the extra goals."""
    if not isinstance(strategy, Mapping):
        strategy = {DESIRED: make_strategy(strategy)}
    if any(isinstance(each, Real) for each in strategy.values()):
        raise TypeError(
            f"strategy must map the keys of goals to strategies, got {strategy!r}. To draw one of several strategies "
            "with these probabilities, pass strategy=Mixture({...})."
        )
    if DESIRED not in strategy:
        raise ValueError(
            f"strategy needs the name {DESIRED!r}, which means the desired goal, whatever its key is, got "
            f"{strategy!r}. For example, pass {{{DESIRED!r}: 'future', 'actor_goal': 'final'}}."
        )
    strategies: dict[NestedKey, GoalStrategy] = {DESIRED: make_strategy(strategy[DESIRED])}
    for key, extra in strategy.items():
        if key == DESIRED:
            continue
        name = _check_name(key, keys, strategies)
        strategies[name] = make_strategy(extra)
        unknown = [each for each in strategies[name].refers_to if each not in strategies or each == name]
        if unknown:
            raise ValueError(
                f"{strategies[name]!r} of the extra goal {name!r} refers to {unknown[0]!r}, for which no goal is drawn "
                f"earlier. Use one of {[*strategies][:-1]}, or place that extra goal earlier. "
                f"{DESIRED!r} refers to the desired goal, whatever its key is."
            )
    others = [each for each in strategies[DESIRED].refers_to if each != DESIRED]
    if others:
        raise ValueError(
            f"The desired goal is drawn first, but {strategies[DESIRED]!r} refers to {others[0]!r}. Use this strategy "
            "for an extra goal."
        )
    return strategies


def check_not_stored(tensordict: TensorDictBase, names: Iterable[NestedKey], keys: HERKeys) -> None:
    """Check that written transitions have no entries that extra goals would replace, except copies of desired goals."""
    for name in names:
        for key, desired_key in ((name, keys.desired_goal), (unravel_key(("next", name)), keys.next_desired_goal)):
            stored, desired = tensordict.get(key, None), tensordict.get(desired_key, None)
            if stored is not None and not (isinstance(stored, torch.Tensor) and torch.equal(stored, desired)):
                raise ValueError(
                    f"An extra goal would replace the stored entry {key!r}, which is not a copy of the desired goal. "
                    "Choose another key."
                )


def _check_name(key: NestedKey, keys: HERKeys, earlier: Iterable[NestedKey]) -> NestedKey:
    """Return the key of an extra goal, and check that it overlaps with no key of transitions or earlier extra goals."""
    if not is_key(key):
        raise TypeError(f"strategy must map the keys of goals to strategies, but {key!r} is not a key.")
    name = unravel_key(key)
    path = path_of(name)
    used = [*vars(keys).values(), *BY_BUFFERS, *earlier]
    others = [path_of(key) for key in used if key is not None]
    overlaps = any(path[: len(other)] == other[: len(path)] for other in others)
    if path[0] == "next" or path[0].startswith("hindsight") or overlaps:
        raise ValueError(
            f"strategy has the key {name!r}, which transitions or another extra goal already use, or which begins "
            "with 'next' or 'hindsight'. Choose another key, such as 'actor_goal': the goal is written at the root and "
            "under 'next'."
        )
    return name
