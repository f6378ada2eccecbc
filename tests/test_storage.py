"""PackedStorage holds what a plain Python list would hold, and is read and written as TorchRL's storages are."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass
from torch import multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter, TensorDictRoundRobinWriter

from torchrl_her import GoalReward, HERTransform, PackedStorage

# Entries of every kind: key, dtype, shape of one row.
ENTRIES = [
    ("observation", torch.float32, (5,)),
    ("scalar", torch.float64, ()),
    ("image", torch.uint8, (2, 3, 3)),
    ("empty", torch.float32, (0,)),
    (("collector", "traj_ids"), torch.int64, ()),
    (("next", "observation"), torch.float32, (5,)),
    (("next", "done"), torch.bool, (1,)),
    (("next", "deep", "half"), torch.float16, (3,)),
    (("next", "deep", "brain"), torch.bfloat16, (1,)),
    ("small", torch.int8, (3,)),
    ("short", torch.int16, (1,)),
    ("int", torch.int32, (2,)),
    ("complex", torch.complex128, (2,)),
]


def make_transitions(count, number=0, entries=ENTRIES, batch=None):
    """Random bits in every entry; "uid" counts from ``number``."""
    generator = torch.Generator().manual_seed(number)
    transitions = TensorDict({"uid": torch.arange(number, number + count)}, [count])
    for key, dtype, shape in entries:
        size = (count, *shape, dtype.itemsize)
        high = 2 if dtype == torch.bool else 256
        bits = torch.randint(0, high, size, dtype=torch.uint8, generator=generator)
        transitions[key] = quiet(bits.view(dtype)).reshape(count, *shape)
    return transitions if batch is None else transitions.reshape(batch)


def quiet(value):
    """Replace signalling NaNs, which PyTorch's own copies of strided tensors change, by ordinary ones."""
    if value.is_complex():
        return torch.view_as_complex(quiet(torch.view_as_real(value)))
    return (
        torch.where(value.isnan(), torch.nan, value)
        if value.dtype.itemsize > 1 and value.is_floating_point()
        else value
    )


def bits(tensordict):
    """What a tensordict holds, row by row, as plain Python objects that compare exactly."""
    if not tensordict.batch_size.numel():
        return []
    flat = tensordict.reshape(-1)
    columns = {
        key: [bytes(row.contiguous().reshape(-1).view(torch.uint8).tolist()) for row in value]
        for key, value in flat.items(True, True)
    }
    return [{key: column[row] for key, column in columns.items()} for row in range(len(flat))]


def kinds(tensordict):
    """Keys in their order, with shapes, dtypes, batch sizes and devices."""
    return [
        (key, type(value), value.shape, value.device, getattr(value, "dtype", None), getattr(value, "batch_size", None))
        for key, value in [((), tensordict), *tensordict.items(include_nested=True)]
    ]


def same(left, right):
    return sorted(map(str, kinds(left))) == sorted(map(str, kinds(right))) and bits(left) == bits(right)


def buffers(kind=TensorDictReplayBuffer, size=20, **kwargs):
    """The same buffer over TorchRL's storage and over this one."""
    ndim = kwargs.pop("ndim", 1)
    return [
        kind(storage=storage(size, ndim=ndim), batch_size=8, **kwargs) for storage in (LazyTensorStorage, PackedStorage)
    ]


def filled(count=13, **kwargs):
    both = buffers(**kwargs)
    for rb in both:
        rb.extend(make_transitions(count))
    return both


# Rows


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


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_samples_look_as_those_of_torchrls_storage(kind):
    prioritized = kind is TensorDictPrioritizedReplayBuffer
    drawn = []
    for rb in filled(kind=kind, **({"alpha": 0.7, "beta": 0.5} if prioritized else {})):
        torch.manual_seed(0)
        drawn.append(rb.sample())
    lazy, packed = drawn
    if prioritized:  # draws from a generator of its own
        assert sorted(map(str, kinds(lazy))) == sorted(map(str, kinds(packed)))
        assert bits(packed.exclude("priority_weight")) == bits(rb.storage[packed["index"]])
    else:
        assert same(lazy, packed)


