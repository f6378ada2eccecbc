"""PackedStorage is saved and loaded like TorchRL's storages, and saves only the space of written rows."""

import itertools
import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from support.factories import WAYS_TO_COPY
from support.rows import bits, both_storages, make_transitions, packed_buffer
from torchrl_her import PackedStorage


def test_a_state_dict_can_be_saved_and_its_copy_does_not_change_with_later_writes(tmp_path):
    for rb, twin in zip(both_storages(), (packed_buffer(), packed_buffer()), strict=True):
        rb.extend(make_transitions(13))
        torch.save(rb.state_dict(), tmp_path / "state")
        twin.storage.load_state_dict(torch.load(tmp_path / "state", weights_only=False)["_storage"])
        rb.extend(make_transitions(20, 50))
        assert bits(twin[:].exclude("index")) == bits(make_transitions(13))


PAIRS = [(PackedStorage, PackedStorage), (LazyTensorStorage, PackedStorage), (PackedStorage, LazyTensorStorage)]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("way", ["dumps", "state_dict"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " to ".join(kind.__name__ for kind in pair))
@pytest.mark.parametrize("ndim", [1, 2])
def test_checkpoints_are_interchangeable_with_torchrls_storage(ndim, pair, way, used, tmp_path):
    def write(rb, count, number):
        rb.extend(make_transitions(count, number).reshape(*(2,) * (ndim - 1), -1))

    rb, twin = (ReplayBuffer(storage=storage(20, ndim=ndim), batch_size=8) for storage in pair)
    write(rb, 14, 0)
    if used:
        write(twin, 18, 50)
    WAYS_TO_COPY[way](rb, twin, tmp_path)
    assert bits(rb[:]) == bits(twin[:])  # TorchRL's storage loses the device
    for each in (rb, twin):
        write(each, 16, 100)
    assert bits(rb[:]) == bits(twin[:])
    assert len(rb) == 20


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_checkpoint_takes_the_space_of_the_written_rows(ndim, tmp_path):
    def write(rb, start):
        rb.extend(make_transitions(1_000, start).reshape(*(2,) * (ndim - 1), -1))

    rb, twin = (packed_buffer(1_000_000, ndim=ndim) for _ in range(2))
    write(rb, 0)
    rb.dumps(tmp_path)
    assert 50 * 1_000 < 512 * sum(path.stat().st_blocks for path in tmp_path.rglob("*")) < 1_000_000  # bytes
    for start in (5_000, 6_000):
        write(twin, start)
    twin.loads(tmp_path)
    assert bits(rb[:]) == bits(twin[:])
    write(rb, 1_000)
    rb.dumps(tmp_path)  # over the previous checkpoint
    twin.loads(tmp_path)
    assert bits(rb[:]) == bits(twin[:])
    assert len(rb) == 2_000


def test_the_state_of_an_empty_buffer_empties_another_one():
    rb = packed_buffer()
    rb.extend(make_transitions(14))
    rb.load_state_dict(packed_buffer().state_dict())
    assert len(rb) == 0
    rb.extend(make_transitions(5, 70))
    assert bits(rb[:]) == bits(make_transitions(5, 70))


def test_hooks_of_a_checkpoint_are_called(tmp_path):
    rb, twin = packed_buffer(), packed_buffer()
    rb.extend(make_transitions(14))
    twin.extend(make_transitions(20))
    rb.register_save_hook(lambda data, path: data.exclude("uid").set("other", data["uid"] + 1))
    twin.register_load_hook(lambda data, out: data.exclude("other").set("uid", data["other"] - 1))
    rb.dumps(tmp_path)
    assert {"other.memmap", "uid.memmap"} & {path.name for path in tmp_path.rglob("*")} == {"other.memmap"}
    twin.loads(tmp_path)
    assert bits(rb[:]) == bits(twin[:])


# Refused checkpoints

ROOM = "has room for .* and this one for .*: create this one with the size"
TENSORS = r"tensors outside of a TensorDict.*load it into a LazyTensorStorage"
REFUSED = {  # the kind and size of the storage, what is written, and the error of a buffer with 20 rows
    "another size": (PackedStorage, 30, make_transitions(5), ValueError, ROOM),
    "other entries": (PackedStorage, 20, make_transitions(5).set("new", torch.ones(5)), ValueError, "'new' is new"),
    "a tensor": (LazyTensorStorage, 20, torch.ones(5, 3), TypeError, TENSORS),
    "a tuple": (LazyTensorStorage, 20, (torch.ones(5, 3), torch.ones(5)), TypeError, TENSORS),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("name", "way"), [*itertools.product(REFUSED, ("dumps", "state_dict"))][:-1])  # no tuples
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(name, way, used, tmp_path):
    kind, size, data, error, message = REFUSED[name]
    saved, twin, before = ReplayBuffer(storage=kind(size)), packed_buffer(), make_transitions(8, entries=[])
    saved.extend(data)
    if used or name == "other entries":
        twin.extend(before)
    with pytest.raises(error, match=message):
        WAYS_TO_COPY[way](saved, twin, tmp_path)
    if not used:
        twin.extend(before)
    assert bits(twin[:8]) == bits(before)


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no saved storage in .*missing: check the path"):
        PackedStorage(4).loads(tmp_path / "missing")


# Damaged and interrupted saves, and full disks


@pytest.mark.parametrize("kind", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize(
    "name",
    ["observation.memmap", "next/done.memmap", "a%20b.memmap", "meta.json", "next/meta.json", "storage_metadata.json"],
)
def test_a_damaged_file_is_named_and_nothing_is_loaded(name, kind, tmp_path):
    rb, twin, data = ReplayBuffer(storage=kind(20)), packed_buffer(), make_transitions(14).set("a b", torch.ones(14))
    twin.extend(data[:5])
    rb.extend(data)
    rb.dumps(tmp_path)
    file = tmp_path / "storage" / name
    for damage in (partial(os.truncate, file, 3), partial(os.truncate, file, 0), file.unlink):
        damage()
        for loaded in (twin, packed_buffer()):
            with pytest.raises(OSError, match=f"damaged, or its save was interrupted: ({name}|a b.memmap) missing or"):
                loaded.loads(tmp_path)
        assert bits(twin[:]) == bits(data[:5])


def test_an_interrupted_save_over_an_earlier_one_is_not_loaded(tmp_path, monkeypatch):
    rb = packed_buffer()
    rb.extend(make_transitions(14))
    rb.dumps(tmp_path)
    rb.extend(make_transitions(20, 50))
    monkeypatch.setattr(TensorDict, "update_", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rb.dumps(tmp_path)
    monkeypatch.undo()
    twin = packed_buffer()
    with pytest.raises(OSError, match=r"its save was interrupted: storage_metadata\.json missing"):
        twin.loads(tmp_path)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert bits(twin[:]) == bits(rb[:])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the names of open files are unknown")
def test_the_metadata_gets_its_name_when_all_other_files_are_on_the_disk(tmp_path, monkeypatch):
    synced, named, rename = set(), [], Path.replace

    def replace(source, target):
        named.append((target, {path for path in (tmp_path / "storage").rglob("*")} - synced))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda file: synced.add(Path(f"/proc/self/fd/{file}").resolve()))
    monkeypatch.setattr(Path, "replace", replace)
    rb = packed_buffer()
    rb.extend(make_transitions(14))
    rb.dumps(tmp_path)
    assert named == [(tmp_path / "storage" / "storage_metadata.json", set())]


def test_a_full_disk_is_an_error_that_says_how_much_is_missing_and_writes_nothing(tmp_path, monkeypatch):
    rb, twin = packed_buffer(1_000_000), packed_buffer(1_000_000)
    data = TensorDict({"observation": torch.rand(1_000, 500)}, [1_000])
    rb.extend(data)
    free = {"free": 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(**free))
    rb.dumps(tmp_path)
    free["free"] = 500_000
    rb.dumps(tmp_path)  # it overwrites the two MB of the first save
    rb.extend(data)
    message = r"take 4\.0 MB, and the disk of .* has 2\.[56] MB free: free 1\.[45] MB more.* Nothing was written"
    with pytest.raises(OSError, match=message):
        rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert (twin[:]["observation"] == data["observation"]).all()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of the memory is unknown")
def test_saving_and_loading_take_little_memory_besides_the_rows(tmp_path):
    def peak(function):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        function()
        now, most = (
            next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line)
            for name in ("VmRSS", "VmHWM")
        )
        return (most - now) / 2**10  # MB

    rb, twin = packed_buffer(50_000), packed_buffer(50_000)
    for each in (rb, twin):
        each.extend(TensorDict({"observation": torch.rand(50_000, 1_000)}, [50_000]))  # 200 MB
    assert peak(lambda: rb.dumps(tmp_path)) < 100
    assert peak(lambda: twin.loads(tmp_path)) < 100
    assert torch.equal(twin[:]["observation"], rb[:]["observation"])
