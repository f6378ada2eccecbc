"""HERTransform.adopt against the oracle, with every storage and every sampler, and after copying."""

import copy
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
    Unbounded,
)

from support.data_sets import adopting_buffer, bytes_of, copying_buffer, data_of, entries_of, make_hindsight, oracle_of
from support.factories import assert_same, copied_by_dumps, copied_by_state_dict, same, seeded_sample
from support.named import STORAGES, named
from support.oracle import RELABELLED
from support.streams import FLAT_LAYOUTS, Stream, make_episode, random_stream
from torchrl_her import HERTransform, SparseReward
from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.offline import data_set

# Trajectories alternate every eight rows, and the end of the data cuts off their last episodes.
STREAM = Stream(
    lanes=4,
    lengths=((5, "truncated"), (8, "terminated"), (3, "truncated"), (4, "terminated"), (11, "truncated")),
    chunk=8,
    writes=6,
    layout="flat with ids",
    rows=48,
    capacity=192,
)
STAMP = "hindsight_stamp"
PRIORITIES = {"alpha": 0.7, "beta": 0.5}
SAMPLERS = {
    "RandomSampler": {},
    "SamplerWithoutReplacement": {},
    "PrioritizedSampler": {"max_capacity": STREAM.size} | PRIORITIES,
    "SliceSampler": {"slice_len": 2, "truncated_key": None},
    "SliceSamplerWithoutReplacement": {"slice_len": 2, "truncated_key": None, "strict_length": False},
    "PrioritizedSliceSampler": {"max_capacity": STREAM.size, "slice_len": 2, "truncated_key": None} | PRIORITIES,
}


@pytest.fixture(params=[5, 16, 2**14], ids=lambda rows: f"{rows} rows in a piece")
def piece_rows(request, monkeypatch):
    monkeypatch.setattr(data_set, "PIECE_ROWS", request.param)
    return request.param


def check_samples(rb, oracle, samples=3):
    """Check that every sampled transition is relabelled correctly."""
    for batch in [rb.sample() for _ in range(samples)]:
        oracle.check(batch)
        assert batch[RELABELLED].all()


# The data


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
@pytest.mark.parametrize("layout", FLAT_LAYOUTS)
def test_rows_in_any_order_are_relabelled_correctly(layout, strategy, piece_rows):
    stream = replace(STREAM, layout=layout, strategy=strategy)
    rb = adopting_buffer(data_of(stream), make_hindsight(stream))
    assert oracle_of(stream).check(rb[:]) == stream.size


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("ndim", [2, 3])
def test_data_of_several_dimensions_are_relabelled_correctly(ndim, with_ids, piece_rows):
    stream = replace(STREAM, layout="[lanes, time] with ids" if with_ids else "[lanes, time]")
    rb = adopting_buffer(data_of(stream, ndim), make_hindsight(stream))
    assert oracle_of(stream).check(rb[:]) == stream.size
    check_samples(rb, oracle_of(stream))


@pytest.mark.parametrize("ndim", [1, 2])
def test_goals_are_correct_and_transitions_consistent_for_random_streams(ndim):
    @seed(ndim)
    @settings(max_examples=60, deadline=None, database=None)
    @given(st.randoms(use_true_random=False))
    def check(draw):
        layout = draw.choice(FLAT_LAYOUTS if ndim == 1 else ["[lanes, time]", "[lanes, time] with ids"])
        stream = replace(random_stream(draw, layout), compact=False)
        stream = replace(stream, capacity=stream.lanes * stream.chunk * stream.writes)
        data = data_of(stream, ndim)
        before = data.clone()
        with mock.patch.object(data_set, "PIECE_ROWS", draw.randint(1, 40)):
            rb = adopting_buffer(data, make_hindsight(stream))
        oracle_of(stream).check(rb[:])
        assert_same(before, data)

    check()


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("layout", ["flat with ids", "one step of all lanes", "[lanes, time]"])
def test_samples_equal_the_samples_of_a_written_buffer(layout, strategy, piece_rows):
    stream = replace(STREAM, layout=layout, strategy=strategy, her_ratio=0.8)
    data = data_of(stream, 1 + layout.startswith("["))
    adopting, writing = make_hindsight(stream), make_hindsight(stream)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(stream.size, ndim=data.ndim), transform=writing)
    rb.extend(data.clone())
    writing.flush()
    stored = rb.storage[:]  # [time, lanes] if it has two dimensions
    samples = []
    for transform, rows in (
        (adopting, adopting.adopt(data)),
        (writing, stored if data.ndim == 1 else stored.transpose(0, 1)),
    ):
        torch.manual_seed(0)
        samples.append(transform(rows.reshape(-1)).exclude("index", STAMP))
    assert_same(*samples)


