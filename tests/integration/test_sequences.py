"""Sampled sequences for recurrent policies: one goal per sequence, and the done flags of slice samplers."""

from itertools import chain, cycle, islice

import pytest
import torch
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.data import Sequence as SequenceUnit

from support.factories import make_transform
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import Goals, World

LENGTH = 4  # steps of a sequence
SIZE = 192  # rows of a storage
EPISODES = [
    ["go"] * (length - 1) + [end]
    for length, end in ((7, "truncated"), (11, "terminated"), (5, "truncated"), (9, "terminated"))
]


def buffer(ndim=1, kind=TensorDictReplayBuffer, her_ratio=1.0, strategy="future", sequence_length=LENGTH, **options):
    hindsight = make_transform(strategy=strategy, her_ratio=her_ratio, sequence_length=sequence_length, capacity=1000)
    storage = LazyTensorStorage(SIZE, ndim=ndim)
    return kind(storage=storage, transform=hindsight, **({"batch_size": LENGTH * 16} | options))


def recorded_in(rb, strategy="future", her_ratio=1.0):
    return Recorded(rb, Oracle({strategy: 1.0}, 1000, her_ratio), World(4, Goals()))


def writes(recorded, layout="flat", write=Recorded.play, episodes=EPISODES):
    """Write 6 steps of each of 4 environments, 10 times, into a storage of 48 steps. Yield after each write."""
    lanes = [chain.from_iterable(cycle(episodes[number:] + episodes[:number])) for number in range(4)]
    for _ in range(10):
        write(recorded, [[*islice(lane, 6)] for lane in lanes], layout)
        yield


def parts_of(recorded, rows):
    return [recorded.oracle.place[uid][0] for uid in rows["uid"].tolist()]


def check_sequences(recorded, batch, length=LENGTH):
    """Check a batch of sequences, each with one goal, which its last transition may get; return the relabelled share.

    Transitions of other episodes than the last transition's keep their goals.
    """
    batch = batch.reshape(-1)
    recorded.check(batch)
    share = []
    for rows in batch.split(length):
        parts = parts_of(recorded, rows)
        is_own = torch.tensor([part is parts[-1] for part in parts])
        relabelled = rows["hindsight", "relabelled"].squeeze(-1)
        assert torch.equal(relabelled, is_own & relabelled[-1])
        assert len(rows["desired_goal"][is_own].unique(dim=0)) == 1
        if relabelled[-1]:
            goal = tuple(recorded.world.goals.pairs(rows["desired_goal"][-1:])[0].tolist())
            assert goal in recorded.oracle.goals(int(rows["uid"][-1]))
        share.append(bool(relabelled[-1]))
    return sum(share) / len(share)


def step_by_step(recorded, moves, layout):
    """Write one step of all environments after the other, with the number of each step in its episode."""
    lanes = [recorded.world.play(env, each) for env, each in enumerate(moves)]
    rows = [row for step in zip(*lanes, strict=True) for row in step]
    recorded.write(rows, recorded.world.tensordict(rows).set("step", torch.tensor([row.step for row in rows])))


SLICES = {"slice_len": LENGTH, "truncated_key": None}
BY_TRAJECTORY = {"traj_key": ("collector", "traj_ids")}
SAMPLED = {  # a sample unit finds episodes only by their done flags, so it needs a storage [environments, time]
    "SliceSampler": lambda: {"sampler": SliceSampler(**SLICES)},
    "another truncated_key": lambda: {"sampler": SliceSampler(**SLICES | {"truncated_key": ("slice", "truncated")})},
    "num_slices": lambda: {"sampler": SliceSampler(num_slices=16, truncated_key=None)},
    "pad_output": lambda: {"sampler": SliceSampler(**SLICES, strict_length=False, pad_output=True, **BY_TRAJECTORY)},
    "fragmented": lambda: {"sampler": SliceSampler(**SLICES, fragmented=True, step_key="step", **BY_TRAJECTORY)},
    "ndim=2": lambda: {"sampler": SliceSampler(**SLICES), "ndim": 2},
    "ReplayBuffer": lambda: {"sampler": SliceSampler(slice_len=LENGTH), "kind": ReplayBuffer},
    "SliceSamplerWithoutReplacement": lambda: {"sampler": SliceSamplerWithoutReplacement(**SLICES)},
    "PrioritizedSliceSampler": lambda: {"sampler": PrioritizedSliceSampler(SIZE, 0.7, 0.5, **SLICES)},
    "Sequence, padded": lambda: {"sample_unit": SequenceUnit(2, burn_in=1, bootstrap=1), "ndim": 2},
    "Sequence, stopped": lambda: {"sample_unit": SequenceUnit(LENGTH, "stop"), "ndim": 2},
    "Sequence, every other step": lambda: {"sample_unit": SequenceUnit(LENGTH, dilation=2), "ndim": 2},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sequence_gets_one_goal_that_its_last_transition_may_get(name):
    options = SAMPLED[name]()
    recorded = recorded_in(buffer(**options))
    short = [["go", "terminated"]] if name == "pad_output" else []
    write = step_by_step if name == "fragmented" else Recorded.play
    shares = []
    for _ in writes(recorded, "lanes" if "ndim" in options else "flat", write, EPISODES + short):
        batch = recorded.rb.sample()
        shares.append(check_sequences(recorded, batch))
        assert all(len({id(part) for part in parts_of(recorded, rows)}) == 1 for rows in batch.split(LENGTH))
    assert sum(shares) > 0.7 * len(shares)
    assert not short or not batch["collector", "mask"].all()


@pytest.mark.parametrize(
    "options",
    [
        {"sample_unit": SequenceUnit(LENGTH, episode_boundary="include_reset")},
        {"sampler": PrioritizedSliceSampler(SIZE, 0.7, 0.5, **SLICES)},  # crosses episodes of a full storage
    ],
    ids=["include_reset", "PrioritizedSliceSampler"],
)
def test_a_sequence_across_episodes_has_the_new_goal_in_the_episode_of_its_last_transition(options):
    recorded = recorded_in(buffer(ndim=2, **options), her_ratio=0.5)  # so that the oracle accepts original goals
    list(writes(recorded, "lanes"))
    batches = [recorded.rb.sample() for _ in range(5)]
    assert sum(check_sequences(recorded, batch) for batch in batches) > 0.3 * 5
    sequences = [rows for batch in batches for rows in batch.split(LENGTH)]
    assert sum(len({id(part) for part in parts_of(recorded, rows)}) > 1 for rows in sequences) > 10


def test_a_trajectory_that_is_one_row_of_the_storage_is_a_sequence():
    """From data [lanes, time] in a one-dimensional storage, whole rows are sampled, [batch, time]."""
    recorded = recorded_in(buffer(kind=ReplayBuffer, sequence_length=12, batch_size=16))
    for end in ("truncated", "terminated"):
        recorded.play([["go"] * 11 + [end]] * 4, "lanes")
        batch = recorded.rb.sample()
        assert batch.shape == (16, 12)
        assert check_sequences(recorded, batch, 12) == 1.0


def test_the_share_and_the_goals_of_sequences_have_the_probabilities_of_their_last_transitions():
    rb = buffer(her_ratio=0.8, sampler=SliceSampler(**SLICES), batch_size=LENGTH * 6000)
    recorded = recorded_in(rb, her_ratio=0.8)
    recorded.play([["go"] * 8 + ["truncated"]])
    assert recorded.p_value(rb.sample()[LENGTH - 1 :: LENGTH]) > 1e-3
