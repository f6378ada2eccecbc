"""The layout of transitions in rows: accepted transitions, and the values that are read back."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from support.factories import check_refused
from support.rows import ENTRIES, bits, both_storages, make_transitions, packed_buffer
from torchrl_her import PackedStorage


def test_rows_are_no_longer_than_their_entries_need():
    entries = [("a", torch.float32, (25,)), ("b", torch.bool, (1,)), ("c", torch.int64, ()), ("d", torch.bool, (2,))]
    storage = PackedStorage(10)
    storage.set(range(3), make_transitions(3, entries=entries))
    assert storage[:]["a"].untyped_storage().nbytes() == 10 * 120  # 8 + 8 + 100 + 3, in words of 8


def test_a_batch_is_gathered_in_one_step():
    class Gathers(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor)
            return function(*args, **(kwargs or {}))

    for rb, expected in zip(both_storages(), (len(ENTRIES) + 2, 1), strict=True):
        rb.extend(make_transitions(13))
        with Gathers() as gathers:
            rb.sample()
        assert gathers.count == expected


def test_entries_of_a_sample_share_nothing():
    rb = packed_buffer()
    rb.extend(make_transitions(20))
    batch = rb.sample()
    for key in batch.keys(True, True):
        others = bits(batch.exclude(key))
        batch[key].zero_()
        assert bits(batch.exclude(key)) == others


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_pytorch_cannot_add_are_read_back_in_every_way(dtype, tmp_path):
    rb, twin, data = packed_buffer(), packed_buffer(), make_transitions(20, entries=[("value", dtype, (3,))])
    rb.extend(data)
    batch, info = rb.sample(return_info=True)
    assert bits(batch) == bits(data[info["index"].tolist()])
    for index in ([3], slice(2, 5), torch.tensor([1, 4]), slice(None)):
        assert bits(rb[index]) == bits(data[index])
    assert bits(rb[3].unsqueeze(0)) == bits(data[3:4])
    twin.load_state_dict(rb.state_dict())
    assert bits(twin[:]) == bits(data)
    if dtype.is_floating_point:
        with pytest.raises(TypeError, match=r"tensordict cannot load '.*float8.*' from a checkpoint: .*\.view\(torch"):
            rb.dumps(tmp_path)
    else:
        rb.dumps(tmp_path)
        twin.empty()
        twin.loads(tmp_path)
        assert bits(twin[:]) == bits(data)


def test_keys_have_the_order_of_the_first_write():
    rb, data = packed_buffer(), make_transitions(4)
    rb.extend(data)
    rb.extend(data.select(*reversed(list(data.keys(True, True)))))
    assert list(rb.sample().keys(True, True)) == list(data.keys(True, True))


@pytest.mark.parametrize(
    ("form", "kind"), [(lazy_stack, ReplayBuffer), (lazy_stack, TensorDictReplayBuffer), (list, ReplayBuffer)]
)
def test_a_lazy_stack_and_a_list_are_written_as_their_transitions(form, kind):
    rb, data = packed_buffer(kind=kind), make_transitions(12)
    rb.extend(form(list(data.unbind(0))))
    assert bits(rb[:].select(*data.keys(True, True))) == bits(data)


def test_strided_expanded_and_conjugate_tensors_are_written_by_value():
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


# Entries that do not fit

MISFITS = {  # key, new value (None to remove the entry), and message
    "missing": ("observation", None, "'observation' is missing"),
    "missing, nested": (("next", "deep"), None, "'next', 'deep', 'half'.* is missing"),
    "new": ("loc", torch.zeros(4, 1), "'loc' is new"),
    "new, nested": (("next", "loc"), torch.zeros(4, 1), "'next', 'loc'.* is new"),
    "shape": ("observation", torch.zeros(4, 6), r"'observation' is torch.float32 \[6\] and was torch.float32 \[5\]"),
    "dtype": ("observation", torch.zeros(4, 5).double(),
        r"'observation' is torch.float64 \[5\] and was torch.float32 \[5\]"),
    "a tensordict for a tensor": ("int", {"x": torch.zeros(4)}, "'int', 'x'.* is new"),
    "a tensor for a tensordict": ("collector", torch.zeros(4), "'collector' is new"),
    "not a tensor": ("observation", NonTensorData("text", [4]), "'observation' is a Non"),
}  # fmt: skip


@pytest.mark.parametrize("write", ["extend", "add", "rb[i]"])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("misfit", MISFITS)
def test_entries_that_do_not_fit_are_refused_and_change_nothing(misfit, kind, write):
    key, value, message = MISFITS[misfit]
    rb, twin = packed_buffer(kind=kind), packed_buffer(kind=kind)
    for each in (rb, twin):
        each.extend(make_transitions(15))
    wrong = make_transitions(4, 15)
    wrong = wrong.exclude(key) if value is None else wrong.set(key, value)
    writes = {
        "extend": lambda: rb.extend(wrong),
        "add": lambda: rb.add(wrong[0]),
        "rb[i]": lambda: rb.__setitem__(slice(2, 6), wrong),
    }
    check_refused(rb, writes[write], (ValueError, TypeError), message)
    assert rb.write_count == twin.write_count
    for each in (rb, twin):
        each.extend(make_transitions(8, 15))
    assert bits(rb.storage[:]) == bits(twin.storage[:])


@tensorclass
class Transition:
    observation: torch.Tensor


def three(**entries):
    return TensorDict(entries, [3])


TEXT = NonTensorData("hello", [3])
STATE = Transition(torch.zeros(3, 2), batch_size=[3])
JAGGED = torch.nested.nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)
RAGGED = lazy_stack([TensorDict({"a": torch.zeros(length)}) for length in (1, 2, 3)])
FIRST = {
    "text": (three(a=torch.zeros(3), text=TEXT), "'text' is a NonTensorData"),
    "nested text": (three(next={"text": TEXT}), r"\('next', 'text'\) is a"),
    "ragged": (RAGGED, "store tensors of one shape each, but 'a' has several"),
    "jagged": (three(a=JAGGED), "'a' is a NestedTensor"),
    "nothing": (three(), "a tensordict without entries"),
    "a tensor": (torch.zeros(3, 2), "stores TensorDicts and tensorclasses, got a Tensor: put tensors into"),
    "a dict": ({"a": torch.zeros(3, 2)}, "stores TensorDicts and tensorclasses, got a dict"),
}


def test_a_nested_tensorclass_is_returned_as_one():
    data, rb = three(next={"state": STATE}), packed_buffer()
    rb.extend(data)
    assert type(rb[:]["next", "state"]) is type(rb[[1, 2]]["next", "state"]) is type(STATE)
    assert (rb[:] == data).all()


@pytest.mark.parametrize("first", FIRST)
def test_a_first_write_that_cannot_be_packed_is_refused_and_another_write_can_follow(first):
    data, message = FIRST[first]
    rb = packed_buffer()
    check_refused(rb, lambda: rb.extend(data), (TypeError, ValueError), message)
    assert rb.write_count == 0
    rb.extend(make_transitions(15))
    assert bits(rb[:]) == bits(make_transitions(15))