def test_the_stamps_do_not_depend_on_the_size_of_the_pieces():
    stamps = []
    for rows in (3, 10, 1000):
        with mock.patch.object(data_set, "PIECE_ROWS", rows), mock.patch("secrets.randbelow", return_value=0):
            stamps.append(make_hindsight(STREAM).adopt(data_of(replace(STREAM, layout="flat, time first, with ids"))))
    episodes = [td[STAMP][:, 0] for td in stamps]
    for other in episodes[1:]:  # equal except for the ids of episodes
        pairs = {*zip(episodes[0].tolist(), other.tolist(), strict=True)}
        assert len(pairs) == len(episodes[0].unique()) == len(other.unique())
        assert torch.equal(stamps[0][STAMP][:, 1], stamps[1][STAMP][:, 1])


def test_an_episode_ends_with_its_trajectory_id():
    """There is no done flag, and the next trajectory starts with the last goals of this one."""
    goals = torch.ones(11, 1)
    data = make_episode(goals, torch.tensor([2.0]), truncated=False)
    data["collector", "traj_ids"] = torch.tensor([0] * 4 + [1] * 6)
    steps = HERTransform(SparseReward(0.5), capacity=10).adopt(data)[STAMP][:, 1]
    assert steps.tolist() == [*range(4), *range(6)]


def test_an_episode_ends_with_its_row():
    """There is no done flag, and the next row starts with the last goals of this one."""
    row = make_episode(torch.ones(6, 1), torch.tensor([2.0]), truncated=False)
    stamps = HERTransform(SparseReward(0.5), capacity=10).adopt(torch.stack([row, row]))[STAMP]
    assert stamps[..., 1].tolist() == [[*range(5)]] * 2
    assert stamps[0, 0, 0] != stamps[1, 0, 0]


def test_no_trajectory_is_kept_in_memory_until_its_end():
    waiting = []

    def flush(self):
        waiting.append(sum(lane.steps for lane in self.open_lanes()))
        return original(self)

    original = EpisodeTracker.flush
    data = data_of(replace(STREAM, layout="flat, time first, with ids"))
    data["next", "done"].zero_()
    with mock.patch.object(EpisodeTracker, "flush", flush):
        make_hindsight(STREAM).adopt(data)
    assert waiting == [0]


def test_max_episode_steps_ends_episodes():
    data = make_episode(torch.arange(13.0)[:, None], torch.tensor([-1.0]), truncated=False)
    transform = HERTransform(SparseReward(0), strategy="final", her_ratio=1.0, max_episode_steps=5, capacity=12)
    rows = adopting_buffer(data, transform)[:]
    assert rows["desired_goal"].flatten().tolist() == [5.0] * 5 + [10.0] * 5 + [12.0] * 2


def test_padding_is_never_relabelled_and_never_a_goal(piece_rows):
    data = torch.stack(
        [make_episode(100.0 * n + torch.arange(1.0, 8.0)[:, None], torch.tensor([-1.0])) for n in range(3)]
    )
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:] = mask[2, 1:] = False
    data = torch.where(mask, data, torch.zeros_like(data))
    data["collector", "mask"] = mask
    transform = HERTransform(SparseReward(0), strategy="final", her_ratio=1.0, capacity=int(mask.sum()))
    rows = adopting_buffer(data, transform)[:]
    assert torch.equal(rows[RELABELLED].view(3, 6), mask)
    last = torch.tensor([5.0, 107.0, 202.0])[:, None].expand(3, 6)
    assert torch.equal(rows["desired_goal"].view(3, 6)[mask], last[mask])


def test_data_can_be_views_and_lazy_stacks():
    stream = replace(STREAM, layout="[lanes, time]")
    data = data_of(stream, 2)
    for given_data in (data.transpose(0, 1).contiguous().transpose(0, 1), lazy_stack(list(data.unbind(0)))):
        rb = adopting_buffer(given_data, make_hindsight(stream))
        assert oracle_of(stream).check(rb[:]) == stream.size


# Storages and samplers


def check_or_fails_as_without(rb, plain, oracle):
    """Check samples. If TorchRL's sampler cannot read the storage, it must fail in the same way with hindsight."""
    try:
        plain.sample()
    except Exception as error:
        with pytest.raises(type(error)):
            rb.sample()
        return
    check_samples(rb, oracle)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("place", ["in memory", "memory-mapped", "loaded"])
