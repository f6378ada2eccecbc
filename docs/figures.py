"""Draw the figures of `docs/explanation/`: the data flow of HERTransform, its two ideas, and the goals of strategies.

python docs/figures.py    # writes data_flow.svg, goal_names.png, running_episodes.png and goal_distributions.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from tensordict import TensorDict
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

matplotlib.use("Agg")  # draws into files, without a display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from torchrl_her import (
    Current,
    Episode,
    Final,
    Future,
    Geometric,
    GoalStrategy,
    HERTransform,
    Mixture,
    PastDesired,
    Random,
    SparseReward,
    Subgoal,
)

# Colours that colour-blind readers can tell apart (Okabe and Ito 2008).
BLUE, GREEN, ORANGE = "#0072B2", "#009E73", "#E69F00"
INK, GREY, PAPER = "#222222", "#6e6e6e", "#ffffff"
OURS = {"facecolor": "#e3f0f8", "edgecolor": BLUE, "linewidth": 1.8}
THEIRS = {"facecolor": "#f4f4f4", "edgecolor": GREY, "linewidth": 1.2}
# Of the table: name, colour and steps of each episode, and the number of empty rows
EPISODES = [("episode 1", BLUE, 6), ("episode 2", ORANGE, 5), ("episode 3", GREEN, 6)]
EMPTY = 4
SIZE = 9.0  # points
ROW = 4.2  # the height of a table's row

# Of the goals that strategies draw
STORED, STEPS, STEP = 4, 50, 15  # episodes, their steps; the step of the transition whose goals are drawn
DRAWS = 100_000
OWN, OTHER, DESIRED = BLUE, "#D55E00", GREEN
STRATEGIES: list[GoalStrategy] = [
    Current(),
    Future(),
    Future(own=False),
    Geometric(0.9),
    Final(),
    Episode(),
    Subgoal(10),
    Random(),
    PastDesired(),
    Mixture({Current(): 0.2, Geometric(0.9): 0.5, Random(): 0.3}),
]

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
    tracked = "Finds the episode and the step\nof each transition"
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

    save(figure, path)


def draw_cells(axes: Axes, x: float, y: float, widths: list[float], rows: list[list[str]], faces: list[str]) -> None:
    """Draw a table from its first line down, with a face colour for each row."""
    for number, (row, face) in enumerate(zip(rows, faces, strict=True)):
        left, low = x, y - (number + 1) * ROW
        for text, width in zip(row, widths, strict=True):
            axes.add_patch(Rectangle((left, low), width, ROW, facecolor=face, edgecolor=INK, linewidth=0.7))
            label(axes, left + width / 2, low + ROW / 2 - 0.2, text)
            left += width


def heading(axes: Axes, x: float, y: float, text: str) -> None:
    """Write the title of a table."""
    axes.text(x, y, text, ha="center", va="baseline", size=SIZE + 0.5, weight="bold", color=INK)


def draw_goal_names(path: Path) -> None:
    """Draw how a goal is found by its name."""
    figure, axes = plt.subplots(figsize=(7.2, 3.53), facecolor=PAPER)
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, 100), ylim=(1, 50))
    axes.axis("off")
    box(axes, 1.5, 34, 25, 13, "Sampled transition", "stamp: episode 7, step 1\ndesired goal: (0.9, 0.9)", **THEIRS)
    box(axes, 36, 34, 25, 13, "Strategy: future", "which step of which\nepisode?  (7, 3)", **OURS)
    box(axes, 1.5, 4, 25, 13, "Relabelled transition", "stamp: episode 7, step 1\ndesired goal: (0.4, 0.1)", **THEIRS)
    box(axes, 36, 4, 25, 13, "Reward", "recomputed for the\nnew desired goal", **OURS)
    rows = [
        *(["(6, 49)", "(0.2, 0.7)"], ["(7, 0)", "(0.1, 0.1)"], ["(7, 1)", "(0.2, 0.1)"], ["(7, 2)", "(0.3, 0.1)"]),
        *(["(7, 3)", "(0.4, 0.1)"], ["(7, 4)", "(0.4, 0.2)"], ["(2, 18)", "(0.8, 0.3)"], ["(2, 19)", "(0.8, 0.4)"]),
    ]
    heading(axes, 84.5, 46.2, "Goal table")
    label(axes, 78, 43.2, "name", va="baseline", color=GREY)
    label(axes, 90.5, 43.2, "goal", va="baseline", color=GREY)
    draw_cells(axes, 72, 42, [12, 13], rows, ["#e3f0f8"] * 4 + [ORANGE] + ["#e3f0f8"] + ["#f4f4f4"] * 2)
    label(axes, 84.5, 5.2, "the oldest goals,\noverwritten next", color=GREY)
    found = 42 - 4.5 * ROW
    arrow(axes, (26.5, 40.5), (36, 40.5))
    arrow(axes, (61, 38), (72, found + 0.6))
    label(axes, 67.3, 27, "name (7, 3)", ha="right")
    arrow(axes, (72, found - 0.6), (61, 12))
    label(axes, 66.8, 20, "goal (0.4, 0.1)", ha="right")
    arrow(axes, (36, 10.5), (26.5, 10.5))
    arrow(axes, (14, 34), (14, 17), linestyle="--", color=GREY)
    label(axes, 15.2, 25.5, "all other entries\nstay as they are", ha="left", color=GREY)
    save(figure, path)


def draw_running_episodes(path: Path) -> None:
    """Draw how written transitions continue running episodes, and when their goals enter the table."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), facecolor=PAPER)
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, 100), ylim=(0, 58))
    axes.axis("off")
    top, faces = 49.0, ["#cfe5f2", "#f8e3b5", "#c9e8dd"]
    heading(axes, 14, top + 4, "Written transitions")
    heading(axes, 50, top + 4, "Running episodes")
    heading(axes, 86, top + 4, "Stamps")
    running = [["M", "9", "63"], ["C", "7", "130"]]
    tables = (
        (2, [12, 12], ["starts at", "arrives at"], [["C", "D"], ["S", "T"], ["M", "N"]], faces),
        (32, [14, 11, 11], ["arrived at", "episode", "steps"], running, [faces[2], faces[0]]),
        (76, [10, 10], ["episode", "step"], [["7", "130"], ["12", "0"], ["9", "63"]], faces),
    )
    for x, widths, names, rows, colours in tables:
        for number, (name, width) in enumerate(zip(names, widths, strict=True)):
            label(axes, x + sum(widths[:number]) + width / 2, top + 1.2, name, va="baseline", color=GREY)
        draw_cells(axes, x, top, widths, rows, colours)
    first, second, third = (top - (number + 0.5) * ROW for number in range(3))
    for start, end in ((first, second), (third, first)):
        arrow(axes, (26, start), (32, end))
    for start, end in ((second, first), (first, third)):
        arrow(axes, (68, start), (76, end))
    label(axes, 50, third - 1.2, "no running episode has arrived at S:\na new one, episode 12, begins", color=GREY)

    heading(axes, 50, 27.5, "The goals of these episodes, in pieces of 64 steps")
    bars = [
        ("episode 7", [("0 to 63", 22, BLUE), ("64 to 127", 22, BLUE), ("128 to 130", 10, ORANGE)]),
        ("episode 9", [("0 to 63", 22, BLUE)]),
        ("episode 12", [("0", 4, ORANGE)]),
    ]
    for number, (name, pieces) in enumerate(bars):
        low, left = 20.5 - number * 6, 17.0
        label(axes, 15, low + 2, name, ha="right")
        for text, width, colour in pieces:
            axes.add_patch(Rectangle((left, low), width, 4, facecolor=colour, edgecolor=INK, linewidth=0.7))
            label(axes, left + width / 2, low + 1.9, text, color=PAPER if colour == BLUE else INK)
            left += width + 0.8
        if name == "episode 9":
            label(axes, left + 1, low + 2, "this write has completed the piece", ha="left", color=GREY)
    for x, colour, text in (
        (17, BLUE, "in the goal table"),
        (45, ORANGE, "waits until its piece is complete, or the episode ends"),
    ):
        axes.add_patch(Rectangle((x, 1.6), 3, 2.4, facecolor=colour, edgecolor=INK, linewidth=0.7))
        label(axes, x + 4, 2.7, text, ha="left")
    save(figure, path)


