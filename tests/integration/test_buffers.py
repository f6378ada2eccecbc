"""HERTransform in TorchRL's buffers, storages, samplers and writers, and with what else a buffer can do.

What works, and what TorchRL cannot do, stands in the tables of docs/buffers.md; the last test compares them.
"""

import copy
import dataclasses
import pickle
import re
import tempfile
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Oracle, Stream, make_tensordict, reached, reward_of
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Unbounded,
    traj,
)
from torchrl.data import Sequence as SequenceUnit
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from torchrl.data.replay_buffers.writers import RoundRobinWriter, TensorDictMaxValueWriter, TensorDictRoundRobinWriter

from torchrl_her import GoalReward, HERTransform, PackedStorage

# Four environments, whose episodes end at different times, write 32 transitions at a time into a storage that
# holds five writes. The goal table is larger: every transition of an episode that ended has to be relabelled.
STREAM = Stream(
    lanes=4,
    lengths=((5, "truncated"), (8, "terminated"), (3, "truncated"), (4, "terminated"), (11, "truncated")),
    chunk=8,
    writes=8,
    layout="flat with ids",
    storage=5,
    capacity=1000,
)
SOME = dataclasses.replace(STREAM, her_ratio=0.9)  # an oracle for it does not ask for any relabelled transition
SIZE = STREAM.storage * STREAM.lanes * STREAM.chunk
BATCH = 64
PRIORITIES = {"alpha": 0.7, "beta": 0.5}


def make_transform(**kwargs):
    arguments = {"her_ratio": 1.0, "capacity": STREAM.capacity} | kwargs
    return HERTransform(GoalReward(reward_of, terminated_fn=reached), **arguments)


def make(kind=TensorDictReplayBuffer, storage=LazyTensorStorage, hindsight=True, transform=None, **kwargs):
    """A buffer with hindsight, or the same without."""
    if transform is None and hindsight:
        transform = make_transform()
    return kind(storage=storage(SIZE), transform=transform, batch_size=BATCH, **kwargs)


def rows_of(lanes):
    return [row for lane in lanes for row in lane]


def extend(rb, lanes, shape=(-1,)):
    """Write all lanes at once: flattened, or as [lanes, time] or [lanes, lanes, time]."""
    return rb.extend(make_tensordict(rows_of(lanes), with_ids=True).reshape(shape))


def extend_time_first(rb, lanes):
    return rb.extend(make_tensordict(rows_of(lanes), with_ids=True).reshape(len(lanes), -1).transpose(0, 1))


def everything(rb):
    """What a buffer stores: past the transform, and a copy."""
    if isinstance(rb, ReplayBufferEnsemble):
        return torch.cat([everything(rb[number]) for number in range(len(rb))])
    stored = rb.storage[:]
    return torch.stack(stored) if isinstance(stored, list) else stored.clone()


def go_through(rb, write=extend, stream=STREAM):
    """Write a stream, sample as the buffer grows, check each transition and that everything stays stored as it is."""
    oracle = Oracle(stream)
    sampled = relabelled = 0
    for number, lanes in enumerate(stream):
        write(rb, lanes)
        oracle.write(rows_of(lanes))
        before = everything(rb)
        batch = rb.sample()
        sampled += batch.numel()
        relabelled += oracle.check(batch)
        if number % 4 == 0:
            assert uids(before) == list(oracle.transitions)[-SIZE:], "a transition is lost"
            assert_same(before, everything(rb))
    assert relabelled > 0.75 * stream.her_ratio * sampled  # the rest belongs to running episodes
    return oracle


def uids(tensordict):
    return sorted(tensordict["uid"].flatten().tolist())


def assert_same(before, after):
    assert set(before.keys(True)) == set(after.keys(True)), "which entries are stored has changed"
    assert (before == after).all(), "what is stored has changed"


def fails_as_without(match, run_with):
    """Check that something fails in TorchRL's buffer alone, and with hindsight in the very same way."""
    for hindsight in (False, True):
        with pytest.raises(Exception, match=match):
            run_with(hindsight)


# Buffers


def ensemble(*, in_members, storage=LazyTensorStorage, **kwargs):
    """A buffer for each lane, with a transform in each of them or one for all."""
    size = SIZE // STREAM.lanes
    members = [
        TensorDictReplayBuffer(storage=storage(size), transform=make_transform() if in_members else None)
        for _ in range(STREAM.lanes)
    ]
    return ReplayBufferEnsemble(
        *members, transform=None if in_members else make_transform(), batch_size=BATCH, **kwargs
    )


