"""Growth of the cost of hindsight per sample, from ten thousand to ten million stored transitions.

For each storage, a buffer with `HERTransform` and one without take turns at both sizes: `extend(50)`, `sample(256)` and
another `sample(256)`, on one thread (see `sampling.py`). The processor's caches are evicted before each turn. The cost
is the median of the differences between both buffers within a round. Batches are checked as in `sampling.py`.

Ten million transitions take 3.3 GB, and at most two buffers of that size are in memory at once: 7 GB in all. `--file`
also measures `PackedStorage` in a memory-mapped file, with one million and ten million transitions (3.3 GB of disk).

Writes `growth.csv`. Fails if a check fails, but not if a target is missed.
"""

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
from contenders import FILE, OURS, PACKED, PACKED_OURS, PLAIN
from contenders.transitions import BATCH_SIZE, EPISODE_STEPS
from measuring import SAMPLE, Results, added, measure, set_up, times
from report import LABELS, Target, print_checks, print_table, print_targets, short, summarize, write_csv

PAIRS = {"LazyTensorStorage": (PLAIN, OURS), "PackedStorage": (PACKED, PACKED_OURS)}


def print_samples(results: Results, names: tuple[str, ...], sizes: list[int]) -> None:
    """Print the median times of a sample."""
    rows = [
        (LABELS[name], [f"{np.median(times(results, SAMPLE, size, name)):.0f}" for size in sizes]) for name in names
    ]
    print_table(f"`sample({BATCH_SIZE})`, µs", map(short, sizes), rows)


def ratio_of_sizes(results: Results, name: str, size: int, other: int) -> float:
    """Return the ratio of the times of a sample at two sizes: the median of the ratios within a round."""
    return float(np.median(times(results, SAMPLE, size, name) / times(results, SAMPLE, other, name)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs=2, default=[10_000, 10_000_000], help="transitions stored")
    parser.add_argument("--rounds", type=int, default=400, help="turns of each buffer at each size")
    parser.add_argument("--storages", nargs="*", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--file", action="store_true", help="also measure PackedStorage in a file")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    arguments = parser.parse_args()
    if any(size < EPISODE_STEPS or size % EPISODE_STEPS for size in arguments.sizes):
        parser.error(f"sizes must be multiples of {EPISODE_STEPS}, the number of steps in an episode")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    set_up()

    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    targets, growths = [], []

    def run(names: tuple[str, ...], sizes: list[int]) -> Results:
        results = measure(list(names), sizes, arguments.rounds, evict=True)
        print_samples(results, names, sizes)
        print_checks(results)
        rows.extend(summarize(results))
        failures.extend(failure for each in results.values() for failure in each.failures())
        return results

    small, large = arguments.sizes
    for storage in arguments.storages:
        plain, ours = PAIRS[storage]
        results = run((plain, ours), [small, large])
        growth = added(results, large, ours, plain) / added(results, small, ours, plain)
        text = f"{storage}: cost of hindsight per sample at {large:,}, ratio to {small:,}"
        targets.append(Target(text, growth, 1.3))
        values = [f"{added(results, size, ours, plain):.0f}" for size in arguments.sizes]
        growths.append((f"`{storage}`", [*values, f"{growth:.2f}"]))
        del results  # frees memory before the next buffers are filled
        gc.collect()
    if arguments.file:
        middle = large // 10
        results = run((FILE,), [middle, large])
        value = ratio_of_sizes(results, FILE, large, middle)
        targets.append(Target(f"{FILE}: sample at {large:,}, ratio to {middle:,}", value, 1.5))
    print_table("hindsight adds to a sample, µs", [*map(short, arguments.sizes), "growth"], growths)
    write_csv(rows, arguments.output / "growth.csv")
    print_targets(targets)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
