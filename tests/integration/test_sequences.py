"""Sampled sequences for recurrent policies: one goal per sequence, and the done flags of slice samplers."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from torchrl.data import Sequence as SequenceUnit
from torchrl.envs import BurnInTransform, Compose, InitTracker, TransformedEnv
from torchrl.modules import MLP, GRUModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.objectives.value import TDLambdaEstimator

from support.factories import make_buffer, make_transform, seeded_sample
from support.goals import reached, reward_of
from support.named import STORAGES
from support.oracle import RELABELLED, Oracle, as_dicts
from support.streams import Stream, extend, make_tensordict, rows_of, write
from support.tape import check, collect, make_serial, make_tape
from torchrl_her import EnvReward

LENGTH = 4  # steps of a sequence
STREAM = Stream(
    lanes=4,
    lengths=((7, "truncated"), (11, "terminated"), (5, "truncated"), (9, "terminated")),
    chunk=6,
    writes=10,
    layout="flat with ids",
    rows=48,
    capacity=1000,
)
HALF = replace(STREAM, her_ratio=0.5)  # with this ratio, the oracle does not require relabelling
ENDS = torch.arange(LENGTH * 16).unsqueeze(-1) % LENGTH == LENGTH - 1  # the last transitions of sequences


def make(stream=STREAM, sequence_length=LENGTH, **options):
    transform = make_transform(stream, sequence_length=sequence_length)
    return make_buffer(stream, transform, **({"batch_size": LENGTH * 16} | options))


def writes(rb, oracle, write=extend):
    """Write the oracle's stream, by default in the storage's number of dimensions, and yield after each write."""
    for lanes in oracle.stream:
        write(rb, lanes)
        oracle.write(rows_of(lanes))
        yield


def filled(stream=STREAM, **options):
    """Return a full buffer and its oracle."""
    rb, oracle = make(stream, **options), Oracle(stream)
    list(writes(rb, oracle))
    return rb, oracle


def sequences_of(batch, oracle, length=LENGTH):
    """Yield each sequence of a batch with its stored transitions."""
    for sequence in batch.split(length):
        yield sequence, [oracle.transitions[uid] for uid in sequence["uid"].tolist()]


def check_sequences(batch, oracle, length=LENGTH):
    """Check every transition, and that each sequence has one goal, which its last transition may get.

    Return the share of relabelled sequences.
    """
    oracle.check(batch)
    all_relabelled = []
    for sequence, transitions in sequences_of(batch, oracle, length):
        assert {row.episode for row in transitions} == {transitions[-1].episode}
        ((goal, relabelled),) = {tuple(row.values()) for row in as_dicts(sequence, ["desired_goal", RELABELLED])}
        if relabelled:
            allowed = oracle.allowed_goals(transitions[-1])
            assert goal in allowed, f"{goal} is not for {transitions[-1]}"
        all_relabelled.append(relabelled)
    return sum(all_relabelled) / len(all_relabelled)


def check_as_it_grows(rb, oracle, write=extend):
    """Check a batch of sequences after each write, and that most of them are relabelled."""
    shares = [check_sequences(rb.sample(), oracle) for _ in writes(rb, oracle, write)]
    assert sum(shares) > 0.7 * len(shares)


SLICES = {"slice_len": LENGTH, "truncated_key": None}
LANES = STORAGES["LazyTensorStorage(ndim=2)"]  # [lanes, time]: Sequence finds episodes only by their done flags
SAMPLED = {
    "SliceSampler": lambda: {"sampler": SliceSampler(**SLICES)},
    "SliceSampler(num_slices=...)": lambda: {"sampler": SliceSampler(num_slices=16, truncated_key=None)},
    "SliceSampler(pad_output=True)": lambda: {"sampler": SliceSampler(**SLICES, strict_length=False, pad_output=True)},
    **{
        f"SliceSampler, {name}": lambda name=name: {"sampler": SliceSampler(**SLICES), "storage": STORAGES[name]}
        for name in ("LazyTensorStorage(ndim=2)", "LazyTensorStorage(ndim=3)", "LazyMemmapStorage")
    },
    "SliceSampler, ReplayBuffer": lambda: {"sampler": SliceSampler(slice_len=LENGTH), "kind": ReplayBuffer},
    "SliceSamplerWithoutReplacement": lambda: {"sampler": SliceSamplerWithoutReplacement(**SLICES)},
    "PrioritizedSliceSampler": lambda: {"sampler": PrioritizedSliceSampler(STREAM.size, 0.7, 0.5, **SLICES)},
    "Sequence, padded": lambda: {"sample_unit": SequenceUnit(2, burn_in=1, bootstrap=1), "storage": LANES},
    "Sequence, stopped": lambda: {"sample_unit": SequenceUnit(LENGTH, "stop"), "storage": LANES},
    "Sequence, every other step": lambda: {"sample_unit": SequenceUnit(LENGTH, dilation=2), "storage": LANES},
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_a_sequence_gets_one_goal_that_its_last_transition_may_get(strategy, name):
    stream = replace(STREAM, strategy=strategy)
    check_as_it_grows(make(stream, **SAMPLED[name]()), Oracle(stream))


@pytest.mark.parametrize("sampler", [{"slice_len": LENGTH}, {"num_slices": 8 * 16}])
def test_several_batches_of_one_call_contain_whole_sequences(sampler):
    rb, oracle = filled(sampler=SliceSampler(**sampler, truncated_key=None))
    batches = rb.sample(8 * 16 * LENGTH).split(16 * LENGTH)
    assert len(batches) == 8
    for batch in batches:
        assert check_sequences(batch, oracle) > 0.7


def test_num_slices_counts_the_slices_of_the_whole_call():
    rb, _ = filled(sampler=SliceSampler(num_slices=16, truncated_key=None))
    rb.sample(16 * LENGTH)  # 16 sequences of LENGTH steps
    with pytest.raises(RuntimeError, match=f"required={8 * LENGTH}"):
        rb.sample(8 * 16 * LENGTH)


def test_the_goal_of_a_sequence_has_the_distribution_of_its_last_transition():
    steps, count = 9, 6000
    stream = Stream(1, ((steps, "truncated"),), steps, 1, "flat with ids", rows=steps, her_ratio=0.8)
    rb, _ = filled(stream, sampler=SliceSampler(**SLICES))
    batch = seeded_sample(rb, LENGTH * count)[LENGTH - 1 :: LENGTH]  # the last transitions
    relabelled = batch[RELABELLED].squeeze(-1)
    assert abs(float(relabelled.float().mean()) - 0.8) < 5 * (0.8 * 0.2 / count) ** 0.5
    rows = as_dicts(batch[relabelled], ["uid", "desired_goal"])
    drawn = Counter((row["uid"], row["desired_goal"][1] - 1) for row in rows)
    for last in range(LENGTH - 1, steps):
        total = sum(drawn[last, step] for step in range(last, steps))
        share = 1 / (steps - last)
        for step in range(last, steps):
            deviation = (share * (1 - share) / total) ** 0.5
            assert abs(drawn[last, step] / total - share) <= 5 * deviation, f"step {step} for {last}"


def test_without_sequence_length_each_transition_has_its_own_goal():
    rb, oracle = filled(sequence_length=None, sampler=SliceSampler(**SLICES))
    batch = rb.sample()
    oracle.check(batch)
    goals = batch["desired_goal"].view(-1, LENGTH, 2)
    assert (goals != goals[:, :1]).any()


def test_a_sequence_across_episodes_has_the_new_goal_in_the_episode_of_its_last_transition():
    """With episode_boundary="include_reset", windows cross resets. Transitions of other episodes keep their goals."""
    rb, oracle = filled(HALF, storage=LANES, sample_unit=SequenceUnit(LENGTH, episode_boundary="include_reset"))
    crossed = relabelled = 0
    for _ in range(20):
        batch = rb.sample()
        oracle.check(batch)
        for sequence, transitions in sequences_of(batch, oracle):
            with_last = torch.tensor([row.episode == transitions[-1].episode for row in transitions])
            new = sequence[RELABELLED].squeeze(-1)
            assert torch.equal(new, with_last & new[-1])
            assert len(sequence["desired_goal"][with_last].unique(dim=0)) == 1
            crossed += int(not with_last.all())
            relabelled += int(new.any())
    assert crossed > 20
    assert relabelled > 100


def test_a_trajectory_that_is_one_row_of_the_storage_is_a_sequence():
    """From data [lanes, time] in a one-dimensional storage, whole rows are sampled, [batch, time]."""
    stream = Stream(8, ((12, "truncated"), (12, "terminated")), 12, 3, "[lanes, time]", rows=3)
    rb = make(stream, 12, storage=LazyTensorStorage, kind=ReplayBuffer, batch_size=16)
    oracle = Oracle(stream)
    for lanes in stream:
        write(rb, lanes, stream.layout, oracle)
        batch = rb.sample()
        assert batch.shape == (16, 12)
        assert check_sequences(batch.reshape(-1), oracle, 12) == 1.0


@pytest.mark.parametrize("hindsight", [False, True])
def test_prioritized_slices_of_a_full_storage_of_lanes_cross_episodes_and_have_correct_goals(hindsight):
    """TorchRL's PrioritizedSliceSampler with ndim=2 crosses episodes, with hindsight and without."""
    sampler = PrioritizedSliceSampler(STREAM.size, 0.7, 0.5, **SLICES)
    transform = make_transform(STREAM, sequence_length=LENGTH) if hindsight else None
    rb = make_buffer(STREAM, transform, storage=LANES, hindsight=hindsight, sampler=sampler)
    oracle = Oracle(HALF)
    for _ in writes(rb, oracle):
        pass
    batch = rb.sample()
    episodes = torch.tensor([oracle.transitions[uid].episode for uid in batch["uid"].tolist()]).view(-1, LENGTH)
    of_last = episodes == episodes[:, -1:]
    assert not of_last.all()
    if hindsight:
        assert oracle.check(batch) > 0
        assert not (batch[RELABELLED].view(-1, LENGTH) & ~of_last).any()


