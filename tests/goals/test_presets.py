"""Mixtures and extra goals have the joint distributions of OGBench's presets: steps, members and all goals."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, Unbounded

from support.agreement import LEVEL, POWER, Agreement, check_consistent, evenly_on, frequencies, outcomes_of, width_of
from support.draws import transitions
from support.factories import WAYS_TO_COPY, make_augmentation, make_buffer, make_transform
from support.n_step_oracle import NStepOracle
from support.named import STORAGES
from support.oracle import RELABELLED, Oracle
from support.presets import G99, Ahead, Preset, alone, anywhere, current, later, past_desired, presets, variants
from support.streams import Stream, extend, rows_of, write
from torchrl_her import Current, Future, Geometric, GoalStrategy, Mixture, PastDesired, Random, Subgoal, uniform
from torchrl_her.episodes import tracker

SHORT = {0: 9, 1: 4, 2: 1, 3: 6}  # episodes and their lengths
LONG = {0: 40, 1: 7, 2: 1, 3: 12}
STEPS = {9: 3, 40: 25}  # the steps of subgoals, by the length of the longest episode
NAMES = list(presets(1))


def ogbench(discount=0.99):
    return Mixture({Current(): 0.2, Geometric(discount): 0.5, Random(): 0.3})


def options_of(name, steps):
    """Return the arguments of HERTransform for a preset."""
    actor = {"actor_goal": Future(own=False)}
    return {
        "GCIVL and GCIQL": {"strategy": ogbench(), "extra_goals": actor},
        "HIQL": {
            "strategy": ogbench(),
            "extra_goals": {
                "high": Future(own=False),
                "target": Subgoal(steps, limit="high"),
                "low": Subgoal(steps, limit=None),
            },
        },
        "CRL": {"strategy": Geometric(0.99), "extra_goals": actor},
        "QRL": {"strategy": "random", "extra_goals": actor},
        "stitch": {
            "strategy": ogbench(),
            "extra_goals": {"actor_goal": Mixture({Future(own=False): 0.5, Random(): 0.5})},
        },
        "a subgoal of the desired goal": {"strategy": ogbench(), "extra_goals": actor | {"subgoal": Subgoal(steps)}},
        "mrl": {"strategy": Mixture({Future(): 0.5, PastDesired(): 0.375, Random(): 0.125}), "her_ratio": 0.9},
    }[name]


def batches(name, lengths, count, **options):
    """Yield samples, ``count`` transitions in total, of a buffer with whole episodes."""
    steps = STEPS[max(lengths.values())]
    transform = make_transform(capacity=2000, info=True, **({"her_ratio": 1.0} | options_of(name, steps) | options))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2000), transform=transform, batch_size=100_000)
    for number, length in lengths.items():
        rb.extend(transitions(number, 0, length, length))
    for _ in range(0, count, rb.batch_size):
        yield rb.sample()


def sampled(name, lengths, count, **options):
    """Return the counted outcomes of ``count`` transitions."""
    agreement = Agreement(presets(STEPS[max(lengths.values())])[name], lengths, evenly_on(lengths))
    for batch in batches(name, lengths, count, **options):
        check_consistent(batch, agreement.preset)
        agreement.count(outcomes_of(batch, agreement.preset, agreement.width))
    return agreement


def draws_of(name):
    """Enough for the power that is required, which a test computes."""
    return 400_000 if name == "stitch" else 200_000


@pytest.mark.parametrize("name", NAMES)
def test_goals_have_the_joint_distribution_of_the_preset(name):
    assert sampled(name, SHORT, draws_of(name)).p_value() > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ten_million_goals_have_the_joint_distribution_of_the_preset(name):
    assert sampled(name, LONG, 10_000_000).p_value() > LEVEL


@pytest.mark.parametrize("lengths", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_draws_is_large_enough_to_detect_every_mistake(name, lengths):
    count = draws_of(name) if lengths == SHORT else 10_000_000
    preset = presets(STEPS[max(lengths.values())])[name]
    agreement = Agreement(preset, lengths, evenly_on(lengths))
    powers = {mistake: agreement.power(wrong, count) for mistake, wrong in variants(preset).items()}
    assert len(powers) >= 5
    assert {mistake: power for mistake, power in powers.items() if power < POWER} == {}


@pytest.mark.parametrize(
    "mistake", ["a discount of 0.985", "a discount of 0.995", "geometric with double weight on the end"]
)
def test_the_computed_power_is_the_share_of_rejections(mistake):
    """The test uses 10,000 draws, for which the power is neither 0 nor 1."""
    preset = presets(3)["CRL"]
    agreement = Agreement(preset, SHORT, evenly_on(SHORT))
    wrong = variants(preset)[f"desired_goal: {mistake}"]
    _, probabilities = agreement.distribution(wrong)
    rejected = 0
    for counts in np.random.default_rng(0).multinomial(10_000, probabilities / probabilities.sum(), size=500):
        agreement.counts = counts
        rejected += agreement.p_value() < LEVEL
    assert 0.3 < rejected / 500 < 0.8
    assert agreement.power(wrong, 10_000) == pytest.approx(rejected / 500, abs=0.06)


class Chooses(GoalStrategy):
    """Selects the steps that a function returns."""

    def __init__(self, step_of):
        self.step_of = step_of

    def select(self, choice):
        return choice.start + torch.minimum(self.step_of(choice), choice.length - 1)


def double_end(choice):
    return uniform(choice.step + 1, choice.length + 1)


def geometric_from_the_own_outcome(choice):
    return choice.step + torch.distributions.Geometric(0.01).sample(choice.step.shape).long()


class OneNumber:
    """Draws a geometric and a uniform goal with the same random number."""

    def geometric(self, choice):
        self.share = torch.rand(choice.step.shape, dtype=torch.float64)
        return choice.step + 1 + (torch.log1p(-self.share) / np.log(0.99)).long()

    def later(self, choice):
        first = torch.minimum(choice.step + 1, choice.length - 1)
        return first + (self.share * (choice.length - first)).long()


one_number = OneNumber()
WRONG = {
    "a discount of 0.985": ("GCIVL and GCIQL", {"strategy": ogbench(0.985)}),
    "a discount of 0.995": ("GCIVL and GCIQL", {"strategy": ogbench(0.995)}),
    "own outcome included in geometric": ("CRL", {"strategy": Chooses(geometric_from_the_own_outcome)}),
    "own outcome included in later": ("GCIVL and GCIQL", {"extra_goals": {"actor_goal": Future()}}),
    "own outcome excluded from future": (
        "mrl",
        {"strategy": Mixture({Future(own=False): 0.5, PastDesired(): 0.375, Random(): 0.125})},
    ),
    "double weight on the end": ("QRL", {"extra_goals": {"actor_goal": Chooses(double_end)}}),
    "a subgoal without its limit": (
        "a subgoal of the desired goal",
        {"extra_goals": {"actor_goal": Future(own=False), "subgoal": Subgoal(3, limit=None)}},
    ),
    "one number for both goals": (
        "CRL",
        {"strategy": Chooses(one_number.geometric), "extra_goals": {"actor_goal": Chooses(one_number.later)}},
    ),
    "0.02 more of one member": (
        "GCIVL and GCIQL",
        {"strategy": Mixture({Current(): 0.22, Geometric(0.99): 0.48, Random(): 0.3})},
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_draws_with_a_mistake_are_rejected(mistake):
    name, options = WRONG[mistake]
    assert sampled(name, SHORT, draws_of(name), **options).p_value() < LEVEL


@pytest.mark.parametrize(("key", "rule"), [("desired_goal", G99), ("actor_goal", later)])
def test_each_goal_of_the_pair_from_one_number_has_the_correct_distribution(key, rule):
    """Therefore, the pair is rejected only because its goals depend on each other."""
    name, options = WRONG["one number for both goals"]
    agreement = Agreement(Preset(alone(rule)), SHORT, evenly_on(SHORT))
    for batch in batches(name, SHORT, draws_of(name), **options):
        agreement.count(outcomes_of(batch.set("desired_goal", batch[key]), agreement.preset, agreement.width))
    assert agreement.p_value() > LEVEL


# Other buffers

PRESET = Preset(
    ((current, 0.2), (G99, 0.4), (anywhere, 0.2), (past_desired, 0.2)),
    {"actor_goal": alone(later), "subgoal": Ahead(3, "desired_goal")},
)
OPTIONS = {
    "strategy": Mixture({Current(): 0.2, Geometric(0.99): 0.4, Random(): 0.2, PastDesired(): 0.2}),
    "extra_goals": {"actor_goal": Future(own=False), "subgoal": Subgoal(3)},
    "info": True,
}
STREAM = Stream(
    lanes=4,
    lengths=((4, "truncated"), (7, "terminated"), (1, "truncated"), (5, "terminated")),
    chunk=4,
    writes=3,
    layout="flat with ids",
    rows=12,
    capacity=500,
)
LANES = replace(STREAM, layout="[lanes, time]")
# Episodes are published as they grow. The last episodes are running, and their last steps are only in the storage.
RUNNING = replace(STREAM, lengths=((100, "truncated"), (3, "truncated")), first_publication=3)
DESIRED_ROWS = 6  # rows of the goal table for desired goals, one for each episode
# Two rounds of three episodes fill the table. Five rounds are written.
WRAPPED = replace(STREAM, lanes=1, lengths=((5, "truncated"), (8, "terminated"), (3, "truncated")), chunk=16, writes=5)
SETTINGS = {
    **{
        f"a storage of {ndim} dimensions": (LANES, {"storage": STORAGES[f"LazyTensorStorage(ndim={ndim})"]})
        for ndim in (2, 3)
    },
    "a packed storage of 2 dimensions": (LANES, {"storage": STORAGES["PackedStorage(ndim=2)"]}),
    "a storage in a file": (STREAM, {"storage": STORAGES["LazyMemmapStorage"]}),
    "lanes one after the other": (STREAM, {}),
    "time first": (replace(STREAM, layout="flat, time first, with ids"), {}),
    "one step of all lanes at a time": (replace(STREAM, layout="one step of all lanes, with ids"), {}),
    "a storage that wrapped around": (replace(STREAM, rows=8), {}),
    "a storage of lanes that wrapped around": (replace(LANES, rows=8), {}),
    "a goal table that wrapped around": (replace(WRAPPED, rows=32, capacity=32), {}),
    "running episodes": (RUNNING, {}),
    "running episodes in a storage of lanes": (replace(RUNNING, layout="[lanes, time]"), {}),
    "redundant goals left out": (replace(STREAM, compact=True), {}),
    "3-step returns": (replace(LANES, n=3), {}),
    "3-step returns, redundant goals left out": (replace(LANES, n=3, compact=True), {}),
    "sequences": (STREAM, {"sequence_length": 3}),
    "shared memory": (STREAM, {"shared": True}),
}


BATCH = 30_000


def filled(stream, storage=None, sequence_length=None, shared=False):
    """Write a stream to a buffer with the goals of PRESET; return the buffer and its oracle."""
    spec = Unbounded((2,)) if shared else None
    capacity = stream.capacity + DESIRED_ROWS
    transform = make_transform(stream, capacity=capacity, sequence_length=sequence_length, goal_spec=spec, **OPTIONS)
    of_buffer = {"shared": True} if shared else {}
    if sequence_length:
        of_buffer["sampler"] = SliceSampler(slice_len=sequence_length, truncated_key=None)
    rb = make_buffer(stream, transform, storage=storage, batch_size=BATCH, **of_buffer)
    oracle = (NStepOracle if stream.n else Oracle)(stream)
    with mock.patch.object(tracker, "FIRST_PUBLICATION", stream.first_publication):
        for lanes in stream:
            if rb.storage.ndim == 3:
                extend(rb, lanes, with_ids=False)
                oracle.write(rows_of(lanes))
            else:
                write(rb, lanes, stream.layout, oracle)
    return rb, oracle


def lengths_in_table(oracle):
    """Return the lengths of the episodes in the goal table, and check that all are complete."""
    possible, certain = oracle.in_table()
    lengths = {e: n for e, n in oracle.published.items() if oracle.episodes[e][0].uid in certain}
    assert sum(lengths.values()) == len(possible) == len(certain)
    return lengths


def agreement_of(rb, oracle, every=1, count=60_000):
    """Return the counted outcomes of transitions, or of the last transitions of sequences of length ``every``."""
    lengths = lengths_in_table(oracle)
    is_known = torch.zeros(len(oracle.transitions), dtype=torch.bool)
    for uid, window in oracle.windows.items():
        is_known[uid] = window[-1].step < lengths.get(window[-1].episode, 0)
    outcomes = []
    for _ in range(0, count, BATCH):
        batch = rb.sample()
        check_consistent(batch, PRESET)
        last = batch[every - 1 :: every]
        assert torch.equal(last[RELABELLED][:, 0], is_known[last["uid"]])
        for key in (RELABELLED, ("hindsight", "member"), *PRESET.keys):
            assert torch.equal(batch[key], last[key].repeat_interleave(every, 0)), key
        outcomes.append(outcomes_of(last[last[RELABELLED][:, 0]], PRESET, width_of(lengths)))
    outcomes = np.concatenate(outcomes, axis=1)
    agreement = Agreement(PRESET, lengths, frequencies(outcomes[0], width_of(lengths)), estimated=True)
    agreement.count(outcomes)
    return agreement


@pytest.mark.parametrize("setting", SETTINGS)
def test_goals_have_the_joint_distribution_of_the_preset_in(setting):
    stream, options = SETTINGS[setting]
    assert agreement_of(*filled(stream, **options), every=options.get("sequence_length", 1)).p_value() > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_millions_of_goals_have_the_joint_distribution_of_the_preset_in(setting):
    stream, options = SETTINGS[setting]
    every = options.get("sequence_length", 1)
    agreement = agreement_of(*filled(stream, **options), every=every, count=2_000_000 * every)
    assert agreement.p_value() > LEVEL
    draws = agreement.counts.sum()
    powers = {mistake: agreement.power(wrong, draws) for mistake, wrong in variants(PRESET).items()}
    assert {mistake: power for mistake, power in powers.items() if power < POWER} == {}


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_goals_have_the_joint_distribution_of_the_preset_after(way, tmp_path):
    rb, oracle = filled(STREAM)
    copied = WAYS_TO_COPY[way](rb, filled(replace(STREAM, writes=0))[0], tmp_path)
    assert agreement_of(copied, oracle).p_value() > LEVEL


def test_copies_have_the_joint_distribution_of_the_preset():
    """HindsightAugmentation draws the goals of all copies of an episode in one call."""
    preset = Preset(alone(G99), {"actor_goal": alone(later), "subgoal": Ahead(3, "desired_goal")})
    extra = {"actor_goal": Future(own=False), "subgoal": Subgoal(3)}
    transform = make_augmentation(strategy=Geometric(0.99), extra_goals=extra, n_sampled_goal=2000)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50_000), transform=transform)
    for number, length in SHORT.items():
        rb.extend(transitions(number, 0, length, length))
    stored = rb.storage[:]
    relabelled = stored[RELABELLED][:, 0]
    assert relabelled.sum() == 2000 * sum(SHORT.values())
    for key in preset.keys:
        assert torch.equal(stored[key], stored["next", key])
        assert (stored[key][~relabelled, 1] == -1).all()
    agreement = Agreement(preset, SHORT, evenly_on(SHORT), estimated=True)
    agreement.count(outcomes_of(stored[relabelled], preset, agreement.width))
    assert agreement.p_value() > LEVEL
