"""Prioritized replay with hindsight: the loop of sample, loss and update_tensordict_priority."""

import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data import Sequence as SequenceUnit
from torchrl.modules import MLP, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

from support.factories import WAYS_TO_COPY, make_augmentation, make_buffer, make_transform
from support.named import STORAGES
from support.oracle import RELABELLED, Oracle
from support.streams import Stream, extend, make_tensordict, rows_of
from support.tape import check, make_serial, make_tape, places
from torchrl_her import EnvReward

ALPHA, BETA, EPS = 0.7, 0.5, 1e-8
STREAM = Stream(
    lanes=4,
    lengths=((5, "truncated"), (8, "terminated"), (3, "truncated"), (4, "terminated")),
    chunk=4,
    writes=12,
    layout="flat with ids",
    rows=20,
    capacity=1000,
    her_ratio=0.8,
)
SIZE = STREAM.size


class Priorities:
    """The priorities of stored transitions by uid or another key, in plain Python (Schaul et al. 2016, section 3.3)."""

    def __init__(self, size=SIZE):
        self.stored, self.size = {}, size
        self.largest = 1.0  # the largest so far, which new transitions get

    def write(self, keys):
        for key in keys:
            self.stored[key] = self.largest
        for key in list(self.stored)[: -self.size]:
            del self.stored[key]

    def update(self, keys, errors):
        self.stored |= dict(zip(keys, errors, strict=True))  # the last error counts
        self.largest = max(self.largest, *errors)

    def check(self, weights, keys, rtol=1e-4):
        """Check importance weights. The largest weight of all stored transitions is 1."""
        powers = {key: (priority + EPS) ** ALPHA for key, priority in self.stored.items()}
        smallest = min(powers.values())
        expected = torch.tensor([(powers[key] / smallest) ** -BETA for key in keys])
        torch.testing.assert_close(torch.as_tensor(weights).flatten(), expected, rtol=rtol, atol=0)


def sample_and_update(rb):
    """Sample and update the priorities; return the batch, its rows, its errors and its importance weights."""
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
    return batch, info["index"], error.tolist(), weight


def check_loop(rb, drawn_by=lambda uids: uids, updated=lambda batch, drawn, errors: (batch["uid"].tolist(), errors)):
    """Write, sample and update, check goals and weights, and return how many transitions were relabelled.

    By default, a row is drawn and weighted by its own priority, and updates it. ``drawn_by`` maps the uids of a batch
    to the uids whose priorities were used, and ``updated`` maps a batch, these uids and the errors to the uids and
    values of the new priorities.
    """
    oracle, priorities = Oracle(STREAM), Priorities()
    relabelled = 0
    for lanes in STREAM:
        extend(rb, lanes)
        oracle.write(rows_of(lanes))
        priorities.write([row.uid for row in rows_of(lanes)])
        for _ in range(5):
            batch, _, errors, weights = sample_and_update(rb)
            relabelled += oracle.check(batch)
            drawn = drawn_by(batch["uid"].tolist())
            priorities.check(weights, drawn)
            priorities.update(*updated(batch, drawn, errors))
    return relabelled


def make(kind, storage=LazyTensorStorage, **options):
    return make_buffer(STREAM, kind=kind, storage=storage, **({"batch_size": 32} | options))


NUMBERS = {"alpha": ALPHA, "beta": BETA, "eps": EPS}
sampler = partial(PrioritizedSampler, SIZE, **NUMBERS)
whole = partial(TensorDictPrioritizedReplayBuffer, **NUMBERS)
KINDS = {
    "TensorDictPrioritizedReplayBuffer": whole,
    "sync=False": partial(whole, sync=False),
    "PrioritizedReplayBuffer": partial(PrioritizedReplayBuffer, **NUMBERS),
}
BUFFERS = {
    **{name: partial(make, kind) for name, kind in KINDS.items()},
    "TensorDictReplayBuffer": lambda: make(TensorDictReplayBuffer, sampler=sampler()),
    "ReplayBuffer": lambda: make(ReplayBuffer, sampler=sampler()),
    "ndim=2, ReplayBuffer": lambda: make(ReplayBuffer, STORAGES["LazyTensorStorage(ndim=2)"], sampler=sampler()),
    **{name: partial(make, whole, storage) for name, storage in STORAGES.items()},
}


