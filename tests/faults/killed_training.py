"""A training that can be killed at any moment, and an oracle for what it resumes from.

The world goes on where it stood when the training was killed, with the same goal to reach: the first transition of a
resumed run starts from the very goals at which the last one ended, so that nothing but `flush()` after loading keeps
the episodes of the two runs apart. Every observation says in which run it was made, and every goal where it was
achieved: each transition can be checked by itself.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from torchrl_her import HERTransform

ENVIRONMENTS = 4
STEPS = 10  # of each environment in one batch
SIZE = 30 * ENVIRONMENTS * STEPS  # of the buffer, which goes round several times
WINDOW = 32  # positions set aside for an episode, of which it uses the first few
LENGTHS = (5, 19, 2, 30, 1, 12)
CAPACITY = SIZE + ENVIRONMENTS * WINDOW  # the goals of episodes that run while others end come in late
SAVED_EVERY = 2  # batches


def reward_of(achieved: Any, desired: Any) -> Any:
    """A reward that tells positions apart, of arrays and tensors."""
    return achieved[..., 1] - 2 * desired[..., 1]


def ends(number: int, position: int) -> bool:
    """Whether an environment's episode ends with the step to a position."""
    episode, step = divmod(position, WINDOW)
    return step == LENGTHS[(number + episode) % len(LENGTHS)]


