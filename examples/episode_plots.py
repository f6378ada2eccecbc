"""Pictures of episodes: achieved and desired goals, or frames that the environment rendered."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from plots import BLUE, VERMILION

GREY = "0.88"
COLUMNS = 4  # of panels


def draw_episodes(episodes: list[dict[str, Any]], radius: float | None = None, unit: str = "") -> Figure:
    """Draw the achieved goals and the desired goal of each episode, all at the same scale.

    Goals of zeros and ones are drawn as rows of bits, and goals with two or three dimensions as positions. For other
    goals, the distance from the desired goal is drawn.

    Args:
        episodes: for each, ``"achieved_goal"`` ``[steps + 1, goal]``, ``"desired_goal"`` ``[goal]`` and ``"success"``.
        radius: the largest distance at which a goal is reached.
        unit: the unit of goals and radius, such as m.
    """
    goals = np.concatenate([[*episode["achieved_goal"], episode["desired_goal"]] for episode in episodes])
    bits, size = bool(np.isin(goals, (0, 1)).all()), goals.shape[1]
    draw = _draw_bits if bits else _draw_positions if size in (2, 3) else _draw_distance
    space = draw == _draw_positions and size == 3
    columns, rows = min(len(episodes), COLUMNS), -(-len(episodes) // COLUMNS)
    figure = plt.figure(figsize=(max(3.2 * columns, 6), 3.2 * rows + 0.7))
    figure.set_layout_engine("constrained", h_pad=0.06)  # inches
    for number, episode in enumerate(episodes):
        panel = figure.add_subplot(rows, columns, number + 1, projection="3d" if space else None)
        panel.set(title=_title(number, episode))
        draw(panel, episode["achieved_goal"], episode["desired_goal"], radius, f" [{unit}]" if unit else "")
        if number % columns and not space:
            panel.set_ylabel("")
    limits = {}
    for axis in "xyz" if space else "xy":
        found = [getattr(panel, f"get_{axis}lim")() for panel in figure.axes]
        limits[f"{axis}lim"] = np.min(found), np.max(found)
    if draw == _draw_positions:  # squares or cubes: a unit has the same length on all axes
        half = 0.53 * max(high - low for low, high in limits.values())
        limits = {name: ((low + high) / 2 - half, (low + high) / 2 + half) for name, (low, high) in limits.items()}
    panels: list[Any] = figure.axes  # mypy does not know panels with three axes
    for panel, episode in zip(panels, episodes, strict=True):
        panel.set(**limits)
        if space:
            floor, (x, y) = limits["zlim"][0], episode["achieved_goal"].T[:2]
            panel.plot(x, y, floor, color="0.5", lw=1, label="projection on the floor")
            panel.set_box_aspect((1, 1, 1), zoom=0.85)
        elif bits:
            panel.invert_yaxis()
        elif draw == _draw_positions:
            panel.set_aspect("equal")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def draw_frames(episodes: list[dict[str, Any]], note: str = "") -> Figure:
    """Draw a row for each episode: ``"frames"`` ``[n, height, width, 3]`` of the steps ``"frame_steps"`` ``[n]``."""
    rows, columns = len(episodes), max(len(episode["frames"]) for episode in episodes)
    size = (1.8 * columns, 2.1 * rows + 0.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for number, (row, episode) in enumerate(zip(axes, episodes, strict=True)):
        for panel, frame, step in zip(row, episode["frames"], episode["frame_steps"], strict=False):
            panel.imshow(frame)
            panel.set(title=f"step {step}")
        for panel in row:
            panel.set(xticks=[], yticks=[], frame_on=bool(panel.images))
        row[0].set_ylabel(_title(number, episode))
    figure.supxlabel(note, fontsize="medium")
    return figure


def _title(number: int, episode: dict[str, Any]) -> str:
    return f"episode {number + 1}: {'success' if episode['success'] else 'failure'}"


def _draw_positions(panel: Any, achieved: np.ndarray, desired: np.ndarray, radius: float | None, unit: str) -> None:
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
    for axis in "xyz"[: len(desired)]:
        panel.set(**{f"{axis}label": axis + unit})
        panel.locator_params(axis=axis, nbins=5)


def _draw_bits(panel: Any, achieved: np.ndarray, desired: np.ndarray, radius: float | None, unit: str) -> None:
    rows = np.stack([desired, np.full(len(desired), np.nan), *achieved])  # the goal, a gap, and a row for each step
    extent = (-0.5, len(desired) - 0.5, len(achieved) - 0.5, -2.5)
    panel.imshow(rows, ListedColormap([GREY, BLUE]), vmin=0, vmax=1, aspect="auto", extent=extent)
    for value, colour in enumerate([GREY, BLUE]):
        panel.plot([], [], color=colour, marker="s", ms=8, ls="", label=f"bit {value}")
    steps, wrong = np.nonzero(achieved != desired)
    panel.plot(wrong, steps, color=VERMILION, marker=".", ms=5, ls="", label="differs from the desired goal")
    last = len(achieved) - 1
    panel.set(xlabel="bit", ylabel="step", yticks=[-2, 0, last], yticklabels=["goal", "0", last])
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _draw_distance(panel: Any, achieved: np.ndarray, desired: np.ndarray, radius: float | None, unit: str) -> None:
    panel.plot(np.linalg.norm(achieved - desired, axis=1), color=BLUE, label="distance from the desired goal")
    if radius:
        panel.axhline(radius, color=VERMILION, ls="--", label="success radius")
    panel.set(xlabel="step", ylabel="distance" + unit)
