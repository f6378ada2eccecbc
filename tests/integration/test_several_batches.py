"""Several batches drawn by one call: `rb.sample(count * batch_size).split(batch_size)`.

`test_buffers.py` checks their goals and rewards with an oracle.
"""

import pytest
import torch
from scipy import stats
from torchrl.data import TensorDictReplayBuffer

from support import draws
from support.factories import assert_same, filled
from support.named import STORAGES
from support.oracle import RELABELLED, Oracle
from support.streams import Stream

COUNT, BATCH = 16, 64
STREAM = Stream(
    lanes=4,
    lengths=((5, "truncated"), (8, "terminated"), (3, "truncated"), (4, "terminated")),
    chunk=8,
    writes=10,
    layout="flat with ids",
    rows=40,
    capacity=1000,
    her_ratio=0.8,
)


def fill(storage="LazyTensorStorage"):
    rb, _ = filled(Oracle, STREAM, kind=TensorDictReplayBuffer, storage=STORAGES[storage], batch_size=None)
    return rb


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "PackedStorage"])
def test_one_call_relabels_its_rows_as_forward_does(storage):
    rb = fill(storage)
    rb.set_rng(torch.Generator().manual_seed(0))  # this generator draws the rows, and the default generator the goals
    torch.manual_seed(0)
    batches = rb.sample(COUNT * BATCH).split(BATCH)
    rows = torch.cat([batch["index"] for batch in batches])
    torch.manual_seed(0)
    expected = rb.transform(rb.storage[rows].clone())
    expected["index"] = rows
    assert_same(expected, torch.cat(batches))


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "PackedStorage"])
def test_changing_a_batch_changes_no_other_batch_and_nothing_stored(storage):
    rb = fill(storage)
    stored = rb.storage[:].clone()
    first, *others = rb.sample(COUNT * BATCH).split(BATCH)
    before = torch.cat(others)
    for entry in first.values(True, True):
        entry.zero_()
    first["td_error"] = torch.zeros(BATCH)
    assert_same(before, torch.cat(others))
    assert_same(stored, rb.storage[:])


def test_goals_of_two_batches_of_one_call_are_independent():
    """A transition has its original goal or one of four others, each with probability 1/5 in every batch."""
    torch.manual_seed(0)
    rb = draws.make_buffer("episode", lengths=(4,), her_ratio=0.8)
    count = 5000
    first, second = rb.sample(2 * count).split(count)
    outcomes = [batch["desired_goal"][:, 1].long().clamp(min=0) for batch in (first, second)]  # -1: the desired goal
    pairs = torch.bincount(5 * outcomes[0] + outcomes[1], minlength=25)
    assert pairs.sum() == count
    assert stats.chisquare(pairs.numpy()).pvalue > draws.LEVEL
    for batch, outcome in zip((first, second), outcomes, strict=True):
        assert torch.equal(batch[RELABELLED][:, 0], outcome > 0)
