"""The replay buffers with hindsight of Stable-Baselines3, cpprb and tianshou."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cpprb
import gymnasium as gym
import numpy as np
import stable_baselines3 as sb3
import tianshou.data
from buffers import ACTION, BATCH_SIZE, EPISODE_STEPS, GOAL, OBSERVATION, THRESHOLD, Contender, K, make_blocks
from gymnasium.spaces import Box
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv
from tensordict import TensorDict
from tianshou.data import Batch

KEYS = "observation", "achieved_goal", "desired_goal"


def sparse_reward(achieved_goal: np.ndarray, desired_goal: np.ndarray) -> np.ndarray:
    distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
    return -(distance > THRESHOLD).astype(np.float32)


def observations(transitions: TensorDict) -> dict[str, np.ndarray]:
    return {key: transitions[key].numpy() for key in KEYS}


class GoalEnv(gym.Env):
    """The parts of an environment that Stable-Baselines3's buffer needs: spaces and ``compute_reward``."""

    sizes = zip(KEYS, (OBSERVATION, GOAL, GOAL), strict=True)
    observation_space = gym.spaces.Dict({key: Box(-np.inf, np.inf, (size,)) for key, size in sizes})
    action_space = Box(-1, 1, (ACTION,))

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: list) -> np.ndarray:
        return sparse_reward(achieved_goal, desired_goal)


class StableBaselines3(Contender):
    """Stable-Baselines3's ``HerReplayBuffer`` for one environment. ``extend`` calls ``add`` for each transition."""

    def __init__(self, size: int):
        self.size = size
        env = DummyVecEnv([GoalEnv])
        spaces = env.observation_space, env.action_space
        self.buffer = sb3.HerReplayBuffer(size, *spaces, env, "cpu", n_sampled_goal=K, copy_info_dict=False)

    def prepare(self, transitions: TensorDict) -> list[tuple]:
        """Return the arguments of ``add``. Arrays have a leading dimension of size 1 for the environment."""
        before, after, action = observations(transitions), observations(transitions["next"]), transitions["action"]
        rewards, ends = transitions["next", "reward"].numpy(), transitions["next", "truncated"].numpy()
        return [
            (
                {key: value[i : i + 1] for key, value in before.items()},
                {key: value[i : i + 1] for key, value in after.items()},
                action[i : i + 1].numpy(),
                rewards[i],
                ends[i],
                [{"TimeLimit.truncated": bool(ends[i])}],
            )
            for i in range(len(transitions))
        ]

    def extend(self, data: list[tuple]) -> None:
        for transition in data:
            self.buffer.add(*transition)

    def sample_many(self, count: int) -> list[DictReplayBufferSamples]:
        """Draw several batches. A sample ends with relabelled transitions, so each takes every ``count``-th one."""

        def rows(values: Any, i: int) -> Any:
            if isinstance(values, dict):
                return {key: value[i::count] for key, value in values.items()}
            return None if values is None else values[i::count]

        whole = self.buffer.sample(count * BATCH_SIZE)
        return [DictReplayBufferSamples(*(rows(values, i) for values in whole)) for i in range(count)]

    def read(self, batch: DictReplayBufferSamples) -> tuple[np.ndarray, ...]:
        achieved, desired = batch.next_observations["achieved_goal"], batch.observations["desired_goal"]
        return achieved.numpy(), desired.numpy(), batch.rewards.numpy()


