"""The benchmarks that train several seeds write and read their runs, and their tables show the right numbers."""

import shutil

import movement
import numpy as np
import pytest
import suite
from compare import Run
from omegaconf import OmegaConf
from runs import METRICS, finished_runs, read, train, write


def make_run(seed, steps, **values):
    """Return a run that was evaluated after steps ``[n]``, with values ``[n]`` of each metric."""
    logs = {metric: np.stack([np.array(steps, dtype=float), values[metric]], 1) for metric in METRICS}
    return Run(OmegaConf.create({"seed": seed}), logs)


def test_a_file_of_results_gives_the_same_table(tmp_path):
    draws = np.random.default_rng(0)
    groups = {
        way: [make_run(seed, [0, 100, 200], **{metric: draws.random(3) for metric in METRICS}) for seed in seeds]
        for way, seeds in (("neither", [1]), ("both", [1, 2]))
    }
    write(groups, tmp_path / "results.csv")
    expected = movement.table(groups, [100, 200])
    assert "1, 2 |" in expected
    assert movement.table(read(tmp_path / "results.csv"), [100, 200]) == expected


def test_the_table_of_tasks_shows_the_last_step_of_each():
    steps = suite.TASKS["FetchPush"].steps
    runs = [
        make_run(seed, [0, steps], success=[0.1, success], **{"return": [-50, total], "seconds": [0, hours * 3600]})
        for seed, success, total, hours in ((20, 0.9, -10, 0.5), (21, 1.0, -8, 0.25), (22, 0.7, -20, 1.0))
    ]
    row = suite.table({"FetchPush": runs}).splitlines()[-1]
    cells = ["FetchPush", "240,000", "0.90 (0.70 to 1.00)", "-10.0 (-20.0 to -8.0)", "-8.8 at 1,000,000"]
    assert row.strip("| ").split(" | ") == [*cells, "0.50 (0.25 to 1.00)", "20, 21, 22"]


def write_run(folder, config, evaluations):
    """Write the logs of a run as the training scripts do."""
    (folder / "logs/csv/scalars/evaluation").mkdir(parents=True)
    (folder / "logs/csv/scalars/train").mkdir()
    OmegaConf.save(config, folder / "config.yaml")
    for metric in ("evaluation/success", "evaluation/return", "evaluation/distance", "train/seconds"):
        np.savetxt(folder / f"logs/csv/scalars/{metric}.csv", evaluations, delimiter=",")


def test_runs_that_have_not_reached_the_last_step_are_left_out(tmp_path):
    for seed, last in ((1, 200), (2, 100)):
        write_run(tmp_path / "a" / str(seed), {"seed": seed}, [[0, 0.0], [last, 1.0]])
    write_run(tmp_path / "b" / "1", {"seed": 1}, [[0, 0.0], [100, 1.0]])
    (tmp_path / "c").mkdir()
    found = finished_runs(tmp_path, {"a": 200, "b": 200, "c": 200, "d": 200})
    assert {group: [run.config.seed for run in runs] for group, runs in found.items()} == {"a": [1]}


def test_a_run_continues_only_with_its_own_settings(tmp_path):
    folder = tmp_path / "run"
    settings = [
        "total_steps=100", "collector.random_steps=50", "hidden=[8]", "evaluation.interval=50", "logger.interval=50",
        "checkpoint.interval=50", "evaluation.episodes=1", "logger.kinds=[csv]",
    ]  # fmt: skip
    train("dqn", settings, folder)
    (finished,) = finished_runs(tmp_path, {"run": 100})["run"]
    assert finished.logs["success"][:, 0].tolist() == [0, 50, 100]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    train("dqn", settings, folder)  # it is finished
    with pytest.raises(SystemExit, match="has other settings: delete it, or choose another --output"):
        train("dqn", [*settings, "gamma=0.9"], folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    shutil.rmtree(folder / "checkpoints" / "checkpoint-000000000100")  # as if it were interrupted
    train("dqn", settings, folder)
    (continued,) = finished_runs(tmp_path, {"run": 100})["run"]
    np.testing.assert_array_equal(continued.logs["return"], finished.logs["return"])
