"""Prioritized replay with hindsight, and several batches of one call."""

from functools import partial

import pytest
import torch
from torchrl.data import PrioritizedSampler, PrioritizedSliceSampler, ReplayBuffer, TensorDictReplayBuffer

from support.factories import make_transform, same
from support.named import STORAGES, named
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import Goals, World

ALPHA, BETA, EPS = 0.7, 0.5, 1e-8
SIZE = 80
EPISODES = ["go", "go", "go", "truncated", "go", "terminated", *["go"] * 5, "truncated"]


class Priorities:
    """The priorities of stored transitions by uid, in plain Python (Schaul et al. 2016, section 3.3)."""

    def __init__(self, size=SIZE):
        self.stored, self.size = {}, size
        self.largest = 1.0  # the largest so far, which new transitions get

    def write(self, keys):
        self.stored |= dict.fromkeys(keys, self.largest)
        for key in list(self.stored)[: -self.size]:
            del self.stored[key]

    def update(self, keys, errors):
        self.stored |= dict(zip(keys, errors, strict=True))  # the last error counts
        self.largest = max(self.largest, *errors)

    def check(self, weights, keys, rtol=1e-4):
        """Check importance weights. The largest weight of all stored transitions is 1."""
        powers = {key: (priority + EPS) ** ALPHA for key, priority in self.stored.items()}
        expected = torch.tensor([(powers[key] / min(powers.values())) ** -BETA for key in keys])
        torch.testing.assert_close(torch.as_tensor(weights).flatten(), expected, rtol=rtol, atol=0)


NUMBERS = {"alpha": ALPHA, "beta": BETA, "eps": EPS}
whole = partial(named("TensorDictPrioritizedReplayBuffer"), **NUMBERS)


def make(kind=whole, storage="LazyTensorStorage", size=SIZE, sequence_length=None, **options):
    """Return a buffer with real priorities, and the oracle of its goals."""
    if kind in (ReplayBuffer, TensorDictReplayBuffer) and "sampler" not in options:
        options["sampler"] = PrioritizedSampler(size, **NUMBERS)
    hindsight = make_transform(her_ratio=0.8, capacity=1000, sequence_length=sequence_length)
    rb = kind(storage=STORAGES[storage](size), transform=hindsight, **({"batch_size": 32} | options))
    return Recorded(rb, Oracle({"future": 1.0}, 1000, her_ratio=0.8), World(4, Goals()))


def writes(recorded, priorities, count=8):
    """Write 4 steps of each of 4 environments at a time, and yield after each write."""
    layout = "lanes" if recorded.rb.storage.ndim == 2 else "flat"
    for number in range(count):
        first = 4 * number % len(EPISODES)
        before = len(recorded.oracle.order)
        recorded.play([EPISODES[first : first + 4]] * 4, layout)
        priorities.write([row.uid for row in recorded.oracle.order[before:]])
        yield


def sample_and_update(rb):
    """Sample and update the priorities; return the batch, its errors and its importance weights."""
    batch, info = rb.sample(return_info=True)
    # A temporal-difference error that differs between transitions and between goals.
    error = 0.05 + (batch["uid"] * 37 % 101) / 20 + (batch["desired_goal"].sum(-1) * 13 % 17) / 100
    if isinstance(rb, TensorDictReplayBuffer):
        weight = batch["priority_weight"]
        batch["td_error"] = error.unsqueeze(-1)  # [batch, 1], as DQNLoss does
        rb.update_tensordict_priority(batch)
    else:
        weight = info["priority_weight"]
        rb.update_priority(info["index"], error)
    return batch, error.tolist(), weight


def check_loop(recorded, drawn_by=lambda uids: uids):
    """Write, sample and update, and check goals and weights.

    ``drawn_by`` maps the uids of a batch to the uids whose priorities were used; by default, their own.
    """
    priorities, relabelled = Priorities(), 0
    for _ in writes(recorded, priorities):
        for _ in range(3):
            batch, errors, weights = sample_and_update(recorded.rb)
            relabelled += recorded.check(batch)
            uids = batch["uid"].tolist()
            priorities.check(weights, drawn_by(uids))
            priorities.update(uids, errors)
    assert relabelled > 0.4 * 32 * 3 * 8


BUFFERS = {
    "TensorDictPrioritizedReplayBuffer": {},
    "sync=False": {"sync": False},
    "PrioritizedReplayBuffer": {"kind": partial(named("PrioritizedReplayBuffer"), **NUMBERS)},
    "TensorDictReplayBuffer": {"kind": TensorDictReplayBuffer},
    "ReplayBuffer, ndim=2": {"kind": ReplayBuffer, "storage": "LazyTensorStorage(ndim=2)"},
    **{name: {"storage": name} for name in ("ListStorage", "PackedStorage(ndim=2)")},
}


@pytest.mark.parametrize("name", BUFFERS)
def test_priorities_belong_to_the_sampled_transitions_and_weights_are_correct(name):
    check_loop(make(**BUFFERS[name]))


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyTensorStorage(ndim=2)"])
def test_priorities_of_prioritized_slices_belong_to_their_transitions(storage):
    """A slice is drawn and weighted by the priority of its first transition."""
    sampler = PrioritizedSliceSampler(SIZE, ALPHA, BETA, EPS, slice_len=3, truncated_key=None)
    recorded = make(TensorDictReplayBuffer, storage, sequence_length=3, sampler=sampler, batch_size=33)
    check_loop(recorded, lambda uids: [first for first in uids[::3] for _ in range(3)])


# Several batches of one call


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "PackedStorage"])
def test_batches_of_one_call_share_no_memory_with_each_other_or_the_storage(storage):
    recorded = make(TensorDictReplayBuffer, storage, sampler=None, batch_size=None)
    list(writes(recorded, Priorities()))
    stored, batch = recorded.rb.storage[:].clone(), recorded.rb.sample(16 * 64)
    expected = batch.clone()
    for entry in batch[:64].values(True, True):
        entry.zero_()
    assert same(expected[64:], batch[64:])
    assert same(stored, recorded.rb.storage[:])
