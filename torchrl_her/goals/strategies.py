"""Which achieved goal becomes the new desired goal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class StrategyInput(NamedTuple):
    """What a strategy chooses from: a batch of transitions, their episodes and the goal table.

    All tensors are ``int64``. Of transitions that cannot be relabelled (their episode has just begun, or has
    left the table) start and length mean nothing; whatever is chosen for them is not used.
    """

    episode: Tensor  # [batch] ids of the transitions' episodes
    step: Tensor  # [batch] the transitions' steps in them
    start: Tensor  # [batch] the rows of the table where the episodes start; step j is at start + j
    length: Tensor  # [batch] how many steps of the episodes are in the table
    owners: Tensor  # [capacity] the episode that the goal in each row was achieved in, -1 where there is none
    size: Tensor  # [] how many rows of the table are filled, from row 0 on


class GoalStrategy(ABC):
    """Chooses for each transition the row of the goal table that holds its new desired goal.

    Examples:
        A strategy that looks at most ten steps ahead:

        >>> import torch
        >>> from torchrl_her import GoalStrategy
        >>> from torchrl_her import uniform
        >>> class NearFuture(GoalStrategy):
        ...     def select(self, choice):
        ...         end = torch.minimum(choice.step + 10, choice.length)
        ...         return choice.start + uniform(choice.step, end)

    Attributes:
        same_episode (bool): whether goals come from the transition's own episode. Then one that is found to
            be another's leaves the transition as it is. Default: True.
    """

    same_episode = True

    @abstractmethod
    def select(self, choice: StrategyInput) -> Tensor:
        """Return rows ``int64 [batch]`` of the goal table; they are taken modulo its capacity.

        Draw from torch's default random generator, and do not read tensors on the host: sampling on a
        GPU would wait for it.
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
        # Where an episode stood when it was shorter, rows are empty, at most two thirds of all: of many draws the
        # first that hits is taken.
        rows = uniform(torch.zeros_like(choice.step).expand(32, -1), choice.size)  # [32, batch]
        hits = (choice.owners.take(rows) > 0).to(torch.uint8)
        return rows.gather(0, hits.argmax(dim=0, keepdim=True)).squeeze(0)


STRATEGIES: dict[str, type[GoalStrategy]] = {
    "future": Future,
    "final": Final,
    "episode": Episode,
    "random": Random,
}


def make_strategy(strategy: str | GoalStrategy) -> GoalStrategy:
    """Return the strategy of that name, or the strategy itself.

    Raises:
        ValueError: if there is no strategy of that name.
        TypeError: if it is neither a name nor a `GoalStrategy`.
    """
    if isinstance(strategy, GoalStrategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(
            f"strategy must be a name or a GoalStrategy, got {strategy!r}. "
            "Pass an instance, for example strategy=Future()."
        )
    if strategy not in STRATEGIES:
        raise ValueError(
            f"Unknown strategy {strategy!r}: use one of {', '.join(map(repr, STRATEGIES))}, or a GoalStrategy."
        )
    return STRATEGIES[strategy]()


def uniform(low: Tensor, high: Tensor) -> Tensor:
    """Draw integers uniformly from ``{low, ..., high - 1}``, each of the shape of ``low``.

    In double precision, a span of a million steps is drawn without bias and without ever reaching ``high``.
    """
    span = high - low
    return low + torch.rand(low.shape, dtype=torch.float64, device=low.device).mul_(span).to(torch.int64)


def check_rows(rows: Tensor, steps: Tensor, strategy: object) -> None:
    """Check that a strategy chose one row per transition."""
    if rows.shape != steps.shape or rows.dtype != steps.dtype:
        raise ValueError(
            f"{strategy!r} must select one row of the goal table per transition, {steps.dtype} {tuple(steps.shape)}, "
            f"and returned {rows.dtype} {tuple(rows.shape)}."
        )
