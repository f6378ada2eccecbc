"""A training script resumes from its checkpoints as if it had never stopped, in its own folder."""

import importlib.util
import multiprocessing
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import run
import show
import torch
from hydra.errors import ConfigCompositionException
from script_runs import configure, differences, drawn, logged, state_of, train
from settings import LoggerKind
from start import read_settings

RUNS = [
    "dqn env.num_envs=5 buffer.prioritized=error buffer.n_steps=3 double=true",
    "dqn env.num_envs=5 buffer.prioritized=error hindsight.when=writing",
    "ddpg buffer.prioritized=movement ++env.kwargs.max_episode_steps=25 matmul_precision=medium",
    "ddpg hindsight.enabled=false action_penalty=1.0 average=0.99 exploration.final=0.1",
    "ddpg env.num_envs=5 normalization.enabled=true buffer.n_steps=3 hindsight.strategy=final"
    " inputs=[observation,desired_goal]",
    "td3 buffer.prioritized=error hindsight.strategy=episode",
    "td3 updates_per_step=0.02 logger.interval=50",  # updates at 100, 150 and 200, the second without the actor
    "sac loss=tqc",
    pytest.param(
        "sac env.num_envs=2 env.parallel=true normalization.enabled=true buffer.prioritized=error"
        " env.clip_observation=200 evaluation.parallel=false",
        marks=pytest.mark.slow,  # it starts four processes
    ),
]


@pytest.mark.parametrize("command", RUNS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(command, tmp_path):
    whole = train(command, tmp_path / "whole")
    expected = state_of(whole)  # before another run draws
    checkpoint = "checkpoints/checkpoint-000000000100"
    shutil.copytree(tmp_path / "whole" / checkpoint, tmp_path / "resumed" / checkpoint)
    resumed = train(f"{command} resume={tmp_path / 'resumed'}", tmp_path / "resumed")
    found = state_of(resumed)
    progress = whole.components["progress"]
    assert (progress["steps"], progress["updates"]) == (200, 150 * whole.config.updates_per_step)
    for part in ("policy", "loss", "buffer", "log", "progress", "rng"):
        assert any(path.startswith(f"['{part}']") for path in expected)
    assert differences(expected, found) == []
    assert not multiprocessing.active_children()
    if "updates_per_step" in command:
        steps = {name: [step for step, _ in values] for name, values in whole.components["log"].items()}
        assert steps["train/seconds"] == [50, 100, 150, 200]
        assert steps["train/loss_qvalue"] == [100, 150, 200]
        assert steps["train/loss_actor"] == [100, 200]

    batches = [drawn(run, 32).exclude("hindsight_stamp", ("collector", "traj_ids")) for run in (whole, resumed)]
    assert (batches[0] == batches[1]).all()
    share = float(batches[0]["hindsight", "relabelled"].float().mean())
    assert share == 0 if "hindsight.enabled=false" in command else share > 0.4


@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac"])
def test_the_curve_goes_on_where_it_stopped(script, tmp_path):
    command = f"{script} speedup=none logger.kinds=[csv,tensorboard]"
    stopped = train(f"{command} total_steps=150", tmp_path).components["log"]
    assert [step for step, _ in stopped["train/seconds"]] == [100, 150]  # the last step is logged
    before = {name: list(values) for name, values in stopped.items()}
    history = train(f"{command} resume={tmp_path}", tmp_path, picture=True).components["log"]
    for name, values in before.items():
        assert history[name][: len(values)] == values
    assert [step for step, _ in history["evaluation/success"]] == [0, 100, 150, 200]
    losses = {"dqn": ["loss"], "td3": ["loss_actor", "loss_qvalue", "q_value"], "ddpg": ["loss_actor", "q_value"]}
    for name in losses.get(script, ["loss_actor", "q_value", "entropy"]):
        assert logged(tmp_path, f"train/{name}")[-1][0] == 200
    for name, values in history.items():
        assert logged(tmp_path, name) == values
    assert list((tmp_path / "logs" / "tensorboard").glob("events*"))
    assert (tmp_path / "training.png").stat().st_size > 10_000


# The folder of a run

NEWEST = Path("checkpoints/checkpoint-000000000200")
BUFFER = "components/0000-buffer"


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
    with pytest.raises(SystemExit, match=r"is not empty: continue a run in it with resume="):
        train("dqn total_steps=100 seed=1", folder)
    resumed = train(f"dqn total_steps=300 resume={folder}", folder)
    assert (resumed.components["progress"]["steps"], resumed.config.seed) == (300, 0)


def test_a_folder_takes_one_run_and_is_not_resumed_before_its_first_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match=r"There is no run in .*: it has no config\.yaml"):
        read_settings(tmp_path)
    (tmp_path / "config.yaml").touch()  # of a run that has just begun, or was killed
    with pytest.raises(SystemExit, match=r"is not empty: continue a run in it .*, delete it, or name another folder"):
        train("ddpg", tmp_path)
    with pytest.raises(SystemExit, match="has no checkpoint: delete it and start again"):
        train(f"ddpg resume={tmp_path}", tmp_path)


