"""HERTransform in TorchRL's buffers, storages, samplers and writers, and with the other features of a buffer.

The tables of docs/reference/buffers.md list supported combinations and limits of TorchRL. The last test compares them
with the tests.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Unbounded,
    traj,
)
from torchrl.data import Sequence as SequenceUnit

from support.factories import (
    WAYS_TO_COPY,
    assert_same,
    copied_by_dumps,
    copied_by_state_dict,
    make_buffer,
    make_transform,
    seeded_sample,
    uids,
)
from support.named import STORAGES, named
from support.oracle import Oracle
from support.streams import ROOT_FLAGS, Stream, extend, make_tensordict, rows_of

# Four environments, whose episodes end at different times, write 32 transitions at a time into a storage that
# holds five writes. The goal table is larger: every transition of an episode that ended has to be relabelled.
STREAM = Stream(
    lanes=4,
    lengths=((5, "truncated"), (8, "terminated"), (3, "truncated"), (4, "terminated"), (11, "truncated")),
    chunk=8,
    writes=8,
    layout="flat with ids",
    rows=40,
    capacity=1000,
)
SOME = replace(STREAM, her_ratio=0.9)  # with this ratio, the oracle does not require relabelling
SIZE = STREAM.size
BATCH = 64
PRIORITIES = {"alpha": 0.7, "beta": 0.5}


def make(kind=TensorDictReplayBuffer, storage=LazyTensorStorage, stream=STREAM, **options):
    return make_buffer(stream, kind=kind, storage=storage, **options)


def stored_in(rb):
    """Return a copy of the stored transitions, read without the transform."""
    if isinstance(rb, ReplayBufferEnsemble):
        return torch.cat([stored_in(rb[number]) for number in range(len(rb))])
    stored = rb.storage[:]
    return torch.stack(stored) if isinstance(stored, list) else stored.clone()


def go_on(rb, oracle, chunks, write=extend):
    """Write chunks into the buffer and into the oracle, and yield after each."""
    for lanes in chunks:
        write(rb, lanes)
        oracle.write(rows_of(lanes))
        yield lanes


def fill(rb, oracle, chunks, write=extend):
    for _ in go_on(rb, oracle, chunks, write):
        pass
    return rb, oracle


def filled(chunks=STREAM, stream=STREAM, **options):
    """Return a buffer with written chunks, and its oracle."""
    return fill(make(stream=stream, **options), Oracle(stream), chunks)


def go_through(rb, write=extend):
    """Write a stream, sample after each write, check every transition and that the storage is unchanged."""
    oracle = Oracle(STREAM)
    sampled = relabelled = 0
    for number, _ in enumerate(go_on(rb, oracle, STREAM, write)):
        before = stored_in(rb) if number % 4 == 0 else None
        batch = rb.sample()
        sampled += batch.numel()
        relabelled += oracle.check(batch)
        if before is not None:
            assert uids(before) == list(oracle.transitions)[-SIZE:], "a transition is lost"
            assert_same(before, stored_in(rb))
    assert relabelled > 0.75 * sampled  # all others belong to running episodes


def fails_as_without(match, run_with):
    """Check that something fails in TorchRL's buffer alone, and with hindsight in the same way."""
    for hindsight in (False, True):
        with pytest.raises(Exception, match=match):
            run_with(hindsight)


def goes_through_or_fails(limit, make_with, write=extend):
    """Check a stream, or, at a limit of TorchRL's buffer, check that it fails as without hindsight."""

    def run(hindsight):
        rb = make_with(hindsight=hindsight)
        for lanes in STREAM:
            write(rb, lanes)
            rb.sample()

    if limit is None:
        go_through(make_with(), write)
    else:
        fails_as_without(limit, run)


# Buffers


def ensemble(*, in_members, storage=LazyTensorStorage, **options):
    """Return an ensemble with one buffer per lane, and a transform in each of them or one for all."""
    members = [
        TensorDictReplayBuffer(storage=storage(STREAM.rows), transform=make_transform(STREAM) if in_members else None)
        for _ in range(STREAM.lanes)
    ]
    transform = None if in_members else make_transform(STREAM)
    return ReplayBufferEnsemble(*members, transform=transform, batch_size=BATCH, **options)