def test_eight_bit_floats_are_stored():
    """TorchRL's checkpoints, and much of PyTorch, know nothing of them."""
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=8)
    data = make_transitions(20, entries=[("byte", torch.float8_e4m3fn, (3,))])
    rb.extend(data)
    batch, info = rb.sample(return_info=True)
    assert torch.equal(batch["byte"].float().nan_to_num(), data["byte"][info["index"]].float().nan_to_num())


def test_the_order_of_the_keys_is_that_of_the_first_write():
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=8)
    rb.extend(make_transitions(4))
    shuffled = make_transitions(4)
    rb.extend(shuffled.select(*reversed(list(shuffled.keys(True, True)))))
    assert list(rb.sample().keys(True, True)) == list(shuffled.keys(True, True))


def test_tensordicts_in_it_keep_their_batch_sizes():
    data = TensorDict(
        {"a": torch.rand(6, 3, 2), "agents": TensorDict({"x": torch.rand(6, 3, 4, 1)}, [6, 3, 4]), "none": {}}, [6, 3]
    )
    drawn = []
    for rb in buffers(ReplayBuffer):
        rb.extend(data)
        torch.manual_seed(0)
        drawn.append(rb.sample())
        drawn.append(rb[2])
    assert same(drawn[0], drawn[2])
    assert same(drawn[1], drawn[3])


@pytest.mark.filterwarnings("ignore:Using `add.*with a TensorDict that has batch_size")
@pytest.mark.parametrize("write", ["extend", "add"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_lanes_and_time_are_dimensions_of_their_own(ndim, write):
    """Lanes that do not divide the size make it larger, as in TorchRL's storage."""
    lanes = (3, 2)[: ndim - 1]
    both = buffers(ReplayBuffer, ndim=ndim)
    for number in range(0, 90, 18):
        data = make_transitions(18, number)
        for rb in both:
            written = data.reshape(*lanes, -1)
            rb.extend(written) if write == "extend" else rb.add(written[..., 0])
        lazy, packed = both
        assert len(lazy) == len(packed)
        assert lazy.storage.shape == packed.storage.shape
        assert lazy.storage.max_size == packed.storage.max_size
        assert same(lazy[:], packed[:])
        drawn = []
        for rb in both:
            torch.manual_seed(number)
            drawn.append(rb.sample())
        assert same(*drawn)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("written", ["some", "all"])
def test_every_index_reads_what_it_reads_in_torchrls_storage(ndim, written):
    count = {"some": 12, "all": 24}[written]
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
        expected, found = lazy[index], packed.get(index)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, found), index
        else:
            assert same(expected, found), index
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
def test_every_index_writes_what_it_writes_in_torchrls_storage(index):
    lazy, packed = (storage(20) for storage in (LazyTensorStorage, PackedStorage))
    new = make_transitions(20, 50)
    for storage in (lazy, packed):
        storage.set(range(20), make_transitions(20))
        storage[index] = new[index]
    assert same(lazy[:], packed[:])


@pytest.mark.parametrize("change", ["neg_", "zero_", "set"])
def test_what_is_read_can_be_changed_and_the_store_stays_as_it_is(change):
    rb = TensorDictReplayBuffer(storage=PackedStorage(20, ndim=1), batch_size=8)
    rb.extend(make_transitions(20, entries=[("observation", torch.float32, (5,)), ("flag", torch.bool, (1,))]))
    before = bits(rb.storage[:])

    def spoil(batch):
        if change == "set":
            batch["observation"] = torch.zeros_like(batch["observation"])
        for value in batch.values():
            value.zero_() if change == "zero_" else value.bitwise_not_() if value.dtype == torch.bool else value.neg_()

    three = torch.tensor([3])
    reads = [rb.sample, lambda: rb[0], lambda: rb[2:5], lambda: rb[: len(rb)], lambda: rb[[1, 2]], lambda: rb[three]]
    reads += [lambda index=index: rb.storage.get(index) for index in (three, three[0], slice(1, 4), ..., 2)]
    for read in reads:
        spoil(read())
        assert bits(rb.storage[:]) == before


def test_entries_of_a_sample_share_nothing():
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=8)
    rb.extend(make_transitions(20))
    batch = rb.sample()
    for key in batch.keys(True, True):
        others = bits(batch.exclude(key))
        batch[key].zero_()
        assert bits(batch.exclude(key)) == others


