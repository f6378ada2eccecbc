"""Prioritized replay: the whole loop of sample, loss, update_tensordict_priority, sample, with hindsight."""

import dataclasses
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import Oracle, Stream, make_tensordict, reached, reward_of
from tape import check, make_tape
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data import Sequence as SequenceUnit
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, PrioritizedSliceSampler
from torchrl.envs import SerialEnv
from torchrl.modules import MLP, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

from torchrl_her import EnvReward, GoalReward, HERTransform, PackedStorage

ALPHA, BETA, EPS = 0.7, 0.5, 1e-8
STREAM = Stream(
    lanes=4,
    lengths=((5, "truncated"), (8, "terminated"), (3, "truncated"), (4, "terminated")),
    chunk=4,
    writes=12,
    layout="flat with ids",
    storage=5,
    capacity=1000,
)
SIZE = STREAM.storage * STREAM.lanes * STREAM.chunk


def make_transform(**kwargs):
    return HERTransform(GoalReward(reward_of, terminated_fn=reached), capacity=STREAM.capacity, **kwargs)


def rows_of(lanes):
    return [row for lane in lanes for row in lane]


class Priorities:
    """The priorities of what is stored, by uid, in plain Python (Schaul et al. 2016, section 3.3)."""

    def __init__(self):
        self.stored = {}
        self.largest = 1.0  # ever; what is written gets it

    def write(self, uids):
        for uid in uids:
            self.stored[uid] = self.largest
        for uid in list(self.stored)[:-SIZE]:
            del self.stored[uid]

    def update(self, uids, errors):
        for uid, error in zip(uids, errors, strict=True):
            self.stored[uid] = error  # of several the last one
        self.largest = max(self.largest, *errors)

    def weights(self, uids):
        """The importance weights, of which the largest among all that is stored is 1."""
        powers = {uid: (priority + EPS) ** ALPHA for uid, priority in self.stored.items()}
        smallest = min(powers.values())
        return [(powers[uid] / smallest) ** -BETA for uid in uids]


def error_of(uid, desired):
    """A temporal-difference error that tells transitions and their goals apart."""
    return 0.05 + (uid * 37 % 101) / 20 + (desired * 13 % 17) / 100


# Buffers: how each is made, and its loop of sampling and updating, which gives uids, errors and weights


def sample_and_update(rb):
    batch = rb.sample()
    batch["td_error"] = error_of(batch["uid"].unsqueeze(-1), batch["desired_goal"])  # [batch, 1], as DQNLoss does
    rb.update_tensordict_priority(batch)
    return batch, batch["td_error"], batch["priority_weight"]


def sample_and_update_by_index(rb):
    batch, info = rb.sample(return_info=True)
    error = error_of(batch["uid"], batch["desired_goal"].squeeze(-1))
    rb.update_priority(info["index"], error)
    return batch, error, info["priority_weight"]


def make(kind, storage=LazyTensorStorage, **kwargs):
    return kind(storage=storage(SIZE), transform=make_transform(), batch_size=32, **kwargs)


def sampler():
    return PrioritizedSampler(SIZE, ALPHA, BETA, EPS)


