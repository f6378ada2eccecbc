"""Strategies and her_ratio: draws from a replay buffer have the specified distribution."""

import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from support.draws import (
    LEVEL,
    RIGHT,
    distribution,
    draw,
    draws_needed,
    make_buffer,
    p_value,
    transitions,
)
from support.factories import seeded_sample
from torchrl_her import Episode, Final, Future, GoalStrategy, Mixture, Random, uniform


class Chooses(GoalStrategy):
    """Selects rows with a function of its input, and keeps the input."""

    def __init__(self, select, same_episode=True):
        self.function, self.same_episode = select, same_episode

    def select(self, choice):
        self.choice = choice
        return self.function(choice)


def later(choice):
    """A wrong version of `future` without the transition's own outcome, except for the last step."""
    return choice.start + uniform(torch.minimum(choice.step + 1, choice.length - 1), choice.length)


def never_the_last(choice):
    """A wrong version of `future` without the last outcome of an episode, except for the last step."""
    return choice.start + uniform(choice.step, torch.maximum(choice.length - 1, choice.step + 1))


MADE = {name: name for name in RIGHT} | {"later": Chooses(later), "never the last": Chooses(never_the_last)}
STRATEGIES = pytest.mark.parametrize("strategy", RIGHT)


@pytest.mark.parametrize("lengths", [(20,), (12, 1, 2, 5)], ids=["one episode", "four episodes"])
@STRATEGIES
def test_goals_have_the_distribution_of_their_strategy_and_no_other(strategy, lengths):
    expected = distribution(strategy, lengths)
    count = draws_needed(strategy, lengths)
    draws = draw(make_buffer(strategy, lengths), count)
    assert len(draws) == count
    assert p_value(draws, expected) > LEVEL
    # The same test rejects every other distribution.
    for other, made in MADE.items():
        if distribution(other, lengths) != expected:
            assert p_value(draw(make_buffer(made, lengths), count), expected) < LEVEL, other


def test_steps_of_a_span_of_millions_are_drawn_without_gaps():
    span = 3 * 2**23  # torch.rand in float32 has too few values and would skip every third integer
    drawn = uniform(torch.full((100_000,), 5), torch.tensor(5 + span)) - 5
    assert 0 <= drawn.min() < span / 1000
    assert span - span / 1000 < drawn.max() < span
    assert stats.chisquare(torch.bincount(drawn % 3)).pvalue > LEVEL
    assert stats.kstest(drawn / span, "uniform").pvalue > LEVEL


@pytest.mark.parametrize(("name", "strategy"), zip(RIGHT, [Future(), Final(), Episode(), Random()], strict=True))
def test_a_strategy_by_name_and_as_an_object_are_the_same(name, strategy):
    samples = [seeded_sample(make_buffer(each, (12, 1, 2, 5)), 100) for each in (name, strategy)]
    assert (samples[0]["desired_goal"] == samples[1]["desired_goal"]).all()


# her_ratio


def independence_p_value(relabelled):
    """Return the smallest p-value of three tests that flags ``[batches, batch]`` are independent and equally likely."""
    columns = np.stack([relabelled.sum(axis=0), (~relabelled).sum(axis=0)])
    pairs = [
        [np.sum((relabelled[:, :-1] == left) & (relabelled[:, 1:] == right)) for right in (False, True)]
        for left in (False, True)
    ]
    per_batch, ratio, size = relabelled.sum(axis=1), relabelled.mean(), relabelled.shape[1]
    dispersion = ((per_batch - ratio * size) ** 2 / (size * ratio * (1 - ratio))).sum()
    below = stats.chi2.cdf(dispersion, len(relabelled) - 1)
    smoothed = (columns + 1, np.array(pairs) + 1)  # avoids empty cells
    return min(*(stats.chi2_contingency(table).pvalue for table in smoothed), 2 * min(below, 1 - below))


@STRATEGIES
@pytest.mark.parametrize("her_ratio", [0.0, 0.3, 0.8, 1.0])
def test_her_ratio_is_the_probability_of_being_relabelled(her_ratio, strategy):
    count = 10_000
    relabelled = len(draw(make_buffer(strategy, (30, 1, 9), her_ratio), count))
    if her_ratio in (0, 1):
        assert relabelled == her_ratio * count
    assert stats.binomtest(relabelled, count, her_ratio).pvalue > LEVEL


@pytest.mark.parametrize("her_ratio", [0.3, 0.8])
def test_transitions_are_relabelled_independently_of_their_position_in_the_batch(her_ratio):
    rb = make_buffer("future", (30, 1, 9), her_ratio)
    relabelled = [rb.sample(256)["hindsight", "relabelled"][:, 0].numpy() for _ in range(200)]
    assert independence_p_value(np.stack(relabelled)) > LEVEL
    rng = np.random.default_rng(0)
    prefix = np.tile(np.arange(250) < her_ratio * 250, (200, 1))
    stride = np.tile(np.arange(250) % 10 < her_ratio * 10, (200, 1))
    fixed_number = rng.permuted(prefix, axis=1)
    for wrong in (prefix, stride, fixed_number):
        assert independence_p_value(wrong) < LEVEL
    assert independence_p_value(rng.random((200, 250)) < her_ratio) > LEVEL


