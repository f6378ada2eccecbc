"""Compares rewards of relabelled transitions, sampled from a buffer, with plain functions of a single row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage
from torchrl.envs import EnvBase, GymEnv

import torchrl_her.envs  # noqa: F401  # registers PointReach
from support.factories import make_buffer, make_transform, seeded_sample

POINT_REACH = "torchrl_her/PointReach-v0"


def distance(achieved: Tensor, desired: Tensor) -> Tensor:
    """Return the Euclidean distances ``[batch]`` between goals ``[batch, goal]``."""
    return (achieved - desired).norm(dim=-1)


def nearness(achieved: Tensor, desired: Tensor) -> Tensor:
    """Return the negative distances ``[batch]`` between goals ``[batch, goal]``, a dense reward."""
    return -distance(achieved, desired)


def distance_of_row(row: TensorDictBase) -> float:
    """Return the distance between the outcome and the desired goal of one transition."""
    return math.dist(row["next", "achieved_goal"].tolist(), row["desired_goal"].tolist())


def goals_of(achieved: Tensor, desired: Tensor) -> TensorDict:
    """Return the entries that a `GoalReward` reads, ``[batch]``."""
    return TensorDict({"desired_goal": desired, "next": {"achieved_goal": achieved}}, batch_size=len(desired))


def rollout(env: EnvBase, steps: int = 120, seed: int = 0) -> TensorDictBase:
    """Return transitions ``[steps]`` of a random policy, over several episodes."""
    env.set_seed(seed)
    torch.manual_seed(seed)
    return env.rollout(steps, break_when_any_done=False)


def point_reach() -> TensorDictBase:
    """Return a rollout in PointReach, ``[120]``, that may be modified."""
    return _point_reach().clone()


@functools.cache
def _point_reach() -> TensorDictBase:
    return rollout(GymEnv(POINT_REACH))


def sample_of(
    written: TensorDictBase, reward: Any, count: int = 200, storage: Any = LazyTensorStorage, **options: Any
) -> Any:
    """Return a sample of a buffer with these transitions; its ``"index"`` is the row in ``written``."""
    transform = make_transform(reward=reward, her_ratio=0.6, capacity=1000, **options)
    rb = make_buffer(transform, written.clone(), storage=storage)
    transform.flush()
    return seeded_sample(rb, count)


def check_relabelled(
    reward: Any,
    expected: Callable[[TensorDictBase], float],
    terminated: Callable[[TensorDictBase], bool] | None = None,
    *,
    written: TensorDictBase | None = None,
    **options: Any,
) -> Any:
    """Check that relabelled transitions have the correct reward and flags, and that others are as stored.

    ``expected`` and ``terminated`` are functions of a single transition. Without ``terminated``, flags are as stored.
    """
    written = point_reach() if written is None else written
    batch = sample_of(written, reward, **options)
    changed = {"desired_goal", ("next", "desired_goal"), ("next", "reward")}
    if terminated is not None:
        changed |= {("next", "terminated"), ("next", "done")}
    relabelled = batch["hindsight", "relabelled"][:, 0]
    assert 0 < relabelled.sum() < len(batch)
    stored = written[batch["index"]]
    for key in stored.keys(include_nested=True, leaves_only=True):
        as_stored = ~relabelled if key in changed else slice(None)
        assert torch.equal(batch[key][as_stored], stored[key][as_stored]), key
        assert batch[key].dtype == stored[key].dtype, key
    for row in batch[relabelled].unbind(0):
        after = row["next"]
        assert math.isclose(after["reward"].item(), expected(row), rel_tol=1e-5, abs_tol=1e-6)
        if terminated is not None:
            assert after["terminated"].item() == terminated(row)
            assert after["done"].item() == (terminated(row) or after["truncated"].item())
    return batch
