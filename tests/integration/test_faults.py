"""Concurrent threads and processes, checkpoints, killed and forked processes, and memory over a long time."""

import copy
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, Unbounded
from torchrl.modules import RandomPolicy

import torchrl_her
from support import tape
from support.factories import check_refused, make_augmentation, make_transform, start_processes_from_a_server
from support.pages import run_block
from support.refused import make_small_buffer, transitions
from support.streams import make_episode
from support.traffic import Source, check, check_one_by_one, make_buffer
from torchrl_her import EnvReward, SparseReward
from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.goals.write_lock import WriteLock

SPAWN = torch.multiprocessing.get_context("spawn")
KILLS = Path(__file__).parent / "faults" / "kills.py"
GOAL_SPEC = Unbounded((1,))
DESIRED = torch.tensor([-1.0])

pytestmark = pytest.mark.filterwarnings("ignore:.*left the goal table")
quick_start = pytest.fixture(scope="module", autouse=True)(start_processes_from_a_server)


def in_thread(function, *arguments):
    """Run a function in a daemon thread, and return a future. A deadlock is a timeout of ``result``."""
    future = Future()

    def run():
        try:
            future.set_result(function(*arguments))
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return future


# Many threads and processes


@pytest.fixture
def frequent_switches():
    """Make threads switch more often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def write(rb, first, steps, count):
    """Write at least ``count`` transitions of eight environments."""
    source = Source(first, 8, steps)
    for _ in range(-(-count // (8 * steps))):
        rb.extend(source.next())


def sample_until(done, rb, strategy="future", rest=0.0):
    """Sample and check transitions until an event, and at least 10,000."""
    sampled = relabelled = 0
    while sampled < 10_000 or not done.is_set():
        batch = rb.sample()
        if sampled % (20 * len(batch)) == 0:
            check_one_by_one(batch, strategy)
        relabelled += check(batch, strategy)
        sampled += len(batch)
        time.sleep(rest)
    assert relabelled > 0.1 * sampled


class InProcess(SPAWN.Process):
    """Runs a function in a separate process, with the ``result`` of a future."""

    def __init__(self, function, *arguments):
        super().__init__(target=function, args=arguments, daemon=True)
        self.start()

    def run(self):
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message=".*left the goal table")
        super().run()

    def result(self, timeout):
        self.join(timeout)
        self.kill()
        assert self.exitcode == 0, "a deadlock, or a wrong goal"


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("count", [30_000, pytest.param(500_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("start", "samplers", "strategy", "options"),
    [
        (in_thread, 2, "future", {}),
        (in_thread, 2, "random", {"prefetch": 2}),
        pytest.param(InProcess, 1, "future", {"shared": True}, marks=pytest.mark.slow),
    ],
    ids=["threads", "threads with prefetch", "processes"],
)
def test_goals_are_correct_with_concurrent_writers_and_samplers(start, samplers, strategy, options, count):
    rb = make_buffer(4096, 2048, strategy, **options)
    write(rb, 0, 100, 1)
    done = SPAWN.Event()
    rest = 0.002 if "shared" in options else 0.0  # releases the buffer's lock for the other processes
    sampling = (sample_until, done, rb, strategy, rest)
    running = [in_thread(*sampling), *(start(*sampling) for _ in range(samplers))]
    try:
        for writer in [start(write, rb, first, 125, count) for first in (8, 16)]:
            writer.result(timeout=300)
    finally:
        done.set()
    for sampler in running:
        sampler.result(timeout=60)
    assert rb.write_count >= 2 * count


# Checkpoints


@pytest.mark.usefixtures("frequent_switches")
def test_a_checkpoint_that_is_made_while_threads_write_and_sample_is_whole(tmp_path):
    size, capacity = 4096, 3 * 4096 + 16 * 140  # the goals of all stored transitions are in the table
    rb = make_buffer(size, capacity)
    write(rb, 0, 100, size)
    rotation, checkpoint = CheckpointRotation(tmp_path, keep_last=1), Checkpoint(buffer=rb)
    done = threading.Event()
    threads = [in_thread(sample_until, done, rb), *(in_thread(write, rb, first, 100, 80_000) for first in (8, 16))]
    for step in range(8):
        rotation.save(checkpoint, step=step)
        loaded = make_buffer(size, capacity)
        rotation.load_latest(Checkpoint(buffer=loaded))
        loaded.transform[0].flush()
        loaded.transform[0].her_ratio = 1.0
        batch = loaded[:]
        check_one_by_one(batch)
        assert check(batch) == len(batch) == size
    done.set()
    for thread in threads:
        thread.result(timeout=60)


def test_the_code_of_the_page_saves_and_resumes(tmp_path):
    for steps in (20, 40):
        rb, loss = make_small_buffer(EnvReward(tape.make_tape())), torch.nn.Linear(2, 2)
        names = {"rb": rb, "hindsight": rb.transform[0], "loss": loss, "directory": tmp_path}
        names |= {"optimizer": torch.optim.Adam(loss.parameters()), "data": tape.collected(20)}
        run_block("how-to/checkpoints", 0, names)
        run_block("how-to/checkpoints", 1, names)
        assert len(rb) == names["progress"]["frames"] == steps - 20
        rb.extend(names["data"])
        run_block("how-to/checkpoints", 2, names)
        run_block("how-to/checkpoints", 3, names)
        assert names["progress"]["frames"] == steps
    assert len(names["rotation"].checkpoints()) == 2


@pytest.mark.filterwarnings("ignore:last_cursor is None")
def test_a_checkpoint_that_is_made_while_collectors_in_other_processes_pause_is_whole(tmp_path):
    def make_tape_buffer(shared):
        goal_spec = tape.make_tape().observation_spec["achieved_goal"]
        transform = make_transform(reward=EnvReward(tape.Tape(0)), her_ratio=1.0, capacity=3000, goal_spec=goal_spec)
        storage = LazyTensorStorage(2000, shared_init=shared)
        return ReplayBuffer(storage=storage, transform=transform, batch_size=64, shared=shared)

    rb = make_tape_buffer(shared=True)
    collector = MultiAsyncCollector(
        [partial(tape.make_tape, number) for number in range(2)],
        RandomPolicy(tape.make_tape().action_spec),
        replay_buffer=rb,
        frames_per_batch=20,
        total_frames=-1,
    )
    rotation, checkpoint = CheckpointRotation(tmp_path, keep_last=1), Checkpoint(buffer=rb)
    try:
        collector.start()
        for step in range(3):
            wanted, deadline = rb.write_count + 200, time.monotonic() + 120
            while rb.write_count < wanted:
                assert time.monotonic() < deadline, "nothing is collected"
                time.sleep(0.01)
            tape.check(rb.sample())
            with collector.pause():
                count = rb.write_count
                rotation.save(checkpoint, step=step)
                assert rb.write_count == count
    finally:
        collector.shutdown()
    resumed = make_tape_buffer(shared=False)
    rotation.load_latest(Checkpoint(buffer=resumed))
    resumed.transform[0].flush()
    assert len(resumed) == resumed.write_count == count
    # The running episodes of the other processes are missing.
    assert tape.check(resumed[:]).share > 1 - 2 * max(tape.LENGTHS) / count


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--kills=4", "--every=15"])
def test_a_killed_training_resumes_from_its_last_complete_checkpoint(how):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, KILLS, how], env=environment, timeout=300, check=True)


def buffer(**options):
    return make_small_buffer(SparseReward(0), **({"her_ratio": 1.0} | options))


def episode(steps, begin=0, done=True, desired=DESIRED):
    """Return steps of one environment without a trajectory id, [steps]; goals count from ``begin``."""
    goals = torch.arange(begin, begin + steps + 1).unsqueeze(-1).to(desired.dtype)
    return make_episode(goals.expand(-1, *desired.shape), desired, truncated=done)


def goals_of(rb, rows):
    """Return the goals that are drawn for stored rows."""
    return {goal for _ in range(50) for goal in rb[:][rows]["desired_goal"].flatten().tolist()}


@pytest.mark.parametrize("flushed", [True, False])
def test_flush_after_loading_ends_the_running_episodes_and_without_it_they_continue(flushed, tmp_path):
    rb, resumed = buffer(), buffer()
    rb.extend(episode(3, done=False))
    rb.dumps(tmp_path / "rb")
    resumed.loads(tmp_path / "rb")
    assert goals_of(resumed, slice(0, 3)) == {-1}  # the episode still runs
    if flushed:
        resumed.transform[0].flush()
        assert goals_of(resumed, slice(0, 3)) == {1, 2, 3}
    resumed.extend(episode(3, begin=3))  # starts with the last goals of the other episode
    assert goals_of(resumed, slice(0, 3)) == ({1, 2, 3} if flushed else {1, 2, 3, 4, 5, 6})
    assert goals_of(resumed, slice(3, 6)) == {4, 5, 6}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("desired", "capacity", "message"),
    [
        (torch.tensor([-1.0, -1.0]), 100, r"saved goals are torch.float32 \(1,\), but goals of this .* \(2,\)"),
        (DESIRED.double(), 100, "saved goals are torch.float32 .* torch.float64"),
        (DESIRED, 50, "holds 100 goals, but this one holds 50.* capacity=100"),
    ],
    ids=["shape", "dtype", "capacity"],
)
def test_a_checkpoint_of_other_goals_is_refused_and_changes_nothing(shared, desired, capacity, message, tmp_path):
    saved = buffer()
    saved.extend(episode(5))
    CheckpointRotation(tmp_path, keep_last=1).save(Checkpoint(buffer=saved), step=5)

    options = {"goal_spec": Unbounded(desired.shape, dtype=desired.dtype), "capacity": capacity}
    rb = buffer(**options)
    transform = rb.transform[0]
    if shared:
        transform.share_memory_()
    rb.extend(episode(3, done=False, desired=desired))
    for target, source in ((transform, saved.transform[0]), (rb.transform, saved.transform)):
        check_refused(rb, partial(target.load_state_dict, source.state_dict()), ValueError, message)
        assert transform.table.is_shared == shared
    transform.flush()
    assert rb[:]["hindsight", "relabelled"].all()

    fresh = buffer(**options)  # as in a process that resumes
    before = str(fresh.transform[0].get_extra_state())
    with pytest.raises(CheckpointError, match=message):
        CheckpointRotation(tmp_path, keep_last=1).load_latest(Checkpoint(buffer=fresh))
    assert str(fresh.transform[0].get_extra_state()) == before


def test_goals_of_another_shape_are_refused_after_loading_without_goal_spec(tmp_path):
    saved, resumed = buffer(), buffer()
    saved.extend(episode(5))
    saved.dumps(tmp_path / "rb")
    resumed.loads(tmp_path / "rb")
    with pytest.raises(ValueError, match=r"Goals have the shape \(2,\), but goal_spec or an earlier write has \(1,\)"):
        resumed.extend(episode(3, desired=torch.tensor([-1.0, -1.0])))
    assert resumed[:]["hindsight", "relabelled"].all()


@pytest.mark.filterwarnings("ignore:The reward module gives")
@pytest.mark.parametrize("make", [make_transform, make_augmentation])
def test_a_failed_write_does_not_undo_the_write_of_a_waiting_thread(make, monkeypatch):
    hindsight = make(reward=SparseReward(0.1))
    data, waiting = transitions(0, 20, length=10), threading.Thread(target=lambda: hindsight.inv(data[:7]))
    track, release = EpisodeTracker.track, WriteLock.__exit__

    def fail(*_, **__):
        monkeypatch.setattr(EpisodeTracker, "track", track)
        waiting.start()
        raise MemoryError

    def release_and_switch(lock, *exception):
        release(lock, *exception)
        if threading.current_thread() is not waiting:
            waiting.join()

    monkeypatch.setattr(EpisodeTracker, "track", fail)
    monkeypatch.setattr(WriteLock, "__exit__", release_and_switch)
    with pytest.raises(MemoryError):
        hindsight.inv(data[10:15])
    assert hindsight.report().running == 1


# Interrupts

PACKAGE = str(Path(torchrl_her.__file__).parent)


def interrupted_at(number, action):
    """Run an action, interrupt it before the given line of the package, and return whether it has so many lines."""
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        left -= event == "line"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # an interrupt at the exit of torch.no_grad() leaves it disabled
    return False


@pytest.mark.filterwarnings("ignore:The reward module gives")
@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [make_transform, make_augmentation])
@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_write_can_be_repeated_after_an_interrupt_at_any_line(make, strategy, every):
    """Two episodes of ten steps end, one of seven waits; the interrupted write continues it."""
    options = {"strategy": strategy} | ({"her_ratio": 1.0} if make is make_transform else {"n_sampled_goal": 1})
    data = transitions(0, 40, length=10).set("uid", torch.arange(40))
    count = 0
    for number in itertools.count(1, every):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=make(reward=SparseReward(0.1), **options))
        rb.extend(data[:27])
        if not interrupted_at(number, partial(rb.extend, data[27:])):
            break
        rb.extend(data[27:])
        rb.transform[0].flush()
        stored = rb[:]
        relabelled = stored["hindsight", "relabelled"].squeeze(-1)
        for part in (stored[relabelled],) if make is make_transform else (stored[relabelled], stored[~relabelled]):
            assert sorted(part["uid"].tolist()) == list(range(40)), f"interrupted at line {number}"
        count += 1
    assert count * every > 200


# Limits of TorchRL itself, without any transform


def plain(count):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    rb.extend(TensorDict({"value": torch.arange(count)}, [count]))
    return rb


def blocks(function, seconds=1.0):
    """Return whether a function is still waiting after ``seconds``."""
    return not wait([in_thread(function)], timeout=seconds).done


def test_an_interrupted_plain_dump_over_an_earlier_one_mixes_both(tmp_path, monkeypatch):
    rb = plain(10)
    rb.dumps(tmp_path / "rb")
    rb.extend(rb.storage[:].clone())
    monkeypatch.setattr(rb.writer, "dumps", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rb.dumps(tmp_path / "rb")
    loaded = plain(1)
    loaded.loads(tmp_path / "rb")
    assert (len(loaded), loaded.write_count) == (20, 10)  # the next write overwrites the newest rows


def test_a_plain_checkpoint_over_an_earlier_one_is_missing_for_a_moment(tmp_path, monkeypatch):
    """Therefore the docs recommend CheckpointRotation, which never overwrites a checkpoint."""
    path, there = tmp_path / "checkpoint", []
    rename = os.replace

    def replace(source, destination):
        there.append(Checkpoint.is_checkpoint(path))
        rename(source, destination)

    checkpoint = Checkpoint(buffer=plain(10))
    checkpoint.save(path)
    monkeypatch.setattr(os, "replace", replace)
    checkpoint.save(path)
    assert there == [True, False]
    rotation = CheckpointRotation(tmp_path / "rotation", keep_last=1)
    for step in range(3):
        rotation.save(checkpoint, step=step)
        path = rotation.latest()
        assert Checkpoint.is_checkpoint(path)


@pytest.mark.parametrize(("damage", "expected"), [(lambda file: os.truncate(file, 0), 0), (os.remove, 7)])
def test_a_damaged_file_of_a_plain_buffer_loads_as_zeros_or_is_left_out(damage, expected, tmp_path):
    """Therefore the docs recommend PackedStorage, and waiting for the disk before a checkpoint gets its name."""
    rb, loaded = plain(10), plain(10)
    rb.dumps(tmp_path / "rb")
    loaded[:]["value"].fill_(7)
    damage(tmp_path / "rb" / "storage" / "value.memmap")
    loaded.loads(tmp_path / "rb")
    assert set(loaded[:]["value"].tolist()) == {expected}


def test_a_plain_dump_does_not_wait_for_a_process_that_writes(tmp_path):
    """Therefore the docs recommend pausing collectors that write in other processes."""
    rb = plain(10)
    rb.share()
    with rb._write_lock:  # like a process in the middle of a write
        assert not blocks(lambda: rb.dumps(tmp_path / "rb"), seconds=20)
        assert blocks(rb.sample)


def forked(function):
    """Run a function in a fork of this process, and return the fork's exit status."""
    process = os.fork()
    if process == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1]


