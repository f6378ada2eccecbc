"""A training that is killed at any file operation of a save, or of the start from a checkpoint, and its restored state.

The environments continue from the last checkpoint, with the same goals. The first transition of a resumed run starts
with the goals at which the previous run ended, so only the end of running episodes after loading separates both runs.
"""

import itertools
import os
import pickle
import random
import signal
import sys
from dataclasses import replace

import pytest
import torch
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from support.factories import make_transform, uids
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import Goals, World, whole_episodes
from torchrl_her import Checkpoints

ENVIRONMENTS = 4
STEPS = 10  # steps of each environment in one batch
SIZE = 10 * ENVIRONMENTS * STEPS  # rows of the buffer, which wraps round
LENGTHS = (5, 19, 2, 30, 1, 12)
CAPACITY = SIZE + ENVIRONMENTS * (max(LENGTHS) + 2)  # goals of running episodes are published later
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


class Training:
    """A training with its whole state in checkpoints. The last complete one, if any, is loaded."""

    def __init__(self, directory, with_ids=True, her_ratio=0.8):
        self.loss = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.loss.parameters())
        self.hindsight = make_transform(her_ratio=her_ratio, capacity=CAPACITY)
        self.rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(SIZE), transform=self.hindsight, batch_size=64)
        self.progress = {"frames": 0, "updates": 0}
        parts = {"buffer": self.rb, "loss": self.loss, "optimizer": self.optimizer, "progress": self.progress}
        self.checkpoints = Checkpoints(directory, **parts)
        self.checkpoints.load()
        self.recorded = Recorded(self.rb, Oracle({"future": 1.0}, CAPACITY), World(ENVIRONMENTS, Goals()), with_ids)
        if "recorded" in self.progress:
            self.recorded = replace(pickle.loads(bytes.fromhex(self.progress["recorded"])), rb=self.rb)
            self.recorded.oracle.flush()
        self.recorded.oracle.her_ratio = her_ratio

    def save(self):
        self.progress["recorded"] = pickle.dumps(replace(self.recorded, rb=None)).hex()
        self.checkpoints.save(self.progress["frames"])

    def train(self, run):
        """Write and learn endlessly, and yield after each batch. Transitions contain the run that wrote them."""
        world = self.recorded.world
        while True:
            first, rows = self.progress["frames"] // ENVIRONMENTS, []
            for env in range(ENVIRONMENTS):
                moves = itertools.cycle(whole_episodes(*LENGTHS[env:], *LENGTHS[:env]))
                rows += world.play(env, itertools.islice(moves, first, first + STEPS))
            data = world.tensordict(rows, ids=self.recorded.ids)
            self.recorded.write(rows, data.set("run", torch.full((len(rows), 1), run)))
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
    newest = range(max(0, progress["frames"] - SIZE), progress["frames"])
    assert uids(rb[:]) == [*newest], "other transitions are stored"
    assert training.recorded.check() == len(newest), "a transition is not relabelled"


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
        # A save has about 180 operations until the checkpoint gets its name. Then it removes a checkpoint, from the
        # third on, with 80 operations.
        operation = 25 * run
        assert dies(operation, training.save) or operation > 200
        dies(draw.randint(0, 20), lambda: Training(directory, with_ids))
        resumed = Training(directory, with_ids, her_ratio=1.0)
        check(resumed)
        newest.add(resumed.progress["frames"] == training.progress["frames"])
    assert newest == {True, False}
