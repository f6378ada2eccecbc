"""The learning benchmark treats both libraries alike."""

import csv
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="the benchmarks need the extra 'benchmarks'")
pytest.importorskip("hydra", reason="the training scripts need the extra 'examples'")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import learners  # noqa: E402
import learning  # noqa: E402
from learners import EQUAL, OURS, SB3, TASKS, TUNED  # noqa: E402

TASK = "PointReach, DDPG"


def test_both_libraries_train_and_meet_the_same_starts_and_goals(tmp_path, monkeypatch):
    command = ["learning.py", "--tasks", TASK, "--settings", EQUAL, "--seeds", "0", "1"]
    command += ["--steps", "600", "--interval", "200", "--episodes", "4", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    starts = []
    run_all = learning.run_all
    monkeypatch.setattr(
        learning, "run_all", lambda *arguments: (found := run_all(*arguments), starts.extend(found[1]))[0]
    )
    learning.main()

    assert len(starts) == 4  # libraries and seeds
    for evaluations in starts:
        assert len(evaluations) == 4
        for evaluation in evaluations:
            assert evaluation.keys() == starts[0][0].keys() == {"observation", "achieved_goal", "desired_goal"}
            for key, values in evaluation.items():
                assert np.array_equal(values, starts[0][0][key])
    assert len(np.unique(starts[0][0]["desired_goal"])) == 8  # four goals in the plane

    with (tmp_path / "learning.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["library"], row["seed"], row["steps"]) for row in rows} == {
        (library, seed, steps) for library in (OURS, SB3) for seed in "01" for steps in ("0", "200", "400", "600")
    }
    for before, after in itertools.pairwise(rows):
        if after["steps"] != "0":
            assert float(after["seconds"]) > float(before["seconds"])
            assert float(after["cpu_seconds"]) > float(before["cpu_seconds"])
    header, _, *table = (tmp_path / "learning.md").read_text().splitlines()
    names = [name.strip() for name in header.strip("|").split("|")]
    assert names == [
        "task", "settings", "library", "success at the end", "steps", "steps to 0.95", "seconds to 0.95",
        "CPU seconds to 0.95", "CPU seconds per 1,000 steps", "ratio of seconds", "ratio of CPU seconds",
    ]  # fmt: skip
    assert len(table) == 2
    assert learning.summarize(learning.read(tmp_path / "learning.csv")) == list(
        csv.DictReader((tmp_path / "learning-summary.csv").open())
    )
    assert (tmp_path / "learning.png").stat().st_size > 10_000


def test_the_libraries_take_turns():
    runs = learning.plan(list(TASKS)[:2], [EQUAL, TUNED], [0, 1])
    assert len(set(runs)) == len(runs) == 16
    for i in range(0, len(runs), 2):  # in pairs of the same task, way and seed
        assert {run[2] for run in runs[i : i + 2]} == {OURS, SB3}
        assert len({(run[0], run[1], run[3]) for run in runs[i : i + 2]}) == 1
    for task in list(TASKS)[:2]:
        for way in (EQUAL, TUNED):  # who is first with one seed is second with the next
            assert [run[2] for run in runs if run[:2] == (task, way)][::2] in ([OURS, SB3], [SB3, OURS])


def test_equal_settings_are_the_same_for_both():
    for task in TASKS:
        assert learners.settings_of(EQUAL, task, OURS) is learners.settings_of(EQUAL, task, SB3)
        assert not learners.settings_of(EQUAL, task, SB3).theirs


def curve(*successes):
    return [
        {"steps": 500 * i, "seconds": 2.0 * i, "cpu_seconds": 1.0 * i, "success": s} for i, s in enumerate(successes)
    ]


def test_success_is_the_first_that_is_held():
    assert learning.first_success(curve(0.0, 0.96, 0.9, 0.95), held=1)["steps"] == 500
    assert learning.first_success(curve(0.0, 0.96, 0.9, 0.95, 1.0, 1.0, 0.0), held=3)["steps"] == 1500
    assert learning.first_success(curve(0.0, 0.96, 0.9, 0.95, 1.0), held=3) is None


def test_ratios_are_of_the_times_to_success():
    rows = []
    for library, seed, successes in ((OURS, 0, (0, 1)), (OURS, 1, (0, 0, 1)), (SB3, 0, (0, 0, 1)), (SB3, 1, (0, 0, 0))):
        rows += [{"task": TASK, "settings": EQUAL, "library": library, "seed": seed} | row for row in curve(*successes)]
    assert learning.ratios(learning.curves(rows), TASK, EQUAL, "seconds") == [0.5, 1.0]
    ours, theirs = learning.summarize(rows)
    assert ours["steps to 0.95"] == "750 (500 to 1,000)"
    assert theirs["steps to 0.95"] == "not reached (1,000 to not reached)"
    assert (ours["ratio of seconds"], theirs["ratio of seconds"]) == ("0.75 (0.50 to 1.00)", "")
