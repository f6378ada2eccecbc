"""A training script goes on from its checkpoints as if it had never stopped, in a folder that is its own."""

import importlib.util
import shutil

import numpy as np
import pytest
import torch
from script_runs import differences, logged, state_of, train
from settings import read_config

RUNS = [
    "dqn env.num_envs=5 buffer.prioritized=error buffer.n_steps=3 double=true",
    "dqn env.num_envs=5 buffer.prioritized=error hindsight.when=writing",
    "ddpg buffer.prioritized=movement matmul_precision=medium",
    "ddpg hindsight.enabled=false action_penalty=1.0",
    "ddpg env.num_envs=5 normalization.enabled=true buffer.n_steps=3 hindsight.strategy=final"
    " inputs=[observation,desired_goal]",
    "td3 buffer.prioritized=error hindsight.strategy=episode",
    "td3 updates_per_step=0.02 logger.interval=50",  # logs the last known values: updates are at 100, 150, 200
    "sac loss=tqc",
    pytest.param(
        "sac env.num_envs=2 env.parallel=true normalization.enabled=true buffer.prioritized=error"
        " env.clip_observation=200 evaluation.parallel=false",
        marks=pytest.mark.slow,  # it starts four processes
    ),
]


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(run, tmp_path):
    if "logger" not in run:
        run += " logger.interval=150"  # values that are not logged yet are in the checkpoint
    whole = train(run, tmp_path / "whole")
    expected = state_of(whole)  # before another run draws
    checkpoint = "checkpoints/checkpoint-000000000100"
    shutil.copytree(tmp_path / "whole" / checkpoint, tmp_path / "resumed" / checkpoint)
    resumed = train(f"{run} resume={tmp_path / 'resumed'}", tmp_path / "resumed")
    assert whole.counters["steps"] == resumed.counters["steps"] == 200
    assert whole.counters["updates"] == resumed.counters["updates"] == 150 * whole.config.updates_per_step
    assert differences(expected, state_of(resumed)) == []
    if "updates_per_step" in run:
        assert [step for step, _ in whole.history["train/loss_actor"]] == [100, 150, 200]

    batches = []
    for training in (whole, resumed):
        torch.manual_seed(7)
        np.random.seed(7)  # noqa: NPY002
        batches.append(training.replay_buffer.sample(32))
    assert (batches[0] == batches[1]).all()
    share = float(batches[0]["hindsight", "relabelled"].float().mean())
    assert share == 0 if "hindsight.enabled=false" in run else share > 0.4


@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac"])
def test_the_curve_goes_on_where_it_stopped(script, tmp_path):
    command = f"{script} logger.kinds=[csv,tensorboard]"
    stopped = train(f"{command} total_steps=150", tmp_path)
    assert [step for step, _ in stopped.history["time/training_seconds"]] == [100, 150]  # the last step is logged
    before = {name: list(values) for name, values in stopped.history.items()}
    resumed = train(f"{command} resume={tmp_path}", tmp_path, picture=True)
    for name, values in before.items():
        assert resumed.history[name][: len(values)] == values
    assert [step for step, _ in resumed.history["evaluation/success"]] == [0, 100, 150, 200]
    loss = "train/loss" if script == "dqn" else "train/loss_actor"
    for name in ("evaluation/return", "evaluation/distance", "train/relabelled", "train/q_value", loss):
        rows = logged(tmp_path, name)
        assert rows == resumed.history[name]
        assert rows[-1][0] == 200
    assert list((tmp_path / "logs" / "tensorboard").glob("events*"))
    assert (tmp_path / "training.png").stat().st_size > 10_000


# The folder of a run


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train("dqn", folder)
    return folder


@pytest.fixture
def folder(finished_run, tmp_path):
    """The folder of a run of dqn, of 200 steps, with checkpoints of steps 100 and 200."""
    return shutil.copytree(finished_run, tmp_path / "run")


def test_a_folder_with_a_run_takes_no_other(folder):
    with pytest.raises(SystemExit, match=r"has a run: go on with resume="):
        train("dqn total_steps=50 seed=1", folder)
    resumed = train(f"dqn total_steps=300 resume={folder}", folder)
    assert (resumed.steps, resumed.config.seed) == (300, 0)


def test_a_folder_takes_one_run_and_is_not_resumed_before_its_first_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match=r"There is no run in .*: it has no config\.yaml"):
        read_config(tmp_path)
    (tmp_path / "config.yaml").touch()  # of a run that has just begun, or was killed
    with pytest.raises(SystemExit, match="has a run that has no checkpoint: delete it, or name another folder"):
        train("ddpg", tmp_path)
    with pytest.raises(SystemExit, match="has no checkpoint to go on from: delete it and start anew"):
        train(f"ddpg resume={tmp_path}", tmp_path)


@pytest.mark.parametrize(
    ("kind", "message"), [("tensorbord", "csv, tensorboard and wandb, not tensorbord"), ("wandb", "pip install wandb")]
)
def test_a_missing_logger_leaves_a_run_as_it_is(kind, message, folder):
    if kind == "wandb" and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match=message):
        train(f"dqn resume={folder} logger.kinds=[csv,{kind}]", folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_does_not_go_back(folder):
    with pytest.raises(SystemExit, match="has 200 steps already: give it more total_steps"):
        train(f"dqn total_steps=100 resume={folder}", folder)
    assert read_config(folder).total_steps == 200


def test_a_killed_run_logs_no_step_twice(folder):
    shutil.rmtree(folder / "checkpoints" / "checkpoint-000000000200")  # as if killed just before
    (folder / "checkpoints" / ".checkpoint-000000000200.stage-0").mkdir()  # and while it was being written
    resumed = train(f"dqn resume={folder}", folder)
    steps = [step for step, _ in logged(folder, "train/loss")]
    assert steps == [step for step, _ in resumed.history["train/loss"]] == [100, 200]
    assert not list((folder / "checkpoints").glob(".checkpoint-*"))
