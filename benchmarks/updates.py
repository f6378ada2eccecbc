"""What recording an update saves: the updates of the training scripts as they are and played back, taking turns.

Prints medians of CPU time in milliseconds, and the CPU time that the recordings took.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDictBase

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from capture import Captured, Update  # noqa: E402

WARM_UP = 20  # updates that are not counted; the recordings are among them


class BothWays:
    """An update that is done twice, as it is and played back, and is timed both times."""

    def __init__(self, update: Update):
        self.ways: dict[str, Update] = {"as it is": update, "played back": Captured(update)}
        self.times: dict[str, list[float]] = {name: [] for name in self.ways}  # ms

    def __call__(self, batch: TensorDictBase, *flags: bool) -> TensorDictBase:
        """Do all that an update can do: that of TD3 with its actor's."""
        for name, update in self.ways.items():
            given = batch.clone()
            began = time.process_time()
            losses = update(given, *(True for _ in flags))
            self.times[name].append(1e3 * (time.process_time() - began))
        return losses


def measure(algorithm: str, updates: int) -> BothWays:
    """Train with a script."""
    script = importlib.import_module(algorithm)
    made: list[BothWays] = []

    def both_ways(_: object, update: Update) -> BothWays:
        made.append(BothWays(update))
        return made[-1]

    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        config = compose(algorithm, overrides=["logger.kinds=[]", "evaluation.episodes=1"])
    steps = config.collector.random_steps + int((updates + WARM_UP) / config.updates_per_step)
    steps -= steps % -config.collector.steps_per_chunk
    config.total_steps = config.evaluation.interval = config.checkpoint.interval = steps
    with tempfile.TemporaryDirectory() as folder, patch.object(script, "speed_up", both_ways):
        script.train(config, Path(folder))
    return made[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Updates of the training scripts, as they are and played back.")
    parser.add_argument("--algorithms", nargs="+", default=["dqn", "ddpg", "td3", "sac"])
    parser.add_argument("--updates", type=int, default=1000)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    lines = ["| ms of CPU time | as it is | played back | recording it |", "|---|---|---|---|"]
    for algorithm in arguments.algorithms:
        times = measure(algorithm, arguments.updates).times
        medians = [f"{np.median(values[WARM_UP:]):.2f}" for values in times.values()]
        recording = max(times["played back"][:WARM_UP])
        lines.append(f"| {algorithm} | {' | '.join(medians)} | {recording:.0f} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
