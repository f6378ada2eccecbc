"""The pictures of the training scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws into files, without a display

from cycler import cycler
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

# Colours that colour-blind readers can tell apart (Okabe and Ito 2008).
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
plt.rcParams["axes.prop_cycle"] = cycler(color=[BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "black"])
MARKERS = "osD^vPX"
PANELS = {  # title: the label of the y axis, and the metrics to draw
    "Success": ("success rate", ["evaluation/success", "train/success"]),
    "Return": ("return of an episode", ["evaluation/return"]),
    "Losses": ("loss", ["train/loss", "train/loss_value", "train/loss_qvalue", "train/loss_actor", "train/loss_alpha"]),
    "Q values": ("value", ["train/q_value", "train/target_value"]),
}
LABELS = {
    "evaluation/success": "evaluation (greedy)", "train/success": "training (exploring)",
    "evaluation/return": "evaluation (greedy)", "train/loss": "Q", "train/loss_value": "critic",
    "train/loss_qvalue": "critic", "train/loss_actor": "actor", "train/loss_alpha": "entropy coefficient",
    "train/q_value": "Q", "train/target_value": "target",
}  # fmt: skip


def draw_training(history: dict[str, list[list[float]]], path: Path, title: str) -> None:
    """Draw success, return, losses and Q values against environment steps."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained", sharex=True)
    for panel, (name, (label, metrics)) in zip(axes.flat, PANELS.items(), strict=True):
        curves = {metric: np.array(history[metric]).T for metric in metrics if metric in history}  # [2, logs]
        if name == "Losses" and len(curves) > 1:  # of different sizes; the loss of an actor can be negative
            positive = all((values > 0).all() for _, values in curves.values())
            panel.set_yscale("log") if positive else panel.set_yscale("symlog", linthresh=0.1)
        for metric, (steps, values) in curves.items():
            marker = "o" if metric.startswith("evaluation/") or len(steps) == 1 else None
            panel.plot(steps, values, label=LABELS[metric], marker=marker, ms=3)
        panel.set(title=name, ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False) if curves else panel.set_axis_off()
    axes[0, 0].set_ylim(-0.03, 1.03)
    for panel in axes[1]:
        panel.set_xlabel("environment steps")
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
    save(figure, path, title)


def draw_comparison(panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], path: Path, title: str) -> None:
    """Draw the success of groups of runs, median and range: steps ``[n]`` and success ``[runs, n]`` of each."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    size = (max(5.5, 3.6 * columns), 2.8 * rows + 1)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", sharey=True, squeeze=False)
    names = sorted({group for groups in panels.values() for group in groups})
    styles: dict[str, dict[str, Any]] = {
        name: {"color": f"C{number}", "marker": MARKERS[number % len(MARKERS)]} for number, name in enumerate(names)
    }
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    for panel, (title_of_panel, groups) in zip(axes.flat, panels.items(), strict=False):
        for group, (steps, success) in groups.items():
            panel.plot(steps, np.median(success, axis=0), **styles[group], ms=4)
            panel.fill_between(steps, success.min(0), success.max(0), color=styles[group]["color"], alpha=0.15, lw=0)
        panel.set(title=title_of_panel, xlabel="environment steps", ylim=(-0.03, 1.03))
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
        panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylabel("success rate")
    if len(names) > 1:
        lines = [Line2D([], [], **styles[name], ms=4) for name in names]
        columns = int(11 * figure.get_figwidth() / (max(map(len, names)) + 6))  # as many as fit
        figure.legend(lines, names, loc="outside lower center", ncols=min(max(columns, 1), 4), frameon=False)
    save(figure, path, title)


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a picture, and close the figure."""
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
