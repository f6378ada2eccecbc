"""Cost of strategies: `sample(256)` and `sample(4096)` with each, with mixtures, extra goals and `info=True`.

Every contender is a buffer with the transitions of the other benchmarks, and a transform that relabels all of them.
First, all buffers are filled, and 20 batches of each are checked: all transitions are relabelled, and the requested
entries are present. Then each round visits every contender in shuffled order, on one thread. Times are CPU times, and
ratios are medians of the ratios to `Future()` within a round.
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from contenders import TorchRL
from contenders.transitions import THRESHOLD, make_transitions
from measuring import set_up
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from tqdm import tqdm

from torchrl_her import (
    Current,
    Episode,
    Final,
    Future,
    Geometric,
    HERTransform,
    Mixture,
    PastDesired,
    Random,
    ReachedReward,
    SparseReward,
    Subgoal,
)

BATCH_SIZES = 256, 4096
PLAIN, SINGLE, OGBENCH = "no hindsight", "Future()", "OGBench's mixture"
TARGET = 1.3  # ratio of a mixture to a single strategy


def ogbench() -> Mixture:
    """Return the strategy of OGBench's value goals."""
    return Mixture({Current(): 0.2, Geometric(0.99): 0.5, Random(): 0.3})


ACTOR = {"desired_goal": Future(), "actor_goal": Future(own=False)}
BOTH = {**ACTOR, "subgoal": Subgoal(25)}
CONTENDERS: dict[str, Callable[[], dict[str, Any]]] = {
    SINGLE: dict,
    **{
        repr(strategy): lambda strategy=strategy: {"strategy": strategy}
        for strategy in (Current(), Future(own=False), Geometric(0.99), Final(), Episode(), Random(), PastDesired())
    },
    "Mixture of Future and Final": lambda: {"strategy": Mixture({Future(): 0.5, Final(): 0.5})},
    OGBENCH: lambda: {"strategy": ogbench()},
    "Future(), one extra goal": lambda: {"strategy": ACTOR},
    "Future(), two extra goals": lambda: {"strategy": BOTH},
    "Future(), info=True": lambda: {"info": True},
    "Future(), ReachedReward": lambda: {"reward": ReachedReward()},
    "OGBench's mixture, info=True": lambda: {"strategy": ogbench(), "info": True},
    "OGBench's mixture, two extra goals": lambda: {"strategy": {**BOTH, "desired_goal": ogbench()}},
}


def make_buffer(size: int, transform: HERTransform | None, data: list[TensorDict]) -> TensorDictReplayBuffer:
    """Return a full buffer."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform)
    for part in data:
        rb.extend(part.clone())
    return rb


def make_transform(size: int, reward: Any = None, **options: Any) -> HERTransform:
    """Return a transform that relabels everything, with room for the desired goal of each episode."""
    return HERTransform(reward or SparseReward(THRESHOLD), her_ratio=1.0, capacity=2 * size, **options)


def check(batch: TensorDict, options: dict[str, Any]) -> None:
    """Check that a batch is relabelled and has the requested entries."""
    assert batch["hindsight", "relabelled"].float().mean() > 0.999
    goals = options["strategy"] if isinstance(options.get("strategy"), dict) else {}
    expected = {*goals, *[("hindsight", "steps_to_goal")] * options.get("info", False)}
    assert expected <= set(batch.keys(True))


def measure(size: int, rounds: int) -> dict[int, dict[str, np.ndarray]]:
    """Return the CPU times in µs of each batch size and contender, round by round."""
    data = [TorchRL(size).prepare(part) for part in make_transitions(size)]
    buffers = {PLAIN: make_buffer(size, None, data)}
    for name, options in tqdm(CONTENDERS.items(), desc="filling", unit="buffer"):
        buffers[name] = make_buffer(size, make_transform(size, **options()), data)
        for _ in range(20):
            check(buffers[name].sample(256), options())
    times: dict[int, dict[str, list[float]]] = {each: {name: [] for name in buffers} for each in BATCH_SIZES}
    for _ in tqdm(range(rounds), desc="measuring", unit="round"):
        for batch_size in BATCH_SIZES:
            for name in random.sample(list(buffers), len(buffers)):
                start = time.process_time_ns()
                buffers[name].sample(batch_size)
                times[batch_size][name].append((time.process_time_ns() - start) / 1e3)
    return {each: {name: np.array(values) for name, values in of.items()} for each, of in times.items()}


def ratio(times: dict[str, np.ndarray], name: str, other: str = SINGLE) -> float:
    """Return the median of the ratios within a round."""
    return float(np.median(times[name] / times[other]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", type=int, default=100_000, help="transitions stored")
    parser.add_argument("--rounds", type=int, default=1000, help="number of measurements")
    arguments = parser.parse_args()
    set_up()
    times = measure(arguments.size, arguments.rounds)
    header = " | ".join(f"`sample({each})`" for each in BATCH_SIZES)
    print(f"Median CPU time in µs, ratio to {SINGLE}\n\n| {arguments.size:,} stored | {header} |\n|---|---|---|")
    for name in times[BATCH_SIZES[0]]:
        cells = (f"{np.median(times[each][name]):.0f} ({ratio(times[each], name):.2f})" for each in BATCH_SIZES)
        print(f"| {name} | {' | '.join(cells)} |")
    print()
    for each in BATCH_SIZES:
        value = ratio(times[each], OGBENCH)
        reached = "reached" if value <= TARGET else "MISSED"
        print(f"{reached:<8} {value:.2f} (at most {TARGET}): {OGBENCH} to {SINGLE}, sample({each})")


if __name__ == "__main__":
    main()
