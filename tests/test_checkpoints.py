"""Checkpoints are whole after each kill, restore all that they contain, and end the running episodes."""

import itertools
import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torchrl.checkpoint import CheckpointError, CheckpointRotation, GlobalRNGState
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)

from support import tape
from support.data_sets import bytes_of
from support.factories import forked, make_augmentation, make_transform, uids
from support.pages import run_block
from support.recorded import recorded_in
from support.world import transitions, whole_episodes
from torchrl_her import Checkpoints, PackedStorage

SIZE = 200


def make_buffer(storage=LazyTensorStorage, transform=None, sampler=None, size=SIZE):
    transform = transform or make_transform(her_ratio=1.0, capacity=size)
    return TensorDictReplayBuffer(storage=storage(size), transform=transform, sampler=sampler, batch_size=50)


def saved(folder, *steps, **components):
    """Save a dictionary with the step at each of some steps, and return its checkpoints."""
    parts = {"progress": {"step": 0}} | components
    checkpoints = Checkpoints(folder, **parts)
    for step in steps:
        parts["progress"]["step"] = step
        checkpoints.save(step)
    return checkpoints


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# What is restored


def make_parts(storage):
    loss = torch.nn.Linear(2, 2)
    return {"buffer": make_buffer(storage), "loss": loss, "optimizer": torch.optim.Adam(loss.parameters())}


@pytest.mark.parametrize("storage", [LazyTensorStorage, PackedStorage])
def test_a_loaded_training_samples_and_learns_like_the_saved_one(storage, tmp_path):
    parts, twin = make_parts(storage), make_parts(storage)
    recorded = recorded_in(parts["buffer"], 2)
    recorded.play([["go"] * 5 + ["truncated"] + ["go"] * 7, ["go"] * 9])  # both environments are in an episode
    parts["loss"](torch.ones(2)).sum().backward()
    parts["optimizer"].step()
    Checkpoints(tmp_path, **parts, rng=GlobalRNGState()).save(100)
    recorded.flush()
    expected = parts["buffer"].sample(500)
    torch.manual_seed(1)
    assert Checkpoints(tmp_path, **twin, rng=GlobalRNGState()).load() == 100
    assert (twin["buffer"].sample(500) == expected).all()
    recorded.rb = twin["buffer"]
    assert recorded.check(expected) == 500
    assert torch.equal(twin["loss"].weight, parts["loss"].weight)
    assert twin["optimizer"].state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("ids", [True, False])
def test_episodes_that_were_running_end_and_new_ones_follow(ids, tmp_path):
    """The environments go on, so only the end of the running episodes separates the goals of both runs."""
    recorded, twin = recorded_in(make_buffer(), 2, ids=ids), make_buffer()
    recorded.play([["go"] * 7, ["go"] * 4])
    Checkpoints(tmp_path, buffer=recorded.rb).save(0)
    assert recorded.rb.transform[0].report().running == 2, "saving ends no episode"
    Checkpoints(tmp_path, buffer=twin).load()
    assert twin.transform[0].report().running == 0
    recorded.rb = twin
    recorded.oracle.flush()
    recorded.play([["go"] * 3 + ["truncated"], ["go"] * 6 + ["truncated"]])
    assert recorded.check(twin[[*range(len(twin))] * 20]) == 20 * len(twin) == 20 * 22


def test_episodes_end_in_all_transforms_of_all_buffers(tmp_path):
    def make():
        members = [make_buffer() for _ in range(2)]
        return members, {
            "demonstrations": make_buffer(transform=make_augmentation()),
            "both": ReplayBufferEnsemble(*members, batch_size=8),
        }

    for number, running in enumerate((1, 0)):
        members, parts = make()
        checkpoints = Checkpoints(tmp_path, **parts)
        assert checkpoints.load() == (0 if number else None)
        if not number:
            for rb in (*members, parts["demonstrations"]):
                rb.extend(transitions(["truncated", "go", "go", "go"]))
            checkpoints.save(0)
        reports = [rb.transform[0].report() for rb in (*members, parts["demonstrations"])]
        assert [report.running for report in reports] == [running] * 3
        assert [len(rb) for rb in members] == [4, 4]


