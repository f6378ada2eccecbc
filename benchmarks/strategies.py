"""Parts of ``speed.py``: samples with each strategy, extra goals and info, and after ``HERTransform.compile()``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from buffers import BUFFERS, PAIRS, PLAIN, TorchRL
from measuring import Turn, cell, evict_caches, in_new_process, print_table, set_up, take_turns, timed

import torchrl_her as her

STORED = 100_000
SIZES = 256, 4096
cpu_timed = partial(timed, clock=time.process_time_ns)

MIXTURE = her.Mixture({her.Current(): 0.2, her.Geometric(0.99): 0.5, her.Random(): 0.3})
TWO = {"actor_goal": her.Future(own=False), "subgoal": her.Subgoal(25)}
SINGLE, OGBENCH = "`Future()`", "OGBench's mixture of `Current()`, `Geometric(0.99)` and `Random()`"
STRATEGIES: dict[str, dict[str, Any]] = {
    SINGLE: {},
    "`Current()`": {"strategy": her.Current()},
    "`Future(own=False)`": {"strategy": her.Future(own=False)},
    "`Geometric(0.99)`": {"strategy": her.Geometric(0.99)},
    "`Final()`": {"strategy": her.Final()},
    "`Episode()`": {"strategy": her.Episode()},
    "`Random()`": {"strategy": her.Random()},
    "`PastDesired()`": {"strategy": her.PastDesired()},
    "`Mixture` of `Future()` and `Final()`": {"strategy": her.Mixture({her.Future(): 0.5, her.Final(): 0.5})},
    OGBENCH: {"strategy": MIXTURE},
    "`Future()` with one extra goal": {"strategy": {"desired_goal": her.Future(), "actor_goal": her.Future(own=False)}},
    "`Future()` with two extra goals, one of them a `Subgoal`": {"strategy": {"desired_goal": her.Future(), **TWO}},
    "`Future()` with `info=True`": {"info": True},
    "`Future()` with `ReachedReward()`": {"reward": her.ReachedReward()},
    "OGBench's mixture with `info=True`": {"strategy": MIXTURE, "info": True},
    "OGBench's mixture with two extra goals": {"strategy": {"desired_goal": MIXTURE, **TWO}},
}


def relabel_all(size: int, **options: Any) -> her.HERTransform:
    """Return a transform that relabels everything, with room for the desired goal of each episode."""
    options = {"reward": her.SparseReward(0.05), "her_ratio": 1.0, "capacity": 2 * size} | options
    return her.HERTransform(**options)


def strategies(rounds: int = 400) -> None:
    """Samples with each strategy, with extra goals and with info, in CPU time."""

    def turn(name: str) -> Turn:
        transform = partial(relabel_all, **STRATEGIES[name]) if name in STRATEGIES else None
        contender = TorchRL(STORED, transform=transform)
        contender.fill()
        assert transform is None or contender.sample()["hindsight", "relabelled"].float().mean() > 0.99
        return lambda _: ((size, cpu_timed(contender.buffer.sample, size)[0]) for size in SIZES)

    names = PLAIN, *STRATEGIES
    times = take_turns({name: turn(name) for name in names}, rounds, unmeasured=2)
    rows = {name: [cell(times[size, name], times[size, SINGLE]) for size in SIZES] for name in names}
    print_table("CPU time in µs", (f"`sample({size})`" for size in SIZES), rows)


def compiled(rounds: int = 1000) -> None:
    """Samples with and without ``her.compile()``, warm and cold, in a process for each storage."""
    rows = {}
    for label, (_, name) in PAIRS.items():
        rows |= in_new_process(measure_compiled, label, name, rounds)
    print_table("`sample(256)`", ("warm", "cold"), rows)


def measure_compiled(label: str, name: str, rounds: int) -> dict[str, list[str]]:
    """Return the rows of one storage: "warm" is a call after four others, "cold" is one after evicting the caches."""
    set_up()

    def turn(is_compiled: bool) -> Turn:
        contender = BUFFERS[name](STORED)
        contender.fill()
        if is_compiled:
            contender.buffer.transform[0].compile()
            print(f"{label}: compilation takes {timed(contender.sample)[0] / 1e6:.1f} s")

        def sample(_: int) -> Iterator[tuple[str, float]]:
            yield "warm", [timed(contender.sample)[0] for _ in range(5)][-1]
            evict_caches()
            yield "cold", timed(contender.sample)[0]

        return sample

    labels = {False: label, True: f"{label}, compiled"}
    times = take_turns({each: turn(each) for each in labels}, rounds)
    return {labels[each]: [cell(times[way, each], times[way, False]) for way in ("warm", "cold")] for each in labels}