def kill_while_holding(lock):
    """Kill a process while it holds a lock."""

    def take_and_die():
        lock.__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(forked(take_and_die)) == signal.SIGKILL


def test_a_process_killed_in_a_write_blocks_a_plain_shared_buffer_forever():
    rb = plain(10)
    rb.share()
    kill_while_holding(rb._write_lock)
    assert blocks(rb.sample)


# Between processes


@pytest.fixture
def shared_rb():
    """Return a shared buffer with a running episode of three steps."""
    rb = buffer(goal_spec=GOAL_SPEC)
    rb.share()
    rb.extend(episode(3, done=False))
    return rb


def test_a_process_killed_while_it_writes_to_the_table_is_an_error_for_the_next_writer(shared_rb, monkeypatch):
    monkeypatch.setattr("torchrl_her.goals.write_lock.LOCK_TIMEOUT", 0.1)
    shared_rb.extend(episode(3))
    kill_while_holding(shared_rb.transform[0]._lock._lock)
    write_again = in_thread(shared_rb.extend, episode(3))
    message = r"was killed or stopped during a write\. Restart from the last checkpoint"
    with pytest.raises(RuntimeError, match=message):
        write_again.result(timeout=5)
    assert shared_rb[3:]["hindsight", "relabelled"].all()  # readers need no lock


