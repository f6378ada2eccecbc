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
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass
from torch import multiprocessing as mp
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter

from support.dispatch import Operations
from support.factories import check_refused, run_processes, seeded_sample
from support.rows import ENTRIES, bits, both_storages, identical, make_transitions, packed_buffer
from torchrl_her import PackedStorage

IDS = ("collector", "traj_ids")


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


def samples_and_writes_without_the_index(rb):
    rb.extend(make_transitions(13))
    yield seeded_sample(rb)
    rb[0] = make_transitions(1, 50)[0]
    rb[1:3] = make_transitions(2, 60)
    rb[[5, 4]] = make_transitions(2, 70)
    yield rb[:]


def nested_batch_sizes(rb):
    agents = TensorDict({"x": torch.rand(6, 3, 4, 1, generator=torch.Generator().manual_seed(0))}, [6, 3, 4])
    rb.extend(TensorDict({"a": torch.arange(36.0).reshape(6, 3, 2), "agents": agents, "none": {}}, [6, 3]))
    yield seeded_sample(rb)
    yield rb[2]


def updates_in_place(rb):
    rb.extend(make_transitions(13))
    rb.set_at_("uid", torch.tensor([77]), torch.tensor([4]))
    rb.update_({IDS: torch.arange(100, 113)})
    yield rb[:]
    rb.set_("uid", torch.arange(100, 113))
    yield rb[:]
    assert rb.storage[4]["uid"] == 104
    rb.empty()
    assert len(rb) == 0
    rb.extend(make_transitions(5, 70))
    yield rb[:]


def ranks(rb, adds_first=False):
    """``TensorDictMaxValueWriter`` adds the index only in `add`; the buffer adds it in `extend`."""
    if adds_first:
        rb.add(make_transitions(1, 40)[0])
    for number in (0, 15, 3, 30):
        rb.extend(make_transitions(10, number))
        rb.add(make_transitions(1, 50 + number)[0])
    yield rb[:].exclude("index")
    yield seeded_sample(rb)["index"]


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


RANKED = {"writer": partial(TensorDictMaxValueWriter, rank_key="uid")}
AS_TORCHRLS = [
    (samples_and_writes_without_the_index, {}),
    (nested_batch_sizes, {"kind": ReplayBuffer}),
    (updates_in_place, {}),
    (ranks, RANKED),
    (partial(ranks, adds_first=True), RANKED),
    (tensorclasses, {"kind": ReplayBuffer}),
]


@pytest.mark.parametrize(("use", "options"), AS_TORCHRLS)
def test_it_behaves_like_torchrls_storage(use, options):
    lazy, packed = both_storages(**options)
    for expected, found in zip(use(lazy), use(packed), strict=True):
        assert identical(expected, found)


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


ALL, ONE, TWO = slice(None), torch.tensor([1, 0]), torch.tensor([2, 1])
WRITTEN = {  # indices by the number of dimensions
    1: [3, -1, slice(2, 5), [0, 3], torch.tensor([4, 1]), torch.tensor([-1, 2]), torch.arange(20) % 3 == 0, ALL],
    2: [(0, slice(1, 2)), (ALL, slice(1, 3)), (1, 2), (ALL, TWO), (ONE, TWO), (slice(1, 2), 0), (..., 1)],
    3: [(0, 1, slice(1, 2)), (ALL, 1, slice(0, 2)), (1, 1, 1), (ONE, ONE), (..., 1)],
}
SHAPES = {  # of the written rows by the number of dimensions: of the buffer, and of the storage
    1: ((20,), (20,)),
    2: ((3, 6), (7, 3)),
    3: ((3, 2, 3), (4, 2, 3)),
}


def rows_of_shape(shape, number=0):
    return make_transitions(int(np.prod(shape)), number).reshape(*shape)


@pytest.mark.parametrize("through", ["buffer", "storage"])
@pytest.mark.parametrize(("ndim", "index"), [(ndim, index) for ndim in WRITTEN for index in WRITTEN[ndim]], ids=str)
def test_every_index_writes_as_in_torchrls_storage(ndim, index, through):
    both = both_storages(ReplayBuffer, ndim=ndim)
    for rb in both:
        rb.extend(rows_of_shape(SHAPES[ndim][0]))
        where = rb if through == "buffer" else rb.storage
        where[index] = rows_of_shape(SHAPES[ndim][through == "storage"], 50)[index]
        assert (rb[:]["uid"] >= 50).any()
        if ndim > 1:  # a single transition, for each lane
            rb[(ALL,) * (ndim - 1) + (slice(0, 1),)] = make_transitions(1, 90)
            assert (rb[:]["uid"][..., 0] == 90).all()
    assert identical(*(rb[:] for rb in both))


