"""Sampled sequences, for recurrent policies: one goal for each, and what slice samplers do to the done flags."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from oracle import Oracle, Stream, make_tensordict, reached, reward_of
from tape import check, make_tape
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from torchrl.data import Sequence as SequenceUnit
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from torchrl.envs import BurnInTransform, Compose, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import MLP, GRUModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.objectives.value import TDLambdaEstimator

from torchrl_her import EnvReward, GoalReward, HERTransform

LENGTH = 4  # of a sequence
STREAM = Stream(
    lanes=4,
    lengths=((7, "truncated"), (11, "terminated"), (5, "truncated"), (9, "terminated")),
    chunk=6,
    writes=10,
    layout="flat with ids",
    storage=8,
    capacity=1000,
)
SIZE = STREAM.storage * STREAM.lanes * STREAM.chunk


def rows_of(lanes):
    return [row for lane in lanes for row in lane]


def make_transform(**kwargs):
    arguments = {"her_ratio": 1.0, "capacity": STREAM.capacity, "sequence_length": LENGTH} | kwargs
    return HERTransform(GoalReward(reward_of, terminated_fn=reached), **arguments)


def make(kind=TensorDictReplayBuffer, storage=LazyTensorStorage, transform=None, **kwargs):
    transform = transform or make_transform()
    return kind(storage=storage(SIZE), transform=transform, batch_size=LENGTH * 16, **kwargs)


def write(rb, lanes):
    shape = {1: (-1,), 2: (4, -1), 3: (2, 2, -1)}[rb.storage.ndim]
    rb.extend(make_tensordict(rows_of(lanes), with_ids=True).reshape(shape))


def filled(stream=STREAM, **kwargs):
    """A full buffer, and the oracle for it."""
    rb, oracle = make(**kwargs), Oracle(stream)
    for lanes in stream:
        write(rb, lanes)
        oracle.write(rows_of(lanes))
    return rb, oracle


def check_sequences(batch, oracle, length=LENGTH):
    """Check every transition, and that each sequence has one goal, which its last transition could have had.

    Returns how many sequences there are, and how many were relabelled.
    """
    oracle.check(batch)
    sequences = [batch[begin : begin + length] for begin in range(0, len(batch), length)]
    for sequence in sequences:
        transitions = [oracle.transitions[uid] for uid in sequence["uid"].tolist()]
        last = transitions[-1]
        assert {one.episode for one in transitions} == {last.episode}
        goals = set(sequence["desired_goal"].flatten().tolist())
        assert len(goals) == 1, f"{len(goals)} goals in one sequence"
        relabelled = set(sequence["hindsight", "relabelled"].flatten().tolist())
        assert len(relabelled) == 1
        if relabelled == {True} and oracle.stream.strategy != "random":
            step = int(goals.pop()) % 1000 - 1
            assert step in oracle.allowed_steps(last), f"step {step} is not for {last}"
    return len(sequences), sum(bool(one["hindsight", "relabelled"][0]) for one in sequences)


SLICES = {"slice_len": LENGTH, "truncated_key": None}
LANES = partial(LazyTensorStorage, ndim=2)  # [lanes, time]: Sequence finds episodes by their done flags alone
SAMPLED = {
    "SliceSampler": lambda: {"sampler": SliceSampler(**SLICES)},
    "SliceSampler(num_slices=...)": lambda: {"sampler": SliceSampler(num_slices=16, truncated_key=None)},
    "SliceSampler(pad_output=True)": lambda: {"sampler": SliceSampler(**SLICES, strict_length=False, pad_output=True)},
    "SliceSampler, ndim=2": lambda: {"sampler": SliceSampler(**SLICES), "storage": LANES},
    "SliceSampler, ndim=3": lambda: {
        "sampler": SliceSampler(**SLICES),
        "storage": partial(LazyTensorStorage, ndim=3),
    },
    "SliceSampler, memory-mapped": lambda: {"sampler": SliceSampler(**SLICES), "storage": LazyMemmapStorage},
    "SliceSampler, ReplayBuffer": lambda: {"sampler": SliceSampler(slice_len=LENGTH), "kind": ReplayBuffer},
    "SliceSamplerWithoutReplacement": lambda: {"sampler": SliceSamplerWithoutReplacement(**SLICES)},
    "PrioritizedSliceSampler": lambda: {"sampler": PrioritizedSliceSampler(SIZE, 0.7, 0.5, **SLICES)},
    "Sequence, padded": lambda: {"sample_unit": SequenceUnit(2, burn_in=1, bootstrap=1), "storage": LANES},
    "Sequence, stopped": lambda: {"sample_unit": SequenceUnit(LENGTH, "stop"), "storage": LANES},
    "Sequence, every other step": lambda: {"sample_unit": SequenceUnit(LENGTH, dilation=2), "storage": LANES},
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_a_sequence_gets_one_goal_that_its_last_transition_could_have(strategy, name):
    stream = dataclasses.replace(STREAM, strategy=strategy)
    rb, oracle = make(transform=make_transform(strategy=strategy), **SAMPLED[name]()), Oracle(stream)
    sequences = relabelled = 0
    for lanes in stream:
        write(rb, lanes)
        oracle.write(rows_of(lanes))
        counts = check_sequences(rb.sample(), oracle)
        sequences, relabelled = sequences + counts[0], relabelled + counts[1]
    assert relabelled > 0.7 * sequences


def episode(steps, **flags):
    """One episode in a stream of its own."""
    return next(iter(Stream(1, ((steps, "truncated"),), steps, 1, "flat with ids", 1, 1000, **flags)))


def test_the_goal_of_a_sequence_has_the_distribution_of_its_last_transition():
    steps, count = 9, 6000
    sampler = SliceSampler(**SLICES)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(steps),
        sampler=sampler,
        transform=make_transform(her_ratio=0.8),
        batch_size=LENGTH * count,
    )
    rb.extend(make_tensordict(rows_of(episode(steps)), with_ids=True))
    torch.manual_seed(0)
    batch = rb.sample()[LENGTH - 1 :: LENGTH]  # the last ones
    relabelled = batch["hindsight", "relabelled"].squeeze(-1)
    assert abs(float(relabelled.float().mean()) - 0.8) < 5 * (0.8 * 0.2 / count) ** 0.5
    of_last = zip(batch["uid"][relabelled].tolist(), batch["desired_goal"][relabelled].flatten().tolist(), strict=True)
    drawn = Counter((last, int(goal) - 1) for last, goal in of_last)
    for last in range(LENGTH - 1, steps):
        total = sum(drawn[last, step] for step in range(last, steps))
        share = 1 / (steps - last)
        for step in range(last, steps):
            deviation = (share * (1 - share) / total) ** 0.5
            assert abs(drawn[last, step] / total - share) <= 5 * deviation, f"step {step} for {last}"


def test_without_sequence_length_each_transition_has_a_goal_of_its_own():
    rb, oracle = filled(transform=make_transform(sequence_length=None), sampler=SliceSampler(**SLICES))
    batch = rb.sample()
    oracle.check(batch)
    goals = batch["desired_goal"].view(-1, LENGTH)
    assert (goals != goals[:, :1]).any()


def test_a_sequence_across_episodes_has_the_new_goal_where_its_last_transition_is():
    """With episode_boundary="include_reset" windows cross resets: what is of another episode keeps its own goal."""
    unit = SequenceUnit(LENGTH, episode_boundary="include_reset")
    some = dataclasses.replace(STREAM, her_ratio=0.5)  # what is of another episode, the oracle must not ask for
    rb, oracle = filled(some, storage=LANES, sample_unit=unit)
    crossed = relabelled = 0
    for _ in range(20):
        batch = rb.sample()
        oracle.check(batch)
        for sequence in batch.view(-1, LENGTH):
            transitions = [oracle.transitions[uid] for uid in sequence["uid"].tolist()]
            with_last = torch.tensor([one.episode == transitions[-1].episode for one in transitions])
            new = sequence["hindsight", "relabelled"].squeeze(-1)
            assert torch.equal(new, with_last & new[-1])
            assert len(set(sequence["desired_goal"][with_last].flatten().tolist())) == 1
            crossed += int(not with_last.all())
            relabelled += int(new.any())
    assert crossed > 20
    assert relabelled > 100


def test_a_trajectory_that_is_one_row_of_the_storage_is_a_sequence():
    """Data [lanes, time] in a one-dimensional storage: sampled are whole rows, [batch, time]."""
    stream = Stream(8, ((12, "truncated"), (12, "terminated")), 12, 3, "[lanes, time]", 3, 1000)
    rb = ReplayBuffer(storage=LazyTensorStorage(24), transform=make_transform(sequence_length=12), batch_size=16)
    oracle = Oracle(stream)
    for lanes in stream:
        rb.extend(make_tensordict(rows_of(lanes), with_ids=False).reshape(8, 12))
        oracle.write(rows_of(lanes))
        batch = rb.sample()
        assert batch.shape == (16, 12)
        assert check_sequences(batch.reshape(-1), oracle, 12) == (16, 16)


def test_prioritized_slices_of_a_full_storage_of_lanes_cross_episodes_and_have_no_wrong_goals():
    """TorchRL's PrioritizedSliceSampler with ndim=2 crosses them, with hindsight and without."""
    some = dataclasses.replace(STREAM, her_ratio=0.5)  # what is of another episode, the oracle must not ask for
    for hindsight in (False, True):
        rb = TensorDictReplayBuffer(
            storage=LANES(SIZE),
            sampler=PrioritizedSliceSampler(SIZE, 0.7, 0.5, **SLICES),
            transform=make_transform() if hindsight else None,
            batch_size=LENGTH * 16,
        )
        oracle = Oracle(some)
        for lanes in some:
            write(rb, lanes)
            oracle.write(rows_of(lanes))
        batch = rb.sample()
        episodes = torch.tensor([oracle.transitions[uid].episode for uid in batch["uid"].tolist()]).view(-1, LENGTH)
        of_last = episodes == episodes[:, -1:]
        assert not of_last.all()
        if hindsight:
            assert oracle.check(batch) > 0
            assert not (batch["hindsight", "relabelled"].view(-1, LENGTH) & ~of_last).any()


