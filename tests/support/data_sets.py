"""Data sets to adopt, and buffers over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer, TensorStorage

from support.factories import make_transform
from support.oracle import Oracle
from support.streams import Stream, chunks, make_tensordict, rows_of
from torchrl_her import HERTransform

NEXT_ACHIEVED, NEXT_DESIRED = ("next", "achieved_goal"), ("next", "desired_goal")
REWARD = ("next", "reward")


def data_of(stream: Stream, ndim: int = 1) -> TensorDictBase:
    """Return all transitions of a stream: ``[N]`` in the order of writing, ``[lanes, T]`` or ``[2, lanes / 2, T]``."""
    writes = list(stream)
    if ndim == 1:
        rows = [row for lanes in writes for part in chunks(lanes, stream.layout) for row in part]
        return make_tensordict(rows, stream.with_ids)
    lanes = [rows_of(parts) for parts in zip(*writes, strict=True)]
    shape = (len(lanes), -1) if ndim == 2 else (2, len(lanes) // 2, -1)
    return make_tensordict(rows_of(lanes), stream.with_ids).reshape(shape)


def oracle_of(stream: Stream) -> Oracle:
    """Return the oracle after all writes, when all episodes have ended. Adopting publishes each of them once."""
    oracle = Oracle(replace(stream, capacity=10**6))
    for lanes in stream:
        for rows in chunks(lanes, stream.layout):
            oracle.write(rows)
    oracle.end_episodes()
    return oracle


def adopting_buffer(data: TensorDictBase, transform: HERTransform, **options: Any) -> ReplayBuffer:
    """Return a buffer over the memory of a data set ``[*batch]``, which its transform has adopted."""
    storage = TensorStorage(transform.adopt(data).reshape(-1))
    return TensorDictReplayBuffer(storage=storage, transform=transform, **({"batch_size": 64} | options))


def copying_buffer(
    data: TensorDictBase, transform: HERTransform, storage: Callable[[int], Any], **options: Any
) -> ReplayBuffer:
    """Return a buffer with a separate storage, to which an adopted data set is copied."""
    memory = storage(data.batch_size.numel())
    rb = TensorDictReplayBuffer(storage=memory, **({"batch_size": 64} | options))
    rb.extend(transform.adopt(data))
    return rb.append_transform(transform)


def make_hindsight(stream: Stream | None = None, **options: Any) -> Any:
    """Return a HERTransform for a stream, or one that relabels all transitions."""
    return make_transform(stream, **({} if stream else {"her_ratio": 1.0}) | options)


# OGBench files


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


def transitions_of(arrays: dict[str, np.ndarray]) -> list[dict[Any, Any]]:
    """Return the transitions in the arrays of a file: (s0, a0, s1), (s1, a1, s2), ... of each trajectory."""
    trajectories: list[list[int]] = [[]]
    for state, terminal in enumerate(arrays["terminals"]):
        trajectories[-1].append(state)
        if terminal:
            trajectories.append([])
    return [
        {
            "observation": arrays["observations"][state].tolist(),
            "action": arrays["actions"][state].tolist(),
            "qpos": arrays["qpos"][state].tolist(),
            ("next", "observation"): arrays["observations"][state + 1].tolist(),
            ("next", "done"): [state + 1 == states[-1]],
            ("next", "truncated"): [state + 1 == states[-1]],
            ("next", "terminated"): [False],
            "trajectory": number,
            "step": step,
        }
        for number, states in enumerate(trajectories)
        for step, state in enumerate(states[:-1])
    ]


def without_goals(data: TensorDictBase) -> TensorDict:
    """Return the transitions without desired goals and rewards."""
    return data.exclude("desired_goal", NEXT_DESIRED, REWARD)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def entries_of(data: TensorDictBase) -> dict[Any, torch.Tensor]:
    """Return the entries of transitions by key."""
    return dict(data.items(include_nested=True, leaves_only=True))