@pytest.mark.parametrize("name", BUFFERS)
def test_priorities_belong_to_the_sampled_transitions_and_weights_are_correct(name):
    assert check_loop(BUFFERS[name]()) > 0.5 * 32 * 5 * STREAM.writes


@pytest.mark.parametrize("ndim", [1, 2])
def test_priorities_of_prioritized_slices_belong_to_their_transitions(ndim):
    """A slice is drawn and weighted by the priority of its first transition."""
    slices = PrioritizedSliceSampler(SIZE, ALPHA, BETA, EPS, slice_len=3, truncated_key=None)
    storage = partial(LazyTensorStorage, ndim=ndim)
    transform = make_transform(STREAM, sequence_length=3)
    rb = make_buffer(STREAM, transform, TensorDictReplayBuffer, storage, sampler=slices, batch_size=33)
    check_loop(rb, lambda uids: [first for first in uids[::3] for _ in range(3)])


@pytest.mark.parametrize("ndim", [1, 2])
def test_priorities_of_prioritized_sequences_belong_to_their_anchors(ndim):
    """With sample_unit=Sequence, the largest error of a window is the priority of its anchor only."""
    unit = SequenceUnit(length=2, burn_in=1, bootstrap=1)

    def largest_errors(batch, anchors, errors):
        largest = {}
        for anchor, error, valid in zip(anchors, errors, batch["validity_mask"], strict=True):
            if valid:
                largest[anchor] = max(error, largest.get(anchor, 0.0))
        return largest.keys(), largest.values()

    def anchors(uids):
        return [anchor for anchor in uids[unit.burn_in :: 4] for _ in range(4)]

    check_loop(make(whole, partial(LazyTensorStorage, ndim=ndim), sample_unit=unit), anchors, largest_errors)


