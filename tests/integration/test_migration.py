"""The migration pages: both examples of each page run."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import torchrl_her.envs  # noqa: F401  # registers the environments
from support.factories import make_augmentation
from support.world import Goals, World

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
THEIRS, OURS = 0, 1  # positions of the examples on a page
import_or_skip = functools.partial(pytest.importorskip, reason="the extra 'benchmarks' has it")


def page(library: str) -> str:
    return (DOCS / f"from-{library.replace('_', '-')}.md").read_text()


def run(library: str, which: int, **changes: str) -> dict:
    """Run an example of a page, with some lines changed, and return its variables."""
    blocks = re.findall(r"^```python\n(.*?)^```", page(library), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    code, variables = blocks[which], {}
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    exec(compile(code, f"from {library}, example {which}", "exec"), variables)
    return variables


# Stable-Baselines3


def test_stable_baselines3_and_its_replacement_return_equivalent_batches():
    for library in ("stable_baselines3", "gymnasium_robotics"):
        import_or_skip(library)
    short = {"seed, steps = 0, 5_000": "seed, steps = 0, 600"}  # updates start after 500 steps
    sample = run("stable_baselines3", THEIRS, **short)["model"].replay_buffer.sample(4000)
    theirs = sample.next_observations["achieved_goal"], sample.observations["desired_goal"], sample.rewards
    torch.manual_seed(0)
    batch = run("stable_baselines3", OURS, **short)["rb"].sample(4000)
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


@pytest.mark.slow
@pytest.mark.parametrize("which", [THEIRS, OURS], ids=["theirs", "ours"])
def test_both_examples_of_cpprb_run_and_ours_stores_four_copies_of_each_transition(which):
    if which == THEIRS:
        import_or_skip("cpprb")
    example = run("cpprb", which)
    if which == OURS:
        rows = example["rb"][:]
        assert rows["hindsight", "relabelled"].float().mean() == 0.8
        assert len(rows) > 5 * (8_000 - 10)


@pytest.mark.filterwarnings("ignore:The reward module gives")  # another reward than that of the data
def test_cpprb_and_its_replacement_store_equivalent_rows():
    """For one episode, both store the same number of rows, with goals and rewards from the same sets."""
    cpprb, steps, copies = import_or_skip("cpprb"), 20, 1000
    theirs = cpprb.HindsightReplayBuffer(
        steps * (copies + 1),
        {"obs": {}, "act": {}, "next_obs": {}},
        max_episode_len=steps,
        reward_func=lambda state, action, goal: -1.0 * (state != goal),
        additional_goals=copies,
        prioritized=False,
    )
    for step in range(steps):
        theirs.add(obs=step, act=0, next_obs=step + 1)
    theirs.on_episode_end(999)
    stored = theirs.get_all_transitions()

    world = World(1, Goals())
    data = world.tensordict(world.play(0, ["go"] * (steps - 1) + ["truncated"]))
    rows = make_augmentation(lambda *goals: torch.ne(*goals).any(-1).float().neg(), n_sampled_goal=copies).inv(data)
    assert len(rows) == theirs.get_stored_size() == steps * (copies + 1)
    for step in range(steps):
        values, counts = np.unique(stored["goal"][stored["obs"] == step], return_counts=True)
        same = rows[rows["achieved_goal"][:, 1] == step]
        our_values, our_counts = same["desired_goal"][:, 1].unique(return_counts=True)
        assert our_values.tolist() == values.tolist() == [*range(step + 1, steps + 1), 999]
        expected = copies / (steps - step)
        for count in (*counts[:-1], *our_counts[:-1].tolist()):
            assert abs(count - expected) < 5 * expected**0.5
        reached = (same["desired_goal"] == same["next", "achieved_goal"]).all(1)
        assert torch.equal(same["next", "reward"].squeeze(1) == 0, reached)


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
