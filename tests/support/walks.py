"""Transitions of a point that moves towards its goal in the plane, and often reaches it."""

from __future__ import annotations

import functools

import torch
from tensordict import TensorDict

THRESHOLD = 0.05


def walks(
    episodes: int = 20, steps: int = 25, *, ends_on_success: bool = False, threshold: float = THRESHOLD, seed: int = 0
) -> TensorDict:
    """Return the transitions ``[n]`` of whole episodes, one after the other.

    The reward is 0 within the threshold and -1 elsewhere. Episodes are truncated after ``steps``, or terminate when
    they reach their goal.
    """
    return _walks(episodes, steps, ends_on_success, threshold, seed).clone()


@functools.cache
def _walks(episodes: int, steps: int, ends_on_success: bool, threshold: float, seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(episodes):
        position, goal = torch.rand(2, 2, generator=generator) * 2 - 1
        for step in range(steps):
            towards = goal - position
            length = towards.norm().clamp(max=0.15) * torch.rand((), generator=generator)
            outcome = position + length * towards / towards.norm() + 0.02 * torch.randn(2, generator=generator)
            reached = (outcome - goal).norm() <= threshold
            terminated = bool(reached) and ends_on_success
            truncated = step == steps - 1 and not terminated
            flags = torch.tensor([terminated, truncated])
            rows.append((position, goal, outcome, reached.float() - 1, flags))
            position = outcome
            if terminated:
                break
    position, goal, outcome, reward, flags = (torch.stack(column) for column in zip(*rows, strict=True))
    after = {"achieved_goal": outcome, "desired_goal": goal.clone(), "reward": reward[:, None]}
    after |= {"terminated": flags[:, :1], "truncated": flags[:, 1:], "done": flags.any(1, keepdim=True)}
    return TensorDict({"achieved_goal": position, "desired_goal": goal, "next": after}, batch_size=len(rows))


def still(episodes: int = 20, steps: int = 25, *, period: int | None = None) -> TensorDict:
    """Return walks in which the achieved goal does not move, like an object before it is touched.

    With ``period``, a divisor of ``steps``, it moves in the last step of each period, but not in the last step of an
    episode.
    """
    period = period or steps
    data = walks(episodes, steps)
    row = torch.arange(len(data))
    after = torch.where((row + 1) % steps == 0, row, row + 1)
    positions = data["achieved_goal"]
    data["achieved_goal"], data["next", "achieved_goal"] = (positions[each // period * period] for each in (row, after))
    distance = (data["next", "achieved_goal"] - data["desired_goal"]).norm(dim=-1, keepdim=True)
    data["next", "reward"] = (distance <= THRESHOLD).float() - 1
    return data