def test_the_code_of_the_page_saves_and_resumes(tmp_path):
    for count in (20, 40):
        rb, loss = make_buffer(), torch.nn.Linear(2, 2)
        names = {"rb": rb, "loss": loss, "folder": tmp_path, "data": tape.collected(20)}
        names["optimizer"] = torch.optim.Adam(loss.parameters())
        run_block("how-to/checkpoints", 0, names)
        assert len(rb) == names["step"] == count - 20
        rb.extend(names["data"])
        run_block("how-to/checkpoints", 1, names)
        assert names["step"] == count
    assert names_in(tmp_path) == ["checkpoint-000000000020", "checkpoint-000000000040"]


# Folders


def test_without_a_checkpoint_nothing_is_loaded_or_created(tmp_path):
    progress = {"step": 5}
    assert Checkpoints(tmp_path / "run", progress=progress).load() is None
    assert progress == {"step": 5}
    assert names_in(tmp_path) == []


def test_the_newest_checkpoints_are_kept(tmp_path):
    for folder, keep, kept in ((tmp_path / "one", 1, [9_000]), (tmp_path / "three" / "a", 3, [20, 300, 9_000])):
        checkpoints = Checkpoints(folder, keep=keep, progress={})
        paths = [checkpoints.save(step) for step in (0, 20, 300, 9_000)]
        assert [path.name for path in paths[-len(kept) :]] == names_in(folder)
        assert names_in(folder) == [f"checkpoint-{step:012}" for step in kept]
        assert checkpoints.load() == 9_000


# The file operations of a save, as the audit hooks of Python name them.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def killed_at(operation, action):
    """Run an action in a fork that is killed before a file operation; return whether it reached this operation."""
    operations = itertools.count()

    def kill(event, arguments):
        if event in CHANGES and next(operations) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def run():
        sys.addaudithook(kill)
        action()

    return os.WIFSIGNALED(forked(run))