class Cpprb(Contender):
    """cpprb's ``HindsightReplayBuffer`` with uniform sampling, which relabels when an episode is written."""

    copies = K + 1

    def __init__(self, size: int):
        self.size = size
        shapes = {"observation": OBSERVATION, "achieved_goal": GOAL, "action": ACTION, "done": 1}
        shapes |= {"next_observation": OBSERVATION, "next_achieved_goal": GOAL}
        self.buffer = cpprb.HindsightReplayBuffer(
            size,
            {key: {"shape": shape} for key, shape in shapes.items()},
            EPISODE_STEPS,
            lambda next_achieved_goal, action, goal: sparse_reward(next_achieved_goal, goal)[:, None],
            state="achieved_goal",
            action="action",
            next_state="next_achieved_goal",
            additional_goals=K,
            prioritized=False,
        )

    def prepare(self, transitions: TensorDict) -> list[tuple]:
        """Return the transitions and the original goal of each episode."""
        episodes = []
        for episode in transitions.split(EPISODE_STEPS):
            data = {key: episode[key].numpy() for key in ("observation", "achieved_goal", "action")}
            data |= {f"next_{key}": episode["next", key].numpy() for key in ("observation", "achieved_goal")}
            data["done"] = episode["next", "done"].numpy()
            episodes.append((data, episode["desired_goal"][0].numpy()))
        return episodes

    def extend(self, data: list[tuple]) -> None:
        for episode, goal in data:
            self.buffer.add(**episode)
            self.buffer.on_episode_end(goal)

    def sample_many(self, count: int) -> list[dict[str, np.ndarray]]:
        whole = self.buffer.sample(count * BATCH_SIZE)
        starts = range(0, count * BATCH_SIZE, BATCH_SIZE)
        return [{key: value[start : start + BATCH_SIZE] for key, value in whole.items()} for start in starts]

    def read(self, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        return batch["next_achieved_goal"], batch["goal"], batch["rew"]


class CpprbByStep(Cpprb):
    """cpprb's buffer, to which each step is added separately, as in its examples."""

    def extend(self, data: list[tuple]) -> None:
        for episode, goal in data:
            for step in range(EPISODE_STEPS):
                self.buffer.add(**{key: value[step] for key, value in episode.items()})
            self.buffer.on_episode_end(goal)


class Tianshou(Contender):
    """tianshou's ``HERReplayBuffer``. A sample rewrites the rest of each sampled episode in the storage."""

    def __init__(self, size: int):
        self.size = size
        self.buffer = tianshou.data.HERReplayBuffer(size, sparse_reward, horizon=EPISODE_STEPS, future_k=K + 1)

    def fill(self) -> None:
        """Write blocks of transitions: ``add`` would take minutes for a million."""
        for transitions in make_blocks(self.size):
            whole = self.whole(transitions)
            parts = (whole[key] for key in ("obs", "act", "rew", "terminated", "truncated", "truncated", "obs_next"))
            self.buffer.update(tianshou.data.ReplayBuffer.from_data(*parts))

    @staticmethod
    def whole(transitions: TensorDict) -> Any:
        """Return the transitions as one batch."""
        after = transitions["next"]
        flags = {key: after[key].squeeze(-1).numpy() for key in ("terminated", "truncated")}
        reward, action = after["reward"].squeeze(-1).numpy(), transitions["action"].numpy()
        obs, obs_next = observations(transitions), observations(after)
        return Batch(obs=obs, act=action, rew=reward, **flags, obs_next=obs_next, info={})

    def prepare(self, transitions: TensorDict) -> list[Any]:
        whole = self.whole(transitions)
        return [whole[i] for i in range(len(whole))]

    def extend(self, data: list[Any]) -> None:
        for transition in data:
            self.buffer.add(transition)

    def sample(self) -> Any:
        return self.buffer.sample(BATCH_SIZE)[0]

    def sample_many(self, count: int) -> list[Any]:
        return list(self.buffer.sample(count * BATCH_SIZE)[0].split(BATCH_SIZE, shuffle=False))

    def read(self, batch: Any) -> tuple[np.ndarray, ...]:
        return batch.obs_next.achieved_goal, batch.obs.desired_goal, batch.rew


CPPRB = "cpprb's `HindsightReplayBuffer`, which relabels when it writes"
PEERS: dict[str, Callable[[int], Contender]] = {
    "Stable-Baselines3's `HerReplayBuffer`": StableBaselines3,
    CPPRB: Cpprb,
    "tianshou's `HERReplayBuffer`": Tianshou,
}