@pytest.mark.parametrize("truncated_key", [None, ("next", "truncated")])
def test_an_ensemble_of_buffers_samples_sequences_and_overwrites_flags_as_its_members_do(truncated_key):
    sampler = partial(SliceSampler, slice_len=LENGTH, truncated_key=truncated_key)
    members = [make(sampler=sampler()) for _ in range(STREAM.lanes)]
    rb, oracle = ReplayBufferEnsemble(*members, batch_size=LENGTH * 16), Oracle(STREAM)
    for lanes in STREAM:
        for member, lane in zip(members, lanes, strict=True):
            member.extend(make_tensordict(lane, with_ids=True))
        oracle.write(rows_of(lanes))
    batch = rb.sample()
    assert batch.shape[:2] == (4, LENGTH * 4)
    batch = batch.reshape(-1)
    if truncated_key is None:
        sequences, relabelled = check_sequences(batch, oracle)
        assert relabelled > 0.7 * sequences
    else:
        stored = [oracle.transitions[uid].terminated for uid in batch["uid"].flatten().tolist()]
        assert batch["next", "terminated"].flatten().tolist() == stored
        assert (batch["next", "achieved_goal"] == batch["desired_goal"]).flatten().tolist() != stored


def test_sequences_of_lanes_that_alternate_in_the_storage_have_one_goal():
    """One step of all lanes after the other: fragmented=True finds the sequences by trajectory and step."""
    sampler = SliceSampler(**SLICES, fragmented=True, step_key="step", traj_key=("collector", "traj_ids"))
    rb, oracle = make(sampler=sampler), Oracle(STREAM)
    sequences = relabelled = 0
    for lanes in STREAM:
        rows = [row for step in zip(*lanes, strict=True) for row in step]
        rb.extend(make_tensordict(rows, with_ids=True).set("step", torch.tensor([row.step for row in rows])))
        oracle.write(rows)
        counts = check_sequences(rb.sample(), oracle)
        sequences, relabelled = sequences + counts[0], relabelled + counts[1]
    assert relabelled > 0.7 * sequences


