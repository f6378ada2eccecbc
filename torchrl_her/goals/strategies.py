"""Which achieved goal becomes the new desired goal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class StrategyInput(NamedTuple):
    """The input of a strategy: a batch of transitions, their episodes and the goal table.

    All tensors are ``int64``. ``start`` and ``length`` are arbitrary for transitions that cannot be relabelled because
    their episode is not in the table (yet or any more); the rows selected for them are not used.
    """

    episode: Tensor  # [batch], the id of each transition's episode
    step: Tensor  # [batch], the transition's step t in its episode
    start: Tensor  # [batch], the row of the table at which the episode starts; step j is at start + j
    length: Tensor  # [batch], how many steps of the episode are in the table
    owners: Tensor  # [rows], the episode in which the goal of each row was achieved, -1 for an empty row
    size: Tensor  # [], how many rows of the table are filled, from row 0 on


class GoalStrategy(ABC):
    """Selects for each transition the row of the goal table that holds its new desired goal.

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
            belongs to another episode is not relabelled. A strategy that mixes both sets it to False, and returns from
            `select` a pair: the rows, and for which of them this holds, ``bool [batch]``. Default: True.
        uses_initial_goal (bool): whether row ``start - 1`` holds the achieved goal of the state in which the episode
            began. Each episode then takes one more row of the table. Default: False.
    """

    same_episode = True
    uses_initial_goal = False

    @abstractmethod
    def select(self, choice: StrategyInput) -> Tensor | tuple[Tensor, Tensor]:
        """Return rows ``int64 [batch]`` of the goal table, which are taken modulo its capacity.

        Draw from torch's default random generator. Do not read tensor values in Python (``.item()``, ``if tensor``):
        that synchronises sampling on a GPU.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Future(GoalStrategy):
    """A step from the transition's own on: j uniform on {t, ..., T-1}."""

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        return choice.start + uniform(choice.step, choice.length)


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
        # Running episodes that are published again leave up to two thirds of the rows empty, so draw 32 rows and use
        # the first that is not empty.
        rows = uniform(torch.zeros_like(choice.step).expand(32, -1), choice.size)  # [32, batch]
        hits = (choice.owners.take(rows) > 0).to(torch.uint8)
        return rows.gather(0, hits.argmax(dim=0, keepdim=True)).squeeze(0)


STRATEGIES: dict[str, type[GoalStrategy]] = {"future": Future, "final": Final, "episode": Episode, "random": Random}


def make_strategy(strategy: str | GoalStrategy) -> GoalStrategy:
    """Return the strategy with a name, or the strategy itself."""
    if isinstance(strategy, GoalStrategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(f"strategy must be a name or a GoalStrategy, got {strategy!r}. Pass, say, strategy=Future().")
    if strategy.lower() not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"Unknown strategy {strategy!r}: use one of {known}, or a GoalStrategy.")
    return STRATEGIES[strategy.lower()]()


def uniform(low: Tensor, high: Tensor) -> Tensor:
    """Draw integers uniformly from ``{low, ..., high - 1}``, elementwise, with the shape of ``low``."""
    share = torch.rand(low.shape, dtype=torch.float64, device=low.device)  # in float32, long spans would be biased
    return low + share.mul_(high - low).to(torch.int64)
