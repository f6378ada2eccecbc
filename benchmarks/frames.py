"""Parts of ``speed.py``: writing the frames of many environments, and the share of transitions that are relabelled.

A frame holds one transition of each environment, flattened. Episodes have 200 steps and, unless noted, end at different
times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from buffers import as_transitions, hindsight
from measuring import print_table, ratio, single, take_turns
from tensordict import TensorDict
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from batched_point_reach import BatchedPointReach

STEPS = 200  # of an episode
ENVS = 1, 16, 64, 256, 1024, 4096
CHUNK, CHUNK_ENVS = 160, 8  # steps and environments of a write that is ordered by time
LOOPS = 1024, 4096
SHARE_ENVS, SHARE_STEPS = (1, 64, 1024, 4096), (50, 1000)
FRAMES = 100  # that the storage holds; it wraps round twice
MOMENTS = 1, 5, 40, 3 * FRAMES  # frames after which the share is measured
SHARE_DRAWS = 20_480


def make_frame(step: Tensor, env: Tensor, steps: Any = STEPS, silent: int = 0, moves: bool = True) -> TensorDict:
    """Return the transitions of environments ``env`` at ``step``, counted since the start: ``int64 [n]`` each.

    Episodes have ``steps`` steps. If ``silent`` is given, one reset in so many carries no flag and no new id.
    """
    episode, time = step // steps, step % steps
    goal = torch.stack([env, episode, time * moves], dim=1).float()
    end, flagged = time == steps - 1, episode
    if silent:
        end, flagged = end & (episode % silent != silent - 1), episode - episode // silent
    after = goal + torch.tensor([0.0, 0.0, float(moves)])
    return as_transitions(goal, after, torch.full_like(goal, -1.0), end, env + 2**20 * flagged)


def frames_of(envs: int, moves: bool = True, together: bool = False) -> Iterator[TensorDict]:
    """Yield frame after frame of environments whose episodes end at different times or together."""
    env = torch.arange(envs)
    step = torch.zeros_like(env) if together else torch.randint(STEPS, (envs,))
    while True:
        yield make_frame(step, env, moves=moves)
        step = step + 1


def chunks() -> Iterator[TensorDict]:
    """Yield writes of several steps of several environments, ordered by time, without trajectory ids."""
    env = torch.arange(CHUNK_ENVS).repeat(CHUNK)
    step = torch.arange(CHUNK).repeat_interleave(CHUNK_ENVS) + torch.randint(STEPS, (CHUNK_ENVS,)).repeat(CHUNK)
    while True:
        yield make_frame(step, env).exclude("collector")
        step = step + CHUNK


def frames(rounds: int = 300) -> None:
    """Writes of the frames of many environments, and a loop that steps them."""
    cases = {f"{envs:,}": frames_of(envs) for envs in ENVS}
    cases |= {f"{envs:,}, with goals that do not move": frames_of(envs, moves=False) for envs in (1024, 4096)}
    cases["4,096, all episodes ending together"] = frames_of(4096, together=True)
    cases[f"chunk of {CHUNK * CHUNK_ENVS:,} transitions"] = chunks()
    rows = {}
    for name, writes in cases.items():
        size = max(10_000, 20 * len(next(writes)))
        turns = [single(make_buffer(size, each).extend, torch.clone) for each in (False, True)]
        times = take_turns(dict(enumerate(turns)), rounds, lambda _, writes=writes: next(writes), unmeasured=20)
        plain, factor = np.median(times["", 0]), ratio(times["", 1], times["", 0])
        rows[name] = [f"{plain:.0f}", f"{plain * factor:.0f}", f"{factor:.2f}"]
    columns = "no hindsight", "`HERTransform`", "ratio"
    print_table("environments, time of a write in µs", columns, rows)
    print_table("environments in a loop, steps per second", columns, {f"{e:,}": loop(e, rounds) for e in LOOPS})


def make_buffer(size: int, has_hindsight: bool = True) -> TensorDictReplayBuffer:
    transform = hindsight(size) if has_hindsight else None
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform)


def loop(envs: int, rounds: int) -> list[str]:
    """Return the steps per second of a collector that writes a frame after each step, and their ratio."""
    turns = {}
    for has_hindsight in (False, True):
        buffer = make_buffer(20 * envs, has_hindsight)
        batches = iter(Collector(BatchedPointReach(envs), frames_per_batch=envs, total_frames=-1))

        def step(_: int, buffer: Any = buffer, batches: Any = batches) -> None:
            buffer.extend(next(batches).reshape(-1))

        turns[has_hindsight] = single(step)
    times = take_turns(turns, rounds, unmeasured=10)
    rate, share = 1e6 * envs / np.median(times["", False]), ratio(times["", False], times["", True])
    return [f"{rate:,.0f}", f"{rate * share:,.0f}", f"{share:.2f}"]


def share() -> None:
    """The share of relabelled transitions from the first sample on, with storage and table of the same size."""
    rows = {}
    for envs in SHARE_ENVS:
        for steps in SHARE_STEPS:
            buffer, env, measured = make_buffer(FRAMES * envs), torch.arange(envs), []
            step = torch.randint(steps, (envs,))
            for frame in range(1, 1 + MOMENTS[-1]):
                buffer.extend(make_frame(step, env, steps))
                step = step + 1
                if frame in MOMENTS:
                    relabelled = buffer.sample(SHARE_DRAWS)["hindsight", "relabelled"]
                    measured.append(f"{float(relabelled.float().mean()):.3f}")
            rows[f"{envs:,}, episodes of {steps:,} steps"] = measured
    columns = (*(f"{frames} frames" for frames in MOMENTS[:-1]), "wrapped twice")
    print_table("environments; share of relabelled transitions, `her_ratio=0.8`", columns, rows)
