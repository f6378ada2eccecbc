"""The migration pages: both examples of each page run."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

import torchrl_her.envs  # noqa: F401  # registers the environments
from support.pages import run_block

THEIRS, OURS = 0, 1  # positions of the examples on a page
import_or_skip = functools.partial(pytest.importorskip, reason="the extra 'benchmarks' has it")


def run(library: str, which: int, changes: dict[str, str] | None = None) -> dict[str, Any]:
    """Run an example of a page, and return its variables."""
    run_block(f"how-to/from-{library.replace('_', '-')}", which, variables := {}, changes)
    return variables


# Stable-Baselines3


def test_stable_baselines3_and_its_replacement_return_equivalent_batches():
    for library in ("stable_baselines3", "gymnasium_robotics"):
        import_or_skip(library)
    short = {"seed, steps = 0, 5_000": "seed, steps = 0, 600"}  # updates start after 500 steps
    sample = run("stable_baselines3", THEIRS, short)["model"].replay_buffer.sample(4000)
    theirs = sample.next_observations["achieved_goal"], sample.observations["desired_goal"], sample.rewards
    torch.manual_seed(0)
    batch = run("stable_baselines3", OURS, short)["rb"].sample(4000)
    ours = batch["next", "achieved_goal"], batch["desired_goal"], batch["next", "reward"]
    at_goal = []
    for achieved, goal, reward in (theirs, ours):
        distance, reward = (achieved - goal).norm(dim=1), reward.squeeze(1)
        clear = (distance - 0.05).abs() > 1e-5  # rounding decides at the threshold
        assert torch.equal(reward[clear], torch.where(distance <= 0.05, 0.0, -1.0).to(reward)[clear])
        at_goal.append((reward == 0).float().mean())
    # With future goals, the same share of transitions reaches its goal.
    assert abs(at_goal[0] - at_goal[1]) < 0.1
    assert at_goal[0] > 0.15
    assert 0.77 < batch["hindsight", "relabelled"].float().mean() < 0.83
    assert batch["inputs"].shape == batch["next", "inputs"].shape == (4000, 13)


# cpprb


@pytest.mark.parametrize("which", [THEIRS, OURS], ids=["theirs", "ours"])
def test_both_examples_of_cpprb_run_and_ours_stores_four_copies_of_each_transition(which):
    if which == THEIRS:
        import_or_skip("cpprb")
    example = run("cpprb", which)
    if which == OURS:
        rows = example["rb"][:]
        assert rows["hindsight", "relabelled"].float().mean() == 0.8
        assert len(rows) > 5 * (1_000 - 10)


# tianshou and TorchRL


@pytest.mark.parametrize("library", ["tianshou", "torchrl"])
@pytest.mark.parametrize("which", [THEIRS, OURS], ids=["theirs", "ours"])
def test_rewards_match_the_goals_and_some_goals_are_reached(library, which):
    if which == THEIRS:
        import_or_skip(library)
    torch.manual_seed(0)
    variables = run(library, which)
    batch = variables["batch"]
    if (library, which) == ("tianshou", THEIRS):
        entries = (batch.obs_next.achieved_goal, batch.obs_next.desired_goal, batch.rew)
    else:
        entries = (batch["next", "achieved_goal"], batch["desired_goal"], batch["next", "reward"])
    achieved, goal, reward = map(torch.as_tensor, entries)
    distance = (achieved - goal).norm(dim=-1)
    clear = (distance - 0.05).abs() > 1e-5  # rounding decides at the threshold
    expected = torch.where(distance <= 0.05, 0.0, -1.0)
    assert torch.equal(reward.flatten().float()[clear], expected[clear].float())
    reached, least = (expected == 0).float().mean(), 0.1
    if (library, which) == ("tianshou", THEIRS):  # 0.108 on average, so one batch is not enough
        reached = np.mean([(variables["rb"].sample(256)[0].rew == 0).mean() for _ in range(50)])
        least = 0.095
    assert reached > least
    if (library, which) == ("tianshou", OURS):  # the share that tianshou relabels
        assert 0.8 < batch["hindsight", "relabelled"].float().mean() < 0.95
