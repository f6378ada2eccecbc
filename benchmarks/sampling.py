"""What hindsight costs: `sample(256)` and `extend(50)` of replay buffers, side by side in one run.

Every contender holds the same kind of transitions: a 25-float observation, 3-float goals, a 4-float action,
50-step episodes, reward 0 within 0.05 of the goal and -1 elsewhere. All buffers of all sizes are filled.
Then each round visits every size, and there every contender, both in shuffled order, so that a drift of the
machine hits all alike. One turn is `extend(50)`, `sample(256)` and another `sample(256)`, on one thread.
The turns of the others between leave the processor's caches cold, as an update does in training: the same
calls in a tight loop are faster, and plain sampling most of all.

Ratios are medians of the ratios within a round. Every sampled batch is checked outside the clock: how much of
it is relabelled, and whether its rewards are those of the goals that it came with. At the end stands what a stored
transition takes, and what `CompactGoals` saves of it.

"packed" are the buffers with `PackedStorage`. `--ten-million` measures it in a memory-mapped file, too, with one
million and with ten million transitions (3 GB of disk). "does nothing" and "draws nothing" are transforms that show
what calling one costs, and what hindsight costs without its goals; they are not in the picture.

Writes `sampling.csv` and `sampling.png`. Fails where a check fails, and not where a target is missed.
"""

import argparse
import csv
import os
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from operator import ge, le
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from contenders import (
    AUGMENTATION,
    BATCH_SIZE,
    CONTENDERS,
    CPPRB,
    EPISODE_STEPS,
    FILE,
    FLOORS,
    OURS,
    PACKED,
    PACKED_AUGMENTATION,
    PACKED_OURS,
    PLAIN,
    SB3,
    THRESHOLD,
    TORCHRL,
    UNREACHABLE,
    WITHOUT_HINDSIGHT,
    K,
    TorchRL,
    Transitions,
    make_episodes,
    make_transitions,
)
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage, Storage, TensorDictReplayBuffer
from torchrl.envs import Compose
from tqdm import tqdm

from torchrl_her import CompactGoals, HERTransform, PackedStorage, SparseReward

WARM_UP = 50  # batches that are sampled and checked before the clock starts

OPERATIONS = "sample", "extend + sample", "extend"
COLOURS = {
    PLAIN: "#6e6e6e",
    OURS: "#b2182b",
    PACKED: "#bdbdbd",
    PACKED_OURS: "#ef6548",
    AUGMENTATION: "#7b4ea3",
    PACKED_AUGMENTATION: "#c5a6e0",
    TORCHRL: "#1f77b4",
    SB3: "#e69f00",
    CPPRB: "#56b4a0",
}


