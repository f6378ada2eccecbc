"""The replay buffers with hindsight of Stable-Baselines3 and cpprb."""

import cpprb
import gymnasium as gym
import numpy as np
import stable_baselines3 as sb3
from gymnasium.spaces import Box
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv

from contenders.transitions import (
    ACTION,
    BATCH_SIZE,
    EPISODE_STEPS,
    GOAL,
    OBSERVATION,
    K,
    Sampled,
    Transitions,
    make_transitions,
    sparse_reward,
)


class GoalEnv(gym.Env):
    """The parts of an environment that Stable-Baselines3's buffer needs: spaces and `compute_reward`."""

    observation_space = gym.spaces.Dict(
        observation=Box(-np.inf, np.inf, (OBSERVATION,)),
        achieved_goal=Box(-np.inf, np.inf, (GOAL,)),
        desired_goal=Box(-np.inf, np.inf, (GOAL,)),
    )
    action_space = Box(-1, 1, (ACTION,))

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: list) -> np.ndarray:
        """Return the sparse rewards of a batch."""
        return sparse_reward(achieved_goal, desired_goal)


class StableBaselines3:
    """Stable-Baselines3's `HerReplayBuffer` for one environment, full. `extend` calls `add` for each transition."""

    def __init__(self, size: int):
        self.size = size
        env = DummyVecEnv([GoalEnv])
        spaces = env.observation_space, env.action_space
        self.buffer = sb3.HerReplayBuffer(size, *spaces, env, "cpu", n_sampled_goal=K, copy_info_dict=False)

    def fill(self) -> None:
        """Add the transitions one by one."""
        for transitions in make_transitions(self.size):
            self.extend(self.prepare(transitions))

    def prepare(self, transitions: Transitions) -> list[tuple]:
        """Return the arguments of `add`. Arrays have a leading dimension of size 1 for the environment."""
        rows = [
            {key: value[i : i + 1] for key, value in transitions.items()} for i in range(len(transitions["action"]))
        ]
        keys = ("observation", "achieved_goal", "desired_goal")
        return [
            (
                {key: row[key] for key in keys},
                {key: row.get(f"next_{key}", row[key]) for key in keys},
                row["action"],
                row["reward"][0],
                row["truncated"][0],
                [{"TimeLimit.truncated": bool(row["truncated"])}],
            )
            for row in rows
        ]

    def extend(self, data: list[tuple]) -> None:
        """Add the transitions one by one."""
        for transition in data:
            self.buffer.add(*transition)

    def sample(self) -> DictReplayBufferSamples:
        """Draw one batch."""
        return self.buffer.sample(BATCH_SIZE)

    def sample_many(self, count: int) -> list[DictReplayBufferSamples]:
        """Draw several batches in one call.

        The buffer returns relabelled transitions last, so each batch takes every `count`-th transition.
        """
        whole = self.buffer.sample(count * BATCH_SIZE)
        return [
            DictReplayBufferSamples(
                observations={key: value[i::count] for key, value in whole.observations.items()},
                actions=whole.actions[i::count],
                next_observations={key: value[i::count] for key, value in whole.next_observations.items()},
                dones=whole.dones[i::count],
                rewards=whole.rewards[i::count],
            )
            for i in range(count)
        ]

    def __len__(self) -> int:
        return self.buffer.size()

    def read(self, batch: DictReplayBufferSamples) -> Sampled:
        """Return the entries that the checks need."""
        next_achieved_goal = batch.next_observations["achieved_goal"].numpy()
        desired_goal = batch.observations["desired_goal"].numpy()
        return Sampled(next_achieved_goal, desired_goal, batch.rewards.numpy().squeeze(-1))


class Cpprb:
    """cpprb's `HindsightReplayBuffer` with uniform sampling, full.

    The buffer relabels when an episode is written: each transition is stored once with its original goal and k times
    with other goals. All copies count as rows, so `size` rows are `size / 5` transitions, and `extend(50)` writes 250
    rows.
    """

    def __init__(self, size: int):
        self.size = size
        self.buffer = cpprb.HindsightReplayBuffer(
            size,
            {
                "observation": {"shape": OBSERVATION},
                "achieved_goal": {"shape": GOAL},
                "action": {"shape": ACTION},
                "next_observation": {"shape": OBSERVATION},
                "next_achieved_goal": {"shape": GOAL},
                "done": {},
            },
            EPISODE_STEPS,
            lambda next_achieved_goal, action, goal: sparse_reward(next_achieved_goal, goal)[:, None],
            state="achieved_goal",
            action="action",
            next_state="next_achieved_goal",
            additional_goals=K,
            prioritized=False,
        )

    def fill(self) -> None:
        """Write episode by episode."""
        for transitions in make_transitions(self.size // (K + 1)):
            self.extend(self.prepare(transitions))

    def prepare(self, transitions: Transitions) -> list[tuple]:
        """Return the transitions and the original goal of each episode."""
        stored = ("observation", "achieved_goal", "action", "next_observation", "next_achieved_goal")
        data = {key: transitions[key] for key in stored} | {"done": transitions["truncated"]}
        starts = range(0, len(transitions["episode"]), EPISODE_STEPS)
        return [
            (
                {key: value[start : start + EPISODE_STEPS] for key, value in data.items()},
                transitions["desired_goal"][start],
            )
            for start in starts
        ]

    def extend(self, data: list[tuple]) -> None:
        """Write and relabel whole episodes."""
        for episode, goal in data:
            self.buffer.add(**episode)
            self.buffer.on_episode_end(goal)

    def sample(self) -> dict[str, np.ndarray]:
        """Draw one batch."""
        return self.buffer.sample(BATCH_SIZE)

    def sample_many(self, count: int) -> list[dict[str, np.ndarray]]:
        """Draw several batches in one call."""
        whole = self.buffer.sample(count * BATCH_SIZE)
        starts = range(0, count * BATCH_SIZE, BATCH_SIZE)
        return [{key: value[start : start + BATCH_SIZE] for key, value in whole.items()} for start in starts]

    def __len__(self) -> int:
        return self.buffer.get_stored_size()

    def read(self, batch: dict[str, np.ndarray]) -> Sampled:
        """Return the entries that the checks need."""
        return Sampled(batch["next_achieved_goal"], batch["goal"], batch["rew"].squeeze(-1))