whole = partial(TensorDictPrioritizedReplayBuffer, alpha=ALPHA, beta=BETA, eps=EPS)
BUFFERS = {
    "TensorDictPrioritizedReplayBuffer": (partial(make, whole), sample_and_update),
    "sync=False": (partial(make, whole, sync=False), sample_and_update),
    "PrioritizedReplayBuffer": (
        partial(make, partial(PrioritizedReplayBuffer, alpha=ALPHA, beta=BETA, eps=EPS)),
        sample_and_update_by_index,
    ),
    "TensorDictReplayBuffer": (lambda: make(TensorDictReplayBuffer, sampler=sampler()), sample_and_update),
    "ReplayBuffer": (lambda: make(ReplayBuffer, sampler=sampler()), sample_and_update_by_index),
    "ndim=2": (partial(make, whole, partial(LazyTensorStorage, ndim=2)), sample_and_update),
    "ndim=3": (partial(make, whole, partial(LazyTensorStorage, ndim=3)), sample_and_update),
    "ndim=2, ReplayBuffer": (
        lambda: make(ReplayBuffer, partial(LazyTensorStorage, ndim=2), sampler=sampler()),
        sample_and_update_by_index,
    ),
    "memory-mapped": (partial(make, whole, LazyMemmapStorage), sample_and_update),
    "packed": (partial(make, whole, PackedStorage), sample_and_update),
    "packed, ndim=2": (partial(make, whole, partial(PackedStorage, ndim=2)), sample_and_update),
    "list": (partial(make, whole, ListStorage), sample_and_update),
    "lazy stack": (partial(make, whole, LazyStackStorage), sample_and_update),
    "compressed": (partial(make, whole, CompressedListStorage), sample_and_update),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_priorities_are_of_the_transitions_that_were_sampled_and_weights_are_right(name):
    make_buffer, loop = BUFFERS[name]
    rb, oracle, priorities = make_buffer(), Oracle(dataclasses.replace(STREAM, her_ratio=0.8)), Priorities()
    shape = {1: (-1,), 2: (4, -1), 3: (2, 2, -1)}[rb.storage.ndim]
    relabelled = 0
    for lanes in STREAM:
        data = make_tensordict(rows_of(lanes), with_ids=True)
        priorities.write(data["uid"].tolist())
        rb.extend(data.reshape(shape))
        oracle.write(rows_of(lanes))
        for _ in range(5):
            batch, errors, weights = loop(rb)
            relabelled += oracle.check(batch)
            uids = batch["uid"].tolist()
            expected = torch.tensor(priorities.weights(uids))
            torch.testing.assert_close(weights.flatten(), expected, rtol=1e-4, atol=0)
            priorities.update(uids, errors.flatten().tolist())
    assert relabelled > 0.5 * 32 * 5 * STREAM.writes


@pytest.mark.parametrize("ndim", [1, 2])
def test_priorities_of_prioritized_slices_are_of_their_transitions(ndim):
    """A slice is drawn, and weighed, by the priority of its first transition."""
    length = 3
    sampler = PrioritizedSliceSampler(SIZE, ALPHA, BETA, EPS, slice_len=length, truncated_key=None)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(SIZE, ndim=ndim),
        sampler=sampler,
        transform=make_transform(sequence_length=length),
        batch_size=33,
    )
    oracle, priorities = Oracle(dataclasses.replace(STREAM, her_ratio=0.8)), Priorities()
    for lanes in STREAM:
        data = make_tensordict(rows_of(lanes), with_ids=True)
        priorities.write(data["uid"].tolist())
        rb.extend(data if ndim == 1 else data.reshape(4, -1))
        oracle.write(rows_of(lanes))
        for _ in range(5):
            batch, errors, weights = sample_and_update(rb)
            oracle.check(batch)
            uids = batch["uid"].tolist()
            expected = torch.tensor(priorities.weights(uids[::length])).repeat_interleave(length)
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=0)
            priorities.update(uids, errors.flatten().tolist())


@pytest.mark.parametrize("ndim", [1, 2])
def test_priorities_of_prioritized_sequences_are_of_the_transitions_they_were_drawn_by(ndim):
    """With sample_unit=Sequence a window's largest error is the priority of the anchor, and of no other transition."""
    unit = SequenceUnit(length=2, burn_in=1, bootstrap=1)
    storage = partial(LazyTensorStorage, ndim=ndim)
    rb = make(whole, storage, sample_unit=unit)
    oracle, priorities = Oracle(dataclasses.replace(STREAM, her_ratio=0.8)), Priorities()
    for lanes in STREAM:
        data = make_tensordict(rows_of(lanes), with_ids=True)
        priorities.write(data["uid"].tolist())
        rb.extend(data if ndim == 1 else data.reshape(4, -1))
        oracle.write(rows_of(lanes))
        for _ in range(5):
            batch, errors, weights = sample_and_update(rb)
            oracle.check(batch)
            anchors = [anchor for anchor in batch["uid"][unit.burn_in :: 4].tolist() for _ in range(4)]
            torch.testing.assert_close(weights, torch.tensor(priorities.weights(anchors)), rtol=1e-4, atol=0)
            largest = {}
            for anchor, error, valid in zip(anchors, errors.flatten().tolist(), batch["validity_mask"], strict=True):
                if valid:
                    largest[anchor] = max(error, largest.get(anchor, 0.0))
            priorities.update(largest.keys(), largest.values())