def test_a_batch_that_is_not_made_of_whole_sequences_is_refused():
    for index in (slice(0, 6), 3):
        rb, _ = filled()
        with pytest.raises(ValueError, match="Set it to the slice length of the sampler"):
            rb[index]
    sampler = SliceSampler(slice_len=LENGTH, strict_length=False, traj_key=("collector", "traj_ids"))
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(SIZE), sampler=sampler, transform=make_transform(), batch_size=LENGTH
    )
    rb.extend(make_tensordict(rows_of(episode(3)), with_ids=True))
    with pytest.raises(ValueError, match="Set it to the slice length of the sampler"):
        rb.sample()


# The done flags


def test_a_slice_sampler_overwrites_recomputed_flags_in_a_tensordict_buffer():
    """It writes what is stored, with the slices' ends as truncations, after the transform has run."""
    rb, oracle = filled(sampler=SliceSampler(slice_len=LENGTH))
    batch = rb.sample()
    goal_is_reached = (batch["next", "achieved_goal"] == batch["desired_goal"]) & batch["hindsight", "relabelled"]
    stored = torch.tensor([[oracle.transitions[uid].terminated] for uid in batch["uid"].tolist()])
    last = torch.arange(len(batch)).unsqueeze(-1) % LENGTH == LENGTH - 1
    assert (goal_is_reached & ~stored).any()
    assert torch.equal(batch["next", "terminated"], stored)
    assert torch.equal(batch["next", "truncated"], last)