def draw_goals(strategy: GoalStrategy) -> tuple[np.ndarray, float, float]:
    """Return the probabilities of the steps of the same episode, of all other episodes, and of their desired goals.

    An achieved goal is ``(episode, step)``, and the desired goal of an episode is ``(episode, -1)``.
    """
    hindsight = HERTransform(SparseReward(0), strategy=strategy, her_ratio=1, capacity=1000)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(STORED * STEPS), transform=hindsight)
    for episode in range(STORED):
        rb.extend(make_episode(episode))
    rows = rb.storage[torch.full((DRAWS,), STEP)]  # one transition of the first episode
    goals = rb.transform(rows)["desired_goal"].long()
    of_other, step = goals[:, 0] != 0, goals[:, 1]
    own = torch.bincount(step[~of_other], minlength=STEPS) / DRAWS
    return own.numpy(), float((of_other & (step >= 0)).float().mean()), float((step < 0).float().mean())


def make_episode(episode: int) -> TensorDict:
    """Make an episode whose goals are its number and their step."""
    states = torch.stack([torch.full((STEPS + 1,), episode), torch.arange(-1, STEPS)], dim=1).float()
    desired = torch.tensor([episode, -1.0]).expand(STEPS, -1)
    done = torch.arange(STEPS)[:, None] == STEPS - 1
    flags = {"done": done, "truncated": done, "terminated": torch.zeros_like(done)}
    reward = SparseReward(0).evaluate(states[1:], desired, TensorDict())[0][:, None]
    entries = {
        "achieved_goal": states[:-1],
        "desired_goal": desired,
        "next": {"achieved_goal": states[1:], "desired_goal": desired, "reward": reward, **flags},
    }
    return TensorDict(entries, batch_size=[STEPS])


