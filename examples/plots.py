"""The pictures of the training scripts."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws into files, with no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

PANELS = {  # title: the y axis, and what is drawn
    "Success": ("success rate", ["evaluation/success", "train/success"]),
    "Return": ("return of an episode", ["evaluation/return"]),
    "Losses": ("loss", ["train/loss", "train/loss_value", "train/loss_qvalue", "train/loss_actor", "train/loss_alpha"]),
    "Q values": ("value", ["train/q_value", "train/target_value"]),
}
LABELS = {
    "evaluation/success": "greedy",
    "train/success": "exploring",
    "evaluation/return": "greedy",
    "train/q_value": "Q",
    "train/target_value": "targets",
}


def draw_training(history: dict[str, list[list[float]]], path: Path, title: str) -> None:
    """Draw success, return, losses and Q values against environment steps."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained", sharex=True)
    for panel, (name, (label, curves)) in zip(axes.flat, PANELS.items(), strict=True):
        for curve in curves:
            if curve in history:
                default = curve.removeprefix("train/").replace("_", " ")
                marker = "o" if curve.startswith("evaluation/") or len(history[curve]) == 1 else None
                panel.plot(*zip(*history[curve], strict=True), label=LABELS.get(curve, default), marker=marker, ms=3)
        panel.set(title=name, ylabel=label)
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(frameon=False)
    axes[0, 0].set_ylim(-0.03, 1.03)
    if len(axes[1, 0].lines) > 1:
        axes[1, 0].set_yscale("symlog", linthresh=1e-2)  # an actor's loss can be negative
    for panel in axes[1]:
        panel.set_xlabel("environment steps")
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
    _save(figure, path, title)


def draw_comparison(panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], path: Path, title: str) -> None:
    """Draw the success of groups of runs, median and range: steps ``[n]`` and success ``[runs, n]`` of each."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(max(5.5, 3 * len(panels)), 3.8), layout="constrained", sharey=True, squeeze=False
    )
    names = sorted({group for groups in panels.values() for group in groups})
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    for panel, (title_of_panel, groups) in zip(axes[0], panels.items(), strict=True):
        for group, (steps, success) in groups.items():
            panel.plot(steps, np.median(success, axis=0), color=colours[group], marker="o", ms=3)
            panel.fill_between(steps, success.min(0), success.max(0), color=colours[group], alpha=0.15, lw=0)
        panel.set(title=title_of_panel, xlabel="environment steps", ylim=(-0.03, 1.03))
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
        panel.grid(alpha=0.3)
    axes[0, 0].set_ylabel("success rate")
    if len(names) > 1:
        lines = [Line2D([], [], color=colours[name], marker="o", ms=3) for name in names]
        columns = int(11 * figure.get_figwidth() / (max(map(len, names)) + 6))  # that the figure has room for
        figure.legend(lines, names, loc="outside lower center", ncols=min(max(columns, 1), 4), frameon=False)
    _save(figure, path, title)


def draw_episodes(episodes: list[dict], path: Path, title: str, columns: int = 6) -> None:
    """Draw a row for each episode: frames where there are, else its achieved goals and the desired one."""
    with_frames = "frames" in episodes[0]
    width = columns if with_frames else 1
    if not with_frames:  # side by side
        figure, axes = plt.subplots(
            1, len(episodes), figsize=(3 * len(episodes), 3.4), layout="constrained", squeeze=False
        )
        for panel, episode in zip(axes[0], episodes, strict=True):
            _draw_goals(panel, episode)
            panel.set_title(_outcome(episode))
    else:
        figure, axes = plt.subplots(
            len(episodes), width, figsize=(1.7 * width, 1.9 * len(episodes)), layout="constrained", squeeze=False
        )
        for row, episode in zip(axes, episodes, strict=True):
            steps = [round(i * (len(episode["frames"]) - 1) / (columns - 1)) for i in range(columns)]
            for panel, step in zip(row, steps, strict=True):
                panel.imshow(episode["frames"][step])
                panel.set(xticks=[], yticks=[], title=f"step {step + 1}")
            row[0].set_ylabel(_outcome(episode))
    _save(figure, path, title)


def _outcome(episode: dict) -> str:
    return "reached" if episode["success"] else "missed"


def _draw_goals(panel: Axes, episode: dict) -> None:
    achieved, desired = episode["achieved_goal"], episode["desired_goal"]
    if 2 <= achieved.shape[1] <= 3:  # positions, from above
        panel.plot(achieved[:, 0], achieved[:, 1], color="tab:blue", label="achieved", marker=".", markersize=3)
        panel.scatter(desired[0], desired[1], color="tab:red", marker="*", s=120, label="goal", zorder=3)
        panel.set(xlabel="x", ylabel="y", aspect="equal")
        panel.legend(frameon=False)
    else:  # bits: a row for each step, and the goal
        panel.imshow([*achieved, desired], aspect="auto", cmap="Blues", interpolation="nearest")
        panel.axhline(len(achieved) - 0.5, color="tab:red")
        panel.set(xlabel="entry of the goal", ylabel="step; below the line: the goal")
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
