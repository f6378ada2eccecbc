"""Bad writes, and the check that a refused write leaves no trace.

A bad write is tried between good ones. Afterwards, the buffer is compared with a twin that had only the good ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import gymnasium
import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, Transform

from support.factories import check_refused, make_transform, same, seeded_sample, state_of
from support.rewards import nearness

NEXT_ACHIEVED = ("next", "achieved_goal")
NEXT_DESIRED = ("next", "desired_goal")
REWARD = ("next", "reward")
ACHIEVED_GOALS = ("achieved_goal", NEXT_ACHIEVED)
DESIRED_GOALS = ("desired_goal", NEXT_DESIRED)

Change = Callable[[TensorDict], TensorDict]


def transitions(first: int = 0, count: int = 10, length: int = 25) -> TensorDict:
    """Return consecutive transitions ``[count]`` of episodes of ``length`` steps, with goals ``[count, 2]``."""
    time = torch.arange(first, first + count)
    episode, step = (time // length)[:, None], (time % length)[:, None]
    achieved = torch.cat([episode, step], dim=1).float()
    outcome = achieved + torch.tensor([0.0, 1.0])
    desired = (-1 - episode).expand(-1, 2).float()
    done = step == length - 1
    under_next = {"achieved_goal": outcome, "desired_goal": desired, "reward": nearness(outcome, desired)[:, None]}
    flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done}
    data = {"achieved_goal": achieved, "desired_goal": desired, "next": under_next | flags}
    return TensorDict(data, batch_size=count).clone()


def make_small_buffer(
    reward: Any = nearness,
    *,
    before: Iterable[Callable[[], Transform]] = (),
    after: Iterable[Callable[[], Transform]] = (),
    size: int = 100,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of ``size`` rows, with HERTransform between the transforms of ``before`` and ``after``."""
    hindsight = make_transform(reward=reward, **({"capacity": size} | options))
    transforms = [*(make() for make in before), hindsight, *(make() for make in after)]
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=Compose(*transforms))


def check_leaves_no_trace(
    bad: Change, error: type[Exception], message: str, *, good_before: int = 0, **options: Any
) -> None:
    """Check that a bad write is refused, and that later writes and samples are unaffected.

    ``bad`` changes the next good write, after ``good_before`` of three good ones. Options are those of
    `make_small_buffer`.
    """
    with mock.patch("secrets.randbelow", return_value=0):  # the same episode ids in both tables
        rb, twin = make_small_buffer(**options), make_small_buffer(**options)
        good = [transitions(first) for first in (0, 10, 20)]  # an episode ends within the last
        for number, chunk in enumerate(good):
            if number == good_before:
                spoiled = bad(chunk.clone())
                write = rb.extend if spoiled.ndim else rb.add
                check_refused(rb, lambda: write(spoiled), error, message)  # noqa: B023
            for each in (rb, twin):
                each.extend(chunk.clone())
    assert same(state_of(rb), state_of(twin))
    sample = seeded_sample(rb, 50)
    assert same(sample, seeded_sample(twin, 50))
    assert sample["hindsight", "relabelled"].any()


# Changes of a write


def without(*keys: NestedKey) -> Change:
    """Return a change that removes some entries."""
    return lambda data: data.exclude(*keys)


def changed(change: Callable[[Tensor], Any], *keys: NestedKey) -> Change:
    """Return a change of the entries under some keys."""
    return lambda data: data.update({key: change(data.get(key)) for key in keys})


def with_nan(row: int, key: NestedKey = NEXT_ACHIEVED) -> Change:
    """Return a change that puts NaN into a goal."""
    place = (torch.tensor(row), torch.tensor(1))
    return changed(lambda goals: goals.index_put(place, torch.full_like(goals[0, 0], torch.nan)), key)


def both(first: Change, second: Change) -> Change:
    """Return a combination of two changes."""
    return lambda data: second(first(data))


def wider(goals: Tensor) -> Tensor:
    """Return goals with one more component, ``[n, 3]``."""
    return torch.nn.functional.pad(goals, (0, 1))


class VectorizedInProcess(GymEnv):
    """GymEnv(..., num_envs=n) without processes. Like the original, it loses the last steps of episodes."""

    def _async_env(self, makers: Any) -> Any:
        return gymnasium.vector.SyncVectorEnv(makers)
