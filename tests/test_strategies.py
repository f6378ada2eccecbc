"""Strategies and her_ratio, seen through a replay buffer: what is drawn has the distribution that the design gives.

Every achieved goal is unique and says which episode and which step it came from. All strategies are uniform on a set
of goals that depends on the transition, so the table ALLOWED is all that the tests take from the design.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_her import Episode, Final, Future, GoalStrategy, HERTransform, Random, uniform

LEVEL = 1e-3  # of every statistical test; the seeds are fixed
POWER = 0.99


def transitions(episode, first, last, length):
    """The transitions of steps first to last - 1 of an episode with that many steps: [last - first]."""
    step = torch.arange(first, last)
    unreached = torch.full((len(step), 1), -1.0)
    done = (step == length - 1)[:, None]
    return TensorDict(
        {
            "place": torch.stack([torch.full_like(step, episode), step], dim=1),
            "achieved_goal": (10_000.0 * episode + step)[:, None],
            "desired_goal": unreached,
            "next": {
                "achieved_goal": (10_000.0 * episode + step + 1)[:, None],
                "desired_goal": unreached.clone(),
                "reward": unreached.clone(),
                "done": done,
                "terminated": torch.zeros_like(done),
                "truncated": done.clone(),
            },
        },
        batch_size=len(step),
    )


def make_buffer(strategy, lengths=(), her_ratio=1.0):
    """A buffer that holds whole episodes of these lengths."""
    transform = HERTransform(
        lambda achieved, desired: (achieved - desired)[:, 0], strategy=strategy, her_ratio=her_ratio, capacity=2000
    )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2000), transform=transform)
    for episode, length in enumerate(lengths):
        rb.extend(transitions(episode, 0, length, length))
    return rb


def draw(rb, count):
    """Sample transitions and list those that are relabelled: (episode, step, episode of the goal, step of the goal)."""
    batch = rb.sample(count)
    relabelled = batch["hindsight", "relabelled"][:, 0]
    assert torch.equal(relabelled, batch["desired_goal"][:, 0] != -1)
    goal = batch["desired_goal"][relabelled, 0].long() - 1
    place = batch["place"][relabelled]
    return list(zip(*place.T.tolist(), (goal // 10_000).tolist(), (goal % 10_000).tolist(), strict=True))


# Which goals the strategies, and wrong variants of them, choose from: (episode, step, lengths) -> [(episode, step)].
ALLOWED = {
    "future": lambda e, t, lengths: [(e, j) for j in range(t, lengths[e])],
    "final": lambda e, t, lengths: [(e, lengths[e] - 1)],
    "episode": lambda e, t, lengths: [(e, j) for j in range(lengths[e])],
    "random": lambda e, t, lengths: [(other, j) for other in range(len(lengths)) for j in range(lengths[other])],
    "later": lambda e, t, lengths: [(e, j) for j in range(t + 1, lengths[e])] or [(e, t)],
    "never the last": lambda e, t, lengths: [(e, j) for j in range(t, lengths[e] - 1)] or [(e, t)],
}
RIGHT = ["future", "final", "episode", "random"]


class Later(GoalStrategy):
    """Wrong for `future`: the transition's own outcome is left out, but for the last step, which has no other."""

    def select(self, choice):
        return choice.start + uniform(torch.minimum(choice.step + 1, choice.length - 1), choice.length)


class NeverTheLast(GoalStrategy):
    """Wrong for `future`: the last outcome of an episode is left out, but for the last step, which has no other."""

    def select(self, choice):
        return choice.start + uniform(choice.step, torch.maximum(choice.length - 1, choice.step + 1))


MADE = {name: name for name in RIGHT} | {"later": Later(), "never the last": NeverTheLast()}


def distribution(name, lengths):
    """The probability of each (episode, step, episode of the goal, step of the goal) in a uniform sample."""
    places = [(e, t) for e, length in enumerate(lengths) for t in range(length)]
    drawn = {}
    for place in places:
        goals = ALLOWED[name](*place, lengths)
        drawn |= {(*place, *goal): 1 / len(places) / len(goals) for goal in goals}
    return drawn


def p_value(draws, expected):
    """Pearson's chi-square test; 0 where something was drawn that cannot be."""
    counts = Counter(draws)
    if counts.keys() - expected.keys():
        return 0.0
    probabilities = np.array(list(expected.values()))
    return stats.chisquare([counts[cell] for cell in expected], len(draws) * probabilities).pvalue


