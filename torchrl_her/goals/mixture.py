"""A strategy that draws one of several strategies for each transition."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from numbers import Real

import torch
from torch import Tensor

from torchrl_her.goals.strategies import make_strategy
from torchrl_her.goals.strategy import Goal, GoalStrategy, Transitions, select_goals


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
