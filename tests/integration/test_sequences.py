"""Sampled sequences for recurrent policies: one goal per sequence, and the done flags of slice samplers."""

from itertools import chain, cycle, islice

import pytest
import torch
from torchrl.data import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from torchrl.data import Sequence as SequenceUnit

from support.factories import make_transform
from support.named import named
from support.recorded import Recorded, recorded_in

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


def writes(recorded, layout="flat", write=Recorded.play, episodes=EPISODES):
    """Write 6 steps of each of 4 environments, 10 times, into a storage of 48 steps. Yield after each write."""
    lanes = [chain.from_iterable(cycle(episodes[number:] + episodes[:number])) for number in range(4)]
    for _ in range(10):
        write(recorded, [[*islice(lane, 6)] for lane in lanes], layout)
        yield


def parts_of(recorded, rows):
    return [recorded.oracle.place[uid][0] for uid in rows["uid"].tolist()]


def check(recorded, batch, length=LENGTH):
    """Check all entries of sequences, and return the relabelled share."""
    batch = batch.reshape(-1)
    recorded.check(batch)
    return recorded.check_sequences(batch, length)


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
    "SliceSamplerWithoutReplacement": lambda: {"sampler": named("SliceSamplerWithoutReplacement")(**SLICES)},
    "PrioritizedSliceSampler": lambda: {"sampler": PrioritizedSliceSampler(SIZE, 0.7, 0.5, **SLICES)},
    "Sequence, padded": lambda: {"sample_unit": SequenceUnit(2, burn_in=1, bootstrap=1), "ndim": 2},
    "Sequence, stopped": lambda: {"sample_unit": SequenceUnit(LENGTH, "stop"), "ndim": 2},
    "Sequence, every other step": lambda: {"sample_unit": SequenceUnit(LENGTH, dilation=2), "ndim": 2},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sequence_gets_one_goal_that_its_last_transition_may_get(name):
    options = SAMPLED[name]()
    recorded = recorded_in(buffer(**options), 4)
    short = [["go", "terminated"]] if name == "pad_output" else []
    write = step_by_step if name == "fragmented" else Recorded.play
    shares = []
    for _ in writes(recorded, "lanes" if "ndim" in options else "flat", write, EPISODES + short):
        batch = recorded.rb.sample()
        shares.append(check(recorded, batch))
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
    recorded = recorded_in(buffer(ndim=2, **options), 4, her_ratio=0.5)  # so that the oracle accepts original goals
    list(writes(recorded, "lanes"))
    batches = [recorded.rb.sample() for _ in range(5)]
    assert sum(check(recorded, batch) for batch in batches) > 0.3 * 5
    sequences = [rows for batch in batches for rows in batch.split(LENGTH)]
    assert sum(len({id(part) for part in parts_of(recorded, rows)}) > 1 for rows in sequences) > 10


def test_a_trajectory_that_is_one_row_of_the_storage_is_a_sequence():
    """From data [lanes, time] in a one-dimensional storage, whole rows are sampled, [batch, time]."""
    recorded = recorded_in(buffer(kind=ReplayBuffer, sequence_length=12, batch_size=16), 4)
    for end in ("truncated", "terminated"):
        recorded.play([["go"] * 11 + [end]] * 4, "lanes")
        batch = recorded.rb.sample()
        assert batch.shape == (16, 12)
        assert check(recorded, batch, 12) == 1.0
