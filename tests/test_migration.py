"""The pages for who comes from another library: both examples run, and the tables are whole."""

import inspect
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage

import torchrl_her.envs  # registers the environments

DOCS = Path(__file__).parents[1] / "docs"
EXTRA = "the extra 'benchmarks' has it"
PAGES = {
    "stable_baselines3": "from-stable-baselines3.md",
    "cpprb": "from-cpprb.md",
    "tianshou": "from-tianshou.md",
    "torchrl": "from-torchrl.md",
}
ROWS = [
    "strategies",
    "`random`",
    "number of new goals",
    "relabelling when sampling",
    "relabelling when writing",
    "running episodes",
    "prioritized replay",
    "goals from states",
    "what the reward reads",
    "info for the reward",
    "several environments",
    "timeouts",
    "termination under a new goal",
    "longest episode",
    "saving",
    "normalization",
    "algorithms",
    "BitFlipping",
    "checks of the environment",
    "monitoring",
    "exploration",
    "storage on a GPU",
    "memory-mapped storage",
    "several writers",
    "n-step returns",
    "one goal per sequence",
    "other distributions of goals",
    "different goals for actor and critic",
]


def run(library: str, which: int) -> dict:
    """Run an example of a page, and return its variables: 0 is theirs, 1 is ours."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / PAGES[library]).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    variables = {}
    exec(compile(blocks[which], f"{PAGES[library]}, example {which}", "exec"), variables)
    return variables


@pytest.mark.parametrize("library", PAGES)
def test_a_page_says_something_of_each_feature(library):
    text = (DOCS / PAGES[library]).read_text()
    side_by_side = text.split("## Side by side")[1].split("##")[0]
    rows = [line.strip("|").split(" | ") for line in side_by_side.splitlines() if line.startswith("|")][2:]
    assert [row[0].strip() for row in rows] == ROWS
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)


def test_pages_name_every_argument():
    def check(library, function, leave_out=()):
        text = (DOCS / PAGES[library]).read_text().split("## Arguments")[1].split("##")[0]
        for name in inspect.signature(function).parameters:
            assert name in ("self", *leave_out) or name in text, f"{PAGES[library]} does not name {name}"

    check("torchrl", HERReplayBuffer.__init__)
    check("stable_baselines3", pytest.importorskip("stable_baselines3", reason=EXTRA).HerReplayBuffer.__init__)
    check("cpprb", pytest.importorskip("cpprb", reason=EXTRA).HindsightReplayBuffer.__init__, leave_out=["kwargs"])


# Stable-Baselines3


def test_stable_baselines3_and_the_same_return_batches_of_one_kind():
    pytest.importorskip("stable_baselines3", reason=EXTRA)
    theirs = run("stable_baselines3", 0)["model"].replay_buffer
    sample = theirs.sample(4000)
    achieved, goal, reward = (
        values.numpy()
        for values in (
            sample.next_observations["achieved_goal"],
            sample.observations["desired_goal"],
            sample.rewards.squeeze(1),
        )
    )
    reached_theirs = (achieved == goal).all(1)
    assert np.array_equal(reward, reached_theirs - 1.0)

    torch.manual_seed(0)
    batch = run("stable_baselines3", 1)["rb"].sample(4000)
    reached_ours = (batch["next", "achieved_goal"] == batch["desired_goal"]).all(1)
    assert torch.equal(batch["next", "reward"].squeeze(1), reached_ours.float() - 1)
    assert torch.equal(batch["next", "terminated"].squeeze(1), reached_ours)
    assert 0.77 < batch["hindsight", "relabelled"].float().mean() < 0.83
    # Of four fifths with future goals, so many are reached at once.
    assert abs(reached_theirs.mean() - float(reached_ours.float().mean())) < 0.05
    assert reached_theirs.mean() > 0.15


# cpprb


def success(act, episodes=100):
    """The share of greedy episodes that reach their goal."""
    env = gymnasium.make("torchrl_her/BitFlipping-v0", n_bits=10)
    reached = 0
    with torch.no_grad():
        for episode in range(episodes):
            observation, _ = env.reset(seed=10_000 + episode)
            over = False
            while not over:
                action = act(observation["observation"], observation["desired_goal"])
                observation, _, terminated, truncated, _ = env.step(action)
                over = terminated or truncated
            reached += terminated
    return reached / episodes


def test_prioritized_dqn_on_cpprbs_example_flips_10_bits():
    example = run("cpprb", 1)
    assert success(example["act"]) >= 0.95
    rows = example["rb"][:]
    copies = rows["hindsight", "relabelled"].float().mean()
    assert copies == 0.8
    assert len(rows) > 5 * (8_000 - 10)


def test_cpprb_on_the_same_example_flips_10_bits():
    pytest.importorskip("cpprb", reason=EXTRA)
    assert success(run("cpprb", 0)["act"]) >= 0.95


def test_cpprb_and_the_same_store_the_same_of_an_episode():
    """One episode with goals that tell their step: as many rows, and goals and rewards from the same sets."""
    cpprb = pytest.importorskip("cpprb", reason=EXTRA)
    steps, copies = 20, 1000

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
    theirs.on_episode_end(-1)
    stored = theirs.get_all_transitions()
    goals = [np.unique(stored["goal"][stored["obs"] == step], return_counts=True) for step in range(steps)]

    ours = torchrl_her.HindsightAugmentation(
        lambda achieved, goal: -1.0 * (achieved != goal).squeeze(-1), n_sampled_goal=copies
    )
    rows = ours.inv(episode_of(steps))
    assert len(rows) == theirs.get_stored_size() == steps * (copies + 1)
    for step, (values, counts) in enumerate(goals):
        same = rows[rows["achieved_goal"].squeeze(-1) == step]
        found, of_ours = same["desired_goal"].unique(return_counts=True)
        assert found.tolist() == values.tolist() == [-1, *range(step + 1, steps + 1)]
        expected = copies / (steps - step)
        for count in (*counts[1:], *of_ours[1:].tolist()):
            assert abs(count - expected) < 5 * expected**0.5
        reached = same["desired_goal"] == same["next", "achieved_goal"]
        assert torch.equal(same["next", "reward"] == 0, reached)


def episode_of(steps):
    """States that count the steps, towards a goal that none of them is."""
    state = torch.arange(steps + 1.0).unsqueeze(-1)
    last = torch.arange(steps).unsqueeze(-1) == steps - 1
    goal = torch.full((steps, 1), -1.0)
    return TensorDict(
        {
            "achieved_goal": state[:-1],
            "desired_goal": goal,
            "next": {
                "achieved_goal": state[1:],
                "desired_goal": goal.clone(),
                "reward": goal.clone(),
                "done": last,
                "terminated": torch.zeros_like(last),
                "truncated": last.clone(),
            },
        },
        batch_size=steps,
    )


# tianshou


def test_what_stands_beside_tianshou_relabels_as_many():
    batch = run("tianshou", 1)["batch"]
    check_point_reach(batch["next", "achieved_goal"], batch["desired_goal"], batch["next", "reward"])
    assert 0.8 < batch["hindsight", "relabelled"].float().mean() < 0.95


def test_tianshou_runs():
    pytest.importorskip("tianshou", reason=EXTRA)
    batch = run("tianshou", 0)["batch"]
    check_point_reach(
        *(torch.as_tensor(values) for values in (batch.obs_next.achieved_goal, batch.obs_next.desired_goal, batch.rew))
    )


def check_point_reach(achieved, goal, reward):
    """Rewards are those of the goals, and some goals are reached."""
    distance = (achieved - goal).norm(dim=-1)
    clear = (distance - 0.05).abs() > 1e-5  # rounding decides at the threshold
    expected = torch.where(distance <= 0.05, 0.0, -1.0)
    assert torch.equal(reward.flatten().float()[clear], expected[clear].float())
    assert (expected == 0).float().mean() > 0.1


# TorchRL


@pytest.mark.parametrize("which", [0, 1], ids=["HERReplayBuffer", "HERTransform"])
def test_torchrl_and_the_same_run(which):
    torch.manual_seed(0)
    batch = run("torchrl", which)["batch"]
    check_point_reach(batch["next", "achieved_goal"], batch["desired_goal"], batch["next", "reward"])


def test_goals_of_torchrls_buffer_can_be_older_than_the_transition():
    """What the page says of it: the goal of the last step of an episode is what the step before achieved."""
    rb = HERReplayBuffer(
        lambda rows: -torch.ones(len(rows), 1), her_ratio=1.0, storage=LazyTensorStorage(20), batch_size=1000
    )
    rb.extend(episode_of(20))
    batch = rb.sample()
    last = batch["next", "done"].squeeze(-1)
    assert batch["desired_goal"][last].eq(19).all()
    assert batch["next", "achieved_goal"][last].eq(20).all()
    assert not batch["desired_goal"].eq(20).any()
