"""Draw the pictures of the documentation.

    python docs/figures.py                      # all, into docs/images/; the tutorials train, which takes minutes
    python docs/figures.py fetch learning       # these alone

- Explanations: `data_flow`, `goal_names`, `running_episodes`, `goal_distributions`.
- Results: drawn from the CSV files and tables in `docs/reference/results/`.
- `tutorials`: the pictures that the code of the tutorials writes.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import tempfile
from collections.abc import Callable
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
BLUE, GREEN, ORANGE, VERMILION, SKY = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#56B4E9"
OLD, LEAVING = "#e3f0f8", "#f4f4f4"  # rows of the goal table
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
OWN, OTHER, DESIRED = BLUE, VERMILION, GREEN
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

plt.rcParams |= {"svg.hashsalt": "torchrl_her", "font.size": 9, "axes.titlesize": 10}  # the same file each time


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
    draw_cells(axes, 72, 42, [12, 13], rows, [OLD] * 4 + [ORANGE] + [OLD] + [LEAVING] * 2)
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
    """Draw how written transitions continue running episodes, and where their goals are in the table."""
    figure, axes = plt.subplots(figsize=(7.2, 3.55), facecolor=PAPER)
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, 100), ylim=(9, 58))
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

    heading(axes, 50, 25, "Goal table, in the order of writing")
    rows = [("(9, 61)", OLD), ("(7, 129)", OLD), ("(9, 62)", OLD), ("(7, 130)", ORANGE), ("(12, 0)", ORANGE)]
    rows += [("(9, 63)", ORANGE), ("(3, 40)", LEAVING), ("(5, 8)", LEAVING)]
    width = 96 / len(rows)
    for number, (name, colour) in enumerate(rows):
        axes.add_patch(Rectangle((2 + number * width, 15), width, 5, facecolor=colour, edgecolor=INK, linewidth=0.7))
        label(axes, 2 + (number + 0.5) * width, 17.4, name)
    for first, count, text in ((0, 3, "earlier goals"), (3, 3, "the goals of this write"), (6, 2, "overwritten next")):
        label(axes, 2 + (first + count / 2) * width, 11.5, text, color=GREY)
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


# Results

RESULTS = Path(__file__).parent / "reference" / "results"
WIDTH = 7.2  # inches
Curve = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # steps, median, lowest, highest


def read(name: str, **columns: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file that have these values."""
    with (RESULTS / name).open() as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in columns.items())]


def evaluations(name: str, x: str = "steps", **columns: str) -> Curve:
    """Return the success at each step: the median of ``x``, and median and range of the success over the seeds."""
    at: dict[int, list[tuple[float, float]]] = {}
    for row in read(name, **columns):
        at.setdefault(int(row["steps"]), []).append((float(row[x]), float(row["success"])))
    places, success = np.array([at[step] for step in sorted(at)]).transpose(2, 0, 1)  # [steps, seeds]
    return np.median(places, 1), np.median(success, 1), success.min(1), success.max(1)


def table(page: str, title: str) -> tuple[list[str], dict[str, list[float]]]:
    """Return columns and numbers of a table of a page, without the parentheses after the numbers."""
    lines = (RESULTS / page).read_text().split(f"\n| {title} |", 1)[1].split("\n\n")[0].splitlines()
    head, *rows = [re.sub(r" \([^|]*\) \|", " |", line).strip("| ").split(" | ") for line in lines]
    return head, {row[0].replace("`", ""): [float(cell) for cell in row[1:]] for row in rows[1:]}


def draw_curves(axes: Axes, curves: dict[str, Curve], colours: dict[str, str], unit: float = 1.0) -> None:
    """Draw the success rate of each line: the median, and the range as an area."""
    for name, (steps, median, lowest, highest) in curves.items():
        grey = colours[name] == GREY
        axes.plot(steps / unit, median, color=colours[name], label=name, marker="o", ms=3, ls="--" if grey else "-")
        axes.fill_between(steps / unit, lowest, highest, color=colours[name], alpha=0.15, lw=0)
    axes.set(ylim=(-0.03, 1.03))
    plain(axes)


