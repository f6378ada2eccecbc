"""A strategy that draws one of several strategies for each transition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchrl_her.goals.strategies import make_strategy
from torchrl_her.goals.strategy import GoalStrategy, Selection, StrategyInput


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
        self.same_episode = all(member.same_episode for member in self.members)
        self.uses_initial_goal = any(member.uses_initial_goal for member in self.members)
        self.uses_desired_goals = any(member.uses_desired_goals for member in self.members)
        self.refers_to = tuple(dict.fromkeys(name for member in self.members for name in member.refers_to))

    def select(self, choice: StrategyInput) -> Tensor:  # noqa: D102
        return self.draw(choice).rows

    def draw(self, choice: StrategyInput) -> Selection:  # noqa: D102
        share = torch.rand(choice.step.shape, device=choice.step.device)
        below = [share < bound for bound in self._bounds]  # bool [batch] each
        selections = [member.draw(choice) for member in self.members]
        rows, is_own, is_desired, _ = zip(*selections, strict=True)
        return Selection(_merge(rows, below), _merge_bools(is_own, below), _merge_bools(is_desired, below), below)

    def __repr__(self) -> str:
        pairs = zip(self.members, self.probabilities, strict=True)
        return f"Mixture({{{', '.join(f'{member!r}: {probability:g}' for member, probability in pairs)}}})"


def _merge_bools(values: Sequence[Tensor | bool], below: Sequence[Tensor]) -> Tensor | bool:
    """Return a bool if all values are the same bool, otherwise the result of `_merge`."""
    if all(value is True for value in values) or all(value is False for value in values):
        return values[0]
    return _merge(values, below)


def _merge(values: Sequence[Any], below: Sequence[Tensor]) -> Any:
    """Return the value of the member selected for each transition, ``[batch]``."""
    merged = values[-1]
    for value, condition in zip(reversed(values[:-1]), reversed(below), strict=True):
        merged = torch.where(condition, value, merged)
    return merged


def _check_probability(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ValueError(f"The probability of a member of a Mixture must be in [0, 1], got {value!r}.")
    return float(value)