def power(expected, wrong, count):
    """The probability that the chi-square test rejects the wrong distribution, from count draws.

    What is drawn and cannot be is left out of the statistic here: it only makes rejection surer.
    """
    distance = sum((wrong.get(cell, 0.0) - p) ** 2 / p for cell, p in expected.items())
    bound = stats.chi2.isf(LEVEL, len(expected) - 1)
    return stats.ncx2.sf(bound, len(expected) - 1, count * distance)


def draws_needed(name, lengths):
    """So many draws that five or more are expected in each cell, and that all wrong variants are rejected."""
    expected = distribution(name, lengths)
    others = [wrong for wrong in (distribution(each, lengths) for each in ALLOWED) if wrong != expected]
    count = int(np.ceil(5 / min(expected.values())))
    while min(power(expected, wrong, count) for wrong in others) < POWER:
        count += count // 10
    return count


EPISODES = pytest.mark.parametrize("lengths", [(20,), (12, 1, 2, 5)], ids=["one episode", "four episodes"])


@EPISODES
@pytest.mark.parametrize("name", RIGHT)
def test_goals_have_the_distribution_of_their_strategy(name, lengths):
    rb = make_buffer(name, lengths)
    torch.manual_seed(0)
    count = draws_needed(name, lengths)
    draws = draw(rb, count)
    assert len(draws) == count
    assert p_value(draws, distribution(name, lengths)) > LEVEL


@EPISODES
@pytest.mark.parametrize("name", RIGHT)
def test_the_same_test_rejects_every_other_distribution(name, lengths):
    expected = distribution(name, lengths)
    count = draws_needed(name, lengths)
    torch.manual_seed(0)
    for other, strategy in MADE.items():
        if distribution(other, lengths) != expected:
            assert p_value(draw(make_buffer(strategy, lengths), count), expected) < LEVEL, other


@EPISODES
def test_the_sample_is_large_enough_to_tell_the_wrong_variants_of_future(lengths):
    expected = distribution("future", lengths)
    count = draws_needed("future", lengths)
    for wrong in ("later", "never the last", "episode"):
        assert power(expected, distribution(wrong, lengths), count) >= POWER
    assert power(expected, distribution("later", lengths), 50) < 0.5  # the bound above says something


def test_steps_of_a_span_of_millions_are_drawn_without_gaps():
    span = 3 * 2**23  # more than the numbers that torch.rand has in single precision, which leave out every third
    torch.manual_seed(0)
    drawn = uniform(torch.full((100_000,), 5), torch.tensor(5 + span)) - 5
    assert 0 <= drawn.min() < span / 1000
    assert span - span / 1000 < drawn.max() < span
    assert stats.chisquare(torch.bincount(drawn % 3)).pvalue > LEVEL
    assert stats.kstest(drawn / span, "uniform").pvalue > LEVEL


@pytest.mark.parametrize(
    ("name", "strategy"), zip(RIGHT, [Future(), Final(), Episode(), Random()], strict=True), ids=RIGHT
)
def test_a_strategy_by_name_and_as_an_object_are_the_same(name, strategy):
    samples = []
    for each in (name, strategy):
        rb = make_buffer(each, (12, 1, 2, 5))
        torch.manual_seed(0)
        samples.append(draw(rb, 100))
    assert samples[0] == samples[1]


# her_ratio


def relabelled_in(rb, batches):
    """Which positions of that many batches are relabelled: bool [batches, batch]."""
    return np.stack([rb.sample(256)["hindsight", "relabelled"][:, 0].numpy() for _ in range(batches)])


def independence_p_value(relabelled):
    """The least p-value of three tests for flags [batches, batch] that are independent with one probability."""
    columns = np.stack([relabelled.sum(axis=0), (~relabelled).sum(axis=0)])
    pairs = [
        [np.sum((relabelled[:, :-1] == left) & (relabelled[:, 1:] == right)) for right in (False, True)]
        for left in (False, True)
    ]
    per_batch, ratio, size = relabelled.sum(axis=1), relabelled.mean(), relabelled.shape[1]
    dispersion = ((per_batch - ratio * size) ** 2 / (size * ratio * (1 - ratio))).sum()
    below = stats.chi2.cdf(dispersion, len(relabelled) - 1)
    smoothed = (columns + 1, np.array(pairs) + 1)  # no cell is expected to be empty
    return min(*(stats.chi2_contingency(table).pvalue for table in smoothed), 2 * min(below, 1 - below))


