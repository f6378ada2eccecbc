"""The commands for memory, learning and a GPU run with tiny sizes, and their tables show the right numbers."""

import dataclasses
from functools import partial

import gpu
import learning
import memory
import migration
import numpy as np
import pytest

from support.pages import DOCS


def test_the_memory_benchmark_prints_its_tables_and_fails_if_memory_grows(run, monkeypatch):
    monkeypatch.setattr(memory, "print_running", lambda: None)  # allocates a gigabyte
    monkeypatch.setattr(memory, "script_bytes", lambda script, when: 1.0)  # trains
    monkeypatch.setattr(memory, "print_adopted", partial(memory.print_adopted, episodes=200))
    monkeypatch.setattr(memory, "tqdm", lambda chunks, **options: [1, 100, 200])
    printed = run(memory, "--millions", 2)
    assert "| `PackedStorage` | 304 | 288 |" in printed
    assert "| `adopt`, 10 k transitions | seconds | bytes per transition |" in printed
    monkeypatch.setattr(memory, "write_many", lambda *arguments: [(1_000_000, 1.0), (2_000_000, 20.0)])
    with pytest.raises(SystemExit, match=r"with hindsight by 19.0 MiB, without by 19.0 MiB"):
        run(memory, "--millions", 2)


def test_the_gpu_benchmark_prints_its_tables_on_a_cpu(run, monkeypatch):
    small = {"stored": (1000,), "batch_sizes": (64,), "rounds": 1, "calls": 1, "num_envs": 8, "steps": 2000}
    monkeypatch.setattr(gpu, "SMALL", dataclasses.replace(gpu.SMALL, **small))
    printed = run(gpu, "--device", "cpu")
    for title in ("as one CUDA graph", "synchronizations per call", "updates per second", "Profile of ten calls"):
        assert title in printed


def test_learning_trains_continues_and_prints_medians_and_ranges(run, monkeypatch, tmp_path):
    small = "collector.random_steps=50 hidden=[8] evaluation.interval=50 logger.interval=50 evaluation.episodes=1"
    script = learning.Script("dqn", 100, (*small.split(), "checkpoint.interval=100"))
    monkeypatch.setitem(learning.SCRIPTS, "writing", {"BitFlipping": script})
    arguments = ["writing", "--seeds", 1, "--output", tmp_path]
    first = run(learning, *arguments, "--columns", 0, 100).splitlines()[-3:]
    assert [row.split(" | ")[0] for row in first[1:]] == [f"| BitFlipping, {way}" for way in learning.WAYS["writing"]]
    figure, results = tmp_path / "figure.png", tmp_path / "results.csv"
    for again in ([*arguments, "--figure", figure], ["writing", "--results", results]):  # trains nothing
        assert run(learning, *again, "--columns", 0, 100).splitlines()[-3:] == first
    monkeypatch.setitem(learning.SCRIPTS, "writing", {"BitFlipping": script._replace(overrides=script.overrides[:-1])})
    with pytest.raises(SystemExit, match="has other settings: delete it, or choose another --output"):
        run(learning, *arguments)


def test_the_table_of_the_suite_is_that_of_its_page(run):
    results = DOCS / "reference/results"
    table = (results / "fetch.md").read_text().split("\n\n")[2]
    files = results / "fetch.csv", results / "goal-selection.csv"
    assert run(learning, "tuned", "--results", *files).strip() == table


def check_trained_once(run, monkeypatch, arguments, row):
    """Check that a command trains, and that it prints the same row again without training."""
    first = run(learning, *arguments).splitlines()[-1]
    assert first.startswith(row)
    monkeypatch.setattr(learning.subprocess, "run", None)
    assert run(learning, *arguments).splitlines()[-1] == first


def test_learning_trains_offline_algorithms_once(run, monkeypatch, tmp_path):
    ogbench_data = pytest.importorskip("pointmaze_data", reason="the data need the package ogbench")
    maze = "pointmaze-medium-v0"
    np.savez(tmp_path / f"{maze}.npz", **ogbench_data.generate(maze, episodes=2, steps=50, seed=0))
    small = f"env={maze}", "hidden=[8]", "batch_size=8", "evaluation.interval=2", "evaluation.episodes=1"
    monkeypatch.setitem(learning.SCRIPTS, "offline", {maze: learning.Script("offline", 4, small)})
    monkeypatch.setitem(learning.WAYS, "offline", {"GCBC": ("algorithm=gcbc",)})
    monkeypatch.setattr(learning, "ONE_SEED", {"GCBC"})
    arguments = ["offline", "--seeds", 1, 2, "--output", tmp_path, "--columns", 2, 4]
    check_trained_once(run, monkeypatch, arguments, f"| {maze}, GCBC | 4 | ")


def test_learning_trains_contrastive_rl_once(run, monkeypatch, tmp_path):
    monkeypatch.setitem(learning.SCRIPTS, "crl", {"PointReach": learning.Script("sac", 550)})
    monkeypatch.setitem(learning.WAYS, "crl", {learning.CRL: ()})
    arguments = ["crl", "--seeds", 1, "--output", tmp_path, "--columns", 0]
    check_trained_once(run, monkeypatch, arguments, "| PointReach, contrastive RL | 550 | ")


def test_ratios_compare_the_times_to_lasting_success(run, tmp_path):
    pytest.importorskip("stable_baselines3", reason="the benchmarks need the extra 'benchmarks'")
    curves = {("ours", 0): (0, 1), ("ours", 1): (0, 0, 1)}
    curves |= {("Stable-Baselines3", 0): (0, 0, 1), ("Stable-Baselines3", 1): (0, 0, 0)}
    rows = [
        {"task": "PointReach, DDPG", "way": way, "seed": seed, "success": success, "steps": 500 * i, "cpu_seconds": i}
        for (way, seed), successes in curves.items()
        for i, success in enumerate(successes)
    ]
    assert learning.first_success(rows[:5], held=2) is None
    learning.write(tmp_path / "results.csv", rows)
    printed = run(learning, "sb3", "--results", tmp_path / "results.csv", "--columns", 500)
    ours, theirs = (row.strip("| ").split(" | ") for row in printed.splitlines()[-2:])
    assert ours[1:5] == ["0.75 (0.50 to 1.00)", "0.50 (0.00 to 1.00)", "1.00 (1.00 to 1.00)", "750 (500 to 1,000)"]
    assert theirs[4] == "not reached (1,000 to not reached)"


@pytest.mark.slow  # trains both libraries
def test_both_libraries_train_with_the_same_evaluations(run, tmp_path):
    pytest.importorskip("stable_baselines3", reason="the benchmarks need the extra 'benchmarks'")
    size = "--seeds", 0, "--steps", 1000, "--episodes", 2, "--output", tmp_path
    run(learning, "sb3", "--tasks", "PointReach, TD3", "PointReach, SAC", *size)
    assert [row["steps"] for row in learning.read([tmp_path / "results.csv"])] == [0, 500, 1000] * 4


@pytest.mark.slow  # trains both libraries
def test_both_scripts_of_the_migration_page_are_evaluated(run, monkeypatch):
    for library in ("stable_baselines3", "gymnasium_robotics"):
        pytest.importorskip(library, reason="the benchmarks need the extra 'benchmarks'")
    monkeypatch.setattr(migration, "EPISODES", 2)
    printed = run(migration, "--seeds", 0, "--steps", 600)
    assert [row.split(" | ")[0] for row in printed.splitlines()[-2:]] == ["| Stable-Baselines3", "| torchrl_her"]
