"""Cost of writing the frames of many environments, as a ratio to the same buffer without hindsight.

    python benchmarks/frames.py

A frame holds one transition of each environment, flattened, with the trajectory ids of a collector. It is written to
both buffers in turn, in shuffled order and on one thread. Episodes have 200 steps and, unless noted, end at different
times. The last row of the first table writes chunks of 160 steps of 8 environments, ordered by time, without trajectory
ids.

The second table compares the steps per second of the environment ``examples/batched_point_reach.py`` in a collector
that writes a frame after each step. The third one is the memory of many running episodes.
"""

import argparse
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from measuring import set_up
from report import Target, print_table, print_targets
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from tqdm import tqdm

from torchrl_her import HERTransform, SparseReward

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from batched_point_reach import BatchedPointReach

STEPS = 200  # of an episode
LIMITS = {1: 1.9, 16: 2.2, 64: 2.5, 256: 3.0, 1024: 3.5, 4096: 4.5}  # of the ratio, by the number of environments
TOGETHER = 3.0  # the limit if all episodes end at the same time
CHUNK, CHUNK_ENVS, CHUNK_LIMIT = 160, 8, 6.0  # µs per transition
LOOPS = {1024: 0.55, 4096: 0.65}  # lower limits of the share of steps per second, by the number of environments


def make_frame(step: torch.Tensor, *, moves: bool, ids: bool) -> TensorDict:
    """Return a transition of each environment, which is at ``step``, ``int64 [envs]``, counted since the start."""
    envs = len(step)
    episode, time_step = step // STEPS, step % STEPS
    number = torch.arange(envs)
    goal = torch.stack([number, episode, time_step if moves else torch.zeros_like(step)], dim=1).float()
    after = goal + torch.tensor([0.0, 0.0, float(moves)])
    desired = torch.full_like(goal, -1.0)
    done = (time_step == STEPS - 1)[:, None]
    transition = TensorDict(
        {
            "observation": torch.randn(envs, 25),
            "achieved_goal": goal,
            "desired_goal": desired,
            "action": torch.randn(envs, 4),
            "next": {
                "observation": torch.randn(envs, 25),
                "achieved_goal": after,
                "desired_goal": desired,
                "reward": torch.full((envs, 1), -1.0),
                "done": done,
                "terminated": torch.zeros_like(done),
                "truncated": done,
            },
        },
        batch_size=envs,
    )
    if ids:
        transition["collector", "traj_ids"] = number + envs * episode
    return transition


def frames(envs: int, *, moves: bool, together: bool) -> Iterator[TensorDict]:
    """Yield the frames of environments without end."""
    step = torch.zeros(envs, dtype=torch.int64) if together else torch.randint(STEPS, (envs,))
    while True:
        yield make_frame(step, moves=moves, ids=True)
        step = step + 1


def chunks() -> Iterator[TensorDict]:
    """Yield chunks of several steps, ordered by time, without trajectory ids."""
    step = torch.randint(STEPS, (CHUNK_ENVS,))
    while True:
        yield torch.cat([make_frame(step + ahead, moves=True, ids=False) for ahead in range(CHUNK)])
        step = step + CHUNK


def measure(writes: Iterator[TensorDict], rounds: int) -> tuple[float, float]:
    """Return the median time of a write without hindsight, in µs, and the median of the ratio with hindsight."""
    size = max(10_000, 20 * len(next(writes)))
    buffers = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=256)
        for transform in (None, HERTransform(SparseReward(0.5), capacity=size))
    ]
    times = np.empty((rounds, 2))
    for number in range(-20, rounds):  # the first writes are not measured
        data = next(writes)
        for place in random.sample(range(2), 2):
            copied = data.clone()
            start = time.perf_counter_ns()
            buffers[place].extend(copied)
            times[number, place] = (time.perf_counter_ns() - start) / 1e3
    return float(np.median(times[:, 0])), float(np.median(times[:, 1] / times[:, 0]))