def test_stored_entries_are_updated_in_place_through_the_buffer():
    lazy, packed = filled()
    uids = torch.arange(100, 113)
    for rb in (lazy, packed):
        rb.set_at_("uid", torch.tensor([77]), torch.tensor([4]))
        rb.update_({("collector", "traj_ids"): uids})
    assert same(lazy[:], packed[:])
    for rb in (lazy, packed):
        rb.set_("uid", uids)
    assert same(lazy[:], packed[:])
    assert packed.storage[4]["uid"] == 104


def test_a_batch_is_gathered_in_one_step():
    class Gathers(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor)
            return function(*args, **(kwargs or {}))

    for rb, expected in zip(filled(), (len(ENTRIES) + 2, 1), strict=True):
        with Gathers() as gathers:
            rb.sample()
        assert gathers.count == expected


def test_rows_are_as_long_as_their_entries_need():
    entries = [("a", torch.float32, (25,)), ("b", torch.bool, (1,)), ("c", torch.int64, ()), ("d", torch.bool, (2,))]
    storage = PackedStorage(10)
    storage.set(range(3), make_transitions(3, entries=entries))
    assert storage[:]["a"].untyped_storage().nbytes() == 10 * 120  # 8 + 8 + 100 + 3, in words of 8


# What does not fit


MISFITS = {
    "missing": (lambda data: data.exclude("observation"), "'observation' is missing"),
    "missing, nested": (lambda data: data.exclude(("next", "deep")), "'next', 'deep', 'half'.* is missing"),
    "new": (lambda data: data.set("loc", torch.zeros(len(data), 1)), "'loc' is new"),
    "new, nested": (lambda data: data.set(("next", "loc"), torch.zeros(len(data), 1)), "'next', 'loc'.* is new"),
    "shape": (
        lambda data: data.set("observation", torch.zeros(len(data), 6)),
        r"'observation' is torch.float32 \[6\] and was torch.float32 \[5\]",
    ),
    "dtype": (
        lambda data: data.set("observation", torch.zeros(len(data), 5, dtype=torch.float64)),
        r"'observation' is torch.float64 \[5\] and was torch.float32 \[5\]",
    ),
    "a tensordict for a tensor": (lambda data: data.set("int", {"x": torch.zeros(len(data))}), "'int', 'x'.* is new"),
    "a tensor for a tensordict": (lambda data: data.set("collector", torch.zeros(len(data))), "'collector' is new"),
    "not a tensor": (
        lambda data: data.set("observation", NonTensorData("text", [len(data)])),
        "'observation' is a Non",
    ),
}


@pytest.mark.parametrize("write", ["extend", "add", "rb[i]"])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_leaves_the_buffer_as_it_was(misfit, kind, write):
    spoil, message = MISFITS[misfit]
    rb, twin = (kind(storage=PackedStorage(20), batch_size=8) for _ in range(2))
    for each in (rb, twin):
        each.extend(make_transitions(15))
    wrong = spoil(make_transitions(4, 15))
    writes = {
        "extend": lambda: rb.extend(wrong),
        "add": lambda: rb.add(wrong[0]),
        "rb[i]": lambda: rb.__setitem__(slice(2, 6), wrong),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        writes[write]()
    assert rb.write_count == twin.write_count
    assert len(rb) == len(twin)
    for each in (rb, twin):
        each.extend(make_transitions(8, 15))
    assert same(rb.storage[:], twin.storage[:])


@tensorclass
class Transition:
    observation: torch.Tensor


FIRST = {
    "text": (TensorDict({"a": torch.zeros(3), "text": NonTensorData("hello", [3])}, [3]), "'text' is a NonTensorData"),
    "nested text": (TensorDict({"next": {"text": NonTensorData("hello", [3])}}, [3]), r"\('next', 'text'\) is a"),
    "ragged": (
        lazy_stack([TensorDict({"a": torch.zeros(length)}) for length in (1, 2, 3)]),
        "stores tensors of one shape each, and 'a' has several",
    ),
    "jagged": (
        TensorDict({"a": torch.nested.nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)}, [3]),
        "'a' is a NestedTensor",
    ),
    "a tensorclass inside": (
        TensorDict({"next": {"state": Transition(torch.zeros(3, 2), batch_size=[3])}}, [3]),
        r"\('next', 'state'\) is a Transition",
    ),
    "nothing": (TensorDict({}, [3]), "a tensordict without entries"),
    "a tensor": (torch.zeros(3, 2), "stores TensorDicts, got a Tensor"),
    "a dict": ({"a": torch.zeros(3, 2)}, "stores TensorDicts, got a dict"),
    "a tensorclass": (Transition(torch.zeros(3, 2), batch_size=[3]), "stores TensorDicts, got a Transition"),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_first_write_that_cannot_be_packed_is_refused_and_another_can_follow(first):
    data, message = FIRST[first]
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=8)
    with pytest.raises((TypeError, ValueError), match=message):
        rb.extend(data)
    assert rb.write_count == 0
    rb.extend(make_transitions(15))
    assert bits(rb[:]) == bits(make_transitions(15))