@pytest.mark.parametrize("every", [25, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("storage", [LazyMemmapStorage, PackedStorage])
def test_after_a_kill_at_any_file_operation_of_a_save_or_a_load_a_whole_checkpoint_is_loaded(storage, every, tmp_path):
    recorded, newest = recorded_in(make_buffer(storage), 2), set()
    recorded.play([whole_episodes(5)] * 2)
    saved(tmp_path, 10, buffer=recorded.rb)
    (tmp_path / "checkpoint-best").mkdir()  # the user's own
    for number in itertools.count():
        recorded.play([whole_episodes(5)] * 2)
        written = len(recorded.oracle.order)
        is_killed = killed_at(every * number, partial(saved, tmp_path, written, buffer=recorded.rb))
        twin, progress = make_buffer(storage), {}
        load = Checkpoints(tmp_path, buffer=twin, progress=progress).load
        killed_at(number % 20, load)
        step = load()
        assert step == progress["step"] == twin.write_count
        assert uids(twin[:]) == [*range(max(0, step - SIZE), step)]
        assert replace(recorded, rb=twin).check() == len(twin)
        names = [f"checkpoint-{each:012}" for each in range(10, written + 1, 10)] + ["checkpoint-best"]
        assert {*names_in(tmp_path)} <= {*names}, "nothing is left of killed saves, and no checkpoint is damaged"
        newest.add(step == written)
        if not is_killed:
            break
    assert newest == {True, False}
    assert "checkpoint-best" in names_in(tmp_path)


def test_a_checkpoint_gets_its_name_when_all_of_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced, named, rename = set(), [], Path.rename
    folder = tmp_path / "run"

    def rename_and_record(source, target):
        named.append((target.name, {source, *source.rglob("*")} - synced))
        synced.clear()
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda file: synced.add(Path(f"/proc/self/fd/{file}").resolve()))
    monkeypatch.setattr(Path, "rename", rename_and_record)
    rb = make_buffer()
    rb.extend(transitions(["go"]))
    saved(folder, 7, buffer=rb)
    assert named == [("checkpoint-000000000007", set())]
    assert synced == {folder}


# Damages


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "manifest.json": os.unlink,
    "sizes.json": truncate,
    "components/0000-buffer/storage/observation.memmap": truncate,
    "components/0001-progress/value.json": os.unlink,
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.filterwarnings("error")
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_is_loaded(name, tmp_path):
    rb, progress = make_buffer(), {}
    rb.extend(transitions(["go"] * 5))
    checkpoints = Checkpoints(tmp_path, buffer=rb, progress=progress)
    checkpoints.save(1)
    rb.extend(transitions(["go"] * 3))
    progress["step"] = 2
    for _ in range(2):
        newest = checkpoints.save(2)
        DAMAGES[name](newest / name)
        message = rf"{newest} is damaged: {name} missing or of another size.* from checkpoint-000000000001"
        with pytest.warns(UserWarning, match=message) as caught:
            assert checkpoints.load() == 1
        assert caught[0].filename == __file__
        assert (len(rb), progress) == (5, {})
        assert names_in(tmp_path) == ["checkpoint-000000000001", "damaged-checkpoint-000000000002"]
        assert checkpoints.load() == 1  # without a warning


def test_if_all_checkpoints_are_damaged_loading_is_an_error_and_changes_nothing(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        os.unlink(tmp_path / f"checkpoint-{step:012}" / "manifest.json")
    shutil.copytree(tmp_path / "checkpoint-000000000001", tmp_path / ".checkpoint-000000000003")
    before = bytes_of(tmp_path)
    message = r"0002 is damaged \(manifest.json\)\. checkpoint-0*1 is damaged .* There is no other checkpoint in "
    with pytest.raises(OSError, match=message):
        checkpoints.load()
    assert bytes_of(tmp_path) == before


def test_checkpoints_of_a_rotation_are_loaded(tmp_path):
    rotation, checkpoints = CheckpointRotation(tmp_path, keep_last=2), saved(tmp_path)
    rotation.save(checkpoints._checkpoint, step=3)
    assert checkpoints.load() == 3


# What is refused


@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_step_that_is_not_larger_than_the_newest_is_refused(step, tmp_path):
    saved(tmp_path, 5)
    before = bytes_of(tmp_path)
    message = rf"larger than that of the newest one, 5 in {tmp_path}/, got {step}: load\(\) the newest one before"
    with pytest.raises(ValueError, match=message):
        saved(tmp_path, step)
    assert bytes_of(tmp_path) == before


def test_wrong_arguments_are_refused(tmp_path):
    for keep in (0, True, 1.5):
        with pytest.raises(ValueError, match="keep must be an integer of at least 1"):
            Checkpoints(tmp_path, keep=keep)
    for step in (-1, 1.5):
        with pytest.raises(ValueError, match="step must be an integer of at least 0"):
            saved(tmp_path, step)
    for other in (object(), 3, "text", None, (1, 2), torch.zeros(3)):
        with pytest.raises(TypeError, match=f"'other' is a {type(other).__name__}, which cannot be loaded in place"):
            Checkpoints(tmp_path, other=other)
    assert names_in(tmp_path) == []
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"missing=.'loss'"):
        saved(tmp_path, loss=torch.nn.Linear(1, 1)).load()


@pytest.mark.parametrize(
    ("storage", "sampler"), [(LazyTensorStorage, PrioritizedSampler(200_000, 0.6, 0.4)), (PackedStorage, None)]
)
def test_a_full_disk_is_an_error_and_writes_nothing(storage, sampler, tmp_path, monkeypatch):
    rb, network = make_buffer(storage, sampler=sampler, size=200_000), torch.nn.Linear(1000, 1000)
    rb.extend(transitions(["go"] * 1_000))
    checkpoints = Checkpoints(tmp_path, buffer=rb, network=network)
    path = checkpoints.save(1)
    taken = 512 * sum(file.stat().st_blocks for file in path.rglob("*"))
    before, free = names_in(tmp_path), taken - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=free))
    with pytest.raises(OSError, match=rf"The checkpoint takes .* MB, and the disk of {tmp_path} has .* MB free"):
        checkpoints.save(2)
    assert names_in(tmp_path) == before
    free = 1.5 * taken + 2**21
    checkpoints.save(2)
