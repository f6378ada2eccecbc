"""PackedStorage keeps the transitions of a plain Python list, and behaves like TorchRL's storages."""

import copy
import gc
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass
from torch import multiprocessing as mp
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter, TensorDictRoundRobinWriter

from support.factories import make_transform, seeded_sample
from support.rows import ENTRIES, bits, both_storages, identical, kinds, make_transitions, packed_buffer
from support.streams import make_episode
from torchrl_her import PackedStorage


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(ENTRIES), unique_by=str, max_size=5),
    st.integers(1, 30),
    st.lists(st.one_of(st.integers(1, 35), st.just("add")), min_size=1, max_size=8),
)
def test_it_holds_the_newest_transitions_bit_for_bit(entries, size, writes):
    rb, held, number = ReplayBuffer(storage=PackedStorage(size), batch_size=16), {}, 0
    for write in writes:
        count = 1 if write == "add" else write
        data = make_transitions(count, number, entries)
        rb.add(data[0]) if write == "add" else rb.extend(data)
        for row, transition in enumerate(bits(data)):
            held[(number + row) % size] = transition
        number += count
        assert len(rb) == len(held) == min(number, size)
        assert bits(rb[:]) == [held[row] for row in range(len(held))]
        batch, info = rb.sample(return_info=True)
        assert bits(batch) == [held[row] for row in info["index"].tolist()]


# As in TorchRL's storage: each function uses a buffer over one of the storages, and yields values to compare


def samples(rb):
    rb.extend(make_transitions(13))
    yield seeded_sample(rb)


def nested_batch_sizes(rb):
    agents = TensorDict({"x": torch.rand(6, 3, 4, 1, generator=torch.Generator().manual_seed(0))}, [6, 3, 4])
    rb.extend(TensorDict({"a": torch.arange(36.0).reshape(6, 3, 2), "agents": agents, "none": {}}, [6, 3]))
    yield seeded_sample(rb)
    yield rb[2]


def updates_in_place(rb):
    rb.extend(make_transitions(13))
    rb.set_at_("uid", torch.tensor([77]), torch.tensor([4]))
    rb.update_({("collector", "traj_ids"): torch.arange(100, 113)})
    yield rb[:]
    rb.set_("uid", torch.arange(100, 113))
    yield rb[:]
    assert rb.storage[4]["uid"] == 104


def highest_ranks(rb):
    for number in (0, 15, 3, 30):
        rb.extend(make_transitions(10, number))
    yield rb[:]


def ranks_of_both_writes(rb):
    """``TensorDictMaxValueWriter`` adds the index only in `add`; the buffer adds it in `extend`."""
    data = make_transitions(10)
    rb.extend(data)
    rb.add(make_transitions(1, 40)[0])
    rb.extend(data)
    rb.extend(make_transitions(10, 20))
    rb.add(make_transitions(1, 50)[0])
    yield rb[:].exclude("index")
    yield seeded_sample(rb)["index"]


def ranks_of_the_other_order(rb):
    rb.add(make_transitions(1, 40)[0])
    yield from ranks_of_both_writes(rb)


def writes_without_the_index(rb):
    rb.extend(make_transitions(13))
    rb[0] = make_transitions(1, 50)[0]
    rb[1:3] = make_transitions(2, 60)
    rb[[5, 4]] = make_transitions(2, 70)
    yield rb[:]


@tensorclass
class Step:
    observation: torch.Tensor
    next: "Step | None" = None


def make_step(count):
    values = torch.arange(2.0 * count).reshape(count, 2)
    return Step(values, Step(values + 1, batch_size=[count]), batch_size=[count])


def tensorclasses(rb):
    rb.extend(make_step(6))
    rb.add(make_step(1)[0])
    rb.extend([make_step(2)[1], make_step(3)[2]])
    rb[1:3] = make_step(4)[2:]
    for each in (seeded_sample(rb), rb[:], rb[2], rb[2:4]):
        assert type(each) is type(each.next) is Step
        yield each.to_tensordict()


def written_after_it_was_emptied(rb):
    rb.extend(make_transitions(13))
    rb.empty()
    assert len(rb) == 0
    rb.extend(make_transitions(5, 70))
    yield rb[:]


def slices(rb):
    data = make_transitions(40)
    data["collector", "traj_ids"] = torch.arange(40) // 10
    rb.extend(data)
    yield seeded_sample(rb)


