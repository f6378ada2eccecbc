"""Learning with hindsight: success, time and figures of several seeds.

    python benchmarks/learning.py sb3 --tasks "FetchReach, SAC" --steps 5000 --interval 500 --columns 2000 5000
    python benchmarks/learning.py suite --tasks FetchPush --seeds 31       # half an hour
    python benchmarks/learning.py tuned --results docs/reference/results/{fetch,goal-selection}.csv

- ``sb3``: the training scripts in ``examples/`` and Stable-Baselines3, with equal settings, side by side. Each run is a
  process on one thread, and the library that runs first changes from seed to seed.
- ``suite``: ``ddpg.py`` on robots and in mazes, always with the same settings. It needs ``pip install -c
  constraints.txt panda-gym``, as the next one.
- ``tuned``: the training scripts with settings for each of these tasks.
- ``movement``: `MovementPriority` on FetchPush, compared with uniform sampling.
- ``selection``: `GoalSelection`, compared with the goals of the environment.
- ``crl``: contrastive RL (``examples/crl.py``) and SAC with hindsight, with equal numbers of updates.
- ``scripts``: the training scripts on small tasks, and with one setting changed.
- ``recording``: the time of these scripts with ``speedup=record`` and without.
- ``offline``: the algorithms of ``examples/offline.py``, on data that ``examples/pointmaze_data.py`` writes. Steps are
  updates.
- ``writing``: relabelling when transitions are sampled and when they are written.

All evaluations are written to ``results.csv`` in the output folder. A script's run that was interrupted continues from
its last checkpoint, and a finished one is not repeated; delete the folder of a run to repeat it.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measuring import in_new_process, print_table, print_versions
from omegaconf import OmegaConf
from scripts import EXAMPLES, load
from tqdm import tqdm

from compare import Run  # isort: skip (`scripts` finds it)
from training.plots import draw_comparison  # isort: skip
from training.prepare import prepare  # isort: skip
from training.run import saved_text  # isort: skip

SUCCESS = 0.95
COLUMNS = {"task": str, "way": str, "seed": int, "steps": int}
METRICS = "success", "return", "seconds", "cpu_seconds"
PUBLISHED = Path(__file__).parents[1] / "docs/reference/results/published.csv"
BEST_PUBLISHED = "DDPG with HER and past desired goals"  # the success of mrl's better strategy

Row = dict[str, Any]
Runs = dict[tuple[str, str], dict[int, list[Row]]]  # evaluations by task and way, and by seed


class Script(NamedTuple):
    """A training script and its settings."""

    name: str
    steps: int
    overrides: tuple[str, ...] = ()


OFTEN = "evaluation.interval=500", "evaluation.episodes=100"
OBJECT, RARELY = "+task=fetch_push", ("evaluation.interval=100_000", "checkpoint.interval=100_000")
PUSH_SAC = "env.name=FetchPush-v4", "updates_per_step=0.25", "evaluation.interval=15_000", "checkpoint.interval=15_000"
REACH = "env.name=FetchReach-v4", "evaluation.interval=1_000", OFTEN[1]
PRIORITIES, THREE_STEPS = "buffer.prioritized=error", "buffer.n_steps=3"
PLAIN = "+task=plain_ddpg"
RAW = "normalization.enabled=false"
BITS = "+task=bit_flipping_50"
PANDA_PUSH = OBJECT, "env.name=panda:PandaPushFixed-v3", "gamma=0.95", "tau=0.05"
MAZES = "pointmaze-medium-v0", "pointmaze-large-v0"
EVERY = "evaluation.episodes=100", "evaluation.num_envs=10", "logger.interval=1_000"
CORNERS = f"+env.kwargs.maze_map={OmegaConf.load(EXAMPLES / 'config/task/point_maze_corners.yaml').env.kwargs.maze_map}"


def default(env: str, steps: int, every: int, *more: str) -> Script:
    """Return a run of ``ddpg.py`` with its own settings, which is evaluated and saved every few steps."""
    often = f"evaluation.interval={every}", f"checkpoint.interval={every}"
    return Script("ddpg", steps, (f"env.name={env}", *EVERY, *often, *more))


SCRIPTS = {
    "suite": {
        "FetchReach": default("FetchReach-v4", 5_000, 1_000),
        "FetchPush": default("FetchPush-v4", 240_000, 20_000),
        "FetchPickAndPlace": default("FetchPickAndPlace-v4", 600_000, 50_000),
        "FetchSlide": default("FetchSlide-v4", 500_000, 50_000),
        "HandReach": default("HandReach-v3", 200_000, 20_000),
        "PandaReach": default("panda:PandaReachFixed-v3", 5_000, 1_000),
        "PandaPush": default("panda:PandaPushFixed-v3", 240_000, 20_000),
        "PandaPickAndPlace": default("panda:PandaPickAndPlaceFixed-v3", 500_000, 50_000),
        "PointMaze_UMaze": default("PointMaze_UMaze-v3", 100_000, 20_000),
        "PointMaze_Medium": default("PointMaze_Medium-v3", 300_000, 50_000),
        "PointMaze_Large, corner to corner": default("PointMaze_Large-v3", 200_000, 20_000, CORNERS),
        # No setting was tried on these two.
        "AntMaze_UMaze": default("AntMaze_UMaze-v5", 500_000, 50_000),
        "PandaSlide": default("panda:PandaSlideFixed-v3", 300_000, 50_000),
    },
    "tuned": {
        "FetchReach": Script("sac", 2_000, ("env.name=FetchReach-v4", *OFTEN)),
        "FetchPush": Script("ddpg", 240_000, (OBJECT,)),
        "FetchPickAndPlace": Script("ddpg", 600_000, (OBJECT, "env.name=FetchPickAndPlace-v4", *RARELY)),
        "FetchSlide": Script("ddpg", 500_000, ("+task=fetch_slide",)),
        "HandReach": Script("ddpg", 200_000, ("+task=hand_reach",)),
        "PandaReach": Script("sac", 2_000, ("env.name=panda:PandaReachFixed-v3", *OFTEN)),
        "PandaPush": Script("ddpg", 240_000, PANDA_PUSH),
        "PandaPickAndPlace": Script("ddpg", 500_000, ("+task=panda_pick_and_place",)),
        "PointMaze_UMaze": Script("sac", 100_000, ("+task=point_maze",)),
        "PointMaze_Medium": Script("sac", 300_000, ("+task=point_maze_medium",)),
    },
    "movement": {"FetchPush": Script("ddpg", 240_000, (OBJECT, "average=0", "exploration.final=1"))},
    "selection": {"PointMaze_Large, corner to corner": Script("sac", 200_000, ("+task=point_maze_corners",))},
    "crl": {
        "PointReach": Script("sac", 15_000, ("evaluation.interval=1_500", OFTEN[1])),
        "FetchReach": Script("sac", 10_000, REACH),
        "FetchPush": Script("sac", 150_000, (*PUSH_SAC, OFTEN[1])),
    },
    "scripts": {
        "PointReach, SAC": Script("sac", 10_000, OFTEN),
        "PointReach, DDPG": Script("ddpg", 10_000, (PLAIN, *OFTEN)),
        "PointReach, TD3": Script("td3", 10_000, OFTEN),
        "FetchReach, SAC": Script("sac", 5_000, REACH),
        "FetchReach, DDPG": Script("ddpg", 5_000, (PLAIN, *REACH)),
        "FetchReach, TD3": Script("td3", 5_000, REACH),
        "FetchReach, TD3, fetch_reach": Script("td3", 5_000, ("+task=fetch_reach",)),
        "FetchReach, SAC, raw inputs": Script("sac", 2_000, (*REACH, RAW)),
        "PointReach, SAC, alpha_init=1": Script("sac", 5_000, (*OFTEN, "alpha_init=1")),
        "PointReach, DDPG, gamma=0.5": Script("ddpg", 5_000, (PLAIN, *OFTEN, "gamma=0.5")),
        "PointReach, DDPG, gamma=0.999": Script("ddpg", 5_000, (PLAIN, *OFTEN, "gamma=0.999")),
        "PointReach, DDPG, tau=0.005": Script("ddpg", 5_000, (PLAIN, *OFTEN, "tau=0.005")),
        "PointReach, DDPG, raw inputs": Script("ddpg", 5_000, (PLAIN, *OFTEN, RAW)),
        "PointReach, DDPG, raw inputs, three steps": Script("ddpg", 5_000, (PLAIN, *OFTEN, RAW, THREE_STEPS)),
        "PointReach, DDPG, raw inputs, priorities": Script("ddpg", 5_000, (PLAIN, *OFTEN, RAW, PRIORITIES)),
        "PointReach, DDPG, raw inputs, priorities, three steps": Script(
            "ddpg", 5_000, (PLAIN, *OFTEN, RAW, PRIORITIES, THREE_STEPS)
        ),
        "BitFlipping, 50 bits, 70% random actions": Script("dqn", 500_000, (BITS,)),
        "BitFlipping, 50 bits, 30% random actions": Script("dqn", 500_000, (BITS, "exploration.random_actions=0.3")),
    },
    "recording": {
        "BitFlipping, DQN": Script("dqn", 2_500),
        "PointReach, DDPG": Script("ddpg", 2_500, (PLAIN,)),
        "PointReach, TD3": Script("td3", 2_500),
        "PointReach, SAC": Script("sac", 2_500),
    },
    "offline": {name: Script("offline", 100_000, (f"env={name}",)) for name in MAZES},
    "writing": {
        "BitFlipping, DQN": Script("dqn", 5_000, OFTEN),
        "BitFlipping, prioritized": Script("dqn", 5_000, (*OFTEN, PRIORITIES)),
        "PointReach, DDPG": Script("ddpg", 5_000, (PLAIN, *OFTEN, RAW)),
    },
}
CRL = "contrastive RL"
CRL_ARGUMENTS = {
    "PointReach": "--evaluate-every 1500",
    "FetchReach": "--env gymnasium_robotics:FetchReach-v4 --evaluate-every 1000",
    "FetchPush": "--env gymnasium_robotics:FetchPush-v4 --updates-per-step 0.25 --evaluate-every 15000",
}
WAYS = {
    "sb3": {"ours": (), "Stable-Baselines3": ()},
    "suite": {"": ()},
    "tuned": {"": ()},
    "movement": {"neither": ("buffer.alpha=0",), "priority": ("buffer.alpha=1",)},
    "selection": {"GoalSelection": (), "goals of the environment": ("goals.selection=null",)},
    "crl": {"SAC with hindsight": (), CRL: ()},
    "scripts": {"": ()},
    "recording": {"record": (), "none": ("speedup=none",)},
    "offline": {name.upper(): (f"algorithm={name}",) for name in ("gcbc", "gciql", "hiql", "crl")},
    "writing": {  # with room for four copies of each transition
        "HERTransform": ("hindsight.when=sampling", "buffer.size=5000"),
        "HindsightAugmentation": ("hindsight.when=writing", "buffer.size=25000"),
    },
}
SEEDS = {
    "sb3": [0, 1, 2],
    "suite": [31, 32, 33],
    "tuned": [21, 22, 23],
    "movement": [20, 21, 22],
    "selection": [61, 62, 63],
    "crl": [61, 62, 63],
    "scripts": [0, 1, 2],
    "recording": [0, 1, 2],
    "offline": [1, 2, 3],  # see ONE_SEED
    "writing": [1, 2, 3],
}
ONE_SEED = {"pointmaze-large-v0", "CRL"}  # tasks and ways of experiments that would take too long with several


def train_script(script: Script, overrides: tuple[str, ...], seed: int, folder: Path) -> list[Row]:
    """Train, or continue a run that was interrupted, and return its evaluations."""
    settings = [*script.overrides, *overrides, f"seed={seed}", f"total_steps={script.steps}", "logger.kinds=[csv]"]
    module, config = load(script.name, settings)
    prepare(config, discrete=script.name == "dqn")  # sets what is null, as in the saved settings
    checkpoints = [path.name for path in folder.glob("checkpoints/checkpoint-*")]
    if checkpoints and (folder / "config.yaml").read_text() != saved_text(config):
        sys.exit(f"The run in {folder}/ has other settings: delete it, or choose another --output.")
    if f"checkpoint-{script.steps:012}" not in checkpoints:
        config.resume = str(folder) if checkpoints else None
        module.train(config, folder)
    run = Run.read(folder)
    steps = map(int, run.logs["success"][:, 0])
    return [{"steps": step, **{name: run.at(name, step) for name in METRICS[:3]}} for step in steps]


def train_crl(task: str, steps: int, seed: int, folder: Path) -> list[Row]:
    """Train with ``examples/crl.py``, unless the run exists, and return its evaluations."""
    path = folder / "results.csv"
    if not path.exists() or int(path.read_text().splitlines()[-1].split(",")[0]) < steps:
        options = "--steps", str(steps), "--seed", str(seed), "--output", str(path)
        subprocess.run([sys.executable, EXAMPLES / "crl.py", *CRL_ARGUMENTS[task].split(), *options], check=True)
    rows = csv.DictReader(path.read_text().splitlines())
    columns = {"steps": int, "success": float, "seconds": float}
    return [{name: kind(row[name]) for name, kind in columns.items()} | {"return": np.nan} for row in rows]


def train_offline(script: Script, overrides: tuple[str, ...], seed: int, folder: Path, data: Path) -> list[Row]:
    """Train on a data set, which is generated if there is none, unless the run exists, and return its evaluations."""
    settings = *script.overrides, *overrides, f"seed={seed}", f"updates={script.steps}", f"data={data}"
    if not data.exists():
        maze = data.stem, "--output", str(data)
        subprocess.run([sys.executable, EXAMPLES / "pointmaze_data.py", *maze], check=True)
    path = folder / "logs/csv/scalars/evaluation/success.csv"
    if not path.exists() or int(np.loadtxt(path, delimiter=",", ndmin=2)[-1, 0]) < script.steps:
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted run starts again, and would continue its logs
        command = [sys.executable, EXAMPLES / "offline.py", *settings, f"hydra.run.dir={folder}"]
        subprocess.run(command, check=True)
    run = Run.read(folder)
    steps = map(int, run.logs["success"][:, 0])
    return [
        {"steps": n, "success": run.at("success", n), "return": np.nan, "seconds": run.at("seconds", n)} for n in steps
    ]


def train(arguments: argparse.Namespace, tasks: list[str]) -> Iterator[Row]:
    """Train all runs, and yield their evaluations."""
    ways = list(WAYS[arguments.experiment])
    for (i, seed), task in (progress := tqdm(list(product(enumerate(arguments.seeds), tasks)), unit="pair")):
        for way in ways[:: (-1) ** i]:
            if i > 0 and {task, way} & ONE_SEED:
                continue
            progress.set_postfix_str(f"{task}, {way}, seed {seed}")
            if arguments.experiment == "sb3":
                from learners import learn

                rows = in_new_process(learn, task, way, seed, arguments.steps, arguments.interval, arguments.episodes)
            else:
                script = SCRIPTS[arguments.experiment][task]
                script = script._replace(steps=arguments.steps or script.steps)
                folder = arguments.output / task / way / str(seed)
                if script.name == "offline":
                    data = arguments.output / f"{task}.npz"
                    rows = train_offline(script, WAYS[arguments.experiment][way], seed, folder, data)
                elif way == CRL:
                    rows = train_crl(task, script.steps, seed, folder)
                else:
                    rows = train_script(script, WAYS[arguments.experiment][way], seed, folder)
            yield from ({"task": task, "way": way, "seed": seed, **row} for row in rows)


def write(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *METRICS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(paths: list[Path]) -> list[Row]:
    """Return the evaluations in files."""
    texts = [row for path in paths for row in csv.DictReader(path.read_text().splitlines())]
    return [
        {name: kind(row[name]) for name, kind in COLUMNS.items()}
        | {name: float(row[name] or "nan") for name in METRICS}
        for row in texts
    ]


def grouped(rows: list[Row]) -> Runs:
    """Return the evaluations by task and way, and then by seed."""
    runs: Runs = {}
    for row in rows:
        runs.setdefault((row["task"], row["way"]), {}).setdefault(row["seed"], []).append(row)
    return runs


def spread(values: list[float], digits: int = 2) -> str:
    """Return median and range; infinity means "not reached", and NaN that nothing was measured."""
    if np.isnan(values).any():
        return ""
    median, low, high = (f"{x:,.{digits}f}" for x in (np.median(values), min(values), max(values)))
    text = median if len(values) == 1 else f"{median} ({low} to {high})"
    return text.replace("inf", "not reached")


def at(by_seed: dict[int, list[Row]], metric: str, step: float) -> list[float]:
    """Return the last value of a metric up to a step, for each seed."""
    return [[row[metric] for row in curve if row["steps"] <= step][-1] for curve in by_seed.values()]


def print_scripts(runs: Runs, columns: list[int]) -> None:
    """Print success, return and training time: medians and ranges over the seeds."""
    rows = {}
    for (task, way), by_seed in runs.items():
        success = [spread(at(by_seed, "success", step)) for step in columns or [np.inf]]
        last = f"{next(iter(by_seed.values()))[-1]['steps']:,}"
        hours = spread([seconds / 3600 for seconds in at(by_seed, "seconds", np.inf)])
        about = [last, *success, spread(at(by_seed, "return", np.inf), 1), hours, ", ".join(map(str, by_seed))]
        rows[f"{task}, {way}" if way else task] = about
    titles = [f"success at {step:,}" for step in columns] or ["success"]
    print_table("task", ("steps", *titles, "return", "core-hours", "seeds"), rows)


def print_suite(runs: Runs) -> None:
    """Print success and return next to published ones, and training time."""
    published = list(csv.DictReader(PUBLISHED.read_text().splitlines()))
    rows = {}
    for (task, way), by_seed in runs.items():
        steps = next(iter(by_seed.values()))[-1]["steps"]
        theirs = [row for row in published if row["task"] == task]
        as_long = [row for row in theirs if row["way"] == BEST_PUBLISHED and int(row["steps"]) == steps]
        their_success = [f"{float(row['success']):.2f}" for row in as_long]
        their_return = [f"{row['return']} at {int(row['steps']):,}" for row in theirs if row["return"]]
        success = spread(at(by_seed, "success", np.inf))
        returned = spread(at(by_seed, "return", np.inf), 1)
        hours = spread([seconds / 3600 for seconds in at(by_seed, "seconds", np.inf)])
        rows[f"{task}, {way}" if way else task] = (
            f"{steps:,}",
            success,
            "".join(their_success),
            returned,
            "".join(their_return),
            hours,
        )
    columns = "steps", "success", "published success", "return", "published return", "core-hours"
    print_table("task", columns, rows)


def first_success(curve: list[Row], held: int) -> Row | None:
    """Return the first of ``held`` successful evaluations in a row, or None."""
    good = [row["success"] >= SUCCESS for row in curve]
    return next((curve[i] for i in range(len(curve) - held + 1) if all(good[i : i + held])), None)


def reached(by_seed: dict[int, list[Row]], held: int, metric: str) -> list[float]:
    """Return steps or seconds to the success for each seed, infinity if it was not reached."""
    firsts = [first_success(curve, held) for curve in by_seed.values()]
    return [np.inf if first is None else first[metric] for first in firsts]


def print_libraries(runs: Runs, columns: list[int]) -> None:
    """Print success and time of both libraries. If theirs fails, its time is that of the whole run."""
    from learners import OURS, SB3, TASKS

    rows = {}
    for (task, way), by_seed in runs.items():
        held, ratio = TASKS[task].held, ""
        if way == OURS and (theirs := runs.get((task, SB3))):
            same = [seed for seed in by_seed if seed in theirs]
            ours, theirs = ({seed: each[seed] for seed in same} for each in (by_seed, theirs))
            whole = np.minimum(reached(theirs, held, "cpu_seconds"), at(theirs, "cpu_seconds", np.inf))
            ratio = spread(list(np.array(reached(ours, held, "cpu_seconds")) / whole))
        per_step = [1e3 * curve[-1]["cpu_seconds"] / curve[-1]["steps"] for curve in by_seed.values()]
        success = [spread(at(by_seed, "success", step)) for step in (*columns, np.inf)]
        to = [spread(reached(by_seed, held, metric), digits) for metric, digits in (("steps", 0), ("cpu_seconds", 1))]
        rows[f"{task}, {way}"] = [ratio, *success, *to, spread(per_step)]
    titles = *(f"success at {step:,}" for step in columns), "success at the end"
    seconds = f"steps to {SUCCESS}", f"CPU seconds to {SUCCESS}", "CPU seconds per 1,000 steps"
    print_table("task, library", ("ratio of CPU seconds", *titles, *seconds), rows)


def draw(runs: Runs, path: Path) -> None:
    """Draw the success against steps, a panel for each task."""
    panels: dict[str, dict[str, Any]] = {}
    for (task, way), by_seed in runs.items():
        steps = sorted(set.intersection(*({row["steps"] for row in curve} for curve in by_seed.values())))
        success = [[row["success"] for row in curve if row["steps"] in steps] for curve in by_seed.values()]
        panels.setdefault(task, {})[way] = np.array(steps), np.array(success)
    draw_comparison(panels, path, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=WAYS)
    parser.add_argument("--tasks", nargs="+", help="(default: all, and for sb3 those of PointReach)")
    parser.add_argument("--seeds", type=int, nargs="+", help="(default: three)")
    parser.add_argument("--steps", type=int, help="environment steps of each run (default: set by the task)")
    parser.add_argument("--interval", type=int, default=500, help="steps between evaluations, for sb3")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of an evaluation, for sb3")
    parser.add_argument("--columns", type=int, nargs="+", default=[], help="steps at which to show the success")
    parser.add_argument("--results", type=Path, nargs="+", help="do not train: show the evaluations in these files")
    parser.add_argument("--output", type=Path, help="folder for runs and results.csv (default: outputs/EXPERIMENT)")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    arguments = parser.parse_args()
    is_sb3 = arguments.experiment == "sb3"
    arguments.seeds = arguments.seeds or SEEDS[arguments.experiment]
    arguments.output = arguments.output or Path("outputs", arguments.experiment)
    if arguments.results:
        rows = read(arguments.results)
    else:
        print_versions()
        reach = ["PointReach, SAC", "PointReach, DDPG", "PointReach, TD3"]
        arguments.output.mkdir(parents=True, exist_ok=True)
        rows = []
        for row in train(arguments, arguments.tasks or (reach if is_sb3 else list(SCRIPTS[arguments.experiment]))):
            rows.append(row)
            write(arguments.output / "results.csv", rows)
    runs = grouped(rows)
    if arguments.experiment in ("suite", "tuned") and not arguments.columns:
        print_suite(runs)
    else:
        (print_libraries if is_sb3 else print_scripts)(runs, arguments.columns)
    if arguments.figure:
        draw(runs, arguments.figure)


if __name__ == "__main__":
    main()
