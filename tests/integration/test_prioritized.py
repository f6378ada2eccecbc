"""Prioritized replay with hindsight, and several batches of one call."""

from functools import partial

import numpy as np
import pytest
import torch
from torchrl.data import PrioritizedSampler, PrioritizedSliceSampler, ReplayBuffer, TensorDictReplayBuffer

from support.factories import make_transform, same
from support.named import STORAGES, named
from support.recorded import recorded_in

SIZE = 80
NUMBERS = {"alpha": 0.7, "beta": 0.5, "eps": 1e-8}
EPISODES = ["go", "go", "go", "truncated", "go", "terminated", *["go"] * 5, "truncated"]
whole = partial(named("TensorDictPrioritizedReplayBuffer"), **NUMBERS)
in_slices = partial(PrioritizedSliceSampler, SIZE, **NUMBERS, slice_len=3, truncated_key=None)
slices = {"kind": TensorDictReplayBuffer, "make_sampler": in_slices, "batch_size": 33}


def make(transform, kind=whole, storage="LazyTensorStorage", make_sampler=None, batch_size=32):
    options = {"sampler": make_sampler()} if make_sampler else {}
    return kind(storage=STORAGES[storage](SIZE), transform=transform, batch_size=batch_size, **options)


def record(sequence_length=None, **options):
    """Return a buffer with hindsight, and the oracle of its goals."""
    hindsight = make_transform(her_ratio=0.8, capacity=1000, sequence_length=sequence_length)
    return recorded_in(make(hindsight, **options), 4)


def writes(recorded, *others):
    """Write 4 steps of each of 4 environments at a time, also to other buffers, and yield after each write."""
    for first in (0, 4, 8, 0, 4, 8, 0, 4):
        rows = [row for env in range(4) for row in recorded.world.play(env, EPISODES[first : first + 4])]
        data = recorded.world.tensordict(rows)
        data = data.reshape(4, 4) if recorded.rb.storage.ndim == 2 else data
        for rb in others:
            rb.extend(data.clone())
        recorded.write(rows, data)
        yield


def sample_and_update(rb, seed):
    """Sample, and update the priorities with errors of the transitions; return the batch and its weights."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (prioritized sampling draws from it)
    batch, info = rb.sample(return_info=True)
    error = 0.05 + (batch["uid"] * 37 % 101) / 20
    if not isinstance(rb, TensorDictReplayBuffer):
        rb.update_priority(info["index"], error)
        return batch, info["priority_weight"]
    batch["td_error"] = error.unsqueeze(-1)  # [batch, 1], as DQNLoss does
    rb.update_tensordict_priority(batch)
    return batch, batch["priority_weight"]


BUFFERS = {
    "TensorDictPrioritizedReplayBuffer": {},
    "sync=False": {"kind": partial(whole, sync=False)},
    "PrioritizedReplayBuffer": {"kind": partial(named("PrioritizedReplayBuffer"), **NUMBERS)},
    "ReplayBuffer, ndim=2": {
        "kind": ReplayBuffer,
        "storage": "LazyTensorStorage(ndim=2)",
        "make_sampler": partial(PrioritizedSampler, SIZE, **NUMBERS),
    },
    **{name: {"storage": name} for name in ("ListStorage", "PackedStorage(ndim=2)")},
    "slices": slices,
    "slices, ndim=2": slices | {"storage": "LazyTensorStorage(ndim=2)"},
}


@pytest.mark.parametrize("name", BUFFERS)
def test_the_same_transitions_are_drawn_with_the_same_weights_as_without_hindsight(name):
    recorded = record(3 if "slices" in name else None, **BUFFERS[name])
    without, relabelled = make(None, **BUFFERS[name]), 0
    for number, _ in enumerate(writes(recorded, without)):
        for seed in range(3 * number, 3 * number + 3):
            batch, weights = sample_and_update(recorded.rb, seed)
            expected, expected_weights = sample_and_update(without, seed)
            assert torch.equal(batch["uid"], expected["uid"])
            assert torch.equal(torch.as_tensor(weights), torch.as_tensor(expected_weights))
            relabelled += recorded.check(batch)
    assert relabelled > 0.4 * 32 * 3 * 8


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "PackedStorage"])
def test_batches_of_one_call_share_no_memory_with_each_other_or_the_storage(storage):
    recorded = record(kind=TensorDictReplayBuffer, storage=storage, batch_size=None)
    list(writes(recorded))
    stored, batch = recorded.rb.storage[:].clone(), recorded.rb.sample(16 * 64)
    expected = batch.clone()
    for entry in batch[:64].values(True, True):
        entry.zero_()
    assert same(expected[64:], batch[64:])
    assert same(stored, recorded.rb.storage[:])