# Reading and writing


def test_changing_a_sample_changes_neither_the_storage_nor_other_entries():
    rb = packed_buffer(kind=TensorDictReplayBuffer)
    rb.extend(make_transitions(20))
    before = bits(rb.storage[:])
    three = torch.tensor([3])
    reads = [rb.sample, lambda: rb[0], lambda: rb[2:5], lambda: rb[: len(rb)], lambda: rb[[1, 2]], lambda: rb[three]]
    reads += [partial(rb.storage.get, index) for index in (three, three[0], slice(1, 4), ..., 2)]
    for read in reads:
        batch = read()
        for key in batch.keys(True, True):
            others = bits(batch.exclude(key))
            batch[key].zero_()
            batch[key] = torch.ones_like(batch[key])
            assert bits(batch.exclude(key)) == others
        assert bits(rb.storage[:]) == before


def test_gradients_do_not_reach_the_storage():
    storage = PackedStorage(10)
    data = TensorDict({"a": torch.rand(4, 2, requires_grad=True) * 2}, [4])
    for cursor in (torch.arange(4), slice(0, 4)):
        storage.set(cursor, data)
        assert not storage[torch.tensor([0, 1])]["a"].requires_grad


@pytest.mark.parametrize("cursor", [3, torch.tensor([3]), slice(3, 4)], ids=str)
def test_a_write_invalidates_the_episode_ends_in_the_caches_of_samplers(cursor):
    sampler = SliceSampler(slice_len=4, traj_key=IDS, cache_values=True)
    rb = ReplayBuffer(storage=PackedStorage(20), sampler=sampler, batch_size=400)
    data = make_transitions(20)
    data[IDS] = torch.zeros(20, dtype=torch.int64)
    rb.extend(data)
    assert (rb.sample()["uid"] == 3).any()
    data[IDS][3] = 1  # a trajectory of one step, too short for a slice
    rb.storage[cursor] = data[cursor]
    assert not (rb.sample()["uid"] == 3).any()


# Rows


def test_rows_are_no_longer_than_their_entries_need():
    entries = [("a", torch.float32, (25,)), ("b", torch.bool, (1,)), ("c", torch.int64, ()), ("d", torch.bool, (2,))]
    storage = PackedStorage(10)
    storage.set(range(3), make_transitions(3, entries=entries))
    assert storage[:]["a"].untyped_storage().nbytes() == 10 * 120  # 8 + 8 + 100 + 3, in words of 8


def test_a_batch_is_gathered_in_one_step():
    for rb, expected in zip(both_storages(), (len(ENTRIES) + 2, 1), strict=True):
        rb.extend(make_transitions(13))
        with Operations() as operations:
            rb.sample()
        gathers = [name for name, _ in operations.seen if name in ("aten.index_select.default", "aten.index.Tensor")]
        assert len(gathers) == expected


INTEGERS = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtypes", [INTEGERS, FLOATS], ids=["unsigned integers", "floats of 8 bits"])
def test_dtypes_that_pytorch_cannot_add_are_read_back_in_every_way(dtypes, tmp_path):
    rb, twin = packed_buffer(), packed_buffer()
    data = make_transitions(20, entries=[(str(dtype).removeprefix("torch."), dtype, (3,)) for dtype in dtypes])
    rb.extend(data)
    for index in ([3], slice(2, 5), torch.tensor([1, 4]), slice(None)):
        assert bits(rb[index]) == bits(data[index])
    assert bits(rb[3].unsqueeze(0)) == bits(data[3:4])
    twin.load_state_dict(rb.state_dict())
    assert bits(twin[:]) == bits(data)
    if dtypes == FLOATS:
        with pytest.raises(TypeError, match=r"tensordict cannot load '.*float8.*' from a checkpoint: .*\.view\(torch"):
            rb.dumps(tmp_path)
    else:
        rb.dumps(tmp_path)
        twin.empty()
        twin.loads(tmp_path)
        assert bits(twin[:]) == bits(data)


