"""Endless streams of transitions for tests under load, made and checked as whole tensors.

The lanes follow the tape's rules with other lengths. A goal is the tape's ``(environment, episode, step)`` repeated
`COPIES` times, so that a torn goal shows.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, Unbounded

from support import goals, tape
from torchrl_her import HERTransform

COPIES = 4
GOAL_SPEC = Unbounded((3 * COPIES,))
LENGTHS = (5, 90, 2, 13, 70, 1, 140)  # some are published while they grow


def reward_of(achieved: Tensor, desired: Tensor) -> Tensor:
    """The tape's reward of goals ``[..., 3 * COPIES]``: ``[...]``."""
    return goals.reward_of(achieved[..., :3], desired[..., :3])


def make_buffer(size: int, capacity: int, strategy: str = "future", **arguments: Any) -> TensorDictReplayBuffer:
    """A buffer for these transitions; further arguments are the buffer's."""
    transform = HERTransform(reward_of, strategy=strategy, capacity=capacity, goal_spec=GOAL_SPEC)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=512, **arguments)


class Source:
    """Environments ``first`` to ``first + count - 1`` side by side; a write has ``steps`` steps of each."""

    def __init__(self, first: int, count: int, steps: int):
        self.numbers, self.steps, self.begin = torch.arange(first, first + count), steps, 0
        self.lengths = torch.stack([torch.tensor(LENGTHS).roll(-int(number)) for number in self.numbers])
        self.ends = self.lengths.cumsum(dim=1)  # [count, len(LENGTHS)]

    def next(self) -> TensorDict:
        """The next transitions of all environments, one environment after the other: ``[count * steps]``."""
        position = torch.arange(self.begin, self.begin + self.steps).repeat(len(self.numbers), 1)
        self.begin += self.steps
        cycle, rest = position // sum(LENGTHS), position % sum(LENGTHS)
        nth = torch.searchsorted(self.ends, rest, right=True)
        episode = cycle * len(LENGTHS) + nth
        length = self.lengths.gather(1, nth)
        step = rest - self.ends.gather(1, nth) + length
        number = self.numbers.unsqueeze(1).expand_as(step)

        def goal(step: Tensor) -> Tensor:
            return torch.stack([number, episode, step], dim=-1).flatten(0, 1).float().repeat(1, COPIES)

        achieved, outcome, desired = goal(step), goal(step + 1), goal(torch.full_like(step, tape.ASKED))
        truncated = (step + 1 == length).reshape(-1, 1)
        next_entries = {
            "observation": outcome[:, :3],
            "achieved_goal": outcome,
            "desired_goal": desired.clone(),
            "reward": reward_of(outcome, desired).unsqueeze(-1),
            "terminated": torch.zeros_like(truncated),
            "truncated": truncated,
            "done": truncated.clone(),
        }
        # The trajectory ids of every source are the same.
        ids = (number - self.numbers[0] + len(self.numbers) * episode).flatten()
        root = {"observation": achieved[:, :3], "achieved_goal": achieved, "desired_goal": desired}
        return TensorDict({**root, "next": next_entries, "collector": {"traj_ids": ids}}, batch_size=len(achieved))


def check(batch: TensorDictBase, strategy: str = "future") -> int:
    """Check all transitions ``[*batch]`` with tensor expressions, and return how many are relabelled."""
    batch = batch.reshape(-1)
    number, episode, step = batch["observation"].long().unbind(1)
    goal, outcome = batch["desired_goal"], batch["next", "achieved_goal"]
    relabelled = batch["hindsight", "relabelled"].squeeze(-1)
    parts = goal.view(-1, COPIES, 3)
    assert bool((parts == parts[:, :1]).all()), "a goal is torn"
    assert bool((goal == batch["next", "desired_goal"]).all()), "a transition has two goals"
    goal_number, goal_episode, goal_step = parts[:, 0].long().unbind(1)
    lengths = torch.tensor(LENGTHS)[(goal_number + goal_episode) % len(LENGTHS)]
    same = (goal_number == number) & (goal_episode == episode)
    possible = (goal_step >= 1) & (goal_step <= lengths)
    right = possible if strategy == "random" else possible & same & (goal_step > step)
    assert bool((right | ~relabelled).all()), "a goal is wrong"
    assert bool(((same & (goal_step == tape.ASKED)) | relabelled).all()), "a transition that keeps its goal has another"
    assert bool((batch["next", "reward"].squeeze(-1) == reward_of(outcome, goal)).all()), "a reward is wrong"
    assert bool((outcome[:, :3].long() == torch.stack([number, episode, step + 1], dim=1)).all()), "a row is torn"
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