def plain(axes: Axes, grid: str = "both") -> None:
    """Remove what needs no ink."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure, columns: int) -> None:
    """Write the legend of all panels above them."""
    lines = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=columns, frameon=False)


def draw_lines(path: Path, curves: dict[str, Curve], colours: dict[str, str]) -> None:
    """Draw the success of one task against environment steps."""
    figure, axes = plt.subplots(figsize=(WIDTH, 2.9), layout="constrained")
    draw_curves(axes, curves, colours, 1000)
    axes.set(xlabel="environment steps [thousands]", ylabel="success rate")
    legend(figure, len(curves))
    save(figure, path)


MRL = "mrl on Fetch, published"
OTHERWISE = "panda-gym, settings of FetchPush"
OTHERS, SB3 = "Fetch, HandReach, PointMaze", "SB3, settings of UMaze"
TASK_COLOURS = {OTHERS: BLUE, "panda-gym": VERMILION, OTHERWISE: ORANGE, MRL: GREY, SB3: GREEN}


def published(task: str) -> Curve:
    """Return the success of mrl with past desired goals, the better of its two strategies at the last step."""
    return evaluations("published.csv", task=task, way="DDPG with HER and past desired goals")


def draw_fetch(path: Path) -> None:
    """Draw the success on robots and in a maze, a panel for each kind of task."""
    figure, panels = plt.subplots(2, 3, figsize=(WIDTH, 4.5), layout="constrained", sharey=True)
    for axes, task in zip(panels.flat[:4], ("Reach", "Push", "PickAndPlace", "Slide"), strict=True):
        curves = {OTHERS: evaluations("fetch.csv", task="Fetch" + task)}
        if task != "Slide":
            curves["panda-gym"] = evaluations("fetch.csv", task="Panda" + task)
        if task == "PickAndPlace":
            curves[OTHERWISE] = evaluations("settings.csv", task="PandaPickAndPlace", way="fetch_push")
        if task != "Reach":
            curves[MRL] = published("Fetch" + task)
        draw_curves(axes, curves, TASK_COLOURS, 1000)
        axes.set_title(task)
    for axes, task in zip(panels.flat[4:], ("HandReach", "PointMaze_Medium"), strict=True):
        curves = {OTHERS: evaluations("fetch.csv", task=task)}
        if task == "PointMaze_Medium":
            curves[SB3] = evaluations("point-maze.csv", task=task + ", SAC", way="Stable-Baselines3")
        draw_curves(axes, curves, TASK_COLOURS, 1000)
        axes.set_title(task)
    for axes in panels[1]:
        axes.set_xlabel("environment steps [thousands]")
    for axes in panels[:, 0]:
        axes.set_ylabel("success rate")
    legend(figure, 3)
    save(figure, path)


def draw_pick_and_place(path: Path) -> None:
    """Draw the success on FetchPickAndPlace."""
    curves = {"torchrl_her, three seeds": evaluations("fetch.csv", task="FetchPickAndPlace")}
    curves["mrl, three seeds, as published"] = published("FetchPickAndPlace")
    draw_lines(path, curves, dict(zip(curves, (BLUE, GREY), strict=True)))


def draw_strategies(path: Path) -> None:
    """Draw the success of strategies on BitFlipping, a panel for each ``her_ratio``."""
    colours = {"future": BLUE, "episode": GREEN, "final": VERMILION, "random": ORANGE, "without hindsight": GREY}
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 2.9), layout="constrained", sharey=True)
    for axes, ratio in zip(panels, ("0.5", "0.8", "0.9"), strict=True):
        curves = {name: evaluations("strategies.csv", task=ratio, way=name) for name in list(colours)[:-1]}
        curves["without hindsight"] = evaluations("strategies.csv", task="0.0")
        draw_curves(axes, curves, colours, 1000)
        axes.set(title=f"her_ratio {ratio}", xlabel="steps [thousands]")
    panels[0].set_ylabel("success rate")
    legend(figure, 5)
    save(figure, path)


def draw_tasks(path: Path, name: str, colours: dict[str, str], x: str) -> None:
    """Draw the success of algorithms, a panel for each task of a CSV file."""
    rows = read(name)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, panels = plt.subplots(1, len(tasks), figsize=(WIDTH, 2.9), layout="constrained", sharey=True, squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        ways = [way for way in colours if any((row["task"], row["way"]) == (task, way) for row in rows)]
        draw_curves(axes, {way: evaluations(name, task=task, way=way) for way in ways}, colours, 1000)
        axes.set(title=task, xlabel=f"{x} [thousands]")
    panels[0, 0].set_ylabel("success rate")
    legend(figure, len(colours))
    save(figure, path)


def draw_offline_results(path: Path) -> None:
    """Draw the success of the offline algorithms against updates."""
    draw_tasks(path, "offline.csv", {"HIQL": BLUE, "GCIQL": VERMILION, "CRL": GREEN, "GCBC": GREY}, "updates")


def draw_contrastive(path: Path) -> None:
    """Draw the success of contrastive RL and SAC against environment steps."""
    draw_tasks(path, "contrastive.csv", {"SAC with hindsight": BLUE, "contrastive RL": VERMILION}, "steps")


def draw_both_ways(path: Path) -> None:
    """Draw the success of relabelling when transitions are sampled and when they are written."""
    draw_tasks(path, "writing.csv", {"HERTransform": BLUE, "HindsightAugmentation": VERMILION}, "steps")


def draw_movement(path: Path) -> None:
    """Draw the success on FetchPush, for each way to use episodes with movement."""
    colours = {"priority": BLUE, "both": GREEN, "neither": VERMILION, "filter": GREY}
    draw_lines(path, {way: evaluations("movement.csv", way=way) for way in colours}, colours)


def draw_bit_flipping(path: Path) -> None:
    """Draw the success on BitFlipping with 50 bits, for two shares of random actions."""
    colours = {"70% random actions": BLUE, "30% random actions": VERMILION}
    task = "BitFlipping, 50 bits, "
    draw_lines(path, {share: evaluations("scripts.csv", task=task + share) for share in colours}, colours)


LIBRARIES = {"ours": "torchrl_her", "Stable-Baselines3": "Stable-Baselines3"}
OF_LIBRARY = {"torchrl_her": BLUE, "Stable-Baselines3": VERMILION}


def draw_learning(path: Path) -> None:
    """Draw steps and CPU time until 95% of the episodes succeed: median and range of each library."""
    rows = [row for row in read("learning-summary.csv") if not row["task"].startswith("PointMaze")]
    groups = list(dict.fromkeys((row["settings"], row["task"]) for row in rows))
    groups.sort(key=lambda group: (group[0] != "equal", not group[1].startswith("Point")))
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 4.6), layout="constrained", sharey=True)
    metrics = {"steps to 0.95": ("environment steps", 7000), "CPU seconds to 0.95": ("CPU seconds", 65)}
    for axes, (metric, (label, limit)) in zip(panels, metrics.items(), strict=True):
        for number, (settings, task) in enumerate(groups):
            for shift, library in ((-0.17, "ours"), (0.17, "Stable-Baselines3")):
                (row,) = (
                    row for row in rows if (row["settings"], row["task"], row["library"]) == (settings, task, library)
                )
                median, low, high = (
                    np.inf if text == "not reached" else float(text.replace(",", ""))
                    for text in re.split(r" \(| to |\)", row[metric])[:3]
                )
                colour, y = OF_LIBRARY[LIBRARIES[library]], number + shift
                axes.plot([low, min(high, limit)], [y, y], color=colour, lw=2, alpha=0.45, solid_capstyle="butt")
                marker = {"marker": "o" if library == "ours" else "s", "color": colour, "ms": 5, "ls": ""}
                axes.plot([median], [y], **marker, label="" if number else LIBRARIES[library])
                if high == np.inf:
                    axes.annotate(
                        "", (limit * 1.02, y), (limit * 0.98, y), arrowprops={"arrowstyle": "->", "color": colour}
                    )
        axes.set(xlabel=f"{label} to a success rate of 0.95", xlim=(0, limit * 1.02))
        plain(axes, "x")
    names = [f"{task}\n{'each tuned' if settings == 'each tuned' else 'equal settings'}" for settings, task in groups]
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    legend(figure, 2)
    save(figure, path)


def draw_point_maze(path: Path) -> None:
    """Draw the success in two mazes, against steps and CPU time."""
    figure, panels = plt.subplots(2, 2, figsize=(WIDTH, 4.8), layout="constrained", sharey=True)
    for row, maze in zip(panels, ("UMaze", "Medium"), strict=True):
        for axes, (x, label, unit) in zip(
            row,
            (("steps", "environment steps [thousands]", 1000), ("cpu_seconds", "CPU time [minutes]", 60)),
            strict=True,
        ):
            task = f"PointMaze_{maze}, SAC"
            curves = {name: evaluations("point-maze.csv", x, task=task, way=way) for way, name in LIBRARIES.items()}
            draw_curves(axes, curves, OF_LIBRARY, unit)
            axes.set(title=f"PointMaze_{maze}", xlabel=label)
        row[0].set_ylabel("success rate")
    legend(figure, 2)
    save(figure, path)


def draw_sampling(path: Path) -> None:
    """Draw the time of three operations against the size of the buffer."""
    lines = {
        "TensorDictReplayBuffer, no hindsight": ("TorchRL, no hindsight", INK, "o"),
        "the same with HERTransform": ("TorchRL with HERTransform", BLUE, "o"),
        "PackedStorage with HERTransform": ("HERTransform with PackedStorage", SKY, "D"),
        "TorchRL's HERReplayBuffer": ("TorchRL's HERReplayBuffer", ORANGE, "^"),
        "Stable-Baselines3's HerReplayBuffer": ("Stable-Baselines3", VERMILION, "s"),
    }
    titles = {
        "`sample(256)`": "sample(256)",
        "16 batches of 256 per call, per batch": "one of 16 batches\nsampled together",
        "`extend(50)` + `sample(256)`": "extend(50)\nand sample(256)",
    }
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 3.6), layout="constrained")
    for axes, (title, name) in zip(panels, titles.items(), strict=True):
        _, rows = table("speed.md", title)
        for row, (label_, colour, marker) in lines.items():
            axes.plot(range(4), np.array(rows[row]) / 1000, color=colour, marker=marker, ms=4, label=label_)
        axes.set(title=name, xlabel="stored transitions", ylim=(0, None))
        axes.set_xticks(range(4), ["10 k", "100 k", "500 k", "1 M"])
        plain(axes, "y")
    panels[0].set_ylabel("time [ms]")
    legend(figure, 3)
    save(figure, path)


def draw_memory(path: Path) -> None:
    """Draw the memory of a buffer while it is overwritten."""
    head, rows = table("speed.md", "MiB after")
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    for name, colour, text in (("with hindsight", BLUE, "with hindsight"), ("without", INK, "without hindsight")):
        millions = [float(each.removesuffix(" M")) for each in head]
        axes.plot(millions, rows[name], color=colour, marker="o", ms=3, label=text)
    axes.set(title="A buffer for 100,000 transitions", ylim=(0, 70), ylabel="memory [MiB]")
    axes.set_xlabel("written transitions [millions]")
    axes.legend(frameon=False, loc="lower right")
    plain(axes, "y")
    save(figure, path)


# Tutorials


def draw_tutorials(path: Path) -> None:
    """Run the code of the tutorials, which writes pictures into the current folder."""
    plt.rcdefaults()
    torch.set_num_threads(1)
    pages = sorted((Path(__file__).parent / "tutorials").glob("*.md"))
    before = Path.cwd()
    for page in pages:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})
            os.chdir(before)
            for file in sorted([*Path(folder).glob("*.png"), *Path(folder).glob("*.gif")]):
                (path.parent / file.name).write_bytes(file.read_bytes())
                print(f"Wrote {path.parent / file.name}.")


def save(figure: Figure, path: Path) -> None:
    """Write a picture, the same file each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(f"Wrote {path}.")


FIGURES: dict[str, Callable[[Path], None]] = {
    "data_flow.svg": draw_data_flow,
    "goal_names.png": draw_goal_names,
    "running_episodes.png": draw_running_episodes,
    "goal_distributions.png": draw_goal_distributions,
    "fetch.png": draw_fetch,
    "pick_and_place.png": draw_pick_and_place,
    "offline_results.png": draw_offline_results,
    "contrastive.png": draw_contrastive,
    "strategies.png": draw_strategies,
    "movement.png": draw_movement,
    "both_ways.png": draw_both_ways,
    "bit_flipping_50.png": draw_bit_flipping,
    "learning.png": draw_learning,
    "point_maze.png": draw_point_maze,
    "sampling.png": draw_sampling,
    "memory.png": draw_memory,
    "tutorials": draw_tutorials,
}


def main() -> None:
    """Draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {name.split(".")[0]: name for name in FIGURES}
    parser.add_argument("figures", nargs="*", choices=[[], *names], default=[], help="(default: all)")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "images", help="(default: docs/images)")
    arguments = parser.parse_args()
    for name in arguments.figures or names:
        FIGURES[names[name]](arguments.folder / names[name])


if __name__ == "__main__":
    main()
