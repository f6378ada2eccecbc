"""Compares runs of the training scripts: a table, and a picture of their success against steps or updates.

Runs with equal values of the settings ``--by`` form a group, which is shown as its median and range. The first command
trains the runs, one after the other, and the second one compares them::

    python examples/dqn.py --multirun hydra.sweep.dir=outputs/strategies seed=0,1,2 hindsight.strategy=future,final
    python examples/compare.py outputs/strategies --by hindsight.strategy

The picture is ``comparison.png`` in the first folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import OmegaConf
from training.plots import draw_comparison

METRICS = {
    "success": "evaluation/success", "return": "evaluation/return", "distance": "evaluation/distance",
    "seconds": "train/seconds",
}  # fmt: skip
COLUMNS = {"return": ("return", 1), "distance": ("final distance", 3), "seconds": ("training, s", 0)}  # and digits


class Run(NamedTuple):
    """The settings of a run, and its metrics, ``[logs, 2]`` each: steps and values."""

    config: Any
    logs: dict[str, np.ndarray]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the folder of a run. Offline runs log no returns and distances."""
        paths = {name: folder / "logs" / "csv" / "scalars" / f"{metric}.csv" for name, metric in METRICS.items()}
        logs = {name: np.loadtxt(path, delimiter=",", ndmin=2) for name, path in paths.items() if path.exists()}
        return cls(OmegaConf.load(folder / "config.yaml"), logs)

    def group(self, entries: list[str]) -> str:
        """Return the name of a group: the settings as on the command line."""
        return ", ".join(f"{entry}={OmegaConf.select(self.config, entry)}" for entry in entries)

    def at(self, name: str, step: int) -> float:
        """Return the last value of a metric up to a step, or NaN if there is none."""
        logged = self.logs[name]
        until = logged[logged[:, 0] <= step]
        return float(until[-1, 1]) if len(until) else np.nan


def find_runs(folders: list[Path]) -> list[Run]:
    """Read all runs in folders and their subfolders, except for those without CSV logs."""
    runs = []
    for path in sorted({path.parent for folder in folders for path in folder.rglob("config.yaml")}):
        run = Run.read(path)
        if {"success", "seconds"} <= run.logs.keys():
            runs.append(run)
        else:
            print(f"Left out, without CSV logs of training and evaluation: {path}")
    return runs


def median_and_range(values: list[float]) -> str:
    """Write ``0.97 (0.95 to 1.00)``, or ``0.97`` for a single value."""
    median, lowest, highest = (f"{value:.2f}" for value in (np.median(values), min(values), max(values)))
    return median if len(values) == 1 else f"{median} ({lowest} to {highest})"


def table(groups: dict[str, list[Run]], step: int) -> str:
    """Return a Markdown table of the metrics at a step: medians over runs, and the range of the success."""
    logged = [name for name in COLUMNS if all(name in run.logs for runs in groups.values() for run in runs)]
    titles = ["runs", "success: median (range)", *(COLUMNS[name][0] for name in logged)]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, runs in groups.items():
        success = median_and_range([run.at("success", step) for run in runs])
        medians = [f"{np.median([run.at(each, step) for run in runs]):.{COLUMNS[each][1]}f}" for each in logged]
        lines.append(f"| {' | '.join([name, str(len(runs)), success, *medians])} |")
    return "\n".join(lines)


def curves(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which all runs were evaluated, ``[n]``, and the success there, ``[runs, n]``."""
    logged = [dict(run.logs["success"]) for run in runs]
    steps = sorted(set.intersection(*map(set, logged)))
    return np.array(steps), np.array([[success[step] for step in steps] for success in logged])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders that contain runs, at any depth")
    parser.add_argument("--by", nargs="+", default=["algorithm"], help="settings that define the groups")
    parser.add_argument("--step", type=int, help="step of the table (default: the last that all runs reached)")
    arguments = parser.parse_args()

    runs = find_runs(arguments.folders)
    if not runs:
        raise SystemExit(f"There is no run with CSV logs below {', '.join(map(str, arguments.folders))}.")
    for entry in arguments.by:
        if all(OmegaConf.select(run.config, entry) is None for run in runs):
            settings = [item for run in runs for item in run.config.items() if OmegaConf.is_dict(item[1])]
            near = " or ".join(sorted({f"{key}.{entry}" for key, values in settings if entry in values}))
            raise SystemExit(f"No run has a setting {entry!r}." + (f" Did you mean {near}?" if near else ""))
    last = int(min(run.logs["success"][-1, 0] for run in runs))
    step = last if arguments.step is None else arguments.step
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.group(arguments.by)):
        groups.setdefault(run.group(arguments.by), []).append(run)
    unit = "updates" if "updates" in runs[0].config else "environment steps"
    print(f"At {step:,} {unit}:\n\n{table(groups, step)}")
    picture = arguments.folders[0] / "comparison.png"
    draw_comparison({"": {name: curves(members) for name, members in groups.items()}}, picture, "", unit)
    print(f"\nPicture: {picture}")


if __name__ == "__main__":
    main()