def test_a_folder_with_other_files_takes_no_run(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "results.csv").write_text("1,2")
    with pytest.raises(SystemExit, match=r"is not empty: continue a run in it .*, delete it, or name another folder"):
        train("ddpg", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["logs", "results.csv"]


def test_only_one_of_two_runs_that_start_at_the_same_time_gets_the_folder(folder, monkeypatch):
    before = files_in(folder)
    monkeypatch.setattr(run.Path, "iterdir", lambda _: iter(()))  # as the second run saw it a moment ago
    with pytest.raises(FileExistsError):
        train("dqn", folder)
    monkeypatch.undo()
    assert before == files_in(folder)


@pytest.mark.parametrize("text", ["", "a: 1", "[1, 2]"])
def test_a_file_of_another_program_is_no_run(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(SystemExit, match=r"no config\.yaml with the settings of a run"):
        read_settings(tmp_path)


def test_settings_that_were_not_written_completely_are_refused_with_the_name_of_their_file(folder, run_script):
    file = folder / "config.yaml"
    text = file.read_text()
    show.load_settings(folder)
    for length in range(20, len(text) - 1, 13):
        file.write_text(text[:length])
        with pytest.raises(SystemExit, match=r"config\.yaml is incomplete or damaged: .* or start a new run"):
            show.load_settings(folder)
    with pytest.raises(SystemExit, match=r"config\.yaml is incomplete or damaged: .* or start a new run"):
        run_script("dqn", f"resume={folder}")


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_unknown_logger_leaves_a_run_as_it_is(folder):
    before = files_in(folder)
    with pytest.raises(ConfigCompositionException, match=r"logger\.kinds=\[csv,tensorbord\]"):
        train(f"dqn resume={folder} logger.kinds=[csv,tensorbord]", folder)
    assert before == files_in(folder)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_that_is_not_installed_leaves_a_run_as_it_is(folder):
    before = files_in(folder)
    with pytest.raises(SystemExit, match="pip install wandb"):
        train(f"dqn resume={folder} logger.kinds=[csv,wandb]", folder)
    assert before == files_in(folder)


def test_runs_in_weights_and_biases_are_named_after_their_folders_and_sweeps(tmp_path, monkeypatch):
    names = {}
    monkeypatch.setattr(run, "get_logger", lambda kind, folder, name: names.update({kind: name}))
    config = configure("dqn")
    config.logger.kinds = [LoggerKind.csv, LoggerKind.wandb]
    run.Log(config, tmp_path / "multirun" / "0", {})
    assert names == {"csv": "csv", "wandb": "multirun/0"}


def test_a_resumed_run_explores_with_the_given_share_of_random_actions(folder):
    run = train(f"dqn total_steps=400 speedup=none resume={folder} exploration.random_actions=1.0", folder)
    actions = run.components["buffer"].storage[:]["action"]  # of steps 250 to 400
    assert torch.bincount(actions, minlength=5).min() > 0.08 * len(actions)


def test_a_finished_run_can_be_resumed(folder):
    (folder / NEWEST / "sizes.json").unlink()  # as in a checkpoint that TorchRL's CheckpointRotation saved
    history = train(f"dqn resume={folder}", folder).components["log"]
    assert [step for step, _ in history["evaluation/success"]] == [0, 100, 200]


def test_a_run_does_not_go_back(folder):
    with pytest.raises(SystemExit, match="already has 200 steps: set a larger total_steps"):
        train(f"dqn total_steps=100 resume={folder}", folder)
    assert read_settings(folder).total_steps == 200


def test_a_killed_run_logs_no_step_twice(folder):
    shutil.rmtree(folder / "checkpoints" / "checkpoint-000000000200")  # as if killed just before
    (folder / "checkpoints" / ".checkpoint-000000000200.stage-0").mkdir()  # and while it was being written
    history = train(f"dqn resume={folder}", folder).components["log"]
    assert logged(folder, "train/loss") == history["train/loss"]
    assert [step for step, _ in history["train/loss"]] == [100, 200]
    assert not list((folder / "checkpoints").glob(".checkpoint-*"))


# Damaged checkpoints, and full disks


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("manifest.json", None),
        (f"{BUFFER}/storage/next/done.memmap", 0),
        (f"{BUFFER}/transform.t", 3),
        ("components/0003-optimizer/state.json", 0),
        ("components/0004-policy/state/tensor_00000000.memmap", None),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_run_continues_from_the_previous_one(name, size, folder):
    file = folder / NEWEST / name
    file.unlink() if size is None else os.truncate(file, size)
    with pytest.raises(SystemExit, match=rf"{NEWEST} is damaged \({name}\): name another one with --step"):
        show.load_policy(configure("dqn"), folder / NEWEST)
    message = f"{NEWEST} is damaged: {name} missing or of another size. The run continues from checkpoint-000000000100"
    with pytest.warns(UserWarning, match=message):
        history = train(f"dqn resume={folder}", folder).components["log"]
    assert [step for step, _ in history["train/loss"]] == [100, 200]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "checkpoint-000000000100", "checkpoint-000000000200", "damaged-checkpoint-000000000200"
    }  # fmt: skip
    assert run.damage_of(folder / NEWEST) == ""


def test_a_run_whose_checkpoints_are_all_damaged_is_not_resumed(folder):
    for checkpoint in (folder / "checkpoints").iterdir():
        os.truncate(checkpoint / "sizes.json", 0)
    before = files_in(folder)
    names = r"checkpoint-0*200 is damaged \(sizes.json\)\. checkpoint-0*100 is damaged \(sizes.json\)\."
    with pytest.raises(SystemExit, match=f"has no checkpoint: delete it and start again. {names}"):
        train(f"dqn resume={folder}", folder)
    assert before == files_in(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the names of open files are unknown")
def test_a_checkpoint_gets_its_name_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced, named, rename = set(), [], Path.rename

    def note(path, target):
        named.append((target.name, {each for each in (path, *path.rglob("*")) if each not in synced}))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", lambda file: synced.add(Path(f"/proc/self/fd/{file}").resolve()))
    monkeypatch.setattr(Path, "rename", note)
    train("dqn total_steps=100", tmp_path)
    assert named == [("checkpoint-000000000100", set())]
    assert tmp_path / "checkpoints" in synced


@pytest.mark.parametrize("command", ["dqn buffer.prioritized=error hidden=[512,512]", "sac hidden=[512,512]"])
def test_a_full_disk_stops_a_run_with_the_missing_space_before_it_saves(command, tmp_path, monkeypatch):
    train(f"{command} total_steps=100", tmp_path)
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*"))
    assert size > 3e6
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=size))  # too little for whole blocks
    message = r"checkpoint-0*200 needs .* MB, and the disk has .* MB free: free (0.9|1.0) MB more, and continue"
    with pytest.raises(SystemExit, match=message):
        train(f"{command} resume={tmp_path}", tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-000000000100"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=size + 2**20 + 50_000))
    assert train(f"{command} resume={tmp_path}", tmp_path).components["progress"]["steps"] == 200
