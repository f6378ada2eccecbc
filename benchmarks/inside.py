"""Parts of ``speed.py``: the cost of strategies and of the checks that warn, and what a call of HERTransform does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from buffers import BUFFERS, EPISODE_STEPS, PAIRS, PLAIN, TorchRL, make_episodes
from measuring import Turn, cell, evict_caches, in_new_process, print_table, set_up, single, take_turns, timed
from torch.profiler import ProfilerActivity, profile, record_function
from torchrl.envs import GymEnv

import torchrl_her as her
import torchrl_her.envs  # registers PointReach

STORED = 100_000
SIZES, WRITES = (256, 4096), (1, 50, 1000)
EPISODES = 400  # of PointReach
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


def checks(rounds: int = 1500) -> None:
    """The checks that warn if hindsight does not work, in CPU time."""
    env = GymEnv("torchrl_her/PointReach-v0")
    env.set_seed(0)
    episodes = [env.rollout(50) for _ in range(EPISODES)]

    def turn(has_checks: bool) -> Turn:
        buffer = BUFFERS[PAIRS["`LazyTensorStorage`"][1]](STORED).buffer
        if not has_checks:
            buffer.transform[0]._relabelling.checks = []
        for episode in episodes:
            buffer.extend(episode.clone())

        def write_and_sample(number: int) -> Iterator[tuple[str, float]]:
            yield "`extend(50)`", cpu_timed(buffer.extend, episodes[number % EPISODES].clone())[0]
            yield "`sample(256)`", cpu_timed(buffer.sample, 256)[0]

        return write_and_sample

    times = take_turns({name: turn(name) for name in (False, True)}, rounds)
    rows = {}
    for operation in ("`extend(50)`", "`sample(256)`"):
        without, with_checks = (np.median(times[operation, name]) for name in (False, True))
        rows[operation] = [f"{without:.0f}", f"{with_checks:.0f}", f"{with_checks / without:.3f}"]
    print_table("CPU time in µs", ("without checks", "with checks", "ratio"), rows)


def where(rounds: int = 300) -> None:
    """Where the time goes: PyTorch's operators, and the Python code between them."""
    rows = {}
    for label, (_, name) in PAIRS.items():
        contender = BUFFERS[name](STORED)
        contender.fill()
        buffer = contender.buffer
        for size in SIZES:
            sizes = iter(lambda size=size: size, None)
            rows[f"{label}: `sample({size})`"] = inside(buffer, "forward", buffer.sample, sizes, rounds)
        for size in WRITES:
            rows[f"{label}: `extend({size})`"] = inside(buffer, "_inv_call", buffer.extend, pieces(size), rounds)
    print_table("where the time goes, µs", ("whole call", "hindsight", "operators", "share of operators"), rows)


def pieces(size: int) -> Iterator[Any]:
    """Yield consecutive transitions, ``[size]`` each."""
    while True:
        yield from (piece.clone() for piece in make_episodes(max(1, size // EPISODE_STEPS)).split(size))


def inside(buffer: Any, method: str, call: Callable[[Any], Any], data: Iterator[Any], rounds: int) -> list[str]:
    """Return the time of a call, the time in a method of the transform, and the operators that the method calls."""
    transform, spent = buffer.transform[0], []
    original = getattr(transform, method)

    def measured(tensordict: Any) -> Any:
        with record_function("hindsight"):
            microseconds, result = timed(original, tensordict)
        spent.append(microseconds)
        return result

    setattr(transform, method, measured)
    turns = {method: single(call)}
    whole = take_turns(turns, rounds, lambda _: next(data), evict=True, unmeasured=20)["", method]
    hindsight = np.median(spent[20:])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        take_turns(turns, rounds, lambda _: next(data), evict=True)
    delattr(transform, method)
    spans = [event for event in profiler.events() if event.name == "hindsight"]
    operators = np.median([len(span.cpu_children) for span in spans])
    share = np.median([1 - span.self_cpu_time_total / span.cpu_time_total for span in spans])
    return [f"{np.median(whole):.0f}", f"{hindsight:.0f}", f"{operators:.0f}", f"{share:.0%}"]


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
