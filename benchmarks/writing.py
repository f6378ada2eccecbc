"""Cost of writing a transition with four relabelled copies, in chunks of several sizes.

The same transitions are written to `HindsightAugmentation` and to cpprb's `HindsightReplayBuffer` in turn, in shuffled
order and on one thread. Every chunk consists of whole episodes of 50 steps (see `contenders/transitions.py`). cpprb is
written in two ways: an episode at a time, and a step at a time, as in its examples. The table also shows TorchRL's
buffer without hindsight.

A second table shows the cost of `add` for a single transition, with and without `HERTransform`. Episodes are written
one transition at a time, with the trajectory ids of a collector, into each buffer in turn. As in a training loop, a
`sample(256)` follows each `add`, outside the measured time, so that the caches are equally cold.
"""

import argparse
import random
import time

import numpy as np
from contenders import AUGMENTATION, CONTENDERS, CPPRB, OURS, PACKED, PACKED_OURS, PLAIN, Cpprb
from contenders.transitions import EPISODE_STEPS, make_episodes
from measuring import set_up
from report import LABELS, Target, print_table, print_targets
from tqdm import tqdm

ROWS = 100_000  # stored
CHUNKS = 1, 4, 20  # episodes


class CpprbByStep(Cpprb):
    """cpprb's buffer, to which each step is added separately."""

    def extend(self, data: list[tuple]) -> None:
        """Write step by step, and relabel at the end of each episode."""
        for episode, goal in data:
            for step in range(EPISODE_STEPS):
                self.buffer.add(**{key: value[step] for key, value in episode.items()})
            self.buffer.on_episode_end(goal)


BY_STEP = f"{CPPRB}, step by step"
LABELS_OF_COPIES = {
    PLAIN: "no hindsight, no copies",
    OURS: "`HERTransform`, no copies",
    AUGMENTATION: "`HindsightAugmentation`",
    CPPRB: "cpprb, an episode at a time",
    BY_STEP: "cpprb, a step at a time, as in its examples",
}
KINDS = {name: CONTENDERS[name] for name in (PLAIN, OURS, AUGMENTATION, CPPRB)} | {BY_STEP: CpprbByStep}


def measure(rounds: int) -> dict[tuple[str, int], list[float]]:
    """Return the times of writes by contender and episodes per chunk, in µs per transition."""
    contenders = {name: kind(ROWS) for name, kind in KINDS.items()}
    for each in tqdm(contenders.values(), desc="filling", unit="buffer"):
        each.fill()
    rng = np.random.default_rng(1)
    times: dict[tuple[str, int], list[float]] = {(name, episodes): [] for episodes in CHUNKS for name in contenders}
    for _ in tqdm(range(rounds), desc="measuring", unit="round"):
        for episodes in CHUNKS:
            transitions = make_episodes(episodes, rng)
            for name in random.sample(list(contenders), len(contenders)):
                data = contenders[name].prepare(transitions)
                start = time.perf_counter_ns()
                contenders[name].extend(data)
                times[name, episodes].append((time.perf_counter_ns() - start) / 1e3 / episodes / EPISODE_STEPS)
    return times


def measure_add(episodes: int) -> dict[str, np.ndarray]:
    """Return the times of `add` by contender in µs, ``[episodes, EPISODE_STEPS]``."""
    contenders = {name: CONTENDERS[name](ROWS) for name in (PLAIN, OURS, PACKED, PACKED_OURS)}
    for each in tqdm(contenders.values(), desc="filling", unit="buffer"):
        each.fill()
    rng = np.random.default_rng(2)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in tqdm(range(episodes), desc="measuring add", unit="episode"):
        transitions = make_episodes(1, rng)
        data = {name: contender.prepare(transitions) for name, contender in contenders.items()}
        for step in range(EPISODE_STEPS):
            for name in random.sample(list(contenders), len(contenders)):
                transition = data[name][step].clone()
                start = time.perf_counter_ns()
                contenders[name].buffer.add(transition)
                times[name].append((time.perf_counter_ns() - start) / 1e3)
                contenders[name].sample()
    return {name: np.reshape(values, (episodes, EPISODE_STEPS)) for name, values in times.items()}


def print_add(times: dict[str, np.ndarray]) -> None:
    """Print the median time of `add`, and the median over episodes of the mean time, which includes their ends."""
    rows = []
    for name in times:
        cells = []
        for reduce in (np.asarray, lambda values: values.mean(axis=1)):
            values = reduce(times[name])
            cells.append(f"{np.median(values):.0f} ({np.median(values / reduce(times[PLAIN])):.2f})")
        rows.append((LABELS[name], cells))
    print_table("`add` of one transition, µs", ("median", "mean over an episode"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="number of measurements")
    parser.add_argument("--episodes", type=int, default=30, help="episodes that are added one transition at a time")
    arguments = parser.parse_args()
    set_up()
    times = measure(arguments.rounds)
    print("Median time to write a transition in µs, and the median of the ratios to cpprb in the same round")
    rows = []
    for name in KINDS:
        cells = [
            f"{np.median(times[name, episodes]):.1f} "
            f"({np.median(np.divide(times[name, episodes], times[CPPRB, episodes])):.2f})"
            for episodes in CHUNKS
        ]
        rows.append((LABELS_OF_COPIES[name], cells))
    print_table("transitions in a write", (f"{episodes * EPISODE_STEPS:,}" for episodes in CHUNKS), rows)

    times_of_add = measure_add(arguments.episodes)
    print_add(times_of_add)
    print_targets(
        Target(f"{name}: add, ratio to {PLAIN}", float(np.median(times_of_add[name] / times_of_add[PLAIN])), 1.5)
        for name in (OURS, PACKED_OURS)
    )


if __name__ == "__main__":
    main()
