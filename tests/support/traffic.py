"""Endless streams of the tape's transitions for tests under load, created and checked as whole tensors.

Episodes have other lengths. A goal is the tape's ``(environment, episode, step)``, repeated `COPIES` times to detect
torn goals.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, Unbounded

from support import goals, tape
from support.factories import make_transform

COPIES = 4
STEP = torch.tensor([0, 0, 1])
LENGTHS = (5, 90, 2, 13, 70, 1, 140)  # some are published while they grow


def reward_of(achieved: Tensor, desired: Tensor) -> Tensor:
    """Return the tape's rewards ``[...]`` of goals ``[..., 3 * COPIES]``."""
    return goals.reward_of(achieved[..., :3], desired[..., :3])


def make_buffer(size: int, capacity: int, strategy: str = "future", **arguments: Any) -> TensorDictReplayBuffer:
    """Return a buffer for these transitions; further arguments are the buffer's."""
    spec = Unbounded((3 * COPIES,))
    transform = make_transform(reward=reward_of, strategy=strategy, capacity=capacity, goal_spec=spec)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=512, **arguments)


class Source:
    """Environments ``first`` to ``first + count - 1``. Each write has ``steps`` steps of every environment."""

    def __init__(self, first: int, count: int, steps: int):
        self.first, self.count, self.steps = first, count, steps
        self.lanes = [tape.starts(number, LENGTHS) for number in range(first, first + count)]

    def next(self) -> TensorDict:
        """Return the next transitions of all environments, one environment after the other: ``[count * steps]``."""
        places = torch.tensor([place for lane in self.lanes for place in itertools.islice(lane, self.steps)])
        number, episode, step = places.unbind(1)
        outcomes = places + STEP
        start, achieved = (each.float().repeat(1, COPIES) for each in (places, outcomes))
        desired = torch.stack([number, episode, torch.full_like(step, tape.ASKED)], 1).float().repeat(1, COPIES)
        last = {
            "reward": reward_of(achieved, desired).unsqueeze(1),
            "done": (step + 1 == tape.lengths_of(places, LENGTHS)).unsqueeze(1),
        }
        after = {"observation": outcomes.float(), "achieved_goal": achieved, "desired_goal": desired.clone(), **last}
        root = {"observation": places.float(), "achieved_goal": start, "desired_goal": desired}
        # The trajectory ids of every source are the same.
        collector = {"traj_ids": number - self.first + self.count * episode}
        return TensorDict({**root, "next": after, "collector": collector}, batch_size=len(places))


def check(batch: TensorDictBase, strategy: str = "future", n: int = 1, gamma: float = 1.0) -> int:
    """Check transitions ``[*batch]``, and return the number of relabelled ones."""
    batch = batch.reshape(-1)
    for key in ("achieved_goal", "desired_goal", ("next", "achieved_goal"), ("next", "desired_goal")):
        assert torch.equal(batch[key], batch[key][:, :3].repeat(1, COPIES)), f"{key} is torn"
    single = batch.apply(lambda entry: entry[:, :3] if entry.shape[1:] == (3 * COPIES,) else entry)
    tape.check(single, strategy, LENGTHS, flags=False, n=n, gamma=gamma)
    return int(batch[tape.RELABELLED].sum())
