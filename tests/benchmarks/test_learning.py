"""The learning benchmark treats both libraries alike."""

import csv
import importlib
import itertools
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

stable_baselines3 = pytest.importorskip("stable_baselines3", reason="the benchmarks need the extra 'benchmarks'")

import learners  # noqa: E402
import learning  # noqa: E402
import tuning  # noqa: E402
from learners import EQUAL, OURS, SB3, TASKS, TUNED  # noqa: E402

POINT_REACH = "torchrl_her/PointReach-v0"
TASK = "PointReach, DDPG"


@pytest.mark.slow
def test_both_libraries_train_with_the_same_starts_and_goals(tmp_path, monkeypatch):
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
        for way in (EQUAL, TUNED):  # the first library of one seed is the second one of the next
            assert [run[2] for run in runs if run[:2] == (task, way)][::2] in ([OURS, SB3], [SB3, OURS])


def test_seeds_that_tuned_the_settings_are_refused(monkeypatch, tmp_path):
    command = ["learning.py", "--settings", TUNED, "--seeds", "9", "10", "12", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"chosen with the seeds \[10, 12\]: leave these out"):
        learning.main()


@pytest.mark.parametrize("name", ["PointReach, SAC", "PointReach, DDPG", "PointReach, TD3"])
def test_both_libraries_are_given_the_settings(name, monkeypatch):
    settings = learners.Settings(
        hidden=(24, 16), batch_size=32, updates_per_step=0.5, learning_rate=3e-3, tau=0.2, gamma=0.9, random_steps=100,
        noise=0.3, alpha=0.07, n_sampled_goal=3, num_envs=5, normalize=True, steps_per_chunk=20,
    )  # fmt: skip
    task, given = TASKS[name], []
    monkeypatch.setattr(importlib.import_module(task.algorithm), "train", lambda config, folder: given.append(config))
    algorithm = getattr(stable_baselines3, task.algorithm.upper())
    monkeypatch.setattr(algorithm, "learn", lambda model, steps, callback: given.extend((model, steps)))
    for library in (OURS, SB3):
        learners.LIBRARIES[library](task, settings, 7, SimpleNamespace(interval=500))
    config, model, steps = given
    noise = None if task.algorithm == "sac" else model.action_noise
    ours = (
        config.seed, config.total_steps, config.hidden, config.batch_size, config.learning_rate, config.tau,
        config.gamma, config.collector.random_steps, config.env.num_envs, config.normalization.enabled,
        config.collector.steps_per_chunk, config.updates_per_step * config.collector.steps_per_chunk,
        config.buffer.size, config.hindsight.strategy.name, config.hindsight.her_ratio,
        config.exploration.noise if noise else config.alpha_init,
    )  # fmt: skip
    theirs = (
        model.seed, steps, model.policy_kwargs["net_arch"], model.batch_size, model.learning_rate, model.tau,
        model.gamma, model.learning_starts, model.env.num_envs, model.get_vec_normalize_env() is not None,
        model.train_freq.frequency * model.env.num_envs, model.gradient_steps,
        model.replay_buffer.buffer_size * model.env.num_envs, model.replay_buffer.goal_selection_strategy.name.lower(),
        model.replay_buffer.her_ratio, noise._sigma[0] if noise else float(model.ent_coef.removeprefix("auto_")),
    )  # fmt: skip
    expected = (7, task.steps, [24, 16], 32, 3e-3, 0.2, 0.9, 100, 5, True, 20, 10, task.steps, "future", 0.75)
    for found in (ours, theirs):
        assert found == (*expected, 0.3 if noise else 0.07)


def test_equal_settings_are_equal():
    for task in TASKS:
        assert learners.settings_of(EQUAL, task, OURS) == learners.settings_of(EQUAL, task, SB3)


def curve(*successes):
    return [
        {"steps": 500 * i, "seconds": 2.0 * i, "cpu_seconds": 1.0 * i, "success": s} for i, s in enumerate(successes)
    ]


