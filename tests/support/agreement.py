"""Whether what a buffer samples agrees with a preset: the joint distribution of step, member and all goals.

Goals are ``(episode, state)``: the outcome of a step is the next state, and each episode is asked for its state -1.
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

LEVEL = 1e-3  # of every test
POWER = 0.99
FEWEST = 5.0  # expected draws in a cell
MEMBERS = 10  # there are fewer


# Expected outcomes


class Outcome(NamedTuple):
    """What is drawn for a transition: the member, -1 if it is not relabelled, and the goals under all keys."""

    place: Place
    member: int
    goals: tuple[Place, ...]


def joint(preset: Preset, lengths: Lengths, places: Mapping[Place, float]) -> dict[Outcome, float]:
    """The probability of each outcome, given the probability of each transition."""
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
    """The member and the goals with their probabilities."""
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
    """Both are selected by the same number in [0, 1)."""
    ends = [np.cumsum([p for _, p in table])[:-1] for table in (one, other)]
    bounds = [0.0, *np.unique(np.concatenate(ends)), 1.0]
    for low, high in itertools.pairwise(bounds):
        first, second = (int(np.searchsorted(each, (low + high) / 2)) for each in ends)
        yield (one[first][0], other[second][0]), high - low


# Sampled outcomes


def outcomes_of(batch: TensorDictBase, preset: Preset, width: int) -> Ints:
    """The outcomes of a sample: the `number` of each transition, its member and its goals, ``[2 + goals, batch]``."""
    relabelled = batch[RELABELLED][:, 0].numpy()
    member = batch["hindsight", "member"][:, 0].numpy() if len(preset.desired) > 1 else np.where(relabelled, 0, -1)
    episode, step = batch["achieved_goal"].long().numpy().T
    columns = [number(episode, step, width), member]
    for key in preset.keys:
        of_episode, state = batch[key].long().numpy().T
        columns.append(number(of_episode, state - 1, width))
    return np.stack(columns)


def number(episode: Any, step: Any, width: int) -> Any:
    """The number of a step, or of DESIRED."""
    return episode * width + step - DESIRED


def width_of(lengths: Lengths) -> int:
    """The numbers that each episode takes."""
    return max(lengths.values()) - DESIRED


class Agreement:
    """Counts outcomes, and compares them with the distribution of a preset.

    Transitions have the probabilities ``places``. If these were estimated from the draws, ``estimated`` is True.
    """

    def __init__(self, preset: Preset, lengths: Lengths, places: Mapping[Place, float], estimated: bool = False):
        self.preset, self.lengths, self.places = preset, lengths, places
        self.constraints = len(places) if estimated else 1
        self.width = width_of(lengths)
        self.base = (max(lengths) + 1) * self.width  # of the code of an outcome, above all numbers
        self.codes, self.probabilities = self.distribution(preset)
        self.counts = np.zeros(len(self.codes), dtype=np.int64)
        self.impossible = 0  # outcomes that cannot be drawn

    def count(self, outcomes: Ints) -> None:
        cell, possible = self._find(self._encode(outcomes))
        self.counts += np.bincount(cell[possible], minlength=len(self.codes))
        self.impossible += int((~possible).sum())

    def p_value(self) -> float:
        """Pearson's chi-square test; 0 if something was drawn that cannot be."""
        if self.impossible:
            return 0.0
        total = self.counts.sum()
        cells = merged(total * self.probabilities)
        observed, expected = (np.bincount(cells, each) for each in (self.counts, total * self.probabilities))
        return float(stats.chisquare(observed, expected, ddof=self.constraints - 1, sum_check=False).pvalue)

    def power(self, wrong: Preset, count: int) -> float:
        """The probability that the test rejects the wrong preset, from so many draws.

        The statistic has nearly a normal distribution, since there are many cells. A noncentral chi-square distribution
        would be wrong: it is for small differences. What only the wrong preset draws is a reason of its own to reject.
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
        """The codes of all outcomes, sorted, and their probabilities."""
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
        """The cell of each code, and whether there is one."""
        cell = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return cell, self.codes[cell] == codes


def merged(expected: Floats) -> Ints:
    """Which cell each cell is merged into, so that FEWEST draws or more are expected in all."""
    rare = expected < FEWEST
    # Rare cells are grouped, between FEWEST and 3 * FEWEST draws each; what is left joins the group or cell before it.
    group = np.floor(np.cumsum(expected * rare) / (2 * FEWEST))
    cell = np.where(rare, -group - 1, np.arange(len(expected)))
    rest = cell == cell.min()
    if expected[rest].sum() < FEWEST and not rest.all():
        cell[rest] = cell[~rest].min()
    return np.unique(cell, return_inverse=True)[1]


# Transitions


def evenly_on(lengths: Lengths) -> dict[Place, float]:
    """All transitions with the same probability."""
    total = sum(lengths.values())
    return {(episode, step): 1 / total for episode, length in lengths.items() for step in range(length)}


def frequencies(places: Ints, width: int) -> dict[Place, float]:
    """How often transitions occur, given their numbers."""
    values, counts = np.unique(places, return_counts=True)
    return {
        (number // width, number % width + DESIRED): count / len(places)
        for number, count in zip(values.tolist(), counts.tolist(), strict=True)
    }


def check_consistent(batch: TensorDictBase, preset: Preset) -> None:
    """Check the entries of transitions ``[batch]`` against each other: extra goals, and steps to the goal."""
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