def write_to_members(rb, lanes):
    for number, lane in enumerate(lanes):
        rb[number].extend(make_tensordict(lane))


def write_routed(rb, lanes):
    data = make_tensordict(rows_of(lanes))
    data["lane"] = torch.arange(len(lanes)).repeat_interleave(len(lanes[0]))
    rb.extend(data)


MEMBERS_RELABEL = (partial(ensemble, in_members=True), write_to_members)
ROUTED_BY_KEY = (partial(ensemble, in_members=False, routing_key="lane"), write_routed)
PRIORITIZED = partial(make, named("TensorDictPrioritizedReplayBuffer"), **PRIORITIES)
BUFFERS = {  # functions that make a buffer and write to it
    "ReplayBuffer": (partial(make, ReplayBuffer), extend),
    "TensorDictReplayBuffer": (make, extend),
    "PrioritizedReplayBuffer": (partial(make, named("PrioritizedReplayBuffer"), **PRIORITIES), extend),
    "TensorDictPrioritizedReplayBuffer": (PRIORITIZED, extend),
    "TensorDictPrioritizedReplayBuffer(sync=False)": (partial(PRIORITIZED, sync=False), extend),
    "ReplayBufferEnsemble, a transform in each member": MEMBERS_RELABEL,
    "ReplayBufferEnsemble(transform=..., routing_key=...)": ROUTED_BY_KEY,
    "ReplayBufferEnsemble(transform=..., routing_dim=0)": (
        partial(ensemble, in_members=False, routing_dim=0),
        partial(extend, shape=(STREAM.lanes, -1)),
    ),
}
both_ensembles = pytest.mark.parametrize(
    ("make_ensemble", "write"), [MEMBERS_RELABEL, ROUTED_BY_KEY], ids=["in members", "routed"]
)


@pytest.mark.parametrize("name", BUFFERS)
def test_every_buffer_relabels_correctly(name):
    make_buffer, write = BUFFERS[name]
    go_through(make_buffer(), write)


@both_ensembles
@pytest.mark.parametrize("storage", [name for name in STORAGES if "(" not in name and name != "LazyTensorStorage"])
def test_an_ensemble_relabels_over_every_storage(storage, make_ensemble, write):
    go_through(make_ensemble(storage=STORAGES[storage]), write)


# Storages and samplers


