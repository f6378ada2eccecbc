"""Measures calls in turns, and prints the tables."""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl import torchrl_logger
from tqdm import tqdm

Turn = Callable[[Any], Iterator[tuple[str, float]]]
Times = dict[Any, np.ndarray]  # in µs, by round

_scratch = np.zeros(2**25, dtype=np.uint8)


def set_up() -> None:
    """Seed the generators, use one thread, and silence TorchRL's log."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torchrl_logger.setLevel("WARNING")


def print_versions(*packages: str) -> None:
    versions = (f"{package} {version(package)}" for package in ("torch", "torchrl", "tensordict", "numpy", *packages))
    print(f"{', '.join(versions)}, Python {platform.python_version()}, {os.cpu_count()} cores")


def evict_caches() -> None:
    """Write 32 MiB, so that the processor's caches are as cold as after an update."""
    np.add(_scratch, 1, out=_scratch)


def timed(call: Callable[..., Any], *arguments: Any, clock: Callable[[], int] = time.perf_counter_ns) -> Any:
    """Return the time of a call in µs, and its result."""
    start = clock()
    result = call(*arguments)
    return (clock() - start) / 1e3, result


def single(call: Callable[[Any], Any], prepare: Callable[[Any], Any] = lambda data: data) -> Turn:
    """Return a turn that prepares the data, and then times one call."""

    def turn(data: Any) -> Iterator[tuple[str, float]]:
        yield "", timed(call, prepare(data))[0]

    return turn


def take_turns(
    turns: Mapping[Any, Turn], rounds: int, make: Callable[[int], Any] = int, evict: bool = False, unmeasured: int = 0
) -> Times:
    """Give each contender a turn in every round, in shuffled order, and return its times by operation and name.

    A turn yields operations and their times in µs; ``make`` returns the argument of the turns of a round. With few
    contenders, whose turns leave the caches warm, ``evict`` evicts the caches before each turn. The ``unmeasured``
    rounds come first.
    """
    times: dict[Any, list[float]] = {}
    for number in tqdm(range(-unmeasured, rounds), desc="measuring", unit="round"):
        data = make(number)
        for name in random.sample(list(turns), len(turns)):
            if evict:
                evict_caches()
            for operation, microseconds in turns[name](data):
                if number >= 0:
                    times.setdefault((operation, name), []).append(microseconds)
    return {key: np.array(values) for key, values in times.items()}


def ratio(times: np.ndarray, base: np.ndarray) -> float:
    """Return the median of the ratios within a round."""
    return float(np.median(times / base))


def cell(times: np.ndarray, base: np.ndarray, digits: int = 0) -> str:
    """Return the median time and, in parentheses, the ratio to a base."""
    return f"{np.median(times):.{digits}f} ({ratio(times, base):.2f})"


def short(size: int) -> str:
    """Return a size in the form of the tables: 10 k, 1 M."""
    for unit, word in ((10**6, "M"), (1000, "k")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {word}"
    return f"{size:,}"


def print_table(title: str, columns: Iterable[str], rows: Mapping[str, Iterable[str]]) -> None:
    """Print a table in Markdown, with the names of the rows in the first column."""
    lines = [[title, *columns], *([name, *cells] for name, cells in rows.items())]
    texts = [f"| {' | '.join(line)} |" for line in lines]
    print("\n".join(["", texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]), flush=True)


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def status(name: str) -> int:
    """Return an entry of the status of this process, in bytes: ``VmRSS`` is its resident memory. Linux only."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])
