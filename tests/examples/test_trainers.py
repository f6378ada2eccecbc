"""The YAML files of examples/trainer, in small runs on the tape, whose goals show what was relabelled."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torchrl.envs import DoubleToFloat, GymEnv, SerialEnv, TransformedEnv

from support.data_sets import save_ogbench
from support.goals import reward_of
from support.hydra_groups import torchrl_groups
from support.tape import ASKED, check, check_nothing_is_lost
from torchrl_her import configs

TRAINER = Path(__file__).parents[2] / "examples" / "trainer"
sys.path.append(str(TRAINER))
HER_RATIOS = {"sac_fetch_reach": 0.8, "td3_fetch_reach": 0.888, "ddpg_fetch_push": 0.8, "dqn_bit_flipping": 0.8}
SAC = ["actor_network.in_features=6", "actor_network.out_features=4", "critic_network.in_features=8"]
DETERMINISTIC = [*SAC, "actor_network.out_features=2", "action_spec.shape=[2]"]
TRANSFORMED = (
    "{_target_: torchrl.envs.TransformedEnv, base_env: {_target_: support.tape.make_serial, _args_: [0, 1]%s}, %s}"
)
SETTINGS = {
    "sac_fetch_reach": SAC,
    "td3_fetch_reach": DETERMINISTIC,
    "ddpg_fetch_push": [*DETERMINISTIC, "envs.base_env=${base_env}", "her.strategy=future"],
    "dqn_bit_flipping": [
        *SAC[:1],
        "actor_network.out_features=2",
        "actor.action_space=one_hot",
        "loss.action_space=one_hot",
    ],
    "offline_to_online_point_maze": SAC,
    "sac_point_maze_async": [*SAC, "her.goal_spec.shape=[3]"],
}


torchrl_configs = pytest.fixture(scope="module", autouse=True)(torchrl_groups)


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    """A function that composes a YAML file with small settings, and makes its trainer."""

    def make(name, *overrides):
        monkeypatch.setattr(configs, "_SHARED", WeakValueDictionary())  # each trainer is a run of its own
        discrete = ", discrete: true" if name.startswith("dqn") else ""
        small = [
            f"folder={tmp_path}",
            "~base_env",
            f"+base_env={{_target_: support.tape.make_tape, number: 0{discrete}}}",
            f"evaluation.env={TRANSFORMED % (discrete, 'transform: ${env_transform}')}",
            "evaluation.interval=60",
            "evaluation.episodes=2",
            "evaluation.last_episodes=2",
            "her.info=true",
            "total_frames=120",
            "collector.frames_per_batch=20",
            "collector.init_random_frames=40",
            "replay_buffer.storage.max_size=1000",
            "replay_buffer.batch_size=500",
            "trainer.optim_steps_per_batch=2",
            "trainer.log_interval=10",
            "trainer.progress_bar=false",
            "trainer.seed=null",  # seeding resets the environment, but not the collector
        ]
        with initialize_config_dir(str(TRAINER / "config"), version_base="1.3"):
            config = compose(name, overrides=[*small, *SETTINGS[name], *overrides])
        torch.manual_seed(0)
        env = instantiate(config.env)
        env.fake_tensordict()
        return instantiate(config.trainer)

    return make


def check_statistics(inputs, stored):
    """Check that the statistics are those of all written observations."""
    observations = stored["next", "observation"].double()
    torch.testing.assert_close(inputs.mean[:3], observations.mean(0).float())
    torch.testing.assert_close(inputs.scale[:3], observations.std(0, correction=0).clamp_min(0.01).float())


@pytest.mark.parametrize("name", HER_RATIOS)
def test_each_trainer_learns_from_right_goals(name, make_trainer, tmp_path, capsys):
    trainer = make_trainer(name)
    buffer, inputs = trainer.replay_buffer, trainer.replay_buffer.transform[-1]
    assert trainer.collector.env.transform[-1] is inputs
    trainer.train()
    assert check(buffer.sample(), flags=False) == pytest.approx(HER_RATIOS[name], abs=0.08)
    check_nothing_is_lost(buffer.storage[:], 1)  # with the random actions
    assert len(buffer) == 120
    if inputs.normalize:
        check_statistics(inputs, buffer.storage[:])
    success = (tmp_path / "logs" / "scalars" / "success.csv").read_text().split()
    assert [line.split(",")[0] for line in success] == ["60", "120"]
    assert "120 frames: success" in capsys.readouterr().out


def test_a_resumed_run_has_the_buffer_and_its_goals(make_trainer, tmp_path):
    first = make_trainer("sac_fetch_reach")
    first.train()
    resumed = make_trainer("sac_fetch_reach", "total_frames=240")
    resumed.load_from_file(tmp_path / "checkpoints" / "checkpoint-000000000120")
    samples = []
    for trainer in (first, resumed):
        torch.manual_seed(1)
        samples.append(trainer.replay_buffer.sample())
    assert (samples[0] == samples[1]).all()
    check_statistics(resumed.replay_buffer.transform[-1], first.replay_buffer.storage[:])
    resumed.train()
    assert len(resumed.replay_buffer) == 240
    assert check(resumed.replay_buffer.sample(), flags=False) == pytest.approx(0.8, abs=0.08)


def test_a_data_set_is_mixed_with_steps_and_adopted_again(make_trainer, tmp_path):
    data = tmp_path / "data.npz"
    states = [(0, episode, state) for episode in range(1000, 1020) for state in range(6)]  # as if the tape had played
    save_ogbench(data, [6] * 20, observations=np.array(states, np.float32), qpos=np.zeros(0))
    overrides = (f"buffers.data={data}", "collector.init_random_frames=0", "her.info=false")
    first = make_trainer("offline_to_online_point_maze", *overrides)
    first.train()
    resumed = make_trainer("offline_to_online_point_maze", *overrides)
    resumed.load_from_file(tmp_path / "checkpoints" / "checkpoint-000000000120")
    assert len(resumed.replay_buffer.online_buffer) == 120
    for trainer in (first, resumed):
        trainer.replay_buffer.anneal(0, 1)
        batch = trainer.replay_buffer.sample()
        place, goal = batch["observation"], batch["desired_goal"]
        is_offline, is_new = place[:, 1] >= 1000, goal[:, 2] != ASKED
        assert is_offline.sum() == 250
        assert is_new[is_offline].all()
        assert is_new[~is_offline].float().mean() == pytest.approx(0.8, abs=0.1)
        assert (goal[:, 1] == place[:, 1]).all()
        assert (goal[:, 2] > place[:, 2]).all()
        torch.testing.assert_close(batch["next", "reward"].squeeze(1), reward_of(batch["next", "observation"], goal))


def test_the_command_trains_on_its_environment(tmp_path):
    small = ["total_frames=200", "evaluation.last_episodes=10", f"hydra.run.dir={tmp_path}"]
    command = [sys.executable, TRAINER / "train.py", "--config-name", "sac_fetch_reach", *small]
    assert "200 frames: success" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_an_episode_in_the_maze_goes_on_when_another_one_has_ended(monkeypatch):
    """TorchRL raises an error if `DoubleToFloat` has converted entries of the environments."""
    maze = pytest.importorskip("maze", reason="ogbench needs labmaze, which has no wheels for Python 3.13")
    rewards = iter([0.0, -1.0, -1.0, 0.0])
    monkeypatch.setattr(maze.GoalMaze, "compute_reward", lambda *_: next(rewards))
    envs = TransformedEnv(SerialEnv(2, partial(GymEnv, "maze:GoalMaze-v0")), DoubleToFloat())
    steps = envs.rollout(10, break_when_all_done=True)
    assert steps.shape == (2, 3)
    assert steps["next", "terminated"][:, -1].all()


def test_the_environments_of_all_files_are_made_in_a_new_process():
    files = [path.read_text() for path in (TRAINER / "config").glob("*.yaml")]
    names = [name for text in files for name in re.findall(r'^base_env: {env_name: "?([\w/:-]+)', text, re.M)]
    assert len(names) == 6
    script = "import sys, gymnasium, torchrl_her.envs; [gymnasium.make(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", script, *names], cwd=TRAINER, check=True)


@pytest.mark.slow
def test_processes_collect_while_the_trainer_updates(make_trainer):
    trainer = make_trainer("sac_point_maze_async", "total_frames=400", "collector.init_random_frames=0")
    trainer.train()
    buffer = trainer.replay_buffer
    check(buffer.sample(), flags=False)
    check_statistics(buffer.transform[-1], buffer.storage[:])
