"""Both hindsight transforms behind TorchRL's collectors, in one process, in several and in the background.

Each case takes another path through a collector or the transform. With the newest TorchRL, test_torchrl_limits.py runs
all rows of docs/reference/collectors.md that work.
"""

import contextlib
import functools
import itertools
import multiprocessing
import time
from collections import Counter

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform, ParallelEnv, SerialEnv, TransformedEnv

from support import tape
from support.factories import make_augmentation, make_transform, start_processes_from_a_server
from support.named import named
from support.tape import LENGTHS, RELABELLED, check, collect, ended, length_of, make_serial, make_tape, places
from torchrl_her import EnvReward, GoalSelection, HERKeys, NormalizedInputs, PackedStorage, Uniform

NUMBER = 8  # environments in one process
STEPS, BATCHES = 8, 6  # steps of each environment per batch, and batches per collector
SIZE = 30_000  # rows of storages and goal tables, large enough that nothing is overwritten
MASK = ("collector", "mask")
GOAL_SPEC = make_tape().observation_spec["achieved_goal"]

pytestmark = pytest.mark.filterwarnings("ignore:split_trajs=True")
quick_start = pytest.fixture(scope="module", autouse=True)(start_processes_from_a_server)


@contextlib.contextmanager
def started_by(method):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def tapes(first, number=NUMBER):
    return [functools.partial(make_tape, first + i) for i in range(number)]


def serial(first):
    # One function with arguments: with a list of functions, TorchRL creates each environment twice.
    return SerialEnv(NUMBER, make_tape, create_env_kwargs=[{"number": first + i} for i in range(NUMBER)])


def parallel(first):
    return ParallelEnv(NUMBER, tapes(first), mp_start_method="fork", shutdown_timeout=0.1)  # starts and ends quickly


def make_buffer(kind=TensorDictReplayBuffer, storage=LazyTensorStorage, size=SIZE, hindsight=True, **options):
    """Return a buffer that relabels as many transitions as possible."""
    of_storage = {key: options.pop(key) for key in ("ndim", "shared_init") if key in options}
    of_transform = {"goal_spec": GOAL_SPEC, "capacity": 2 * size}
    of_transform |= {key: options.pop(key) for key in of_transform if key in options}
    if hindsight:
        options["transform"] = make_transform(reward=EnvReward(make_tape), her_ratio=1.0, **of_transform)
    return kind(storage=storage(size, **of_storage), **options)


@contextlib.contextmanager
def collecting(kind, make_envs, **options):
    """Return a collector in this process, or one with two processes that have their own environments."""
    frames = STEPS * (1 if make_envs is make_tape else NUMBER) * (2 if kind is MultiSyncCollector else 1)
    second = functools.partial(make_envs, 1 if make_envs is make_tape else NUMBER)
    makers = make_envs(0) if kind is Collector else [functools.partial(make_envs, 0), second]
    running = kind(makers, None, **{"frames_per_batch": frames, "total_frames": -1, **options})
    with shut_down_after(running):
        yield running


@contextlib.contextmanager
def shut_down_after(*running):
    """End all processes, even if a test fails."""
    try:
        yield
    finally:
        for collector in running:
            with contextlib.suppress(Exception):  # of processes that failed
                collector.shutdown()


def fill(rb, kind, make_envs, how, **options):
    """Collect transitions into the buffer: by hand ("extend" or "flattened"), "replay_buffer" or "start"."""
    options |= {"replay_buffer": rb} if how in ("replay_buffer", "start") else {}
    with collecting(kind, make_envs, **options) as running:
        if how == "start":
            run_in_the_background(running, rb)
            return
        for batch in itertools.islice(running, BATCHES):
            if how in ("extend", "flattened"):
                rb.extend(batch.reshape(-1) if how == "flattened" else batch)


def until(is_true, things=None):
    """Yield items until the condition is met, for at most two minutes."""
    deadline = time.monotonic() + 120
    for thing in things or itertools.repeat(None):
        if is_true():
            return
        assert time.monotonic() < deadline, "not after two minutes"
        yield thing


