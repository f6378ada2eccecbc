"""Learning speed with hindsight: the training scripts in `examples/` and Stable-Baselines3, side by side.

Each run is a separate process on one thread, one after the other. The two libraries take turns within a seed, and the
order alternates, so that a drift of the machine affects both. They are compared in two ways: `equal` uses the same
network, batch size, updates per step, learning rate, gamma, tau, random steps and noise, and `each tuned` uses the best
settings that were found for each library. All settings are in `learners.py`. Both libraries are evaluated on the same
episodes, and evaluations do not count as training time. CPU seconds measure the cost of a run even if other processes
increase its wall time.

Writes `learning.csv` (every evaluation), `learning-summary.csv` and `learning.md` (the table), and a picture.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from learners import (
    EPISODES,
    EQUAL,
    OURS,
    SB3,
    TASKS,
    TUNED,
    TUNED_SETTINGS,
    TUNING_SEEDS,
    Evaluations,
    check_steps,
    learn,
    settings_of,
    smaller,
)
from runs import markdown
from torchrl import torchrl_logger
from tqdm import tqdm

SUCCESS = 0.95
TARGETS = {EQUAL: 1.0, TUNED: 0.5}  # the largest accepted ratio of our CPU time to this success to theirs
COLOURS = {OURS: "#0072B2", SB3: "#D55E00"}  # blue and vermilion of Okabe and Ito

Row = dict[str, Any]
Key = tuple[str, str, str]  # task, way, library

# Runs


def plan(tasks: list[str], ways: list[str], seeds: list[int]) -> list[tuple[str, str, str, int]]:
    """Return the runs in order: task, way, library and seed."""
    runs = []
    for (i, seed), (j, task), (k, way) in product(enumerate(seeds), enumerate(tasks), enumerate(ways)):
        libraries = [OURS, SB3] if (i + j + k) % 2 else [SB3, OURS]
        runs += [(task, way, library, seed) for library in libraries]
    return runs


def run(task: str, way: str, library: str, seed: int, steps: int | None, interval: int, episodes: int) -> Evaluations:
    """Train in this process, and return the evaluations."""
    torchrl_logger.setLevel("WARNING")
    what = smaller(TASKS[task], steps) if steps else TASKS[task]
    with open(os.devnull, "w") as silence:  # only the progress of all runs is shown
        sys.stdout = sys.stderr = silence
        evaluations = learn(library, what, settings_of(way, task, library), seed, interval, episodes)
    evaluations.envs.close()
    del evaluations.envs  # environments cannot be sent to the main process
    return evaluations


def run_all(
    runs: list[tuple[str, str, str, int]], steps: int | None, interval: int, episodes: int, path: Path
) -> tuple[list[Row], list[list[dict[str, np.ndarray]]]]:
    """Return the evaluations of all runs, which are also written to a file, and their starts and goals."""
    rows, starts = [], []
    for task, way, library, seed in (progress := tqdm(runs, unit="run")):
        progress.set_postfix_str(f"{task}, {way}, {library}, seed {seed}")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            done = process.submit(run, task, way, library, seed, steps, interval, episodes).result()
        about = {"task": task, "settings": way, "library": library, "seed": seed}
        rows += [about | point for point in done.curve]
        write(path, rows)
        starts.append(done.starts)
    return rows, starts


# Results


def first_success(curve: list[Row], held: int) -> Row | None:
    """Return the first of ``held`` successful evaluations in a row, or None."""
    good = [row["success"] >= SUCCESS for row in curve]
    for i in range(len(curve) - held + 1):
        if all(good[i : i + held]):
            return curve[i]
    return None


def curves(rows: list[Row]) -> dict[Key, dict[int, list[Row]]]:
    """Return the evaluations by task, settings and library, and then by seed."""
    found: dict[Key, dict[int, list[Row]]] = {}
    for row in rows:
        found.setdefault((row["task"], row["settings"], row["library"]), {}).setdefault(row["seed"], []).append(row)
    return found


def spread(values: list[float], digits: int) -> str:
    """Return median and range; infinity means "not reached"."""
    texts = [
        f"{value:,.{digits}f}" if np.isfinite(value) else "not reached"
        for value in (np.median(values), min(values), max(values))
    ]
    return texts[0] if len(values) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def reached(by_seed: dict[int, list[Row]], held: int, what: str) -> list[float]:
    """Return steps or seconds to the success for each seed, infinity if it was not reached."""
    firsts = [first_success(curve, held) for curve in by_seed.values()]
    return [np.inf if first is None else first[what] for first in firsts]


def ratios(found: dict[Key, dict[int, list[Row]]], task: str, way: str, what: str) -> list[float]:
    """Return the ratio of our time to theirs for each seed. If they fail, theirs is the time of the whole run."""
    ours, theirs = found[task, way, OURS], found[task, way, SB3]
    ends = [curve[-1][what] for curve in theirs.values()]
    held = TASKS[task].held
    return list(np.array(reached(ours, held, what)) / np.minimum(reached(theirs, held, what), ends))


def summarize(rows: list[Row]) -> list[dict[str, str]]:
    """Return the rows of the table."""
    found, table = curves(rows), []
    for (task, way, library), by_seed in found.items():
        last = [curve[-1] for curve in by_seed.values()]
        held = TASKS[task].held
        line = {
            "task": task,
            "settings": way,
            "library": library,
            "success at the end": spread([row["success"] for row in last], 2),
            "steps": f"{last[0]['steps']:,}",
            f"steps to {SUCCESS}": spread(reached(by_seed, held, "steps"), 0),
            f"seconds to {SUCCESS}": spread(reached(by_seed, held, "seconds"), 1),
            f"CPU seconds to {SUCCESS}": spread(reached(by_seed, held, "cpu_seconds"), 1),
            "CPU seconds per 1,000 steps": spread([1e3 * row["cpu_seconds"] / row["steps"] for row in last], 2),
            "ratio of seconds": "",
            "ratio of CPU seconds": "",
        }
        if library == OURS and (task, way, SB3) in found:
            line["ratio of seconds"] = spread(ratios(found, task, way, "seconds"), 2)
            line["ratio of CPU seconds"] = spread(ratios(found, task, way, "cpu_seconds"), 2)
        table.append(line)
    return sorted(
        table, key=lambda line: (list(TASKS).index(line["task"]), line["settings"] != EQUAL, line["library"] != OURS)
    )


def draw(rows: list[Row], path: Path) -> None:
    """Draw success against steps and against training seconds, a row of panels for each task and way."""
    found = curves(rows)
    panels = sorted(
        {(task, way) for task, way, _ in found}, key=lambda panel: (list(TASKS).index(panel[0]), panel[1] != EQUAL)
    )
    figure, axes = plt.subplots(
        len(panels), 2, figsize=(9, 1.7 * len(panels) + 0.5), sharey=True, squeeze=False, layout="constrained"
    )
    for (task, way), pair in zip(panels, axes, strict=True):
        for panel, what in zip(pair, ("steps", "cpu_seconds"), strict=True):
            for library, colour in COLOURS.items():
                for i, curve in enumerate(found.get((task, way, library), {}).values()):
                    x, y = [row[what] for row in curve], [row["success"] for row in curve]
                    panel.plot(x, y, color=colour, alpha=0.8, lw=1.4, label=None if i else library)
            panel.axhline(SUCCESS, color="black", lw=0.8, ls=":")
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        pair[0].set(ylabel="success rate", ylim=(-0.03, 1.03))
        pair[0].set_title(f"{task}, {way}", loc="left", fontsize=10)
        pair[0].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1, 0].set_xlabel("environment steps")
    axes[-1, 1].set_xlabel("CPU seconds of training")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})
    plt.close(figure)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[Row]:
    """Return the evaluations in a file, for the seeds with which both libraries were trained."""
    numbers = {"seed": int, "steps": int, "success": float, "seconds": float, "cpu_seconds": float}
    with path.open(newline="") as file:
        rows = [{key: numbers.get(key, str)(value) for key, value in row.items()} for row in csv.DictReader(file)]
    libraries: dict[tuple[str, str, int], set[str]] = {}
    for row in rows:
        libraries.setdefault((row["task"], row["settings"], row["seed"]), set()).add(row["library"])
    return [row for row in rows if len(libraries[row["task"], row["settings"], row["seed"]]) == 2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learning speed of the training scripts and of Stable-Baselines3.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[name for name in TASKS if "PointReach" in name])
    parser.add_argument("--settings", nargs="+", choices=[EQUAL, TUNED], default=[EQUAL, TUNED])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="environment steps of each run (default: set by the task)")
    parser.add_argument("--interval", type=int, default=500, help="environment steps between evaluations")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="episodes per evaluation")
    parser.add_argument("--results", type=Path, help="do not train: show this learning.csv, even of an unfinished run")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    parser.add_argument("--picture", type=Path, help="file of the picture (default: learning.png in the output folder)")
    return parser.parse_args()


def train_all(arguments: argparse.Namespace) -> list[Row]:
    """Do the requested runs, and return their evaluations."""
    runs = plan(arguments.tasks, arguments.settings, arguments.seeds)
    if TUNED in arguments.settings and (known := set(arguments.seeds) & set(TUNING_SEEDS)):
        sys.exit(f"The tuned settings were chosen with the seeds {sorted(known)}: leave these out.")
    missing = {run[:3] for run in runs if run[1] == TUNED and (run[0], run[2]) not in TUNED_SETTINGS}
    if missing:
        sys.exit(f"There are no tuned settings for {sorted(missing)}: leave out --settings {TUNED!r}.")
    for task, way, library, _ in runs:
        check_steps(arguments.steps or TASKS[task].steps, arguments.interval, settings_of(way, task, library))
    path = arguments.output / "learning.csv"
    return run_all(runs, arguments.steps, arguments.interval, arguments.episodes, path)[0]


def main() -> None:
    arguments = parse_arguments()
    packages = "torch", "torchrl", "tensordict", "stable-baselines3", "gymnasium"
    print(", ".join(f"{package} {version(package)}" for package in packages))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} at the start")

    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = read(arguments.results) if arguments.results else train_all(arguments)
    if not rows:
        sys.exit(f"{arguments.results} has no seed with which both libraries were trained.")
    table = summarize(rows)
    write(arguments.output / "learning-summary.csv", table)
    text = markdown([list(table[0]), *(list(line.values()) for line in table)])
    (arguments.output / "learning.md").write_text(text + "\n")
    draw(rows, arguments.picture or arguments.output / "learning.png")

    print(text)
    found = curves(rows)
    print("\nTargets for the median ratio of CPU seconds to a success of 0.95")
    for task, way in dict.fromkeys((row["task"], row["settings"]) for row in rows):
        value = float(np.median(ratios(found, task, way, "cpu_seconds")))
        print(
            f"{'reached' if value <= TARGETS[way] else 'MISSED':<8} {value:.2f} (at most {TARGETS[way]}): {task}, {way}"
        )


if __name__ == "__main__":
    main()
