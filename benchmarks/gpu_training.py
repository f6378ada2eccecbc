"""Trains DDPG on PointReach with everything on one device: environments, replay buffer, hindsight and updates.

Environments play whole episodes. One CUDA graph contains several updates and a single sample for all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_device import Captured, wait_for
from gpu_learner import Learner
from tensordict.nn import TensorDictModuleBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import EnvBase
from tqdm import tqdm

from torchrl_her import HERTransform, PackedStorage, SparseReward
from torchrl_her.envs import PointReach

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from batched_point_reach import BatchedPointReach

BATCH_SIZE = 256
STEPS_PER_UPDATE = 16
UPDATES_PER_CALL = 25  # updates in one CUDA graph
EVALUATION_EPISODES = 1000

Row = dict[str, Any]


@dataclass(frozen=True)
class TrainingPlan:
    """The size of a training run. A round of ``num_envs`` episodes must be a multiple of 400 steps."""

    steps: int
    num_envs: int
    buffer_size: int
    limit: float  # seconds after which the training is stopped

    @property
    def updates_per_round(self) -> int:
        """The number of updates after each round of episodes."""
        updates, rest = divmod(50 * self.num_envs, STEPS_PER_UPDATE)
        if rest or updates % UPDATES_PER_CALL:
            raise ValueError(
                f"50 * num_envs={self.num_envs} must be a multiple of {STEPS_PER_UPDATE * UPDATES_PER_CALL}."
            )
        return updates


class Clock:
    """Measures the seconds of each part of the training, without evaluations."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = dict.fromkeys(("collecting", "writing", "updating"), 0.0)

    def time(self, part: str, function: Callable[[], Any]) -> Any:
        """Call a function and add its time to a part."""
        start = time.perf_counter()
        result = function()
        wait_for(self.device)
        self.seconds[part] += time.perf_counter() - start
        return result

    @property
    def total(self) -> float:
        """The seconds of all parts."""
        return sum(self.seconds.values())


class Updates:
    """Runs the updates after each round with a graph, which is captured again when the buffer has grown."""

    def __init__(self, buffer: TensorDictReplayBuffer, learner: Learner, device: torch.device):
        self.buffer, self.learner, self.device = buffer, learner, device
        self._captured: Captured | None = None
        self._rows = 0  # number of rows in the buffer when the graph was captured

    def run(self, count: int) -> None:
        """Run ``count`` updates."""
        calls = count // UPDATES_PER_CALL
        if self._captured is None or self._rows != len(self.buffer):
            warm_up = 3 if self._captured is None else 0
            self._captured = None  # frees the memory of the graph
            self._captured = Captured(self._update, self.device, warm_up=warm_up)
            self._rows = len(self.buffer)
            calls -= self._captured.calls
        for _ in range(calls):
            self._captured()

    def _update(self) -> None:
        for batch in self.buffer.sample(BATCH_SIZE * UPDATES_PER_CALL).split(BATCH_SIZE):
            self.learner.update(batch)


def train(plan: TrainingPlan, device: torch.device) -> Iterator[Row]:
    """Train, and yield a row for each of ten evaluations, the last one at the end of the training."""
    env = BatchedPointReach(plan.num_envs, device=device, seed=1)
    test_env = BatchedPointReach(EVALUATION_EPISODES, device=device, seed=2)
    buffer = TensorDictReplayBuffer(
        storage=PackedStorage(plan.buffer_size, device=device),
        transform=HERTransform(SparseReward(PointReach.threshold), capacity=plan.buffer_size),
    )
    learner = Learner(env.rollout(1).reshape(-1))
    updates, clock = Updates(buffer, learner, device), Clock(device)
    rounds = -(-plan.steps // (50 * plan.num_envs))
    evaluated = {round(rounds * tenth / 10) for tenth in range(1, 11)}
    for number in (progress := tqdm(range(1, rounds + 1), desc="training", unit="round")):
        policy = learner.explorer if number > 1 else None  # the first actions are random
        episodes = clock.time("collecting", lambda policy=policy: play(env, policy))
        clock.time("writing", lambda episodes=episodes: buffer.extend(episodes.reshape(-1)))
        clock.time("updating", lambda: updates.run(plan.updates_per_round))
        is_over = clock.total > plan.limit
        if number in evaluated or is_over:
            success = success_rate(test_env, learner.actor)
            progress.set_postfix(success=f"{success:.2f}")
            steps = number * 50 * plan.num_envs
            yield {
                "environment_steps": steps,
                "updates": steps // STEPS_PER_UPDATE,
                "success_rate": round(success, 4),
                "seconds": round(clock.total, 2),
                **{f"seconds_{part}": round(seconds, 2) for part, seconds in clock.seconds.items()},
            }
        if is_over:
            break


@torch.no_grad()
def play(env: EnvBase, policy: TensorDictModuleBase | None) -> Any:
    """Return one episode of each environment, ``[num_envs, 50]``; without a policy, actions are random."""
    return env.rollout(50, policy, break_when_any_done=False)


def success_rate(env: EnvBase, policy: TensorDictModuleBase) -> float:
    """Return the share of episodes that end at their goal."""
    return float((play(env, policy)["next", "reward"][:, -1] == 0).float().mean())
