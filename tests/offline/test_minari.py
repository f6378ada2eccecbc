"""A locally created Minari data set of PointMaze is adopted, and fine-tuned online."""

import gymnasium
import gymnasium_robotics
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.datasets import MinariExperienceReplay
from torchrl.envs import GymEnv

from support.data_sets import bytes_of
from support.pages import run_block
from torchrl_her import EnvReward, HERTransform, load_minari

minari = pytest.importorskip("minari")
from minari.data_collector import EpisodeBuffer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari", "ignore::DeprecationWarning")
gymnasium.register_envs(gymnasium_robotics)
ENV = "PointMaze_UMaze-v3"
NAME = "pointmaze/umaze-test-v0"
DESIRED, NEXT_ACHIEVED = ("observation", "desired_goal"), ("next", "observation", "achieved_goal")
RELABELLED = ("hindsight", "relabelled")


def play(env, lengths):
    """Yield episodes of random play with these lengths."""
    rng = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        observation, _ = env.reset(seed=number)
        observations, actions, rewards, terminations = [observation], [], [], []
        for _ in range(length):
            action = rng.uniform(-1, 1, 2).astype(np.float32)
            observation, reward, terminated, _, _ = env.step(action)
            observations.append(observation)
            actions.append(action)
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

    def make(lengths, name=NAME):
        env = gymnasium.make(ENV, max_episode_steps=10_000)
        episodes = list(play(env, lengths))
        spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
        minari.create_dataset_from_buffers(name, buffer=episodes, env=env, **spaces)
        return episodes, load_minari(minari.load_dataset(name))

    return make


def hindsight(capacity, **options):
    keys = {"achieved_goal_key": ("observation", "achieved_goal"), "desired_goal_key": DESIRED}
    return HERTransform(EnvReward(GymEnv(ENV)), trajectory_key="episode", capacity=capacity, **keys | options)


def check(data, strategy, samples):
    """Compare samples of an adopted data set, row by row, with its episodes and the environment's own reward."""
    transform = hindsight(len(data), her_ratio=0.8, strategy=strategy)
    rb = TensorDictReplayBuffer(storage=TensorStorage(transform.adopt(data)), transform=transform, batch_size=256)
    env = gymnasium.make(ENV).unwrapped
    episodes, outcomes = data["episode"].tolist(), data[NEXT_ACHIEVED]
    last = {episode: row for row, episode in enumerate(episodes)}
    for _ in range(samples):
        batch = rb.sample()
        assert 0.6 < batch[RELABELLED].float().mean() < 1
        for row in batch.unbind(0):
            index, goal = row["index"].item(), row[DESIRED]
            assert torch.equal(row["next", DESIRED[0], DESIRED[1]], goal)
            if not row[RELABELLED]:
                assert torch.equal(goal, data[DESIRED][index])
                continue
            end = last[episodes[index]]
            allowed = outcomes[end : end + 1] if strategy == "final" else outcomes[index : end + 1]
            assert (allowed == goal).all(-1).any()
            achieved = row[NEXT_ACHIEVED].numpy()
            assert row["next", "reward"].item() == pytest.approx(env.compute_reward(achieved, goal.numpy(), {}))


LENGTHS = [300, 41, 1, 500, 158]


def check_transitions(data, episodes):
    """Compare transitions with the played episodes."""
    columns = {key: [] for key in ("observation", "next", "action", "reward", "terminated", "truncated", "episode")}
    for episode in episodes:
        steps = len(episode.rewards)
        columns["observation"] += episode.observations["observation"][:-1].tolist()
        columns["next"] += episode.observations["observation"][1:].tolist()
        columns["action"] += episode.actions.tolist()
        columns["reward"] += [[value] for value in episode.rewards]
        columns["terminated"] += [[bool(value)] for value in episode.terminations]
        columns["truncated"] += [[False]] * (steps - 1) + [[True]]
        columns["episode"] += [episode.id] * steps
    assert data["observation", "observation"].tolist() == columns["observation"]
    assert data["next", "observation", "observation"].tolist() == columns["next"]
    for key in ("reward", "terminated", "truncated"):
        assert data["next", key].tolist() == columns[key]
    for key in ("action", "episode"):
        assert data[key].tolist() == columns[key]
    assert torch.equal(data["next", "done"], data["next", "terminated"] | data["next", "truncated"])


