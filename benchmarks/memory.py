"""Memory of transitions and goals, with and without hindsight.

    python benchmarks/memory.py

Prints the tables of memory in ``docs/reference/results/speed.md``, and the time to adopt a data set.

The last table is the resident memory of a buffer of 100,000 transitions while ten million are written, from 64
environments with episodes of 40 to 80 steps. One reset in eight is silent: it carries no done flag and no new
trajectory id. In every 10,000 transitions, 16 more environments write the beginning of an episode that is never
continued. Fails if memory still grows after the first million transitions. Linux only.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from buffers import EPISODE_STEPS, GOAL, K, hindsight, make_blocks, make_episodes
from frames import make_frame
from measuring import in_new_process, print_table, print_versions, set_up, short, status, timed
from scripts import load
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, Storage, TensorDictReplayBuffer
from torchrl.envs import Compose
from tqdm import tqdm

from torchrl_her import CompactGoals, PackedStorage

SIZE = 100_000
ENVS, STEPS = 64, 150  # environments, and steps of each in a chunk
STRAYS, STRAY_STEPS = 16, 25  # environments that stop without a flag, and steps of each in a chunk
CHUNK = ENVS * STEPS + STRAYS * STRAY_STEPS
TOLERANCE = 8.0  # MiB by which the memory of a process varies
MIB = 2**20
SCRIPTS = {"BitFlipping, 15 bits": "dqn", "PointReach": "ddpg"}
BUFFERS = "with hindsight", "without"

Measured = list[tuple[int, float]]  # transitions written, MiB


def bytes_of(tensors: Any) -> int:
    """Return the bytes of the memory of tensors, shared memory counted once."""
    stores = {store.data_ptr(): store.nbytes() for store in (tensor.untyped_storage() for tensor in tensors)}
    return sum(stores.values())


def stored_bytes(storage: type[Storage], is_compact: bool, size: int = 1_000) -> float:
    """Return the bytes per transition in the storage of a full buffer."""
    transitions = make_episodes(size // EPISODE_STEPS)
    transitions.update(dict.fromkeys(("done", "terminated", "truncated"), torch.zeros(size, 1, dtype=torch.bool)))
    transform = Compose(*[CompactGoals()] * is_compact, hindsight(size))
    buffer = TensorDictReplayBuffer(storage=storage(size), transform=transform)
    buffer.extend(transitions)
    return bytes_of(buffer.storage[:].values(include_nested=True, leaves_only=True)) / size


def table_bytes(size: int = SIZE) -> float:
    """Return the bytes per transition in the goal table."""
    transform = hindsight(size)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform)
    buffer.extend(make_episodes(size // EPISODE_STEPS))
    table = transform._episodes.table
    assert table is not None
    return bytes_of((table.matrix, table.index, table.episodes)) / size


def script_bytes(script: str, when: str, steps: int = 500) -> float:
    """Return the bytes per transition in the storage of a training script, and of its goal in the goal table."""
    rows = K + 1 if when == "writing" else 1
    short = [f"total_steps={steps}", f"buffer.size={steps * rows}", f"evaluation.interval={steps}"]
    short += [f"logger.interval={steps}", f"checkpoint.interval={steps}", "evaluation.episodes=1", "logger.kinds=[]"]
    short += ["collector.random_steps=100", *["+task=plain_ddpg"] * (script == "ddpg")]
    module, config = load(script, [f"hindsight.when={when}", "normalization.enabled=false", *short])
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        stored = module.train(config, Path(folder)).components["buffer"].storage[:]
    goal = stored["achieved_goal"][0]
    return rows * stored.bytes() / len(stored) + (40 + goal.nbytes + -goal.nbytes % 8 if rows == 1 else 0)


def print_bytes() -> None:
    rows = {}
    for storage in (LazyTensorStorage, PackedStorage):
        rows[f"`{storage.__name__}`"] = [f"{stored_bytes(storage, is_compact):.0f}" for is_compact in (False, True)]
    print_table("bytes of a stored transition", ("all entries", "with `CompactGoals`"), rows)
    print(f"\nGoal table: {table_bytes():.1f} bytes per transition, {4 * GOAL} of them for the goal")
    ways = "sampling", "writing"
    rows = {task: [f"{script_bytes(name, way):,.0f}" for way in ways] for task, name in SCRIPTS.items()}
    print_table("bytes of a transition, with its goal", ("`HERTransform`", "`HindsightAugmentation`"), rows)


def resident_after(frames: int, envs: int, long: int, has_hindsight: bool) -> float:
    """Return the MiB after frames of running episodes and an episode of ``long`` steps."""
    set_up()
    size = frames * envs + long
    transform = hindsight(size) if has_hindsight else None
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform)
    env, begin = torch.arange(envs), status("VmRSS")
    for step in range(frames):
        buffer.extend(make_frame(torch.full_like(env, step), env))
    if long:
        buffer.extend(make_frame(torch.arange(long), torch.full((long,), envs), steps=long + 1))
    return (status("VmRSS") - begin) / MIB


def print_running(frames: int = 49, envs: int = 4096, few: int = 10, long: int = 8000) -> None:
    def added(*case: int) -> float:
        return in_new_process(resident_after, *case, True) - in_new_process(resident_after, *case, False)

    rows = {f"{frames} frames of {envs:,} running episodes": [f"{added(frames, envs, 0):.1f}"]}
    both = added(few, envs // 2, long) - added(few, envs // 2, 0)
    rows[f"an episode of {long:,} steps beside {envs // 2:,} short ones"] = [f"{both:.1f}"]
    print_table("hindsight adds", ["MiB"], rows)


def adopt(episodes: int, alternate: bool) -> list[str]:
    """Return the seconds and the resident bytes per transition of adopting a data set.

    With ``alternate``, the transitions of 100 episodes alternate.
    """
    set_up()
    data = make_episodes(1)[0].expand(episodes * EPISODE_STEPS).clone()
    for block, part in zip(make_blocks(len(data)), data.split(1000 * EPISODE_STEPS), strict=True):
        part.update_(block.view(-1, 100, EPISODE_STEPS).transpose(1, 2).reshape(-1) if alternate else block)
    transform, begin = hindsight(len(data)), status("VmRSS")
    microseconds, _data = timed(transform.adopt, data)  # keeps its memory
    return [f"{microseconds / 1e6:.2f}", f"{(status('VmRSS') - begin) / len(data):.0f}"]


def print_adopted(episodes: int = 20_000) -> None:
    cases = {"one episode after another": False, "the steps of 100 episodes alternate": True}
    rows = {name: in_new_process(adopt, episodes, alternate) for name, alternate in cases.items()}
    columns = "seconds", "bytes per transition"
    print_table(f"`adopt`, {short(episodes * EPISODE_STEPS)} transitions", columns, rows)


def make_chunk(number: int) -> TensorDict:
    """Return the next transitions of all environments, and the first ones of 16 that are never continued."""
    env, stray = torch.arange(ENVS), ENVS + number * STRAYS + torch.arange(STRAYS)
    step = torch.cat([(number * STEPS + torch.arange(STEPS)).repeat(ENVS), torch.arange(STRAY_STEPS).repeat(STRAYS)])
    env = torch.cat([env.repeat_interleave(STEPS), stray.repeat_interleave(STRAY_STEPS)])
    return make_frame(step, env, steps=40 + env % 41, silent=8)


def write_many(name: str, transitions: int) -> Measured:
    """Write and sample, and return the memory over time."""
    set_up()
    warnings.filterwarnings("ignore", message=".*longer in the goal table")
    libraries = status("VmRSS")
    transform = hindsight(SIZE) if name == "with hindsight" else None
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), transform=transform, batch_size=256)
    measured = []
    for chunk in tqdm(range(1, transitions // CHUNK + 1), desc=name, unit_scale=CHUNK, unit="transition"):
        buffer.extend(make_chunk(chunk - 1))
        buffer.sample()
        measured.append((chunk * CHUNK, (status("VmRSS") - libraries) / MIB))
    return measured


def at(measured: Measured, millions: float) -> float:
    """Return the memory at a time: the median over a tenth of a million transitions."""
    return float(np.median([mib for count, mib in measured if abs(count / 1e6 - millions) <= 0.05]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=10, help="transitions to write, in millions, at least 2")
    arguments = parser.parse_args()
    set_up()
    print_versions()
    print_bytes()
    print_running()
    print_adopted()
    found = {name: in_new_process(write_many, name, arguments.millions * 1_000_000) for name in BUFFERS}
    columns = range(1, arguments.millions + 1)
    rows = {name: [f"{at(measured, each):.1f}" for each in columns] for name, measured in found.items()}
    print_table("MiB after", (f"{each} M" for each in columns), rows)
    growths = {name: at(measured, arguments.millions) - at(measured, 1) for name, measured in found.items()}
    if failures := [f"{name} by {growth:.1f} MiB" for name, growth in growths.items() if growth > TOLERANCE]:
        sys.exit(f"Memory grew after the first million transitions: {', '.join(failures)}")


if __name__ == "__main__":
    main()