def test_a_transform_that_adds_entries_comes_before_the_first_write():
    rb = TensorDictReplayBuffer(storage=PackedStorage(100), batch_size=8)
    goals = {"achieved_goal": torch.zeros(5, 1), "desired_goal": torch.ones(5, 1)}
    flags = {"reward": torch.zeros(5, 1), "done": torch.zeros(5, 1, dtype=torch.bool)}
    data = TensorDict(goals | {"next": goals | flags}, [5])
    rb.extend(data.clone())
    rb.append_transform(HERTransform(GoalReward(lambda achieved, desired: achieved[:, 0] * 0), capacity=100))
    with pytest.raises(ValueError, match="'hindsight_stamp' is new"):
        rb.extend(data.clone())


def test_reading_from_an_empty_storage_is_the_error_that_it_is_in_torchrl():
    for storage in (LazyTensorStorage(10), PackedStorage(10)):
        with pytest.raises(RuntimeError, match="non-initialized"):
            storage[0]
        with pytest.raises(RuntimeError, match="empty storage"):
            ReplayBuffer(storage=storage, batch_size=2).sample()


# What is written


def test_a_lazy_stack_and_a_list_are_written_as_the_transitions_that_they_are():
    data = make_transitions(12)
    for written in (lazy_stack(list(data.unbind(0))), list(data.unbind(0))):
        for kind in (ReplayBuffer, TensorDictReplayBuffer):
            if kind is TensorDictReplayBuffer and isinstance(written, list):
                continue  # TorchRL's takes tensordicts
            rb = kind(storage=PackedStorage(20), batch_size=8)
            rb.extend(written)
            assert bits(rb[:].select(*data.keys(True, True))) == bits(data)


def test_strided_expanded_and_conjugate_tensors_are_written_as_what_they_show():
    wide = torch.arange(24.0).reshape(4, 6)
    data = TensorDict(
        {
            "strided": wide[:, ::2],
            "transposed": wide.reshape(4, 2, 3).transpose(1, 2),
            "expanded": torch.ones(1, 3).expand(4, 3),
            "conjugate": torch.view_as_complex(torch.rand(4, 2, 2)).conj(),
        },
        [4],
    )
    storage = PackedStorage(10)
    storage.set(range(4), data)
    assert (storage[:] == data).all()


def test_gradients_do_not_reach_the_store():
    storage = PackedStorage(10)
    data = TensorDict({"a": torch.rand(4, 2, requires_grad=True) * 2}, [4])
    for cursor in (torch.arange(4), slice(0, 4)):
        storage.set(cursor, data)
        assert not storage[torch.tensor([0, 1])]["a"].requires_grad


def test_the_writer_of_the_highest_ranks_works():
    lazy, packed = buffers(writer=partial(TensorDictMaxValueWriter, rank_key="uid"))
    for number in (0, 15, 3, 30):
        for rb in (lazy, packed):
            rb.extend(make_transitions(10, number))
    assert same(lazy[:], packed[:])


def test_an_emptied_buffer_is_written_from_the_start():
    lazy, packed = filled()
    for rb in (lazy, packed):
        rb.empty()
        assert len(rb) == 0
        rb.extend(make_transitions(5, 70))
    assert same(lazy[:], packed[:])


def test_slices_are_those_of_torchrls_storage():
    drawn = []
    for rb in buffers(sampler=partial(SliceSampler, slice_len=4, traj_key=("collector", "traj_ids")), size=40):
        data = make_transitions(40)
        data["collector", "traj_ids"] = torch.arange(40) // 10
        rb.extend(data)
        torch.manual_seed(0)
        drawn.append(rb.sample())
    assert same(*drawn)


