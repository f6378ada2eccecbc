"""Memory of a buffer of 100,000 transitions while ten million are written, with and without hindsight.

Both buffers get the same transitions, each in its own process: a 25-float observation, 3-float goals and a 4-float
action, from 64 environments with episodes of 60 steps on average. One reset in eight is silent: it carries no done flag
and no new trajectory id. In every 10,000 transitions, 16 more environments write the beginning of an episode that is
never continued, so there are always running episodes. The buffer is sampled after every 10,000 transitions.

Writes `memory.csv` and `memory.png`. Fails if memory still grows after the first million transitions. Linux only.
"""

import argparse
import csv
import multiprocessing
import os
import platform
import re
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from tensordict import TensorDict
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from tqdm import tqdm

from torchrl_her import HERTransform, SparseReward

SIZE = 100_000
ENVS, STEPS = 64, 150  # environments, and steps of each in a chunk
STRAYS, STRAY_STEPS = 16, 25  # environments that stop without a flag, and steps of each in a chunk
CHUNK = ENVS * STEPS + STRAYS * STRAY_STEPS
BUFFERS = {"with hindsight": True, "without": False}
COLOURS = {"with hindsight": "#0072B2", "without": "#000000"}  # blue and black of Okabe and Ito
TOLERANCE = 8.0  # MiB by which the memory of a process varies

Measured = list[tuple[int, float]]  # transitions written, MiB


class Environments:
    """Environments that run side by side; their goals count the steps."""

    def __init__(self, first: int, count: int, rng: np.random.Generator):
        self.numbers = np.arange(first, first + count)[:, None]
        self.rng = rng
        self.counter = np.zeros((count, 1), dtype=np.int64)
        self.episode = np.zeros((count, 1), dtype=np.int64)
        self.trajectory = np.zeros((count, 1), dtype=np.int64)

    def next(self, steps: int) -> TensorDict:
        """Return the next transitions ``[count * steps]``, environment after environment."""
        ends = self.rng.random((len(self.numbers), steps)) < 1 / 60
        flagged = ends & (self.rng.random(ends.shape) < 7 / 8)
        # After the end of an episode, the next transition starts elsewhere.
        counter = self.counter + np.arange(steps) + np.cumsum(ends, axis=1) - ends
        episode = self.episode + np.cumsum(ends, axis=1) - ends
        trajectory = self.trajectory + np.cumsum(flagged, axis=1) - flagged
        self.counter, self.episode, self.trajectory = (
            column[:, -1:] + step[:, -1:]
            for column, step in ((counter, 1 + ends), (episode, ends), (trajectory, flagged))
        )

        def goals(of: np.ndarray) -> torch.Tensor:
            parts = np.stack([np.broadcast_to(self.numbers, of.shape), of // 4096, of % 4096], axis=-1)
            return torch.from_numpy(parts.reshape(-1, 3).astype(np.float32))

        count = ends.size
        desired, done = goals(-1 - episode), torch.from_numpy(flagged.reshape(-1, 1))
        return TensorDict(
            {
                "observation": torch.zeros(count, 25),
                "achieved_goal": goals(counter),
                "desired_goal": desired,
                "action": torch.zeros(count, 4),
                "collector": {"traj_ids": torch.from_numpy((trajectory * 2**20 + self.numbers).reshape(-1))},
                "next": {
                    "observation": torch.zeros(count, 25),
                    "achieved_goal": goals(counter + 1),
                    "desired_goal": desired.clone(),
                    "reward": -torch.ones(count, 1),
                    "done": done,
                    "terminated": torch.zeros_like(done),
                    "truncated": done.clone(),
                },
            },
            [count],
        )


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024


def measure(name: str, transitions: int) -> tuple[Measured, float]:
    """Write and sample. Return the memory over time, and the relabelled share of sampled transitions."""
    torch.set_num_threads(1)
    torchrl_logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", message=".*longer in the goal table")
    libraries = resident()
    transform = HERTransform(SparseReward(0.05), capacity=SIZE) if BUFFERS[name] else None
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), transform=transform, batch_size=256)
    rng = np.random.default_rng(1)
    environments = Environments(0, ENVS, rng)
    measured, relabelled, sampled = [], 0, 0
    for chunk in tqdm(range(1, transitions // CHUNK + 1), desc=name, unit_scale=CHUNK, unit="transition"):
        strays = Environments(ENVS + chunk * STRAYS, STRAYS, rng)
        rb.extend(torch.cat([environments.next(STEPS), strays.next(STRAY_STEPS)]))
        batch = rb.sample()
        sampled += len(batch)
        if transform is not None:
            relabelled += int(batch["hindsight", "relabelled"].sum())
        measured.append((chunk * CHUNK, resident() - libraries))
    assert rb.write_count == transitions
    return measured, relabelled / sampled


def at(measured: Measured, millions: float) -> float:
    """Return the memory at a time: the median over a tenth of a million transitions."""
    near = [mib for count, mib in measured if abs(count / 1e6 - millions) <= 0.05]
    return float(np.median(near))


def growth(measured: Measured) -> float:
    """Return the growth of memory from the first million to the end, in MiB."""
    return at(measured, measured[-1][0] / 1e6) - at(measured, 1.0)


def draw(results: dict[str, Measured], path: Path) -> None:
    figure, panel = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for name, measured in results.items():
        counts, mib = np.array(measured).T
        panel.plot(counts / 1e6, mib, color=COLOURS[name], label=name)
    panel.set(xlabel="transitions written, millions", ylabel="memory beyond the libraries, MiB", ylim=(0, None))
    panel.set_title(f"A buffer of {SIZE:,} transitions")
    panel.grid(axis="y", alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Memory of a buffer of 100,000 transitions while many more are written."
    )
    parser.add_argument("--millions", type=int, default=10, help="transitions to write, in millions")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    arguments = parser.parse_args()
    if arguments.millions < 2:
        parser.error("--millions must be at least 2, because the first million is the warm-up")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    packages = "torch", "torchrl", "tensordict", "numpy"
    print(", ".join(f"{package} {version(package)}" for package in packages))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, chunks of {CHUNK:,}")
    results, shares, begin = {}, {}, time.monotonic()
    for name in BUFFERS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name], shares[name] = pool.apply(measure, (name, arguments.millions * 1_000_000))

    arguments.output.mkdir(parents=True, exist_ok=True)
    with open(arguments.output / "memory.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("buffer", "transitions", "mib"))
        writer.writerows((name, count, round(mib, 2)) for name in results for count, mib in results[name])
    draw(results, arguments.output / "memory.png")

    print("\nResident memory in MiB without the imported libraries, by millions of transitions written")
    print(" " * 16 + "".join(f"{millions:>8}" for millions in range(1, arguments.millions + 1)))
    for name, measured in results.items():
        cells = "".join(f"{at(measured, millions):>8.1f}" for millions in range(1, arguments.millions + 1))
        print(f"{name:<16}{cells}   growth {growth(measured):+.1f}, {shares[name]:.3f} relabelled")
    print(f"{time.monotonic() - begin:.0f} s")
    if failures := [name for name, measured in results.items() if growth(measured) > TOLERANCE]:
        sys.exit(f"After the first million, memory grew by more than {TOLERANCE} MiB: {', '.join(failures)}")


if __name__ == "__main__":
    main()