def write_to_members(rb, lanes):
    for number, lane in enumerate(lanes):
        rb[number].extend(make_tensordict(lane, with_ids=True))


def write_routed(rb, lanes):
    data = make_tensordict(rows_of(lanes), with_ids=True)
    data["lane"] = torch.arange(len(lanes)).repeat_interleave(len(lanes[0]))
    rb.extend(data)


BUFFERS = {
    "ReplayBuffer": (partial(make, ReplayBuffer), extend),
    "TensorDictReplayBuffer": (make, extend),
    "PrioritizedReplayBuffer": (partial(make, PrioritizedReplayBuffer, **PRIORITIES), extend),
    "TensorDictPrioritizedReplayBuffer": (partial(make, TensorDictPrioritizedReplayBuffer, **PRIORITIES), extend),
    "TensorDictPrioritizedReplayBuffer(sync=False)": (
        partial(make, TensorDictPrioritizedReplayBuffer, **PRIORITIES, sync=False),
        extend,
    ),
    "ReplayBufferEnsemble, a transform in each member": (partial(ensemble, in_members=True), write_to_members),
    "ReplayBufferEnsemble(transform=..., routing_key=...)": (
        partial(ensemble, in_members=False, routing_key="lane"),
        write_routed,
    ),
    "ReplayBufferEnsemble(transform=..., routing_dim=0)": (
        partial(ensemble, in_members=False, routing_dim=0),
        partial(extend, shape=(STREAM.lanes, -1)),
    ),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_every_buffer_relabels_rightly(name):
    make_buffer, write = BUFFERS[name]
    go_through(make_buffer(), write)


@pytest.mark.parametrize(
    ("storage", "in_members"),
    [
        (LazyMemmapStorage, True),
        (LazyMemmapStorage, False),
        (LazyStackStorage, True),
        (LazyStackStorage, False),
        (ListStorage, True),
        (ListStorage, False),
        (CompressedListStorage, True),
        (CompressedListStorage, False),
        (PackedStorage, True),
        (PackedStorage, False),
    ],
)
def test_an_ensemble_relabels_over_every_storage(storage, in_members):
    if in_members:
        go_through(ensemble(in_members=True, storage=storage), write_to_members)
    else:
        go_through(ensemble(in_members=False, storage=storage, routing_key="lane"), write_routed)


# Storages and samplers


def on_disk(size):
    """A packed storage in a file that goes with it."""
    folder = tempfile.TemporaryDirectory()
    storage = PackedStorage(size, scratch_dir=folder.name)
    weakref.finalize(storage, folder.cleanup)
    return storage


STORAGES = {
    "LazyTensorStorage": (LazyTensorStorage, extend),
    "LazyTensorStorage(ndim=2)": (partial(LazyTensorStorage, ndim=2), partial(extend, shape=(4, -1))),
    "LazyTensorStorage(ndim=3)": (partial(LazyTensorStorage, ndim=3), partial(extend, shape=(2, 2, -1))),
    "LazyMemmapStorage": (LazyMemmapStorage, extend),
    "LazyMemmapStorage(ndim=2)": (partial(LazyMemmapStorage, ndim=2), partial(extend, shape=(4, -1))),
    "PackedStorage": (PackedStorage, extend),
    "PackedStorage(ndim=2)": (partial(PackedStorage, ndim=2), partial(extend, shape=(4, -1))),
    "PackedStorage(ndim=3)": (partial(PackedStorage, ndim=3), partial(extend, shape=(2, 2, -1))),
    "PackedStorage(scratch_dir=...)": (on_disk, extend),
    "ListStorage": (ListStorage, extend),
    "LazyStackStorage": (LazyStackStorage, extend),
    "CompressedListStorage": (CompressedListStorage, extend),
}
# In a TensorDict buffer slice samplers overwrite the done flags, unless told not to: see test_sequences.py.
SAMPLERS = {
    "RandomSampler": RandomSampler,
    "SamplerWithoutReplacement": SamplerWithoutReplacement,
    "PrioritizedSampler": partial(PrioritizedSampler, SIZE, **PRIORITIES),
    "SliceSampler": partial(SliceSampler, slice_len=2, truncated_key=None),
    "SliceSamplerWithoutReplacement": partial(
        SliceSamplerWithoutReplacement, slice_len=2, strict_length=False, truncated_key=None
    ),
    "PrioritizedSliceSampler": partial(PrioritizedSliceSampler, SIZE, **PRIORITIES, slice_len=2, truncated_key=None),
}
NO_SLICES = "Could not get a tensordict out of the storage"
TORCHRLS_LIMITS = {
    ("ListStorage", "SliceSampler"): NO_SLICES,
    ("ListStorage", "SliceSamplerWithoutReplacement"): NO_SLICES,
    ("ListStorage", "PrioritizedSliceSampler"): NO_SLICES,
    ("CompressedListStorage", "SliceSampler"): NO_SLICES,
    ("CompressedListStorage", "SliceSamplerWithoutReplacement"): NO_SLICES,
    ("CompressedListStorage", "PrioritizedSliceSampler"): NO_SLICES,
    ("LazyStackStorage", "PrioritizedSliceSampler"): "Wrong shapes / arange configuration",
    ("LazyTensorStorage(ndim=3)", "PrioritizedSliceSampler"): "invalid entry in coordinates array",
    ("PackedStorage(ndim=3)", "PrioritizedSliceSampler"): "invalid entry in coordinates array",
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_relabels_rightly_with_every_sampler(storage, sampler):
    make_storage, write = STORAGES[storage]
    make_buffer = partial(make, storage=make_storage)

    def run(hindsight):
        rb = make_buffer(sampler=SAMPLERS[sampler](), hindsight=hindsight)
        for lanes in STREAM:
            write(rb, lanes)
            rb.sample()

    if limit := TORCHRLS_LIMITS.get((storage, sampler)):
        fails_as_without(limit, run)
    else:
        go_through(make_buffer(sampler=SAMPLERS[sampler]()), write)


@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_brings_back_what_compact_leaves_out(storage):
    make_storage, write = STORAGES[storage]
    rb = make(storage=make_storage, transform=make_transform(compact=True))
    go_through(rb, write)
    assert {"done", "terminated", "truncated", ("next", "desired_goal")}.isdisjoint(everything(rb).keys(True))


@pytest.mark.parametrize("compact", [True, False])
def test_rows_that_were_stored_the_other_way_are_sampled_rightly_without_the_transforms_state(compact):
    """The storage alone is loaded, with or without columns for what new rows leave out."""
    before, after = (make(transform=make_transform(compact=each)) for each in (not compact, compact))
    chunks = list(STREAM)
    for lanes in chunks:
        extend(before, lanes)
    after.storage.load_state_dict(before.storage.state_dict())
    oracle = Oracle(SOME)
    for lanes in chunks:
        oracle.write(rows_of(lanes))
    assert oracle.check(after[:]) == 0  # as stored: their stamps are another table's
    if compact:  # LazyTensorStorage then holds what rows before had under "next"
        for lanes in chunks[:2]:
            extend(after, lanes)
        oracle.check(after[:])


def add(rb, lanes, shape=()):
    """Write one step at a time: of one environment after the other, or of all at once."""
    for rows in zip(*lanes, strict=True):
        step = make_tensordict(list(rows), with_ids=False)
        for transition in step.unbind(0) if shape == () else [step.reshape(shape)]:
            rb.add(transition)


@pytest.mark.filterwarnings("ignore:Using `add.*with a TensorDict that has batch_size")
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_relabels_what_is_added_step_by_step(storage, kind):
    make_storage, _ = STORAGES[storage]
    shape = {1: (), 2: (4,), 3: (2, 2)}[make_storage(SIZE).ndim]

    def run(hindsight):
        rb = make(kind, make_storage, hindsight)
        for lanes in STREAM:
            add(rb, lanes, shape)

    if kind is TensorDictReplayBuffer and shape == (4,):
        fails_as_without("expand_as_right requires", run)
    else:
        go_through(make(kind, make_storage), partial(add, shape=shape), dataclasses.replace(STREAM, layout="add"))


# Writers

WRITERS = {
    "RoundRobinWriter": RoundRobinWriter,
    "TensorDictRoundRobinWriter": TensorDictRoundRobinWriter,
    "TensorDictRoundRobinWriter(track_generations=True)": partial(TensorDictRoundRobinWriter, track_generations=True),
}


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_round_robin_writer_stores_what_is_relabelled(writer, kind):
    go_through(make(kind, writer=WRITERS[writer]()))


@pytest.mark.parametrize("capacity", [SIZE, 10_000])
def test_a_row_that_outlives_its_goals_keeps_the_original_one(capacity):
    """TensorDictMaxValueWriter keeps the rows of the highest rank, however old they are."""
    stream = dataclasses.replace(STREAM, writes=100, capacity=capacity)
    writer = TensorDictMaxValueWriter(rank_key="rank")
    rb = make(writer=writer, transform=make_transform(capacity=capacity))
    oracle = Oracle(stream)
    relabelled = 0
    for number, lanes in enumerate(stream):
        data = make_tensordict(rows_of(lanes), with_ids=True)
        rb.extend(data.set("rank", torch.rand(len(data), generator=torch.Generator().manual_seed(number))))
        oracle.write(rows_of(lanes))
        relabelled = oracle.check(rb[:]) / len(rb)
    assert max(uids(everything(rb))) - min(uids(everything(rb))) > 10 * SIZE
    assert relabelled < 0.2 if capacity == SIZE else relabelled > 0.95


# Saving and copying


def by_state_dict(rb, twin, path):
    twin.load_state_dict(rb.state_dict())
    return twin


def by_dumps(rb, twin, path):
    rb.dumps(path / "rb")
    twin.loads(path / "rb")
    return twin


WAYS = {
    "state_dict": by_state_dict,
    "dumps": by_dumps,
    "pickle": lambda rb, twin, path: pickle.loads(pickle.dumps(rb)),
    "deepcopy": lambda rb, twin, path: copy.deepcopy(rb),
}
WAYS_TORCHRL_HAS_NOT = {
    ("LazyMemmapStorage", "pickle"): "cannot pickle 'mmap.mmap' object",
    ("LazyMemmapStorage(ndim=2)", "pickle"): "cannot pickle 'mmap.mmap' object",
    ("ListStorage", "dumps"): "doesn't support serialization",
    ("LazyStackStorage", "dumps"): "doesn't support serialization",
    ("CompressedListStorage", "dumps"): "not JSON serializable",
}


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_copy_of_the_buffer_goes_on_with_the_same_goals(storage, way, tmp_path):
    make_storage, write = STORAGES[storage]
    writes = list(STREAM)

    def run(hindsight):
        rb = make(storage=make_storage, hindsight=hindsight)
        for lanes in writes[:6]:  # in the middle of episodes
            write(rb, lanes)
        return rb, WAYS[way](rb, make(storage=make_storage, hindsight=hindsight), tmp_path)

    if limit := WAYS_TORCHRL_HAS_NOT.get((storage, way)):
        fails_as_without(limit, run)
        return
    rb, twin = run(True)
    original = everything(rb)
    assert_same(*samples(rb, twin))
    oracle = Oracle(STREAM)
    for lanes in writes[:6]:
        oracle.write(rows_of(lanes))
    for lanes in writes[6:]:
        write(twin, lanes)
        oracle.write(rows_of(lanes))
        oracle.check(twin[:])
    assert_same(original, everything(rb))
    for lanes in writes[6:]:
        write(rb, lanes)
    assert_same(*samples(rb, twin))


def samples(*buffers):
    """A sample of each, drawn with the same seed."""
    drawn = []
    for rb in buffers:
        torch.manual_seed(0)
        drawn.append(rb.sample())
    return drawn


@pytest.mark.parametrize(
    ("way", "in_members"),
    [
        (by_dumps, True),
        (by_dumps, False),
        (by_state_dict, False),
        (by_state_dict, True),
    ],
)
def test_a_restored_ensemble_has_no_wrong_goals(way, in_members, tmp_path):
    """An ensemble's state_dict leaves its members' transforms out: what was written before keeps its own goals."""
    loses_goals = in_members and way is by_state_dict
    write = write_to_members if in_members else write_routed
    kwargs = {} if in_members else {"routing_key": "lane"}
    rb, oracle = ensemble(in_members=in_members, **kwargs), Oracle(SOME)
    for lanes in list(STREAM)[:4]:
        write(rb, lanes)
        oracle.write(rows_of(lanes))
    twin = way(rb, ensemble(in_members=in_members, **kwargs), tmp_path)
    assert (oracle.check(twin.sample()) == 0) is loses_goals
    for lanes in list(STREAM)[4:]:
        write(twin, lanes)
        oracle.write(rows_of(lanes))
        oracle.check(twin.sample())


# What else a buffer can do

ROWS = set()  # of the docs' last table


def row(name):
    """Note that a test is what a row of the docs' last table says."""

    def note(test):
        ROWS.add(name)
        return test

    return note


OTHERS = {
    "prefetch=3": (lambda: make(prefetch=3, transform=make_transform(her_ratio=0.9)), extend, SOME),
    "sample_unit=Sequence(...)": (lambda: make(sample_unit=SequenceUnit(3, burn_in=1)), extend, STREAM),
    "dim_extend=0": (
        lambda: make(storage=partial(LazyTensorStorage, ndim=2), dim_extend=0),
        extend_time_first,
        STREAM,
    ),
    "shared=True": (
        lambda: make(shared=True, transform=make_transform(goal_spec=Unbounded((1,)))),
        extend,
        STREAM,
    ),
    "compilable=True": (lambda: make(compilable=True), extend, STREAM),
    "delayed_init=True": (lambda: make(delayed_init=True), extend, STREAM),
    "generator=...": (lambda: make(generator=torch.Generator().manual_seed(0)), extend, STREAM),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_a_buffer_can_do_leaves_goals_right(name):
    make_buffer, write, stream = OTHERS[name]
    go_through(make_buffer(), write, stream)


@row("prefetch=3")
def test_prefetched_batches_are_right_while_another_thread_writes():
    """Batches are sampled in other threads, and handed out after more was written."""
    rb = make(prefetch=3, transform=make_transform(her_ratio=0.9))
    oracle = Oracle(SOME)
    for lanes in dataclasses.replace(SOME, writes=60):
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
        oracle.check(rb.sample())


@row("transform_factory=...")
def test_the_transform_can_be_made_by_the_buffer():
    rb = TensorDictReplayBuffer(
        storage=partial(LazyTensorStorage, SIZE), transform_factory=make_transform, batch_size=BATCH
    )
    go_through(rb)


@row("consume_after_n_samples=1")
@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
def test_every_transition_is_consumed_once():
    rb, oracle = make(consume_after_n_samples=1), Oracle(STREAM)
    seen = []
    for lanes in STREAM:
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
        batch = rb.sample(len(rb) // 2)
        oracle.check(batch)
        seen += uids(batch)
    assert len(set(seen)) == len(seen) > SIZE


@row("for batch in rb")
def test_an_epoch_over_the_buffer_holds_every_transition_once():
    rb, oracle = make(sampler=SamplerWithoutReplacement(drop_last=True)), Oracle(STREAM)
    for lanes in list(STREAM)[:4]:  # 128 transitions
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
    batches = list(rb)
    assert sorted(uids(torch.cat(batches))) == list(range(128))
    assert all(oracle.check(batch) > 0.75 * BATCH for batch in batches)


@row("pin_memory=True")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device memory can be pinned")
def test_without_a_cuda_device_no_memory_can_be_pinned():
    fails_as_without(
        "(?i)nvidia|cuda|accelerator|pin_memory",
        lambda hindsight: [extend(rb := make(pin_memory=True, hindsight=hindsight), next(iter(STREAM))), rb.sample()],
    )


@row("pin_memory=True")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_relabelled_is_pinned():
    rb = make(pin_memory=True)
    go_through(rb)
    assert rb.sample()["desired_goal"].is_pinned()
    assert rb.sample()["hindsight", "relabelled"].is_pinned()


def filled(**kwargs):
    """A full buffer, and the oracle for it."""
    rb, oracle = make(**kwargs), Oracle(STREAM)
    for lanes in STREAM:
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
    return rb, oracle


@row("rb[i]")
@pytest.mark.parametrize(
    "storage", [LazyTensorStorage, LazyMemmapStorage, PackedStorage, ListStorage, CompressedListStorage]
)
def test_reading_by_index_relabels_and_leaves_the_storage_as_it_is(storage):
    rb, oracle = filled(storage=storage)
    before = everything(rb)
    for index in (slice(None), slice(5, 30), [1, 2], torch.tensor([0, 99]), np.arange(9), range(4)):
        batch = rb[index]
        assert oracle.check(batch) > 0
        assert batch["uid"].tolist() == before["uid"][list(index) if isinstance(index, range) else index].tolist()
    assert rb[7].batch_size == ()
    oracle.check(rb[7].unsqueeze(0))
    torch.manual_seed(0)
    batch = rb[:]
    torch.manual_seed(0)
    assert torch.equal(rb["next", "reward"], batch["next", "reward"])
    assert_same(before, everything(rb))


@row("rb[i] = ...")
def test_a_row_that_is_written_over_is_an_episode_of_its_own():
    writes = list(STREAM)
    rb, oracle = make(), Oracle(STREAM)
    for number, lanes in enumerate(writes[:5]):
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
        if number == 3:
            others = (torch.arange(SIZE) != 50) & (torch.arange(SIZE) != 100)
            rb[50] = rb.storage[50].clone()
            rb[100:101] = rb.storage[100:101].clone()
    batch = rb[:]
    assert oracle.check(batch[others]) > 0.75 * len(batch)  # their episodes run on
    for changed, stored in zip(batch[~others], everything(rb)[~others], strict=True):
        assert changed["desired_goal"] in (stored["desired_goal"], stored["next", "achieved_goal"])


def set_at(rb, uids):
    rb.set_at_("uid", uids[50:51], torch.tensor([50]))


def set_all(rb, uids):
    rb.set_("uid", uids)


def update(rb, uids):
    rb.update_({"uid": uids})


def set_in_storage(rb, uids):
    rb.storage[50:51] = rb.storage[50:51].clone().set("uid", uids[50:51])


@row("rb.set_at_, rb.set_, rb.update_, rb.storage[i] = ...")
@pytest.mark.parametrize("change", [set_at, set_all, update, set_in_storage])
def test_an_entry_that_is_changed_past_the_transform_keeps_its_hindsight(change):
    rb, oracle = filled()
    uids = everything(rb)["uid"].clone()
    other = uids.clone()
    other[50] = 10**6
    change(rb, other)
    assert rb.storage[50]["uid"] == 10**6
    batch = rb[:]
    batch["uid"] = uids
    oracle.check(batch)


@row('rb["key"] = ...')
def test_an_entry_that_is_set_through_the_buffer_does_not_reach_the_storage():
    """In TorchRL's buffer alone it reaches the storage only where that is full."""
    for hindsight, writes, reaches in ((False, 4, False), (False, 5, True), (True, 4, False), (True, 5, False)):
        rb = make(hindsight=hindsight)
        for lanes in list(STREAM)[:writes]:
            extend(rb, lanes)
        rb["uid"] = torch.full((len(rb),), -1)
        assert bool((everything(rb)["uid"] == -1).all()) is reaches


@row("rb.empty()")
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_an_emptied_buffer_goes_on_with_goals_of_the_transitions_own_episodes(strategy):
    stream = dataclasses.replace(STREAM, strategy=strategy)
    rb, oracle = make(transform=make_transform(strategy=strategy)), Oracle(stream)
    for number, lanes in enumerate(stream):
        if number == 6:
            rb.empty()
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
    assert uids(everything(rb)) == list(oracle.transitions)[6 * 32 :]
    assert oracle.check(rb[:]) > 0.75 * len(rb)


@row("rb.empty()")
def test_goals_of_before_stay_in_the_table_for_the_strategy_random():
    stream = dataclasses.replace(STREAM, strategy="random", capacity=SIZE, writes=20)
    rb, oracle = make(transform=make_transform(strategy="random", capacity=SIZE)), Oracle(stream)
    seen = []
    for number, lanes in enumerate(stream):
        if number == 6:
            rb.empty()
            begun = set(oracle.episodes)
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
        batch = rb[:]
        oracle.check(batch)
        goals = batch["desired_goal"][batch["hindsight", "relabelled"]]
        seen.append([goal // 1000 in begun for goal in goals.tolist()] if number >= 6 else [])
    assert any(seen[6])
    assert not any(seen[-1])


@row("rb.append_transform, on an empty buffer")
def test_the_transform_can_be_appended_to_an_empty_buffer():
    rb = make(hindsight=False)
    rb.append_transform(make_transform())
    go_through(rb)


def appended_late(storage):
    """A buffer that got the transform after half of what it holds, and the oracle."""
    rb, oracle = make(storage=storage, hindsight=False), Oracle(STREAM)
    for number, lanes in enumerate(list(STREAM)[:5]):
        if number == 3:
            rb.append_transform(make_transform())
            with pytest.raises(KeyError, match="written before HERTransform was part of the buffer"):
                rb.sample()
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
    return rb, oracle


@row("rb.append_transform, on a buffer that holds data")
def test_transitions_of_before_keep_their_goals_and_those_of_after_are_relabelled():
    rb, oracle = appended_late(LazyTensorStorage)
    batch = rb[:]
    before = batch["uid"] < 3 * 32
    assert oracle.check(batch[~before]) > 0.5 * int((~before).sum())
    assert not batch["hindsight", "relabelled"][before].any()
    stored = everything(rb)
    assert (batch.select(*stored.keys(True, True)) == stored)[before].all()


@row("rb.append_transform, on a buffer that holds data")
@pytest.mark.parametrize("storage", [LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage])
def test_storages_without_room_for_stamps_are_refused(storage):
    rb, _ = appended_late(storage)
    with pytest.raises(KeyError, match="written before HERTransform was part of the buffer"):
        rb[:]


@row("rb.append_transform, on a buffer that holds data")
@pytest.mark.parametrize("storage", STORAGES)
def test_what_a_buffer_without_hindsight_holds_can_be_written_to_one_with(storage):
    make_storage, write = STORAGES[storage]
    old, oracle = make(storage=make_storage, hindsight=False), Oracle(STREAM)
    for lanes in list(STREAM)[:5]:
        write(old, lanes)
        oracle.write(rows_of(lanes))
    new = make(storage=make_storage)
    new.extend(old[:])
    assert oracle.check(new[:]) > 0.75 * SIZE


@row("two buffers over one storage")
def test_two_buffers_over_one_storage_share_the_transform():
    rb = make()
    other = TensorDictReplayBuffer(
        storage=rb.storage, sampler=SamplerWithoutReplacement(), transform=rb.transform, batch_size=BATCH
    )
    oracle = Oracle(STREAM)
    for lanes in STREAM:
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
        for buffer in (rb, other):
            batch = buffer.sample()
            assert oracle.check(batch) > 0.5 * len(batch)


def loaded_without_its_transform(rb, path):
    rb.dumps(path / "rb")
    (path / "rb" / "transform.t").unlink()
    twin = make()
    twin.loads(path / "rb")
    return twin


def with_a_transform_of_its_own(rb, path):
    return make(storage=lambda size: rb.storage)


@pytest.mark.parametrize("other", [loaded_without_its_transform, with_a_transform_of_its_own])
def test_stamps_that_another_transform_gave_are_not_taken_for_ones_own(other, tmp_path):
    rb, oracle = make(), Oracle(SOME)
    writes = list(STREAM)
    for lanes in writes[:5]:
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
    rb = other(rb, tmp_path)
    for lanes in writes[5:7]:
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
        for _ in range(5):
            oracle.check(rb.sample())


@row("rb.query(...)")
def test_queried_trajectories_are_relabelled():
    rb, oracle = filled()
    found = rb.query(traj.length > 3)
    plain, _ = filled(hindsight=False)
    assert [len(one) for one in found] == [len(one) for one in plain.query(traj.length > 3)]
    assert sum(oracle.check(one.data) for one in found) > 0.75 * sum(len(one) for one in found)
    originals = ReplayBuffer(storage=rb.storage).query(traj.length > 3)
    for one, original in zip(plain.query(traj.length > 3), originals, strict=True):
        assert_same(one.data, original.data.exclude("hindsight_stamp"))


# The docs


def tables():
    """The tables of docs/buffers.md by the heading above them: lists of rows, the first of which is the header."""
    text = (Path(__file__).parents[1] / "docs" / "buffers.md").read_text()
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        cells = [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        found[section.splitlines()[0]] = cells[:1] + cells[2:]
    return found


def test_the_rows_of_the_docs_are_what_is_tested():
    found = tables()

    def first_cells(heading):
        return sorted(row[0] for row in found[heading][1:])

    assert first_cells("Buffers") == sorted(BUFFERS)
    assert first_cells("Writers") == sorted([*WRITERS, "TensorDictMaxValueWriter"])
    assert first_cells("What else a buffer can do") == sorted({*OTHERS, *ROWS})
    for heading, columns, limits in (
        ("Storages and samplers", SAMPLERS, TORCHRLS_LIMITS),
        ("Saving and copying", WAYS, WAYS_TORCHRL_HAS_NOT),
    ):
        (_, *header), *rows = found[heading]
        assert header == list(columns)
        assert {name: cells for name, *cells in rows} == {
            storage: ["no" if (storage, column) in limits else "yes" for column in columns] for storage in STORAGES
        }