def test_errors_that_are_written_with_the_data_are_its_priorities():
    rb, priorities = make(whole), Priorities()
    data = make_tensordict(rows_of(next(iter(STREAM))), with_ids=True)
    data["td_error"] = torch.linspace(0.1, 2.0, len(data))
    priorities.write(data["uid"].tolist())
    rb.extend(data)
    priorities.update(data["uid"].tolist(), data["td_error"].tolist())
    batch = rb.sample()
    torch.testing.assert_close(batch["priority_weight"], torch.tensor(priorities.weights(batch["uid"].tolist())))


def test_the_loop_with_a_loss_gives_priorities_under_the_goals_that_it_saw():
    """Four environments, a collector, DQNLoss: errors, priorities and weights as in plain Python."""
    torch.manual_seed(0)
    env = SerialEnv(4, [partial(make_tape, number, discrete=True) for number in range(4)])
    values = TensorDictModule(
        MLP(in_features=6, out_features=2, num_cells=[16]), ["observation", "desired_goal"], ["action_value"]
    )
    loss = DQNLoss(
        TensorDictSequential(values, QValueModule(spec=env.action_spec_unbatched)),
        action_space=env.action_spec_unbatched,
        delay_value=True,
    )
    loss.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss, tau=0.5)
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-9)  # rewards are large
    transform = HERTransform(EnvReward(make_tape(discrete=True)), capacity=1000)
    rb = whole(storage=LazyTensorStorage(SIZE), transform=transform, batch_size=32)
    priorities, relabelled = Priorities(), 0
    collector = Collector(env, frames_per_batch=16, total_frames=256, auto_register_policy_transforms=False)
    for data in collector:
        rb.extend(data.reshape(-1))
        priorities.write(map(tuple, data["observation"].reshape(-1, 3).tolist()))
        for _ in range(3):
            batch = rb.sample()
            torch.testing.assert_close(
                batch["priority_weight"], torch.tensor(priorities.weights(identities(batch))), rtol=1e-3, atol=0
            )
            before = target_of(loss, batch, gamma=0.9)
            loss(batch)["loss"].backward()
            torch.testing.assert_close(batch["td_error"].squeeze(-1), before, rtol=1e-4, atol=0)
            optimizer.step()
            optimizer.zero_grad()
            target.step()
            relabelled += check(batch).relabelled
            rb.update_tensordict_priority(batch)
            priorities.update(identities(batch), before.tolist())
    collector.shutdown()
    assert relabelled > 0.5 * 32 * 3 * 16


def identities(batch):
    """Environment, episode and step: what the observation tells."""
    return list(map(tuple, batch["observation"].tolist()))


@torch.no_grad()
def target_of(loss, batch, gamma):
    """The square of each transition's temporal-difference error under the goal that it has now."""
    with loss.value_network_params.to_module(loss.value_network):
        value = loss.value_network(batch.select("observation", "desired_goal"))["action_value"]
    with loss.target_value_network_params.to_module(loss.value_network):
        following = loss.value_network(batch["next"].select("observation", "desired_goal"))["action_value"]
    bootstrap = following.max(dim=-1).values * ~batch["next", "terminated"].squeeze(-1)
    return ((value * batch["action"]).sum(-1) - batch["next", "reward"].squeeze(-1) - gamma * bootstrap).square()


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_restored_buffer_goes_on_with_the_same_priorities_and_goals(way, tmp_path):
    rb, twin = make(whole), make(whole)
    for lanes in STREAM:
        rb.extend(make_tensordict(rows_of(lanes), with_ids=True))
        sample_and_update(rb)
    if way == "state_dict":
        twin.load_state_dict(rb.state_dict())
    else:
        rb.dumps(tmp_path / "rb")
        twin.loads(tmp_path / "rb")
    for _ in range(3):
        for buffer in (rb, twin):
            buffer.set_rng(torch.Generator().manual_seed(0))
        batches = []
        for buffer in (rb, twin):
            torch.manual_seed(0)
            batches.append(sample_and_update(buffer)[0])
        assert (batches[0] == batches[1]).all()
        assert batches[0]["hindsight", "relabelled"].any()


def test_dqn_with_prioritized_replay_flips_15_bits():
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "prioritized_bit_flipping.py"))
    assert example["train"](seed=0) >= 0.95
