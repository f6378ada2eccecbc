"""The two libraries that ``learning.py sb3`` compares: the training scripts in ``examples/`` and Stable-Baselines3.

Both have the same settings, and are evaluated by the same function, on episodes with the same starts and goals.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import stable_baselines3
import torch
from scripts import load
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict
from torchrl.envs import set_exploration_type

from training.environments import EVALUATION_SEED  # isort: skip (`scripts` finds it)

OURS, SB3 = "ours", "Stable-Baselines3"
EPISODES = 100  # of an evaluation


@dataclass(frozen=True)
class Task:
    """An environment, an algorithm and the settings of both libraries."""

    env: str
    algorithm: str
    steps: int
    held: int = 1  # evaluations in a row that must reach 0.95
    success: str = "is_success"  # the entry of info that is true at the goal
    updates_per_step: float = 1.0
    gamma: float = 0.95
    random_steps: int = 500
    num_envs: int = 1
    steps_per_chunk: int = 50  # collected before their updates
    normalize: bool = False  # observations and goals
    loss_function: str = "smooth_l1"  # of our SAC and TD3


HIDDEN, BATCH_SIZE, LEARNING_RATE, TAU = [128, 128], 256, 1e-3, 0.05
NOISE, ALPHA = 0.2, 0.1  # standard deviation for DDPG and TD3, initial value for SAC
REACH = Task("torchrl_her/PointReach-v0", "sac", 4_000)
FETCH = Task("FetchReach-v4", "sac", 3_000, held=3, normalize=True)
MAZE = Task(
    "PointMaze_UMaze-v3", "sac", 100_000, success="success", updates_per_step=0.5, gamma=0.99, random_steps=2_000,
    num_envs=8, steps_per_chunk=400, normalize=True, loss_function="l2",  # also the loss of Stable-Baselines3
)  # fmt: skip
TASKS = {
    "PointReach, SAC": REACH,
    "PointReach, DDPG": replace(REACH, algorithm="ddpg", steps=5_000),
    "PointReach, TD3": replace(REACH, algorithm="td3", steps=6_000),
    "FetchReach, SAC": FETCH,
    "FetchReach, TD3": replace(FETCH, algorithm="td3"),
    "PointMaze_UMaze, SAC": MAZE,
    # Episodes have 600 steps, and Stable-Baselines3 cannot sample before the first episodes end.
    "PointMaze_Medium, SAC": replace(MAZE, env="PointMaze_Medium-v3", steps=500_000, random_steps=5_200),
}


class Evaluations:
    """Evaluates greedy episodes with the same starts and goals at an interval, and stops the clock meanwhile."""

    def __init__(self, task: Task, interval: int, episodes: int):
        self.envs = gymnasium.make_vec(task.env, num_envs=episodes, vectorization_mode="sync")
        self.seeds = [EVALUATION_SEED + i for i in range(episodes)]
        self.interval, self.success = interval, task.success
        self.curve: list[dict[str, float]] = []
        self.seconds, self.cpu_seconds = 0.0, 0.0  # of training
        self.began = 0.0, 0.0  # the clocks at the end of the last evaluation

    def __call__(self, act: Callable[[dict[str, np.ndarray]], np.ndarray]) -> float:
        """Return the success rate: the share of episodes whose last step is at the goal."""
        if self.curve:  # time before the first evaluation is not training
            self.seconds += time.perf_counter() - self.began[0]
            self.cpu_seconds += time.process_time() - self.began[1]
        observation, _ = self.envs.reset(seed=self.seeds)
        ended = np.zeros(len(self.seeds), dtype=bool)
        while not ended.any():
            observation, _, terminated, truncated, info = self.envs.step(act(observation))
            ended = terminated | truncated
        assert ended.all()  # all episodes have the same length
        success = float(np.mean(info[self.success], dtype=np.float64))
        times = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        self.curve.append({"steps": len(self.curve) * self.interval, "success": success, **times})
        self.began = time.perf_counter(), time.process_time()
        return success


def train_ours(task: Task, seed: int, evaluations: Evaluations) -> None:
    """Train one of the example scripts."""

    def evaluate(policy: Any) -> dict[str, torch.Tensor]:  # replaces an object of the scripts
        @torch.no_grad()
        @set_exploration_type("DETERMINISTIC")
        def act(observation: dict[str, np.ndarray]) -> np.ndarray:
            data = {key: torch.as_tensor(value).float() for key, value in observation.items()}
            return policy(TensorDict(data, len(observation["observation"])))["action"].numpy()

        return {"success": torch.tensor(evaluations(act))}

    evaluate.close = lambda: None
    settings = {
        "env.name": task.env, "env.num_envs": task.num_envs, "env.success": task.success, "seed": seed,
        "total_steps": task.steps, "buffer.size": task.steps, "hidden": HIDDEN,
        "batch_size": BATCH_SIZE, "updates_per_step": task.updates_per_step, "learning_rate": LEARNING_RATE,
        "tau": TAU, "gamma": task.gamma, "normalization.enabled": task.normalize,
        "collector.random_steps": task.random_steps, "collector.steps_per_chunk": task.steps_per_chunk,
        "exploration.noise": NOISE, "exploration.random_actions": 0.0,
        "inputs": "[observation,achieved_goal,desired_goal]",  # those of Stable-Baselines3's networks
        "evaluation.interval": evaluations.interval, "checkpoint.interval": task.steps, "logger.interval": task.steps,
        "logger.kinds": [],
    }  # fmt: skip
    settings |= {"reward_range": "[-inf,inf]"} if task.algorithm == "ddpg" else {"loss_function": task.loss_function}
    settings |= {"alpha_init": ALPHA} if task.algorithm == "sac" else {}
    tasks = ["+task=plain_ddpg"] if task.algorithm == "ddpg" else []
    script, config = load(task.algorithm, [*tasks, *(f"{name}={value}" for name, value in settings.items())])
    with tempfile.TemporaryDirectory() as folder, patch("training.run.Evaluation", lambda config: evaluate):
        script.train(config, Path(folder))


class EvaluateSB3(BaseCallback):
    """Evaluates before each chunk, after all updates of the previous one, and at the end of the training."""

    def __init__(self, evaluations: Evaluations):
        super().__init__()
        self.evaluations = evaluations

    def _on_rollout_start(self) -> None:
        if self.num_timesteps % self.evaluations.interval == 0:
            self.evaluations(self._act)

    def _act(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        if (normalization := self.model.get_vec_normalize_env()) is not None:
            observation = normalization.normalize_obs(observation)
        return self.model.predict(observation, deterministic=True)[0]

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._on_rollout_start()


def train_sb3(task: Task, seed: int, evaluations: Evaluations) -> None:
    """Train Stable-Baselines3's agent."""
    torch.set_num_threads(1)
    env = make_vec_env(task.env, task.num_envs)
    if task.normalize:
        env = VecNormalize(env, norm_reward=False, clip_obs=5.0)  # clipped as in our scripts
    size = env.action_space.shape
    noise = NormalActionNoise(np.zeros(size), np.full(size, NOISE))
    options = {"ent_coef": f"auto_{ALPHA}"} if task.algorithm == "sac" else {"action_noise": noise}
    model = getattr(stable_baselines3, task.algorithm.upper())(
        "MultiInputPolicy", env, seed=seed, device="cpu", buffer_size=task.steps, batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE, tau=TAU, gamma=task.gamma, learning_starts=task.random_steps,
        train_freq=task.steps_per_chunk // task.num_envs,
        gradient_steps=round(task.updates_per_step * task.steps_per_chunk),
        policy_kwargs={"net_arch": HIDDEN}, replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"}, **options,
    )  # fmt: skip
    model.learn(task.steps, callback=EvaluateSB3(evaluations))


def learn(
    name: str, library: str, seed: int, steps: int | None, interval: int, episodes: int
) -> list[dict[str, float]]:
    """Train in a new process, and return the evaluations."""
    task = replace(TASKS[name], steps=steps or TASKS[name].steps)
    evaluations = Evaluations(task, interval, episodes)
    with open(os.devnull, "w") as silence:  # only the progress of all runs is shown
        sys.stdout = sys.stderr = silence
        (train_ours if library == OURS else train_sb3)(task, seed, evaluations)
    return evaluations.curve
