"""Functions of ``gpu.py``: timing on a device, CUDA graphs, detection of synchronization, and CSV files.

On a CPU, the same code runs without CUDA graphs and detects nothing.
"""

from __future__ import annotations

import contextlib
import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

REPEATS = 5  # of each measurement; the median is reported


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Return the median time of a call, in seconds, from about ``budget`` seconds of calls in `REPEATS` groups.

    The calls of a group do not wait for the device in between, as in training.
    """
    call()
    once = _seconds(call, 1, device)
    calls = min(max(int(budget / REPEATS / once), 1), 2000)
    return statistics.median(_seconds(call, calls, device) for _ in range(REPEATS))


def _seconds(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / calls


class Captured:
    """A function without arguments, captured in one CUDA graph. On a CPU, calling it calls the function.

    The function must read and write tensors that stay in place. Python numbers are constants of the graph:
    ``rb.sample()`` keeps drawing from the rows that were filled when it was captured.

    Args:
        function (Callable): the function.
        device (torch.device): the device of its tensors.
        warm_up (int): the number of calls before the capture. The first calls can allocate memory, such as the state
            of optimizers. The capture itself executes nothing.

    Attributes:
        calls (int): the number of calls before the capture; 0 on a CPU.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, warm_up: int = 3):
        self._run = function
        self.calls = 0
        if device.type == "cuda":
            self.calls = warm_up
            self._run = self._capture(function)

    def __call__(self) -> None:
        """Run the function."""
        self._run()

    def _capture(self, function: Callable[[], Any]) -> Callable[[], None]:
        if self.calls:
            stream = torch.cuda.Stream()  # a capture cannot use the default stream, so neither does the warm-up
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(self.calls):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = function()  # kept alive, because the graph owns its memory
        return graph.replay


@contextlib.contextmanager
def no_synchronization(device: torch.device) -> Iterator[None]:
    """Make PyTorch raise an error if the host waits for the device. On a CPU, nothing is checked."""
    if device.type != "cuda":
        yield
        return
    wait_for(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows with the same columns."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
