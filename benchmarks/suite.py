"""Trains the tasks of Fetch and panda-gym with the training scripts, several seeds each.

The table shows success and return of 100 episodes without exploration, by the policy at exactly the last step, beside
published returns. FetchSlide takes about two hours of one core for each seed; tasks and seeds can be given::

    python benchmarks/suite.py --tasks FetchPush --seeds 21
    python benchmarks/suite.py --results outputs/suite/results.csv

The tasks of panda-gym need ``pip install -c constraints.txt panda-gym``. A run that was interrupted continues from its
last checkpoint; delete its folder if it has none. Several processes can train different seeds into one output folder.
The table, the picture and ``results.csv`` contain all finished runs in it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from runs import Groups, at, make_parser, markdown, seeds_of, show, train, train_or_read


class Task(NamedTuple):
    """A script and its settings."""

    script: str
    steps: int
    overrides: list[str]
    published: str  # the return and steps of TQC in the benchmark of rl-baselines3-zoo, on the -v1 tasks


OBJECT = "+task=fetch_push"
RARELY = "evaluation.interval=100_000", "checkpoint.interval=100_000"
TASKS = {
    "FetchReach": Task("sac", 2_000, ["env.name=FetchReach-v4"], "-1.7 at 20,000"),
    "FetchPush": Task("ddpg", 240_000, [OBJECT], "-8.8 at 1,000,000"),
    "FetchPickAndPlace": Task("ddpg", 600_000, [OBJECT, "env.name=FetchPickAndPlace-v4", *RARELY], "-9.3 at 1,000,000"),
    "FetchSlide": Task("ddpg", 1_000_000, [OBJECT, "env.name=FetchSlide-v4", *RARELY], "-29.2 at 3,000,000"),
    "PandaReach": Task("sac", 2_000, ["env.name=panda:PandaReachFixed-v3"], "-1.8 at 20,000"),
    "PandaPush": Task(
        "ddpg", 240_000, [OBJECT, "env.name=panda:PandaPushFixed-v3", "gamma=0.95", "tau=0.05"], "-6.4 at 1,000,000"
    ),
    "PandaPickAndPlace": Task(
        "ddpg", 600_000, [OBJECT, "env.name=panda:PandaPickAndPlaceFixed-v3", *RARELY], "-8.0 at 1,000,000"
    ),
}


def table(groups: Groups) -> str:
    """Return the results at the last step of each task: medians and ranges over the seeds."""
    rows = [["task", "steps", "success", "return", "published return", "core-hours", "seeds"]]
    for name, runs in groups.items():
        task = TASKS[name]
        success, total = at(runs, "success", task.steps), at(runs, "return", task.steps, digits=1)
        hours = at(runs, "seconds", task.steps, scale=1 / 3600)
        rows.append([name, f"{task.steps:,}", success, total, task.published, hours, seeds_of(runs)])
    return markdown(rows)


def train_task(name: str, seed: int, folder: Path) -> None:
    """Train, or continue a run."""
    task = TASKS[name]
    train(task.script, [*task.overrides, f"seed={seed}", f"total_steps={task.steps}"], folder)


def main() -> None:
    arguments = make_parser(
        "The training scripts on Fetch and panda-gym.", "tasks", TASKS, "suite", [21, 22, 23]
    ).parse_args()
    if not arguments.results and any("Panda" in name for name in arguments.tasks) and not find_spec("panda_gym"):
        raise SystemExit("The tasks of panda-gym need: pip install -c constraints.txt panda-gym")
    groups = train_or_read(arguments, arguments.tasks, train_task, {name: task.steps for name, task in TASKS.items()})
    show(table(groups), {name: {"": runs} for name, runs in groups.items()}, arguments.picture, "")


if __name__ == "__main__":
    main()
