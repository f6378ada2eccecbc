"""A training that can be killed at any moment, and a check of its restored state.

The environments continue from the last checkpoint, with the same goals. The first transition of a resumed run starts
with the goals at which the previous run ended, so only `flush()` after loading separates the episodes of both runs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Box
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.objectives import SoftUpdate

from support import tape
from support.factories import make_transform
from support.losses import make_loss

ENVIRONMENTS = 4
STEPS = 10  # steps of each environment in one batch
SIZE = 30 * ENVIRONMENTS * STEPS  # rows of the buffer, which wraps round several times
LENGTHS = (5, 19, 2, 30, 1, 12)
CAPACITY = SIZE + ENVIRONMENTS * (max(LENGTHS) + 2)  # goals of running episodes are published later
SAVED_EVERY = 2  # batches
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "checkpoints.md"
ADVISED = re.findall(r"<!-- (?:resume|save) -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


class ContinuedTape(tape.Tape):
    """The tape after ``steps`` steps, which the first reset does not change. Observations contain the run."""

    def __init__(self, run: int, number: int, steps: int):
        super().__init__(number, LENGTHS, discrete=True)
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
    """A training with its whole state in checkpoints."""

    def __init__(self, directory: Path, with_ids: bool = True, her_ratio: float = 0.8):
        self.directory, self.with_ids = directory, with_ids
        self.loss = make_loss("DQNLoss")
        self.targets = SoftUpdate(self.loss, tau=0.05)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)
        self.hindsight = make_transform(her_ratio=her_ratio, capacity=CAPACITY)
        self.rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(SIZE), transform=self.hindsight, batch_size=64)
        # "runs": the runs that wrote stored transitions, with the earlier steps of each environment.
        self.progress = {"frames": 0, "updates": 0, "runs": []}

    def resume(self) -> bool:
        """Load the last complete checkpoint, if any, with the code of the docs."""
        names = ("rb", "loss", "optimizer", "progress", "hindsight", "directory")
        variables = {name: getattr(self, name) for name in names}
        variables |= {"os": os, "shutil": shutil, "Checkpoint": Checkpoint, "CheckpointRotation": CheckpointRotation}
        exec(compile("\n".join(ADVISED), PAGE.name, "exec"), variables)
        self.rotation, self.write = variables["rotation"], variables["save"]
        return self.progress["frames"] > 0

    def save(self) -> None:
        """Save a checkpoint, with the code of the docs."""
        self.write(self.progress["frames"])

    def train(self, run: int) -> Iterator[None]:
        """Collect and learn endlessly; yield whenever a checkpoint is due."""
        begun = self.progress["frames"] // ENVIRONMENTS
        self.progress["runs"].append([run, begun])
        environments = [lambda number=n: GymWrapper(ContinuedTape(run, number, begun)) for n in range(ENVIRONMENTS)]
        serial = SerialEnv(ENVIRONMENTS, environments)
        collector = Collector(serial, None, frames_per_batch=ENVIRONMENTS * STEPS, total_frames=-1)
        for batch, data in enumerate(collector):
            data = data.reshape(-1)
            self.rb.extend(data if self.with_ids else data.exclude("collector"))
            for _ in range(2):
                self.optimizer.zero_grad()
                self.loss(self.rb.sample())["loss"].backward()
                self.optimizer.step()
                self.targets.step()
            self.progress["frames"] += len(data)
            self.progress["updates"] += 2
            if batch % SAVED_EVERY == 0:
                yield


def check(training: Training) -> int:
    """Check the whole state of a resumed training, and return the number of transitions.

    Every transition must be relabelled: the training has ``her_ratio=1.0``, and its episodes are too short to be
    published while they run.
    """
    progress, rb = training.progress, training.rb
    updates = {int(state["step"]) for state in training.optimizer.state_dict()["state"].values()}
    assert updates == {progress["updates"]}, "the optimizer is of another moment than the progress"
    assert rb.write_count == progress["frames"], "the buffer is of another moment than the progress"
    assert len(rb) == min(progress["frames"], SIZE)
    assert all(bool(parameter.isfinite().all()) for parameter in training.loss.parameters())

    rows = rb[:]
    count = tape.check(rows, lengths=LENGTHS)
    assert count.relabelled == count.sampled == len(rb), "a transition is not relabelled"
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
    return len(rb)
