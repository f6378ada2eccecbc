"""A locally created Minari data set of PointMaze is read and adopted."""

import gymnasium
import gymnasium_robotics
import numpy as np
import pytest
import torch
from torchrl.data.datasets import MinariExperienceReplay
from torchrl.envs import GymEnv

from support.data_sets import adopting_buffer, entries_of
from support.factories import make_transform
from support.pages import run_block
from torchrl_her import EnvReward, HERKeys, load_minari

minari = pytest.importorskip("minari")
from minari.data_collector import EpisodeBuffer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari", "ignore::DeprecationWarning")
gymnasium.register_envs(gymnasium_robotics)
ENV = "PointMaze_UMaze-v3"
NAME = "pointmaze/umaze-test-v0"
LENGTHS = [300, 41, 1, 500, 158]
DESIRED, NEXT_ACHIEVED = ("observation", "desired_goal"), ("next", "observation", "achieved_goal")
RELABELLED = ("hindsight", "relabelled")


def play(env, lengths):
    """Yield episodes of random play with these lengths."""
    rng = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        observation, _ = env.reset(seed=number)
        observations, actions, rewards, terminations = [observation], [], [], []
        for _ in range(length):
            actions.append(rng.uniform(-1, 1, 2).astype(np.float32))
            observation, reward, terminated, _, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(reward)
            terminations.append(terminated)
        yield EpisodeBuffer(
            id=number,
            observations={key: np.stack([each[key] for each in observations]) for key in observation},
            actions=np.stack(actions),
            rewards=rewards,
            terminations=terminations,
            truncations=[False] * (length - 1) + [True],
        )


@pytest.fixture
def make_dataset(tmp_path, monkeypatch):
    """Return a function that creates a data set and returns its episodes and its transitions."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def make(lengths=LENGTHS, name=NAME):
        env = gymnasium.make(ENV, max_episode_steps=10_000)
        episodes = list(play(env, lengths))
        spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
        minari.create_dataset_from_buffers(name, buffer=episodes, env=env, **spaces)
        return episodes, load_minari(minari.load_dataset(name))

    return make


def make_hindsight(capacity):
    keys = HERKeys(achieved_goal=("observation", "achieved_goal"), desired_goal=DESIRED, trajectory="episode")
    return make_transform(reward=EnvReward(GymEnv(ENV)), capacity=capacity, keys=keys)


def test_the_transitions_equal_the_steps_of_the_episodes(make_dataset):
    episodes, data = make_dataset()
    expected = {
        ("observation", "observation"): [each.observations["observation"][:-1] for each in episodes],
        ("next", "observation", "observation"): [each.observations["observation"][1:] for each in episodes],
        ("next", "reward"): [np.array(each.rewards)[:, None] for each in episodes],
        ("next", "terminated"): [np.array(each.terminations)[:, None] for each in episodes],
        ("next", "truncated"): [np.array(each.truncations)[:, None] for each in episodes],
        "action": [each.actions for each in episodes],
        "episode": [np.full(len(each.rewards), each.id) for each in episodes],
    }
    for key, values in expected.items():
        assert data[key].tolist() == np.concatenate(values).tolist()
    assert torch.equal(data["next", "done"], data["next", "terminated"] | data["next", "truncated"])


def test_the_code_of_the_page_adopts_a_data_set_and_moves_its_entries_to_the_root(make_dataset):
    _, data = make_dataset(name="D4RL/pointmaze/umaze-v2")
    names = {}
    run_block("how-to/existing-data-sets", 0, names)
    run_block("how-to/existing-data-sets", 1, names)
    assert (names["data"] == data).all()
    assert adopting_buffer(names["data"], names["her"]).sample()[RELABELLED].any()
    assert torch.equal(names["flat"]["achieved_goal"], data["observation", "achieved_goal"])
    assert torch.equal(names["flat"]["next", "achieved_goal"], data[NEXT_ACHIEVED])
    assert torch.equal(names["flat"]["observation"], data["observation", "observation"])


def test_torchrls_class_has_the_same_keys_but_returns_zeros(make_dataset, tmp_path):
    """Tested with TorchRL 0.14.1. When this test fails, load_minari is no longer needed."""
    expected = entries_of(make_dataset()[1])
    found = MinariExperienceReplay(NAME, batch_size=256, load_from_local_minari=True, root=tmp_path / "torchrl")[:]
    for key, value in entries_of(found).items():
        assert value.shape == expected[key].shape, key
        assert not value.any()
    with pytest.raises(ValueError, match="load_minari"):
        make_hindsight(len(found)).adopt(found)
