"""Much at once, processes that are killed, checkpoints, and memory over a long time."""

import copy
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
import warnings
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import tape
import torch
from faults import traffic
from faults.traffic import Source, check, check_one_by_one, make_buffer
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, Unbounded
from torchrl.modules import RandomPolicy

from torchrl_her import EnvReward, HERTransform, SparseReward
from torchrl_her.n_step import NStepReturn

MILLION = 1_000_000
REST = 0.002  # seconds that a process leaves the buffer's lock to others, as an update would
FAULTS = Path(__file__).parent / "faults"
PAGE = Path(__file__).parents[1] / "docs" / "checkpoints-and-faults.md"

pytestmark = pytest.mark.filterwarnings("ignore:.*left the goal table")


# Much at once


def write(rb, first, steps, count):
    """Write at least so many transitions of eight environments."""
    source = Source(first, 8, steps)
    for _ in range(-(-count // (8 * steps))):
        rb.extend(source.next())


def sample_until(done, rb, strategy="future", rest=0.0):
    """Sample and check until others are done; returns how many transitions, and how many of them relabelled."""
    batches = relabelled = 0
    while not done.is_set():
        batch = rb.sample()
        relabelled += check(batch, strategy)
        if batches % 20 == 0:
            check_one_by_one(batch, strategy)
        batches += 1
        time.sleep(rest)
    return batches * len(batch), relabelled


class Threads:
    """Runs functions at once, each in a thread, and keeps what they return; they are told when to stop."""

    def __init__(self):
        self.threads, self.returned, self.failures = [], [], []
        self.done = threading.Event()

    def start(self, function, *arguments):
        def run():
            try:
                self.returned.append(function(*arguments))
            except BaseException as failure:
                self.failures.append(failure)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def stop(self):
        self.done.set()
        for thread in self.threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a deadlock"
        assert not self.failures


@contextmanager
def frequent_switches():
    """Let threads take turns more often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(("strategy", "prefetch"), [("future", None), ("random", 2)])
def test_threads_that_write_and_threads_that_sample_never_make_a_goal_wrong(strategy, prefetch):
    rb = make_buffer(size=4096, capacity=2048, strategy=strategy, prefetch=prefetch)
    write(rb, 0, 100, 1)
    threads = Threads()
    with frequent_switches():
        for _ in range(3):
            threads.start(sample_until, threads.done, rb, strategy)
        for writer in [threads.start(write, rb, first, 100, MILLION // 4) for first in (8, 16)]:
            writer.join(timeout=300)
        threads.stop()
    assert rb.write_count >= MILLION // 2
    sampled, relabelled = map(sum, zip(*filter(None, threads.returned), strict=True))
    assert relabelled > 0.1 * sampled > 1000


def write_in_a_process(rb, first):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*left the goal table")
    write(rb, first, 125, MILLION // 2)


def sample_in_a_process(done, rb, counts):
    torch.set_num_threads(1)
    counts[:] = torch.tensor(sample_until(done, rb, rest=REST))


def test_processes_that_write_and_processes_that_sample_never_make_a_goal_wrong():
    rb = make_buffer(size=4096, capacity=2048, shared=True)
    write(rb, 0, 100, 1)
    context = torch.multiprocessing.get_context("spawn")
    done, counts = context.Event(), torch.zeros(2, dtype=torch.int64).share_memory_()
    sampler = context.Process(target=sample_in_a_process, args=(done, rb, counts), daemon=True)
    writers = [context.Process(target=write_in_a_process, args=(rb, first), daemon=True) for first in (8, 16)]
    threads = Threads()
    try:
        for process in (sampler, *writers):
            process.start()
        threads.start(sample_until, threads.done, rb, "future", REST)
        for process in writers:
            process.join(timeout=300)
        done.set()
        sampler.join(timeout=60)
        assert [process.exitcode for process in (sampler, *writers)] == [0, 0, 0], "a deadlock, or a wrong goal"
    finally:
        for process in (sampler, *writers):
            process.kill()
    threads.stop()
    assert rb.write_count >= MILLION
    for sampled, relabelled in (*threads.returned, counts.tolist()):
        assert relabelled > 0.1 * sampled > 1000


class Between(TorchDispatchMode):
    """Does something else after the operations of a block, as another thread could."""

    def __init__(self, do):
        super().__init__()
        self.do, self.operations = do, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        self.do(self.operations)
        return result


def table_that_goes_round(strategy):
    """A transform whose longest episodes come to stand on their own rows as they grow, and what is written to it."""
    source = Source(0, 3, 30)
    chunks = [source.next() for _ in range(40)]
    return HERTransform(traffic.reward_of, strategy=strategy, her_ratio=1.0, capacity=145), chunks


def check_sample(batch, strategy):
    check_one_by_one(batch[::20], strategy)
    return check(batch, strategy)


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_whatever_is_sampled_between_two_operations_of_a_write_is_right(strategy):
    transform, chunks = table_that_goes_round(strategy)
    stored, relabelled = transform.inv(chunks[0].copy()), 0
    for chunk in chunks[1:]:

        def sample(_, stored=stored):
            nonlocal relabelled
            relabelled += check_sample(transform(stored), strategy)

        with Between(sample) as between:
            written = transform.inv(chunk.copy())
        assert between.operations > 20
        stored = torch.cat([stored, written])[-360:]
    assert relabelled > 10_000


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_whatever_is_written_between_two_operations_of_a_sample_it_is_right(strategy):
    transform, chunks = table_that_goes_round(strategy)
    stored, relabelled = transform.inv(chunks[0].copy()), 0
    for begun, chunk in enumerate(chunks[1:-3], start=2):
        stored = torch.cat([stored, transform.inv(chunk.copy())])[-360:]
        if begun % 4:
            continue
        for operation in itertools.count(1):
            copied = copy.deepcopy(transform)

            def write(at, copied=copied, operation=operation, following=chunks[begun : begun + 3]):
                if at == operation:
                    for each in following:
                        copied.inv(each.copy())

            with Between(write) as between:
                batch = copied(stored)
            relabelled += check_sample(batch, strategy)
            if operation == between.operations:
                break
    assert relabelled > 10_000


def test_whatever_is_written_between_two_operations_the_steps_of_a_window_are_its_own():
    transform, chunks = table_that_goes_round("future")
    stored, whole_windows = transform.inv(chunks[0].copy()), 0
    for begun, chunk in enumerate(chunks[1:-3], start=2):
        stored = torch.cat([stored, transform.inv(chunk.copy())])[-360:]
        if begun % 4:
            continue
        episode, step = stored["hindsight_stamp"].unbind(1)
        steps = torch.randint(1, 4, step.shape)
        ahead = torch.minimum(torch.arange(3).expand(len(step), 3), steps.unsqueeze(1) - 1)
        expected = stored["next", "achieved_goal"].unsqueeze(1).repeat(1, 3, 1)  # [n, 3, goal]
        expected[..., 2::3] += ahead.unsqueeze(-1)
        for operation in itertools.count(1):
            copied = copy.deepcopy(transform)
            n_step = NStepReturn(copied.reward, copied.keys, has_goal_fn=False)

            def write(at, copied=copied, operation=operation, following=chunks[begun : begun + 3]):
                if at == operation:
                    for each in following:
                        copied.inv(each.copy())

            with Between(write) as between:
                outcomes, whole = n_step.outcomes(copied.table, episode, step, steps, longest=3)
            assert torch.equal(outcomes[whole], expected[whole])
            whole_windows += int(whole.sum())
            if operation == between.operations:
                break
    assert whole_windows > 10_000


# Checkpoints


def test_a_checkpoint_that_is_made_while_threads_write_and_sample_is_whole(tmp_path):
    size, capacity = 4096, 3 * 4096 + 16 * 140  # nothing that is stored leaves the table
    rb = make_buffer(size, capacity)
    write(rb, 0, 100, size)
    rotation, checkpoint = CheckpointRotation(tmp_path, keep_last=1), Checkpoint(buffer=rb)
    threads = Threads()
    with frequent_switches():
        threads.start(sample_until, threads.done, rb)
        for first in (8, 16):
            threads.start(write, rb, first, 100, 80_000)
        for step in range(8):
            rotation.save(checkpoint, step=step)
            loaded = make_buffer(size, capacity)
            rotation.load_latest(Checkpoint(buffer=loaded))
            loaded.transform[0].flush()
            loaded.transform[0].her_ratio = 1.0
            batch = loaded[:]
            check_one_by_one(batch)
            assert check(batch) == len(batch) == size
        threads.stop()


def make_shared_tape(shared):
    goal_spec = tape.make_tape().observation_spec["achieved_goal"]
    transform = HERTransform(EnvReward(tape.Tape(0)), her_ratio=1.0, capacity=3000, goal_spec=goal_spec)
    storage = LazyTensorStorage(2000, shared_init=shared)
    return ReplayBuffer(storage=storage, transform=transform, batch_size=64, shared=shared)


@pytest.mark.filterwarnings("ignore:last_cursor is None")
def test_a_checkpoint_that_is_made_while_collectors_in_other_processes_pause_is_whole(tmp_path):
    rb = make_shared_tape(shared=True)
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
    resumed = make_shared_tape(shared=False)
    rotation.load_latest(Checkpoint(buffer=resumed))
    resumed.transform[0].flush()
    assert len(resumed) == resumed.write_count == count
    # The episodes that ran in the other processes are not in it.
    assert tape.check(resumed[:]).share > 1 - 2 * max(tape.LENGTHS) / count


@pytest.mark.parametrize("arguments", [("kills.py", "--kills", "4"), ("kill_points.py", "--every", "15")])
def test_a_killed_training_resumes_from_its_last_complete_checkpoint(arguments):
    script, *rest = arguments
    finished = subprocess.run(
        [sys.executable, FAULTS / script, *rest], capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"^4 of 4 kills" if script == "kills.py" else r"^\d\d kills", finished.stdout), finished.stdout


def test_the_killed_training_resumes_with_the_lines_that_the_docs_advise():
    advised = re.search(r"<!-- resume -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL).group(1)
    assert textwrap.indent(advised, " " * 8) in (FAULTS / "killed_training.py").read_text()


def episode(steps, begin=0, goal=-1.0, done=True):
    """Steps of one environment that walks on by one, without an id."""
    state = torch.arange(begin, begin + steps, dtype=torch.float32).unsqueeze(-1)
    ends = torch.zeros(steps, 1, dtype=torch.bool)
    ends[-1] = done
    desired = torch.full_like(state, goal)
    root = {"achieved_goal": state, "desired_goal": desired}
    after = {"achieved_goal": state + 1, "desired_goal": desired.clone(), "reward": -torch.ones_like(state)}
    return TensorDict({**root, "next": {**after, "done": ends, "terminated": ends.clone()}}, [steps])


def walk(size=100, capacity=100, **keywords):
    transform = HERTransform(SparseReward(0), her_ratio=1.0, capacity=capacity, **keywords)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=64)


def goals_of(rb, rows):
    """The goals that are drawn for stored rows."""
    drawn = [rb[:][rows] for _ in range(50)]
    return {float(goal) for batch in drawn for goal in batch["desired_goal"].flatten()}


@pytest.mark.parametrize("flushed", [True, False])
def test_flush_after_loading_ends_the_episodes_that_ran_and_without_it_they_go_on(flushed, tmp_path):
    rb = walk()
    rb.extend(episode(3, done=False))
    rb.dumps(tmp_path / "rb")
    resumed = walk()
    resumed.loads(tmp_path / "rb")
    assert goals_of(resumed, slice(0, 3)) == {-1.0}  # the episode still runs
    if flushed:
        resumed.transform[0].flush()
        assert goals_of(resumed, slice(0, 3)) == {1.0, 2.0, 3.0}
    resumed.extend(episode(3, begin=3))  # it begins where the other one stood
    assert goals_of(resumed, slice(0, 3)) == ({1.0, 2.0, 3.0} if flushed else {1.0, 2.0, 3.0, 4.0, 5.0, 6.0})
    assert goals_of(resumed, slice(3, 6)) == {4.0, 5.0, 6.0}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"goal_spec": Unbounded((2,))}, r"saved goals are torch.float32 \(1,\), those of this transform .* \(2,\)"),
        ({"goal_spec": Unbounded((1,), dtype=torch.float64)}, "saved goals are torch.float32 .* torch.float64"),
        ({"goal_spec": Unbounded((1,)), "capacity": 50}, "holds 100 goals and this one 50: .* capacity=100"),
    ],
    ids=["shape", "dtype", "capacity"],
)
def test_a_checkpoint_of_other_goals_is_refused_and_leaves_the_transform_as_it_was(shared, keywords, message, tmp_path):
    saved = walk()
    saved.extend(episode(5))
    CheckpointRotation(tmp_path, keep_last=1).save(Checkpoint(buffer=saved), step=5)

    rb = walk(**keywords)
    transform = rb.transform[0]
    if shared:
        transform.share_memory_()
    goals = torch.zeros(3, *keywords["goal_spec"].shape, dtype=keywords["goal_spec"].dtype)
    mine = episode(3, done=False)
    for key in ("achieved_goal", "desired_goal", ("next", "achieved_goal"), ("next", "desired_goal")):
        mine[key] = goals + mine[key].to(goals.dtype)
    rb.extend(mine)
    before = str(copy.deepcopy(transform.get_extra_state()))

    for load in (
        lambda: transform.load_state_dict(saved.transform[0].state_dict()),
        lambda: rb.transform.load_state_dict(saved.transform.state_dict()),
    ):
        with pytest.raises(ValueError, match=message):
            load()
        assert str(transform.get_extra_state()) == before
        assert transform.table.is_shared == shared
    transform.flush()
    assert rb[:]["hindsight", "relabelled"].all()

    fresh = walk(**keywords)  # as in a process that resumes
    before = str(fresh.transform[0].get_extra_state())
    with pytest.raises(CheckpointError, match=message):
        CheckpointRotation(tmp_path, keep_last=1).load_latest(Checkpoint(buffer=fresh))
    assert str(fresh.transform[0].get_extra_state()) == before


def test_goals_of_another_shape_are_refused_after_loading_where_no_goal_spec_told_of_them(tmp_path):
    saved = walk()
    saved.extend(episode(5))
    saved.dumps(tmp_path / "rb")
    resumed = walk()
    resumed.loads(tmp_path / "rb")
    other = episode(3)
    for key in ("achieved_goal", "desired_goal", ("next", "achieved_goal"), ("next", "desired_goal")):
        other[key] = other[key].expand(3, 2).clone()
    with pytest.raises(ValueError, match=r"One goal has the shape \(2,\), and goal_spec, or the first write, \(1,\)"):
        resumed.extend(other)
    assert resumed[:]["hindsight", "relabelled"].all()


# What TorchRL itself leaves open, without any transform


def plain(count, size=100):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=8)
    rb.extend(TensorDict({"value": torch.arange(count)}, [count]))
    return rb


def test_a_plain_dump_over_an_earlier_one_that_is_cut_short_mixes_the_two(tmp_path, monkeypatch):
    rb = plain(10)
    rb.dumps(tmp_path / "rb")
    rb.extend(TensorDict({"value": torch.arange(10, 20)}, [10]))
    monkeypatch.setattr(rb.writer, "dumps", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rb.dumps(tmp_path / "rb")
    loaded = plain(1)
    loaded.loads(tmp_path / "rb")
    assert (len(loaded), loaded.write_count) == (20, 10)  # what is written next overwrites what is newest


def test_a_plain_checkpoint_over_an_earlier_one_is_not_there_for_a_moment(tmp_path, monkeypatch):
    """Why the docs advise CheckpointRotation, which never saves over another."""
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
    there.clear()
    rotation = CheckpointRotation(tmp_path / "rotation", keep_last=1)
    for step in range(3):
        rotation.save(checkpoint, step=step)
        path = rotation.latest()
        assert Checkpoint.is_checkpoint(path)


def in_time(function, seconds=1.0):
    """Whether a function returns in time."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_plain_dump_does_not_wait_for_a_process_that_writes(tmp_path):
    """Why the docs advise to pause collectors that write in other processes."""
    rb = plain(10)
    rb.share()
    with rb._write_lock:  # as a process in the middle of a write
        assert in_time(lambda: rb.dumps(tmp_path / "rb"), seconds=20)
        assert not in_time(rb.sample)


def forked(function):
    """Run a function in a copy of this process, and return how that ended."""
    process = os.fork()
    if process == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1]


def killed_while_holding(lock):
    """Start a process that takes a lock and is killed."""

    def take_and_die():
        lock.__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(forked(take_and_die)) == signal.SIGKILL


def test_a_process_killed_in_a_write_blocks_a_plain_shared_buffer_for_ever():
    rb = plain(10)
    rb.share()
    killed_while_holding(rb._write_lock)
    assert not in_time(rb.sample)


# Between processes


def test_a_process_killed_in_a_write_of_the_table_is_told_of(monkeypatch):
    monkeypatch.setattr("torchrl_her.goals.table.PATIENCE", 0.1)
    rb = walk(goal_spec=Unbounded((1,)))
    rb.share()
    rb.extend(episode(3))
    killed_while_holding(rb.transform[0]._lock._lock)
    failures = []

    def write_again():
        try:
            rb.extend(episode(3))
        except RuntimeError as failure:
            failures.append(str(failure))

    assert in_time(write_again, seconds=5), "it waits for ever"
    assert "was killed or stopped while it wrote. Start anew from the last checkpoint" in failures[0]
    assert rb.sample()["hindsight", "relabelled"].all()  # readers take no lock


def test_a_forked_process_does_not_go_on_with_the_episodes_of_its_parent():
    rb = walk(goal_spec=Unbounded((1,)))
    rb.share()
    rb.extend(episode(3, done=False))
    rb.storage._storage.share_memory_()
    assert forked(lambda: rb.extend(episode(3, begin=3))) == 0  # begins where the parent's stands
    assert len(rb) == 6
    rb.extend(episode(4, begin=3))
    assert goals_of(rb, slice(0, 3)) == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0}
    first, childs, second = (rb[:]["hindsight_stamp"][at, 0].item() for at in (0, 3, 6))
    assert first == second != childs


