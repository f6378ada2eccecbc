"""The two libraries of the learning benchmark, and the settings of each.

``Ours`` are the training scripts in ``examples/``; ``Stable-Baselines3`` is its HerReplayBuffer with its own SAC, DDPG
or TD3. Both are evaluated by the same function, on episodes with the same starts and goals.
"""

from __future__ import annotations

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
from torchrl.envs import ExplorationType, set_exploration_type

from common import EVALUATION_SEED  # isort: skip (`scripts` finds it)

OURS, SB3 = "ours", "Stable-Baselines3"
EQUAL, TUNED = "equal", "each tuned"
EPISODES = 100  # of an evaluation

# Tasks and settings


@dataclass(frozen=True)
class Task:
    """An environment, an algorithm, and the number of environment steps."""

    env: str
    algorithm: str
    steps: int
    held: int = 1  # evaluations in a row that must reach 0.95
    success: str = "is_success"  # the entry of info that is true at the goal


@dataclass(frozen=True)
class Settings:
    """Settings of both libraries. ``ours`` are overrides of the example scripts' configuration."""

    hidden: tuple[int, ...] = (128, 128)
    batch_size: int = 256
    updates_per_step: float = 1.0
    learning_rate: float = 1e-3
    tau: float = 0.05
    gamma: float = 0.95
    random_steps: int = 500
    noise: float = 0.2  # standard deviation, for DDPG and TD3
    alpha: float = 0.1  # initial value, for SAC
    n_sampled_goal: int = 4  # relabelled transitions per original one
    num_envs: int = 1
    random_actions: float = 0.0  # share after the first steps; only in our scripts
    normalize: bool = False  # observations and goals
    steps_per_chunk: int = 50  # collected before their updates
    ours: tuple[str, ...] = ()

    @property
    def updates_per_chunk(self) -> int:
        """The number of updates after each chunk."""
        return round(self.updates_per_step * self.steps_per_chunk)


TASKS = {
    "PointReach, SAC": Task("torchrl_her/PointReach-v0", "sac", 4_000),
    "PointReach, DDPG": Task("torchrl_her/PointReach-v0", "ddpg", 5_000),
    "PointReach, TD3": Task("torchrl_her/PointReach-v0", "td3", 6_000),
    "FetchReach, SAC": Task("FetchReach-v4", "sac", 3_000, held=3),
    "FetchReach, TD3": Task("FetchReach-v4", "td3", 3_000, held=3),
    "PointMaze_UMaze, SAC": Task("PointMaze_UMaze-v3", "sac", 100_000, success="success"),
    "PointMaze_Medium, SAC": Task("PointMaze_Medium-v3", "sac", 500_000, success="success"),
}
INPUTS = "inputs=[observation,achieved_goal,desired_goal]"  # the inputs of Stable-Baselines3's networks
EQUAL_TO_THEIRS = {"sac": (INPUTS,), "ddpg": (INPUTS, "clip_target=false"), "td3": (INPUTS,)}
# Fetch is normalized, as in Plappert et al. 2018 (arXiv:1802.09464) and in Stable-Baselines3's own settings.
EQUAL_SETTINGS = {
    name: Settings(ours=EQUAL_TO_THEIRS[task.algorithm], normalize="Fetch" in task.env) for name, task in TASKS.items()
}
MAZES = [name for name in TASKS if name.startswith("PointMaze")]
MAZE_SETTINGS = Settings(
    gamma=0.99, updates_per_step=0.5, random_steps=2_000, num_envs=8, normalize=True, steps_per_chunk=400,
    ours=(INPUTS, "loss_function=l2"),  # also the loss of Stable-Baselines3
)  # fmt: skip
EQUAL_SETTINGS |= dict.fromkeys(MAZES, MAZE_SETTINGS)
# Episodes have 600 steps, and Stable-Baselines3 cannot sample before the first episodes end.
EQUAL_SETTINGS["PointMaze_Medium, SAC"] = replace(MAZE_SETTINGS, random_steps=5_200)
TUNING_SEEDS = 10, 11, 12  # the first for all candidates, the others for the best
# The best settings of `tuning.py`: of 24 candidates for each, and then of their neighbours. FetchReach has the settings
# of PointReach, which are faster there than the best of six candidates.
FAST = Settings(
    hidden=(64, 64), batch_size=128, learning_rate=2e-3, tau=0.1, num_envs=5, normalize=True, ours=(INPUTS,)
)
BEST = {name: replace(FAST, **({"alpha": 0.05} if "SAC" in name else {"noise": 0.4})) for name in TASKS}
SEARCHED = [name for name in TASKS if name not in ("FetchReach, SAC", *MAZES)]
TUNED_SETTINGS = {(name, library): BEST[name] for name in SEARCHED for library in (OURS, SB3)}
TUNED_SETTINGS["PointReach, DDPG", SB3] = replace(BEST["PointReach, DDPG"], num_envs=10)
TUNED_SETTINGS["PointReach, TD3", SB3] = replace(BEST["PointReach, TD3"], learning_rate=3e-3)


def settings_of(way: str, task: str, library: str) -> Settings:
    """Return the settings of a library."""
    return EQUAL_SETTINGS[task] if way == EQUAL else TUNED_SETTINGS[task, library]


# Evaluation

Act = Callable[[dict[str, np.ndarray]], np.ndarray]