def test_a_tensor_storage_over_adopted_data_works_with_every_sampler(sampler, ndim, place, tmp_path):
    stream = STREAM if ndim == 1 else replace(STREAM, layout="[lanes, time] with ids")
    data = data_of(stream, ndim)
    if place != "in memory":
        data = data.memmap(tmp_path)
        data = TensorDict.load_memmap(tmp_path) if place == "loaded" else data
    make_sampler = named(sampler)
    rb = adopting_buffer(data, make_hindsight(stream), sampler=make_sampler(**SAMPLERS[sampler]))
    check_samples(rb, oracle_of(stream))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_adopted_data_that_are_copied_to_another_storage_work_with_every_sampler(storage, sampler):
    ndim = STORAGES[storage](1).ndim
    stream = STREAM if ndim == 1 else replace(STREAM, layout="[lanes, time] with ids")
    data = data_of(stream, ndim)

    def make(**options):
        return {"storage": STORAGES[storage], "sampler": named(sampler)(**SAMPLERS[sampler])} | options

    rb = copying_buffer(data, make_hindsight(stream), **make())
    plain = TensorDictReplayBuffer(
        storage=STORAGES[storage](stream.size), sampler=named(sampler)(**SAMPLERS[sampler]), batch_size=64
    )
    plain.extend(data)
    check_or_fails_as_without(rb, plain, oracle_of(stream))


def test_a_plain_replay_buffer_works():
    transform = make_hindsight(STREAM)
    storage = TensorStorage(transform.adopt(data_of(STREAM)))
    check_samples(ReplayBuffer(storage=storage, transform=transform, batch_size=64), oracle_of(STREAM))


def test_sequences_of_adopted_data_have_one_goal():
    sampler = named("SliceSampler")(slice_len=2, truncated_key=None)
    transform = make_hindsight(STREAM, sequence_length=2)
    batch = adopting_buffer(data_of(STREAM), transform, sampler=sampler).sample()
    oracle_of(replace(STREAM, her_ratio=0.9)).check(batch)
    same_episode = batch[STAMP].view(-1, 2, 2)[:, :, 0].diff(dim=1).flatten() == 0
    goals = batch["desired_goal"].view(-1, 2, 2)[same_episode]
    assert len(goals)
    assert torch.equal(goals[:, 0], goals[:, 1])


def test_torchrls_tensor_storage_over_data_of_several_dimensions_fails():
    """Therefore docs/how-to/existing-data-sets.md flattens such data, which shares its memory."""
    data = data_of(replace(STREAM, layout="[lanes, time]"), 2)
    rb = TensorDictReplayBuffer(storage=TensorStorage(data, ndim=2), batch_size=64)
    with pytest.raises(IndexError):
        rb.sample()
    assert data.reshape(-1)["uid"].data_ptr() == data["uid"].data_ptr()


# What is shared


def test_entries_are_shared_and_the_data_is_not_modified():
    data = data_of(STREAM)
    before, entries = data.clone(), entries_of(data)
    adopted = make_hindsight(STREAM).adopt(data)
    assert_same(before, data)
    assert adopted[STAMP].dtype == torch.int64
    assert adopted[STAMP].shape == (STREAM.size, 2)
    assert {*entries_of(adopted)} == {*entries, STAMP}
    assert all(adopted[key].data_ptr() == entry.data_ptr() for key, entry in entries.items())


def test_memory_mapped_files_are_untouched(tmp_path):
    data = data_of(STREAM).memmap(tmp_path)
    before = bytes_of(tmp_path)
    rb = adopting_buffer(data, make_hindsight(STREAM))
    for _ in range(3):
        rb.sample()
    with pytest.raises(RuntimeError):
        rb.extend(data_of(STREAM))
    assert data.is_locked
    assert STAMP not in data
    assert bytes_of(tmp_path) == before


# Copies and checkpoints


