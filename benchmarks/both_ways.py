"""Success against steps with hindsight at sampling time and at writing time, on BitFlipping and PointReach.

Both ways train with the settings of `examples/dqn.py` and `examples/ddpg.py` (DDPG without normalization), and differ
only in `hindsight.when`. `--prioritized` also trains BitFlipping with prioritized replay. The storage has room for all
5,000 transitions and, at writing time, for four copies of each. 100 greedy episodes are evaluated every 500 steps.

Writes `both_ways.jsonl`, with one line per run, and `both_ways.png`. Runs that are already in the file are skipped.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from scripts import load

STEPS, COPIES = 5_000, 4
TASKS = {  # title: script, overrides
    "BitFlipping, 15 bits, DQN": ("dqn", []),
    "BitFlipping, 15 bits, prioritized DQN": ("dqn", ["buffer.prioritized=error"]),
    "PointReach, DDPG": ("ddpg", ["normalization.enabled=false"]),
}
# Blue and vermilion of Okabe and Ito
WAYS = {"sampling": ("HERTransform", "#0072B2", "-"), "writing": ("HindsightAugmentation", "#D55E00", "--")}

Run = dict[str, Any]


def train(task: str, way: str, seed: int) -> Run:
    """Train once, and return the results."""
    script, config = configure(task, way, seed)
    with tempfile.TemporaryDirectory() as folder:
        components = script.train(config, Path(folder)).components
    stored = components["buffer"].storage[:]
    success = [[int(step), float(value)] for step, value in components["log"]["evaluation/success"]]
    return {
        "task": task,
        "way": way,
        "seed": seed,
        "success": success,
        "bytes": rows_each(way) * stored.bytes() / len(stored),  # in the storage, per transition
        "seconds": components["progress"]["seconds"],
    }


def rows_each(way: str) -> int:
    """Return the number of stored rows per transition."""
    return COPIES + 1 if way == "writing" else 1


def configure(task: str, way: str, seed: int) -> tuple[ModuleType, Any]:
    """Return the script and its settings."""
    script, overrides = TASKS[task]
    overrides = [
        *overrides,
        f"seed={seed}",
        f"hindsight.when={way}",
        f"total_steps={STEPS}",
        f"buffer.size={STEPS * rows_each(way)}",
        "logger.kinds=[csv]",
    ]
    return load(script, overrides)


def runs(path: Path, tasks: list[str], seeds: list[int]) -> Iterator[Run]:
    """Yield the results of all runs. Train only the runs that are not in the file."""
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for seed in seeds:
        for task in tasks:
            for way in WAYS:
                same = [run for run in done if (run["task"], run["way"], run["seed"]) == (task, way, seed)]
                if not same:
                    same = [train(task, way, seed)]
                    with path.open("a") as file:
                        file.write(json.dumps(same[0]) + "\n")
                yield same[0]


def draw(results: list[Run], tasks: list[str], path: Path) -> None:
    figure, panels = plt.subplots(1, len(tasks), figsize=(2.9 * len(tasks), 3.2), sharey=True, layout="constrained")
    for panel, task in zip(np.atleast_1d(panels), tasks, strict=True):
        for way, (label, colour, style) in WAYS.items():
            curves = [run["success"] for run in results if (run["task"], run["way"]) == (task, way)]
            steps = [step for step, _ in curves[0]]
            values = np.array([[value for _, value in curve] for curve in curves])
            panel.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
            panel.plot(steps, np.median(values, axis=0), style, color=colour, label=f"{label} ({way})")
        panel.set(xlabel="environment steps", xlim=(0, STEPS), ylim=(0, 1.02))
        panel.set_title(",\n".join(task.rsplit(", ", 1)), fontsize=10)
        panel.set_xticks(range(0, STEPS + 1, 2_000))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("success of 100 greedy episodes")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prioritized", action="store_true", help="also train with prioritized replay")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    tasks = [task for task in TASKS if arguments.prioritized or "prioritized" not in task]
    results = list(runs(arguments.output / "both_ways.jsonl", tasks, arguments.seeds))
    for task in tasks:
        for way in WAYS:
            of_both = [run for run in results if (run["task"], run["way"]) == (task, way)]
            values = np.median([[value for _, value in run["success"]] for run in of_both], axis=0)
            curve = " ".join(f"{value:.2f}" for value in values)
            print(f"{task}, {way}: {curve}; {of_both[0]['bytes']:.0f} bytes per transition")
    draw(results, tasks, arguments.output / "both_ways.png")


if __name__ == "__main__":
    main()
