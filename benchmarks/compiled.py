"""Sampling with ``her.compile()``, relative to sampling without it.

For each storage, a buffer with and a buffer without ``compile()`` are sampled in turns. The table shows median times of
`sample(256)` in µs and, in parentheses, the median of the ratios within a turn. "warm" is a call after four others, and
"cold" a call after the processor's caches were evicted, as after an update. Runs on one thread. With both storages, two
compiled transforms are in one process::

    python benchmarks/compiled.py --storages LazyTensorStorage
    python benchmarks/compiled.py --storages PackedStorage
    python benchmarks/compiled.py

To include the compilation of kernels, set ``TORCHINDUCTOR_CACHE_DIR`` to an empty folder.
"""

import argparse
import os
import random
import time
from collections.abc import Callable

import numpy as np
import torch
from contenders.buffers_of_torchrl import PackedTransform, Transform
from measuring import evict_caches, set_up
from report import print_table
from tqdm import tqdm

STORAGES = {kind.storage.__name__: kind for kind in (Transform, PackedTransform)}


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampling with and without her.compile().")
    parser.add_argument("--storages", nargs="+", choices=STORAGES, default=list(STORAGES))
    parser.add_argument("--stored", type=int, default=100_000, help="transitions in each buffer")
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    set_up()
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    buffers = []
    for name in arguments.storages:
        buffers += [STORAGES[name](arguments.stored) for _ in range(2)]
        for each in buffers[-2:]:
            each.fill()
            each.sample()
        buffers[-1].buffer.transform[0].compile()
        print(f"{name}: compilation, in the first sample, took {microseconds(buffers[-1].sample) / 1e6:.1f} s")
    times = np.empty((arguments.rounds, len(buffers), 2))  # warm, cold
    for turn in tqdm(times, desc="sampling", unit="round"):
        for index in random.sample(range(len(buffers)), len(buffers)):
            sample = buffers[index].sample
            turn[index, 0] = [microseconds(sample) for _ in range(5)][-1]
            evict_caches()
            turn[index, 1] = microseconds(sample)
    medians, ratios = np.median(times, 0), np.median(times / times[:, ::2].repeat(2, 1), 0)
    rows = [f"`{name}`{compiled}" for name in arguments.storages for compiled in ("", ", compiled")]
    cells = [[f"{m:.0f} ({r:.2f})" for m, r in zip(*each, strict=True)] for each in zip(medians, ratios, strict=True)]
    print_table("`sample(256)`", ["warm", "cold"], zip(rows, cells, strict=True))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