@dataclass
class Measured:
    """One contender at one size: its times in µs, round by round, and what its batches held."""

    name: str
    size: int
    contender: Any
    times: dict[str, list[float]] = field(default_factory=lambda: {operation: [] for operation in OPERATIONS})
    sampled: int = 0
    relabelled: int = 0
    wrong_rewards: int = 0
    relabelled_rewards: set[float] = field(default_factory=set)

    def turn(self, transitions: Transitions) -> None:
        """`extend`, `sample`, `sample`."""
        data = self.contender.prepare(transitions)
        start = time.perf_counter_ns()
        self.contender.extend(data)
        extended = time.perf_counter_ns()
        first = self.contender.sample()
        sampled = time.perf_counter_ns()
        second = self.contender.sample()
        end = time.perf_counter_ns()

        self.times["extend"].append((extended - start) / 1e3)
        self.times["extend + sample"].append((sampled - start) / 1e3)
        self.times["sample"].append((end - sampled) / 1e3)
        self.check(first)
        self.check(second)

    def check(self, batch: Any) -> None:
        """Count the relabelled transitions and the wrong rewards, from nothing but the batch."""
        data = self.contender.read(batch)
        relabelled = data.desired_goal[:, 0] < UNREACHABLE
        difference = data.next_achieved_goal.astype(np.float64) - data.desired_goal
        distance = np.sqrt((difference**2).sum(-1))
        # At the threshold itself, the contenders' rounding in float32 decides.
        clear = np.abs(distance - THRESHOLD) > 1e-6
        expected = np.where(distance > THRESHOLD, -1.0, 0.0)
        self.sampled += len(relabelled)
        self.relabelled += int(relabelled.sum())
        self.wrong_rewards += int(((data.reward != expected) & clear).sum())
        self.relabelled_rewards.update(np.unique(data.reward[relabelled]).tolist())

    def failures(self) -> list[str]:
        """What is wrong with the sampled batches, in words."""
        low, high = (0.0, 0.0) if self.name in WITHOUT_HINDSIGHT else (0.78, 0.82)
        fraction = self.relabelled / self.sampled
        failures = []
        if not low <= fraction <= high:
            failures.append(f"{fraction:.3f} of the transitions are relabelled, not {low} to {high}")
        if self.wrong_rewards:
            failures.append(f"{self.wrong_rewards} of {self.sampled} rewards are not those of their goals")
        if self.name not in WITHOUT_HINDSIGHT and self.relabelled_rewards != {0.0, -1.0}:
            failures.append(f"relabelled transitions have the rewards {self.relabelled_rewards}, not 0 and -1")
        return [f"{self.name}, {self.size:,} stored: {failure}" for failure in failures]


def measure(names: list[str], sizes: list[int], rounds: int) -> dict[tuple[str, int], Measured]:
    measured = {(name, size): Measured(name, size, CONTENDERS[name](size)) for size in sizes for name in names}
    for each in (progress := tqdm(measured.values(), desc="filling", unit="buffer")):
        progress.set_postfix_str(f"{each.name}, {each.size:,}")
        each.contender.fill()
        for _ in range(WARM_UP):
            each.check(each.contender.sample())

    rng = np.random.default_rng(1)
    for _ in tqdm(range(rounds), desc="measuring", unit="round"):
        transitions = make_episodes(1, rng)
        for size in random.sample(sizes, len(sizes)):
            for name in random.sample(names, len(names)):
                measured[name, size].turn(transitions)
    return measured


Results = dict[tuple[str, int], Measured]


def times(results: Results, operation: str, size: int, name: str) -> np.ndarray:
    """The times by round in µs; one NaN where this was not measured."""
    if (name, size) not in results:
        return np.array([np.nan])
    return np.array(results[name, size].times[operation])


def ratio(results: Results, operation: str, size: int, name: str, other: str = PLAIN) -> float:
    """Name's time to the other's: the median of the ratios within a round; NaN where one was not measured."""
    return float(np.median(times(results, operation, size, name) / times(results, operation, size, other)))


def added(results: Results, size: int) -> float:
    """What hindsight adds to a sample, in µs: the median of the differences within a round."""
    return float(np.median(times(results, "sample", size, OURS) - times(results, "sample", size, PLAIN)))