def run_in_the_background(running, rb):
    """Let a collector write in the background, and sample meanwhile."""
    running.start()
    for _ in until(lambda: len(rb) >= 400):
        if len(rb):
            check(rb.sample(64))
        time.sleep(0.01)
    running.async_shutdown()


# Checks


def unpadded(batch):
    """Return the transitions of a batch, ``[n]``."""
    rows = batch.reshape(-1)
    return rows[rows[MASK].reshape(-1)] if MASK in rows.keys(True) else rows


def check_buffer(rb, environments, steps=None, only_whole=False, **options):
    """Check all goals, and that the first ``steps`` steps of every environment, by default all, are stored once."""
    tape.check_nothing_is_lost(unpadded(rb[:]), environments, steps, only_whole)
    check_hindsight(rb, **options)


def check_hindsight(rb, **options):
    """Check that goals are correct, and that all transitions of ended episodes are relabelled."""
    stored = rb[:]
    rows = unpadded(stored)
    relabelled = rows[RELABELLED].reshape(-1).tolist()
    assert sum(relabelled) == stored[RELABELLED].sum(), "padding has hindsight"
    check(rows, **options)
    stored_at = places(rows)
    newest = {number: max(place[1] for place in stored_at if place[0] == number) for number, *_ in stored_at}
    over = {place for place in stored_at if place[1] < newest[place[0]]}.union(ended(stored_at))
    assert len(over) > 0.6 * len(rows), "too few episodes are over"
    assert not [place for place, was in zip(stored_at, relabelled, strict=True) if place in over and not was]
    check(unpadded(rb.sample(64)), **options)


def check_collected(rb, kind, make_envs, how, **options):
    """Collect transitions, and check that nothing is lost, all goals are correct, and ended episodes relabelled."""
    fill(rb, kind, make_envs, how, **options)
    environments = (1 if make_envs is make_tape else NUMBER) * (1 if kind is Collector else 2)
    if "reset_at_each_iter" in options:  # episodes are cut
        stored = places(unpadded(rb[:]))
        assert len({*stored}) == len(stored)
        assert kind is MultiAsyncCollector or len(stored) == STEPS * BATCHES * environments
        return check_hindsight(rb)
    only_whole = "trajs_per_batch" in options  # the collector holds back the other episodes
    has_all_steps = kind is not MultiAsyncCollector and how != "start" and (how == "replay_buffer" or not only_whole)
    check_buffer(
        rb,
        environments=environments,
        steps=STEPS * BATCHES if has_all_steps else None,
        only_whole=only_whole,
        flags="set_truncated" not in options,
    )


# The type of a collector, its environments, how it writes, its options, and the options of the buffer.
SHARED, BATCHED = {"shared": True}, {"kind": ReplayBuffer, "ndim": 2}
PRIORITIZED = {"kind": named("TensorDictPrioritizedReplayBuffer"), "alpha": 0.7, "beta": 0.5, "sync": False}
CASES = [
    (Collector, serial, "extend", {}, {}),
    (Collector, serial, "flattened", {"set_truncated": True}, {}),
    (Collector, serial, "flattened", {"split_trajs": True}, {}),
    (Collector, serial, "flattened", {"trajs_per_batch": 4, "traj_format": "cat"}, {}),
    (Collector, parallel, "replay_buffer", {}, BATCHED),
    (Collector, serial, "replay_buffer", {"track_traj_ids": False}, BATCHED),
    (Collector, serial, "replay_buffer", {"trajs_per_batch": 4}, {"kind": ReplayBuffer}),
    (Collector, serial, "replay_buffer", {"extend_buffer": False}, {}),
    (Collector, serial, "replay_buffer", {"extend_buffer": False, "reset_at_each_iter": True}, {}),
    (Collector, make_tape, "start", {}, {}),
    (MultiSyncCollector, serial, "extend", {}, {"ndim": 3}),
    (MultiSyncCollector, make_tape, "flattened", {"split_trajs": True}, {}),  # other ids in each batch
    (MultiSyncCollector, make_tape, "replay_buffer", {}, SHARED | PRIORITIZED),
    (MultiSyncCollector, serial, "replay_buffer", {"trajs_per_batch": 4}, SHARED | {"storage": LazyMemmapStorage}),
    (MultiAsyncCollector, serial, "flattened", {}, {}),
    (MultiAsyncCollector, make_tape, "replay_buffer", {}, {"goal_spec": None}),
    (MultiAsyncCollector, serial, "start", {}, SHARED | BATCHED | {"storage": PackedStorage}),
]