def draw_strategy(panel: Axes, strategy: GoalStrategy) -> None:
    """Draw the probability of each goal."""
    own, other, desired = draw_goals(strategy)
    panel.bar(np.arange(STEPS), own, width=1.0, color=OWN)
    panel.bar([58], [other], width=6, color=OTHER)
    panel.bar([67], [desired], width=6, color=DESIRED)
    panel.axvline(STEP, color="black", linestyle=":", linewidth=1)
    panel.set_title(repr(strategy), fontsize=9.5, family="monospace")
    panel.set(xlim=(-2, 72), ylim=(1e-3, 1.4), yscale="log")
    panel.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    panel.set_xticks([0, STEP, STEPS - 1], ["0", f"t = {STEP}", f"T-1 = {STEPS - 1}"])
    panel.tick_params(labelsize=9)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def draw_goal_distributions(path: Path) -> None:
    """Draw the steps whose outcomes become the goal of one transition, for each strategy."""
    torchrl_logger.setLevel("WARNING")
    torch.manual_seed(0)
    figure = plt.figure(figsize=(7.2, 7.4), layout="constrained")
    grid = figure.add_gridspec(4, 3)
    places = [grid[row, column] for row in range(3) for column in range(3)] + [grid[3, :]]
    for number, (place, strategy) in enumerate(zip(places, STRATEGIES, strict=True)):
        panel = figure.add_subplot(place)
        draw_strategy(panel, strategy)
        if number % 3:
            panel.set_yticklabels([])
    figure.supylabel("probability", fontsize=10)
    figure.supxlabel(f"step whose outcome becomes the goal of the transition at step t = {STEP}", fontsize=10)
    names = ("step of the same episode", "any step of another episode", "desired goal of another episode")
    patches = [Patch(color=color) for color in (OWN, OTHER, DESIRED)]
    figure.legend(patches, names, loc="outside upper center", ncols=3, frameon=False, fontsize=9, columnspacing=1.5)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture, the same file each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(f"Wrote {path}.")


def main() -> None:
    """Draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "images"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="the folder to write to")
    folder = parser.parse_args().folder
    draw_data_flow(folder / "data_flow.svg")
    draw_goal_names(folder / "goal_names.png")
    draw_running_episodes(folder / "running_episodes.png")
    draw_goal_distributions(folder / "goal_distributions.png")


if __name__ == "__main__":
    main()
