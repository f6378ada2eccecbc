"""`gciql.py` trains from data alone: its samples, its checks of settings, and its logs."""

import re

import numpy as np
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from script_runs import compose_settings
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

pytest.importorskip("gymnasium_robotics")
import gciql
import gymnasium
import pointmaze_data

SMALL = [
    "updates=20",
    "batch_size=16",
    "hidden=[16]",
    "evaluation.interval=10",
    "evaluation.episodes=2",
    "hydra.run.dir=run",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two and a half episodes of data."""
    env = gymnasium.make("PointMaze_UMaze-v3", max_episode_steps=pointmaze_data.EPISODE_STEPS)
    folder = tmp_path_factory.mktemp("data") / "umaze"
    with pointmaze_data.tqdm(disable=True) as bar:
        pointmaze_data.record(env, 1_250, np.random.default_rng(0), bar).memmap(folder)
    return folder


def configure(*overrides):
    ConfigStore.instance().store("gciql", gciql.Config)  # a script that ran as __main__ has stored its own
    return gciql.check(compose_settings("gciql", *overrides))


@pytest.mark.parametrize("overrides", [[], ["goals=future"], ["algorithm=bc"], ["speedup=none"]])
def test_a_short_run_logs_saves_and_says_what_it_reached(overrides, folder, run_script, tmp_path):
    printed = run_script("gciql", *SMALL, f"data={folder}", *overrides)
    last = printed.splitlines()[-1]
    assert last.startswith("20 updates: success ")
    assert last.endswith(f". See {tmp_path / 'run'}/")
    logs = tmp_path / "run" / "logs" / "scalars" / "evaluation"
    for name, highest in (("success", 1), ("steps", 300)):
        rows = [list(map(float, line.split(","))) for line in (logs / f"{name}.csv").read_text().splitlines()]
        assert [step for step, _ in rows] == [10, 20]
        assert all(0 <= value <= highest for _, value in rows)
    assert torch.load(tmp_path / "run" / "actor.pt")


def trained(folder, *overrides):
    folder.mkdir()
    gciql.train(configure(*SMALL[:-1], "evaluation.interval=20", *overrides), folder)
    return torch.load(folder / "actor.pt")


def test_a_temperature_of_zero_is_behavioural_cloning_and_a_seed_repeats_a_run_recorded_or_not(folder, tmp_path):
    data = f"data={folder}"
    cloned = trained(tmp_path / "cloned", data, "algorithm=bc")
    cold = trained(tmp_path / "cold", data, "temperature=0")
    iql = trained(tmp_path / "iql", data)
    torch.testing.assert_close(cold, cloned)
    assert any(not torch.allclose(iql[name], cloned[name]) for name in iql)
    for name, override in (("again", "seed=0"), ("unrecorded", "speedup=none")):  # the learning rate falls in both
        torch.testing.assert_close(trained(tmp_path / name, data, override), iql, rtol=0, atol=0)
    other = trained(tmp_path / "other", data, "seed=1")
    assert any(not torch.allclose(iql[name], other[name]) for name in iql)


def nearest(goals, outcomes):
    """The rows of the outcomes that the goals are."""
    distance, row = torch.cdist(goals, outcomes, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    assert not distance.any()
    return row


def test_critics_and_actor_have_goals_of_their_own(folder):
    config = configure(f"data={folder}", "batch_size=250")
    data = TensorDict.load_memmap(config.data)
    batch = gciql.make_replay_buffer(config, data).sample()
    assert (batch["desired_goal"] != batch["actor_goal"]).any(-1).float().mean() > 0.8
    assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True)
    assert torch.equal(batch["next", "terminated"], distance <= 0.45)
    assert torch.equal(batch["next", "reward"], (distance <= 0.45).float() - 1)
    # A fifth of the critics' goals are the transition's own outcome, and others of another episode.
    assert 0.15 < (distance == 0).float().mean() < 0.30
    outcomes, episodes = data["next", "achieved_goal"], data["collector", "traj_ids"]
    for key, of_its_own in (("desired_goal", 0.8), ("actor_goal", 1.0)):  # 0.7, and 0.3 of the 1,250 rows
        assert (
            episodes[nearest(batch[key], outcomes)] == batch["collector", "traj_ids"]
        ).float().mean() == pytest.approx(of_its_own, abs=0.05)


def test_future_alone_gives_both_the_same_goal(folder):
    config = configure(f"data={folder}", "goals=future", "batch_size=60")
    data = TensorDict.load_memmap(config.data)
    batch = gciql.make_replay_buffer(config, data).sample()
    assert "actor_goal" not in batch.keys()  # noqa: SIM118
    row = nearest(batch["desired_goal"], data["next", "achieved_goal"])
    assert torch.equal(data["collector", "traj_ids"][row], batch["collector", "traj_ids"])


def test_an_evaluation_is_always_the_same_and_counts_the_steps_until_the_goal():
    """Compared with a loop over single Gymnasium environments; the policy steers straight at the goal."""
    config = gciql.Config(evaluation=gciql.Evaluating(episodes=10))
    steer = TensorDictModule(
        lambda state, goal: 3 * (goal - state[..., :2]) - state[..., 2:], ["observation", "desired_goal"], ["action"]
    )
    env = gymnasium.make("PointMaze_UMaze-v3", continuing_task=True, max_episode_steps=300)
    successes, steps = 0, 0
    for episode in range(10):
        state, _ = env.reset(seed=gciql.EVALUATION_SEED + episode)
        reached, truncated = False, False
        while not reached and not truncated:
            inputs = {key: torch.as_tensor(values, dtype=torch.float32)[None] for key, values in state.items()}
            action = steer(TensorDict(inputs, [1]))["action"][0].numpy()
            state, _, _, truncated, _ = env.step(action)
            reached = np.linalg.norm(state["achieved_goal"] - state["desired_goal"]) <= 0.45
            steps += 1
        successes += reached
    assert 0 < successes < 10
    expected = {"success": successes / 10, "steps": steps / 10}
    assert gciql.evaluate(config, steer) == pytest.approx(expected)
    assert gciql.evaluate(config, steer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data=nowhere", r"no data in nowhere: run python examples/pointmaze_data\.py PointMaze_UMaze-v3"),
        ("updates=0", "updates=0 must be 1 or more"),
        ("evaluation.interval=0", r"evaluation\.interval=0 must be 1 or more"),
        ("evaluation.episodes=-1", r"evaluation\.episodes=-1 must be 1 or more"),
        ("env=FetchReach-v4", "env=FetchReach-v4 must be a PointMaze"),
    ],
)
def test_impossible_settings_are_named(override, message, folder):
    with pytest.raises(SystemExit, match=message):
        configure(f"data={folder}", override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("goals=mixtures", r"\[mixture, future\]"),
        ("algorithm=sac", r"\[iql, bc\]"),
        ("speedup=cudagraph", r"\[none, record, compile\]"),
        ("batch_size=none", "Integer"),
    ],
)
def test_values_of_a_wrong_type_are_refused_with_the_possible_values(override, expected):
    with pytest.raises(ConfigCompositionException) as refused:
        compose_settings("gciql", override)
    refused.match(override)
    assert re.search(expected, str(refused.value.__cause__))