@pytest.mark.parametrize(
    ("form", "kind"), [(lazy_stack, ReplayBuffer), (lazy_stack, TensorDictReplayBuffer), (list, ReplayBuffer)]
)
def test_a_lazy_stack_and_a_list_are_written_as_their_transitions(form, kind):
    rb, data = packed_buffer(kind=kind), make_transitions(12)
    rb.extend(form(list(data.unbind(0))))
    assert bits(rb[:].select(*data.keys(True, True))) == bits(data)


def test_strided_expanded_and_conjugate_tensors_are_written_by_value():
    wide = torch.arange(24.0).reshape(4, 6)
    entries = {
        "strided": wide[:, ::2],
        "transposed": wide.reshape(4, 2, 3).transpose(1, 2),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.view_as_complex(torch.rand(4, 2, 2)).conj(),
    }
    data, storage = TensorDict(entries, [4]), PackedStorage(10)
    storage.set(range(4), data)
    assert (storage[:] == data).all()


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


def write_five(rb, number):
    rb.extend(make_transitions(5, number))


IN_ORDER = [(False, ("here", "spawn", "here")), (False, ("fork", "fork", "here")), (True, ("fork", "fork", "here"))]


@pytest.mark.parametrize(("on_disk", "writers"), IN_ORDER)
def test_processes_write_into_one_storage_in_any_order(on_disk, writers, tmp_path):
    storage = PackedStorage(40, scratch_dir=tmp_path if on_disk else None, shared_init=writers[0] != "here")
    rb = TensorDictReplayBuffer(storage=storage, batch_size=400, shared=True)
    for number, writer in zip((0, 5, 10), writers, strict=True):
        if writer == "here":
            write_five(rb, number)
        else:
            run_processes(writer, write_five, (rb, number))
    with pytest.raises(ValueError, match="'new' is new"):
        rb.extend(make_transitions(5).set("new", torch.zeros(5)))
    assert rb.storage[:]["uid"].tolist() == list(range(15))
    assert sorted(rb.sample()["uid"].unique().tolist()) == list(range(15))
    directory = storage.scratch_dir
    del rb, storage
    gc.collect()
    assert directory is None or directory.exists() == on_disk


# Entries that do not fit

