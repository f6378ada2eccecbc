"""HERTransform in buffers, storages, samplers and writers that tests/test_state_machine.py does not run.

docs/reference/buffers.md lists them. With the newest TorchRL, test_torchrl_limits.py runs all cells of its tables.
"""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBufferEnsemble, TensorDictReplayBuffer, Unbounded, traj
from torchrl.data import Sequence as SequenceUnit

from support.factories import make_transform, same, uids
from support.named import STORAGES, named, sampler_of
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import MOVES, Goals, World

ENVS, STEPS = 4, 8  # the environments, and the steps of each in one write
SIZE, CAPACITY = 160, 10_000  # the storage holds five writes, the goal table all of them
hindsight = partial(make_transform, her_ratio=1.0, capacity=CAPACITY)


def make(storage=LazyTensorStorage, make_hindsight=hindsight, **options):
    """Return a buffer with a new transform."""
    transform = make_hindsight and make_hindsight()
    return TensorDictReplayBuffer(storage=storage(SIZE), transform=transform, **{"batch_size": 64, **options})


def record(rb, capacity=CAPACITY, strategy="future"):
    return Recorded(rb, Oracle({strategy: 1.0}, capacity), World(ENVS, Goals()))


def contents(rb):
    """Return a copy of the stored transitions, read without the transform."""
    if isinstance(rb, ReplayBufferEnsemble):
        return torch.cat([contents(rb[number]) for number in range(len(rb))])
    stored = rb.storage[:]
    return torch.stack(stored) if isinstance(stored, list) else stored.clone()


def writes(count):
    """Return the moves of each environment in each write, of episodes with a few steps."""
    draw = random.Random(0)
    return [[draw.choices(("go", *MOVES), k=STEPS) for _ in range(ENVS)] for _ in range(count)]


