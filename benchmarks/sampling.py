"""Cost of hindsight: `sample(256)` and `extend(50)` of several replay buffers, measured side by side.

All contenders store the same kind of transitions: a 25-float observation, 3-float goals, a 4-float action, 50-step
episodes, reward 0 within 0.05 of the goal and -1 elsewhere. First, all buffers of all sizes are filled. Then each round
visits every size, and every contender at this size, in shuffled order, so that a drift of the machine affects all
alike. A turn is `extend(50)`, `sample(256)` and another `sample(256)`, on one thread. In every fourth round, each turn
also draws 16 batches of 256 in one call. The turns of the other contenders leave the processor's caches cold, as an
update does in training. The same calls in a tight loop are faster, plain sampling most of all.

Ratios are medians of the ratios within a round. Every sampled batch is checked outside the measured time: the share of
relabelled transitions, and whether the rewards match the goals. `docs/reference/results/speed.md` shows the tables. The
last one is the memory of a stored transition, with and without `CompactGoals`, and of a goal in the goal table, which
is in `docs/reference/results/memory.md`.

"packed" marks the buffers with `PackedStorage`. "does nothing" and "draws nothing" are transforms that show the cost of
calling a transform, and the cost of hindsight without drawing goals. They are not in the picture.

Writes `sampling.csv` and `sampling.png`. Fails if a check fails, but not if a target is missed.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from contenders import (
    AUGMENTATION,
    CONTENDERS,
    CPPRB,
    FILE,
    FLOORS,
    OURS,
    PACKED,
    PACKED_AUGMENTATION,
    PACKED_OURS,
    PLAIN,
    SB3,
    TORCHRL,
    TorchRL,
)
from contenders.transitions import BATCHES, EPISODE_STEPS, GOAL, THRESHOLD, K, make_transitions
from measuring import BOTH, EXTEND, MANY, OPERATIONS, SAMPLE, Results, added, measure, ratio, ratio_of_many, set_up
from report import (
    LABELS,
    Target,
    draw,
    print_checks,
    print_table,
    print_targets,
    print_times,
    short,
    summarize,
    write_csv,
)
from torchrl.data import LazyTensorStorage, Storage, TensorDictReplayBuffer
from torchrl.envs import Compose

from torchrl_her import CompactGoals, HERTransform, PackedStorage, SparseReward

SMALL, MIDDLE, HALF, LARGE = SIZES = 10_000, 100_000, 500_000, 1_000_000


def targets(results: Results) -> Iterator[Target]:
    """Yield the targets for sampling and writing."""

    def to(operation: str, size: int, name: str, other: str, limit: float) -> Target:
        what = f"{name}: {operation} at {size:,}, ratio to {other}"
        return Target(what, ratio(results, operation, size, name, other), limit)

    yield to(MANY, HALF, PACKED_OURS, CPPRB, 1.3)
    yield to(MANY, HALF, PACKED_AUGMENTATION, CPPRB, 0.5)
    for other, limit in ((SB3, 0.5), (TORCHRL, 0.33)):
        for size in SIZES:
            yield to(MANY, size, PACKED_OURS, other, limit)
    for name, limits in ((PACKED_OURS, (1.15, 0.65)), (OURS, (1.7, 1.45)), (PACKED, (0.55, 0.4))):
        for size, limit in zip((SMALL, LARGE), limits, strict=True):
            yield to(SAMPLE, size, name, PLAIN, limit)
    for name, limit in ((OURS, 1.4), (PACKED_OURS, 1.1), (PACKED, 1.1)):
        for size in (SMALL, MIDDLE, LARGE):
            yield to(EXTEND, size, name, PLAIN, limit)
    for name in (AUGMENTATION, PACKED_AUGMENTATION):
        for size in (SMALL, MIDDLE, LARGE):
            yield to(SAMPLE, size, name, PLAIN, 1.1)
    for size in (SMALL, MIDDLE, LARGE):
        yield to(EXTEND, size, AUGMENTATION, CPPRB, 1.0)
    for name in (OURS, PACKED_OURS):
        for other in (TORCHRL, SB3):
            alone = ratio(results, SAMPLE, LARGE, other, name)
            text = f"{other} to {name}, {BOTH} at {LARGE:,} (sample alone: {alone:.2f})"
            yield Target(text, ratio(results, BOTH, LARGE, other, name), 2.0, at_least=True)
    yield Target("goal table, bytes per transition besides the goal", round(table_bytes(), 1), 48)


def print_tables(results: Results) -> None:
    """Print the tables of `docs/reference/results/speed.md` and `docs/how-to/several-batches-per-call.md`."""
    names, sizes = (list(dict.fromkeys(keys)) for keys in zip(*results, strict=True))
    compared = [name for name in names if name not in FLOORS]
    print("\nMedian time in µs, and the median of the ratios to no hindsight in the same round")
    for operation in OPERATIONS:
        print_times(results, operation, compared)
    if floors := [name for name in names if name in FLOORS]:
        print_times(results, SAMPLE, floors)
    saved = ((LABELS[name], [f"{ratio_of_many(results, size, name):.2f}" for size in sizes]) for name in compared)
    print_table(f"time per batch, {BATCHES} batches per call relative to one", map(short, sizes), saved)
    by_storage = (("`LazyTensorStorage`", OURS, PLAIN), ("`PackedStorage`", PACKED_OURS, PACKED))
    adds = ((label, [f"{added(results, size, *pair):.0f}" for size in sizes]) for label, *pair in by_storage)
    print_table("hindsight adds to a sample, µs", map(short, sizes), adds)


def print_memory() -> None:
    print("\nBytes per transition, with the flags at the root that collectors write")
    for storage in (LazyTensorStorage, PackedStorage):
        whole, compact = (stored_bytes(storage, compact) for compact in (False, True))
        print(f"{storage.__name__:<18} {whole:.0f}, with CompactGoals {compact:.0f}: {whole - compact:.0f} less")
    print(f"Goal table, besides the {4 * GOAL} bytes of the goal: {table_bytes():.1f}")


def stored_bytes(storage: type[Storage], compact: bool) -> float:
    """Return the bytes per transition in the storage of a full buffer."""
    size = 1_000
    transitions = TorchRL(size).prepare(next(make_transitions(size)))
    transitions.update(dict.fromkeys(("done", "terminated", "truncated"), torch.zeros(size, 1, dtype=torch.bool)))
    transform = Compose(*[CompactGoals()] * compact, HERTransform(SparseReward(THRESHOLD), capacity=size))
    buffer = TensorDictReplayBuffer(storage=storage(size), transform=transform)
    buffer.extend(transitions)
    entries = buffer.storage[:].values(include_nested=True, leaves_only=True)
    stores = {store.data_ptr(): store.nbytes() for store in (entry.untyped_storage() for entry in entries)}
    return sum(stores.values()) / size


def table_bytes() -> float:
    """Return the bytes per transition in the goal table, without the goal."""
    size = 100_000
    transform = HERTransform(SparseReward(THRESHOLD), capacity=size)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform)
    buffer.extend(TorchRL(size).prepare(next(make_transitions(size))))
    table = transform._episodes.table
    assert table is not None
    columns = (table.matrix, table.episodes, table.pieces)
    stores = {store.data_ptr(): store.nbytes() for store in (column.untyped_storage() for column in columns)}
    return sum(stores.values()) / size - 4 * GOAL


def parse_arguments() -> argparse.Namespace:
    in_memory = [name for name in CONTENDERS if name != FILE]
    parser = argparse.ArgumentParser(description="Cost of hindsight in several replay buffers.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=1000, help="turns of every contender at every size")
    parser.add_argument("--contenders", nargs="+", choices=in_memory, default=in_memory)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    arguments = parser.parse_args()
    whole = EPISODE_STEPS * (K + 1)
    if any(size < whole or size % whole for size in arguments.sizes):
        parser.error(f"sizes must be multiples of {whole}, so that whole episodes fill every buffer")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    set_up()
    packages = "torch", "torchrl", "tensordict", "stable-baselines3", "cpprb", "numpy"
    print(", ".join(f"{package} {version(package)}" for package in packages))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {arguments.rounds} rounds")

    results = measure(arguments.contenders, list(arguments.sizes), arguments.rounds)
    rows = summarize(results)
    write_csv(rows, arguments.output / "sampling.csv")
    draw(rows, arguments.output / "sampling.png")
    print_tables(results)
    print_checks(results)
    print_memory()
    print_targets(targets(results))
    if failures := [failure for each in results.values() for failure in each.failures()]:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
