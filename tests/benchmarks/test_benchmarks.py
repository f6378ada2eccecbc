"""The benchmarks run with tiny sizes, and their tables show the right numbers."""

import csv
import dataclasses
import importlib
import shlex
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import gpu
import movement
import numpy as np
import pytest
import runs
import suite
import torch
from gpu_device import Captured, seconds_per_call

from torchrl_her import HERTransform

SMALL = {  # arguments and constants; the first ones need other libraries
    "sampling": ("--sizes 1000 --rounds 5 --output .", {}),
    "growth": ("--sizes 1000 10000 --rounds 5 --file --output .", {}),
    "writing": ("--rounds 1 --episodes 1", {"ROWS": 10_000}),
    "frames": (  # without the memory, which starts processes
        "--rounds 20",
        {"CHUNK": 5, "LIMITS": {1024: 3.5, 4096: 4.5}, "LOOPS": {64: 0.1}, "memory_of_hindsight": lambda *case: 1.0},
    ),
    "where_time_goes": ("--rounds 2", {"STORED": 1000}),
    "compiled": ("--stored 1000 --rounds 2", {}),
    "strategies": ("--size 1000 --rounds 2", {}),
    "check_envs": ("torchrl_her/PointReach-v0", {}),
    "checks": ("--rounds 60", {"EPISODES": 5}),
    "migration": ("--seeds 0 --steps 600", {"EPISODES": 2}),
    "updates": ("--algorithms td3 --updates 30", {}),
    "both_ways": ("--seeds 1 --output .", {"STEPS": 500, "TASKS": {"DQN": ("dqn", ["evaluation.episodes=2"])}}),
}


def need_other_libraries():
    for library in ("stable_baselines3", "cpprb"):
        pytest.importorskip(library, reason="the benchmarks need the extra 'benchmarks'")


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_and_prints_a_table(name, monkeypatch, tmp_path, capsys):
    if name not in ("checks", "updates", "both_ways"):
        need_other_libraries()
    (arguments, constants), module = SMALL[name], importlib.import_module(name)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(HERTransform, "compile", Mock())  # takes a minute
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments)])
    module.main()
    printed = capsys.readouterr().out
    assert "| " in printed or "bytes per transition" in printed
    assert "| nan" not in printed  # in a table