def test_what_a_forked_process_loads_is_not_lost_at_its_first_write():
    rb = walk(goal_spec=Unbounded((1,)))
    rb.share()
    rb.extend(episode(3, done=False))
    state = rb.transform.state_dict()

    def load_and_go_on():
        rb.transform.load_state_dict(state)
        before = rb.transform[0].tracker.state_dict()["lanes"][0]["episode"]
        written = rb.transform.inv(episode(2, begin=3))
        assert written["hindsight_stamp"].tolist() == [[before, 3], [before, 4]]

    assert forked(load_and_go_on) == 0


def test_the_state_of_a_forked_process_is_without_the_lanes_of_its_parent():
    rb = walk(goal_spec=Unbounded((1,)))
    rb.share()
    rb.extend(episode(3, done=False))

    def save():
        assert rb.transform[0].get_extra_state()["lanes"]["lanes"] == []

    assert forked(save) == 0
    assert len(rb.transform[0].get_extra_state()["lanes"]["lanes"]) == 1


def test_a_copy_of_a_shared_transform_is_independent_and_goes_on_where_it_stood():
    transform = HERTransform(SparseReward(0), her_ratio=1.0, capacity=100, goal_spec=Unbounded((1,))).share_memory_()
    first = transform.inv(episode(3, done=False))["hindsight_stamp"][0, 0].item()
    before = str(transform.get_extra_state())
    copied = copy.deepcopy(transform)
    assert str(copied.get_extra_state()) == before
    assert not copied.table.is_shared
    stamps = copied.inv(episode(3, begin=3))["hindsight_stamp"]
    assert stamps.tolist() == [[first, 3], [first, 4], [first, 5]]
    assert str(transform.get_extra_state()) == before