def test_success_must_last_for_several_evaluations():
    assert learning.first_success(curve(0.0, 0.96, 0.9, 0.95), held=1)["steps"] == 500
    assert learning.first_success(curve(0.0, 0.96, 0.9, 0.95, 1.0, 1.0, 0.0), held=3)["steps"] == 1500
    assert learning.first_success(curve(0.0, 0.96, 0.9, 0.95, 1.0), held=3) is None


def test_ratios_compare_the_times_to_success():
    rows = []
    for library, seed, successes in ((OURS, 0, (0, 1)), (OURS, 1, (0, 0, 1)), (SB3, 0, (0, 0, 1)), (SB3, 1, (0, 0, 0))):
        rows += [{"task": TASK, "settings": EQUAL, "library": library, "seed": seed} | row for row in curve(*successes)]
    assert learning.ratios(learning.curves(rows), TASK, EQUAL, "seconds") == [0.5, 1.0]
    ours, theirs = learning.summarize(rows)
    assert ours["steps to 0.95"] == "750 (500 to 1,000)"
    assert theirs["steps to 0.95"] == "not reached (1,000 to not reached)"
    assert (ours["ratio of seconds"], theirs["ratio of seconds"]) == ("0.75 (0.50 to 1.00)", "")


def test_the_search_compares_mean_times_over_all_seeds():
    first, second, third = tuning.TUNING_SEEDS
    seconds = {
        "lucky once": {first: 1.0, second: 9.0, third: 9.0},
        "fast": {first: 2.0, second: 3.0, third: 4.0},
        "fails once": {first: 1.5, second: 1.5, third: math.inf},
        "slow at first": {first: 5.0, second: 0.0, third: 0.0},
        "never": dict.fromkeys(tuning.TUNING_SEEDS, math.inf),
    }
    trained = []
    means = tuning.search(list(seconds), 3, lambda name, seed: (trained.append((name, seed)), seconds[name][seed])[1])
    assert dict(zip(seconds, means, strict=True)) == {
        "lucky once": 19 / 3, "fast": 3.0, "fails once": math.inf, "slow at first": math.inf, "never": math.inf,
    }  # fmt: skip
    assert len(trained) == 5 + 3 * 2
    assert tuning.search(["never"], 3, lambda name, seed: math.inf) == [math.inf]


@pytest.mark.parametrize("task", TASKS)
def test_the_search_gives_both_libraries_the_same_candidates(task):
    ours, theirs = (tuning.make_candidates(task, library, 20) for library in (OURS, SB3))
    assert len(set(map(str, theirs))) > 15
    for mine, other in zip(ours, theirs, strict=True):
        assert learners.replace(mine, random_actions=0.0) == other
        for settings in (mine, other):
            assert settings.steps_per_chunk % settings.num_envs == 0


def test_a_run_of_the_search_ends_when_the_success_has_lasted(monkeypatch):
    def act(observation):
        return np.zeros((2, 2), dtype=np.float32)

    evaluations = tuning.UntilSuccess(POINT_REACH, 500, 2)
    evaluations.held = 2
    assert evaluations(act) < learning.SUCCESS
    monkeypatch.setattr(learning, "SUCCESS", 0.0)
    evaluations.curve.clear()
    evaluations(act)
    with pytest.raises(tuning.Reached):
        evaluations(act)
    assert [row["steps"] for row in evaluations.curve] == [0, 500]


def test_the_clock_starts_at_the_first_evaluation_and_stops_during_evaluations(monkeypatch):
    now = 100.0

    def act(observation):
        nonlocal now
        now += 1.0
        return np.zeros((2, 2), dtype=np.float32)

    monkeypatch.setattr(learners, "time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now / 2))
    evaluations = learners.Evaluations(POINT_REACH, 500, 2)
    for training in (30.0, 7.0, 5.0):
        now += training
        evaluations(act)
    assert [row["seconds"] for row in evaluations.curve] == [0.0, 7.0, 12.0]
    assert [row["cpu_seconds"] for row in evaluations.curve] == [0.0, 3.5, 6.0]
