"""Time of an update of the training scripts with each `speedup`, measured in turns.

Prints medians in milliseconds, and the additional time of the first updates: recording with `record`, and compilation
with `compile`. Times are CPU times of this process. `compile` also starts compiler processes, which are not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from scripts import load
from tensordict import TensorDictBase

from common import Function, speed_up  # isort: skip (`scripts` finds it)
from settings import Speedup  # isort: skip

WARM_UP = 20  # first updates, which are not part of the medians


class TakeTurns:
    """Runs each update in several ways, and times it."""

    def __init__(self, update: Function, speedups: list[str]):
        self.ways = {name: speed_up(update, Speedup[name]) for name in speedups}
        self.times: dict[str, list[float]] = {name: [] for name in speedups}  # ms

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:  # noqa: D102
        for name, update in self.ways.items():
            own = batch.clone()  # a loss writes into its batch
            start = time.process_time()
            losses = update(own)
            self.times[name].append(1e3 * (time.process_time() - start))
        return losses


def measure(algorithm: str, updates: int, speedups: list[str]) -> dict[str, list[float]]:
    """Train, and return the times of all updates in milliseconds."""
    made: list[TakeTurns] = []

    def take_turns(update: Function, _: Speedup) -> TakeTurns:
        made.append(TakeTurns(update, speedups))
        return made[-1]

    overrides = ["logger.kinds=[]", "evaluation.episodes=1", "collector.random_steps=0", "updates_per_step=1"]
    script, config = load(algorithm, overrides + ["actor_interval=1"] * (algorithm == "td3"))
    steps = updates + WARM_UP
    steps -= steps % -config.collector.steps_per_chunk  # rounded up
    config.total_steps = config.evaluation.interval = config.logger.interval = config.checkpoint.interval = steps
    with tempfile.TemporaryDirectory() as folder, patch.object(script, "speed_up", take_turns):
        script.train(config, Path(folder))
    return next(turns.times for turns in made if turns.times[speedups[0]])  # TD3's update without the actor never runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of an update of the training scripts.")
    parser.add_argument("--algorithms", nargs="+", default=["dqn", "ddpg", "td3", "sac"])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--compile", action="store_true", help="also measure speedup=compile")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("error", message="speedup=record")  # the update was not recorded
    torch.set_num_threads(1)
    speedups = ["none", "record"] + ["compile"] * arguments.compile
    header = ["ms of CPU time", *speedups, *(f"{name}, once" for name in speedups[1:])]
    lines = [header, ["---"] * len(header)]
    for algorithm in arguments.algorithms:
        times = measure(algorithm, arguments.updates, speedups)
        medians = {name: np.median(values[WARM_UP:]) for name, values in times.items()}
        once = [sum(times[name][:WARM_UP]) - WARM_UP * medians[name] for name in speedups[1:]]
        lines.append([algorithm, *(f"{value:.2f}" for value in medians.values()), *(f"{value:.0f}" for value in once)])
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
