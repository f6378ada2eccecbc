"""Data sets to adopt, and buffers over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage

from support.factories import make_transform
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import Goals, World
from torchrl_her import GoalReward, HERTransform

GOALS = Goals()


def record(
    moves: Sequence[Sequence[str]], layout: str = "flat", writes: int = 1, *, ids: bool = True, goals: Goals = GOALS
) -> tuple[TensorDictBase, Recorded]:
    """Return a data set ``[transitions]``, and a record of it in which all episodes have ended.

    In several ``writes``, each with a part of the moves of each environment, the environments alternate. A test
    replaces the buffer of the record by one over the adopted data set.
    """
    rb = ReplayBuffer(storage=LazyTensorStorage(sum(map(len, moves))))
    recorded = Recorded(rb, Oracle({"final": 1.0}, 10**6), World(len(moves), goals), ids)
    steps = len(moves[0]) // writes
    for number in range(writes):
        last = None if number == writes - 1 else (number + 1) * steps
        recorded.play([each[number * steps : last] for each in moves], layout)
    recorded.oracle.flush()
    return rb[:].clone().clear_device_(), recorded


def adopting_transform(recorded: Recorded, **options: Any) -> Any:
    """Return a HERTransform for a recorded data set, whose oracle expects the goal of the last step."""
    goals = recorded.world.goals
    reward = GoalReward(goals.reward, terminated_fn=goals.reached)
    defaults: dict[str, Any] = {
        "reward": reward,
        "strategy": "final",
        "her_ratio": 1.0,
        "capacity": len(recorded.stored),
    }
    return make_transform(**defaults | options)


def adopting_buffer(data: TensorDictBase, transform: HERTransform, **options: Any) -> ReplayBuffer:
    """Return a buffer over the memory of a data set ``[*batch]``, which its transform has adopted."""
    storage = TensorStorage(transform.adopt(data).reshape(-1))
    return TensorDictReplayBuffer(storage=storage, transform=transform, **({"batch_size": 64} | options))


def save_ogbench(path: Path, lengths: list[int], **more: Any) -> dict[str, Any]:
    """Save a file in OGBench's layout, with trajectories of ``lengths`` states, and return its arrays."""
    rng, count = np.random.default_rng(0), sum(lengths)
    arrays: dict[str, Any] = {
        "observations": rng.normal(size=(count, 4)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (count, 2)).astype(np.float32),
        "terminals": np.zeros(count, np.float32),
        "qpos": rng.normal(size=(count, 3)),
    }
    arrays["terminals"][np.cumsum(lengths, dtype=int) - 1] = 1
    arrays |= more
    np.savez(path, **arrays)
    return arrays


def bytes_of(folder: Path) -> dict[Path, bytes | None]:
    """Return the contents of all files of a folder, and None for its folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def entries_of(data: TensorDictBase) -> dict[Any, torch.Tensor]:
    """Return the entries of transitions by key."""
    return dict(data.items(include_nested=True, leaves_only=True))
