"""Read this to change a picture: curves of a run, comparisons of runs, and episodes with their goals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws into files, without a display

from cycler import cycler
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
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

GREY = "0.88"
COLUMNS = 4  # of panels
FRAMES = 6  # of an episode

Walls: TypeAlias = Sequence[tuple[float, float, float]]  # squares: left, lower, side

# Runs


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
            panel.plot(steps, values, label=metric, marker=marker, ms=3)
        panel.set(title=name, ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False) if curves else panel.set_axis_off()
    axes[0, 0].set_ylim(-0.03, 1.03)
    for panel in axes[1]:
        panel.set_xlabel("environment steps")
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
    save(figure, path, title)


def draw_comparison(
    panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], path: Path, title: str, unit: str = "environment steps"
) -> None:
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
        panel.set(title=title_of_panel, xlabel=unit, ylim=(-0.03, 1.03))
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
        panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylabel("success rate")
    if len(names) > 1:
        lines = [Line2D([], [], **styles[name], ms=4) for name in names]
        figure.legend(lines, names, loc="outside lower center", ncols=2, frameon=False)
    save(figure, path, title)


def draw_goals(panels: dict[str, dict[str, np.ndarray]], walls: Walls = ()) -> Figure:
    """Draw where goals were selected, a panel for each part of a run.

    Args:
        panels: for each title, groups of positions by label, ``[n, 2 or 3]``. The first and the last dimension are
            drawn.
        walls: squares of a maze.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 4), layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for panel, (title, groups) in zip(axes.flat, panels.items(), strict=True):
        for (label, goals), colour, size in zip(groups.items(), ("0.6", PURPLE, BLUE), (2, 12, 40), strict=True):
            panel.scatter(goals[:, 0], goals[:, -1], color=colour, s=size, lw=0, label=label)
        _draw_walls(panel, walls)
        panel.set(title=title, aspect="equal")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_walls(panel: Axes, walls: Walls) -> None:
    for left, lower, side in walls:
        panel.add_patch(plt.Rectangle((left, lower), side, side, color="0.3", lw=0))


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a picture, and close the figure."""
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# Episodes


def draw_episodes(episodes: list[dict[str, Any]], radius: float | None = None, walls: Walls = ()) -> Figure:
    """Draw the achieved goals and the desired goal of each episode.

    Goals of zeros and ones are drawn as rows of bits, and goals with two or three dimensions as positions. For other
    goals, the distance from the desired goal is drawn.

    Args:
        episodes: for each, ``"achieved_goal"`` ``[steps + 1, goal]``, ``"desired_goal"`` ``[goal]`` and ``"title"``.
        radius: the largest distance at which a goal is reached.
        walls: squares of a maze.
    """
    goals = np.concatenate([[*episode["achieved_goal"], episode["desired_goal"]] for episode in episodes])
    bits, size = bool(np.isin(goals, (0, 1)).all()), goals.shape[1]
    draw = _draw_bits if bits else _draw_positions if size in (2, 3) else _draw_distance
    in_space = size == 3 and not bits
    shared = not (bits or in_space)  # axes: rows of bits differ in number, and each cube has its own scale
    columns, rows = min(len(episodes), COLUMNS), -(-len(episodes) // COLUMNS)
    figure, panels = plt.subplots(
        rows, columns, figsize=(max(3.2 * columns, 6), 3.2 * rows + 0.7), layout="constrained", squeeze=False,
        sharex=shared, sharey=shared, subplot_kw={"projection": "3d" if in_space else None},
    )  # fmt: skip
    for panel in panels.flat[len(episodes) :]:
        panel.set_axis_off()
    for panel, episode in zip(panels.flat, episodes, strict=False):
        draw(panel, episode["achieved_goal"].astype(float), episode["desired_goal"], radius)
        panel.set(title=episode["title"])
        _draw_walls(panel, walls)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def draw_relabelled(episodes: list[dict[str, Any]], path: Path) -> None:
    """Draw stored episodes, their original goals, and the new goals of sampled transitions."""
    figure, panels = plt.subplots(1, len(episodes), figsize=(8, 4.0), layout="constrained", sharey=True)
    for axes, episode in zip(panels, episodes, strict=True):
        way, goals = episode["path"], episode["relabelled_goals"]
        axes.plot(*way.T, color="0.65", linewidth=2, label="stored trajectory", zorder=1)
        axes.scatter(*way[0], color="0.3", marker="s", s=30, label="its start", zorder=3)
        axes.scatter(*episode["desired_goal"], color=VERMILION, marker="*", s=150, label="its original goal", zorder=3)
        axes.scatter(*goals.T, color=BLUE, s=16, label="goals after relabelling", zorder=2)
        for position, goal in list(zip(episode["positions"], goals, strict=True))[:4]:
            bend = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.5", "color": BLUE}
            axes.annotate("", xy=goal, xytext=position, arrowprops=bend)
        last = episode["first_step"] + len(way) - 2
        axes.set(title=f"steps {episode['first_step']:,} to {last:,}", xlabel="x", aspect="equal")
        axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    panels[0].set_ylabel("y")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path, "Stored steps get goals that their episode reached later (arrows: from a step to its goal)")


def draw_frames(episodes: list[dict[str, Any]], note: str = "") -> Figure:
    """Draw a row for each episode: some steps of ``"video"`` ``[steps + 1, height, width, 3]``."""
    size = (1.8 * FRAMES, 2.1 * len(episodes) + 0.4)
    figure, axes = plt.subplots(len(episodes), FRAMES, figsize=size, layout="constrained", squeeze=False)
    for row, episode in zip(axes, episodes, strict=True):
        steps = np.linspace(0, len(episode["video"]) - 1, FRAMES).round().astype(int)
        for panel, step in zip(row, steps, strict=True):
            panel.imshow(episode["video"][step])
            panel.set(title=f"step {step}", xticks=[], yticks=[])
        row[0].set_ylabel(episode["title"])
    figure.supxlabel(note, fontsize="medium")
    return figure


def _draw_positions(panel: Any, achieved: np.ndarray, desired: np.ndarray, radius: float | None) -> None:
    if radius and len(desired) == 3:
        around, down = np.mgrid[0 : 2 * np.pi : 25j, 0 : np.pi : 13j]
        unit_sphere = np.stack([np.cos(around) * np.sin(down), np.sin(around) * np.sin(down), np.cos(down)])
        sphere = desired[:, None, None] + radius * unit_sphere  # [3, 25, 13]
        panel.plot_surface(*sphere, color=VERMILION, alpha=0.2, lw=0, label="success radius")
    elif radius:
        around = np.linspace(0, 2 * np.pi, 100)
        circle = desired[:, None] + radius * np.stack([np.cos(around), np.sin(around)])  # [2, 100]
        panel.fill(*circle, facecolor=VERMILION + "40", edgecolor=VERMILION, label="success radius")
    panel.plot(*achieved.T, color=BLUE, marker=".", ms=4, lw=1.2, label="achieved goals")
    panel.plot(*achieved[:1].T, color="black", marker="s", ms=5, ls="", label="start")
    panel.plot(*desired[:, None], color=VERMILION, marker="+", ms=9, mew=2, ls="", label="desired goal")
    panel.set(xlabel="x", ylabel="y", aspect="equal")


def _draw_bits(panel: Any, achieved: np.ndarray, desired: np.ndarray, radius: float | None) -> None:
    rows = np.stack([desired, np.full(len(desired), np.nan), *achieved])  # the goal, a gap, and a row for each step
    extent = (-0.5, len(desired) - 0.5, len(achieved) - 0.5, -2.5)
    panel.imshow(rows, ListedColormap([GREY, BLUE]), vmin=0, vmax=1, aspect="auto", extent=extent)
    for value, colour in enumerate([GREY, BLUE]):
        panel.plot([], [], color=colour, marker="s", ms=8, ls="", label=f"bit {value}")
    steps, wrong = np.nonzero(achieved != desired)
    panel.plot(wrong, steps, color=VERMILION, marker=".", ms=5, ls="", label="differs from the desired goal")
    last = len(achieved) - 1
    panel.set(xlabel="bit", ylabel="step", yticks=[-2, 0, last], yticklabels=["goal", "0", last])


def _draw_distance(panel: Any, achieved: np.ndarray, desired: np.ndarray, radius: float | None) -> None:
    panel.plot(np.linalg.norm(achieved - desired, axis=1), color=BLUE, label="distance from the desired goal")
    if radius:
        panel.axhline(radius, color=VERMILION, ls="--", label="success radius")
    panel.set(xlabel="step", ylabel="distance")
