"""Time of hindsight in PyTorch's operators, and in the Python code between them.

For calls of `sample` and `extend`, the table shows the median times of the whole call and of hindsight in µs, the
number of PyTorch operators that hindsight calls, and their share of its time according to PyTorch's profiler. The
caches are evicted before each call, as after an update. Runs on one thread.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from contenders import OURS, PACKED_OURS
from contenders.buffers_of_torchrl import PackedTransform, Transform
from contenders.transitions import EPISODE_STEPS, make_episodes
from measuring import evict_caches, set_up
from report import print_table
from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

STORED = 100_000
HINDSIGHT = "hindsight"

Case = tuple[str, str, Callable[[], Any]]  # row name, method of HERTransform, call


def cases(name: str, contender: Transform) -> Iterator[Case]:
    """Yield the calls to measure."""
    rng, buffer = np.random.default_rng(0), contender.buffer

    def write_next(size: int) -> Callable[[], Any]:
        episodes = _episodes(contender, rng, size)
        return lambda: buffer.extend(next(episodes))

    for size in (256, 4096):
        yield f"{name}: `sample({size})`", "forward", lambda size=size: buffer.sample(size)
    for size in (1, 50, 1000):
        yield f"{name}: `extend({size})`", "_inv_call", write_next(size)


def _episodes(contender: Transform, rng: np.random.Generator, size: int) -> Iterator[TensorDict]:
    """Yield consecutive transitions, ``[size]`` each."""
    while True:
        yield from contender.prepare(make_episodes(max(1, size // EPISODE_STEPS), rng)).split(size)


def measure(buffer: Any, method: str, call: Callable[[], Any], rounds: int) -> list[str]:
    """Return the cells of a row."""
    hindsight = buffer.transform[0]
    original, inside = getattr(hindsight, method), []

    def timed(tensordict: TensorDict) -> TensorDict:
        start = time.perf_counter()
        with record_function(HINDSIGHT):
            result = original(tensordict)
        inside.append(time.perf_counter() - start)
        return result

    setattr(hindsight, method, timed)
    whole = [_seconds(call) for _ in range(rounds)]
    median = 1e6 * np.median(inside)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(rounds):
            _seconds(call)
    delattr(hindsight, method)
    spans = [event for event in profiler.events() if event.name == HINDSIGHT]
    operators = np.median([len(span.cpu_children) for span in spans])
    share = np.median([1 - span.self_cpu_time_total / span.cpu_time_total for span in spans])
    return [f"{1e6 * np.median(whole):.0f}", f"{median:.0f}", f"{operators:.0f}", f"{share:.0%}"]


def _seconds(call: Callable[[], Any]) -> float:
    evict_caches()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="number of measurements")
    arguments = parser.parse_args()
    set_up()
    rows = []
    for name, contender in ((OURS, Transform(STORED)), (PACKED_OURS, PackedTransform(STORED))):
        contender.fill()
        for label, method, call in tqdm(list(cases(name, contender)), desc=name, unit="call"):
            for _ in range(20):
                call()
            rows.append((label, measure(contender.buffer, method, call, arguments.rounds)))
    columns = ["whole call", "hindsight", "operators", "share of operators"]
    print_table("where the time goes, µs", columns, rows)


if __name__ == "__main__":
    main()
