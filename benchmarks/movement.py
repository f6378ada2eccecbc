"""Compares ways to sample and relabel transitions on FetchPush, where the object moves in few episodes at first.

The four ways are: sample all episodes equally often, sample episodes with movement more often (`MovementPriority`),
relabel only episodes with movement, or both. The other settings are those of ``ddpg.py +task=fetch_push``::

    python benchmarks/movement.py
    python benchmarks/movement.py --ways filter --seeds 20
    python benchmarks/movement.py --results docs/reference/results/movement.csv

A run that was interrupted continues from its last checkpoint; delete its folder if it has none. Several processes can
train different seeds into one output folder. The table, the picture and ``movement.csv`` contain all finished runs in
it.
"""

from __future__ import annotations

import argparse
import csv
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from omegaconf import OmegaConf
from scripts import load
from tensordict import TensorDictBase

from compare import Run, curves, find_runs, median_and_range  # isort: skip (`scripts` finds them)
from plots import draw_comparison  # isort: skip
from torchrl_her import MovementPriority
from torchrl_her.episodes.stamps import STAMP

WAYS = {"neither": (0.0, False), "priority": (1.0, False), "filter": (0.0, True), "both": (1.0, True)}
LEAST = 0.1  # share of `far`, 0.1 m: an episode has movement if the path of the object is 1 cm or longer
NEVER = 2**40  # a step that no episode has


class MovementFilter(MovementPriority):
    """Relabels only episodes with movement. The report counts transitions of other episodes as running."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change the steps of sampled transitions of episodes without movement, so that they are not relabelled."""
        episode, step = tensordict[STAMP].unbind(-1)
        step = torch.where(tensordict["movement"] < self.lowest + LEAST, NEVER, step)
        return tensordict.set(STAMP, torch.stack([episode, step], -1))


def train(way: str, seed: int, steps: int, folder: Path) -> None:
    """Train, or continue a run."""
    alpha, filters = WAYS[way]
    script, config = load("ddpg", ["+task=fetch_push", f"seed={seed}", f"total_steps={steps}", f"buffer.alpha={alpha}"])
    if any(folder.glob("checkpoints/checkpoint-*")):
        config.resume = str(folder)
    with patch("common.MovementPriority", MovementFilter if filters else MovementPriority):
        script.train(config, folder)


def finished_runs(folder: Path, steps: int) -> dict[str, list[Run]]:
    """Return the runs of each way that have reached a step."""
    found = {way: find_runs([folder / way]) for way in WAYS if (folder / way).exists()}
    found = {way: [run for run in runs if run.logs["success"][-1, 0] >= steps] for way, runs in found.items()}
    return {way: runs for way, runs in found.items() if runs}


def write(groups: dict[str, list[Run]], path: Path) -> None:
    """Write the evaluations of all runs."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["way", "seed", "steps", "success", "return"])
        for way, runs in groups.items():
            for run in runs:
                for (step, success), (_, total) in zip(run.logs["success"], run.logs["return"], strict=True):
                    writer.writerow([way, run.config.seed, int(step), round(success, 4), round(total, 4)])


def read(path: Path) -> dict[str, list[Run]]:
    """Return the runs of each way in a file."""
    groups: dict[str, list[Run]] = {}
    with path.open(newline="") as file:
        for (way, seed), rows in groupby(csv.DictReader(file), lambda row: (row["way"], row["seed"])):
            values = np.array([[float(row[name]) for name in ("steps", "success", "return")] for row in rows])
            logs = {"success": values[:, [0, 1]], "return": values[:, [0, 2]]}
            groups.setdefault(way, []).append(Run(OmegaConf.create({"seed": int(seed)}), logs))
    return groups


def table(groups: dict[str, list[Run]], columns: list[int]) -> str:
    """Return the success rates at some steps and the last returns, medians and ranges over the seeds."""
    lines = [["success at", *(f"{step:,} steps" for step in columns), "return", "seeds"], ["---"] * (len(columns) + 3)]
    for way, runs in groups.items():
        values = [median_and_range([run.at("success", step) for run in runs]) for step in columns]
        returns = median_and_range([run.at("return", columns[-1]) for run in runs], digits=1)
        lines.append([way, *values, returns, ", ".join(str(run.config.seed) for run in runs)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ways to sample and relabel transitions on FetchPush.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--columns", type=int, nargs="+", default=[100_000, 140_000, 180_000, 240_000], help="steps")
    parser.add_argument("--results", type=Path, help="do not train: show the runs in this movement.csv")
    parser.add_argument("--output", type=Path, default=Path("outputs/movement"))
    parser.add_argument("--picture", type=Path, help="(default: movement.png in the output folder)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.results:
        groups = read(arguments.results)
    else:
        for seed in arguments.seeds:
            for way in arguments.ways:
                train(way, seed, arguments.columns[-1], arguments.output / way / str(seed))
        groups = finished_runs(arguments.output, arguments.columns[-1])
        write(groups, arguments.output / "movement.csv")
    print(table(groups, arguments.columns))
    picture = arguments.picture or arguments.output / "movement.png"
    draw_comparison({"": {way: curves(runs) for way, runs in groups.items()}}, picture, "FetchPush, DDPG")
    print(f"\nPicture: {picture}")


if __name__ == "__main__":
    main()