def after(number: int, position: int) -> int:
    """Where the transition starts that follows one to a position."""
    return (position // WINDOW + 1) * WINDOW if ends(number, position) else position


class World(gymnasium.Env):
    """Takes one position after the other, in episodes that begin at multiples of ``WINDOW``.

    Observation: run, environment, position. Achieved goal: environment, position. Desired goal: environment, task.
    """

    def __init__(self, run: int, number: int, position: int):
        space = partial(Box, -(2**20), 2**20, dtype=np.float32)
        self.observation_space = Dict(
            {"observation": space(shape=(3,)), "achieved_goal": space(shape=(2,)), "desired_goal": space(shape=(2,))}
        )
        self.action_space = Discrete(2)
        self.run, self.number, self.position, self.moved = run, number, position, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.moved:  # a new process finds the world as it stands
            self.position = (self.position // WINDOW + 1) * WINDOW
        return self._observation(), {}

    def step(self, action):
        self.moved = True
        self.position += 1
        observation = self._observation()
        reward = float(reward_of(observation["achieved_goal"], observation["desired_goal"]))
        return observation, reward, False, ends(self.number, self.position), {}

    def _observation(self):
        where = np.array([self.number, self.position], np.float32)
        task = np.array([self.number, -1 - self.position // WINDOW], np.float32)
        return {"observation": np.append(np.float32(self.run), where), "achieved_goal": where, "desired_goal": task}


def make_world(run: int, number: int, position: int) -> GymWrapper:
    return GymWrapper(World(run, number, position), categorical_action_encoding=True)


class Training:
    """A training that has everything in its checkpoints."""

    def __init__(self, directory: Path, with_ids: bool = True, her_ratio: float = 0.8):
        self.directory, self.with_ids = directory, with_ids
        network = MLP(in_features=5, out_features=2, num_cells=[16])
        self.actor = QValueActor(network, in_keys=["observation", "desired_goal"], action_space="categorical")
        self.loss = DQNLoss(self.actor, action_space="categorical", delay_value=True)
        self.loss.make_value_estimator(gamma=0.9)
        self.targets = SoftUpdate(self.loss, tau=0.05)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)
        self.hindsight = HERTransform(reward_of, her_ratio=her_ratio, capacity=CAPACITY)
        self.rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(SIZE), transform=self.hindsight, batch_size=64)
        # "runs" are those that wrote what is stored: their numbers, and where their environments began.
        self.progress = {"frames": 0, "updates": 0, "runs": [], "positions": [0] * ENVIRONMENTS}

    def resume(self) -> bool:
        """Load the last complete checkpoint, if there is one; the lines in here stand in the docs, too."""
        rb, loss, optimizer, progress = self.rb, self.loss, self.optimizer, self.progress
        hindsight, directory = self.hindsight, self.directory

        checkpoint = Checkpoint(buffer=rb, loss=loss, optimizer=optimizer, progress=progress)
        rotation = CheckpointRotation(directory, keep_last=2)
        for leftover in rotation.directory.glob(".checkpoint-*"):  # what a killed process was writing
            shutil.rmtree(leftover)
        if rotation.latest() is not None:
            rotation.load_latest(checkpoint)
            hindsight.flush()  # the environments start anew

        self.checkpoint, self.rotation = checkpoint, rotation
        return progress["frames"] > 0

    def save(self) -> None:
        """Save a checkpoint."""
        self.rotation.save(self.checkpoint, step=self.progress["frames"])

    def train(self, run: int) -> Iterator[None]:
        """Collect and learn without end; stops for a moment whenever it is time to save."""
        begun = list(self.progress["positions"])
        self.progress["runs"].append([run, begun])
        worlds = [partial(make_world, run, number, position) for number, position in enumerate(begun)]
        environments = SerialEnv(ENVIRONMENTS, worlds)
        collector = Collector(
            environments,
            self.actor,
            frames_per_batch=ENVIRONMENTS * STEPS,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        for batch, data in enumerate(collector):
            reached = data["next", "achieved_goal"][:, -1, 1].long().tolist()
            data = data.reshape(-1)
            self.rb.extend(data if self.with_ids else data.exclude("collector"))
            for _ in range(2):
                self.optimizer.zero_grad()
                self.loss(self.rb.sample())["loss"].backward()
                self.optimizer.step()
                self.targets.step()
            self.progress["frames"] += len(data)
            self.progress["updates"] += 2
            self.progress["positions"][:] = [after(number, position) for number, position in enumerate(reached)]
            if batch % SAVED_EVERY == 0:
                yield


def check(training: Training) -> int:
    """Check everything that a training has, just after it resumed; returns how many transitions that was.

    The training relabels every transition that it can (``her_ratio=1.0``), and as its episodes are all shorter
    than those that are published as they run, that is every transition.
    """
    progress = training.progress
    steps = {int(state["step"]) for state in training.optimizer.state_dict()["state"].values()}
    assert steps == {progress["updates"]}, "the optimizer is of another moment than the progress"
    assert training.rb.write_count == progress["frames"], "the buffer is of another moment than the progress"
    assert len(training.rb) == min(progress["frames"], SIZE)
    parameters = torch.cat([parameter.flatten() for parameter in training.loss.parameters()])
    assert bool(parameters.isfinite().all())

    order = {run: place for place, (run, _) in enumerate(progress["runs"])}
    # Where each environment's runs end: where the next one began, and the last one was when the checkpoint was made.
    begun = [positions for _, positions in progress["runs"]] + [progress["positions"]]
    stored: list[list[int]] = [[] for _ in range(ENVIRONMENTS)]
    rows = training.rb[:]
    keys = ("observation", "achieved_goal", "desired_goal", "reward", "done")
    root = {key: rows[key].tolist() for key in keys[:3]}
    after_step = {key: rows["next", key].tolist() for key in keys}
    relabelled = rows["hindsight", "relabelled"].squeeze(-1).tolist()
    for at in range(len(rows)):
        run, number, position = map(int, root["observation"][at])
        row = f"the transition of run {run}, environment {number}, from position {position}"
        episode = position // WINDOW
        assert root["achieved_goal"][at] == [number, position], row
        assert after_step["observation"][at] == [run, number, position + 1], row
        assert after_step["achieved_goal"][at] == [number, position + 1], row
        assert after_step["done"][at] == [ends(number, position + 1)], row
        assert run in order, f"{row} is of a run that this checkpoint does not come from"
        assert begun[order[run]][number] <= position < begun[order[run] + 1][number], f"{row}: nothing of that run"
        assert relabelled[at], f"{row} is not relabelled"
        goal = root["desired_goal"][at]
        assert after_step["desired_goal"][at] == goal, row
        of_number, reached = map(int, goal)
        last = min(episode * WINDOW + LENGTHS[(number + episode) % len(LENGTHS)], begun[order[run] + 1][number])
        assert of_number == number, f"{row} has the goal of environment {of_number}"
        assert position < reached <= last, f"{row} has the goal {reached}; its episode ended at {last}"
        assert after_step["reward"][at] == [position + 1 - 2 * reached], row
        stored[number].append(position)
    for number, positions in enumerate(stored):
        positions.sort()
        assert len(positions) == len(training.rb) // ENVIRONMENTS
        for before, position in itertools.pairwise(positions):
            assert position == after(number, before + 1), f"environment {number} has {position} after {before}"
        assert after(number, positions[-1] + 1) == progress["positions"][number]
    return len(rows)