def extend(recorded, moves, change=lambda data: data):
    """Write the steps of all environments in the dimensions of the storage, changed by a function."""
    rows = [row for env, each in enumerate(moves) for row in recorded.world.play(env, each)]
    ndim = getattr(recorded.rb.storage, "ndim", 1)
    shape = {1: (-1,), 2: (ENVS, STEPS), 3: (2, ENVS // 2, STEPS)}[ndim]
    recorded.write(rows, change(recorded.world.tensordict(rows).reshape(shape)))


def filled(count=8, **options):
    """Return a recorded buffer after some writes; options are those of `make`."""
    recorded = record(make(**options))
    for moves in writes(count):
        extend(recorded, moves)
    return recorded


def go_through(rb, write=extend):
    """Write, sample after each write, and check every transition and that the storage is unchanged."""
    recorded, relabelled, sampled = record(rb), 0, 0
    for moves in writes(8):
        write(recorded, moves)
        before, batch = contents(rb), rb.sample()
        relabelled += recorded.check(batch)
        sampled += batch.numel()
        assert same(before, contents(rb)), "sampling changed the storage"
    assert uids(before) == sorted(recorded.stored)[-SIZE:], "a transition is lost"
    assert relabelled > sampled / 2  # the others belong to running episodes


# Kinds of buffers


def ensemble(in_members=False, storage=LazyTensorStorage, **options):
    """Return an ensemble with one buffer for each environment, and a transform in each of them or one for all."""
    members = [
        TensorDictReplayBuffer(storage=storage(SIZE // ENVS), transform=hindsight() if in_members else None)
        for _ in range(ENVS)
    ]
    transform = None if in_members else hindsight()
    return ReplayBufferEnsemble(*members, transform=transform, batch_size=64, **options)


def extend_members(recorded, moves):
    whole = recorded.rb
    for env, each in enumerate(moves):
        rows, recorded.rb = recorded.world.play(env, each), whole[env]
        recorded.write(rows, recorded.world.tensordict(rows))
    recorded.rb = whole


extend_by_dimension = partial(extend, change=lambda data: data.reshape(ENVS, STEPS))
extend_by_key = partial(extend, change=lambda data: data.set("lane", torch.arange(ENVS).repeat_interleave(STEPS)))


def with_sampler(storage, sampler, **options):
    return make(storage=STORAGES[storage], sampler=sampler_of(sampler, SIZE), **options)


def from_a_factory():
    return make(lambda size: partial(LazyTensorStorage, size), make_hindsight=None, transform_factory=hindsight)


BUFFERS = {  # functions that make a buffer, and write to it
    "slices without replacement": (lambda: with_sampler("LazyTensorStorage", "SliceSamplerWithoutReplacement"), extend),
    "prioritized slices": (lambda: with_sampler("PackedStorage", "PrioritizedSliceSampler"), extend),
    "three dimensions": (lambda: with_sampler("LazyTensorStorage(ndim=3)", "RandomSampler"), extend),
    "packed, three dimensions": (lambda: with_sampler("PackedStorage(ndim=3)", "SliceSampler"), extend),
    "packed on disk": (lambda: with_sampler("PackedStorage(scratch_dir=...)", "PrioritizedSampler"), extend),
    "lazy stack": (lambda: with_sampler("LazyStackStorage", "SliceSampler"), extend),
    "compressed": (lambda: with_sampler("CompressedListStorage", "RandomSampler"), extend),
    "compressed, compact": (
        partial(make, storage=STORAGES["CompressedListStorage"], make_hindsight=partial(hindsight, compact=True)),
        extend,
    ),
    "a transform in each member of an ensemble": (partial(ensemble, in_members=True), extend_members),
    "an ensemble routed by key": (partial(ensemble, routing_key="lane"), extend_by_key),
    "an ensemble of lists": (partial(ensemble, in_members=True, storage=ListStorage), extend_members),
    "an ensemble routed by dimension": (partial(ensemble, routing_dim=0), extend_by_dimension),
    "generations": (lambda: make(writer=named("TensorDictRoundRobinWriter(track_generations=True)")()), extend),
    "sample_unit": (partial(make, sample_unit=SequenceUnit(3, burn_in=1)), extend),
    "dim_extend": (
        partial(make, storage=partial(LazyTensorStorage, ndim=2), dim_extend=0),
        partial(extend, change=lambda data: data.transpose(0, 1)),
    ),
    "shared": (partial(make, make_hindsight=partial(hindsight, goal_spec=Unbounded((2,))), shared=True), extend),
    "compilable": (partial(make, compilable=True), extend),
    "delayed_init": (partial(make, delayed_init=True), extend),
    "generator": (lambda: make(generator=torch.Generator().manual_seed(0)), extend),
    "transform_factory": (from_a_factory, extend),
    "append_transform": (lambda: make(make_hindsight=None).append_transform(hindsight()), extend),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_all_goals_are_correct_and_no_transition_is_lost(name):
    make_buffer, write = BUFFERS[name]
    go_through(make_buffer(), write)


@pytest.mark.gpu
def test_relabelled_batches_are_pinned():
    go_through(rb := make(pin_memory=True))
    assert rb.sample()["desired_goal"].is_pinned()


@pytest.mark.parametrize("capacity", [SIZE, CAPACITY])
def test_a_row_that_outlives_its_goals_keeps_its_original_goal(capacity):
    """TensorDictMaxValueWriter keeps the rows with the highest ranks, whatever their age."""
    writer = named("TensorDictMaxValueWriter(rank_key='rank')")()
    recorded = record(make(make_hindsight=partial(hindsight, capacity=capacity), writer=writer), capacity)
    for moves in writes(60):
        extend(recorded, moves, lambda data: data.set("rank", torch.rand(len(data))))
    stored = uids(contents(recorded.rb))
    assert stored[-1] - stored[0] > 10 * SIZE
    relabelled = recorded.check() / SIZE
    assert relabelled < 0.25 if capacity == SIZE else relabelled > 0.9


# Copies


@pytest.mark.parametrize("how", ["loaded without its transform", "another transform", "another one with CompactGoals"])
def test_stamps_of_another_transform_are_recognized(how, tmp_path):
    recorded = filled(5)
    if how == "another transform":
        recorded.rb = make(storage=lambda size, storage=recorded.rb.storage: storage)
    else:
        recorded.rb.dumps(tmp_path)
        (tmp_path / "transform.t").unlink()
        recorded.rb = make(make_hindsight=partial(hindsight, compact="Compact" in how))
        recorded.rb.loads(tmp_path)
    recorded.oracle.clear()
    assert recorded.check() == 0
    for _ in range(3):  # with as many new episodes as there were earlier ones
        extend(recorded, [["terminated"] * STEPS] * ENVS)
        recorded.check()


# Reading and changing rows


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "CompressedListStorage"])
def test_reading_by_index_relabels_and_does_not_change_the_storage(storage):
    recorded = filled(storage=STORAGES[storage])
    rb, before = recorded.rb, contents(recorded.rb)
    for index in (slice(None), slice(5, 90), [1, 2], torch.tensor([0, 99]), np.arange(9), range(4)):
        batch = rb[index]
        recorded.check(batch)
        assert batch["uid"].tolist() == before["uid"][list(index) if isinstance(index, range) else index].tolist()
    recorded.check(rb[7].unsqueeze(0))
    torch.manual_seed(0)
    rewards = rb["next", "reward"]
    torch.manual_seed(0)
    assert torch.equal(rewards, rb[:]["next", "reward"])
    assert same(before, contents(rb))


def test_queried_trajectories_are_relabelled():
    recorded, plain = filled(), filled(make_hindsight=None)
    found, expected = (each.rb.query(traj.length > 3) for each in (recorded, plain))
    assert [len(one) for one in found] == [len(one) for one in expected]
    assert sum(recorded.check(one.data) for one in found) > sum(len(one) for one in found) / 2


def test_an_overwritten_row_is_a_separate_episode():
    recorded = filled(4)
    rb = recorded.rb
    rb[44] = rb.storage[44].clone()  # its episode went on
    rb[100:101] = rb.storage[100:101].clone()
    extend(recorded, writes(1)[0])
    batch, is_changed = rb[:], torch.isin(torch.arange(SIZE), torch.tensor([44, 100]))
    assert recorded.check(batch[~is_changed]) > SIZE / 2  # their episodes continue
    for changed, stored in zip(batch[is_changed], contents(rb)[is_changed], strict=True):
        goal = changed["desired_goal"]
        assert goal.equal(stored["desired_goal"]) or goal.equal(stored["next", "achieved_goal"])


# A transform for transitions that were written without it


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_only_transitions_written_after_the_transform_was_appended_are_relabelled(storage):
    recorded = filled(3, storage=storage, make_hindsight=None)
    rb = recorded.rb.append_transform(hindsight())
    message = "written before HERTransform was part of the buffer"
    with pytest.raises(KeyError, match=message):
        rb.sample()
    recorded.oracle.clear()
    for moves in writes(2):
        extend(recorded, moves)
    if storage is ListStorage:  # it has no room for stamps of the older rows
        with pytest.raises(KeyError, match=message):
            rb[:]
    else:
        assert recorded.check(rb[:96]) == 0
        assert recorded.check(rb[96:]) > 32


def test_two_buffers_over_one_storage_share_the_transform():
    recorded = record(make())
    other = make(storage=lambda size: recorded.rb.storage, make_hindsight=lambda: recorded.rb.transform)
    for moves in writes(8):
        extend(recorded, moves)
        for rb in (recorded.rb, other):
            assert recorded.check(rb.sample()) > 16
