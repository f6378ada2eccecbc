"""Compares ways to sample and relabel transitions on FetchPush, where the object moves in few episodes at first.

The four ways are: sample all episodes equally often, sample episodes with movement more often (`MovementPriority`),
relabel only episodes with movement, or both. The other settings are those of ``ddpg.py +task=fetch_push average=0
exploration.final=1``::

    python benchmarks/movement.py
    python benchmarks/movement.py --ways filter --seeds 20
    python benchmarks/movement.py --results docs/reference/results/movement.csv

A run that was interrupted continues from its last checkpoint; delete its folder if it has none. Several processes can
train different seeds into one output folder. The table, the picture and ``results.csv`` contain all finished runs in
it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from runs import Groups, at, make_parser, markdown, seeds_of, show, train, train_or_read
from tensordict import TensorDictBase

from torchrl_her import MovementPriority
from torchrl_her.episodes.stamps import STAMP

WAYS = {"neither": (0.0, False), "priority": (1.0, False), "filter": (0.0, True), "both": (1.0, True)}
LEAST = 0.1  # share of `far`, 0.1 m: an episode has movement if the path of the object is 1 cm or longer
NEVER = 2**40  # a step that no episode has


class MovementFilter(MovementPriority):
    """Relabels only episodes with movement. `report` counts the transitions of all other episodes as running."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change the steps of sampled transitions of episodes without movement, so that they are not relabelled."""
        episode, step = tensordict[STAMP].unbind(-1)
        step = torch.where(tensordict["movement"] < self.lowest + LEAST, NEVER, step)
        return tensordict.set(STAMP, torch.stack([episode, step], -1))


def train_way(way: str, seed: int, folder: Path, steps: int) -> None:
    """Train, or continue a run."""
    alpha, filters = WAYS[way]
    settings = ["average=0", "exploration.final=1", f"seed={seed}", f"total_steps={steps}", f"buffer.alpha={alpha}"]
    with patch("common.MovementPriority", MovementFilter if filters else MovementPriority):
        train("ddpg", ["+task=fetch_push", *settings], folder)


def table(groups: Groups, columns: list[int]) -> str:
    """Return the success rates at some steps and the last returns, medians and ranges over the seeds."""
    rows = [["success at", *(f"{step:,} steps" for step in columns), "return", "seeds"]]
    for way, runs in groups.items():
        success = [at(runs, "success", step) for step in columns]
        rows.append([way, *success, at(runs, "return", columns[-1], digits=1), seeds_of(runs)])
    return markdown(rows)


def main() -> None:
    parser = make_parser("Ways to sample and relabel transitions on FetchPush.", "ways", WAYS, "movement", [20, 21, 22])
    parser.add_argument("--columns", type=int, nargs="+", default=[100_000, 140_000, 180_000, 240_000], help="steps")
    arguments = parser.parse_args()
    steps = arguments.columns[-1]
    groups = train_or_read(arguments, arguments.ways, partial(train_way, steps=steps), dict.fromkeys(WAYS, steps))
    show(table(groups, arguments.columns), {"": groups}, arguments.picture, "FetchPush, DDPG")


if __name__ == "__main__":
    main()