@pytest.mark.parametrize("truncated_key", [None, ("next", "truncated")])
def test_an_ensemble_of_buffers_samples_sequences_and_overwrites_flags_like_its_members(truncated_key):
    members = [make(sampler=SliceSampler(slice_len=LENGTH, truncated_key=truncated_key)) for _ in range(STREAM.lanes)]
    rb, oracle = ReplayBufferEnsemble(*members, batch_size=LENGTH * 16), Oracle(STREAM)
    for lanes in STREAM:
        for member, lane in zip(members, lanes, strict=True):
            extend(member, [lane])
        oracle.write(rows_of(lanes))
    batch = rb.sample()
    assert batch.shape[:2] == (4, LENGTH * 4)
    batch = batch.reshape(-1)
    if truncated_key is None:
        assert check_sequences(batch, oracle) > 0.7
    else:
        assert torch.equal(batch["next", "terminated"].view(-1, 1), stored_terminations(batch, oracle))
        assert not torch.equal(goal_is_reached(batch), stored_terminations(batch, oracle))


def stored_terminations(batch, oracle):
    return torch.tensor([[oracle.transitions[uid].terminated] for uid in batch["uid"].tolist()])


def goal_is_reached(batch):
    return reached(batch["next", "achieved_goal"], batch["desired_goal"]).unsqueeze(-1)


