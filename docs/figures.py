"""Draw the figure of `docs/explanation/how-it-works.md`: the data flow of HERTransform.

python docs/figures.py    # writes docs/images/data_flow.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files, without a display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

# Colours that colour-blind readers can tell apart (Okabe and Ito 2008).
BLUE, GREEN, ORANGE = "#0072B2", "#009E73", "#E69F00"
INK, GREY, PAPER = "#222222", "#6e6e6e", "#ffffff"
OURS = {"facecolor": "#e3f0f8", "edgecolor": BLUE, "linewidth": 1.8}
THEIRS = {"facecolor": "#f4f4f4", "edgecolor": GREY, "linewidth": 1.2}
# Of the table: name, colour and steps of each episode, and the number of empty rows
EPISODES = [("episode 1", BLUE, 6), ("episode 2", ORANGE, 5), ("episode 3", GREEN, 6)]
EMPTY = 4
SIZE = 9.0  # points

plt.rcParams["svg.hashsalt"] = "torchrl_her"  # the same file each time


def box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str = "", **style: object
) -> None:
    """Draw a box with a title, and with lines of text below it."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=1.2", **style)
    axes.add_patch(shape)
    heading = {"ha": "center", "size": SIZE + 0.5, "weight": "bold", "color": INK}
    if not text:
        axes.text(x + width / 2, y + height / 2, title, va="center", **heading)
        return
    axes.text(x + width / 2, y + height - 1.6, title, va="top", **heading)
    axes.text(x + 2, y + height - 5.6, text, va="top", size=SIZE, color=INK, linespacing=1.35)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """Draw an arrow."""
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0} | style
    axes.annotate("", xy=end, xytext=start, arrowprops={"mutation_scale": 13, **style})


def label(axes: Axes, x: float, y: float, text: str, **style: object) -> None:
    """Write the label of an arrow."""
    style = {"ha": "center", "va": "center", "color": INK} | style
    axes.text(x, y, text, size=SIZE - 0.5, linespacing=1.25, **style)


def draw_table(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    """Draw the goal table as a row of cells: the steps of an episode next to each other, then empty rows."""
    box(axes, x, y, width, height, "GoalTable: a ring of achieved goals", " ", **OURS)
    left, size = x + 2, (width - 4) / (sum(steps for _, _, steps in EPISODES) + EMPTY)
    for name, colour, steps in [*EPISODES, ("empty", PAPER, EMPTY)]:
        for step in range(steps):
            cell = Rectangle((left + step * size, y + 4.2), size, 3.4, facecolor=colour, edgecolor=INK, linewidth=0.7)
            axes.add_patch(cell)
        label(axes, left + steps * size / 2, y + 2.2, name)
        left += steps * size


def draw_data_flow(path: Path) -> None:
    """Draw how transitions are written and sampled."""
    figure, axes = plt.subplots(figsize=(7.2, 4.68), facecolor=PAPER)
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, 100), ylim=(0, 65))
    axes.axis("off")

    # TorchRL's parts on both sides, those of HERTransform between them
    box(axes, 1.5, 51, 14, 11, "Collector", **THEIRS)
    box(axes, 1.5, 6, 14, 11, "Loss", **THEIRS)
    box(axes, 84.5, 14.5, 14, 47.5, "Storage", **THEIRS)
    box(axes, 84.5, 1, 14, 8, "Sampler", **THEIRS)
    tracked = "EpisodeTracker finds the lane,\nthe episode and the step\nof each transition"
    box(axes, 28, 47, 42, 15, "HERTransform: write", tracked, **OURS)
    draw_table(axes, 28, 28, 42, 12.5)
    drawn = "1. The strategy draws a step.\n2. Its goal becomes the desired goal.\n3. The reward is recomputed."
    box(axes, 28, 5.5, 42, 15.5, "HERTransform: sample", drawn, **OURS)

    # Writing
    arrow(axes, (15.5, 56.5), (28, 56.5))
    label(axes, 21.5, 59.8, "rb.extend\nrb.add")
    arrow(axes, (70, 56.5), (84.5, 56.5))
    label(axes, 77, 59.8, "transitions\nwith stamps")
    label(axes, 77, 54, "episode, step", color=GREY)
    arrow(axes, (49, 47), (49, 40.5))
    label(axes, 50.5, 43.8, "achieved goals of episodes", ha="left")

    # Sampling
    arrow(axes, (91.5, 9), (91.5, 14.5))
    label(axes, 90.3, 11.6, "index", ha="right")
    arrow(axes, (84.5, 17), (70, 17))
    label(axes, 77, 20.3, "transitions\nwith stamps")
    arrow(axes, (49, 28), (49, 21))
    label(axes, 50.5, 24.6, "goal of that step", ha="left")
    arrow(axes, (28, 11.5), (15.5, 11.5))
    label(axes, 21.5, 14.8, "relabelled\nbatch")
    label(axes, 21.5, 8.2, "(further\ntransforms)", color=GREY)
    arrow(axes, (8.5, 17), (8.5, 51), linestyle="--", color=GREY)
    label(axes, 9.7, 34, "policy", ha="left", color=GREY)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "images" / "data_flow.svg"
    parser.add_argument("path", type=Path, nargs="?", default=default, help="the picture to write")
    path = parser.parse_args().path
    draw_data_flow(path)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
