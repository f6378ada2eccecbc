"""`pointmaze_data.py` records data, and `gciql.py` trains from data alone."""

import sys

import numpy as np
import pytest
import torch
from hydra.core.config_store import ConfigStore
from script_runs import compose_settings
from tensordict import TensorDict

pytest.importorskip("gymnasium_robotics")
import gciql
import pointmaze_data

SMALL = ["updates=20", "batch_size=16", "hidden=[16]", "evaluation.interval=10", "evaluation.episodes=2"]
STEPS = 2_700  # five episodes and a part of another


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of several episodes, of both behaviours."""
    folder = tmp_path_factory.mktemp("data") / "umaze"
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["PointMaze_UMaze-v3", "--steps", str(STEPS), "--seed", "1", "--folder", str(folder)]
        patch.setattr(sys, "argv", ["pointmaze_data.py", *arguments])
        pointmaze_data.main()
        with pytest.raises(SystemExit, match="exists already: remove it, or choose another --folder"):
            pointmaze_data.main()
    return folder


def test_data_are_whole_episodes_of_two_behaviours_in_the_layout_of_a_collector(folder):
    data = TensorDict.load_memmap(folder)
    assert data["next", "done"].flatten().nonzero().flatten().tolist() == [*range(499, STEPS, 500), STEPS - 1]
    assert torch.equal(data["next", "done"], data["next", "truncated"])
    for episode in data.split(500):
        for key in ("observation", "achieved_goal"):
            assert torch.equal(episode[key][1:], episode["next", key][:-1])
        assert len(episode["collector", "traj_ids"].unique()) == len(episode["random_play"].unique()) == 1
        held = len(episode) / (1 + (episode["action"].diff(dim=0) != 0).any(-1).sum())  # steps, on average
        assert 5 < held < 20 if episode["random_play"][0] else held < 2
    assert len(data[~data["random_play"].flatten()]) in range(500, STEPS)
    assert not {"desired_goal", "reward"} & {*data.keys(), *data["next"].keys()}  # no action depends on them
    maze_map = [[1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [1, 0, 1, 0, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
    assert pointmaze_data.shortest_path(maze_map, (2, 1), (3, 2)) == [(3, 1), (3, 2)]


def configure(*overrides):
    ConfigStore.instance().store("gciql", gciql.Config)  # a script that ran as __main__ has stored its own
    return gciql.check(compose_settings("gciql", *overrides))


def test_a_short_run_logs_and_saves_and_no_data_are_named(folder, run_script, tmp_path):
    printed = run_script("gciql", *SMALL, "hydra.run.dir=run", f"data={folder}")
    assert printed.splitlines()[-1].startswith("20 updates: success ")
    rows = np.loadtxt(tmp_path / "run" / "logs" / "scalars" / "evaluation" / "steps.csv", delimiter=",")
    assert rows[:, 0].tolist() == [10, 20]
    assert torch.load(tmp_path / "run" / "actor.pt")
    with pytest.raises(SystemExit, match=r"no data in nowhere: run python examples/pointmaze_data\.py PointMaze_UMaze"):
        configure("data=nowhere")


def test_critics_and_actor_have_goals_of_their_own(folder):
    data = TensorDict.load_memmap(folder)
    batch = gciql.make_replay_buffer(configure(f"data={folder}", "batch_size=250"), data).sample()
    assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True)
    assert torch.equal(batch["next", "terminated"], distance <= 0.45)
    assert torch.equal(batch["next", "reward"], (distance <= 0.45).float() - 1)
    # A fifth of the critics' goals are the transition's own outcome, and 0.3 are of any episode.
    assert 0.15 < (distance == 0).float().mean() < 0.30
    for key, of_its_own in (("desired_goal", 0.7 + 0.3 * 0.18), ("actor_goal", 1.0)):
        goals, outcomes = batch[key], data["next", "achieved_goal"]
        distance, row = torch.cdist(goals, outcomes, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        assert not distance.any()
        found = data["collector", "traj_ids"][row] == batch["collector", "traj_ids"]
        assert found.float().mean() == pytest.approx(of_its_own, abs=0.05)