def test_sequences_of_lanes_that_alternate_in_the_storage_have_one_goal():
    """The storage has one step of all lanes after the other. fragmented=True finds sequences by trajectory and step."""
    sampler = SliceSampler(**SLICES, fragmented=True, step_key="step", traj_key=("collector", "traj_ids"))

    def extend_step_by_step(rb, lanes):
        rows = rows_of(zip(*lanes, strict=True))
        rb.extend(make_tensordict(rows).set("step", torch.tensor([row.step for row in rows])))

    check_as_it_grows(make(sampler=sampler), Oracle(STREAM), extend_step_by_step)


def test_slices_that_are_shorter_than_a_sequence_are_refused():
    sampler = SliceSampler(slice_len=LENGTH, strict_length=False, traj_key=("collector", "traj_ids"))
    rb, _ = filled(replace(STREAM, lanes=1, lengths=((3, "truncated"),), chunk=3, writes=1), sampler=sampler)
    with pytest.raises(ValueError, match="Set sequence_length to the slice length of the sampler"):
        rb.sample(LENGTH)


# The done flags


def test_a_slice_sampler_overwrites_recomputed_flags_in_a_tensordict_buffer():
    """After the transform, it writes the stored flags, with the ends of slices as truncations."""
    rb, oracle = filled(sampler=SliceSampler(slice_len=LENGTH))
    batch = rb.sample()
    stored = stored_terminations(batch, oracle)
    assert (goal_is_reached(batch) & batch[RELABELLED] & ~stored).any()
    assert torch.equal(batch["next", "terminated"], stored)
    assert torch.equal(batch["next", "truncated"], ENDS)


