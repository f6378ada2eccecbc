"""Draw the distribution of goals for each strategy: the steps whose outcomes become the goal of one transition.

The goals are drawn by HERTransform from a replay buffer with four episodes of 50 steps::

    python examples/plot_strategies.py docs/images/goal_distributions.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from plots import BLUE, GREEN, VERMILION
from tensordict import TensorDict
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

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

EPISODES, STEPS, STEP = 4, 50, 15  # STEP: the step of the transition whose goals are drawn
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


def draw_goals(strategy: GoalStrategy) -> tuple[np.ndarray, float, float]:
    """Return the probabilities of the steps of the same episode, of all other episodes, and of their desired goals.

    An achieved goal is ``(episode, step)``, and the desired goal of an episode is ``(episode, -1)``.
    """
    hindsight = HERTransform(SparseReward(0), strategy=strategy, her_ratio=1, capacity=1000)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(EPISODES * STEPS), transform=hindsight)
    for episode in range(EPISODES):
        rb.extend(make_episode(episode))
    rows = rb.storage[torch.full((DRAWS,), STEP)]  # one transition of the first episode
    goals = rb.transform(rows)["desired_goal"].long()
    of_other, step = goals[:, 0] != 0, goals[:, 1]
    own = torch.bincount(step[~of_other], minlength=STEPS) / DRAWS
    return own.numpy(), float((of_other & (step >= 0)).float().mean()), float((step < 0).float().mean())


def make_episode(episode: int) -> TensorDict:
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


def draw_panel(panel: Axes, strategy: GoalStrategy) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="file of the picture")
    path = parser.parse_args().path
    torchrl_logger.setLevel("WARNING")
    torch.manual_seed(0)
    figure = plt.figure(figsize=(7.2, 7.4), layout="constrained")
    grid = figure.add_gridspec(4, 3)
    places = [grid[row, column] for row in range(3) for column in range(3)] + [grid[3, :]]
    for number, (place, strategy) in enumerate(zip(places, STRATEGIES, strict=True)):
        panel = figure.add_subplot(place)
        draw_panel(panel, strategy)
        if number % 3:
            panel.set_yticklabels([])
    figure.supylabel("probability", fontsize=10)
    figure.supxlabel(f"step whose outcome becomes the goal of the transition at step t = {STEP}", fontsize=10)
    names = ("step of the same episode", "any step of another episode", "desired goal of another episode")
    patches = [Patch(color=color) for color in (OWN, OTHER, DESIRED)]
    figure.legend(patches, names, loc="outside upper center", ncols=3, frameon=False, fontsize=9, columnspacing=1.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=180)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
