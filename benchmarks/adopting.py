"""A part of ``speed.py``: the time and memory to adopt a data set of a million transitions. Linux only."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from buffers import as_transitions
from measuring import in_new_process, print_table, status, timed
from tensordict import TensorDict

from torchrl_her import HERTransform, ReachedReward, SparseReward

ROWS = 1_000_000
MEMORY = "RssAnon", "VmData"  # touched and reserved
ALTERNATING, BATCHED = "episodes of 50 steps whose ids alternate", "`[20,000, 50]`"
WITHOUT = "without goals and rewards, 1,000 steps"
LENGTHS = {  # steps of an episode
    "episodes of 50 steps, ended by done flags": 50,
    "episodes of 50 steps, ended by trajectory ids": 50,
    "episodes of 1,000 steps": 1000,
    ALTERNATING: 50,
    BATCHED: 50,
    WITHOUT: 1000,
    "episodes of 5 steps": 5,
    "one episode of a million steps": ROWS,
}


def make_data(kind: str) -> TensorDict:
    """Return a data set ``[ROWS]``, or ``[episodes, 50]``."""
    length = min(LENGTHS[kind], ROWS)
    row = torch.arange(ROWS)
    episode, step = row // length, row % length
    if kind == ALTERNATING:
        episode, step = row % (ROWS // length), row // (ROWS // length)
    goal = torch.stack([episode, step, step], dim=1).float()
    after = goal + torch.tensor([0.0, 1.0, 1.0])
    desired = (-1 - episode).float().unsqueeze(1).repeat(1, 3)
    has_ids = "ids" in kind
    data = as_transitions(goal, after, desired, (step == length - 1) & (not has_ids), episode if has_ids else None)
    if kind == WITHOUT:
        data = data.exclude("desired_goal", ("next", "desired_goal"), ("next", "reward"))
    return data.reshape(-1, length) if kind == BATCHED else data


def save_data(kind: str, folder: str) -> None:
    make_data(kind).memmap(folder)


@contextmanager
def peak() -> Iterator[list[int]]:
    """Measure the peak of touched and reserved memory in a block, per transition, beyond the memory at its start."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise free memory would be reused and not be counted
    before, highest, ended = [status(name) for name in MEMORY], [0, 0], threading.Event()

    def watch() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(0.001)
            for i, name in enumerate(MEMORY):
                highest[i] = max(highest[i], round((status(name) - before[i]) / ROWS))

    thread = threading.Thread(target=watch)
    thread.start()
    yield highest
    ended.set()
    thread.join()


def measure(kind: str, folder: str, is_mapped: bool) -> tuple[float, list[int]]:
    """Return the seconds to adopt the data set, and the touched and the reserved bytes per transition."""
    torch.set_num_threads(1)
    reward = ReachedReward() if kind == WITHOUT else SparseReward(0.05)
    data = TensorDict.load_memmap(folder)
    if not is_mapped:
        data = data.clone()
    first, second = (HERTransform(reward, her_ratio=1.0, capacity=ROWS) for _ in range(2))
    first.adopt(data.reshape(-1)[:1000].clone())  # warm-up: imports and first calls
    with peak() as memory:
        microseconds, adopted = timed(second.adopt, data)
    assert adopted.batch_size == data.batch_size
    return microseconds / 1e6, memory


def adopt() -> None:
    """Time and memory to adopt a million transitions."""
    rows = {}
    for kind in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            in_new_process(save_data, kind, folder)
            found = [in_new_process(measure, kind, folder, is_mapped) for is_mapped in (False, True)]
        seconds, memory = zip(*found, strict=True)
        ranges = [f"{min(of)} to {max(of)}" if min(of) < max(of) else str(of[0]) for of in zip(*memory, strict=True)]
        rows[kind] = [*(f"{each:.2f}" for each in seconds), *ranges]
    columns = "in memory, s", "memory-mapped, s", "touched, bytes", "reserved, bytes"
    print_table("data set", columns, rows)