def test_a_forked_process_does_not_continue_the_episodes_of_its_parent(shared_rb):
    shared_rb.storage._storage.share_memory_()
    assert (
        forked(lambda: shared_rb.extend(episode(3, begin=3))) == 0
    )  # starts with the last goals of the parent's episode
    assert len(shared_rb) == 6
    shared_rb.extend(episode(4, begin=3))
    assert goals_of(shared_rb, slice(0, 3)) == {1, 2, 3, 4, 5, 6, 7}
    first, childs, second = shared_rb[:]["hindsight_stamp"][[0, 3, 6], 0].tolist()
    assert first == second != childs


def test_a_state_that_a_forked_process_loads_is_not_lost_at_its_first_write(shared_rb):
    transform = shared_rb.transform
    state = transform.state_dict()

    def load_and_continue():
        transform.load_state_dict(state)
        running = transform[0].tracker.state_dict()["lanes"][0]["episode"]
        assert transform.inv(episode(2, begin=3))["hindsight_stamp"].tolist() == [[running, 3], [running, 4]]

    assert forked(load_and_continue) == 0


def test_the_state_of_a_forked_process_lacks_the_lanes_of_its_parent(shared_rb):
    def lanes():
        return shared_rb.transform[0].get_extra_state()["lanes"]["lanes"]

    assert forked(lambda: os._exit(len(lanes()))) == 0
    assert len(lanes()) == 1