REMEDIES = {
    "truncated_key=None": lambda: make(sampler=SliceSampler(slice_len=LENGTH, truncated_key=None)),
    "marks of their own": lambda: make(sampler=SliceSampler(slice_len=LENGTH, truncated_key=("slice", "truncated"))),
    "ReplayBuffer": lambda: make(ReplayBuffer, sampler=SliceSampler(slice_len=LENGTH)),
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_remedies_leave_the_recomputed_flags(remedy):
    rb, oracle = REMEDIES[remedy](), Oracle(STREAM)
    for lanes in STREAM:
        write(rb, lanes)
        oracle.write(rows_of(lanes))
    batch, info = rb.sample(return_info=True)
    check_sequences(batch, oracle)  # flags included
    assert (batch["next", "terminated"] & batch["hindsight", "relabelled"]).any()
    last = torch.arange(len(batch)).unsqueeze(-1) % LENGTH == LENGTH - 1
    if remedy == "marks of their own":
        assert torch.equal(batch["slice", "truncated"], last)
    if remedy == "ReplayBuffer":
        assert torch.equal(info["next", "truncated"], last)


GAMMA, LAMBDA = 0.9, 0.7


def value_of(achieved, desired):
    return achieved / 7 - desired / 11


def targets(batch):
    """TD(lambda) as TorchRL estimates it, of sequences next to each other."""
    values = TensorDictModule(value_of, ["achieved_goal", "desired_goal"], ["state_value"])
    estimator = TDLambdaEstimator(gamma=GAMMA, lmbda=LAMBDA, value_network=values)
    return estimator(batch.view(-1, LENGTH))["value_target"].flatten().tolist()


def targets_in_plain_python(batch):
    expected = []
    for begin in range(0, len(batch), LENGTH):
        following = None
        returns = []
        for row in reversed(list(batch[begin : begin + LENGTH])):
            goal, outcome = row["desired_goal"].item(), row["next", "achieved_goal"].item()
            value = 0.0 if outcome == goal else value_of(outcome, goal)  # a reached goal ends the episode
            if following is None or outcome == goal:
                following = value
            returns.append(reward_of(outcome, goal) + GAMMA * ((1 - LAMBDA) * value + LAMBDA * following))
            following = returns[-1]
        expected += reversed(returns)
    return expected


def test_with_marks_of_their_own_value_targets_end_where_the_new_goal_is_reached():
    """Here goals are of the past, too, so that some are reached in the middle of a sequence."""
    stream = dataclasses.replace(STREAM, strategy="episode", lengths=((8, "truncated"),), chunk=8, writes=6)
    transform = make_transform(strategy="episode")
    marked = SliceSampler(slice_len=LENGTH, truncated_key=("slice", "truncated"))
    rb, _ = filled(stream, sampler=marked, transform=transform)
    torch.manual_seed(0)
    batch = rb.sample()
    assert batch["hindsight", "relabelled"].all()
    inside = batch["next", "terminated"].view(-1, LENGTH)[:, :-1]
    assert inside.any()
    batch["next", "truncated"] |= batch["slice", "truncated"]
    batch["next", "done"] = batch["next", "terminated"] | batch["next", "truncated"]
    assert targets(batch) == pytest.approx(targets_in_plain_python(batch), rel=1e-4)

    overwritten, _ = filled(
        stream, sampler=SliceSampler(slice_len=LENGTH), transform=make_transform(strategy="episode")
    )
    torch.manual_seed(0)
    batch = overwritten.sample()
    assert targets(batch) != pytest.approx(targets_in_plain_python(batch), rel=1e-4)


# A recurrent policy


BURN_IN, HIDDEN = 2, 8


def make_recurrent_policy():
    embed = TensorDictModule(
        MLP(in_features=6, out_features=HIDDEN, num_cells=[16]), ["observation", "desired_goal"], ["embedding"]
    )
    gru = GRUModule(HIDDEN, HIDDEN, in_keys=["embedding", "state", "is_init"], out_keys=["features", ("next", "state")])
    return embed, gru, TensorDictModule(nn.Linear(HIDDEN, 2), ["features"], ["action_value"])


def test_a_recurrent_policy_learns_from_sequences_that_are_burnt_in_under_their_new_goal():
    torch.manual_seed(0)
    embed, gru, head = make_recurrent_policy()
    envs = SerialEnv(4, [partial(make_tape, number, discrete=True) for number in range(4)])
    env = TransformedEnv(envs, Compose(InitTracker(), gru.make_tensordict_primer()))
    spec = env.action_spec_unbatched
    policy = TensorDictSequential(embed, gru, head, QValueModule(spec=spec))
    rb = ReplayBuffer(
        storage=LazyTensorStorage(2000),
        sampler=SliceSampler(slice_len=LENGTH),
        transform=HERTransform(EnvReward(make_tape(discrete=True)), sequence_length=LENGTH, capacity=2000),
        batch_size=LENGTH * 16,
    )
    rb.append_transform(lambda batch: batch.view(-1, LENGTH))  # [sequences, time]
    rb.append_transform(BurnInTransform([TensorDictSequential(embed, gru)], BURN_IN))
    collector = Collector(env, policy, frames_per_batch=200, total_frames=1000, auto_register_policy_transforms=False)
    stored = {}
    for data in collector:
        flat = data.reshape(-1)
        rb.extend(flat)
        stored.update(zip(map(tuple, flat["observation"].tolist()), flat["state"], strict=True))
    collector.shutdown()

    loss = DQNLoss(policy, action_space=spec, delay_value=True)
    target = SoftUpdate(loss, tau=0.05)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    relabelled = 0
    for _ in range(5):
        with set_recurrent_mode(True):
            batch = rb.sample()
            relabelled += check(batch).relabelled
            assert (batch["desired_goal"] == batch["desired_goal"][:, :1]).all()
            for sequence in batch:
                expected = burnt_in(sequence[0], stored, embed, gru)
                torch.testing.assert_close(sequence["state"][0], expected, rtol=1e-4, atol=1e-5)
            value = loss(batch)["loss"]
        assert value.isfinite()
        value.backward()
        assert all(parameter.grad.isfinite().all() for parameter in loss.value_network_params.values(True, True))
        optimizer.step()
        optimizer.zero_grad()
        target.step()
    assert relabelled > 0.6 * 5 * 16 * (LENGTH - BURN_IN)


@torch.no_grad()
def burnt_in(first, stored, embed, gru):
    """The recurrent state after the steps before the first one, under the goal that this has now."""
    step = torch.tensor([0.0, 0.0, 1.0])
    observations = [first["observation"] - back * step for back in range(BURN_IN, 0, -1)]
    state = stored[tuple(observations[0].tolist())]
    for observation in observations:
        embedding = embed.module(torch.cat([observation, first["desired_goal"]]))
        _, state = gru.gru(embedding.view(1, 1, -1), state.unsqueeze(1))
        state = state.squeeze(1)
    return state
