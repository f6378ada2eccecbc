"""The picture of ``gpu.py``: samples per second against batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Blue and vermilion of Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = {"LazyTensorStorage": "#0072b2", "PackedStorage": "#d55e00"}


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw one row of panels for sampling and one for sampling with an update, with a column per size."""
    sizes = list(dict.fromkeys(row["stored"] for row in rows))
    graph = "one CUDA graph" if any(row["captured"] for row in rows) else "as one function, without a graph"
    kinds = {("sample", "eager"): "rb.sample()", ("sample and update", "graph"): f"sample and update,\n{graph}"}
    figure, panels = plt.subplots(
        2, len(sizes), figsize=(4.6 * len(sizes) + 0.6, 6.8), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, ((operation, mode), name) in zip(panels, kinds.items(), strict=True):
        for panel, size in zip(line, sizes, strict=True):
            chosen = [row for row in rows if (row["stored"], row["operation"], row["mode"]) == (size, operation, mode)]
            draw_panel(panel, chosen)
            panel.set_title(f"{name.replace(chr(10), ' ')}\n{size:,} transitions stored", fontsize=10)
        line[0].set_ylabel("samples per second")
    for panel in panels[-1]:
        panel.set_xlabel("batch size (transitions)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_panel(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line for each buffer: dashed without hindsight, solid with it."""
    for storage, colour in COLOURS.items():
        for hindsight in (False, True):
            line = [row for row in rows if (row["storage"], row["hindsight"]) == (storage, hindsight)]
            panel.plot(
                [row["batch_size"] for row in line],
                [row["samples_per_second"] for row in line],
                color=colour,
                linestyle="-" if hindsight else "--",
                marker="o" if hindsight else "s",
                markerfacecolor=colour if hindsight else "white",
                label=f"{storage}, {'with' if hindsight else 'without'} hindsight",
            )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    batch_sizes = sorted({row["batch_size"] for row in rows})
    panel.set_xticks(batch_sizes, [f"{size:,}" for size in batch_sizes])
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