def test_a_copy_of_a_shared_transform_is_independent_and_continues_its_episodes(shared_rb):
    transform = shared_rb.transform[0]
    before = str(transform.get_extra_state())
    copied = copy.deepcopy(transform)
    assert str(copied.get_extra_state()) == before
    assert not copied.table.is_shared
    running = shared_rb[:]["hindsight_stamp"][0, 0].item()
    assert copied.inv(episode(3, begin=3))["hindsight_stamp"].tolist() == [[running, step] for step in (3, 4, 5)]
    assert str(transform.get_extra_state()) == before


def test_a_shared_transform_cannot_be_sent_through_a_queue_which_would_lose_its_lock(shared_rb):
    with pytest.raises(RuntimeError, match=r"inheritance|when that starts"):
        ForkingPickler.loads(ForkingPickler.dumps(shared_rb.transform[0]))  # as a queue does


def test_a_state_from_before_the_first_write_empties_the_table_that_processes_share(shared_rb):
    transform = shared_rb.transform[0]
    written = transform.inv(episode(3))
    goals = transform.table.goals
    transform.load_state_dict(buffer().transform[0].state_dict())
    assert not transform(written)["hindsight", "relabelled"].any()
    assert transform.table.is_shared
    assert transform.table.goals is goals
    assert transform(transform.inv(episode(3)))["hindsight", "relabelled"].all()


