"""Compares samples of a buffer with a preset, by the joint distribution of step, member and all goals.

Goals are ``(episode, state)``: the outcome of a step is the next state, and the desired goal of each episode is its
state -1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from tensordict import TensorDictBase

from support.oracle import RELABELLED
from support.presets import DESIRED, Ahead, Lengths, Place, Preset, Table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
T = TypeVar("T")
U = TypeVar("U")

LEVEL = 1e-3  # significance level of every test
POWER = 0.99
FEWEST = 5.0  # fewest expected draws in a cell
MEMBERS = 10  # more than any mixture has


# Expected outcomes


class Outcome(NamedTuple):
    """The draw for a transition: the member, or -1 if it is not relabelled, and the goals under all keys."""

    place: Place
    member: int
    goals: tuple[Place, ...]


def joint(preset: Preset, lengths: Lengths, places: Mapping[Place, float]) -> dict[Outcome, float]:
    """Return the probability of each outcome, given the probability of each transition."""
    found: dict[Outcome, float] = {}
    for place, of_place in places.items():
        if preset.her_ratio < 1:
            kept = Outcome(place, -1, ((place[0], DESIRED),) * len(preset.keys))
            found[kept] = of_place * (1 - preset.her_ratio)
        for (member, goals), p in _drawn(preset, place, lengths):
            outcome = Outcome(place, member, goals)
            found[outcome] = found.get(outcome, 0.0) + of_place * preset.her_ratio * p
    return found


def _drawn(preset: Preset, place: Place, lengths: Lengths) -> list[tuple[tuple[int, tuple[Place, ...]], float]]:
    """Return pairs of a member and goals with their probabilities."""
    drawn: list[tuple[tuple[int, tuple[Place, ...]], float]] = [
        ((member, (goal,)), probability * p)
        for member, (rule, probability) in enumerate(preset.desired)
        for goal, p in rule(place, lengths).items()
    ]
    for number, extra in enumerate(preset.extra.values()):
        if isinstance(extra, Ahead):
            at = None if extra.limit is None else preset.keys.index(extra.limit)
            drawn = [
                ((member, (*goals, extra.goal(place, lengths, None if at is None else goals[at]))), p)
                for (member, goals), p in drawn
            ]
            continue
        table: Table = {}
        for rule, probability in extra:
            for goal, p in rule(place, lengths).items():
                table[goal] = table.get(goal, 0.0) + probability * p
        pairs = _of_one_number if preset.shared and number == 0 else _independent
        drawn = [((member, (*goals, goal)), p) for ((member, goals), goal), p in pairs(drawn, [*table.items()])]
    return drawn


def _independent(
    one: Sequence[tuple[T, float]], other: Sequence[tuple[U, float]]
) -> Iterator[tuple[tuple[T, U], float]]:
    return (((first, second), p * q) for first, p in one for second, q in other)


def _of_one_number(
    one: Sequence[tuple[T, float]], other: Sequence[tuple[U, float]]
) -> Iterator[tuple[tuple[T, U], float]]:
    """Yield the pairs if both are selected by the same number in [0, 1)."""
    ends = [np.cumsum([p for _, p in table])[:-1] for table in (one, other)]
    bounds = [0.0, *np.unique(np.concatenate(ends)), 1.0]
    for low, high in itertools.pairwise(bounds):
        first, second = (int(np.searchsorted(each, (low + high) / 2)) for each in ends)
        yield (one[first][0], other[second][0]), high - low


# Sampled outcomes


def outcomes_of(batch: TensorDictBase, preset: Preset, width: int) -> Ints:
    """Return the `number` of each sampled transition, its member and its goals, ``[2 + goals, batch]``."""
    relabelled = batch[RELABELLED][:, 0].numpy()
    member = batch["hindsight", "member"][:, 0].numpy() if len(preset.desired) > 1 else np.where(relabelled, 0, -1)
    episode, step = batch["achieved_goal"].long().numpy().T
    columns = [number(episode, step, width), member]
    for key in preset.keys:
        of_episode, state = batch[key].long().numpy().T
        columns.append(number(of_episode, state - 1, width))
    return np.stack(columns)


def number(episode: Any, step: Any, width: int) -> Any:
    """Return the number of a step, or of DESIRED."""
    return episode * width + step - DESIRED


def width_of(lengths: Lengths) -> int:
    """Return how many numbers each episode takes."""
    return max(lengths.values()) - DESIRED


class Agreement:
    """Counts outcomes, and compares them with the distribution of a preset.

    ``places`` are the probabilities of transitions. ``estimated`` says whether they were estimated from the draws.
    """

    def __init__(self, preset: Preset, lengths: Lengths, places: Mapping[Place, float], estimated: bool = False):
        self.preset, self.lengths, self.places = preset, lengths, places
        self.constraints = len(places) if estimated else 1
        self.width = width_of(lengths)
        self.base = (max(lengths) + 1) * self.width  # for the code of an outcome, above all numbers
        self.codes, self.probabilities = self.distribution(preset)
        self.counts = np.zeros(len(self.codes), dtype=np.int64)
        self.impossible = 0  # outcomes that are impossible under the preset

    def count(self, outcomes: Ints) -> None:
        cell, possible = self._find(self._encode(outcomes))
        self.counts += np.bincount(cell[possible], minlength=len(self.codes))
        self.impossible += int((~possible).sum())

    def p_value(self) -> float:
        """Return the p-value of Pearson's chi-square test, or 0 if an impossible outcome was drawn."""
        if self.impossible:
            return 0.0
        total = self.counts.sum()
        cells = merged(total * self.probabilities)
        observed, expected = (np.bincount(cells, each) for each in (self.counts, total * self.probabilities))
        return float(stats.chisquare(observed, expected, ddof=self.constraints - 1, sum_check=False).pvalue)

    def power(self, wrong: Preset, count: int) -> float:
        """Return the probability that the test rejects a wrong preset with ``count`` draws.

        The statistic is nearly normal, because there are many cells. A noncentral chi-square distribution would only
        fit small differences. Outcomes that only the wrong preset draws also lead to a rejection.
        """
        codes, drawn = self.distribution(wrong)
        cell, possible = self._find(codes)
        cells = merged(count * self.probabilities)
        expected = count * np.bincount(cells, self.probabilities)
        mean = count * np.bincount(cells[cell[possible]], drawn[possible], minlength=len(expected))
        off = mean - expected
        # Moments of sum((N - expected)**2 / expected), for Poisson numbers N of this mean, given their sum.
        variance = ((mean + 2 * mean**2 + 4 * off * mean + 4 * off**2 * mean) / expected**2).sum()
        variance -= ((mean + 2 * off * mean) / expected).sum() ** 2 / mean.sum()
        statistic = ((mean * (1 - mean / count) + off**2) / expected).sum()
        bound = stats.chi2.isf(LEVEL, len(expected) - self.constraints)
        by_statistic = stats.norm.sf((bound - statistic) / variance**0.5)
        by_impossible = 1 - (1 - min(1.0, drawn[~possible].sum())) ** count
        return float(max(by_statistic, by_impossible))

    def distribution(self, preset: Preset) -> tuple[Ints, Floats]:
        """Return the sorted codes of all outcomes, and their probabilities."""
        outcomes = joint(preset, self.lengths, self.places)
        flat = np.array([(*place, *itertools.chain.from_iterable(goals)) for place, _, goals in outcomes])
        place, *goals = number(flat[:, ::2], flat[:, 1::2], self.width).T
        codes = self._encode(np.stack([place, [member for _, member, _ in outcomes], *goals]))
        order = np.argsort(codes)
        return codes[order], np.array(list(outcomes.values()))[order]

    def _encode(self, outcomes: Ints) -> Ints:
        place, member, *goals = outcomes
        codes = place * MEMBERS + member + 1
        for goal in goals:
            codes = codes * self.base + goal
        assert MEMBERS * self.base ** (1 + len(goals)) < 2**63
        return codes

    def _find(self, codes: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the cell of each code, and whether it has one."""
        cell = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return cell, self.codes[cell] == codes


def merged(expected: Floats) -> Ints:
    """Return the merged cell of each cell, so that at least FEWEST draws are expected in all."""
    rare = expected < FEWEST
    # Rare cells are grouped, between FEWEST and 3 * FEWEST draws each; the rest joins the previous group or cell.
    group = np.floor(np.cumsum(expected * rare) / (2 * FEWEST))
    cell = np.where(rare, -group - 1, np.arange(len(expected)))
    rest = cell == cell.min()
    if expected[rest].sum() < FEWEST and not rest.all():
        cell[rest] = cell[~rest].min()
    return np.unique(cell, return_inverse=True)[1]


# Transitions


def evenly_on(lengths: Lengths) -> dict[Place, float]:
    """Return the same probability for all transitions."""
    total = sum(lengths.values())
    return {(episode, step): 1 / total for episode, length in lengths.items() for step in range(length)}


def frequencies(places: Ints, width: int) -> dict[Place, float]:
    """Return the frequencies of transitions, given their numbers."""
    values, counts = np.unique(places, return_counts=True)
    return {
        (number // width, number % width + DESIRED): count / len(places)
        for number, count in zip(values.tolist(), counts.tolist(), strict=True)
    }


def check_consistent(batch: TensorDictBase, preset: Preset) -> None:
    """Check that the entries of transitions ``[batch]`` agree: extra goals, and steps to the goal."""
    relabelled = batch[RELABELLED]
    for key in preset.keys:
        assert torch.equal(batch[key], batch["next", key]), key
        assert torch.equal(batch[key][~relabelled[:, 0]], batch["desired_goal"][~relabelled[:, 0]]), key
    (episode, step), (of_goal, state) = (batch[key].long().T for key in ("achieved_goal", "desired_goal"))
    ahead = relabelled[:, 0] & (of_goal == episode) & (state > step)
    assert torch.equal(batch["hindsight", "steps_to_goal"], torch.where(ahead, state - 1 - step, -1)[:, None])
    assert (("hindsight", "member") in batch.keys(True)) == (len(preset.desired) > 1)
    if len(preset.desired) > 1:
        assert torch.equal(batch["hindsight", "member"] >= 0, relabelled)
