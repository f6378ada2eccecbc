"""A training that is killed at any file operation of a save, or of the start from a checkpoint, and its restored state.

The environments continue from the last checkpoint, with the same goals. The first transition of a resumed run starts
with the goals at which the previous run ended, so only `flush()` after loading separates the episodes of both runs.
"""

import itertools
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper, SerialEnv

from support import tape
from support.factories import make_transform
from support.pages import run_block

ENVIRONMENTS = 4
STEPS = 10  # steps of each environment in one batch
SIZE = 10 * ENVIRONMENTS * STEPS  # rows of the buffer, which wraps round
LENGTHS = (5, 19, 2, 30, 1, 12)
CAPACITY = SIZE + ENVIRONMENTS * (max(LENGTHS) + 2)  # goals of running episodes are published later
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


class ContinuedTape(tape.Tape):
    """The tape after ``steps`` steps, which the first reset does not change. Observations contain the run."""

    def __init__(self, run, number, steps):
        super().__init__(number, LENGTHS)
        self.observation_space["run"] = Box(0, 2**16, (1,), np.float32)
        self.run, self.moved = run, False
        _, self.episode, self.state = tape.taken(number, steps + 1, LENGTHS)[-1]

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options) if self.moved else (self._observation(), {})

    def step(self, action):
        self.moved = True
        return super().step(action)

    def _observation(self):
        return super()._observation() | {"run": np.array([self.run], np.float32)}


class Training:
    """A training with its whole state in checkpoints. The last complete one, if any, is loaded as the docs advise."""

    def __init__(self, directory, with_ids=True, her_ratio=0.8):
        self.with_ids = with_ids
        self.loss = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.loss.parameters())
        self.hindsight = make_transform(her_ratio=her_ratio, capacity=CAPACITY)
        self.rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(SIZE), transform=self.hindsight, batch_size=64)
        # "runs": the runs that wrote stored transitions, with the earlier steps of each environment.
        self.progress = {"frames": 0, "updates": 0, "runs": []}
        run_block("how-to/checkpoints", 0, names := {})  # imports
        names |= vars(self) | {"directory": directory}
        run_block("how-to/checkpoints", 1, names)
        run_block("how-to/checkpoints", 2, names)
        self.rotation, self.save_step = names["rotation"], names["save"]

    def save(self):
        self.save_step(self.progress["frames"])

    def train(self, run):
        """Collect and learn endlessly, and yield after each batch."""
        begun = self.progress["frames"] // ENVIRONMENTS
        self.progress["runs"].append([run, begun])
        makers = [lambda number=n: GymWrapper(ContinuedTape(run, number, begun)) for n in range(ENVIRONMENTS)]
        frames = ENVIRONMENTS * STEPS
        for data in Collector(SerialEnv(ENVIRONMENTS, makers), None, frames_per_batch=frames, total_frames=-1):
            data = data.reshape(-1)
            self.rb.extend(data if self.with_ids else data.exclude("collector"))
            self.optimizer.zero_grad()
            self.loss(self.rb.sample()["observation"]).mean().backward()
            self.optimizer.step()
            self.progress["frames"] += len(data)
            self.progress["updates"] += 1
            yield


def check(training):
    """Check the whole state of a resumed training with ``her_ratio=1.0``.

    Every transition must be relabelled: the episodes are too short to be published while they run.
    """
    progress, rb = training.progress, training.rb
    updates = {int(state["step"]) for state in training.optimizer.state_dict()["state"].values()}
    assert updates == {progress["updates"]}, "the optimizer is of another moment than the progress"
    assert rb.write_count == progress["frames"], "the buffer is of another moment than the progress"
    assert len(rb) == min(progress["frames"], SIZE)
    rows = rb[:]
    assert tape.check(rows, lengths=LENGTHS).relabelled == len(rb), "a transition is not relabelled"
    steps, kept = progress["frames"] // ENVIRONMENTS, len(rb) // ENVIRONMENTS
    run_of = {}  # place of a transition -> run that wrote it
    for number in range(ENVIRONMENTS):
        for step, place in list(enumerate(tape.taken(number, steps, LENGTHS)))[-kept:]:
            run_of[place] = [run for run, begun in progress["runs"] if begun <= step][-1]
    places = tape.places(rows)
    assert dict(zip(places, rows["run"].flatten().tolist(), strict=True)) == run_of, "other transitions are stored"
    for place, (number, episode, reached) in zip(places, rows["desired_goal"].long().tolist(), strict=True):
        run = run_of.get((number, episode, reached - 1))
        assert run == run_of[place], f"the transition from {place} of run {run_of[place]} has a goal of run {run}"


def dies(operation, action):
    """Run an action in a fork that is killed before a file operation; return whether it reached this operation."""
    if process := os.fork():
        return os.WIFSIGNALED(os.waitpid(process, 0)[1])
    operations = itertools.count()

    def kill_at_operation(event, arguments):
        if event in CHANGES and next(operations) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at_operation)
    try:
        action()
    finally:
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("with_ids", [True, False])  # without ids, environments are only identified by their goals
def test_a_killed_training_resumes_from_its_last_complete_checkpoint(with_ids, tmp_path):
    directory, draw, newest = tmp_path / "checkpoints", random.Random(0), set()
    for run in range(12):
        training = Training(directory, with_ids)
        batches = training.train(run)
        for _ in range(draw.randint(1, 3)):
            next(batches)
            training.save()
        next(batches)  # is lost, or saved by the fork
        # A save has about 170 operations. From the third on, it removes a checkpoint.
        operation = 15 * run
        assert dies(operation, training.save) or operation > 100
        dies(draw.randint(0, 20), lambda: Training(directory, with_ids))
        resumed = Training(directory, with_ids, her_ratio=1.0)
        check(resumed)
        newest.add(resumed.progress["frames"] == training.progress["frames"])
    assert newest == {True, False}
