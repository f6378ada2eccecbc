"""The two pictures of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from plots import BLUE, VERMILION

STYLES = {  # color and marker, in drawing order
    "without hindsight": ("black", "s"),
    "with hindsight": (BLUE, "o"),
}
ARROWS = 4  # per panel, from a sampled step to its new goal


def draw_success(results: list[Any], path: Path) -> None:
    """Draw success rates against environment steps: a thin line per seed, a thick one for their median."""
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    for name, (color, marker) in STYLES.items():
        curves = [result.curve for result in results if result.config.name == name]
        steps = list(curves[0])
        rates = np.array([list(curve.values()) for curve in curves])  # [seeds, evaluations]
        if len(curves) > 1:
            axes.plot(steps, rates.T, color=color, linewidth=0.8, alpha=0.4)
        axes.plot(steps, np.median(rates, axis=0), color=color, linewidth=2.2, label=name, marker=marker, markersize=4)
    seeds = len({result.seed for result in results})
    axes.set(
        title="PointReach: DDPG with and without hindsight" + (f", median of {seeds} seeds" if seeds > 1 else ""),
        xlabel="environment steps",
        ylabel="success rate of 100 greedy episodes",
        xlim=(0, None),
        ylim=(-0.03, 1.03),
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_relabelled(episodes: list[dict[str, Any]], path: Path) -> None:
    """Draw stored episodes, their original goals, and the new goals of sampled transitions."""
    figure, panels = plt.subplots(1, len(episodes), figsize=(8, 4.0), layout="constrained", sharey=True)
    for axes, episode in zip(panels, episodes, strict=True):
        way, goals = episode["path"], episode["relabelled_goals"]
        axes.plot(*way.T, color="0.65", linewidth=2, label="stored trajectory", zorder=1)
        axes.scatter(*way[0], color="0.3", marker="s", s=30, label="its start", zorder=3)
        axes.scatter(*episode["desired_goal"], color=VERMILION, marker="*", s=150, label="its original goal", zorder=3)
        axes.scatter(*goals.T, color=BLUE, s=16, label="goals after relabelling", zorder=2)
        for position, goal in list(zip(episode["positions"], goals, strict=True))[:ARROWS]:
            bend = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.5", "color": BLUE}
            axes.annotate("", xy=goal, xytext=position, arrowprops=bend)
        last = episode["first_step"] + len(way) - 2
        axes.set(title=f"steps {episode['first_step']:,} to {last:,}", xlabel="x", aspect="equal")
        axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    panels[0].set_ylabel("y")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        "Stored steps get goals that their episode reached later (arrows: from a step to its goal)", fontsize=11
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
