"""A maze of OGBench with goals, and a buffer that starts with a data set of it."""

from typing import Any

import gymnasium
import numpy as np
import ogbench  # noqa: F401  registers the mazes
from gymnasium.spaces import Dict
from gymnasium.wrappers import DtypeObservation
from torchrl.data import OfflineToOnlineReplayBuffer, ReplayBuffer, Storage, TensorStorage
from torchrl.envs import Compose

from torchrl_her import HERTransform, NormalizedInputs, load_ogbench

REACHED = 0.5  # distance


class GoalMaze(gymnasium.Wrapper):
    """An OGBench maze: observations contain the goal, rewards are 0 at the goal and -1 elsewhere, and it ends there."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.observation_space = Dict(observation=env.observation_space, desired_goal=env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Start at one of the five tasks of the maze."""
        state, info = self.env.reset(seed=seed, options=options)
        self.goal = info["goal"].astype(np.float32)
        return {"observation": state, "desired_goal": self.goal}, info

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        """Move the point mass."""
        state, _, _, truncated, info = self.env.step(action)
        reward = float(self.compute_reward(state, self.goal, info))
        return {"observation": state, "desired_goal": self.goal}, reward, reward == 0, truncated, info

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        """Return 0 at the goal and -1 elsewhere."""
        return (np.linalg.norm(achieved - desired, axis=-1) <= REACHED) - 1.0

    def compute_terminated(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        """Return whether the goal is reached."""
        return np.linalg.norm(achieved - desired, axis=-1) <= REACHED


def make_maze(**options: Any) -> GoalMaze:
    # In single precision: after DoubleToFloat, a batch of TorchRL cannot continue when one of its episodes has ended.
    return GoalMaze(DtypeObservation(gymnasium.make("pointmaze-medium-v0"), np.float32))


gymnasium.register("GoalMaze-v0", make_maze)  # type: ignore[arg-type]  # GymEnv passes options, which OGBench refuses


def make_buffer(
    data: str, offline: HERTransform, online: HERTransform, inputs: NormalizedInputs, storage: Storage, **options: Any
) -> OfflineToOnlineReplayBuffer:
    """Make a buffer for the trainer. Each of its two buffers has its own hindsight.

    Args:
        data (str): a file that ``pointmaze_data.py`` has written. It is adopted, and not part of checkpoints.
        offline (HERTransform): the hindsight of the data set.
        online (HERTransform): the hindsight of the transitions of the environment.
        inputs (NormalizedInputs): the inputs of policy and critic.
        storage (Storage): the storage of the transitions of the environment.
        options: arguments of ``OfflineToOnlineReplayBuffer``.
    """
    adopted = TensorStorage(offline.adopt(load_ogbench(data)))
    data_set = ReplayBuffer(storage=adopted, transform=Compose(offline, inputs), batch_size=1)
    inputs.update(data_set.sample(5_000))  # samples have goals
    buffer = OfflineToOnlineReplayBuffer(data_set, online_storage=storage, **options)
    buffer.online_buffer.append_transform(online)
    buffer.online_buffer.append_transform(inputs)
    return buffer
