"""Finds the settings with which each library learns a task fastest, for `learning.py --settings "each tuned"`.

The search is the same for both libraries. Candidates are the settings of "equal", settings chosen by hand, and
settings drawn from `SPACE` (except for `OURS_ALONE`, which only one library has). With `--around`, candidates are the
settings in `learners.py` and their neighbours. Each candidate is trained with one seed until its success is 0.95, and
the best ones with two more seeds. The result is the candidate that succeeds with all seeds in the fewest CPU seconds on
average. `learning.py` refuses these seeds, so that it measures with other ones.

Writes `tuning.csv`, with one row per run, and prints the best settings. Copy them to `learners.py`.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from learners import (
    EPISODES,
    EQUAL_SETTINGS,
    INPUTS,
    LIBRARIES,
    OURS,
    SB3,
    TASKS,
    TUNED_SETTINGS,
    TUNING_SEEDS,
    Act,
    Evaluations,
    Settings,
    Task,
    check_steps,
)
from learning import first_success
from torchrl import torchrl_logger
from tqdm import tqdm

SPACE: dict[str, list[Any]] = {
    "hidden": [(64, 64), (128, 128)],
    "batch_size": [128, 256, 512],
    "updates_per_step": [0.5, 1.0],
    "learning_rate": [1e-3, 2e-3],
    "tau": [0.05, 0.1],
    "gamma": [0.9, 0.95],
    "random_steps": [250, 500],
    "noise": [0.2, 0.4],
    "alpha": [0.05, 0.1, 0.2],
    "n_sampled_goal": [4, 8],
    "num_envs": [1, 5],
    "random_actions": [0.0, 0.2],
    "normalize": [False, True],
}
# Changes of the settings of "equal".
BY_HAND: list[dict[str, Any]] = [{}, {"hidden": (64, 64), "learning_rate": 2e-3, "random_actions": 0.2}]
# Changes of the settings in `learners.py`, for --around.
AROUND: list[dict[str, Any]] = [
    {},
    {"updates_per_step": 0.5},
    {"num_envs": 10},
    {"batch_size": 64},
    {"learning_rate": 3e-3},
    {"n_sampled_goal": 8},
    {"gamma": 0.9},
]
OURS_ALONE = {"random_actions"}
UNUSED = {
    "sac": {"noise", "random_actions"},
    "ddpg": {"alpha"},
    "td3": {"alpha"},
}  # settings that an algorithm does not use


class Reached(Exception):
    """Raised to end a run when the success is high enough."""


class UntilSuccess(Evaluations):
    """Evaluations that end the training after ``held`` successful ones in a row."""

    held = 1

    def __call__(self, act: Act) -> float:
        """Return the success rate."""
        success = super().__call__(act)
        if first_success(self.curve, self.held):
            raise Reached
        return success


def make_candidates(task: str, library: str, count: int) -> list[Settings]:
    """Make the candidates of a library. Both get the same ones, except for settings that only one has."""
    chance = random.Random(0)
    drawn = [{name: chance.choice(values) for name, values in SPACE.items()} for _ in range(count)]
    unused = UNUSED[TASKS[task].algorithm] | (OURS_ALONE if library == SB3 else set())
    return [
        replace(
            EQUAL_SETTINGS[task],
            ours=(INPUTS,),
            **{name: value for name, value in changed.items() if name not in unused},
        )
        for changed in [*BY_HAND, *drawn[len(BY_HAND) :]]
    ]


def make_neighbours(task: str, library: str) -> list[Settings]:
    """Make candidates that differ in one setting from the settings in `learners.py`."""
    return [replace(TUNED_SETTINGS[task, library], **changed) for changed in AROUND]


def run(task: Task, library: str, settings: Settings, seed: int, interval: int, episodes: int) -> float:
    """Return the CPU seconds of training until the success, or infinity if it is not reached."""
    torchrl_logger.setLevel("WARNING")
    evaluations = UntilSuccess(task.env, interval, episodes, task.success)
    evaluations.held = task.held
    with open(os.devnull, "w") as silence:
        sys.stdout = sys.stderr = silence
        with suppress(Reached):
            LIBRARIES[library](task, settings, seed, evaluations)
    reached = first_success(evaluations.curve, task.held)
    return math.inf if reached is None else reached["cpu_seconds"]


def search(candidates: list[Settings], finalists: int, measure: Callable[[Settings, int], float]) -> list[float]:
    """Return the mean seconds of each candidate over all seeds, or infinity for candidates that are no finalists.

    ``measure(settings, seed)`` trains and returns the seconds.
    """
    first = [measure(settings, TUNING_SEEDS[0]) for settings in candidates]
    means = [math.inf] * len(candidates)
    for number in sorted(range(len(candidates)), key=first.__getitem__)[:finalists]:
        if math.isfinite(first[number]):
            others = [measure(candidates[number], seed) for seed in TUNING_SEEDS[1:]]
            means[number] = (first[number] + sum(others)) / len(TUNING_SEEDS)
    return means


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find the settings with which each library learns fastest.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[name for name in TASKS if "PointReach" in name])
    parser.add_argument("--libraries", nargs="+", choices=[OURS, SB3], default=[OURS, SB3])
    parser.add_argument("--candidates", type=int, default=12, help="candidates for each library and task")
    parser.add_argument("--around", action="store_true", help="search around the settings in learners.py")
    parser.add_argument("--finalists", type=int, default=4, help="candidates that are trained with all seeds")
    parser.add_argument("--interval", type=int, default=500, help="environment steps between evaluations")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="episodes per evaluation")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    count = len(AROUND) if arguments.around else arguments.candidates
    finalists = min(arguments.finalists, count)
    searches = list(product(arguments.tasks, arguments.libraries))
    with (
        (arguments.output / "tuning.csv").open("w", newline="") as file,
        tqdm(total=len(searches) * (count + finalists * (len(TUNING_SEEDS) - 1)), unit="run") as progress,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as process,
    ):
        table = csv.writer(file)
        table.writerow(["task", "library", "seed", "cpu_seconds", "settings"])

        def measure(task: str, library: str, settings: Settings, seed: int) -> float:
            what = TASKS[task], library, settings, seed, arguments.interval, arguments.episodes
            seconds = process.submit(run, *what).result()
            table.writerow([task, library, seed, f"{seconds:.2f}", asdict(settings)])
            file.flush()
            progress.update()
            return seconds

        for task, library in searches:
            progress.set_postfix_str(f"{task}, {library}")
            around = arguments.around
            candidates = make_neighbours(task, library) if around else make_candidates(task, library, count)
            for settings in candidates:
                check_steps(TASKS[task].steps, arguments.interval, settings)
            means = search(candidates, finalists, partial(measure, task, library))
            seconds, best = min(zip(means, candidates, strict=True), key=lambda pair: pair[0])
            found = f"{seconds:.1f} s with {best}" if math.isfinite(seconds) else "no candidate succeeds with all seeds"
            tqdm.write(f"{task}, {library}: {found}")


if __name__ == "__main__":
    main()