def summarize(results: Results) -> list[dict[str, Any]]:
    """One row per operation, size and contender."""
    rows = []
    for operation, (name, size) in product(OPERATIONS, results):
        each = results[name, size]
        low, median, high = np.percentile(each.times[operation], (10, 50, 90))
        rows.append(
            {
                "operation": operation,
                "stored": size,
                "contender": name,
                "median_us": round(median, 1),
                "p10_us": round(low, 1),
                "p90_us": round(high, 1),
                "ratio": round(ratio(results, operation, size, name), 3),
                "relabelled": round(each.relabelled / each.sampled, 4),
                "wrong_rewards": each.wrong_rewards,
                "rows_at_the_end": len(each.contender),
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    print("Median time in µs (10th to 90th percentile), ratio to no hindsight")
    sizes = list(dict.fromkeys(row["stored"] for row in rows))
    for operation in OPERATIONS:
        print(f"\n{operation:<22}" + "".join(f"{size:>30,}" for size in sizes))
        for name in dict.fromkeys(row["contender"] for row in rows):
            cells = (
                "{median_us:.0f} ({p10_us:.0f} to {p90_us:.0f}) {ratio:6.2f}".format(**row)
                for row in rows
                if (row["operation"], row["contender"]) == (operation, name)
            )
            print(f"{name:<22}" + "".join(f"{cell:>30}" for cell in cells))


def print_checks(results: Results) -> None:
    print("\nChecked in every sampled batch: relabelled fraction, rewards that differ from those recomputed")
    for (name, size), each in results.items():
        print(
            f"{name:<22} {size:>10,} stored: {each.relabelled / each.sampled:.3f} relabelled, "
            f"{each.wrong_rewards} of {each.sampled:,} rewards wrong, {len(each.contender):,} rows at the end"
        )


def print_targets(results: Results) -> None:
    small, middle, large = 10_000, 100_000, 1_000_000
    huge = 10 * large
    targets = []
    for size, limit in ((small, 1.6), (middle, 1.6), (large, 1.5)):
        value = ratio(results, "sample", size, OURS)
        targets.append((f"sample at {size:,}, ratio to no hindsight", value, le, limit))
    least, most = added(results, small), added(results, large)
    growth = f"what hindsight adds to a sample: {most:.0f} µs at {large:,} to {least:.0f} µs at {small:,}"
    targets.append((growth, most / least, le, 1.3))
    for name in (OURS, PACKED_OURS):
        for other in (TORCHRL, SB3):
            value = ratio(results, "extend + sample", large, other, name)
            alone = ratio(results, "sample", large, other, name)
            text = f"{other} to {name}, extend + sample at {large:,} (sample alone: {alone:.2f})"
            targets.append((text, value, ge, 2.0))
        for size in (small, middle, large):
            value = ratio(results, "extend", size, name)
            targets.append((f"{name}: extend({EPISODE_STEPS}) at {size:,}, ratio to no hindsight", value, le, 1.5))
    for size in (small, middle, large):
        for name in (AUGMENTATION, PACKED_AUGMENTATION):
            value = ratio(results, "sample", size, name)
            targets.append((f"{name}: sample at {size:,}, ratio to no hindsight", value, le, 1.1))
        value = ratio(results, "extend", size, AUGMENTATION, CPPRB)
        targets.append((f"{AUGMENTATION}: extend({EPISODE_STEPS}) at {size:,}, ratio to {CPPRB}", value, le, 1.0))
    for name, limits in ((PACKED, (0.55, 0.4)), (PACKED_OURS, (1.0, 0.6))):
        for size, limit in zip((small, large), limits, strict=True):
            value = ratio(results, "sample", size, name)
            targets.append((f"{name}: sample at {size:,}, ratio to no hindsight", value, le, limit))
    value = ratio(results, "sample", large // 2, PACKED_OURS, CPPRB)
    targets.append((f"{PACKED_OURS}: sample at {large // 2:,}, ratio to {CPPRB}", value, le, 2.0))
    for size in (small, middle, large):
        value = ratio(results, "extend", size, PACKED)
        targets.append((f"{PACKED}: extend at {size:,}, ratio to no hindsight", value, le, 1.1))
    value = np.median(times(results, "sample", huge, FILE) / times(results, "sample", large, FILE))
    targets.append((f"{FILE}: sample at {huge:,}, ratio to {large:,}", value, le, 1.5))

    print("\nTargets")
    for text, value, compare, limit in targets:
        reached = "not measured" if np.isnan(value) else "reached" if compare(value, limit) else "MISSED"
        bound = "at most" if compare is le else "at least"
        print(f"{reached:<12} {value:6.2f} ({bound} {limit}): {text}")


def print_memory() -> None:
    print("\nBytes per transition, with the flags at the root that collectors write")
    for storage in (LazyTensorStorage, PackedStorage):
        whole, compact = (stored_bytes(storage, compact) for compact in (False, True))
        print(f"{storage.__name__:<18} {whole:.0f}, with CompactGoals {compact:.0f}: {whole - compact:.0f} less")


def stored_bytes(storage: type[Storage], compact: bool) -> float:
    """What the storage of a full buffer takes for each transition."""
    size = 1_000
    transitions = TorchRL(size).prepare(next(make_transitions(size)))
    transitions.update(dict.fromkeys(("done", "terminated", "truncated"), torch.zeros(size, 1, dtype=torch.bool)))
    transform = Compose(*[CompactGoals()] * compact, HERTransform(SparseReward(THRESHOLD), capacity=size))
    buffer = TensorDictReplayBuffer(storage=storage(size), transform=transform)
    buffer.extend(transitions)
    entries = buffer.storage[:].values(include_nested=True, leaves_only=True)
    stores = {store.data_ptr(): store.nbytes() for store in (entry.untyped_storage() for entry in entries)}
    return sum(stores.values()) / size


def draw(results: Results, path: Path) -> None:
    names, sizes = (list(dict.fromkeys(keys)) for keys in zip(*results, strict=True))
    names = [name for name in names if name not in FLOORS]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    titles = {
        "sample": f"sample({BATCH_SIZE})",
        "extend + sample": f"extend({EPISODE_STEPS}) + sample({BATCH_SIZE})",
    }
    width = 0.8 / len(names)
    for panel, (operation, title) in zip(panels, titles.items(), strict=True):
        for i, name in enumerate(names):
            low, median, high = np.transpose(
                [np.percentile(results[name, size].times[operation], (10, 50, 90)) for size in sizes]
            )
            left = np.arange(len(sizes)) + (i - (len(names) - 1) / 2) * width
            label = name if operation == "sample" else None
            spread = median - low, high - median
            panel.errorbar(left, median, yerr=spread, fmt="o", ms=5, color=COLOURS[name], label=label)
        panel.set(title=title, xlabel="rows stored", yscale="log")
        panel.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(axis="y", alpha=0.25)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("µs: median, 10th to 90th percentile")
    figure.legend(loc="outside upper center", ncols=(len(names) + 1) // 2, frameon=False)
    figure.savefig(path, dpi=130)


def parse_arguments() -> argparse.Namespace:
    in_memory = [name for name in CONTENDERS if name != FILE]
    parser = argparse.ArgumentParser(description="What hindsight costs, in several replay buffers.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 500_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=1000, help="turns of every contender at every size")
    parser.add_argument("--contenders", nargs="+", choices=in_memory, default=in_memory)
    parser.add_argument("--ten-million", action="store_true", help="also measure ten million transitions in a file")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="a folder")
    arguments = parser.parse_args()
    whole = EPISODE_STEPS * (K + 1)
    if any(size < whole or size % whole for size in arguments.sizes):
        parser.error(f"sizes are multiples of {whole}, so that whole episodes fill every buffer")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torchrl_logger.setLevel("WARNING")
    packages = "torch", "torchrl", "tensordict", "stable-baselines3", "cpprb", "numpy"
    print(", ".join(f"{package} {version(package)}" for package in packages))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {arguments.rounds} rounds")

    results = measure(arguments.contenders, arguments.sizes, arguments.rounds)
    in_file = measure([FILE], [1_000_000, 10_000_000], arguments.rounds) if arguments.ten_million else {}
    rows = summarize(results)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with open(arguments.output / "sampling.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows + summarize(in_file))
    draw(results, arguments.output / "sampling.png")

    print_rows(rows)
    if in_file:
        print_rows(summarize(in_file))
    results |= in_file
    print_checks(results)
    print_memory()
    print_targets(results)
    if failures := [failure for each in results.values() for failure in each.failures()]:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