def test_the_small_version_of_the_gpu_benchmark_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu, "ON_CPU", dataclasses.replace(gpu.ON_CPU, stored=(1000,), batch_sizes=(64,), budget=0.001))
    gpu.main()
    rows = {path.stem: list(csv.DictReader(path.open())) for path in tmp_path.glob("*.csv")}
    for row in rows["sampling"]:
        per_second = 1e3 * int(row["batch_size"]) / float(row["milliseconds_per_batch"])
        assert float(row["samples_per_second"]) == pytest.approx(per_second, rel=0.01)
    last = rows["training"][-1]
    assert (int(last["environment_steps"]), int(last["updates"])) == (gpu.ON_CPU.steps, gpu.ON_CPU.steps // 16)
    assert (tmp_path / "sampling.png").stat().st_size > 10_000


def test_times_are_medians_over_groups_of_calls(monkeypatch):
    clock, cpu = SimpleNamespace(now=0.0, calls=0), torch.device("cpu")
    monkeypatch.setattr("gpu_device.time", SimpleNamespace(perf_counter=lambda: clock.now))

    def call():
        clock.calls += 1
        clock.now += 0.5 if clock.calls == 5 else 0.002  # one group has an outlier

    assert seconds_per_call(Captured(call, cpu), cpu, budget=0.1) == pytest.approx(0.002)


def test_times_are_compared_within_a_round_and_wrong_rewards_are_a_failure():
    need_other_libraries()
    from contenders import OURS, PLAIN
    from measuring import SAMPLE, Measured, added, ratio

    plain, ours = (Measured(name, 1000, SimpleNamespace(read=lambda batch: batch)) for name in (PLAIN, OURS))
    plain.times[SAMPLE], ours.times[SAMPLE] = [10.0, 20.0, 30.0], [20.0, 20.0, 90.0]
    results = {(PLAIN, 1000): plain, (OURS, 1000): ours}
    assert (ratio(results, SAMPLE, 1000, OURS), added(results, 1000, OURS, PLAIN)) == (2.0, 10.0)
    goals = np.array([10.5] * 2 + [1.0] * 3 + [0.0] * 5)[:, None]  # two are original, five are reached
    batch = SimpleNamespace(next_achieved_goal=np.zeros((10, 1)), desired_goal=goals, reward=-np.sign(goals[:, 0]))
    batch.reward[7] = -1.0
    ours.check(batch)
    assert ours.failures() == ["HERTransform, 1,000 stored: 1 of 10 rewards do not match their goals"]


def test_tables_of_runs_have_medians_and_ranges_at_their_steps(tmp_path):
    last, found = suite.TASKS["FetchPush"].steps, []
    for seed, success, total, hours in ((20, 0.9, -10, 0.5), (21, 1.0, -8, 0.25), (22, 0.7, -20, 1.0)):
        values = {"success": [0, 0.1, success], "return": [-50, -40, total], "seconds": [0, 1, 3600 * hours]}
        logs = {name: np.array([[0, 100, last], column], float).T for name, column in values.items()}
        found.append(runs.Run(SimpleNamespace(seed=seed), logs))
    runs.write({"FetchPush": found}, tmp_path / "results.csv")
    for groups in ({"FetchPush": found}, runs.read(tmp_path / "results.csv")):
        cells = suite.table(groups).splitlines()[-1].strip("| ").split(" | ")
        assert cells[1:4] == ["240,000", "0.90 (0.70 to 1.00)", "-10.0 (-20.0 to -8.0)"]
        assert cells[5:] == ["0.50 (0.25 to 1.00)", "20, 21, 22"]
        row = movement.table(groups, [100, last]).splitlines()[-1]
        assert row == "| FetchPush | 0.10 (0.10 to 0.10) | 0.90 (0.70 to 1.00) | -10.0 (-20.0 to -8.0) | 20, 21, 22 |"


def test_a_finished_run_is_read_and_continues_only_with_its_own_settings(tmp_path):
    settings = "total_steps=100 collector.random_steps=50 hidden=[8] evaluation.interval=50 logger.interval=50"
    settings = [*settings.split(), "checkpoint.interval=100", "evaluation.episodes=1", "logger.kinds=[csv]"]
    for _ in range(2):  # the second does nothing
        runs.train("dqn", settings, tmp_path / "run")
    with pytest.raises(SystemExit, match="has other settings: delete it, or choose another --output"):
        runs.train("dqn", [*settings, "gamma=0.9"], tmp_path / "run")
    (finished,) = runs.finished_runs(tmp_path, {"run": 100})["run"]
    assert finished.logs["success"][:, 0].tolist() == [0, 50, 100]
    assert runs.finished_runs(tmp_path, {"run": 150}) == {}


def test_ratios_compare_the_times_to_lasting_success():
    need_other_libraries()
    import learning

    curves = {(learning.OURS, 0): (0, 1), (learning.OURS, 1): (0, 0, 1), (learning.SB3, 0): (0, 0, 1)}
    rows = []
    for (library, seed), successes in (curves | {(learning.SB3, 1): (0, 0, 0)}).items():
        about = {"task": "PointReach, DDPG", "settings": learning.EQUAL, "library": library, "seed": seed}
        for i, success in enumerate(successes):
            rows.append(about | {"steps": 500 * i, "seconds": 2.0 * i, "cpu_seconds": 1.0 * i, "success": success})
    assert learning.first_success(rows[:5], held=2) is None
    ours, theirs = learning.summarize(rows)
    assert ours["steps to 0.95"] == "750 (500 to 1,000)"
    assert theirs["steps to 0.95"] == "not reached (1,000 to not reached)"
    assert (ours["ratio of seconds"], theirs["ratio of seconds"]) == ("0.75 (0.50 to 1.00)", "")
