"""Trains with the training scripts, and writes and reads the evaluations of groups of runs."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from scripts import load

from compare import Run, curves, find_runs, median_and_range  # isort: skip (`scripts` finds it)
from plots import draw_comparison  # isort: skip
from run import saved_text  # isort: skip

Groups = dict[str, list[Run]]
METRICS = "success", "return", "seconds"


def make_parser(
    description: str, what: str, groups: Iterable[str], name: str, seeds: list[int]
) -> argparse.ArgumentParser:
    """Make a parser of the arguments of `train_or_read`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(f"--{what}", nargs="+", choices=groups, default=list(groups))
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument("--results", type=Path, help="do not train: show the runs in this CSV file")
    parser.add_argument("--output", type=Path, default=Path("outputs", name))
    parser.add_argument("--picture", type=Path, help="(default: results.png in the output folder)")
    return parser


def train_or_read(
    arguments: argparse.Namespace, groups: list[str], train_group: Callable[[str, int, Path], None],
    steps: dict[str, int],
) -> Groups:  # fmt: skip
    """Train a run for each group and seed, and return all finished runs in the output folder, or read ``--results``."""
    arguments.picture = arguments.picture or arguments.output / "results.png"
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    if arguments.results:
        return read(arguments.results)
    for seed in arguments.seeds:
        for group in groups:
            train_group(group, seed, arguments.output / group / str(seed))
    found = finished_runs(arguments.output, steps)
    write(found, arguments.output / "results.csv")
    return found


def train(name: str, overrides: list[str], folder: Path) -> None:
    """Train with a script, or continue a run that was interrupted."""
    script, config = load(name, overrides)
    if checkpoints := [path.name for path in folder.glob("checkpoints/checkpoint-*")]:
        if (folder / "config.yaml").read_text() != saved_text(config):
            raise SystemExit(f"The run in {folder}/ has other settings: delete it, or choose another --output.")
        if f"checkpoint-{config.total_steps:012}" in checkpoints:
            return  # it is finished
        config.resume = str(folder)
    script.train(config, folder)


def show(table: str, panels: dict[str, Groups], picture: Path, title: str) -> None:
    """Print a table, and draw the success of groups of runs, a panel for each entry."""
    print(table)
    lines = {panel: {name: curves(runs) for name, runs in groups.items()} for panel, groups in panels.items()}
    draw_comparison(lines, picture, title)
    print(f"\nPicture: {picture}")


def finished_runs(folder: Path, steps: dict[str, int]) -> Groups:
    """Return the runs of each group that have reached the group's last step. A group is a subfolder."""
    found = {group: find_runs([folder / group]) for group in steps}
    found = {
        group: [run for run in runs if run.logs["success"][-1, 0] >= steps[group]] for group, runs in found.items()
    }
    return {group: runs for group, runs in found.items() if runs}


def write(groups: Groups, path: Path) -> None:
    """Write all evaluations of all runs."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["group", "seed", "steps", *METRICS])
        for group, runs in groups.items():
            for run in runs:
                for step in map(int, run.logs["success"][:, 0]):
                    values = [round(run.at(metric, step), 4) for metric in METRICS]
                    writer.writerow([group, run.config.seed, step, *values])


def read(path: Path) -> Groups:
    """Read a file of evaluations."""
    groups: Groups = {}
    with path.open(newline="") as file:
        for (group, seed), rows in groupby(csv.DictReader(file), lambda row: (row["group"], row["seed"])):
            values = np.array([[float(row[name]) for name in ("steps", *METRICS)] for row in rows])
            logs = {metric: values[:, [0, column]] for column, metric in enumerate(METRICS, 1)}
            groups.setdefault(group, []).append(Run(OmegaConf.create({"seed": int(seed)}), logs))
    return groups


def at(runs: list[Run], metric: str, step: int, digits: int = 2, scale: float = 1.0) -> str:
    """Return the median and range of a metric at a step."""
    return median_and_range([scale * run.at(metric, step) for run in runs], digits)


def seeds_of(runs: list[Run]) -> str:
    """Return the seeds of runs as text."""
    return ", ".join(str(run.config.seed) for run in runs)


def markdown(rows: list[list[str]]) -> str:
    """Return a Markdown table. The first row is its header."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
