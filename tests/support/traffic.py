"""Endless streams of transitions for tests under load, created and checked as whole tensors.

The lanes follow the tape's rules with other lengths. A goal is the tape's ``(environment, episode, step)``, repeated
`COPIES` times to detect torn goals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, Unbounded

from support import goals, tape
from support.factories import make_transform

COPIES = 4
STEP = torch.tensor([0, 0, 1])
GOAL_SPEC = Unbounded((3 * COPIES,))
LENGTHS = (5, 90, 2, 13, 70, 1, 140)  # some are published while they grow


def reward_of(achieved: Tensor, desired: Tensor) -> Tensor:
    """Return the tape's rewards ``[...]`` of goals ``[..., 3 * COPIES]``."""
    return goals.reward_of(achieved[..., :3], desired[..., :3])


def make_buffer(size: int, capacity: int, strategy: str = "future", **arguments: Any) -> TensorDictReplayBuffer:
    """Return a buffer for these transitions; further arguments are the buffer's."""
    transform = make_transform(reward=reward_of, strategy=strategy, capacity=capacity, goal_spec=GOAL_SPEC)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=512, **arguments)


class Source:
    """Environments ``first`` to ``first + count - 1``. Each write has ``steps`` steps of every environment."""

    def __init__(self, first: int, count: int, steps: int):
        self.first, self.count, self.steps = first, count, steps
        self.lanes = [_places(number) for number in range(first, first + count)]

    def next(self) -> TensorDict:
        """Return the next transitions of all environments, one environment after the other: ``[count * steps]``."""
        places = torch.tensor([place for lane in self.lanes for place in itertools.islice(lane, self.steps)])
        number, episode, step = places.unbind(1)
        outcomes = places + STEP
        asked = torch.stack([number, episode, torch.full_like(step, tape.ASKED)], dim=1)
        next_entries = {
            "observation": outcomes.float(),
            "achieved_goal": _goals(outcomes),
            "desired_goal": _goals(asked),
            "reward": reward_of(_goals(outcomes), _goals(asked)).unsqueeze(1),
            "done": (outcomes[:, 2] == _lengths(places)).unsqueeze(1),
        }
        root = {"observation": places.float(), "achieved_goal": _goals(places), "desired_goal": _goals(asked)}
        # The trajectory ids of every source are the same.
        collector = {"traj_ids": number - self.first + self.count * episode}
        return TensorDict({**root, "next": next_entries, "collector": collector}, batch_size=len(places))


def _places(number: int) -> Iterator[tuple[int, int, int]]:
    """Yield where the transitions of an environment start, without end."""
    for episode in itertools.count():
        for step in range(tape.length_of(number, episode, LENGTHS)):
            yield number, episode, step


def _goals(places: Tensor) -> Tensor:
    """Return the goals ``[n, 3 * COPIES]`` of places ``[n, 3]``."""
    return places.float().repeat(1, COPIES)


def _lengths(places: Tensor) -> Tensor:
    """Return the lengths ``[n]`` of the episodes of places ``[n, 3]``."""
    return torch.tensor(LENGTHS)[(places[:, 0] + places[:, 1]) % len(LENGTHS)]


def check(batch: TensorDictBase, strategy: str = "future") -> int:
    """Check transitions ``[*batch]`` with tensor expressions, and return the number of relabelled ones."""
    batch = batch.reshape(-1)
    place, desired, outcome = batch["observation"].long(), batch["desired_goal"], batch["next", "achieved_goal"]
    relabelled = batch["hindsight", "relabelled"].squeeze(1)
    copies = desired.view(-1, COPIES, 3)
    assert bool((copies == copies[:, :1]).all()), "a goal is torn"
    assert bool((desired == batch["next", "desired_goal"]).all()), "a transition has two goals"
    goal = copies[:, 0].long()
    same = (goal[:, :2] == place[:, :2]).all(dim=1)
    right = (goal[:, 2] >= 1) & (goal[:, 2] <= _lengths(goal))
    if strategy != "random":
        right &= same & (goal[:, 2] > place[:, 2])
    assert bool((right | ~relabelled).all()), "a goal is wrong"
    assert bool(((same & (goal[:, 2] == tape.ASKED)) | relabelled).all()), "a goal changed without relabelling"
    assert bool((batch["next", "reward"].squeeze(1) == reward_of(outcome, desired)).all()), "a reward is wrong"
    assert bool((outcome[:, :3].long() == place + STEP).all()), "a row is torn"
    return int(relabelled.sum())


def check_one_by_one(batch: TensorDictBase, strategy: str = "future") -> None:
    """Check transitions ``[*batch]`` with the tape's oracle, in plain Python."""
    batch = batch.reshape(-1).clone()
    for key in ("achieved_goal", "desired_goal"):
        for place in (key, ("next", key)):
            copies = batch[place].tolist()
            assert all(goal == goal[:3] * COPIES for goal in copies), f"a goal is torn under {place}"
            batch[place] = batch[place][:, :3]
    tape.check(batch, strategy, LENGTHS, flags=False)