def test_every_step_is_relabelled_equally_often():
    batch = make_buffer("future", (20,), her_ratio=0.5).sample(10_000)
    table = np.zeros((20, 2))
    np.add.at(table, (batch["achieved_goal"][:, 1].long(), batch["hindsight", "relabelled"][:, 0].long()), 1)
    assert stats.chi2_contingency(table).pvalue > LEVEL


# Randomness


@pytest.mark.parametrize("strategy", ["future", "episode", "random"])
def test_the_same_transitions_get_other_goals_each_time(strategy):
    rb = make_buffer(strategy, (100, 50), her_ratio=0.5)
    first, second = rb[:], rb[:]
    assert torch.equal(first["achieved_goal"], second["achieved_goal"])
    assert not torch.equal(first["hindsight", "relabelled"], second["hindsight", "relabelled"])
    in_both = (first["hindsight", "relabelled"] & second["hindsight", "relabelled"])[:, 0]
    assert (first["desired_goal"] != second["desired_goal"])[in_both].any(1).float().mean() > 0.8


@STRATEGIES
def test_a_seed_makes_a_sample_reproducible(strategy):
    rb = make_buffer(strategy, (100, 50), her_ratio=0.5)
    samples = [seeded_sample(rb, 256, seed=seed) for seed in (7, 7, 8)]
    assert (samples[0] == samples[1]).all()
    assert not (samples[0] == samples[2]).all()


# Running episodes


def published(written):
    """Return the number of steps of a running episode in the table, given its length after each write."""
    known = 0
    for steps in written:
        if steps >= 64 and steps >= 2 * known:
            known = steps
    return known


@STRATEGIES
@pytest.mark.parametrize("chunk", [1, 16, 24, 150])
def test_a_running_episode_is_as_long_as_its_published_part(chunk, strategy):
    rb = make_buffer(strategy)
    written = []
    for first in range(0, 300, chunk):
        rb.extend(transitions(0, first, first + chunk, length=1000))
        written.append(first + chunk)
        batch = rb[:]
        known = published(written)
        step, goal = batch["achieved_goal"][:, 1], batch["desired_goal"][:, 1] - 1
        relabelled = batch["hindsight", "relabelled"][:, 0]
        if strategy != "random":
            assert torch.equal(relabelled, step < known)
        assert not relabelled[known:].any()
        assert (goal[relabelled] < known).all()
        if strategy == "future":
            assert (goal >= step)[relabelled].all()
        if strategy == "final":
            assert (goal == known - 1)[relabelled].all()
    assert known >= 150


@pytest.mark.parametrize(("end", "length", "known"), [(96, 1000, 64), (144, 1000, 128), (100, 100, 100)])
def test_future_goals_of_a_long_episode_are_uniform_up_to_the_published_step(end, length, known):
    rb = make_buffer("future")
    for first in range(0, end, 16):
        rb.extend(transitions(0, first, min(first + 16, end), length))
    needed = draws_needed("future", (known,))
    draws = draw(rb, int(1.2 * end / known * needed))
    assert len(draws) > needed
    assert p_value(draws, distribution("future", (known,))) > LEVEL


def published_repeatedly(end, length, **options):
    """Return a buffer with two short episodes and the first steps of a long one."""
    rb = make_buffer("random", (1, 19), **options)
    for first in range(0, end, 10):
        rb.extend(transitions(2, first, first + 10, length))
    return rb


@pytest.mark.parametrize(("end", "length", "known"), [(150, 150, 150), (200, 1000, 140)])
def test_random_goals_are_uniform_over_distinct_steps_though_an_episode_was_published_repeatedly(end, length, known):
    rb = published_repeatedly(end, length)
    expected = {(e, j): 1 / (20 + known) for e, length in enumerate((1, 19, known)) for j in range(length)}
    assert p_value([drawn[2:] for drawn in draw(rb, 20_000)], expected) > LEVEL


@pytest.mark.parametrize("her_ratio", [0.3, 0.8])
def test_random_goals_follow_her_ratio_though_an_episode_was_published_repeatedly(her_ratio):
    rb = published_repeatedly(150, 150, her_ratio=her_ratio)
    assert stats.binomtest(len(draw(rb, 10_000)), 10_000, her_ratio).pvalue > LEVEL


# Custom strategies