@pytest.mark.parametrize("cursor", [3, torch.tensor([3]), slice(3, 4)], ids=str)
def test_samplers_are_told_that_rows_have_changed(cursor):
    """They remember where episodes end until TorchRL's number of the storage's contents, a private one, is another."""
    storage = PackedStorage(20)
    storage.set(range(10), make_transitions(10))
    before = storage._mutation_revision
    storage[cursor] = make_transitions(20)[cursor]
    assert storage._mutation_revision > before


def test_members_of_an_ensemble_can_be_packed():
    members = [TensorDictReplayBuffer(storage=PackedStorage(20)) for _ in range(3)]
    rb = ReplayBufferEnsemble(*members, batch_size=6)
    for number in range(3):
        rb[number].extend(make_transitions(15, 20 * number))
    batch = rb.sample()
    assert batch.batch_size == (3, 2)
    assert (batch["uid"] // 20 == batch["uid"][:, :1] // 20).all()
    assert (batch["uid"] % 20 == batch["index", "index"]).all()


def test_conditional_updates_reach_the_store():
    writer = partial(TensorDictRoundRobinWriter, track_generations=True)
    rb = TensorDictReplayBuffer(storage=PackedStorage(20), batch_size=8, writer=writer)
    rb.extend(make_transitions(10))
    batch = rb.sample()
    changed = {"uid": torch.full((8,), -5)}
    result = rb.update_if_present(index=batch["index"], generation=batch["index_generation"], patch=changed)
    assert result.updated.all()
    assert (rb.storage[batch["index"]]["uid"] == -5).all()


# Copies, checkpoints, other processes


def test_samples_and_state_dicts_can_be_saved_in_every_way(tmp_path):
    for rb in filled():
        rb.sample()
        data = rb.sample()
        for what in (data, rb[3], rb[:5], rb.storage[torch.tensor([2])], rb[:].clone()):
            torch.save(what, tmp_path / "batch")
            assert same(torch.load(tmp_path / "batch", weights_only=False), what)
            assert same(pickle.loads(pickle.dumps(what)), what)
            assert same(copy.deepcopy(what), what)
        torch.save(rb.state_dict(), tmp_path / "state")
        twin = ReplayBuffer(storage=PackedStorage(20))
        twin.storage.load_state_dict(torch.load(tmp_path / "state", weights_only=False)["_storage"])
        assert same(twin[:], rb.storage[:])


def test_a_pickle_holds_the_rows_once():
    storage = PackedStorage(10_000)
    storage.set(range(10), make_transitions(10))
    row = sum(value[0].numel() * value.dtype.itemsize for value in make_transitions(1).values(True, True))
    assert len(pickle.dumps(storage)) < 1.2 * 10_000 * row + 20_000


@pytest.mark.parametrize("how", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_copy_and_its_original_go_on_apart(how, on_disk, tmp_path):
    rb = ReplayBuffer(storage=PackedStorage(20, scratch_dir=tmp_path if on_disk else None), batch_size=8)
    rb.extend(make_transitions(12))
    twin = how(rb)
    twin.extend(make_transitions(12, 50))
    twin.set_at_("uid", torch.tensor([99]), torch.tensor([11]))
    assert bits(rb[:]) == bits(make_transitions(12))
    assert len(twin) == 20
    assert twin.storage[torch.tensor([11])]["uid"] == 99
    rb.extend(make_transitions(3, 90))
    assert twin.storage[12]["uid"] == 50


PAIRS = [(PackedStorage, PackedStorage), (LazyTensorStorage, PackedStorage), (PackedStorage, LazyTensorStorage)]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("way", ["dumps", "state_dict"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " to ".join(kind.__name__ for kind in pair))
@pytest.mark.parametrize("ndim", [1, 2])
def test_checkpoints_are_those_of_torchrls_storage(ndim, pair, way, used, tmp_path):
    def make(storage, number, count):
        rb = ReplayBuffer(storage=storage(20, ndim=ndim), batch_size=8)
        if count:
            rb.extend(make_transitions(count, number).reshape(*(2,) * (ndim - 1), -1))
        return rb

    rb, twin = make(pair[0], 0, 14), make(pair[1], 50, 18 if used else 0)
    if way == "dumps":
        rb.dumps(tmp_path / "rb")
        twin.loads(tmp_path / "rb")
    else:
        twin.load_state_dict(rb.state_dict())
    assert bits(rb[:]) == bits(twin[:])  # TorchRL's forgets the device
    for each in (rb, twin):
        each.extend(make_transitions(16, 100).reshape(*(2,) * (ndim - 1), -1))
    assert bits(rb[:]) == bits(twin[:])
    assert len(rb) == 20


def test_a_state_dict_of_another_size_or_with_other_entries_is_refused():
    rb = ReplayBuffer(storage=PackedStorage(20))
    rb.extend(make_transitions(5))
    other = ReplayBuffer(storage=PackedStorage(30))
    with pytest.raises(ValueError, match=r"has room for \[20\] transitions and this one for \[30\]"):
        other.load_state_dict(rb.state_dict())
    other.extend(make_transitions(5, entries=[]))  # it is as it was
    other = ReplayBuffer(storage=PackedStorage(20))
    other.extend(make_transitions(5, entries=[]))
    with pytest.raises(ValueError, match="'observation' is new"):
        other.load_state_dict(rb.state_dict())


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_checkpoint_takes_the_room_of_what_was_written(ndim, tmp_path):
    def room():
        return 512 * sum(path.stat().st_blocks for path in tmp_path.rglob("*"))  # bytes; of a hole none

    def make(size):
        return ReplayBuffer(storage=PackedStorage(size, ndim=ndim), batch_size=8)

    def write(rb, start):
        rb.extend(make_transitions(1_000, start).reshape(*(2,) * (ndim - 1), -1))

    rb, twin = make(1_000_000), make(1_000_000)
    write(rb, 0)
    rb.dumps(tmp_path / "rb")
    assert 50 * 1_000 < room() < 1_000_000
    with pytest.raises(ValueError, match=r"has room for .* and this one for .*: make it as large as it was"):
        make(20).loads(tmp_path / "rb")
    write(twin, 5_000)
    write(twin, 6_000)
    twin.loads(tmp_path / "rb")
    assert bits(rb[:]) == bits(twin[:])
    write(rb, 1_000)
    rb.dumps(tmp_path / "rb")  # over the one before
    twin.loads(tmp_path / "rb")
    write(rb, 2_000)
    write(twin, 2_000)
    assert bits(rb[:]) == bits(twin[:])
    assert len(rb) == 3_000


@pytest.mark.parametrize("data", [torch.ones(5, 3), (torch.ones(5, 3), torch.ones(5))], ids=["tensor", "tuple"])
def test_a_checkpoint_of_no_tensordicts_is_refused(data, tmp_path):
    saved = ReplayBuffer(storage=LazyTensorStorage(10))
    saved.extend(data)
    saved.dumps(tmp_path)
    rb = ReplayBuffer(storage=PackedStorage(10))
    with pytest.raises(TypeError, match=r"tensors in no TensorDict.*load it into a LazyTensorStorage"):
        rb.loads(tmp_path)


def test_hooks_of_a_checkpoint_are_called(tmp_path):
    rb, twin = (ReplayBuffer(storage=PackedStorage(20), batch_size=8) for _ in range(2))
    rb.extend(make_transitions(14))
    twin.extend(make_transitions(20))
    rb.register_save_hook(lambda data, path: data.exclude("uid").set("other", data["uid"] + 1))
    twin.register_load_hook(lambda data, out: data.exclude("other").set("uid", data["other"] - 1))
    rb.dumps(tmp_path / "rb")
    assert {"other.memmap", "uid.memmap"} & {path.name for path in tmp_path.rglob("*")} == {"other.memmap"}
    twin.loads(tmp_path / "rb")
    assert bits(rb[:]) == bits(twin[:])


def test_a_state_dict_is_loaded_as_a_copy():
    rb, twin = (ReplayBuffer(storage=PackedStorage(20)) for _ in range(2))
    rb.extend(make_transitions(20))
    twin.load_state_dict(rb.state_dict())
    rb.extend(make_transitions(20, 50))
    assert bits(twin[:]) == bits(make_transitions(20))


def test_an_empty_storage_is_saved_and_loaded():
    twin = ReplayBuffer(storage=PackedStorage(20))
    twin.load_state_dict(ReplayBuffer(storage=PackedStorage(20)).state_dict())
    twin.extend(make_transitions(5))
    assert len(twin) == 5


def test_rows_are_in_the_file_that_is_named(tmp_path):
    storage = PackedStorage(1000, scratch_dir=tmp_path / "new" / "rows")
    storage.set(torch.arange(5), make_transitions(5, 2**40))
    content = next((tmp_path / "new" / "rows").iterdir()).read_bytes()
    assert all(np.int64(2**40 + row).tobytes() in content for row in range(5))
    assert len(content) == 1000 * len(content) // 1000
    with pytest.raises(FileExistsError, match="holds the rows of another storage"):
        PackedStorage(1000, scratch_dir=tmp_path / "new" / "rows").set(torch.arange(5), make_transitions(5))
    with pytest.raises(ValueError, match="leave out device='meta', or scratch_dir"):
        PackedStorage(10, device="meta", scratch_dir=tmp_path)


def write_in_child(rb, number):
    rb.extend(make_transitions(5, number))


@pytest.mark.parametrize(("start", "on_disk"), [("spawn", False), ("spawn", True), ("fork", True)])
def test_processes_write_into_one_storage(start, on_disk, tmp_path):
    rb = TensorDictReplayBuffer(
        storage=PackedStorage(40, scratch_dir=tmp_path if on_disk else None), batch_size=400, shared=True
    )
    rb.extend(make_transitions(5))
    for number in (5, 10):
        child = mp.get_context(start).Process(target=write_in_child, args=(rb, number))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    write_in_child(rb, 15)
    assert rb.storage[:]["uid"].tolist() == list(range(20))
    assert sorted(rb.sample()["uid"].unique().tolist()) == list(range(20))


def test_a_storage_without_rows_is_not_sent_to_a_process():
    rb = ReplayBuffer(storage=PackedStorage(40), shared=True)
    with pytest.raises(RuntimeError, match="has not been initialized yet"):
        mp.get_context("spawn").Process(target=write_in_child, args=(rb, 0)).start()


@pytest.mark.parametrize("ndim", [1, 2])
def test_reading_compiles_in_one_piece(ndim):
    storage = PackedStorage(40, ndim=ndim, compilable=True)
    data = make_transitions(24, entries=[entry for entry in ENTRIES if entry[1].itemsize != 16])
    storage.set(torch.arange(24 // 2 ** (ndim - 1)), data.reshape(-1, *(2,) * (ndim - 1)))
    index = (torch.tensor([3, 1, 7, 7]),) + (torch.tensor([0, 1, 1, 0]),) * (ndim - 1)
    read = torch.compile(storage.get, fullgraph=True, backend="eager")
    assert same(read(index if ndim == 2 else index[0]), storage.get(index))
    torch._dynamo.reset()


@pytest.mark.parametrize("compilable", [False, True])
def test_a_buffer_that_is_compiled_samples_what_is_stored(compilable):
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
    def test_rows_are_on_the_device_and_samples_are_those_of_the_host(self, device, written_from):
        rb = TensorDictReplayBuffer(storage=PackedStorage(20, device=device), batch_size=8)
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

    def test_sampling_waits_for_nothing(self):
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

    @pytest.mark.parametrize("index", [-1, [0, -2], torch.tensor([-1, 3]), slice(2, 5)], ids=str)
    def test_every_index_reads_what_it_reads_on_the_host(self, index):
        rb, on_host = (ReplayBuffer(storage=PackedStorage(20, device=device)) for device in ("cuda", "cpu"))
        for each in (rb, on_host):
            each.extend(make_transitions(15))
        assert bits(rb[index].cpu().reshape(-1)) == bits(on_host[index].reshape(-1))

    def test_it_is_captured_in_a_graph(self):
        storage = PackedStorage(20, device="cuda")
        storage.set(torch.arange(15, device="cuda"), make_transitions(15).cuda())
        index = torch.tensor([3, 1, 4], device="cuda")
        storage.get(index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch = storage.get(index)
        index.copy_(torch.tensor([7, 0, 9]))
        graph.replay()
        assert batch["uid"].tolist() == [7, 0, 9]
