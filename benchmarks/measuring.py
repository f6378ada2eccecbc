"""Measures replay buffers in turns: the time of each operation, and checks of the sampled batches."""

import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from contenders import CONTENDERS, PLAIN, WITHOUT_HINDSIGHT
from contenders.transitions import BATCHES, THRESHOLD, UNREACHABLE, Transitions, make_episodes
from torchrl import torchrl_logger
from tqdm import tqdm

WARM_UP = 50  # batches that are sampled and checked before the clock starts
ROUNDS_TO_MANY = 4  # one round in this many also draws several batches in one call, which is slow

SAMPLE, EXTEND, BOTH, MANY = "sample", "extend", "extend + sample", f"{BATCHES} batches per call, per batch"
OPERATIONS = SAMPLE, MANY, BOTH, EXTEND

_scratch = np.zeros(2**25, dtype=np.uint8)


def set_up() -> None:
    """Seed the generators, use one thread, and silence TorchRL's log."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torchrl_logger.setLevel("WARNING")


def evict_caches() -> None:
    """Write 32 MiB, so that the processor's caches are as cold as after an update."""
    np.add(_scratch, 1, out=_scratch)


@dataclass
class Measured:
    """One contender at one size, with its times in µs by round and the counts of its checks."""

    name: str
    size: int
    contender: Any
    times: dict[str, list[float]] = field(default_factory=lambda: {operation: [] for operation in OPERATIONS})
    sampled: int = 0
    relabelled: int = 0
    uneven_batches: int = 0
    wrong_rewards: int = 0
    relabelled_rewards: set[float] = field(default_factory=set)

    def fill(self) -> None:
        """Fill the buffer and check its first batches."""
        self.contender.fill()
        for _ in range(WARM_UP):
            self.check(self.contender.sample())
        for batch in self.contender.sample_many(BATCHES):
            self.check(batch)

    def turn(self, transitions: Transitions, many: bool) -> None:
        """Time `extend`, `sample`, another `sample` and, if ``many``, several batches in one call."""
        data = self.contender.prepare(transitions)
        start = time.perf_counter_ns()
        self.contender.extend(data)
        extended = time.perf_counter_ns()
        first = self.contender.sample()
        sampled = time.perf_counter_ns()
        second = self.contender.sample()
        end = time.perf_counter_ns()
        batches = self.contender.sample_many(BATCHES) if many else []
        drawn = time.perf_counter_ns()

        self.times[EXTEND].append((extended - start) / 1e3)
        self.times[BOTH].append((sampled - start) / 1e3)
        self.times[SAMPLE].append((end - sampled) / 1e3)
        if many:
            self.times[MANY].append((drawn - end) / 1e3 / BATCHES)
        for batch in (first, second, *batches):
            self.check(batch)

    def check(self, batch: Any) -> None:
        """Count the relabelled transitions and the wrong rewards of a batch."""
        data = self.contender.read(batch)
        relabelled = data.desired_goal[:, 0] < UNREACHABLE
        difference = data.next_achieved_goal.astype(np.float64) - data.desired_goal
        distance = np.sqrt((difference**2).sum(-1))
        # At the threshold, the reward depends on rounding in float32.
        clear = np.abs(distance - THRESHOLD) > 1e-6
        expected = np.where(distance > THRESHOLD, -1.0, 0.0)
        self.sampled += len(relabelled)
        self.relabelled += int(relabelled.sum())
        low, high = self.share(0.6, 0.95)
        self.uneven_batches += not low <= relabelled.mean() <= high
        self.wrong_rewards += int(((data.reward != expected) & clear).sum())
        self.relabelled_rewards.update(np.unique(data.reward[relabelled]).tolist())

    def share(self, low: float, high: float) -> tuple[float, float]:
        """Return the limits for the share of relabelled transitions, which is 0 without hindsight."""
        return (0.0, 0.0) if self.name in WITHOUT_HINDSIGHT else (low, high)

    def failures(self) -> list[str]:
        """Describe the failed checks of the sampled batches."""
        low, high = self.share(0.78, 0.82)
        fraction = self.relabelled / self.sampled
        failures = []
        if not low <= fraction <= high:
            failures.append(f"{fraction:.3f} of the transitions are relabelled, not {low} to {high}")
        if self.uneven_batches:
            failures.append(f"{self.uneven_batches} batches have a very different share of relabelled transitions")
        if self.wrong_rewards:
            failures.append(f"{self.wrong_rewards} of {self.sampled} rewards do not match their goals")
        if self.name not in WITHOUT_HINDSIGHT and self.relabelled_rewards != {0.0, -1.0}:
            failures.append(f"relabelled transitions have the rewards {self.relabelled_rewards}, not 0 and -1")
        return [f"{self.name}, {self.size:,} stored: {failure}" for failure in failures]


Results = dict[tuple[str, int], Measured]


def measure(names: list[str], sizes: list[int], rounds: int, evict: bool = False) -> Results:
    """Fill all buffers, and measure them in turns, in shuffled order.

    ``evict`` evicts the caches before each turn. Use it for few buffers, whose turns leave the caches warm.
    """
    measured = {(name, size): Measured(name, size, CONTENDERS[name](size)) for size in sizes for name in names}
    for each in (progress := tqdm(measured.values(), desc="filling", unit="buffer")):
        progress.set_postfix_str(f"{each.name}, {each.size:,}")
        each.fill()

    rng = np.random.default_rng(1)
    for number in tqdm(range(rounds), desc="measuring", unit="round"):
        transitions = make_episodes(1, rng)
        for size in random.sample(sizes, len(sizes)):
            for name in random.sample(names, len(names)):
                if evict:
                    evict_caches()
                measured[name, size].turn(transitions, many=number % ROUNDS_TO_MANY == 0)
    return measured


def times(results: Results, operation: str, size: int, name: str) -> np.ndarray:
    """Return the times by round in µs, or a single NaN if they were not measured."""
    if (name, size) not in results:
        return np.array([np.nan])
    return np.array(results[name, size].times[operation])


def ratio(results: Results, operation: str, size: int, name: str, other: str = PLAIN) -> float:
    """Return the median ratio of the times of two contenders within a round, or NaN if one was not measured."""
    return float(np.median(times(results, operation, size, name) / times(results, operation, size, other)))


def ratio_of_many(results: Results, size: int, name: str) -> float:
    """Return the median ratio of the time per batch of several in a call to the time of a single batch."""
    one = times(results, SAMPLE, size, name)[::ROUNDS_TO_MANY]
    return float(np.median(times(results, MANY, size, name) / one))


def added(results: Results, size: int, name: str, plain: str) -> float:
    """Return the cost of hindsight per sample in µs: the median of the differences within a round."""
    return float(np.median(times(results, SAMPLE, size, name) - times(results, SAMPLE, size, plain)))