AS_TORCHRLS = [
    (samples, {"kind": ReplayBuffer}),
    (samples, {"kind": TensorDictReplayBuffer}),
    (nested_batch_sizes, {"kind": ReplayBuffer}),
    (updates_in_place, {}),
    (highest_ranks, {"writer": partial(TensorDictMaxValueWriter, rank_key="uid")}),
    (ranks_of_both_writes, {"writer": partial(TensorDictMaxValueWriter, rank_key="uid")}),
    (ranks_of_the_other_order, {"writer": partial(TensorDictMaxValueWriter, rank_key="uid")}),
    (writes_without_the_index, {}),
    (tensorclasses, {"kind": ReplayBuffer}),
    (written_after_it_was_emptied, {}),
    (slices, {"sampler": partial(SliceSampler, slice_len=4, traj_key=("collector", "traj_ids")), "size": 40}),
]


@pytest.mark.parametrize(("use", "options"), AS_TORCHRLS)
def test_it_behaves_like_torchrls_storage(use, options):
    lazy, packed = both_storages(**options)
    for expected, found in zip(use(lazy), use(packed), strict=True):
        assert identical(expected, found)


def test_prioritized_samples_have_the_form_of_torchrls_storage():  # the sampler has its own generator
    both = both_storages(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    lazy, packed = (next(samples(rb)) for rb in both)
    assert kinds(lazy) == kinds(packed)
    assert bits(packed.exclude("priority_weight")) == bits(both[1].storage[packed["index"]])


@pytest.mark.filterwarnings("ignore:Using `add.*with a TensorDict that has batch_size")
@pytest.mark.parametrize("write", ["extend", "add"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_lanes_and_time_are_separate_dimensions(ndim, write):
    """As in TorchRL's storage, the size is rounded up to a multiple of the number of lanes."""
    lazy, packed = both_storages(ReplayBuffer, ndim=ndim)
    for number in range(0, 90, 18):
        for rb in (lazy, packed):
            written = make_transitions(18, number).reshape(*(3, 2)[: ndim - 1], -1)
            rb.extend(written) if write == "extend" else rb.add(written[..., 0])
        assert len(lazy) == len(packed)
        assert lazy.storage.shape == packed.storage.shape
        assert lazy.storage.max_size == packed.storage.max_size
        assert identical(lazy[:], packed[:])
        assert identical(seeded_sample(lazy), seeded_sample(packed))


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("count", [12, 24])
def test_every_index_reads_as_in_torchrls_storage(ndim, count):
    lazy, packed = (storage(20, ndim=ndim) for storage in (LazyTensorStorage, PackedStorage))
    data = make_transitions(count).reshape(-1, *(2,) * (ndim - 1))
    for storage in (lazy, packed):
        storage.set(torch.arange(len(data)) % (20 // 2 ** (ndim - 1)), data)
    length = len(lazy[:])
    indices = [
        0, -1, length - 1, slice(None), slice(2, 5), slice(None, None, 2), slice(0, 0), ..., None, [0, 3], range(3),
        torch.tensor(1), torch.tensor([2, 0, 2]), torch.tensor([-1, 0]), torch.tensor([[0, 1], [2, 3]]),
        torch.tensor([1, 2], dtype=torch.int32), (torch.tensor([3, 1]),), np.array([0, -2]), np.arange(4)[::-1].copy(),
        torch.arange(length) % 2 == 0, (torch.arange(length) % 2 == 0).numpy(), (slice(None),), (..., slice(1, 3)),
        torch.zeros(0, dtype=torch.int64), "uid", ("next", "done"),
    ]  # fmt: skip
    if ndim == 2:
        indices += [(2, 1), (torch.tensor([0, -1, 2]), torch.tensor([1, 0, -1])), (slice(None), 1), (slice(1, 3),) * 2]
    for index in indices:
        assert identical(lazy[index], packed.get(index)), index
    wrong = [length, -length - 1, torch.tensor([0, length]), torch.tensor([-length - 1]), [length], (0, 0, 0)]
    wrong += [(torch.tensor([0]), torch.tensor([2]))] if ndim == 2 else [(0, 0)]
    for index in wrong:
        for storage in (lazy, packed):
            with pytest.raises((IndexError, RuntimeError)):
                storage.get(index)


@pytest.mark.parametrize(
    "index",
    [3, -1, slice(2, 5), [0, 3], torch.tensor([4, 1]), torch.tensor([-1, 2]), torch.arange(20) % 3 == 0, slice(None)],
    ids=str,
)
def test_every_index_writes_as_in_torchrls_storage(index):
    lazy, packed = (storage(20) for storage in (LazyTensorStorage, PackedStorage))
    for storage in (lazy, packed):
        storage.set(range(20), make_transitions(20))
        storage[index] = make_transitions(20, 50)[index]
    assert identical(lazy[:], packed[:])


ONE, TWO = torch.tensor([1, 0]), torch.tensor([2, 1])


@pytest.mark.parametrize("through", ["buffer", "storage"])
@pytest.mark.parametrize(
    ("ndim", "index"),
    [
        *((2, each) for each in [(0, slice(1, 2)), (slice(None), slice(1, 3)), (1, 2), (slice(None), TWO), (ONE, TWO)]),
        *((2, each) for each in [(slice(1, 2), 0), (..., 1)]),
        *((3, each) for each in [(0, 1, slice(1, 2)), (slice(None), 1, slice(0, 2)), (1, 1, 1), (ONE, ONE), (..., 1)]),
    ],
    ids=str,
)
def test_an_index_of_several_dimensions_writes_as_in_torchrls_storage(ndim, index, through):
    both = both_storages(ReplayBuffer, ndim=ndim)
    shape = {2: {"buffer": (3, 6), "storage": (7, 3)}, 3: {"buffer": (3, 2, 3), "storage": (4, 2, 3)}}[ndim][through]
    for rb in both:
        rb.extend(make_transitions(18).reshape(*{2: (3, 6), 3: (3, 2, 3)}[ndim]))
        where = rb if through == "buffer" else rb.storage
        where[index] = make_transitions(np.prod(shape), 50).reshape(*shape)[index]
        assert (rb[:]["uid"] >= 50).any()
        rb[(slice(None),) * (ndim - 1) + (slice(0, 1),)] = make_transitions(1, 90)  # for each lane
        assert (rb[:]["uid"][..., 0] == 90).all()
    assert identical(*(rb[:] for rb in both))


@pytest.mark.parametrize("key", ["uid", "new", ("next", "done")])
def test_an_entry_that_is_replaced_in_all_rows_is_refused(key):
    rb = packed_buffer(kind=TensorDictReplayBuffer)
    rb.extend(make_transitions(13))
    with pytest.raises(RuntimeError, match=r"locked.*`set_\(\)`"):
        rb[key] = torch.zeros(13, 1)


def test_reading_from_an_empty_storage_is_the_same_error_as_in_torchrl():
    for storage in (LazyTensorStorage(10), PackedStorage(10)):
        with pytest.raises(RuntimeError, match="non-initialized"):
            storage[0]
        with pytest.raises(RuntimeError, match="empty storage"):
            ReplayBuffer(storage=storage, batch_size=2).sample()


# Reading and writing


@pytest.mark.parametrize("change", ["neg_", "zero_", "set"])
def test_changing_a_sample_does_not_change_the_storage(change):
    rb = packed_buffer(kind=TensorDictReplayBuffer)
    rb.extend(make_transitions(20, entries=[("observation", torch.float32, (5,)), ("flag", torch.bool, (1,))]))
    before = bits(rb.storage[:])

    def spoil(batch):
        if change == "set":
            batch["observation"] = torch.zeros_like(batch["observation"])
        for value in batch.values():
            value.zero_() if change == "zero_" else value.bitwise_not_() if value.dtype == torch.bool else value.neg_()

    three = torch.tensor([3])
    reads = [rb.sample, lambda: rb[0], lambda: rb[2:5], lambda: rb[: len(rb)], lambda: rb[[1, 2]], lambda: rb[three]]
    reads += [partial(rb.storage.get, index) for index in (three, three[0], slice(1, 4), ..., 2)]
    for read in reads:
        spoil(read())
        assert bits(rb.storage[:]) == before


def test_a_transform_that_adds_entries_comes_before_the_first_write():
    rb = packed_buffer(100, TensorDictReplayBuffer)
    data = make_episode(torch.zeros(6, 1), torch.ones(1))
    rb.extend(data.clone())
    rb.append_transform(make_transform(capacity=100))
    with pytest.raises(ValueError, match="'hindsight_stamp' is new"):
        rb.extend(data.clone())


def test_gradients_do_not_reach_the_storage():
    storage = PackedStorage(10)
    data = TensorDict({"a": torch.rand(4, 2, requires_grad=True) * 2}, [4])
    for cursor in (torch.arange(4), slice(0, 4)):
        storage.set(cursor, data)
        assert not storage[torch.tensor([0, 1])]["a"].requires_grad


@pytest.mark.parametrize("cursor", [3, torch.tensor([3]), slice(3, 4)], ids=str)
def test_a_write_invalidates_the_episode_ends_in_the_caches_of_samplers(cursor):
    """Samplers compare a version number of the storage, which is private to TorchRL."""
    storage = PackedStorage(20)
    storage.set(range(10), make_transitions(10))
    before = storage._mutation_revision
    storage[cursor] = make_transitions(20)[cursor]
    assert storage._mutation_revision > before


def test_conditional_updates_reach_the_storage():
    writer = partial(TensorDictRoundRobinWriter, track_generations=True)
    rb = TensorDictReplayBuffer(storage=PackedStorage(20), batch_size=8, writer=writer)
    rb.extend(make_transitions(10))
    batch = rb.sample()
    patch = {"uid": torch.full((8,), -5)}
    result = rb.update_if_present(index=batch["index"], generation=batch["index_generation"], patch=patch)
    assert result.updated.all()
    assert (rb.storage[batch["index"]]["uid"] == -5).all()


# Copies, files, other processes


@pytest.mark.parametrize("how", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(("on_disk", "shared_init"), [(False, False), (True, False), (False, True)])
def test_a_copy_and_its_original_are_independent(how, on_disk, shared_init, tmp_path):
    rb = packed_buffer(scratch_dir=tmp_path if on_disk else None, shared_init=shared_init)
    if shared_init:
        how(rb).extend(make_transitions(12, 70))
    rb.extend(make_transitions(12))
    twin = how(rb)
    twin.extend(make_transitions(12, 50))
    twin.set_at_("uid", torch.tensor([99]), torch.tensor([11]))
    assert bits(rb[:]) == bits(make_transitions(12))
    assert len(twin) == 20
    assert twin.storage[torch.tensor([11])]["uid"] == 99
    rb.extend(make_transitions(3, 90))
    assert twin.storage[12]["uid"] == 50


def test_a_pickle_contains_the_rows_once():
    storage = PackedStorage(10_000)
    storage.set(range(10), make_transitions(10))
    row = sum(value[0].numel() * value.dtype.itemsize for value in make_transitions(1).values(True, True))
    assert len(pickle.dumps(storage)) < 1.2 * 10_000 * row + 20_000


def test_rows_are_in_the_named_file(tmp_path):
    storage = PackedStorage(1000, scratch_dir=tmp_path / "new" / "rows")
    storage.set(torch.arange(5), make_transitions(5, 2**40))
    content = next((tmp_path / "new" / "rows").iterdir()).read_bytes()
    assert all(np.int64(2**40 + row).tobytes() in content for row in range(5))
    assert len(content) % 1000 == 0
    with pytest.raises(FileExistsError, match="already contains the rows of another storage"):
        PackedStorage(1000, scratch_dir=tmp_path / "new" / "rows").set(torch.arange(5), make_transitions(5))
    with pytest.raises(ValueError, match="leave out device='meta' or scratch_dir"):
        PackedStorage(10, device="meta", scratch_dir=tmp_path)


def write_in_child(rb, number):
    rb.extend(make_transitions(5, number))


@pytest.mark.parametrize(("on_disk", "starts"), [(False, ("spawn", "fork")), (True, ("fork", "spawn"))])
def test_processes_write_into_one_storage(on_disk, starts, tmp_path):
    storage = PackedStorage(40, scratch_dir=tmp_path if on_disk else None)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=400, shared=True)
    rb.extend(make_transitions(5))
    for start, number in zip(starts, (5, 10), strict=True):
        child = mp.get_context(start).Process(target=write_in_child, args=(rb, number))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    write_in_child(rb, 15)
    assert rb.storage[:]["uid"].tolist() == list(range(20))
    assert sorted(rb.sample()["uid"].unique().tolist()) == list(range(20))


@pytest.mark.parametrize("on_disk", [False, True])
def test_another_process_may_write_first(on_disk, tmp_path):
    storage = PackedStorage(40, scratch_dir=tmp_path if on_disk else None, shared_init=True)
    rb = ReplayBuffer(storage=storage, batch_size=400, shared=True)
    for start, number in (("fork", 0), ("spawn", 5)):
        child = mp.get_context(start).Process(target=write_in_child, args=(rb, number))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    with pytest.raises(ValueError, match="'new' is new"):
        rb.extend(make_transitions(5).set("new", torch.zeros(5)))
    write_in_child(rb, 10)
    assert rb[:]["uid"].tolist() == list(range(15))
    directory = storage.scratch_dir
    del rb, storage
    gc.collect()
    assert directory.exists() == on_disk


@pytest.mark.parametrize("option", [{"device": "meta"}, {"compilable": True}], ids=str)
def test_options_that_exclude_a_shared_first_write_are_refused(option):
    with pytest.raises(ValueError, match=f"leave out {next(iter(option))}.* or shared_init"):
        PackedStorage(10, shared_init=True, **option)


def test_a_storage_without_rows_is_not_sent_to_a_process():
    rb = ReplayBuffer(storage=PackedStorage(40), shared=True)
    with pytest.raises(RuntimeError, match="has not been initialized yet"):
        mp.get_context("spawn").Process(target=write_in_child, args=(rb, 0)).start()


# Compiled


@pytest.mark.parametrize("ndim", [1, 2])
def test_reading_compiles_in_one_piece(ndim):
    storage = PackedStorage(40, ndim=ndim, compilable=True)
    data = make_transitions(24, entries=[entry for entry in ENTRIES if entry[1].itemsize != 16])
    storage.set(torch.arange(24 // 2 ** (ndim - 1)), data.reshape(-1, *(2,) * (ndim - 1)))
    index = (torch.tensor([3, 1, 7, 7]),) + (torch.tensor([0, 1, 1, 0]),) * (ndim - 1)
    index = index if ndim == 2 else index[0]
    read = torch.compile(storage.get, fullgraph=True, backend="eager")
    assert identical(read(index), storage.get(index))
    torch._dynamo.reset()


@pytest.mark.parametrize("compilable", [False, True])
def test_a_compiled_buffer_samples_stored_transitions(compilable):
    rb = TensorDictReplayBuffer(storage=PackedStorage(40, compilable=compilable), batch_size=8, compilable=compilable)
    sample = torch.compile(rb.sample, backend="eager")
    written = []
    for number in (0, 24):
        data = make_transitions(24, number)
        written += bits(data)
        rb.extend(data)
        batch = sample()
        assert bits(batch.exclude("index")) == [written[uid] for uid in batch["uid"].tolist()]
    torch._dynamo.reset()


# On a CUDA device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestCuda:
    @pytest.mark.parametrize("written_from", ["cpu", "cuda"])
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "auto"])
    def test_rows_are_on_the_device_and_samples_equal_those_of_the_host(self, device, written_from):
        rb = packed_buffer(kind=TensorDictReplayBuffer, device=device)
        written = []
        for number in (0, 15):
            data = make_transitions(15, number)
            written += bits(data)
            rb.extend(data.to(written_from))
        batch = rb.sample()
        expected = torch.device("cpu" if (device, written_from) == ("auto", "cpu") else "cuda:0")
        assert batch.device == batch["next", "done"].device == expected
        assert bits(batch.cpu().exclude("index")) == [written[uid] for uid in batch["uid"].tolist()]
        assert (batch["uid"] % 20 == batch["index"]).all()

    @pytest.mark.parametrize("index", [-1, [0, -2], torch.tensor([-1, 3]), slice(2, 5)], ids=str)
    def test_every_index_reads_as_on_the_host(self, index):
        rb, on_host = packed_buffer(device="cuda"), packed_buffer()
        for each in (rb, on_host):
            each.extend(make_transitions(15))
        assert bits(rb[index].cpu().reshape(-1)) == bits(on_host[index].reshape(-1))

    @pytest.fixture
    def storage_and_index(self):
        storage = PackedStorage(20, device="cuda")
        storage.set(torch.arange(15, device="cuda"), make_transitions(15).cuda())
        index = torch.tensor([3, 1, 4], device="cuda")
        torch.cuda.synchronize()
        return storage, index

    def test_sampling_does_not_wait_for_the_device(self, storage_and_index):
        storage, index = storage_and_index
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = storage.get(index)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert batch["uid"].tolist() == [3, 1, 4]

    def test_it_is_captured_in_a_graph(self, storage_and_index):
        storage, index = storage_and_index
        storage.get(index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch = storage.get(index)
        index.copy_(torch.tensor([7, 0, 9]))
        graph.replay()
        assert batch["uid"].tolist() == [7, 0, 9]
