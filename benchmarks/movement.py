"""Compares ways to sample and relabel transitions on FetchPush, where the object moves in few episodes at first.

The four ways are: sample all episodes equally often, sample episodes with movement more often (`MovementPriority`),
relabel only episodes with movement, or both. The other settings are those of ``ddpg.py +task=fetch_push``. A run that
was interrupted continues from its last checkpoint. Several processes can train different seeds into one output folder.
The table contains all finished runs in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest.mock import patch

import torch
from scripts import load
from tensordict import TensorDictBase

from compare import Run, find_runs, median_and_range  # isort: skip (`scripts` finds it)
from torchrl_her import MovementPriority
from torchrl_her.episodes.stamps import STAMP

WAYS = {"neither": (0.0, False), "priority": (1.0, False), "filter": (0.0, True), "both": (1.0, True)}
LEAST = 0.1  # share of `far`, 0.1 m: an episode has movement if the path of the object is 1 cm or longer
NEVER = 2**40  # a step that no episode has


class MovementFilter(MovementPriority):
    """Keeps the goals of episodes without movement. The transform's report counts their transitions as running."""

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


def table(folder: Path, columns: list[int]) -> str:
    """Return the success rates at some steps, medians and ranges over the seeds."""
    lines = [["success at", *(f"{step:,} steps" for step in columns), "seeds"], ["---"] * (len(columns) + 2)]
    for way in WAYS:
        runs = find_runs([folder / way]) if (folder / way).exists() else []
        finished: list[Run] = [run for run in runs if run.logs["success"][-1, 0] >= columns[-1]]
        if finished:
            values = [median_and_range([run.at("success", step) for run in finished]) for step in columns]
            lines.append([way, *values, ", ".join(str(run.config.seed) for run in finished)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ways to sample and relabel transitions on FetchPush.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--columns", type=int, nargs="+", default=[100_000, 140_000, 180_000, 240_000], help="steps")
    parser.add_argument("--output", type=Path, default=Path("outputs/movement"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    for seed in arguments.seeds:
        for way in arguments.ways:
            train(way, seed, arguments.columns[-1], arguments.output / way / str(seed))
    print(table(arguments.output, arguments.columns))


if __name__ == "__main__":
    main()
