"""The private attributes of TorchRL, tensordict and torch behave as `torchrl_her._torchrl` assumes."""

import copy
import re
import runpy

import pytest
import tensordict
import torch
import torchrl
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers import TensorStorageCheckpointer
from torchrl.envs import Compose, MultiStepTransform, RenameTransform

from support.factories import make_transform
from support.refused import transitions
from torchrl_her import PackedStorage, _torchrl


@pytest.mark.parametrize("package", [torchrl, tensordict])
def test_old_versions_are_refused_on_import_and_newer_ones_are_not(package, monkeypatch):
    for version in ("0.9.2", "0.13.3", "0.13.0+g1234567"):
        monkeypatch.setattr(package, "__version__", version)
        with pytest.raises(ImportError, match=rf"needs {package.__name__} 0\.14 or newer, but {re.escape(version)} is"):
            runpy.run_path(_torchrl.__file__)
    for version in ("0.14.0", "0.14.0a0+g1234567", "0.15.3", "1.0.0", "2026.10.27", None):
        monkeypatch.setattr(package, "__version__", version)
        runpy.run_path(_torchrl.__file__)


def rename(name):
    return RenameTransform(["observation"], [name])


def test_the_transforms_around_one_are_found_through_nested_composes():
    first, inner_first, transform, inner_last, last = map(rename, "abcde")
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), transform=Compose(first, Compose(inner_first, transform, inner_last), last)
    )
    before, after = _torchrl.transforms_around(transform)
    assert before == [first, inner_first]
    assert after == [inner_last, last]
    assert _torchrl.transforms_around(rename("f")) == ([], [])
    rb.append_transform(appended := rename("g"))
    assert _torchrl.transforms_around(transform)[1] == [inner_last, last, appended]


def test_dropped_steps_are_not_joined_to_the_next_write():
    multi_step = MultiStepTransform(3, 0.5)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=multi_step)
    data = transitions(count=10, length=100).set("step", torch.arange(10))
    rb.extend(data)
    assert len(rb) == 7
    _torchrl.drop_waiting_steps(multi_step)
    rb.extend(data)
    assert rb.storage[:]["step"].tolist() == [*range(7), *range(7)]


def test_a_compiled_call_is_left_out_of_a_copy():
    transform = make_transform(capacity=10)
    transform.compile()
    assert copy.deepcopy(transform)._compiled_call_impl is None
    assert transform._compiled_call_impl is not None


def test_a_tensordict_made_without_checks_equals_one_made_with_them():
    entries = {"a": torch.arange(3), "b": TensorDict({"c": torch.ones(3, 2)}, [3])}
    made = _torchrl.make_tensordict(dict(entries), torch.Size([3]), torch.device("cpu"))
    expected = TensorDict(entries, [3], device="cpu")
    assert made.batch_size == expected.batch_size
    assert made.device == expected.device
    assert (made == expected).all()
    assert made.set("d", torch.zeros(3))[1:].batch_size == (2,)


def test_hooks_of_a_checkpointer_are_found():
    checkpointer = TensorStorageCheckpointer()
    assert _torchrl.hooks_of(checkpointer) == ([], [])
    checkpointer.register_save_hook(one := lambda data, path=None: data)
    checkpointer.register_load_hook(other := lambda data: data)
    assert _torchrl.hooks_of(checkpointer) == ([one], [other])


def test_a_storage_is_checked_before_the_cursor_moves_and_counts_written_transitions():
    storage = PackedStorage(10)
    rb = ReplayBuffer(storage=storage)
    rb.extend(transitions(count=4))
    assert storage.count == len(rb) == 4
    assert storage.entries.batch_size == (10,)
    cursor = rb.writer.state_dict()
    with pytest.raises(ValueError, match="'more' is new"):
        rb.extend(transitions(count=4).set("more", torch.zeros(4)))
    assert rb.writer.state_dict() == cursor
    rb.extend(transitions(count=8))
    assert storage.count == 10
    storage.count = 3
    assert len(rb) == 3
