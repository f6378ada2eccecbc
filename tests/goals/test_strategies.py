"""Strategies as arguments, the entries that they add, and their random numbers."""

import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.factories import make_transform, seeded_sample
from support.world import Goals, World
from torchrl_her import Current, Episode, Final, Future, Geometric, Mixture, PastDesired, Random, Subgoal, uniform

LEVEL = 1e-3
RELABELLED = ("hindsight", "relabelled")
NAMES = {
    "current": Current(),
    "future": Future(),
    "final": Final(),
    "episode": Episode(),
    "random": Random(),
    "past_desired": PastDesired(),
}


def filled(*lengths, **options):
    """Return a buffer with whole episodes of these lengths."""
    world = World(1, Goals())
    moves = [move for length in lengths for move in [*["go"] * (length - 1), "truncated"]]
    transform = make_transform(**{"her_ratio": 1.0, "capacity": 1000} | options)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)
    rb.extend(world.tensordict(world.play(0, moves)))
    return rb


# Random numbers


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_a_sample_reproducible_by_name_and_as_an_object(name):
    rb = filled(100, 50, strategy=name, her_ratio=0.5)
    samples = [seeded_sample(rb, 256, seed=seed) for seed in (7, 7, 8)]
    samples.append(seeded_sample(filled(100, 50, strategy=NAMES[name], her_ratio=0.5), 256, seed=7))
    assert (samples[0] == samples[1]).all()
    assert not (samples[0] == samples[2]).all()
    assert torch.equal(samples[0]["desired_goal"], samples[3]["desired_goal"])


def test_steps_of_a_span_of_millions_are_drawn_without_gaps():
    span = 3 * 2**23  # torch.rand in float32 has too few values and would skip every third integer
    drawn = uniform(torch.full((100_000,), 5), torch.tensor(5 + span)) - 5
    assert 0 <= drawn.min() < span / 1000
    assert span - span / 1000 < drawn.max() < span
    assert stats.chisquare(torch.bincount(drawn % 3)).pvalue > LEVEL
    assert stats.kstest(drawn / span, "uniform").pvalue > LEVEL


@pytest.mark.parametrize("her_ratio", [0.3, 0.8])
def test_transitions_are_relabelled_independently_of_their_position_in_the_batch(her_ratio):
    rb = filled(30, 1, 9, her_ratio=her_ratio)
    relabelled = np.stack([rb.sample(256)[RELABELLED][:, 0].numpy() for _ in range(200)])
    by_position = [relabelled.sum(0), (~relabelled).sum(0)]
    by_neighbour = [[(relabelled[:, :-1] & (relabelled[:, 1:] == each)).sum() for each in (False, True)]]
    by_neighbour += [[(~relabelled[:, :-1] & (relabelled[:, 1:] == each)).sum() for each in (False, True)]]
    for table in (by_position, by_neighbour):
        assert stats.chi2_contingency(table).pvalue > LEVEL
    per_batch = relabelled.sum(1)  # their dispersion is that of independent draws
    dispersion = ((per_batch - 256 * her_ratio) ** 2 / (256 * her_ratio * (1 - her_ratio))).sum()
    below = stats.chi2.cdf(dispersion, 200)
    assert 2 * min(below, 1 - below) > LEVEL


# Entries


def test_samples_have_further_entries_only_on_request():
    plain, informed, extra = (
        set(filled(9, 4, **options).sample(20).keys(True))
        for options in (
            {},
            {"strategy": Mixture({"final": 1.0}), "info": True},
            {"extra_goals": {("high", "goal"): "final"}},
        )
    )
    assert informed - plain == {("hindsight", "steps_to_goal"), ("hindsight", "member")}
    assert extra - plain == {"high", ("high", "goal"), ("next", "high"), ("next", "high", "goal")}


def test_an_extra_goal_may_replace_a_stored_copy_of_the_desired_goal():
    world = World(1, Goals())
    rb = filled(9, extra_goals={"observation_goal": "final"})
    data = world.tensordict(world.play(0, ["go", "go", "truncated"]))
    rb.empty()
    rb.extend(data.set("observation_goal", data["desired_goal"].clone()))
    assert rb.sample(20)["next", "observation_goal"].tolist() == [[0, 3]] * 20


def test_past_desired_keeps_the_goal_while_there_is_no_other_episode():
    batch = filled(9, strategy="past_desired").sample(50)
    assert not batch[RELABELLED].any()
    assert batch["desired_goal"].tolist() == [[0, 999]] * 50
    batch = filled(9, 1, strategy="past_desired").sample(50)
    batch = batch[batch[RELABELLED][:, 0]]
    other = 1 - batch["achieved_goal"][:, 0]
    assert torch.equal(batch["desired_goal"], torch.stack([other, torch.where(other == 1, 5.0, 999.0)], 1))


# Strategies as objects

REPRESENTED = [
    "Current()",
    "Future()",
    "Future(own=False)",
    "Geometric(0.99)",
    "PastDesired()",
    "Subgoal(25)",
    "Subgoal(25, limit='high')",
    "Subgoal(25, limit=None)",
    "Mixture({Current(): 0.25, Random(): 0.75})",
]


def test_the_representation_of_a_strategy_creates_it_and_it_can_be_pickled():
    for text in REPRESENTED:
        strategy = eval(text)
        assert repr(strategy) == repr(pickle.loads(pickle.dumps(strategy))) == text
        extra = {"high": "future", "low": strategy}
        assert repr(make_transform(extra_goals=extra).strategies["low"]) == text
    assert repr(Mixture({"current": 0.25, Geometric(0.5): 0.75})) == "Mixture({Current(): 0.25, Geometric(0.5): 0.75})"
    assert repr(Subgoal(25, limit=("high",))) == "Subgoal(25, limit='high')"
