"""Transforms and buffers for the tests, and checks of whole buffers that several test files need."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform, Transform

from support.goals import reached, reward_of
from torchrl_her import CompactGoals, GoalReward, HERTransform, HindsightAugmentation

# Transforms and buffers


def make_transform(reward: Any = None, *, n_steps: int = 1, gamma: float = 0.9, **options: Any) -> Any:
    """Return a HERTransform, after a MultiStepTransform if there are several ``n_steps``.

    Options are arguments of HERTransform; ``compact=True`` places CompactGoals before it. By default, the reward is
    `support.goals.reward_of`, and reaching a new goal terminates.
    """
    before: list[Transform] = [MultiStepTransform(n_steps, gamma)] if n_steps > 1 else []
    if options.pop("compact", False):
        before.insert(0, CompactGoals())
    hindsight = HERTransform(reward or GoalReward(reward_of, terminated_fn=reached), **options)
    return Compose(*before, hindsight) if before else hindsight


def make_augmentation(reward: Any = None, **options: Any) -> HindsightAugmentation:
    """Return a HindsightAugmentation, by default with `support.goals.reward_of`."""
    return HindsightAugmentation(reward or GoalReward(reward_of, terminated_fn=reached), **options)


def make_buffer(
    transform: Any,
    *data: TensorDictBase,
    size: int = 1000,
    kind: Any = TensorDictReplayBuffer,
    storage: Any = LazyTensorStorage,
    ndim: int = 1,
    **options: Any,
) -> Any:
    """Return a buffer with a transform and some writes; options are those of the buffer."""
    rb = kind(storage=storage(size, **({"ndim": ndim} if ndim > 1 else {})), transform=transform, **options)
    for written in data:
        rb.extend(written)
    return rb


# Contents


def uids(tensordict: TensorDictBase) -> list[int]:
    """Return the sorted uids of transitions."""
    return sorted(tensordict["uid"].flatten().tolist())


def seeded_sample(rb: ReplayBuffer, *arguments: Any, seed: int = 0) -> Any:
    """Return a sample with seeded draws."""
    torch.manual_seed(seed)
    return rb.sample(*arguments)


def same(one: Any, other: Any) -> bool:
    """Return whether nested states are equal: types, keys, shapes, dtypes and values; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, TensorDictBase):
        if one.batch_size != other.batch_size or set(one.keys(True)) != set(other.keys(True)):
            return False
        return all(same(one.get(key), other.get(key)) for key in one.keys(True, True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# Refused writes


def state_of(rb: ReplayBuffer) -> dict[str, Any]:
    """Return the state of a buffer and its transform, without memory that is not written yet."""
    state = {part: value for part, value in rb.state_dict().items() if part != "_storage"}
    return copy.deepcopy(state | {"size": len(rb), "stored": rb.storage[:] if len(rb) else None})


def check_refused(
    rb: ReplayBuffer,
    action: Callable[[], Any],
    error: type[BaseException] | tuple[type[BaseException], ...],
    message: str | None = None,
) -> None:
    """Check that an action raises an error and changes nothing: storage, writer, sampler and transform."""
    before = state_of(rb)
    with pytest.raises(error, match=message):
        action()
    assert same(state_of(rb), before), "a refused action left a trace"


# Copies


def copied_by_state_dict(rb: Any, twin: Any, path: Path) -> Any:
    """Return the twin, with the state dict of the buffer."""
    twin.load_state_dict(rb.state_dict())
    return twin


def copied_by_dumps(rb: Any, twin: Any, path: Path) -> Any:
    """Return the twin, loaded from a checkpoint of the buffer."""
    rb.dumps(path / "rb")
    twin.loads(path / "rb")
    return twin


# Functions of a buffer, an empty twin and a folder, which return a buffer with the state of the first.
WAYS_TO_COPY: dict[str, Callable[[Any, Any, Path], Any]] = {
    "state_dict": copied_by_state_dict,
    "dumps": copied_by_dumps,
    "pickle": lambda rb, twin, path: pickle.loads(pickle.dumps(rb)),
    "deepcopy": lambda rb, twin, path: copy.deepcopy(rb),
}


def start_processes_from_a_server() -> Iterator[None]:
    """A fixture that forks processes from a server with all imports. They inherit as little as with "spawn"."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["support.tape", "torchrl.collectors", "torchrl_her", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the server does not get sys.path itself
        yield
    multiprocessing.set_start_method(before, force=True)


def run_processes(start: str, function: Callable[..., object], *arguments: tuple[Any, ...]) -> None:
    """Run a function in processes at the same time, one for each tuple of arguments, and check that all succeed."""
    context = multiprocessing.get_context(start)
    processes = [context.Process(target=function, args=each) for each in arguments]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def forked(function: Callable[[], object]) -> int:
    """Run a function in a fork of this process, and return the fork's exit status."""
    process = os.fork()
    if process == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1]