@pytest.mark.parametrize(("kind", "make_envs", "how", "of_collector", "of_buffer"), CASES)
def test_goals_are_correct_nothing_is_lost_and_transitions_are_relabelled(
    kind, make_envs, how, of_collector, of_buffer
):
    check_collected(make_buffer(**of_buffer), kind, make_envs, how, **of_collector)


def test_steps_of_environments_in_any_order_without_trajectory_ids():
    policy = TensorDictModule(lambda seen: torch.zeros(*seen.shape[:-1], 2), ["observation"], ["action"])
    collector = AsyncBatchedCollector(
        tapes(0), policy=policy, env_backend="threading", frames_per_batch=NUMBER * STEPS, total_frames=-1
    )
    rb = make_buffer()
    with shut_down_after(collector):
        for batch in itertools.islice(collector, BATCHES):
            rb.extend(batch)
    assert "collector" not in list(rb[:].keys())
    check_buffer(rb, NUMBER)


def test_forked_processes_and_flush_end_no_episode_of_another_process():
    rb = make_buffer(storage=LazyMemmapStorage, shared=True)
    here = Collector(make_tape(2), None, frames_per_batch=STEPS, total_frames=-1)
    rb.extend(here.next())  # an episode that is running in this process when the others start
    with started_by("fork"), collecting(MultiSyncCollector, make_tape, replay_buffer=rb) as running:
        for _ in itertools.islice(running, BATCHES):
            rb.extend(here.next())
    check_buffer(rb, 3)
    rows = rb[:]
    whole, of_this_process = ended(places(rows)), rows["observation"][:, 0] == 2
    of_running = torch.tensor([place not in whole for place in places(rows)])
    assert (of_running & of_this_process).any()
    assert (of_running & ~of_this_process).any()
    assert rows[RELABELLED].all()
    rb.transform[0].flush()
    assert rb.transform[0].report().running == 0


@pytest.mark.filterwarnings("ignore:last_cursor is None")
def test_a_checkpoint_that_is_made_while_collectors_in_other_processes_pause_is_whole(tmp_path):
    rb, resumed, rotation = make_buffer(shared=True), make_buffer(), CheckpointRotation(tmp_path, keep_last=1)
    with collecting(MultiAsyncCollector, make_tape, replay_buffer=rb) as running:
        running.start()
        for step in range(2):
            wanted = rb.write_count + 200
            for _ in until(lambda wanted=wanted: rb.write_count >= wanted):
                time.sleep(0.01)
            with running.pause():
                count = rb.write_count
                rotation.save(Checkpoint(buffer=rb), step=step)
                assert rb.write_count == count
    rotation.load_latest(Checkpoint(buffer=resumed))
    resumed.transform[0].flush()
    assert len(resumed) == resumed.write_count == count
    # The running episodes of the other processes are missing.
    assert check(resumed[:]) > 1 - 2 * max(LENGTHS) / count


# n-step returns


