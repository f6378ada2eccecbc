"""Parts of ``speed.py``: sampling, writing and growth of several replay buffers, measured side by side.

All contenders store the same kind of transitions: a 25-float observation, 3-float goals, a 4-float action, 50-step
episodes, reward 0 within 0.05 of the goal and -1 elsewhere. First, all buffers of all sizes are filled. Then each round
gives every buffer a turn, in shuffled order, so that a drift of the machine affects all alike. A turn is `extend(50)`,
`sample(256)` and another `sample(256)`, and in every fourth round 16 batches of 256 in one call. The turns of the other
buffers leave the processor's caches cold, as an update does in training.

Every sampled batch is checked outside the measured time: the share of relabelled transitions, and whether the rewards
match the goals.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
from buffers import AUGMENTATION, BUFFERS, EPISODE_STEPS, OURS, PAIRS, PLAIN, THRESHOLD, UNREACHABLE, make_episodes
from measuring import Times, Turn, cell, print_table, print_versions, ratio, short, take_turns, timed
from peers import CPPRB, PEERS, CpprbByStep
from tqdm import tqdm

SIZES = 10_000, 100_000, 500_000, 1_000_000
GROWTH = 10_000, 10_000_000
ROWS = 100_000  # stored when writing is measured
CHUNKS = 1, 4, 20  # episodes in a write
WARM_UP = 50  # batches that are sampled and checked before the first round
BATCHES, EVERY = 16, 4  # drawn in one call in one round of four, because it is slow
SAMPLE, EXTEND, BOTH = "`sample(256)`", "`extend(50)`", "`extend(50)` + `sample(256)`"
MANY = f"{BATCHES} batches of 256 per call, per batch"
BY_STEP = "cpprb, a step at a time, as in its examples"
COMPARED = BUFFERS | PEERS
CONTENDERS = COMPARED | {BY_STEP: CpprbByStep}
# In the order of the rows; colour-blind readers can distinguish them (Okabe and Ito 2008). Packed buffers are open.


class Entrant:
    """One contender at one size, with counts of its checks."""

    def __init__(self, name: str, size: int):
        self.name, self.size, self.contender = name, size, CONTENDERS[name](size)
        self.sampled = self.relabelled = self.uneven = self.wrong = 0
        self.contender.fill()
        for _ in range(WARM_UP):
            self.check(self.contender.sample())

    def turn(self, data: tuple[Any, bool]) -> Iterator[tuple[str, float]]:
        """Yield the times of one turn, and check its batches."""
        transitions, many = data
        written, _ = timed(self.contender.extend, self.contender.prepare(transitions))
        first, batch = timed(self.contender.sample)
        second, other = timed(self.contender.sample)
        yield EXTEND, written
        yield BOTH, written + first
        yield SAMPLE, second
        batches = [batch, other]
        if many:
            time, drawn = timed(self.contender.sample_many, BATCHES)
            yield MANY, time / BATCHES
            batches += drawn
        for each in batches:
            self.check(each)

    def check(self, batch: Any) -> None:
        """Count the relabelled transitions and the wrong rewards of a batch."""
        achieved, desired, reward = self.contender.read(batch)
        relabelled = desired[:, 0] < UNREACHABLE
        distance = np.linalg.norm(achieved.astype(np.float64) - desired, axis=-1)
        clear = np.abs(distance - THRESHOLD) > 1e-6  # at the threshold, the reward depends on rounding in float32
        self.wrong += int(((reward.reshape(-1) != np.where(distance > THRESHOLD, -1.0, 0.0)) & clear).sum())
        self.sampled += len(relabelled)
        self.relabelled += int(relabelled.sum())
        self.uneven += self.contender.relabels and not 0.6 <= relabelled.mean() <= 0.95

    def failure(self) -> str:
        """Describe the failed checks, if any."""
        share = self.relabelled / self.sampled
        is_right = 0.78 <= share <= 0.82 if self.contender.relabels else share == 0
        text = (
            f"{self.name}, {self.size:,} stored: {self.wrong} of {self.sampled:,} rewards do not match their goals, "
            f"{share:.3f} of the transitions are relabelled, and {self.uneven} batches have a very different share."
        )
        return "" if is_right and not self.uneven and not self.wrong else text


@cache
def measure(names: tuple[str, ...], sizes: tuple[int, ...], rounds: int, evict: bool = False) -> Times:
    """Fill all buffers, measure them in turns, and return the times by operation, name and size."""
    pairs = [(name, size) for size in sizes for name in names]
    entrants = {pair: Entrant(*pair) for pair in tqdm(pairs, desc="filling", unit="buffer")}
    turns = {pair: entrant.turn for pair, entrant in entrants.items()}
    times = take_turns(turns, rounds, lambda number: (make_episodes(1), number % EVERY == 0), evict)
    if failures := [failure for entrant in entrants.values() if (failure := entrant.failure())]:
        sys.exit("\n".join(failures))
    sampled = sum(entrant.sampled for entrant in entrants.values())
    print(f"Checked {sampled:,} sampled transitions: the share of relabelled ones and all rewards are right.")
    return times


def print_times(times: Times, operation: str, names: Iterable[str]) -> None:
    """Print medians and ratios to no hindsight, by size."""
    rows = {
        name: [cell(times[operation, (name, size)], times[operation, (PLAIN, size)]) for size in SIZES]
        for name in names
    }
    print_table(operation, map(short, SIZES), rows)


def sample(rounds: int = 300) -> None:
    """Sampling and writing, by buffer and size."""
    print_versions("stable-baselines3", "cpprb", "tianshou")
    times = measure(tuple(COMPARED), SIZES, rounds)
    for operation in (SAMPLE, BOTH, EXTEND):
        print_times(times, operation, COMPARED)


def groups(rounds: int = 300) -> None:
    """Several batches per call, by buffer and size."""
    times = measure(tuple(COMPARED), SIZES, rounds)  # the same measurement as for `sample`
    print_times(times, MANY, COMPARED)
    rows = {
        name: [f"{ratio(times[MANY, (name, size)], times[SAMPLE, (name, size)][::EVERY]):.2f}" for size in SIZES]
        for name in COMPARED
    }
    print_table(f"time per batch, {BATCHES} batches per call relative to one", map(short, SIZES), rows)


def growth(rounds: int = 150) -> None:
    """Growth of the cost of a sample from 10 thousand to 10 million transitions, in 7 GB of memory."""
    rows = {}
    for label, (plain, ours) in PAIRS.items():
        times = measure((plain, ours), GROWTH, rounds, evict=True)
        added = [float(np.median(times[SAMPLE, (ours, size)] - times[SAMPLE, (plain, size)])) for size in GROWTH]
        rows[label] = [*(f"{value:.0f}" for value in added), f"{added[1] / added[0]:.2f}"]
        gc.collect()  # frees memory before the next buffers are filled
    print_table("hindsight adds to a sample, µs", [*map(short, GROWTH), "growth"], rows)


def writes(contender: Any) -> Turn:
    """Return a turn that writes chunks of several sizes, with times per transition."""

    def turn(chunks: dict[int, Any]) -> Iterator[tuple[int, float]]:
        for episodes, transitions in chunks.items():
            yield episodes, timed(contender.extend, contender.prepare(transitions))[0] / episodes / EPISODE_STEPS

    return turn


def write(rounds: int = 300) -> None:
    """Writes of 50, 200 and 1,000 transitions, and `add` of one."""
    names = PLAIN, OURS, AUGMENTATION, CPPRB, BY_STEP, *PAIRS["`PackedStorage`"]
    contenders = {name: CONTENDERS[name](ROWS) for name in names}
    for contender in tqdm(contenders.values(), desc="filling", unit="buffer"):
        contender.fill()
    turns = {name: writes(contender) for name, contender in contenders.items()}
    times = take_turns(turns, rounds, lambda _: {episodes: make_episodes(episodes) for episodes in CHUNKS})
    columns = [f"{episodes * EPISODE_STEPS:,}" for episodes in CHUNKS]
    rows = {name: [cell(times[each, name], times[each, CPPRB], 1) for each in CHUNKS] for name in names[:5]}
    print_table("transitions in a write, µs per transition, ratio to cpprb", columns, rows)
    rows = {
        label: [f"{ratio(times[each, ours], times[each, plain]):.2f}" for each in CHUNKS]
        for label, (plain, ours) in PAIRS.items()
    }
    print_table("transitions in a write, `HERTransform` relative to no hindsight", columns, rows)
    add(max(1, rounds // 10), {name: contenders[name] for pair in PAIRS.values() for name in pair})


def adds(contender: Any) -> Turn:
    """Return a turn that adds an episode one transition at a time. As in training, a sample follows each `add`."""

    def turn(transition: Any) -> Iterator[tuple[str, float]]:
        yield "", timed(contender.buffer.add, transition.clone())[0]
        contender.sample()

    return turn


def add(episodes: int, contenders: dict[str, Any]) -> None:
    """Print the time of `add`, and its mean over an episode, which includes the last transition."""
    data = make_episodes(episodes)
    turns = {name: adds(contender) for name, contender in contenders.items()}
    times = {name: of for (_, name), of in take_turns(turns, len(data), data.__getitem__).items()}
    means = {name: of.reshape(episodes, EPISODE_STEPS).mean(axis=1) for name, of in times.items()}
    rows = {name: [cell(times[name], times[PLAIN]), cell(means[name], means[PLAIN])] for name in contenders}
    print_table("`add` of one transition, µs", ("median", "mean over an episode"), rows)