@pytest.mark.parametrize("strategy", RIGHT)
@pytest.mark.parametrize("her_ratio", [0.0, 0.3, 0.8, 1.0])
def test_her_ratio_is_the_probability_of_being_relabelled(her_ratio, strategy):
    rb = make_buffer(strategy, (30, 1, 9), her_ratio)
    torch.manual_seed(0)
    count = 10_000
    relabelled = len(draw(rb, count))
    if her_ratio in (0, 1):
        assert relabelled == her_ratio * count
    assert stats.binomtest(relabelled, count, her_ratio).pvalue > LEVEL


@pytest.mark.parametrize("her_ratio", [0.3, 0.8])
def test_transitions_are_relabelled_independently_of_their_position_in_the_batch(her_ratio):
    rb = make_buffer("future", (30, 1, 9), her_ratio)
    torch.manual_seed(0)
    assert independence_p_value(relabelled_in(rb, 200)) > LEVEL


@pytest.mark.parametrize("her_ratio", [0.3, 0.8])
def test_a_prefix_a_stride_and_a_fixed_number_would_be_told_from_independence(her_ratio):
    rng = np.random.default_rng(0)
    prefix = np.arange(250) < her_ratio * 250
    stride = np.arange(250) % 10 < her_ratio * 10
    for mask in (np.tile(prefix, (200, 1)), np.tile(stride, (200, 1)), rng.permuted(np.tile(prefix, (200, 1)), axis=1)):
        assert independence_p_value(mask) < LEVEL
    assert independence_p_value(rng.random((200, 250)) < her_ratio) > LEVEL


def test_every_step_is_relabelled_equally_often():
    rb = make_buffer("future", (20,), her_ratio=0.5)
    torch.manual_seed(0)
    batch = rb.sample(10_000)
    table = np.zeros((20, 2))
    np.add.at(table, (batch["place"][:, 1], batch["hindsight", "relabelled"][:, 0].long()), 1)
    assert stats.chi2_contingency(table).pvalue > LEVEL


# Randomness


@pytest.mark.parametrize("strategy", ["future", "episode", "random"])
def test_the_same_transitions_get_other_goals_each_time(strategy):
    rb = make_buffer(strategy, (100, 50), her_ratio=0.5)
    torch.manual_seed(0)
    first, second = rb[:], rb[:]
    assert torch.equal(first["place"], second["place"])
    assert not torch.equal(first["hindsight", "relabelled"], second["hindsight", "relabelled"])
    in_both = (first["hindsight", "relabelled"] & second["hindsight", "relabelled"])[:, 0]
    assert (first["desired_goal"] != second["desired_goal"])[in_both].float().mean() > 0.8


@pytest.mark.parametrize("strategy", RIGHT)
def test_a_seed_makes_a_sample_reproducible(strategy):
    rb = make_buffer(strategy, (100, 50), her_ratio=0.5)
    samples = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        samples.append(rb.sample(256))
    assert (samples[0] == samples[1]).all()
    assert not (samples[0] == samples[2]).all()


# Running episodes


def published(written):
    """How many steps of a running episode are in the table, given its length after each write."""
    known = 0
    for steps in written:
        if steps >= 64 and steps >= 2 * known:
            known = steps
    return known


@pytest.mark.parametrize("strategy", RIGHT)
@pytest.mark.parametrize("chunk", [1, 16, 24, 150])
def test_a_running_episode_is_as_long_as_what_was_published_of_it(chunk, strategy):
    rb = make_buffer(strategy)
    torch.manual_seed(0)
    written = []
    for first in range(0, 300, chunk):
        rb.extend(transitions(0, first, first + chunk, length=1000))
        written.append(first + chunk)
        batch = rb[:]
        known = published(written)
        step, goal = batch["place"][:, 1], batch["desired_goal"][:, 0].long() - 1
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
    torch.manual_seed(0)
    draws = draw(rb, int(1.2 * end / known * draws_needed("future", (known,))))
    assert len(draws) > draws_needed("future", (known,))
    assert p_value(draws, distribution("future", (known,))) > LEVEL


@pytest.mark.parametrize("end", [150, 200])
def test_random_goals_are_uniform_over_distinct_steps_though_an_episode_was_published_again_and_again(end):
    rb = make_buffer("random", (1, 19))
    for first in range(0, end, 10):
        rb.extend(transitions(2, first, first + 10, length=150 if end == 150 else 1000))
    known = published(range(10, end + 1, 10)) if end == 200 else 150
    torch.manual_seed(0)
    draws = draw(rb, 20_000)
    expected = {(e, j): 1 / (20 + known) for e, length in enumerate((1, 19, known)) for j in range(length)}
    assert p_value([drawn[2:] for drawn in draws], expected) > LEVEL