class Evaluations:
    """Evaluates greedy episodes with the same starts and goals at an interval, and stops the clock meanwhile."""

    def __init__(self, env: str, interval: int, episodes: int, success: str = "is_success"):
        self.envs = gymnasium.make_vec(env, num_envs=episodes, vectorization_mode="sync")
        self.seeds = [EVALUATION_SEED + i for i in range(episodes)]
        self.interval, self.success = interval, success
        self.starts: list[dict[str, np.ndarray]] = []  # of every evaluation
        self.curve: list[dict[str, float]] = []
        self.seconds, self.cpu_seconds = 0.0, 0.0  # of training
        self.began = 0.0, 0.0  # the clocks at the end of the last evaluation

    def __call__(self, act: Act) -> float:
        """Return the success rate: the share of episodes whose last step is at the goal."""
        if self.curve:  # time before the first evaluation is not training
            self.seconds += time.perf_counter() - self.began[0]
            self.cpu_seconds += time.process_time() - self.began[1]
        observation, _ = self.envs.reset(seed=self.seeds)
        self.starts.append({key: value.copy() for key, value in observation.items()})
        ended = np.zeros(len(self.seeds), dtype=bool)
        while not ended.any():
            observation, _, terminated, truncated, info = self.envs.step(act(observation))
            ended = terminated | truncated
        assert ended.all()  # all episodes have the same length
        success = float(np.mean(info[self.success], dtype=np.float64))
        steps = len(self.curve) * self.interval
        times = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        self.curve.append({"steps": steps, "success": success, **times})
        self.began = time.perf_counter(), time.process_time()
        return success


# The two libraries


def train_ours(task: Task, settings: Settings, seed: int, evaluations: Evaluations) -> None:
    """Train one of the example scripts."""

    class Evaluation:  # replaces the class of the scripts
        def __init__(self, config: Any):
            pass

        def __call__(self, policy: Any) -> dict[str, torch.Tensor]:
            def act(observation: dict[str, np.ndarray]) -> np.ndarray:
                data = {key: torch.as_tensor(value).float() for key, value in observation.items()}
                with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
                    return policy(TensorDict(data, len(observation["observation"])))["action"].numpy()

            return {"success": torch.tensor(evaluations(act))}

        def close(self) -> None:
            pass

    overrides = [
        f"env.name={task.env}",
        f"env.num_envs={settings.num_envs}",
        f"env.success={task.success}",
        f"seed={seed}",
        f"total_steps={task.steps}",
        f"hidden={list(settings.hidden)}",
        f"batch_size={settings.batch_size}",
        f"updates_per_step={settings.updates_per_step}",
        f"learning_rate={settings.learning_rate}",
        f"tau={settings.tau}",
        f"gamma={settings.gamma}",
        f"collector.random_steps={settings.random_steps}",
        f"collector.steps_per_chunk={settings.steps_per_chunk}",
        f"exploration.noise={settings.noise}",
        f"exploration.random_actions={settings.random_actions}",
        f"normalization.enabled={settings.normalize}",
        f"buffer.size={task.steps}",
        f"hindsight.her_ratio={settings.n_sampled_goal / (settings.n_sampled_goal + 1)}",
        f"evaluation.interval={evaluations.interval}",
        f"checkpoint.interval={task.steps}",
        f"logger.interval={task.steps}",
        "logger.kinds=[]",
        *([f"alpha_init={settings.alpha}"] if task.algorithm == "sac" else []),
        *settings.ours,
    ]
    script, config = load(task.algorithm, overrides)
    with tempfile.TemporaryDirectory() as folder, patch.object(script, "Evaluation", Evaluation):
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
        normalization = self.model.get_vec_normalize_env()
        if normalization is not None:
            observation = normalization.normalize_obs(observation)
        return self.model.predict(observation, deterministic=True)[0]

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._on_rollout_start()


def train_sb3(task: Task, settings: Settings, seed: int, evaluations: Evaluations) -> None:
    """Train Stable-Baselines3's agent."""
    torch.set_num_threads(1)
    env = make_vec_env(task.env, settings.num_envs)
    if settings.normalize:
        env = VecNormalize(env, norm_reward=False, clip_obs=5.0)  # clipped as in our scripts
    arguments: dict[str, Any] = {
        "buffer_size": task.steps,
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "tau": settings.tau,
        "gamma": settings.gamma,
        "learning_starts": settings.random_steps,
        "train_freq": settings.steps_per_chunk // settings.num_envs,
        "gradient_steps": settings.updates_per_chunk,
        "policy_kwargs": {"net_arch": list(settings.hidden)},
        "replay_buffer_class": HerReplayBuffer,
        "replay_buffer_kwargs": {"n_sampled_goal": settings.n_sampled_goal, "goal_selection_strategy": "future"},
    }
    if task.algorithm == "sac":
        arguments["ent_coef"] = f"auto_{settings.alpha}"
    else:
        size = env.action_space.shape
        arguments["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, settings.noise))
    algorithm = getattr(stable_baselines3, task.algorithm.upper())
    model = algorithm("MultiInputPolicy", env, seed=seed, device="cpu", **arguments)
    model.learn(task.steps, callback=EvaluateSB3(evaluations))


LIBRARIES = {OURS: train_ours, SB3: train_sb3}


def learn(
    library: str, task: Task, settings: Settings, seed: int, interval: int, episodes: int = EPISODES
) -> Evaluations:
    """Train a library, and return the evaluations."""
    evaluations = Evaluations(task.env, interval, episodes, task.success)
    LIBRARIES[library](task, settings, seed, evaluations)
    return evaluations


def check_steps(steps: int, interval: int, settings: Settings) -> None:
    """Check that evaluations follow whole chunks, and that the last one is at the end."""
    if steps % interval or interval % settings.steps_per_chunk:
        sys.exit(
            f"The number of steps ({steps}) must be a multiple of the interval ({interval}), and the interval of "
            f"{settings.steps_per_chunk}, the number of steps in a chunk: change --steps or --interval."
        )


def smaller(task: Task, steps: int) -> Task:
    """Return the task with another number of steps."""
    return replace(task, steps=steps)
