"""Draw the distribution of goals for each strategy: which step's outcome becomes the goal of one transition.

The goals are drawn by HERTransform from a replay buffer with four episodes of 50 steps::

    python examples/plot_strategies.py docs/images/goal_distributions.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from tensordict import TensorDict
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

matplotlib.use("Agg")  # draws into files, without a screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

EPISODES, STEPS, STEP = 4, 50, 15  # the transition of this step is drawn
DRAWS = 100_000
OWN, OTHER, DESIRED = "#0072B2", "#D55E00", "#009E73"
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
    """Return the probability of each step of the own episode, of other episodes, and of their desired goals.

    A goal is (episode, step), and the desired goal of an episode (episode, -1).
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
    panel.bar([58], [other], width=5, color=OTHER)
    panel.bar([65], [desired], width=5, color=DESIRED)
    panel.axvline(STEP, color="black", linestyle=":", linewidth=1)
    panel.set_title(repr(strategy).replace(", ", ",\n"), fontsize=10)
    panel.set_xlim(-1, 69)
    panel.set_yscale("symlog", linthresh=0.1, linscale=1.5)
    panel.set_ylim(0, 1.2)
    panel.set_yticks([0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.3, 1], ["0", "0.02", "", "0.06", "", "0.1", "0.3", "1"])
    panel.set_xticks([0, STEP, STEPS - 1], ["0", f"t={STEP}", f"T-1={STEPS - 1}"])
    panel.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="the picture to write")
    path = parser.parse_args().path
    torch.manual_seed(0)
    figure, axes = plt.subplots(2, 5, figsize=(14, 5.6), layout="constrained", sharex=True, sharey=True)
    for panel, strategy in zip(axes.flat, STRATEGIES, strict=True):
        draw_panel(panel, strategy)
    for panel in axes[:, 0]:
        panel.set_ylabel("probability (log above 0.1)")
    figure.supxlabel("step whose outcome becomes the goal of the transition at step t", fontsize=11)
    names = ("a step of its own episode", "any step of another episode", "the desired goal of another episode")
    patches = [matplotlib.patches.Patch(color=color) for color in (OWN, OTHER, DESIRED)]
    figure.legend(patches, names, loc="outside upper center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