def test_the_transitions_equal_the_steps_of_the_episodes(make_dataset):
    episodes, data = make_dataset(LENGTHS)
    check_transitions(data, episodes)


def test_the_code_of_the_page_adopts_a_data_set_and_moves_its_entries_to_the_root(make_dataset):
    _, data = make_dataset(LENGTHS, "D4RL/pointmaze/umaze-v2")
    names = {}
    run_block("how-to/existing-data-sets", 0, names)
    run_block("how-to/existing-data-sets", 1, names)
    assert (names["data"] == data).all()
    rb = TensorDictReplayBuffer(
        storage=TensorStorage(names["her"].adopt(names["data"])), transform=names["her"], batch_size=256
    )
    assert rb.sample()[RELABELLED].any()
    assert torch.equal(names["flat"]["achieved_goal"], data["observation", "achieved_goal"])
    assert torch.equal(names["flat"]["next", "achieved_goal"], data[NEXT_ACHIEVED])
    assert torch.equal(names["flat"]["observation"], data["observation", "observation"])


@pytest.mark.parametrize("strategy", ["future", "final"])
def test_samples_of_an_adopted_minari_data_set_are_correct(make_dataset, strategy, tmp_path):
    data = make_dataset(LENGTHS)[1].memmap(tmp_path / "mapped")
    before = bytes_of(tmp_path)
    check(data, strategy, samples=4)
    assert bytes_of(tmp_path) == before


def open_with_torchrl(root):
    return MinariExperienceReplay(NAME, batch_size=256, load_from_local_minari=True, root=root / "torchrl")[:]


def test_torchrls_class_returns_zeros(make_dataset, tmp_path):
    """Tested with TorchRL 0.14.1. When this test fails, load_minari is no longer needed."""
    make_dataset(LENGTHS)
    data = open_with_torchrl(tmp_path)
    assert not any(value.any() for value in data.values(include_nested=True, leaves_only=True))
    with pytest.raises(ValueError, match="load_minari"):
        hindsight(len(data)).adopt(data)


def test_correct_data_from_torchrls_class_can_be_adopted(make_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(TensorDict, "memmap_like", TensorDict.memmap)
    episodes, loaded = make_dataset(LENGTHS)
    data = open_with_torchrl(tmp_path)
    assert data.is_memmap()
    check_transitions(data, episodes)
    assert all((data[key] == loaded[key]).all() for key in loaded.keys(True, True))
    check(data, "future", samples=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["future", "final"])
def test_samples_of_100_000_steps_are_correct(make_dataset, strategy):
    check(make_dataset([1000] * 100)[1], strategy, samples=20)


def as_in_gym_env(data):
    """Return the transitions with the entries of observations at the root, as in GymEnv."""
    flat = data.exclude("observation", ("next", "observation"))
    flat.update(data["observation"])["next"].update(data["next", "observation"])
    return flat


def test_an_adopted_minari_data_set_is_fine_tuned_online(make_dataset):
    env = GymEnv(ENV)
    data = as_in_gym_env(make_dataset([300, 200])[1])
    her, new = (HERTransform(EnvReward(env), capacity=1000, trajectory_key="episode") for _ in range(2))
    offline = TensorDictReplayBuffer(storage=TensorStorage(her.adopt(data)), transform=her, batch_size=128)
    online = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=new, batch_size=128)
    rb = ReplayBufferEnsemble(offline, online, batch_size=64)
    for _ in range(3):
        online.extend(env.rollout(100, break_when_any_done=False))
        new.flush()
        batch = rb.sample()
        assert batch.batch_size == (2, 32)
        assert (batch[RELABELLED].float().mean((1, 2)) > 0.5).all()
        for key in ("observation", "desired_goal", ("next", "reward"), ("next", "done")):
            assert len(batch[key]) == 2
        rewards = env.unwrapped.compute_reward(
            batch["next", "achieved_goal"].numpy(), batch["desired_goal"].numpy(), {}
        )
        assert batch["next", "reward"].squeeze(-1).tolist() == rewards.tolist()
    with pytest.raises(RuntimeError, match="ReplayBufferEnsemble"):
        offline.extend(env.rollout(3))
