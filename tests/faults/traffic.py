"""Much that is written and sampled at once: transitions that can be checked by themselves, made as whole tensors.

A goal is ``(environment, episode, step)`` four times over: a goal of which a part is another one's is seen. The same
check twice: as tensor expressions for everything that is sampled, and in plain Python for some of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, Unbounded

from torchrl_her import HERTransform

COPIES = 4
GOAL = Unbounded((3 * COPIES,))
LENGTHS = (5, 90, 2, 13, 70, 1, 140)  # some are published as they grow
ASKED = 1000  # the step that every episode is asked for, and that none has
WEIGHTS = (7, 3, 1)


def reward_of(achieved: Any, desired: Any) -> Any:
    return sum(w * (achieved[..., i] - 2 * desired[..., i]) for i, w in enumerate(WEIGHTS))


def make_buffer(size: int, capacity: int, strategy: str = "future", **arguments: Any) -> TensorDictReplayBuffer:
    transform = HERTransform(reward_of, strategy=strategy, capacity=capacity, goal_spec=GOAL)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=512, **arguments)


class Source:
    """Some environments that run side by side, and give transitions without end."""

    def __init__(self, first: int, count: int, steps: int):
        self.numbers, self.steps = range(first, first + count), steps
        self.begin = 0

    def next(self) -> TensorDict:
        """The next ``steps`` transitions of each environment, ``[count * steps]``."""
        position = np.arange(self.begin, self.begin + self.steps)
        self.begin += self.steps
        rows = []  # environment, episode, step, length of the episode
        for number in self.numbers:
            lengths = np.roll(LENGTHS, -number)
            cycle, rest = np.divmod(position, sum(LENGTHS))
            at = np.searchsorted(np.cumsum(lengths), rest, side="right")
            step = rest - (np.cumsum(lengths) - lengths)[at]
            rows.append(np.stack([np.full_like(step, number), cycle * len(LENGTHS) + at, step, lengths[at]], axis=1))
        number, episode, step, length = torch.from_numpy(np.concatenate(rows)).unbind(1)

        def where(step: torch.Tensor) -> torch.Tensor:
            return torch.stack([number, episode, step], dim=1).float().repeat(1, COPIES)

        asked, outcome = where(torch.full_like(step, ASKED)), where(step + 1)
        ends = (step + 1 == length).unsqueeze(-1)
        achieved = {"observation": where(step)[:, :3], "achieved_goal": where(step), "desired_goal": asked}
        after = {"observation": outcome[:, :3], "achieved_goal": outcome, "desired_goal": asked.clone()}
        flags = {"terminated": torch.zeros_like(ends), "truncated": ends, "done": ends.clone()}
        reward = reward_of(outcome, asked).unsqueeze(-1)
        # The ids of one source are those of every other.
        ids = (number - self.numbers[0]) + len(self.numbers) * episode
        return TensorDict(
            {**achieved, "next": {**after, **flags, "reward": reward}, "collector": {"traj_ids": ids}}, [len(step)]
        )


def check(batch: TensorDictBase, strategy: str = "future") -> int:
    """Check all of a sampled batch ``[n]``, and return how many transitions of it are relabelled."""
    batch = batch.reshape(-1)
    number, episode, step = batch["observation"].long().unbind(1)
    goal, outcome = batch["desired_goal"], batch["next", "achieved_goal"]
    relabelled = batch["hindsight", "relabelled"].squeeze(-1)
    parts = goal.view(-1, COPIES, 3)
    assert bool((parts == parts[:, :1]).all()), "a goal is torn"
    assert bool((goal == batch["next", "desired_goal"]).all()), "a transition has two goals"
    of_number, of_episode, of_step = parts[:, 0].long().unbind(1)
    lengths = torch.tensor(LENGTHS)[(of_number + of_episode) % len(LENGTHS)]
    same = (of_number == number) & (of_episode == episode)
    possible = (of_step >= 1) & (of_step <= lengths)
    right = possible if strategy == "random" else possible & same & (of_step > step)
    assert bool((right | ~relabelled).all()), "a goal is wrong"
    assert bool(((same & (of_step == ASKED)) | relabelled).all()), "a transition that is not relabelled has a new goal"
    assert bool((batch["next", "reward"].squeeze(-1) == reward_of(outcome, goal)).all()), "a reward is wrong"
    assert bool((outcome[:, :3].long() == torch.stack([number, episode, step + 1], dim=1)).all()), "a row is torn"
    return int(relabelled.sum())


def check_one_by_one(batch: TensorDictBase, strategy: str = "future") -> None:
    """The same in plain Python."""
    rows = batch.reshape(-1)
    goals, next_goals = rows["desired_goal"].tolist(), rows["next", "desired_goal"].tolist()
    outcomes, rewards = rows["next", "achieved_goal"].tolist(), rows["next", "reward"].tolist()
    relabelled = rows["hindsight", "relabelled"].tolist()
    for at, (number, episode, step) in enumerate(rows["observation"].tolist()):
        row = f"environment {number}, episode {episode}, step {step}"
        of_number, of_episode, of_step = goals[at][:3]
        assert goals[at] == next_goals[at] == [of_number, of_episode, of_step] * COPIES, f"{row}: {goals[at]}"
        assert outcomes[at] == [number, episode, step + 1] * COPIES, row
        if not relabelled[at][0]:
            assert (of_number, of_episode, of_step) == (number, episode, ASKED), f"{row} has another goal"
        else:
            assert 1 <= of_step <= LENGTHS[int(of_number + of_episode) % len(LENGTHS)], f"{row}: no such goal"
            if strategy != "random":
                assert (of_number, of_episode) == (number, episode), f"{row} has another episode's goal"
                assert of_step > step, f"{row} has a goal of the past"
        of_outcome = 7 * number + 3 * episode + step + 1
        assert rewards[at] == [of_outcome - 2 * (7 * of_number + 3 * of_episode + of_step)], row
