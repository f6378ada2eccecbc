"""An environment whose every goal says where it was achieved, and an oracle that needs nothing else.

Goals and observations are ``(environment, episode, state)``: in whatever order, process or copy a transition comes
back, it can be checked by itself. The oracle shares no code with the package and reads nothing that it stamps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDictBase
from torchrl.envs import GymWrapper

LENGTHS = (5, 9, 2, 7, 1, 12)
WEIGHTS = np.array([2**17, 2**8, 1])  # tell goals apart, and leave rewards exact in float32
ASKED = 200  # the state that every episode is asked for, and that none reaches


def length_of(number: int, episode: int, lengths: tuple[int, ...] = LENGTHS) -> int:
    """How long an episode of an environment is: not the same in two environments at a time."""
    return lengths[(episode + number) % len(lengths)]


def reward_of(achieved: Any, desired: Any) -> Any:
    """A reward that tells pairs of goals apart, of arrays and tensors."""
    weights = WEIGHTS if isinstance(achieved, np.ndarray) else torch.tensor(WEIGHTS, dtype=achieved.dtype).to(achieved)
    return (achieved * weights).sum(-1) - 2 * (desired * weights).sum(-1)


def reached(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(-1)


class Tape(gymnasium.Env):
    """Counts its steps whatever the action is; episodes end by termination and by truncation in turn."""

    def __init__(self, number: int, lengths: tuple[int, ...] = LENGTHS, discrete: bool = False):
        goal = Box(-1, 2**16, (3,), np.float32)
        self.observation_space = Dict({"observation": goal, "achieved_goal": goal, "desired_goal": goal})
        self.action_space = Discrete(2) if discrete else Box(-1, 1, (2,), np.float32)
        self.number, self.lengths = number, lengths
        self.episode, self.state = -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.state = 0
        return self._observation(), {}

    def step(self, action):
        self.state += 1
        last = self.state == length_of(self.number, self.episode, self.lengths)
        observation = self._observation()
        reward = float(reward_of(observation["achieved_goal"], observation["desired_goal"]))
        terminates = self.episode % 2 == 0
        return observation, reward, last and terminates, last and not terminates, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return reward_of(achieved_goal, desired_goal)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return reached(achieved_goal, desired_goal)

    def _observation(self):
        state = np.array([self.number, self.episode, self.state], np.float32)
        goal = np.array([self.number, self.episode, ASKED], np.float32)
        return {"observation": state, "achieved_goal": state.copy(), "desired_goal": goal}


def make_tape(number: int = 0, lengths: tuple[int, ...] = LENGTHS, discrete: bool = False) -> GymWrapper:
    """The environment as TorchRL has it; ``functools.partial(make_tape, number)`` makes it in other processes."""
    return GymWrapper(Tape(number, lengths, discrete))


@dataclass
class Count:
    """What a check went over."""

    sampled: int = 0
    relabelled: int = 0

    def __iadd__(self, other: Count) -> Count:
        self.sampled += other.sampled
        self.relabelled += other.relabelled
        return self

    @property
    def share(self) -> float:
        return self.relabelled / self.sampled


def check(
    batch: TensorDictBase, strategy: str = "future", lengths: tuple[int, ...] = LENGTHS, flags: bool = True
) -> Count:
    """Check single-step transitions ``[*batch]``, one by one, and count them.

    Args:
        batch: what a buffer returned.
        strategy: of "future", "final", "episode" and "random". Episodes that still run are known in part: of
            "final", too, any step from the transition's own on is accepted then.
        lengths: those that the environments were made with.
        flags: whether to check the done flags, which a SliceSampler overwrites in TensorDict buffers.
    """
    rows = batch.reshape(-1)
    column = {
        key: rows[key].reshape(len(rows), -1).tolist()
        for key in (
            "observation",
            "achieved_goal",
            "desired_goal",
            ("next", "observation"),
            ("next", "achieved_goal"),
            ("next", "desired_goal"),
            ("next", "reward"),
            ("next", "terminated"),
            ("next", "truncated"),
            ("next", "done"),
            ("hindsight", "relabelled"),
        )
    }
    for at in range(len(rows)):
        row = {key: values[at] for key, values in column.items()}
        number, episode, state = row["observation"]
        length = length_of(int(number), int(episode), lengths)
        outcome = [number, episode, state + 1]
        assert 0 <= state < length, f"{row} cannot be: the episode has {length} steps"
        assert row["achieved_goal"] == row["observation"], row
        assert row["next", "observation"] == row["next", "achieved_goal"] == outcome, row
        goal = row["desired_goal"]
        assert row["next", "desired_goal"] == goal, f"two goals in {row}"
        relabelled = row["hindsight", "relabelled"][0]
        if relabelled:
            of_number, of_episode, of_state = goal
            assert 1 <= of_state <= length_of(int(of_number), int(of_episode), lengths), f"goal {goal} cannot be"
            if strategy != "random":
                assert [of_number, of_episode] == [number, episode], f"{row} has another episode's goal"
            if strategy in ("future", "final"):
                assert of_state > state, f"{row} has a goal of the past"
        else:
            assert goal == [number, episode, ASKED], f"{row} is not relabelled and has another goal"
        weigh = [int(weight) for weight in WEIGHTS]
        reward = sum(w * (a - 2 * d) for w, a, d in zip(weigh, outcome, goal, strict=True))
        assert row["next", "reward"] == [reward], f"{row} has the reward of another goal"
        if flags:
            last = state + 1 == length
            terminated = outcome == goal if relabelled else last and episode % 2 == 0
            truncated = last and episode % 2 == 1
            assert row["next", "terminated"] == [terminated], row
            assert row["next", "truncated"] == [truncated], row
            assert row["next", "done"] == [terminated or truncated], row
    return Count(len(rows), sum(itertools.chain(*column["hindsight", "relabelled"])))
