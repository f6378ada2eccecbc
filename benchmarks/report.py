"""Output of the benchmarks of buffers: Markdown tables, checks, targets, a CSV file and a picture."""

import csv
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from contenders import (
    AUGMENTATION,
    CPPRB,
    FILE,
    FLOOR,
    NO_OP,
    OURS,
    PACKED,
    PACKED_AUGMENTATION,
    PACKED_FLOOR,
    PACKED_OURS,
    PLAIN,
    SB3,
    TORCHRL,
)
from contenders.transitions import BATCH_SIZE, BATCHES, EPISODE_STEPS
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from measuring import BOTH, EXTEND, MANY, OPERATIONS, SAMPLE, Results, ratio, times

LABELS = {
    PLAIN: "`TensorDictReplayBuffer`, no hindsight",
    OURS: "the same with `HERTransform`",
    PACKED: "`PackedStorage`, no hindsight",
    PACKED_OURS: "`PackedStorage` with `HERTransform`",
    AUGMENTATION: "with `HindsightAugmentation`",
    PACKED_AUGMENTATION: "`PackedStorage` with `HindsightAugmentation`",
    TORCHRL: "TorchRL's `HERReplayBuffer`",
    SB3: "Stable-Baselines3's `HerReplayBuffer`",
    CPPRB: "cpprb's `HindsightReplayBuffer`, which relabels when it writes",
    NO_OP: "a transform that does nothing",
    FLOOR: "a transform that sets goals and rewards, and draws none",
    PACKED_FLOOR: "the same with `PackedStorage`",
    FILE: "`PackedStorage` in a file",
}
# Colours that colour-blind readers can distinguish (Okabe and Ito 2008). Packed buffers have open markers.
STYLES = {
    PLAIN: ("#000000", "o"),
    PACKED: ("#000000", "o"),
    OURS: ("#0072B2", "s"),
    PACKED_OURS: ("#0072B2", "s"),
    AUGMENTATION: ("#CC79A7", "D"),
    PACKED_AUGMENTATION: ("#CC79A7", "D"),
    TORCHRL: ("#D55E00", "^"),
    SB3: ("#E69F00", "v"),
    CPPRB: ("#009E73", "P"),
}
TITLES = {
    SAMPLE: f"`sample({BATCH_SIZE})`",
    MANY: f"{BATCHES} batches of {BATCH_SIZE} per call, per batch",
    BOTH: f"`extend({EPISODE_STEPS})` + `sample({BATCH_SIZE})`",
    EXTEND: f"`extend({EPISODE_STEPS})`",
}


def short(size: int) -> str:
    """Return a size in the form of the tables: 10 k, 1 M."""
    for unit, word in ((10**6, "M"), (1000, "k")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {word}"
    return f"{size:,}"


def print_table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Print a table in Markdown."""
    columns = list(columns)
    print(f"\n| {' | '.join([title, *columns])} |\n|{'---|' * (1 + len(columns))}")
    for name, cells in rows:
        print(f"| {' | '.join([name, *cells])} |")


def print_times(results: Results, operation: str, names: Iterable[str]) -> None:
    """Print median times in µs, and the median of the ratios to no hindsight within a round."""
    sizes = list(dict.fromkeys(size for _, size in results))
    rows = []
    for name in names:
        medians = [np.median(times(results, operation, size, name)) for size in sizes]
        ratios = [ratio(results, operation, size, name) for size in sizes]
        rows.append((LABELS[name], [f"{m:.0f} ({r:.2f})" for m, r in zip(medians, ratios, strict=True)]))
    print_table(TITLES[operation], map(short, sizes), rows)


def print_checks(results: Results) -> None:
    print("\nChecks of every sampled batch: relabelled fraction, and rewards that differ from the recomputed ones")
    for (name, size), each in results.items():
        print(
            f"{name:<22} {size:>10,} stored: {each.relabelled / each.sampled:.3f} relabelled, "
            f"{each.wrong_rewards} of {each.sampled:,} rewards wrong, {len(each.contender):,} rows at the end"
        )


class Target(NamedTuple):
    """A value and its upper limit, or its lower limit with ``at_least``."""

    text: str
    value: float
    limit: float
    at_least: bool = False


def print_targets(targets: Iterable[Target]) -> None:
    print("\nTargets")
    for text, value, limit, at_least in targets:
        is_reached = value >= limit if at_least else value <= limit
        reached = "not measured" if np.isnan(value) else "reached" if is_reached else "MISSED"
        print(f"{reached:<12} {value:6.2f} ({'at least' if at_least else 'at most'} {limit}): {text}")


def summarize(results: Results) -> list[dict[str, Any]]:
    """Return one row per operation, size and contender. Times of several batches per call are per batch."""
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


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the medians of `summarize` by contender and size, in a panel for each operation that samples."""
    names, sizes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("contender", "stored"))
    names = [name for name in STYLES if name in names]
    cells = {(row["operation"], row["contender"], row["stored"]): row for row in rows}
    figure, panels = plt.subplots(3, 1, figsize=(7.2, 8.4), sharex=True, layout="constrained")
    width = 0.8 / max(1, len(names))
    for panel, operation in zip(panels, (SAMPLE, MANY, BOTH), strict=True):
        for i, name in enumerate(names):
            colour, marker = STYLES[name]
            of_sizes = [cells[operation, name, size] for size in sizes]
            low, median, high = (np.array([row[key] for row in of_sizes]) for key in ("p10_us", "median_us", "p90_us"))
            left = np.arange(len(sizes)) + (i - (len(names) - 1) / 2) * width
            is_packed = "packed" in name
            style = {"fmt": marker, "ms": 5.5, "color": colour, "mfc": "white" if is_packed else colour}
            panel.errorbar(left, median, yerr=(median - low, high - median), label=name, **style)
        panel.set(yscale="log", ylabel="µs")
        panel.set_title(TITLES[operation].replace("`", ""), fontsize=11)
        panel.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(axis="y", alpha=0.25)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("transitions stored")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