every_storage = pytest.mark.parametrize("storage", STORAGES)
# In a TensorDict buffer slice samplers overwrite the done flags, except with truncated_key=None: see test_sequences.py.
SAMPLERS = {
    "RandomSampler": {},
    "SamplerWithoutReplacement": {},
    "PrioritizedSampler": {"max_capacity": SIZE} | PRIORITIES,
    "SliceSampler": {"slice_len": 2, "truncated_key": None},
    "SliceSamplerWithoutReplacement": {"slice_len": 2, "truncated_key": None, "strict_length": False},
    "PrioritizedSliceSampler": {"max_capacity": SIZE, "slice_len": 2, "truncated_key": None} | PRIORITIES,
}
SLICES = [name for name in SAMPLERS if "Slice" in name]
NO_SLICES = "Could not get a tensordict out of the storage"
TORCHRLS_LIMITS = {
    **{(storage, sampler): NO_SLICES for storage in ("ListStorage", "CompressedListStorage") for sampler in SLICES},
    ("LazyStackStorage", "PrioritizedSliceSampler"): "Wrong shapes / arange configuration",
    ("LazyTensorStorage(ndim=3)", "PrioritizedSliceSampler"): "invalid entry in coordinates array",
    ("PackedStorage(ndim=3)", "PrioritizedSliceSampler"): "invalid entry in coordinates array",
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@every_storage
def test_every_storage_relabels_correctly_with_every_sampler(storage, sampler):
    def make_with(**options):
        return make(storage=STORAGES[storage], sampler=named(sampler)(**SAMPLERS[sampler]), **options)

    goes_through_or_fails(TORCHRLS_LIMITS.get((storage, sampler)), make_with)


@every_storage
def test_every_storage_restores_what_compact_leaves_out(storage):
    rb = make(storage=STORAGES[storage], stream=replace(STREAM, compact=True))
    go_through(rb)
    assert {*ROOT_FLAGS, ("next", "desired_goal")}.isdisjoint(stored_in(rb).keys(True))


def test_rows_stored_without_compact_goals_are_sampled_correctly_with_it():
    """Only the storage is loaded, with entries that CompactGoals does not store."""
    after = make(stream=replace(STREAM, compact=True))
    before, oracle = filled(stream=SOME)
    after.storage.load_state_dict(before.storage.state_dict())
    assert oracle.check(after[:]) == 0  # all rows are original: their stamps belong to another table
    for lanes in list(STREAM)[:2]:  # the storage still has the entries under "next" of old rows
        extend(after, lanes)
    oracle.check(after[:])


def add(rb, lanes, shape):
    """Write one step at a time, of one environment after the other or of all together."""
    for rows in zip(*lanes, strict=True):
        step = make_tensordict(rows, with_ids=False)
        for transition in [step.reshape(shape)] if shape else step:
            rb.add(transition)


@pytest.mark.filterwarnings("ignore:Using `add.*with a TensorDict that has batch_size")
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@every_storage
def test_every_storage_relabels_transitions_added_step_by_step(storage, kind):
    shape = {1: (), 2: (4,), 3: (2, 2)}[STORAGES[storage](SIZE).ndim]
    limit = "expand_as_right requires" if kind is TensorDictReplayBuffer and shape == (4,) else None
    goes_through_or_fails(limit, partial(make, kind, STORAGES[storage]), partial(add, shape=shape))


# Writers

WRITERS = [
    "RoundRobinWriter",
    "TensorDictRoundRobinWriter",
    "TensorDictRoundRobinWriter(track_generations=True)",
]


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("writer", WRITERS)
def test_transitions_of_every_round_robin_writer_are_relabelled(writer, kind):
    go_through(make(kind, writer=named(writer)()))


@pytest.mark.parametrize("capacity", [SIZE, 10_000])
def test_a_row_that_outlives_its_goals_keeps_its_original_goal(capacity):
    """TensorDictMaxValueWriter keeps the rows with the highest ranks, whatever their age."""
    stream = replace(STREAM, writes=100, capacity=capacity)
    rb, oracle = make(stream=stream, writer=TensorDictMaxValueWriter(rank_key="rank")), Oracle(stream)
    for number, lanes in enumerate(stream):
        oracle.write(rows_of(lanes))
        data = make_tensordict(rows_of(lanes))
        rb.extend(data.set("rank", torch.rand(len(data))))
        if number % 3 == 0:
            relabelled = oracle.check(rb[:]) / len(rb)
    stored = uids(stored_in(rb))
    assert stored[-1] - stored[0] > 10 * SIZE
    assert relabelled < 0.2 if capacity == SIZE else relabelled > 0.95


# Saving and copying


WAYS_TORCHRL_HAS_NOT = {
    ("LazyMemmapStorage", "pickle"): "cannot pickle 'mmap.mmap' object",
    ("LazyMemmapStorage(ndim=2)", "pickle"): "cannot pickle 'mmap.mmap' object",
    ("ListStorage", "dumps"): "doesn't support serialization",
    ("LazyStackStorage", "dumps"): "doesn't support serialization",
    ("CompressedListStorage", "dumps"): "not JSON serializable",
}


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@pytest.mark.parametrize("way", WAYS_TO_COPY)
@every_storage
def test_a_copy_of_the_buffer_continues_with_the_same_goals(storage, way, tmp_path):
    writes = list(STREAM)

    def run(hindsight):
        rb, twin = (make(storage=STORAGES[storage], hindsight=hindsight) for _ in range(2))
        for lanes in writes[:6]:  # in the middle of episodes
            extend(rb, lanes)
        return rb, WAYS_TO_COPY[way](rb, twin, tmp_path)

    if limit := WAYS_TORCHRL_HAS_NOT.get((storage, way)):
        fails_as_without(limit, run)
        return
    rb, twin = run(True)
    original = stored_in(rb)
    assert_same(seeded_sample(rb), seeded_sample(twin))
    _, oracle = filled(writes[:6])
    for _ in go_on(twin, oracle, writes[6:]):
        oracle.check(twin[:])
    assert_same(original, stored_in(rb))
    for lanes in writes[6:]:
        extend(rb, lanes)
    assert_same(seeded_sample(rb), seeded_sample(twin))


@both_ensembles
@pytest.mark.parametrize("way", [copied_by_dumps, copied_by_state_dict])
def test_a_restored_ensemble_has_no_wrong_goals(way, make_ensemble, write, tmp_path):
    """The state_dict of an ensemble lacks its members' transforms, so earlier transitions keep their goals."""
    chunks = list(STREAM)
    rb, oracle = fill(make_ensemble(), Oracle(SOME), chunks[:4], write)
    twin = way(rb, make_ensemble(), tmp_path)
    loses_goals = write is write_to_members and way is copied_by_state_dict
    assert (oracle.check(twin.sample()) == 0) is loses_goals
    for _ in go_on(twin, oracle, chunks[4:], write):
        oracle.check(twin.sample())


# Other features of a buffer

ROWS = set()  # of the docs' last table


def row(name):
    """Record that a test checks a row of the docs' last table."""
    ROWS.add(name)
    return lambda test: test


@row("rb.sample(16 * 256).split(256)")
@pytest.mark.parametrize("storage", STORAGES)
def test_batches_of_one_call_have_the_entries_goals_and_rewards_of_separate_calls(storage):
    rb, oracle = filled(storage=STORAGES[storage], stream=SOME, batch_size=None)
    one = rb.sample(64)
    batches = rb.sample(16 * 64).split(64)
    assert len(batches) == 16
    for batch in batches:
        assert batch.batch_size == one.batch_size
        assert set(batch.keys(True)) == set(one.keys(True))
        assert oracle.check(batch) > 32


def extend_time_first(rb, lanes):
    rb.extend(make_tensordict(rows_of(lanes)).reshape(len(lanes), -1).transpose(0, 1))


OTHERS = {
    "sample_unit=Sequence(...)": partial(make, sample_unit=SequenceUnit(3, burn_in=1)),
    "dim_extend=0": partial(make, storage=partial(LazyTensorStorage, ndim=2), dim_extend=0),
    "shared=True": lambda: make(shared=True, transform=make_transform(STREAM, goal_spec=Unbounded((2,)))),
    "compilable=True": partial(make, compilable=True),
    "delayed_init=True": partial(make, delayed_init=True),
    "generator=...": lambda: make(generator=torch.Generator().manual_seed(0)),
    "transform_factory=...": lambda: make(
        storage=lambda size: partial(LazyTensorStorage, size),
        hindsight=False,
        transform_factory=partial(make_transform, STREAM),
    ),
    "rb.append_transform, on an empty buffer": lambda: make(hindsight=False).append_transform(make_transform(STREAM)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_goals_are_correct_with_other_features_of_a_buffer(name):
    go_through(OTHERS[name](), extend_time_first if name == "dim_extend=0" else extend)


@row("prefetch=3")
def test_prefetched_batches_are_correct_while_another_thread_writes():
    """Batches are sampled in other threads, and returned after later writes."""
    rb, oracle = make(prefetch=3, stream=SOME), Oracle(SOME)
    for _ in go_on(rb, oracle, replace(SOME, writes=60)):
        oracle.check(rb.sample())


@row("consume_after_n_samples=1")
@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
def test_every_transition_is_consumed_once():
    rb, oracle = make(consume_after_n_samples=1), Oracle(STREAM)
    seen = []
    for _ in go_on(rb, oracle, STREAM):
        batch = rb.sample(len(rb) // 2)
        oracle.check(batch)
        seen += uids(batch)
    assert len(set(seen)) == len(seen) > SIZE


@row("for batch in rb")
def test_an_epoch_over_the_buffer_contains_every_transition_once():
    rb, oracle = filled(list(STREAM)[:4], sampler=SamplerWithoutReplacement(drop_last=True))
    batches = list(rb)
    assert sorted(uids(torch.cat(batches))) == list(range(128))
    assert all(oracle.check(batch) > 0.75 * BATCH for batch in batches)


@row("pin_memory=True")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device memory can be pinned")
def test_without_a_cuda_device_no_memory_can_be_pinned():
    goes_through_or_fails("(?i)nvidia|cuda|accelerator|pin_memory", partial(make, pin_memory=True))


@row("pin_memory=True")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_relabelled_batches_are_pinned():
    rb = make(pin_memory=True)
    go_through(rb)
    assert rb.sample()["desired_goal"].is_pinned()
    assert rb.sample()["hindsight", "relabelled"].is_pinned()


@row("rb[i]")
@pytest.mark.parametrize(
    "storage", ["LazyTensorStorage", "LazyMemmapStorage", "PackedStorage", "ListStorage", "CompressedListStorage"]
)
def test_reading_by_index_relabels_and_does_not_change_the_storage(storage):
    rb, oracle = filled(storage=STORAGES[storage])
    before = stored_in(rb)
    for index in (slice(None), slice(5, 30), [1, 2], torch.tensor([0, 99]), np.arange(9), range(4)):
        batch = rb[index]
        assert oracle.check(batch) > 0
        assert batch["uid"].tolist() == before["uid"][list(index) if isinstance(index, range) else index].tolist()
    assert rb[7].batch_size == ()
    oracle.check(rb[7].unsqueeze(0))
    torch.manual_seed(0)
    rewards = rb["next", "reward"]
    torch.manual_seed(0)
    assert torch.equal(rewards, rb[:]["next", "reward"])
    assert_same(before, stored_in(rb))


@row("rb[i] = ...")
def test_an_overwritten_row_is_a_separate_episode():
    writes = list(STREAM)
    rb, oracle = filled(writes[:4])
    rb[50] = rb.storage[50].clone()
    rb[100:101] = rb.storage[100:101].clone()
    fill(rb, oracle, writes[4:5])
    batch = rb[:]
    others = (torch.arange(SIZE) != 50) & (torch.arange(SIZE) != 100)
    assert oracle.check(batch[others]) > 0.75 * len(batch)  # their episodes continue
    for changed, stored in zip(batch[~others], stored_in(rb)[~others], strict=True):
        goal = changed["desired_goal"]
        assert goal.equal(stored["desired_goal"]) or goal.equal(stored["next", "achieved_goal"])


CHANGES = {
    "set_at_": lambda rb, changed: rb.set_at_("uid", changed["uid"][50:51], torch.tensor([50])),
    "set_": lambda rb, changed: rb.set_("uid", changed["uid"]),
    "update_": lambda rb, changed: rb.update_({"uid": changed["uid"]}),
    "storage[i] =": lambda rb, changed: rb.storage.__setitem__(slice(50, 51), changed[50:51]),
}


@row("rb.set_at_, rb.set_, rb.update_, rb.storage[i] = ...")
@pytest.mark.parametrize("change", CHANGES)
def test_rows_with_entries_changed_without_the_transform_are_still_relabelled(change):
    rb, oracle = filled()
    before, changed = stored_in(rb), stored_in(rb)
    changed["uid"][50] = 10**6
    CHANGES[change](rb, changed)
    assert rb.storage[50]["uid"] == 10**6
    oracle.check(rb[:].set("uid", before["uid"]))


@row('rb["key"] = ...')
def test_an_entry_that_is_set_through_the_buffer_does_not_reach_the_storage():
    """In TorchRL's buffer alone, it reaches the storage only if the storage is full."""
    for hindsight, writes, reaches in ((False, 4, False), (False, 5, True), (True, 4, False), (True, 5, False)):
        rb, _ = filled(list(STREAM)[:writes], hindsight=hindsight)
        rb["uid"] = torch.full((len(rb),), -1)
        assert bool((stored_in(rb)["uid"] == -1).all()) is reaches


@row("rb.empty()")
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_an_emptied_buffer_only_draws_goals_from_episodes_of_new_transitions(strategy):
    chunks = list(STREAM)
    rb, oracle = filled(chunks[:6], replace(STREAM, strategy=strategy))
    rb.empty()
    fill(rb, oracle, chunks[6:])
    assert uids(stored_in(rb)) == list(oracle.transitions)[6 * 32 :]
    assert oracle.check(rb[:]) > 0.75 * len(rb)


@row("rb.empty()")
def test_earlier_goals_stay_in_the_table_for_the_strategy_random():
    stream = replace(STREAM, strategy="random", capacity=SIZE, writes=20)
    chunks = list(stream)
    rb, oracle = filled(chunks[:6], stream)
    rb.empty()
    begun = set(oracle.episodes)
    earlier = []
    for _ in go_on(rb, oracle, chunks[6:]):
        batch = rb[:]
        oracle.check(batch)
        goals = batch["desired_goal"][batch["hindsight", "relabelled"].squeeze(-1)]
        earlier.append(any(episode in begun for episode in goals[:, 0].tolist()))
    assert earlier[0]
    assert not earlier[-1]


def appended_late(storage):
    """Return a buffer that got the transform after three of five writes, and the oracle."""
    chunks = list(STREAM)
    rb, oracle = filled(chunks[:3], storage=storage, hindsight=False)
    rb.append_transform(make_transform(STREAM))
    with pytest.raises(KeyError, match="written before HERTransform was part of the buffer"):
        rb.sample()
    fill(rb, oracle, chunks[3:5])
    return rb, oracle


@row("rb.append_transform, on a buffer that holds data")
def test_only_transitions_written_after_the_transform_was_appended_are_relabelled():
    rb, oracle = appended_late(LazyTensorStorage)
    batch = rb[:]
    before = batch["uid"] < 3 * 32
    assert oracle.check(batch[~before]) > 0.5 * int((~before).sum())
    assert not batch["hindsight", "relabelled"][before].any()
    stored = stored_in(rb)
    assert (batch.select(*stored.keys(True, True)) == stored)[before].all()


@row("rb.append_transform, on a buffer that holds data")
@pytest.mark.parametrize("storage", ["LazyMemmapStorage", "ListStorage", "LazyStackStorage", "CompressedListStorage"])
def test_storages_without_room_for_stamps_are_refused(storage):
    rb, _ = appended_late(STORAGES[storage])
    with pytest.raises(KeyError, match="written before HERTransform was part of the buffer"):
        rb[:]


@row("rb.append_transform, on a buffer that holds data")
@every_storage
def test_the_contents_of_a_buffer_without_hindsight_can_be_written_to_a_buffer_with_it(storage):
    old, oracle = filled(list(STREAM)[:5], storage=STORAGES[storage], hindsight=False)
    new = make(storage=STORAGES[storage])
    new.extend(old[:])
    assert oracle.check(new[:]) > 0.75 * SIZE


@row("two buffers over one storage")
def test_two_buffers_over_one_storage_share_the_transform():
    rb = make()
    other = TensorDictReplayBuffer(
        storage=rb.storage, sampler=SamplerWithoutReplacement(), transform=rb.transform, batch_size=BATCH
    )
    oracle = Oracle(STREAM)
    for _ in go_on(rb, oracle, STREAM):
        for buffer in (rb, other):
            batch = buffer.sample()
            assert oracle.check(batch) > 0.5 * len(batch)


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded without its transform", "another transform"])
def test_stamps_of_another_transform_are_recognized(loaded, tmp_path):
    chunks = list(STREAM)
    rb, oracle = filled(chunks[:5], SOME)
    if loaded:
        rb.dumps(tmp_path)
        (tmp_path / "transform.t").unlink()
        rb = make()
        rb.loads(tmp_path)
    else:
        rb = make(storage=lambda size, storage=rb.storage: storage)
    for _ in go_on(rb, oracle, chunks[5:7]):
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


def read_docs(heading):
    """Return a table of docs/reference/buffers.md: the header without its first cell, and the cells of each row."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "buffers.md").read_text()
    section = re.search(rf"^## {heading}$(.*?)(^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    cells = [[cell.strip().strip("`") for cell in line.split("|")] for line in lines]
    assert len({name for name, *_ in cells}) == len(cells), "a row is there twice"
    return cells[0][1:], {name: rest for name, *rest in cells[2:]}


def test_the_rows_of_the_docs_are_tested():
    assert read_docs("Buffers")[1].keys() == BUFFERS.keys()
    assert read_docs("Writers")[1].keys() == {*WRITERS, "TensorDictMaxValueWriter"}
    assert read_docs("Other features")[1].keys() == {*OTHERS, *ROWS}
    for heading, columns, limits in (
        ("Storages and samplers", SAMPLERS, TORCHRLS_LIMITS),
        ("Saving and copying", WAYS_TO_COPY, WAYS_TORCHRL_HAS_NOT),
    ):
        header, rows = read_docs(heading)
        assert header == list(columns)
        assert rows == {
            storage: ["no" if (storage, column) in limits else "yes" for column in columns] for storage in STORAGES
        }