@pytest.mark.parametrize("filled_before", [False, True], ids=["empty before", "filled before"])
def test_workers_that_write_into_a_shared_buffer_have_separate_windows(filled_before):
    """In a buffer with transitions of the main process, TorchRL's transform joins them to each worker's frames."""
    hindsight = make_transform(reward=EnvReward(make_tape), capacity=10_000, goal_spec=GOAL_SPEC)
    storage = LazyTensorStorage(2000, shared_init=not filled_before)
    rb = ReplayBuffer(storage=storage, transform=Compose(MultiStepTransform(3, 0.5), hindsight), shared=True)
    if filled_before:
        rb.extend(*collect(make_tape(2), 103))
    collect(tapes(0, 2), 100, 15, MultiAsyncCollector, replay_buffer=rb)
    assert 0.7 < check(rb[:], n=3, gamma=0.5) < 0.85
    tape.check_nothing_is_lost(rb[:], 2 + filled_before)  # the writes after the first one could lose transitions


# HindsightAugmentation


@pytest.mark.parametrize(
    ("kind", "options", "shared"),
    [
        (Collector, {}, False),
        (Collector, {"split_trajs": True}, False),
        (MultiSyncCollector, {}, False),
        (MultiAsyncCollector, {}, True),
    ],
)
def test_each_process_holds_its_own_transitions_back_and_stores_whole_episodes_with_copies(kind, options, shared):
    transform = make_augmentation(EnvReward(make_tape), keys=HERKeys(mask=MASK if options else None))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), transform=transform, shared=shared)
    if kind is Collector:
        for data in collect(make_serial(0, 1), 40, 10, **options):
            rb.extend(data.reshape(-1))
    else:
        collect(tapes(0, 2), 40, 10, kind, replay_buffer=rb)
    rows = rb[:]
    rows = rows[rows["next", "observation"][:, 2] > 0]  # a process that is stopped while it writes leaves empty rows
    check(rows)
    assert len(rows) >= 5 * (400 - 4 * 12)  # the last episodes are held back
    counts = Counter(zip(places(rows), rows[RELABELLED].flatten().tolist(), strict=True))
    incomplete = 0
    for place in {place[:2] for place, _ in counts}:
        states = [(*place, state) for state in range(length_of(*place))]
        incomplete += any((counts[state, False], counts[state, True]) != (1, 4) for state in states)
    assert incomplete <= (8 if kind is MultiAsyncCollector else 0)  # of the write that is cut


def with_selection(her, inputs, number):
    return TransformedEnv(make_tape(number), Compose(GoalSelection(her, Uniform(), start=50, share=1.0), inputs))


@pytest.mark.parametrize("environments", [1, 3])
def test_the_dummy_of_a_collector_is_neither_stamped_nor_a_goal(environments):
    her = make_transform(capacity=100, strategy="random", her_ratio=1.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=her, batch_size=500)
    data = collect(make_tape(), 40)[0]
    rb.extend(data[:environments].clone().zero_())
    rb.empty()
    assert her.table_size == her.report().episodes == 0
    rb.extend(data)
    assert rb.sample()["desired_goal"].any(-1).all()


@pytest.mark.slow
def test_spawned_workers_share_goals_and_statistics_with_a_shared_buffer():
    """The environments and the buffer of a worker contain the same objects. The other tests use a fork server."""
    her, inputs = make_transform(reward=EnvReward(make_tape), capacity=2000, goal_spec=GOAL_SPEC), NormalizedInputs()
    inputs(make_tape().fake_tensordict())
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2000), transform=Compose(her, inputs), shared=True, batch_size=256
    )
    envs = [functools.partial(with_selection, her, inputs, number) for number in range(2)]
    with started_by("spawn"):
        collector = MultiAsyncCollector(envs, frames_per_batch=50, total_frames=600, replay_buffer=rb)
    with shut_down_after(collector):
        collector.start()
        for _ in until(lambda: rb.write_count >= 600):
            time.sleep(0.1)
    stored = rb.storage[:]
    observed = stored["next", "observation"]
    torch.testing.assert_close(inputs.mean[:3], observed.mean(0))  # without the dummies of collectors
    torch.testing.assert_close(inputs.scale[:3], observed.std(0, correction=0).clamp(0.01))
    assert stored["goal_selection", "selected"].any()
    assert rb.sample()[RELABELLED].float().mean() > 0.7