@pytest.mark.parametrize("her_ratio", [0.3, 0.8])
def test_random_goals_keep_to_her_ratio_though_an_episode_was_published_again_and_again(her_ratio):
    rb = make_buffer("random", (1, 19), her_ratio)
    for first in range(0, 150, 10):
        rb.extend(transitions(2, first, first + 10, length=150))
    torch.manual_seed(0)
    relabelled = len(draw(rb, 10_000))
    assert stats.binomtest(relabelled, 10_000, her_ratio).pvalue > LEVEL


# Strategies of a user's own


class NearFuture(GoalStrategy):
    """At most ten steps ahead."""

    def select(self, choice):
        end = torch.minimum(choice.step + 10, choice.length)
        return choice.start + uniform(choice.step, end)


def test_a_strategy_of_ones_own_draws_from_the_steps_that_it_chooses():
    lengths = (25, 4)
    rb = make_buffer(NearFuture(), lengths)
    expected = {}
    for e, length in enumerate(lengths):
        for t in range(length):
            goals = range(t, min(t + 10, length))
            expected |= {(e, t, e, j): 1 / sum(lengths) / len(goals) for j in goals}
    torch.manual_seed(0)
    draws = draw(rb, 10_000)
    assert len(draws) == 10_000
    assert p_value(draws, expected) > LEVEL


class Newest(GoalStrategy):
    """The goal that was last put into the table, whoever achieved it."""

    def select(self, choice):
        return (choice.size - 1).expand_as(choice.step)


def test_a_strategy_that_leaves_the_episode_gives_goals_of_others_if_it_says_so():
    strategy = Newest()
    strategy.same_episode = False
    draws = draw(make_buffer(strategy, (5, 3, 4)), 200)
    assert len(draws) == 200
    assert {drawn[2:] for drawn in draws} == {(2, 3)}
    assert {drawn[0] for drawn in draws} == {0, 1, 2}


def test_a_strategy_that_leaves_the_episode_without_saying_so_leaves_the_transition_as_it_is():
    draws = draw(make_buffer(Newest(), (5, 3, 4)), 200)
    assert {drawn[0] for drawn in draws} == {2}
    assert {drawn[2:] for drawn in draws} == {(2, 3)}


class WithoutOwner(GoalStrategy):
    """A row of the table that nothing was written to yet."""

    same_episode = False

    def select(self, choice):
        return choice.size.expand_as(choice.step)


def test_a_row_that_holds_no_goal_relabels_nothing():
    assert draw(make_buffer(WithoutOwner(), (5, 3)), 200) == []


class SeenChoice(Final):
    """Keeps what it was given."""

    def select(self, choice):
        self.choice = choice
        return super().select(choice)


def test_a_strategy_is_given_the_steps_and_lengths_of_the_episodes_and_the_owners_of_the_rows():
    strategy = SeenChoice()
    lengths = (7, 2, 4)
    rb = make_buffer(strategy, lengths)
    batch = rb.sample(100)
    choice = strategy.choice
    assert torch.equal(choice.step, batch["place"][:, 1])
    assert choice.length.tolist() == [lengths[e] for e in batch["place"][:, 0].tolist()]
    assert choice.size == sum(lengths)
    assert torch.equal(choice.owners[(choice.start + choice.step) % len(choice.owners)], choice.episode)
    assert (choice.owners[choice.size :] == -1).all()


class WrongRows(GoalStrategy):
    """Returns something else than one row for each transition."""

    def __init__(self, rows):
        self.rows = rows

    def select(self, choice):
        return self.rows(choice)


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        (lambda choice: choice.step[:5], r"torch.int64 \(5,\)"),
        (lambda choice: choice.step[:, None], r"torch.int64 \(100, 1\)"),
        (lambda choice: choice.step.float(), r"torch.float32 \(100,\)"),
    ],
)
def test_rows_of_the_wrong_shape_or_dtype_are_an_error_that_says_so(rows, got):
    rb = make_buffer(WrongRows(rows), (20,))
    with pytest.raises(ValueError, match=rf"WrongRows\(\) must select one row .*int64 \(100,\), and returned {got}"):
        rb.sample(100)