def test_samples_on_another_device_than_a_shared_table_are_refused(shared_rb):
    table = shared_rb.transform[0].table
    message = r"on meta, but the goal table is shared between processes on cpu\. Pass .* goal_spec"
    with pytest.raises(RuntimeError, match=message):
        shared_rb.transform(shared_rb.storage[:3].to("meta"))
    assert table.goals.device.type == "cpu"
    assert table.is_shared


# Memory


def memory_in_use():
    """Return bytes of all tensors, bytes allocated by Python, and the number of Python objects."""
    gc.collect()
    objects = gc.get_objects()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in objects
        if type(each) is torch.Tensor
    }
    return sum(storages.values()), tracemalloc.get_traced_memory()[0], len(objects)


def test_memory_stays_constant_with_any_kind_of_episodes():
    rb = make_buffer(size=2000, capacity=2000)
    sources = [Source(0, 8, 20), Source(8, 8, 20)]

    def memory_after(writes):
        for at in writes:
            rb.extend(sources[0].next())
            rb.extend(sources[1].next().exclude("collector"))
            rb.extend(Source(16 + at, 4, 20 + at % 5).next())  # lanes that are never continued
            rb.sample()
        return memory_in_use()

    tracemalloc.start()
    try:
        before = memory_after(range(15))  # the buffer is full several times over
        after = memory_after(range(15, 60))
    finally:
        tracemalloc.stop()
    for name, earlier, later in zip(("tensors", "Python", "objects"), before, after, strict=True):
        assert later < 1.02 * earlier + 20_000, f"{name}: {earlier} grew to {later}"