COPIES = {
    "state_dict": copied_by_state_dict,
    "dumps": copied_by_dumps,
    "pickle": lambda rb, twin, path: pickle.loads(pickle.dumps(rb)),
    "deepcopy": lambda rb, twin, path: copy.deepcopy(rb),
}


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_samples_the_same_and_refuses_writes(way, mapped, tmp_path):
    data = data_of(STREAM)
    if mapped:
        data = data.memmap(tmp_path / "data")
    rb = adopting_buffer(data, make_hindsight(STREAM))
    if mapped:
        before = bytes_of(tmp_path / "data")
    twin = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STREAM.size), transform=make_hindsight(STREAM), batch_size=64
    )
    twin = COPIES[way](rb, twin, tmp_path)
    assert_same(seeded_sample(rb), seeded_sample(twin))
    oracle_of(STREAM).check(twin[:])
    with pytest.raises(RuntimeError, match="adopted a data set"):
        twin.extend(data_of(STREAM))
    if mapped:
        assert bytes_of(tmp_path / "data") == before


def test_states_without_an_adopted_data_set_are_loaded():
    transform, twin = make_hindsight(STREAM), make_hindsight(STREAM)
    state = transform.get_extra_state()
    del state["adopted"]
    twin.set_extra_state(state)
    assert twin.adopted is None


def test_a_copied_transform_drops_the_rows_kept_for_the_search():
    data = data_of(STREAM)
    data["image"] = torch.zeros(STREAM.size, 1000)
    data["next", "image"] = torch.zeros(STREAM.size, 1000)
    transform = make_hindsight(STREAM)
    transform.adopt(data)
    assert len(pickle.dumps(transform)) < 60_000
    assert len(pickle.dumps(transform.state_dict())) < 60_000


# Two buffers


@pytest.mark.parametrize("mapped", [False, True])
def test_an_ensemble_samples_adopted_and_new_data(mapped, tmp_path):
    old, new = STREAM, replace(STREAM, lengths=((6, "truncated"),), writes=10)
    data = data_of(old)
    offline = adopting_buffer(data.memmap(tmp_path) if mapped else data, make_hindsight(old))
    online = TensorDictReplayBuffer(storage=LazyTensorStorage(new.size), transform=make_hindsight(new), batch_size=64)
    rb = ReplayBufferEnsemble(offline, online, batch_size=64)
    oracles = [oracle_of(old), oracle_of(new)]
    online.extend(data_of(replace(new, writes=5)))
    for _ in range(3):
        batch = rb.sample()
        assert oracles[0].check(batch[0]) == 32
        for row in batch[1].unbind(0):
            assert row["next", "achieved_goal"][0] == row["desired_goal"][0], "a goal of another episode"
        online.extend(data_of(replace(new, writes=1)))


def test_a_goal_spec_allocates_the_table():
    transform = make_hindsight(STREAM, goal_spec=Unbounded((2,)))
    check_samples(adopting_buffer(data_of(STREAM), transform), oracle_of(STREAM))
    assert transform.table.counters[0] == STREAM.size


def test_an_adopted_table_can_be_shared_afterwards():
    transform = make_hindsight(STREAM)
    data = transform.adopt(data_of(STREAM))
    transform.share_memory_()
    rb = TensorDictReplayBuffer(storage=TensorStorage(data), transform=transform, batch_size=64)
    check_samples(rb, oracle_of(STREAM))


@pytest.mark.parametrize("strategy", ["past_desired"])
def test_rows_that_a_strategy_keeps_before_each_episode_count_towards_the_capacity(strategy):
    stream = replace(STREAM, layout="flat with ids")
    episodes = len({row.episode for row in oracle_of(stream).transitions.values()})
    needed = stream.size + episodes
    with pytest.raises(ValueError, match=f"pass capacity={needed} "):
        make_hindsight(stream, strategy=strategy, capacity=needed - 1).adopt(data_of(stream))
    rows = adopting_buffer(data_of(stream), make_hindsight(stream, strategy=strategy, capacity=needed))[:]
    assert rows[RELABELLED].float().mean() > 0.9
    assert (rows["desired_goal"][:, 1] == -1).all()
    assert (rows["desired_goal"][:, 0] != rows["achieved_goal"][:, 0])[rows[RELABELLED].flatten()].all()


def test_a_report_counts_the_adopted_episodes():
    transform = make_hindsight(STREAM)
    rb = adopting_buffer(data_of(STREAM), transform)
    rb.sample()
    report = transform.report()
    assert report.transitions == STREAM.size
    assert report.running == 0
    assert report.episodes == len({row.episode for row in oracle_of(STREAM).transitions.values()})
    assert report.relabelled == 1.0


def test_an_unmodified_state_is_equal_before_and_after_reading():
    transform = make_hindsight(STREAM)
    rb = adopting_buffer(data_of(STREAM), transform)
    before = copy.deepcopy(transform.get_extra_state())
    rb.sample()
    transform.flush()
    assert same(before, transform.get_extra_state())
