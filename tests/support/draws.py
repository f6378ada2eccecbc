"""The distributions of the strategies, and statistical tests that distinguish them.

All strategies are uniform over a set of goals that depends on the transition, so the table ALLOWED defines them. Places
are ``(episode, step)``, draws ``(episode, step, episode of the goal, step of the goal)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.factories import make_transform
from support.goals import reward_of
from support.streams import make_episode

Place = tuple[int, int]
Draw = tuple[int, int, int, int]

LEVEL = 1e-3  # of every statistical test; the seeds are fixed
POWER = 0.99
RIGHT = ["future", "final", "episode", "random"]

# The goals that strategies, and wrong variants of them, choose from: (episode, step, lengths) -> [(episode, step)].
ALLOWED: dict[str, Callable[[int, int, Sequence[int]], list[Place]]] = {
    "future": lambda e, t, lengths: [(e, j) for j in range(t, lengths[e])],
    "final": lambda e, t, lengths: [(e, lengths[e] - 1)],
    "episode": lambda e, t, lengths: [(e, j) for j in range(lengths[e])],
    "random": lambda e, t, lengths: [(other, j) for other in range(len(lengths)) for j in range(lengths[other])],
    "later": lambda e, t, lengths: [(e, j) for j in range(t + 1, lengths[e])] or [(e, t)],
    "never the last": lambda e, t, lengths: [(e, j) for j in range(t, lengths[e] - 1)] or [(e, t)],
}


def transitions(episode: int, first: int, last: int, length: int) -> TensorDict:
    """Return the transitions of steps first to last - 1 of an episode of ``length`` steps, ``[last - first]``."""
    goals = torch.stack([torch.full((last - first + 1,), episode), torch.arange(first, last + 1)], dim=1).float()
    desired = torch.tensor([episode, -1.0])
    return make_episode(goals, desired, reward=reward_of(goals[1:], desired)[:, None], truncated=last == length)


def make_buffer(strategy: Any, lengths: Iterable[int] = (), her_ratio: float = 1.0) -> TensorDictReplayBuffer:
    """Return a buffer with whole episodes of these lengths."""
    transform = make_transform(strategy=strategy, her_ratio=her_ratio, capacity=2000)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2000), transform=transform)
    for episode, length in enumerate(lengths):
        rb.extend(transitions(episode, 0, length, length))
    return rb


def draw(rb: TensorDictReplayBuffer, count: int) -> list[Draw]:
    """Sample transitions, and list the relabelled ones."""
    batch = rb.sample(count)
    relabelled = batch["hindsight", "relabelled"][:, 0]
    assert torch.equal(relabelled, batch["desired_goal"][:, 1] != -1)
    episode, step = batch["achieved_goal"][relabelled].long().T.tolist()
    of_episode, outcome = batch["desired_goal"][relabelled].long().T.tolist()
    return list(zip(episode, step, of_episode, (state - 1 for state in outcome), strict=True))


def distribution(name: str, lengths: Sequence[int]) -> dict[Draw, float]:
    """Return the probability of each draw from a uniform sample."""
    places = [(e, t) for e, length in enumerate(lengths) for t in range(length)]
    drawn: dict[Draw, float] = {}
    for place in places:
        goals = ALLOWED[name](*place, lengths)
        drawn |= {(*place, *goal): 1 / len(places) / len(goals) for goal in goals}
    return drawn


def p_value(draws: Sequence[Any], expected: dict[Any, float]) -> float:
    """Return the p-value of Pearson's chi-square test, or 0 if an impossible goal was drawn."""
    counts = Counter(draws)
    if counts.keys() - expected.keys():
        return 0.0
    probabilities = np.array(list(expected.values()))
    return stats.chisquare([counts[cell] for cell in expected], len(draws) * probabilities).pvalue


def power(expected: dict[Draw, float], wrong: dict[Draw, float], count: int) -> float:
    """Return the probability that the chi-square test rejects the wrong distribution with ``count`` draws.

    Impossible draws are left out of the statistic, because they only make a rejection more likely.
    """
    distance = sum((wrong.get(cell, 0.0) - p) ** 2 / p for cell, p in expected.items())
    bound = stats.chi2.isf(LEVEL, len(expected) - 1)
    return stats.ncx2.sf(bound, len(expected) - 1, count * distance)


def draws_needed(name: str, lengths: Sequence[int]) -> int:
    """Return the number of draws with which each cell expects at least five and all wrong variants are rejected."""
    expected = distribution(name, lengths)
    others = [wrong for wrong in (distribution(each, lengths) for each in ALLOWED) if wrong != expected]
    count = int(np.ceil(5 / min(expected.values())))
    while min(power(expected, wrong, count) for wrong in others) < POWER:
        count += count // 10
    return count
