"""Concurrent threads and processes, checkpoints, killed and interrupted writers, and memory over a long time."""

import copy
import itertools
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, Unbounded

import torchrl_her
from support.factories import forked, make_augmentation, make_transform, run_processes, start_processes_from_a_server
from support.traffic import Source, check, make_buffer
from support.world import Goals, World

PACKAGE = str(Path(torchrl_her.__file__).parent)
EPISODE = ["go", "go", "truncated"]
ORIGINAL = 999  # the cell of the desired goal of a world's first episode

pytestmark = pytest.mark.filterwarnings("ignore:.*longer in the goal table")
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
    """Make threads switch more often, unless a tracer measures coverage: its installation in a thread can then fail."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5 if sys.gettrace() is None else interval)
    yield
    sys.setswitchinterval(interval)


def write(rb, first, steps, count):
    """Write at least ``count`` transitions of eight environments."""
    source = Source(first, 8, steps)
    for _ in range(-(-count // (8 * steps))):
        rb.extend(source.next())


def sample_until(done, rb, strategy="future"):
    """Sample and check transitions until an event, and at least 10,000."""
    sampled = relabelled = 0
    while sampled < 10_000 or not done.is_set():
        batch = rb.sample()
        relabelled += check(batch, strategy)
        sampled += len(batch)
    assert relabelled > 0.1 * sampled


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("count", [30_000, pytest.param(500_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("strategy", "options"), [("future", {}), ("random", {"prefetch": 2})], ids=["threads", "threads with prefetch"]
)
def test_goals_are_correct_with_concurrent_writers_and_samplers(strategy, options, count):
    rb = make_buffer(4096, 2048, strategy, **options)
    write(rb, 0, 100, 1)
    done = threading.Event()
    running = [in_thread(sample_until, done, rb, strategy) for _ in range(3)]
    try:
        for writer in [in_thread(write, rb, first, 125, count) for first in (8, 16)]:
            writer.result(timeout=300)
    finally:
        done.set()
    for sampler in running:
        sampler.result(timeout=60)
    assert rb.write_count >= 2 * count


def test_no_transition_of_processes_that_write_at_the_same_time_is_lost_or_mixed_up():
    rb = make_buffer(2500, 2500, shared=True)
    rb.transform[0].her_ratio = 1.0
    rb.extend(Source(0, 8, 1).next())
    rb.storage._storage.share_memory_()
    run_processes("fork", write, *((rb, first, 3, 1200) for first in (8, 16)))
    batch = rb[:]
    assert check(batch) == len(batch) == 2408
    assert len({tuple(place) for place in batch["observation"].tolist()}) == 2408


# Checkpoints


@pytest.mark.usefixtures("frequent_switches")
def test_a_checkpoint_that_is_made_while_threads_write_and_sample_is_whole(tmp_path):
    size, capacity = 4096, 3 * 4096 + 16 * 140  # the goals of all stored transitions are in the table
    rb = make_buffer(size, capacity)
    write(rb, 0, 100, size)
    rotation, checkpoint = CheckpointRotation(tmp_path, keep_last=1), Checkpoint(buffer=rb)
    done = threading.Event()
    threads = [in_thread(sample_until, done, rb), *(in_thread(write, rb, first, 100, 40_000) for first in (8, 16))]
    for step in range(4):
        rotation.save(checkpoint, step=step)
        loaded = make_buffer(size, capacity)
        rotation.load_latest(Checkpoint(buffer=loaded))
        loaded.transform[0].flush()
        loaded.transform[0].her_ratio = 1.0
        batch = loaded[:]
        assert check(batch) == len(batch) == size
    done.set()
    for thread in threads:
        thread.result(timeout=60)


def make_small(**options):
    transform = make_transform(**{"her_ratio": 1.0, "capacity": 100} | options)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform, batch_size=50)


def steps(world, moves, env=0):
    """Return the next steps of an environment of a world, without trajectory ids."""
    return world.tensordict(world.play(env, moves), ids=False)


def cells(rb, rows):
    """Return the cells of the goals that are drawn for stored rows."""
    return {int(cell) for cell in rb[[*range(len(rb))[rows]] * 50]["desired_goal"][:, 1]}


# Interrupts


def interrupted_at(number, action, interrupt):
    """Run an action, interrupt it before the given line of the package, and return whether it has so many lines."""
    left, before = number, sys.gettrace()  # that of coverage

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        left -= event == "line"
        if not left:
            sys.settrace(None)
            interrupt()
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # an interrupt at the exit of torch.no_grad() leaves it disabled
    return False


def raise_interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [make_transform, make_augmentation])
@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_write_can_be_repeated_after_an_interrupt_at_any_line(make, strategy, every):
    """Two episodes of ten steps end, one of seven waits; the interrupted write continues it."""
    options = {"strategy": strategy} | ({"her_ratio": 1.0} if make is make_transform else {"n_sampled_goal": 1})
    data = steps(World(1, Goals()), (["go"] * 9 + ["truncated"]) * 4)
    count = 0
    for number in itertools.count(1, every):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=make(**options))
        rb.extend(data[:27])
        if not interrupted_at(number, partial(rb.extend, data[27:]), raise_interrupt):
            break
        rb.extend(data[27:])
        rb.transform[0].flush()
        stored = rb[:]
        relabelled = stored["hindsight", "relabelled"].squeeze(-1)
        for part in (stored[relabelled],) if make is make_transform else (stored[relabelled], stored[~relabelled]):
            assert sorted(part["uid"].tolist()) == list(range(40)), f"interrupted at line {number}"
        count += 1
    assert count * every > 200


@pytest.mark.parametrize("make", [make_transform, make_augmentation])
def test_an_interrupted_write_does_not_undo_the_write_of_a_waiting_thread(make):
    """The other thread writes as soon as the interrupted one releases the lock."""
    data, other = (steps(World(2, Goals()), ["go"] * 10, env) for env in range(2))
    written = []
    for number in itertools.count(1, 10):
        hindsight = make()

        def switch_after_release(frame, event, function, before=len(written)):  # noqa: B008
            if event == "c_return" and function.__name__ == "release" and len(written) > before:
                wait(written[before:], timeout=1)

        def start_to_write(hindsight=hindsight):
            written.append(in_thread(hindsight.inv, other.clone()))
            time.sleep(0.005)  # until it waits for the lock
            raise KeyboardInterrupt

        sys.setprofile(switch_after_release)
        try:
            is_interrupted = interrupted_at(number, partial(hindsight.inv, data.clone()), start_to_write)
        finally:
            sys.setprofile(None)
        if not is_interrupted:
            break
        if wait(written[-1:], timeout=1).done:  # an interrupt at the release itself can keep the lock
            assert hindsight.report().running >= 1, f"interrupted at line {number}"
    assert sum(each.done() for each in written) > 0.8 * len(written) > 10


# Between processes


@pytest.fixture
def world():
    return World(1, Goals())


@pytest.fixture
def rb(world):
    """Return a shared buffer with a running episode of three steps."""
    rb = make_small(goal_spec=Unbounded((2,)))
    rb.share()
    rb.extend(steps(world, ["go"] * 3))
    return rb


def test_a_process_killed_while_it_writes_to_the_table_is_an_error_for_the_next_writer(monkeypatch):
    monkeypatch.setattr("torchrl_her.episodes.memory.LOCK_TIMEOUT", 0.1)
    results = []
    for line in itertools.count(1, 60):
        world, transform = World(1, Goals()), make_small(goal_spec=Unbounded((2,))).transform[0].share_memory_()
        written, data = transform.inv(steps(world, EPISODE)), steps(world, EPISODE)

        def die(line=line, transform=transform, data=data):
            interrupted_at(line, partial(transform.inv, data), partial(os.kill, os.getpid(), signal.SIGKILL))

        if os.WTERMSIG(forked(die)) != signal.SIGKILL:
            break
        results.append(in_thread(transform.inv, data.clone()).exception(timeout=10))
        assert transform(written)["hindsight", "relabelled"].all()  # readers need no lock
    message = "was killed or stopped during a write. Restart from the last checkpoint"
    assert sum(message in str(result) for result in results) >= 2
    assert all(result is None or message in str(result) for result in results)


def test_a_forked_process_does_not_continue_the_episodes_of_its_parent(rb, world):
    rb.storage._storage.share_memory_()
    data = steps(world, EPISODE)  # continues the episode

    def begin_without_episodes():
        interrupted = patch("torchrl_her.checks.checks.Checks.on_tracked", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            rb.extend(data)
        running = make_small().transform[0]
        running.load_state_dict(rb.transform[0].state_dict())
        assert running.report().running == 0
        rb.extend(data)

    assert forked(begin_without_episodes) == 0
    assert len(rb) == 6
    assert cells(rb, slice(3, 6)) == {4, 5, 6}
    assert cells(rb, slice(0, 3)) == {1, 2, 3}
    rb.extend(data)
    assert cells(rb, slice(0, 3)) == {1, 2, 3, 4, 5, 6}


def test_a_state_that_a_forked_process_loads_is_not_lost_at_its_first_write(rb, world):
    state, data = rb.transform.state_dict(), steps(world, EPISODE)

    def load_and_continue():
        rb.transform.load_state_dict(state)
        rb.transform.inv(data)

    assert forked(load_and_continue) == 0
    assert cells(rb, slice(0, 3)) == {1, 2, 3, 4, 5, 6}  # the child has ended the episode in the shared table


def test_a_copy_of_a_shared_transform_is_independent_and_continues_its_episodes(rb, world):
    copied, written = copy.deepcopy(rb.transform[0]), rb.storage[:3]
    copied.inv(steps(world, EPISODE))
    for transform, last in ((copied, 6), (rb.transform[0], 3)):
        batch = transform(written.repeat(50))
        assert batch["hindsight", "relabelled"].all()
        assert batch["desired_goal"][:, 1].max() == last
    assert rb.transform[0].report().running == 1


def test_a_shared_transform_cannot_be_sent_through_a_queue_which_would_lose_its_lock(rb):
    with pytest.raises(RuntimeError, match=r"inheritance|when that starts"):
        ForkingPickler.loads(ForkingPickler.dumps(rb.transform[0]))  # as a queue does


def test_a_state_from_before_the_first_write_empties_the_table_that_processes_share(rb, world):
    transform, written = rb.transform[0], rb.transform.inv(steps(world, EPISODE))
    assert transform(written)["hindsight", "relabelled"].all()
    assert forked(lambda: transform.load_state_dict(make_small().transform[0].state_dict())) == 0
    assert not transform(written)["hindsight", "relabelled"].any()