REMEDIES = {
    "truncated_key=None": {"truncated_key": None},
    "separate marks": {"truncated_key": ("slice", "truncated")},
    "ReplayBuffer": {},
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_remedies_keep_the_recomputed_flags(remedy):
    kind = ReplayBuffer if remedy == "ReplayBuffer" else None
    rb, oracle = filled(kind=kind, sampler=SliceSampler(slice_len=LENGTH, **REMEDIES[remedy]))
    batch, info = rb.sample(return_info=True)
    check_sequences(batch, oracle)  # flags included
    assert (batch["next", "terminated"] & batch[RELABELLED]).any()
    if remedy == "separate marks":
        assert torch.equal(batch["slice", "truncated"], ENDS)
    if remedy == "ReplayBuffer":
        assert torch.equal(info["next", "truncated"], ENDS)


GAMMA, LAMBDA = 0.9, 0.7


def value_of(achieved, desired):
    """Return the value of a pair of goals ``[..., (episode, cell)]``, which only depends on the cells."""
    return achieved[..., 1:] / 7 - desired[..., 1:] / 11


def targets(batch):
    """Return TorchRL's TD(lambda) estimates of consecutive sequences."""
    values = TensorDictModule(value_of, ["achieved_goal", "desired_goal"], ["state_value"])
    estimator = TDLambdaEstimator(gamma=GAMMA, lmbda=LAMBDA, value_network=values)
    return estimator(batch.view(-1, LENGTH))["value_target"].flatten().tolist()


def targets_in_plain_python(batch):
    rows = as_dicts(batch, ["desired_goal", ("next", "achieved_goal")])
    expected = []
    for begin in range(0, len(rows), LENGTH):
        following, returns = None, []
        for goal, outcome in reversed([tuple(row.values()) for row in rows[begin : begin + LENGTH]]):
            value = 0.0 if outcome == goal else outcome[1] / 7 - goal[1] / 11  # a reached goal ends the episode
            if following is None or outcome == goal:
                following = value
            following = reward_of(outcome, goal) + GAMMA * ((1 - LAMBDA) * value + LAMBDA * following)
            returns.append(following)
        expected += reversed(returns)
    return expected


def test_with_separate_marks_value_targets_end_when_the_new_goal_is_reached():
    """Goals can be earlier outcomes, so that some are reached in the middle of a sequence."""
    stream = replace(STREAM, strategy="episode", lengths=((8, "truncated"),), chunk=8, writes=6, rows=48)
    marked, _ = filled(stream, sampler=SliceSampler(slice_len=LENGTH, truncated_key=("slice", "truncated")))
    batch = seeded_sample(marked)
    assert batch[RELABELLED].all()
    assert batch["next", "terminated"].view(-1, LENGTH)[:, :-1].any()
    batch["next", "truncated"] |= batch["slice", "truncated"]
    batch["next", "done"] = batch["next", "terminated"] | batch["next", "truncated"]
    assert targets(batch) == pytest.approx(targets_in_plain_python(batch), rel=1e-4)

    overwritten, _ = filled(stream, sampler=SliceSampler(slice_len=LENGTH))
    batch = seeded_sample(overwritten)
    assert targets(batch) != pytest.approx(targets_in_plain_python(batch), rel=1e-4)


# A recurrent policy

BURN_IN, HIDDEN = 2, 8


def test_a_recurrent_policy_learns_from_sequences_with_burn_in_under_the_new_goal():
    inputs = ["observation", "desired_goal"]
    embed = TensorDictModule(MLP(in_features=6, out_features=HIDDEN, num_cells=[16]), inputs, ["embedding"])
    gru = GRUModule(HIDDEN, HIDDEN, in_keys=["embedding", "state", "is_init"], out_keys=["features", ("next", "state")])
    head = TensorDictModule(nn.Linear(HIDDEN, 2), ["features"], ["action_value"])
    env = TransformedEnv(make_serial(*range(4), discrete=True), Compose(InitTracker(), gru.make_tensordict_primer()))
    spec = env.action_spec_unbatched
    policy = TensorDictSequential(embed, gru, head, QValueModule(spec=spec))
    hindsight = make_transform(reward=EnvReward(make_tape(discrete=True)), sequence_length=LENGTH, capacity=2000)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(2000),
        sampler=SliceSampler(slice_len=LENGTH),
        transform=hindsight,
        batch_size=LENGTH * 16,
    )
    rb.append_transform(lambda batch: batch.view(-1, LENGTH))  # [sequences, time]
    rb.append_transform(BurnInTransform([TensorDictSequential(embed, gru)], BURN_IN))
    stored = {}
    for data in collect(env, 200, 5, policy=policy, auto_register_policy_transforms=False):
        flat = data.reshape(-1)
        rb.extend(flat)
        stored.update(zip(map(tuple, flat["observation"].tolist()), flat["state"], strict=True))

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
    """Return the recurrent state after the burn-in steps, under the current goal of the sequence."""
    step = torch.tensor([0.0, 0.0, 1.0])
    observations = [first["observation"] - back * step for back in range(BURN_IN, 0, -1)]
    state = stored[tuple(observations[0].tolist())]
    for observation in observations:
        embedding = embed.module(torch.cat([observation, first["desired_goal"]]))
        _, state = gru.gru(embedding.view(1, 1, -1), state.unsqueeze(1))
        state = state.squeeze(1)
    return state