def test_a_custom_strategy_draws_from_the_steps_that_it_chooses():
    def near_future(choice):
        return choice.start + uniform(choice.step, torch.minimum(choice.step + 10, choice.length))

    lengths = (25, 4)
    expected = {}
    for e, length in enumerate(lengths):
        for t in range(length):
            goals = range(t, min(t + 10, length))
            expected |= {(e, t, e, j): 1 / sum(lengths) / len(goals) for j in goals}
    draws = draw(make_buffer(Chooses(near_future), lengths), 10_000)
    assert len(draws) == 10_000
    assert p_value(draws, expected) > LEVEL


@pytest.mark.parametrize(("same_episode", "relabelled"), [(False, {0, 1, 2}), (True, {2})])
def test_goals_of_other_episodes_are_used_only_if_the_strategy_sets_same_episode_to_false(same_episode, relabelled):
    newest_row = Chooses(lambda choice: (choice.size - 1).expand_as(choice.step), same_episode)
    draws = draw(make_buffer(newest_row, (5, 3, 4)), 200)
    assert {drawn[2:] for drawn in draws} == {(2, 3)}
    assert {drawn[0] for drawn in draws} == relabelled
    assert len(draws) == 200 or same_episode


def test_an_empty_row_relabels_nothing():
    unwritten = Chooses(lambda choice: choice.size.expand_as(choice.step), same_episode=False)
    assert draw(make_buffer(unwritten, (5, 3)), 200) == []


def test_a_strategy_gets_the_steps_and_lengths_of_the_episodes_and_the_owners_of_the_rows():
    strategy, lengths = Chooses(Final().select), (7, 2, 4)
    batch = make_buffer(strategy, lengths).sample(100)
    choice = strategy.choice
    assert torch.equal(choice.step, batch["achieved_goal"][:, 1].long())
    assert choice.length.tolist() == [lengths[int(e)] for e in batch["achieved_goal"][:, 0]]
    assert choice.size == sum(lengths)
    assert torch.equal(choice.owners[(choice.start + choice.step) % len(choice.owners)], choice.episode)
    assert (choice.owners[choice.size :] == 0).all()


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        (lambda choice: choice.step[:5], r"torch.int64 \(5,\)"),
        (lambda choice: choice.step[:, None], r"torch.int64 \(100, 1\)"),
        (lambda choice: choice.step.float(), r"torch.float32 \(100,\)"),
    ],
)
def test_rows_of_the_wrong_shape_or_dtype_are_an_error(rows, got):
    rb = make_buffer(Chooses(rows), (20,))
    message = rf"Chooses\(\) must select one row .*int64 \(100,\), but select\(\) returned {got}"
    with pytest.raises(ValueError, match=message):
        rb.sample(100)


def test_each_member_of_a_mixture_keeps_its_own_same_episode():
    def newest_row(choice):
        return (choice.size - 1).expand_as(choice.step)

    own, any_episode = (Chooses(newest_row, same_episode) for same_episode in (True, False))
    rb = make_buffer(Mixture({own: 0.5, any_episode: 0.5}), (5, 3, 4))
    counts = np.bincount([episode for episode, *_ in draw(rb, 4000)], minlength=3)
    expected = np.array([5 / 2, 3 / 2, 4]) / 12 * 4000  # the first member relabels only the newest episode
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


class FromTheBeginning(GoalStrategy):
    """Selects any goal of the episode, including the initial one."""

    uses_initial_goal = True

    def select(self, choice):
        return choice.start + uniform(torch.full_like(choice.step, -1), choice.length)


@pytest.mark.parametrize("chunk", [1, 7, 200])
@pytest.mark.parametrize("how", ["written", "saved and loaded"])
def test_the_initial_goal_of_an_episode_can_be_drawn(chunk, how):
    """Goals are (episode, number of the state), and the initial state has number 0."""
    lengths = (5, 130, 3, 70)
    rb = make_buffer(FromTheBeginning())
    data = torch.cat([transitions(episode, 0, length, length) for episode, length in enumerate(lengths)])
    for number, part in enumerate(data.split(chunk)):
        if how != "written" and number == 60 // chunk:
            rb.transform[0].load_state_dict(pickle.loads(pickle.dumps(rb.transform[0].state_dict())))
        rb.extend(part)
    rb.transform[0].flush()
    batch = rb.sample(20_000)
    assert batch["hindsight", "relabelled"].all()
    episodes = batch["achieved_goal"][:, 0]
    assert torch.equal(episodes, batch["desired_goal"][:, 0])
    for episode, length in enumerate(lengths):
        drawn = batch["desired_goal"][episodes == episode][:, 1].long()
        counts = torch.bincount(drawn, minlength=length + 1)
        assert len(counts) == length + 1
        assert stats.chisquare(counts.numpy()).pvalue > LEVEL
    owners = rb.transform[0].table.owners
    assert sorted(owners[owners > 0].unique(return_counts=True)[1].tolist()) == sorted(length + 1 for length in lengths)