def test_a_shared_transform_cannot_be_sent_through_a_queue_where_its_lock_would_be_lost():
    transform = HERTransform(SparseReward(0), capacity=100, goal_spec=Unbounded((1,))).share_memory_()
    with pytest.raises(RuntimeError, match=r"inheritance|when that starts"):
        ForkingPickler.loads(ForkingPickler.dumps(transform))  # what a queue does


def test_a_state_from_before_the_first_write_empties_the_table_that_processes_share():
    transform = HERTransform(SparseReward(0), her_ratio=1.0, capacity=100, goal_spec=Unbounded((1,))).share_memory_()
    empty = HERTransform(SparseReward(0), her_ratio=1.0, capacity=100).state_dict()
    written = transform.inv(episode(3))
    goals = transform.table.goals
    transform.load_state_dict(empty)
    assert not transform(written)["hindsight", "relabelled"].any()
    assert transform.table.is_shared
    assert transform.table.goals is goals
    written = transform.inv(episode(3))
    assert transform(written)["hindsight", "relabelled"].all()


def test_samples_on_another_device_than_a_shared_table_are_refused():
    transform = HERTransform(SparseReward(0), capacity=100, goal_spec=Unbounded((1,))).share_memory_()
    written = transform.inv(episode(3))
    with pytest.raises(
        RuntimeError, match=r"on meta, and the goal table, which processes share, on cpu: give .* goal_spec"
    ):
        transform(written.to("meta"))
    assert transform.table.device.type == "cpu"
    assert transform.table.is_shared


# Memory


def held():
    """Bytes of all tensors that exist, bytes that Python holds, and the number of its objects."""
    gc.collect()
    objects = gc.get_objects()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in objects
        if type(each) is torch.Tensor
    }
    return sum(storages.values()), tracemalloc.get_traced_memory()[0], len(objects)


def test_memory_stays_constant_whatever_becomes_of_the_episodes():
    rb = make_buffer(size=2000, capacity=2000)
    sources = [Source(0, 8, 20), Source(8, 8, 20)]

    def write_on(writes, first):
        for at in range(writes):
            rb.extend(sources[0].next())
            rb.extend(sources[1].next().exclude("collector"))
            rb.extend(Source(16 + first + at, 4, 20 + at % 5).next())  # that is never heard of again
            rb.sample()

    tracemalloc.start()
    try:
        write_on(15, first=0)  # the buffer is full several times over
        before = held()
        write_on(45, first=15)
        after = held()
    finally:
        tracemalloc.stop()
    for name, earlier, later in zip(("tensors", "Python", "objects"), before, after, strict=True):
        assert later < 1.02 * earlier + 20_000, f"{name}: {earlier} grew to {later}"
