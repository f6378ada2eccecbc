"""What TorchRL itself cannot do, and all rows of the tables that list what works; to run with each new TorchRL.

A failure of a limit is good news: the docs name a restriction that TorchRL no longer has. The tables are in
docs/reference/buffers.md and docs/reference/collectors.md.
"""

import ast
import itertools
import os
import re
import signal
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from test_buffers import contents, extend, filled, go_through, make, record, with_sampler, writes
from test_collectors import check_collected, collecting, fill, make_buffer, parallel, serial, started_by
from test_faults import forked, in_thread
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import HERReplayBuffer, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import MultiStepTransform

from support.factories import WAYS_TO_COPY, same, seeded_sample, start_processes_from_a_server
from support.named import STORAGES, named
from support.tape import make_tape, places, taken
from support.world import Goals, World

DOCS = Path(__file__).parents[2] / "docs" / "reference"

pytestmark = pytest.mark.newest
quick_start = pytest.fixture(scope="module", autouse=True)(start_processes_from_a_server)


# The tables of docs/reference/buffers.md


def cells(heading):
    """Return the cells of a table as ``(storage, column, "yes" or "no")``."""
    section = (DOCS / "buffers.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.replace("`", "").strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(name, column, cell) for name, *rest in lines[1:] for column, cell in zip(lines[0][1:], rest, strict=True)]


@pytest.mark.parametrize(("storage", "sampler", "works"), cells("Storages and samplers"))
def test_every_storage_works_with_the_documented_samplers(storage, sampler, works):
    if works == "yes":
        return go_through(with_sampler(storage, sampler))
    for options in ({}, {"make_hindsight": None}):
        rb = with_sampler(storage, sampler, **options)
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            [(extend(record(rb), moves), rb.sample()) for moves in writes(8)]


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@pytest.mark.parametrize(("storage", "way", "works"), cells("Saving and copying"))
def test_every_storage_is_copied_in_the_documented_ways(storage, way, works, tmp_path):
    for options in ({}, {"make_hindsight": None}):
        tmp_path /= "another"
        tmp_path.mkdir()
        rb, twin = filled(6, storage=STORAGES[storage], **options).rb, make(storage=STORAGES[storage], **options)
        if works == "yes":
            twin = WAYS_TO_COPY[way](rb, twin, tmp_path)
            assert same(seeded_sample(rb), seeded_sample(twin))
        else:
            with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
                WAYS_TO_COPY[way](rb, twin, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device memory can be pinned")
def test_without_a_cuda_device_no_memory_can_be_pinned():
    rb = filled(make_hindsight=None, pin_memory=True).rb
    with pytest.raises(RuntimeError, match=r"(?i)nvidia|cuda|accelerator|pin_memory"):
        rb.sample()


def test_an_entry_that_is_set_through_the_buffer_only_reaches_a_full_storage_without_transforms():
    plain = {"make_hindsight": None}
    for options, count, reaches in ((plain, 4, False), (plain, 5, True), ({}, 5, False)):
        rb = filled(count, **options).rb
        rb["uid"] = torch.full((len(rb),), -1)
        assert bool((contents(rb)["uid"] == -1).all()) is reaches


# The tables of docs/reference/collectors.md

KINDS = {kind.__name__: kind for kind in (Collector, MultiSyncCollector, MultiAsyncCollector)}
ENVIRONMENTS = {"one": make_tape, "8 in SerialEnv": serial, "8 in ParallelEnv": parallel}
DATA = re.compile(r"(by hand, (?:flattened|\[.*?\])|replay_buffer=rb|start\(\))((?:, \w+=[\w\"]+)*)")


def options_of(words):
    """Return the options in ``"shared=True, ndim=2"``."""
    return {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=([\w\"]+)", words)}


def collected_rows():
    """Yield collector, environments, way to write, options of both, and result of each row without special steps."""
    text = (DOCS / "collectors.md").read_text().replace("`", "")
    for line in re.findall(r"^\| (?!collector )(.+) \|$", text, re.MULTILINE):
        collectors, environments, data, buffer, result = line.split(" | ")
        found, kinds = DATA.fullmatch(data), collectors.split(" or ")
        if found and "size=" not in buffer and buffer != "any" and "log" not in result and KINDS.keys() >= {*kinds}:
            how = {"by hand, flattened": "flattened", "start()": "start", "replay_buffer=rb": "replay_buffer"}
            for collector in kinds:
                yield collector, environments, how.get(found[1], "extend"), found[2], buffer, result


@pytest.mark.parametrize(("collector", "environments", "how", "options", "buffer", "result"), collected_rows())
def test_collectors_work_as_documented(collector, environments, how, options, buffer, result):
    kind, *storage = [word for word in buffer.split(", ") if "=" not in word]
    of_buffer = options_of(buffer) | ({"alpha": 0.7, "beta": 0.5} if "Prioritized" in kind else {})
    make_rb = partial(make_buffer, named(kind), named(storage[0] if storage else "LazyTensorStorage"), **of_buffer)
    of_collector = (KINDS[collector], ENVIRONMENTS[environments], how)
    if result.startswith("works"):
        check_collected(make_rb(), *of_collector, **options_of(options))
    else:
        who, message = result.split(": ", 1)
        with pytest.raises((RuntimeError, ValueError, KeyError, TypeError), match=re.escape(message)):
            fill(make_rb(hindsight=who == "refused"), *of_collector, **options_of(options))


def test_a_synchronous_collector_with_set_truncated_yields_the_flags_of_another_batch():
    def has_wrong_flags(**options):
        with collecting(MultiSyncCollector, make_tape, set_truncated=True, **options) as running:
            batches = [batch["next"].clone() for batch in itertools.islice(running, 3)]
        return any((batch["done"] != batch["terminated"] | batch["truncated"]).any() for batch in batches)

    assert has_wrong_flags()
    assert not has_wrong_flags(use_buffers=False)


def test_forked_processes_share_no_lazy_tensor_storage():
    rb = make_buffer(shared=True, hindsight=False)
    with started_by("fork"), collecting(MultiSyncCollector, make_tape, replay_buffer=rb) as running:
        next(iter(running))
    assert len(rb) == 16
    assert sorted(places(rb[:])) != sorted(taken(0, 8) + taken(1, 8))


def test_a_multi_step_transform_cannot_initialize_a_shared_buffer():
    """The transform holds back the transition with which TorchRL initializes the storage."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=MultiStepTransform(3, 0.5), shared=True)
    with pytest.raises(RuntimeError, match="if it has not been initialized yet"):
        MultiAsyncCollector([make_tape] * 2, frames_per_batch=100, total_frames=1500, replay_buffer=rb)


# docs/how-to/checkpoints.md


def plain(count):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    rb.extend(TensorDict({"value": torch.arange(count)}, [count]))
    return rb


def blocks(function, seconds=1.0):
    """Return whether a function is still waiting after ``seconds``."""
    return not wait([in_thread(function)], timeout=seconds).done


def test_an_interrupted_plain_dump_over_an_earlier_one_mixes_both(tmp_path, monkeypatch):
    rb, loaded = plain(10), plain(1)
    rb.dumps(tmp_path / "rb")
    rb.extend(rb.storage[:].clone())
    monkeypatch.setattr(rb.writer, "dumps", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rb.dumps(tmp_path / "rb")
    loaded.loads(tmp_path / "rb")
    assert (len(loaded), loaded.write_count) == (20, 10)  # the next write overwrites the newest rows


def test_a_plain_checkpoint_over_an_earlier_one_is_missing_for_a_moment(tmp_path, monkeypatch):
    path, there, rename = tmp_path / "checkpoint", [], os.replace

    def replace(source, destination):
        there.append(Checkpoint.is_checkpoint(path))
        rename(source, destination)

    checkpoint = Checkpoint(buffer=plain(10))
    checkpoint.save(path)
    monkeypatch.setattr(os, "replace", replace)
    checkpoint.save(path)
    assert there == [True, False]


@pytest.mark.parametrize(("damage", "expected"), [(lambda file: os.truncate(file, 0), 0), (os.remove, 7)])
def test_a_damaged_file_of_a_plain_buffer_loads_as_zeros_or_is_left_out(damage, expected, tmp_path):
    rb, loaded = plain(10), plain(10)
    rb.dumps(tmp_path / "rb")
    loaded[:]["value"].fill_(7)
    damage(tmp_path / "rb" / "storage" / "value.memmap")
    loaded.loads(tmp_path / "rb")
    assert set(loaded[:]["value"].tolist()) == {expected}


def test_a_plain_dump_does_not_wait_for_a_process_that_writes(tmp_path):
    rb = plain(10)
    rb.share()
    with rb._write_lock:  # like a process in the middle of a write
        assert not blocks(lambda: rb.dumps(tmp_path / "rb"), seconds=20)
        assert blocks(rb.sample)


def test_a_process_killed_in_a_write_blocks_a_plain_shared_buffer_forever():
    rb = plain(10)
    rb.share()

    def take_and_die():
        rb._write_lock.__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(forked(take_and_die)) == signal.SIGKILL
    assert blocks(rb.sample)


# docs/how-to/from-torchrl.md


def test_goals_of_torchrls_her_buffer_can_be_older_than_the_transition():
    """The goal of the last step of an episode is the outcome of the previous step."""
    reward, world = (lambda rows: -torch.ones(len(rows), 1)), World(1, Goals())
    rb = HERReplayBuffer(reward, her_ratio=1.0, storage=LazyTensorStorage(20), batch_size=1000)
    rb.extend(world.tensordict(world.play(0, ["go"] * 19 + ["truncated"]), ids=False))
    batch = rb.sample()
    last = batch["next", "done"].squeeze(-1)
    assert batch["desired_goal"][last][:, 1].eq(19).all()
    assert batch["next", "achieved_goal"][last][:, 1].eq(20).all()