def test_errors_that_are_written_with_the_data_become_priorities():
    rb, priorities = make(whole), Priorities()
    data = make_tensordict(rows_of(next(iter(STREAM))))
    data["td_error"] = torch.linspace(0.1, 2.0, len(data))
    rb.extend(data)
    priorities.write(data["uid"].tolist())
    priorities.update(data["uid"].tolist(), data["td_error"].tolist())
    batch = rb.sample()
    priorities.check(batch["priority_weight"], batch["uid"].tolist(), rtol=1e-6)


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "PackedStorage"])
def test_batches_of_one_call_use_the_priorities_at_the_call(storage):
    rb, priorities = make(whole, STORAGES[storage], batch_size=None), Priorities()
    for lanes in STREAM:
        extend(rb, lanes)
        priorities.write([row.uid for row in rows_of(lanes)])

    def update(batch, error):
        batch["td_error"] = error
        rb.update_tensordict_priority(batch)
        priorities.update(batch["uid"].tolist(), error.tolist())

    update(rb.sample(200), torch.linspace(0.1, 2.0, 200))
    batches = rb.sample(16 * 32).split(32)
    for batch in batches:  # weights do not depend on the other batches of the call
        priorities.check(batch["priority_weight"], batch["uid"].tolist())
    assert any(set(batches[0]["uid"].tolist()) & set(batch["uid"].tolist()) for batch in batches[1:])
    update(batches[0], torch.linspace(3.0, 9.0, 32))
    stale = torch.cat(batches[1:])
    with pytest.raises(AssertionError):
        priorities.check(stale["priority_weight"], stale["uid"].tolist())
    for number, batch in enumerate(batches[1:]):  # a repeated transition gets the priority of the last batch
        update(batch, torch.linspace(0.2, 1.0, 32) * (number + 1))
    batch = rb.sample(100)
    priorities.check(batch["priority_weight"], batch["uid"].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_by_hindsight_augmentation_have_separate_priorities(kind):
    stream = Stream(1, ((5, "terminated"), (8, "truncated")), chunk=7, writes=8, layout="flat with ids", rows=1000)
    rb, priorities = make_buffer(stream, make_augmentation(), KINDS[kind], batch_size=32), Priorities(stream.size)
    for lanes in stream:
        priorities.write(extend(rb, lanes).tolist())  # the keys are rows of the storage
        for _ in range(5 if priorities.stored else 0):
            _, index, errors, weights = sample_and_update(rb)
            rows = torch.as_tensor(index).tolist()
            priorities.check(weights, rows)
            priorities.update(rows, errors)
    uids = rb[:]["uid"].tolist()
    of_one = {uid: {p for row, p in priorities.stored.items() if uids[row] == uid and p != 1.0} for uid in set(uids)}
    assert max(map(len, of_one.values())) >= 3  # the original and its copies


def test_the_large_priority_of_one_copy_does_not_affect_its_siblings():
    stream = Stream(1, ((5, "terminated"),), chunk=5, writes=1, layout="flat with ids", rows=1000)
    rb = make_buffer(stream, make_augmentation(), KINDS["TensorDictPrioritizedReplayBuffer"])
    extend(rb, *stream)
    rb.update_priority(torch.arange(25), torch.full((25,), 1e-6))
    rb.update_priority(torch.tensor([12]), torch.tensor([1e6]))
    batch = rb.sample(1000)
    assert (batch["index"] == 12).float().mean() > 0.95
    assert torch.equal(rb[12]["desired_goal"], batch["desired_goal"][batch["index"] == 12][0])


def test_the_loop_with_a_loss_sets_priorities_for_the_sampled_goals():
    env = make_serial(*range(4), discrete=True)
    network = MLP(in_features=6, out_features=2, num_cells=[16])
    values = TensorDictModule(network, ["observation", "desired_goal"], ["action_value"])
    policy = TensorDictSequential(values, QValueModule(spec=env.action_spec_unbatched))
    loss = DQNLoss(policy, action_space=env.action_spec_unbatched, delay_value=True)
    loss.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss, tau=0.5)
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-9)  # rewards are large
    transform = make_transform(reward=EnvReward(make_tape(discrete=True)), capacity=1000)
    rb = whole(storage=LazyTensorStorage(200), transform=transform, batch_size=32)
    priorities, relabelled = Priorities(200), 0
    collector = Collector(env, frames_per_batch=16, total_frames=256, auto_register_policy_transforms=False)
    for data in collector:
        rb.extend(data.reshape(-1))
        priorities.write(places(data))
        for _ in range(3):
            batch = rb.sample()
            priorities.check(batch["priority_weight"], places(batch), rtol=1e-3)
            before = errors_of(loss, batch, gamma=0.9)
            loss(batch)["loss"].backward()
            torch.testing.assert_close(batch["td_error"].squeeze(-1), before, rtol=1e-4, atol=0)
            optimizer.step()
            optimizer.zero_grad()
            target.step()
            relabelled += check(batch).relabelled
            rb.update_tensordict_priority(batch)
            priorities.update(places(batch), before.tolist())
    collector.shutdown()
    assert relabelled > 0.5 * 32 * 3 * 16


@torch.no_grad()
def errors_of(loss, batch, gamma):
    """Return the squared temporal-difference errors of transitions with their current goals."""
    with loss.value_network_params.to_module(loss.value_network):
        value = loss.value_network(batch.select("observation", "desired_goal"))["action_value"]
    with loss.target_value_network_params.to_module(loss.value_network):
        following = loss.value_network(batch["next"].select("observation", "desired_goal"))["action_value"]
    bootstrap = following.max(dim=-1).values * ~batch["next", "terminated"].squeeze(-1)
    return ((value * batch["action"]).sum(-1) - batch["next", "reward"].squeeze(-1) - gamma * bootstrap).square()


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_restored_buffer_continues_with_the_same_priorities_and_goals(way, tmp_path):
    rb = make(whole)
    for lanes in STREAM:
        extend(rb, lanes)
        sample_and_update(rb)
    twin = WAYS_TO_COPY[way](rb, make(whole), tmp_path)
    for _ in range(3):
        for buffer in (rb, twin):
            buffer.set_rng(torch.Generator().manual_seed(0))
        batches = []
        for buffer in (rb, twin):
            torch.manual_seed(0)
            batches.append(sample_and_update(buffer)[0])
        assert (batches[0] == batches[1]).all()
        assert batches[0][RELABELLED].any()


@pytest.mark.slow
def test_dqn_with_prioritized_replay_flips_15_bits():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "prioritized_bit_flipping.py"))
    assert example["train"](seed=0) >= 0.95
