"""Sampling on a device: a check that it does not synchronize, and its throughput.

Transitions have the same entries as in ``sampling.py``: a 25-float observation, 3-float goals, a 4-float action,
episodes of 50 steps, reward 0 within 0.05 of the goal and -1 elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from gpu_device import Captured, no_synchronization, seconds_per_call
from gpu_learner import Learner
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from tqdm import tqdm

from torchrl_her import Current, Geometric, HERTransform, Mixture, PackedStorage, PastDesired, Random, SparseReward
from torchrl_her.episodes.stamps import STAMP

EPISODE_STEPS = 50
THRESHOLD = 0.05
CHUNK = 10_000  # episodes created and written at a time
STRATEGIES = {
    "future": "future",
    "final": "final",
    "episode": "episode",
    "random": "random",
    "past_desired": PastDesired(),
    "Geometric(0.99)": Geometric(0.99),
    "Mixture": Mixture({Current(): 0.2, Geometric(0.99): 0.5, Random(): 0.3}),
}
STORAGES = {"LazyTensorStorage": LazyTensorStorage, "PackedStorage": PackedStorage}
PRIORITIZED = "LazyTensorStorage, prioritized"
# Errors of TorchRL's PrioritizedSampler if its compiled extension, or the one for CUDA, is missing.
NOT_COMPILED = "is not available", "require a TorchRL CUDA wheel"

Row = dict[str, Any]


class Contender(NamedTuple):
    """A filled buffer to measure."""

    storage: str
    hindsight: bool
    buffer: TensorDictReplayBuffer


def make_transitions(episodes: int, device: torch.device) -> TensorDict:
    """Return whole episodes of random walks, one after the other, ``[episodes * 50]``."""
    steps, options = EPISODE_STEPS, {"device": device}
    observation = torch.randn(episodes, steps + 1, 25, **options)
    achieved = (0.02 * torch.randn(episodes, steps + 1, 3, **options)).cumsum(1)
    desired = (torch.rand(episodes, 1, 3, **options) - 0.5).expand(-1, steps, -1)
    distance = torch.linalg.vector_norm(achieved[:, 1:] - desired, dim=-1, keepdim=True)
    truncated = torch.zeros(episodes, steps, 1, dtype=torch.bool, **options)
    truncated[:, -1] = True
    root = {"observation": observation[:, :-1], "achieved_goal": achieved[:, :-1], "desired_goal": desired}
    following = {"observation": observation[:, 1:], "achieved_goal": achieved[:, 1:], "desired_goal": desired}
    following |= {"reward": (distance <= THRESHOLD).float() - 1, "truncated": truncated, "done": truncated.clone()}
    following["terminated"] = torch.zeros_like(truncated)
    action = 2 * torch.rand(episodes, steps, 4, **options) - 1
    entries = {**root, "action": action, "next": TensorDict(following, [episodes, steps], device=device)}
    return TensorDict(entries, [episodes, steps], device=device).reshape(-1)


def make_buffer(storage: str, size: int, device: torch.device, **transform: Any) -> TensorDictReplayBuffer:
    """Make an empty buffer, with hindsight if arguments of the transform are given."""
    hindsight = HERTransform(SparseReward(THRESHOLD), capacity=size, **transform) if transform else None
    return TensorDictReplayBuffer(storage=STORAGES[storage](size, device=device), transform=hindsight)


def fill(buffer: TensorDictReplayBuffer, size: int, device: torch.device) -> None:
    """Write random episodes."""
    for first in range(0, size // EPISODE_STEPS, CHUNK):
        buffer.extend(make_transitions(min(CHUNK, size // EPISODE_STEPS - first), device))


# Synchronization


def check_synchronization(device: torch.device, samples: int) -> list[Row]:
    """Sample from each storage with each strategy. On a GPU, raise an error if the host waits for it."""
    if device.type == "cuda":
        check_that_synchronization_is_found(device)
    rows = []
    for storage, (name, strategy) in product(STORAGES, STRATEGIES.items()):
        buffer = make_buffer(storage, 2_000, device, strategy=strategy, info=True)
        fill(buffer, 2_000, device)
        buffer.sample(256)  # moves the goal table to the device
        with no_synchronization(device):
            for _ in range(samples):
                buffer.sample(256)
        rows.append({"storage": storage, "strategy": name, "samples": samples, "checked": device.type == "cuda"})
    return rows


def check_that_synchronization_is_found(device: torch.device) -> None:
    """Check that reading a value of the device raises an error while synchronization is forbidden."""
    value = torch.ones((), device=device)
    try:
        with no_synchronization(device):
            value.item()
    except RuntimeError:
        return
    raise RuntimeError('set_sync_debug_mode("error") did not detect .item(), so the check would miss synchronization.')


# Samples per second


def measure_sampling(
    device: torch.device, sizes: Sequence[int], batch_sizes: Sequence[int], budget: float, limit: float
) -> Iterator[Row]:
    """Measure all buffers, and yield a row for each measurement.

    ``budget`` is the time of one measurement in seconds. After ``limit`` seconds, a message says that the remaining
    measurements are skipped.
    """
    deadline = time.monotonic() + limit
    total = len(sizes) * len(STORAGES) * 2 * len(batch_sizes)
    with tqdm(total=total, desc="sampling", unit="batch size") as progress:
        for size in sizes:
            if not has_room(size, device):
                tqdm.write(f"{size:,} transitions are skipped: less than 10 GB of the device are free.")
                continue
            for contender in contenders(size, device):
                learner = Learner(contender.buffer.sample(2))
                progress.set_postfix_str(f"{contender.storage}, {size:,} stored")
                for batch_size in batch_sizes:
                    if time.monotonic() > deadline:
                        tqdm.write(f"Sampling took more than {limit:.0f} s: the remaining measurements are skipped.")
                        return
                    yield from measure_batch_size(contender, learner, batch_size, device, budget)
                    progress.update()


def has_room(size: int, device: torch.device) -> bool:
    """Return whether two buffers and their goal tables fit into the memory of the device."""
    return device.type == "cpu" or size < 10_000_000 or torch.cuda.mem_get_info(device)[0] > 10e9


def contenders(size: int, device: torch.device) -> Iterator[Contender]:
    """Yield buffers with the same transitions, which are written once with hindsight and then copied."""
    first = make_buffer("LazyTensorStorage", size, device, strategy="future")
    fill(first, size, device)
    yield Contender("LazyTensorStorage", True, first)
    hindsight = first.transform[0]
    for storage, has_hindsight in (("PackedStorage", True), ("PackedStorage", False), ("LazyTensorStorage", False)):
        buffer = make_buffer(storage, size, device)
        for begin in range(0, size, CHUNK * EPISODE_STEPS):
            index = torch.arange(begin, min(begin + CHUNK * EPISODE_STEPS, size), device=device)
            rows = first.storage[index]
            buffer.storage.set(index, rows if has_hindsight else rows.exclude(STAMP))
        if has_hindsight:
            buffer.append_transform(hindsight.clone())
        yield Contender(storage, has_hindsight, buffer)


def measure_batch_size(
    contender: Contender, learner: Learner, batch_size: int, device: torch.device, budget: float
) -> Iterator[Row]:
    """Yield the throughput of samples alone and with an update, call by call and in one CUDA graph."""

    def sample() -> TensorDictBase:
        return contender.buffer.sample(batch_size)

    def sample_and_update() -> None:
        learner.update(sample())

    for operation, call in (("sample", sample), ("sample and update", sample_and_update)):
        for mode in ("eager", "graph"):
            seconds = seconds_per_call(call if mode == "eager" else Captured(call, device), device, budget)
            yield make_row(contender, batch_size, operation, mode, seconds, device)


def make_row(
    contender: Contender, batch_size: int, operation: str, mode: str, seconds: float, device: torch.device
) -> Row:
    """Return one row of the table. On a CPU, the mode "graph" calls the function without a graph."""
    return {
        "device": device.type,
        "stored": len(contender.buffer),
        "storage": contender.storage,
        "hindsight": contender.hindsight,
        "batch_size": batch_size,
        "operation": operation,
        "mode": mode,
        "captured": mode == "graph" and device.type == "cuda",
        "milliseconds_per_batch": round(1e3 * seconds, 4),
        "samples_per_second": round(batch_size / seconds),
    }


def measure_prioritized(
    device: torch.device, size: int, batch_sizes: Sequence[int], budget: float
) -> tuple[list[Row], str]:
    """Measure a prioritized buffer call by call. If TorchRL cannot create one, return no rows and the reason."""
    hindsight = HERTransform(SparseReward(THRESHOLD), capacity=size)
    storage = LazyTensorStorage(size, device=device)
    try:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=storage, transform=hindsight, priority_key="td_error"
        )
        fill(buffer, size, device)
    except RuntimeError as error:
        if not any(part in str(error) for part in NOT_COMPILED):
            raise
        return [], str(error).splitlines()[0]

    def sample_and_set_priorities() -> None:
        batch = buffer.sample(batch_size)
        batch.set("td_error", torch.rand(batch_size, device=device))
        buffer.update_tensordict_priority(batch)

    rows = []
    for batch_size in tqdm(batch_sizes, desc="prioritized", unit="batch size"):
        seconds = seconds_per_call(sample_and_set_priorities, device, budget)
        contender = Contender(PRIORITIZED, True, buffer)
        rows.append(make_row(contender, batch_size, "sample and set priorities", "eager", seconds, device))
    return rows, ""