def measure_loop(envs: int, frames: int) -> tuple[float, float]:
    """Return the steps per second without hindsight, and the median of the share with hindsight."""
    loops = []
    for transform in (None, HERTransform(SparseReward(0.05), capacity=20 * envs)):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(20 * envs), transform=transform, batch_size=256, compilable=False
        )
        collector = Collector(BatchedPointReach(envs), frames_per_batch=envs, total_frames=-1)
        loops.append((buffer, iter(collector)))
    times = np.empty((frames, 2))
    for number in range(-10, frames):
        for place in random.sample(range(2), 2):
            buffer, batches = loops[place]
            start = time.perf_counter_ns()
            buffer.extend(next(batches).reshape(-1))
            times[number, place] = (time.perf_counter_ns() - start) / 1e9
    return envs / float(np.median(times[:, 0])), float(np.median(times[:, 0] / times[:, 1]))


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024


def resident_after(frames: int, envs: int, long: int, hindsight: bool) -> float:
    """Return the memory that frames of running episodes take, and then an episode of ``long`` steps, in MiB."""
    size = frames * envs + long
    transform = HERTransform(SparseReward(0.5), capacity=size) if hindsight else None
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform)
    writes = (make_frame(torch.full((envs,), step), moves=True, ids=True) for step in range(frames))
    begin = resident()
    for data in writes:
        buffer.extend(data)
    if long:
        data = make_frame(torch.arange(long), moves=True, ids=True)
        goals = torch.stack([torch.full((long + 1,), -1.0), torch.zeros(long + 1), torch.arange(long + 1.0)], dim=1)
        data["achieved_goal"], data["next", "achieved_goal"] = goals[:-1], goals[1:]
        data["next", "done"].zero_()
        data["collector", "traj_ids"].fill_(-1)
        buffer.extend(data)
    return resident() - begin


def memory_of_hindsight(*case: int) -> float:
    """Return the memory of hindsight in MiB; see `resident_after`. Each measurement has a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        with_hindsight, without = pool.starmap(resident_after, [(*case, True), (*case, False)], chunksize=1)
    return with_hindsight - without


def main() -> None:
    """Measure, and print a table and the targets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="number of measured writes of each kind")
    rounds = parser.parse_args().rounds
    set_up()
    cases = [(f"{envs:,}", frames(envs, moves=True, together=False), limit) for envs, limit in LIMITS.items()]
    for envs in (1024, 4096):
        still = frames(envs, moves=False, together=False)
        cases.append((f"{envs:,}, with goals that do not move", still, LIMITS[envs]))
    cases.append(("4,096, all ending together", frames(4096, moves=True, together=True), TOGETHER))
    rows, targets = [], []
    for name, writes, limit in tqdm(cases, desc="measuring", unit="case"):
        plain, ratio = measure(writes, rounds)
        rows.append((name, [f"{plain:.0f}", f"{plain * ratio:.0f}", f"{ratio:.2f}"]))
        targets.append(Target(f"{name} environments, ratio", ratio, limit))
    plain, ratio = measure(chunks(), rounds)
    each = CHUNK * CHUNK_ENVS
    rows.append((f"chunk of {each:,} transitions", [f"{plain:.0f}", f"{plain * ratio:.0f}", f"{ratio:.2f}"]))
    targets.append(Target("chunk ordered by time, µs per transition", plain * ratio / each, CHUNK_LIMIT))
    print_table("environments", ("without, µs", "with hindsight, µs", "ratio"), rows)
    rows = []
    for envs, limit in LOOPS.items():
        rate, share = measure_loop(envs, rounds)
        rows.append((f"{envs:,}", [f"{rate:,.0f}", f"{rate * share:,.0f}", f"{share:.2f}"]))
        targets.append(Target(f"{envs:,} environments, share of steps per second", share, limit, at_least=True))
    print_table("environments in a loop", ("steps per second without", "with hindsight", "share"), rows)
    running = memory_of_hindsight(49, 4096, 0)
    short, both = memory_of_hindsight(10, 2048, 0), memory_of_hindsight(10, 2048, 8000)
    targets.append(Target("MiB of hindsight after 49 frames of 4,096 running episodes", running, 40.0))
    targets.append(Target("MiB of an episode of 8,000 steps beside 2,048 short ones", both - short, 16.0))
    print_targets(targets)


if __name__ == "__main__":
    main()