MISFITS = {  # key, new value (None to remove the entry), and message
    "missing": ("observation", None, "'observation' is missing"),
    "missing, nested": (("next", "deep"), None, "'next', 'deep', 'half'.* is missing"),
    "new": ("loc", torch.zeros(4, 1), "'loc' is new"),
    "new, nested": (("next", "loc"), torch.zeros(4, 1), "'next', 'loc'.* is new"),
    "new, a tensordict": ("more", {"x": torch.zeros(4)}, "'more', 'x'.* is new"),
    "shape": ("observation", torch.zeros(4, 6), r"'observation' is torch.float32 \[6\] and was torch.float32 \[5\]"),
    "dtype": ("observation", torch.zeros(4, 5).double(),
        r"'observation' is torch.float64 \[5\] and was torch.float32 \[5\]"),
    "a tensordict for a tensor": ("int", {"x": torch.zeros(4)}, "'int', 'x'.* is new"),
    "a tensor for a tensordict": ("collector", torch.zeros(4), "'collector' is new"),
    "not a tensor": ("observation", NonTensorData("text", [4]), "'observation' is a Non"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_entries_that_do_not_fit_are_refused_and_change_nothing(misfit):
    key, value, message = MISFITS[misfit]
    rb, wrong = packed_buffer(), make_transitions(4, 15)
    rb.extend(make_transitions(15))
    wrong = wrong.exclude(key) if value is None else wrong.set(key, value)
    for write in (partial(rb.extend, wrong), partial(rb.add, wrong[0]), partial(rb.__setitem__, slice(2, 6), wrong)):
        check_refused(rb, write, (ValueError, TypeError), message)
    assert rb.write_count == 15
    rb.extend(make_transitions(8, 15))
    assert rb[:]["uid"].tolist() == [20, 21, 22, *range(3, 20)]


def three(**entries):
    return TensorDict(entries, [3])


FIRST = {
    "text": (three(next={"text": NonTensorData("hello", [3])}), r"\('next', 'text'\) is a NonTensorData"),
    "ragged": (lazy_stack([TensorDict({"a": torch.zeros(length)}) for length in (1, 2, 3)]),
        "store tensors of one shape each, but 'a' has several"),
    "jagged": (three(a=torch.nested.nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)), "'a' is a NestedTensor"),
    "nothing": (three(), "a tensordict without entries"),
    "a tensor": (torch.zeros(3, 2), "stores TensorDicts and tensorclasses, got a Tensor: put tensors into"),
}  # fmt: skip


@pytest.mark.parametrize("first", FIRST)
def test_a_first_write_that_cannot_be_packed_is_refused_and_another_write_can_follow(first):
    data, message = FIRST[first]
    rb = packed_buffer()
    check_refused(rb, partial(rb.extend, data), (TypeError, ValueError), message)
    assert rb.write_count == 0
    rb.extend(make_transitions(15))
    assert bits(rb[:]) == bits(make_transitions(15))


# Refused arguments and calls


def replace_entry(key, folder):
    rb = packed_buffer(kind=TensorDictReplayBuffer)
    rb.extend(make_transitions(13))
    rb[key] = torch.zeros(13, 1)


def use_a_directory_again(folder):
    for _ in range(2):
        PackedStorage(1000, scratch_dir=folder).set(torch.arange(5), make_transitions(5))


def send_without_rows(folder):
    rb = ReplayBuffer(storage=PackedStorage(40), shared=True)
    mp.get_context("spawn").Process(target=write_five, args=(rb, 0)).start()


LOCKED = (RuntimeError, r"locked.*`set_\(\)`")
REFUSED = {
    "an entry of all rows": (partial(replace_entry, "uid"), *LOCKED),
    "a new entry of all rows": (partial(replace_entry, "new"), *LOCKED),
    "a nested entry of all rows": (partial(replace_entry, ("next", "done")), *LOCKED),
    "a directory with rows": (use_a_directory_again, FileExistsError, "already contains the rows of another storage"),
    "no rows to share": (send_without_rows, RuntimeError, "has not been initialized yet"),
    "a file on a device": (lambda folder: PackedStorage(10, device="meta", scratch_dir=folder),
        ValueError, "leave out device='meta' or scratch_dir"),
    "shared on a device": (lambda folder: PackedStorage(10, device="meta", shared_init=True),
        ValueError, "leave out device='meta' or shared_init"),
    "shared and compilable": (lambda folder: PackedStorage(10, compilable=True, shared_init=True),
        ValueError, "leave out compilable or shared_init"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_impossible_is_refused(name, tmp_path):
    action, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        action(tmp_path)


# Compiled


@pytest.mark.parametrize("ndim", [1, 2])
def test_reading_compiles_in_one_piece(ndim):
    storage = PackedStorage(40, ndim=ndim, compilable=True)
    data = make_transitions(24, entries=[entry for entry in ENTRIES if entry[1].itemsize != 16])
    storage.set(torch.arange(24 // 2 ** (ndim - 1)), data.reshape(-1, *(2,) * (ndim - 1)))
    index = torch.tensor([3, 1, 7, 7])
    index = index if ndim == 1 else (index, torch.tensor([0, 1, 1, 0]))
    read = torch.compile(storage.get, fullgraph=True, backend="eager")
    assert identical(read(index), storage.get(index))
    torch._dynamo.reset()


def test_a_compiled_buffer_samples_stored_transitions():
    rb = TensorDictReplayBuffer(storage=PackedStorage(40, compilable=True), batch_size=8, compilable=True)
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

    def test_every_index_reads_as_on_the_host(self):
        rb, on_host = packed_buffer(device="cuda"), packed_buffer()
        for each in (rb, on_host):
            each.extend(make_transitions(15))
        for index in (-1, [0, -2], torch.tensor([-1, 3]), slice(2, 5)):
            assert bits(rb[index].cpu().reshape(-1)) == bits(on_host[index].reshape(-1))

    def test_sampling_does_not_wait_for_the_device_and_is_captured_in_a_graph(self):
        storage = PackedStorage(20, device="cuda")
        storage.set(torch.arange(15, device="cuda"), make_transitions(15).cuda())
        index = torch.tensor([3, 1, 4], device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = storage.get(index)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert batch["uid"].tolist() == [3, 1, 4]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch = storage.get(index)
        index.copy_(torch.tensor([7, 0, 9]))
        graph.replay()
        assert batch["uid"].tolist() == [7, 0, 9]
