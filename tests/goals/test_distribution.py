"""Goals have exactly the distribution of their strategy; strategies as arguments, and the entries that they add.

A distribution is checked by one chi-square test of 100,000 draws.
The expected probabilities are computed in plain Python. A place is ``(episode, step)``, and a goal ``(episode, cell)``:
step j achieves cell j + 1, as in `support.world`.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torchrl.data import SliceSampler

from support.factories import make_augmentation, make_buffer, make_transform, seeded_sample
from support.oracle import STEPS, Oracle, geometric_steps, truncated_geometric_steps
from support.recorded import Recorded, chi_square
from support.world import Goal, Goals, World, transitions, whole_episodes
from torchrl_her import Current, Future, Geometric, GoalStrategy, Mixture, PastDesired, Random, Subgoal, uniform

LEVEL = 1e-3  # of each test
DRAWS = 100_000
RELABELLED, MEMBER, STEPS_TO_GOAL = (("hindsight", name) for name in ("relabelled", "member", "steps_to_goal"))

Place = tuple[int, int]


Outcomes = Counter[tuple[Place, Any]]  # an outcome is the member and the goals, or None without relabelling


class Held(NamedTuple):
    """The episodes in the goal table: the number of their steps there, and their desired goals."""

    lengths: Counter[int]
    desired: dict[int, Goal]


# The probability of each goal of a place, given the goals that were drawn for earlier entries.
Rule = Callable[[Place, Held, Mapping[str, Goal]], dict[Goal, float]]


def own(steps_of: Callable[[int, int], dict[int, float]]) -> Rule:
    """Return the rule of goals from the own episode, given the probability of each step."""

    def rule(place, held, earlier):
        episode, step = place
        return {(episode, j + 1): p for j, p in steps_of(step, held.lengths[episode]).items()}

    return rule


def geometric(discount: float) -> Rule:
    return own(partial(geometric_steps, discount=discount))


def truncated(discount: float) -> Rule:
    return own(partial(truncated_geometric_steps, discount=discount))


def subgoal(steps: int, limit: str | None = None) -> Rule:
    def rule(place, held, earlier):
        episode, step = place
        goal = episode, min(step + steps, held.lengths[episode] - 1) + 1
        limiting = earlier.get(limit)
        is_ahead = limiting is not None and limiting[0] == episode and limiting[1] > step
        return {min(goal, limiting) if is_ahead else goal: 1.0}

    return rule


def anywhere(place, held, earlier):
    return evenly([(episode, j + 1) for episode, length in held.lengths.items() for j in range(length)])


def past_desired(place, held, earlier):
    others = {episode: length for episode, length in held.lengths.items() if episode != place[0]}
    return {held.desired[episode]: length / sum(others.values()) for episode, length in others.items()}


def mixed(members: Mapping[Rule, float]) -> Rule:
    def rule(place, held, earlier):
        found = defaultdict(float)
        for member, weight in members.items():
            for goal, p in member(place, held, earlier).items():
                found[goal] += weight * p
        return found

    return rule


current, future, later, final, episode = (
    own(STEPS[name]) for name in ("current", "future", "later", "final", "episode")
)


# Strategies of users, and their rules


class FromTheBeginning(GoalStrategy):
    """Any goal of the episode, including that of its first state, which has the cell 0."""

    needs = ("initial",)

    def select(self, transitions):
        step = uniform(torch.full_like(transitions.step, -1), transitions.length)
        return transitions.episode, torch.where(step < 0, -2, step)


class FirstOfAny(GoalStrategy):
    """The goal of the first step of an episode, which is drawn in proportion to its length."""

    def select(self, transitions):
        episode, step = transitions.any_goal()
        return episode, torch.zeros_like(step)


class Between(GoalStrategy):
    """A state before the desired goal, as transitive Q-learning reads it, or the own outcome if there is none."""

    refers_to = ("desired_goal",)

    def select(self, transitions):
        _, goal = transitions.drawn["desired_goal"]
        return transitions.episode, uniform(transitions.step, torch.maximum(goal, transitions.step + 1))


class BeyondTheEnd(GoalStrategy):
    """A step that the episode does not have."""

    def select(self, transitions):
        return transitions.episode, transitions.length


def evenly(goals):
    return dict.fromkeys(goals, 1 / len(goals))


def from_the_beginning(place, held, earlier):
    return evenly([(place[0], cell) for cell in range(held.lengths[place[0]] + 1)])


def between(place, held, earlier):
    (episode, step), (_, cell) = place, earlier["desired_goal"]
    return evenly([(episode, j + 1) for j in range(step, max(cell - 1, step + 1))])


def first_of_any(place, held, earlier):
    return {(number, 1): length / sum(held.lengths.values()) for number, length in held.lengths.items()}


class Case(NamedTuple):
    """Strategies, and the rules that they must follow."""

    strategy: Any
    members: Mapping[Rule, float]  # one, or those of a mixture
    strategies: Mapping[str, Any] = {}  # of further goals
    rules: Mapping[str, Rule] = {}
    her_ratio: float = 1.0

    @property
    def keys(self) -> list[str]:
        return ["desired_goal", *self.rules]

    @property
    def options(self) -> dict[str, Any]:
        strategy = {"desired_goal": self.strategy, **self.strategies} if self.strategies else self.strategy
        return {"strategy": strategy, "her_ratio": self.her_ratio, "info": True}

    def probabilities(self, place: Place, held: Held) -> dict[Any, float]:
        """Return the probability of each outcome."""
        drawn = {
            (number, (goal,)): self.her_ratio * weight * p
            for number, (rule, weight) in enumerate(self.members.items())
            for goal, p in rule(place, held, {}).items()
        }
        for rule in self.rules.values():
            drawn = {
                (number, (*goals, goal)): p * q
                for (number, goals), p in drawn.items()
                for goal, q in rule(place, held, dict(zip(self.keys, goals, strict=False))).items()
            }
        return drawn | ({None: 1 - self.her_ratio} if self.her_ratio < 1 else {})


def make(case: Case, envs: int, size: int = 2000, capacity: int = 2000, **options: Any) -> Recorded:
    """Return an empty buffer for some environments."""
    of_buffer = {name: options.pop(name, None) for name in ("sampler", "batch_size")}
    hindsight = make_transform(capacity=capacity, **case.options | options)
    rb = make_buffer(hindsight, size=size, **of_buffer)
    return Recorded(rb, Oracle({}, capacity), World(envs, Goals()))


def filled(*lengths: int, **options: Any) -> Any:
    """Return a buffer with whole episodes of these lengths."""
    transform = make_transform(**{"her_ratio": 1.0, "capacity": 1000} | options)
    return make_buffer(transform, transitions(whole_episodes(*lengths)))


# Sampled outcomes


def group_of(place: Place, held: Held) -> Any:
    """Return the place itself in a short episode, and a part of a long one."""
    episode, step = place
    return place if held.lengths[episode] <= 12 else (episode, "long", step // 32)


def cell_of(place: Place, goal: Goal, held: Held) -> Any:
    """Return the goal itself in a short episode; near goals, the last one, and ranges of others in a long one."""
    episode, step = place
    of_goal, cell = goal
    if of_goal != episode or held.lengths[episode] <= 12:
        return of_goal, cell if held.lengths[of_goal] <= 12 else cell // 16
    ahead = cell - 1 - step
    return ahead if abs(ahead) <= 4 else ("far", ahead // 16), cell == held.lengths[episode]


def outcomes_of(batch: Any, case: Case, recorded: Recorded) -> Outcomes:
    """Count the outcomes of transitions ``[n]``, and check that their entries agree."""
    places = torch.tensor([(row.episode, row.step) for row in recorded.oracle.order])[batch["uid"]]
    relabelled = batch[RELABELLED]
    for key in case.keys:
        assert torch.equal(batch[key], batch["next", key])
        assert torch.equal(batch[key][~relabelled[:, 0]], batch["desired_goal"][~relabelled[:, 0]])
    (episode, step), (of_goal, cell) = places.T, batch["desired_goal"].long().T
    is_ahead = relabelled[:, 0] & (of_goal == episode) & (step < cell)
    assert torch.equal(batch[STEPS_TO_GOAL][:, 0], torch.where(is_ahead, cell - 1 - step, -1))
    assert (MEMBER in batch.keys(True)) == (len(case.members) > 1)
    member = batch[MEMBER] if len(case.members) > 1 else relabelled.long() - 1
    assert torch.equal(member >= 0, relabelled)
    columns = torch.cat([places, member, *(batch[key].long() for key in case.keys)], 1)
    rows, counts = columns.unique(dim=0, return_counts=True)
    found: Outcomes = Counter()
    for (e, t, number, *numbers), count in zip(rows.tolist(), counts.tolist(), strict=True):
        goals = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        found[(e, t), (number, goals) if number >= 0 else None] += count
    return found


def p_value(case: Case, counts: Outcomes, held: Held) -> float:
    """Return the p-value of Pearson's chi-square test, given the places; an impossible goal is an error."""
    places, possible = Counter(), set()
    observed, expected = Counter(), defaultdict(float)

    def cell(place, outcome):
        if outcome is None:
            return group_of(place, held), None
        number, goals = outcome
        return group_of(place, held), number, *(cell_of(place, goal, held) for goal in goals)

    for (place, outcome), count in counts.items():
        places[place] += count
        observed[cell(place, outcome)] += count
    for place, count in places.items():
        for outcome, p in case.probabilities(place, held).items():
            expected[cell(place, outcome)] += count * p
            possible |= {(place, outcome)} if p and (place, outcome) in counts else set()
    assert counts.keys() == possible
    return chi_square(observed, expected)


def check_ended(case: Case, recorded: Recorded, batch: Any) -> None:
    """Check transitions ``[n]`` of a buffer in which all episodes have ended and are held."""
    rows = recorded.oracle.order
    held = Held(Counter(row.episode for row in rows), {row.episode: row.desired for row in rows})
    assert p_value(case, outcomes_of(batch, case, recorded), held) > LEVEL


# One goal, in a table with every kind of episode

OWN = {
    "current": Case("current", {current: 1}),
    "future": Case("future", {future: 1}),
    "future without the own goal": Case(Future(own=False), {later: 1}),
    "final": Case("final", {final: 1}),
    "episode": Case("episode", {episode: 1}),
    "geometric": Case(Geometric(0.99), {geometric(0.99): 1}),
    "the next step": Case(Geometric(0.0), {geometric(0.0): 1}),
    "truncated geometric": Case(Geometric(0.95, truncated=True), {truncated(0.95): 1}),
    "the own step": Case(Geometric(0.0, truncated=True), {truncated(0.0): 1}),
    "subgoal": Case(Subgoal(25), {subgoal(25): 1}),
    "mixture": Case(
        Mixture({"final": 0.0, Current(): 0.2, Geometric(0.99): 0.5, Subgoal(25): 0.3, "random": 0.0}),
        {final: 0, current: 0.2, geometric(0.99): 0.5, subgoal(25): 0.3, anywhere: 0},
    ),
    "a user's own strategy with the initial goal": Case(FromTheBeginning(), {from_the_beginning: 1}),
    "her_ratio": Case("future", {future: 1}, her_ratio=0.7),
}
ANY = {
    "random": Case(Random(), {anywhere: 1}),
    "past_desired": Case(PastDesired(), {past_desired: 1}, her_ratio=0.9),
    "mixture": Case(
        Mixture({Future(): 0.5, PastDesired(): 0.375, Random(): 0.125}),
        {future: 0.5, past_desired: 0.375, anywhere: 0.125},
        her_ratio=0.9,
    ),
}
LEFT, LEAVING = (6, 40, 54), (50,) * 9  # episodes that have left the table, and episodes that may have


def every_kind_of_episode(case: Case) -> tuple[Outcomes, Held, Held]:
    """Return outcomes in a table of 700 goals, and the episodes that it holds and those that may have left it.

    Three of the episodes are running.
    """
    recorded = make(case, envs=5, capacity=700)
    recorded.play([whole_episodes(*LEFT, *LEAVING), [], [], [], []])
    recorded.play([[], ["go"] * 150, ["go"] * 100, [], []])
    recorded.play([whole_episodes(1, 2, 5, 9), whole_episodes(150), ["go"] * 60, ["go"] * 70, ["go"] * 40])
    batch = recorded.rb.sample(240_000)
    old = sum(LEFT + LEAVING)
    outcomes = outcomes_of(batch[batch[RELABELLED][:, 0] | (batch["uid"] >= old)], case, recorded)
    rows = recorded.oracle.order
    desired = {row.episode: row.desired for row in rows}
    leaving, held = (Counter(row.episode for row in part) for part in (rows[:old], rows[old:]))
    return outcomes, Held(held, desired), Held(leaving, desired)


@pytest.mark.filterwarnings("ignore:.*longer in the goal table")
@pytest.mark.parametrize("name", OWN)
def test_goals_of_the_own_episode_have_the_distribution_of(name):
    case = OWN[name]
    outcomes, held, leaving = every_kind_of_episode(case)
    gone = [*leaving.lengths][: len(LEFT)]
    known: Outcomes = Counter()
    for (place, outcome), count in outcomes.items():
        if place[0] in held.lengths:
            known[place, outcome] = count
        elif outcome is not None:
            assert outcome in case.probabilities(place, leaving)
            (of_goal, cell), *_ = outcome[1]
            assert of_goal not in gone or cell == 0, "only the goal of its first state is kept"
    assert known.total() > 0.9 * DRAWS
    assert p_value(case, known, held) > LEVEL


@pytest.mark.filterwarnings("ignore:.*longer in the goal table")
@pytest.mark.parametrize("name", ANY)
def test_goals_of_other_episodes_come_from_those_that_are_held(name):
    """The row of a desired goal that has left can hold an achieved goal of the transition's own episode."""
    case = ANY[name]
    outcomes, held, leaving = every_kind_of_episode(case)
    either = Held(held.lengths + leaving.lengths, held.desired)
    possible = {place: case.probabilities(place, either) for place in {place for place, _ in outcomes}}
    assert all(outcome is None or outcome in possible[place] for place, outcome in outcomes)
    assert name != "random" or all(outcome for _, outcome in outcomes)
    assert sum(count for (_, outcome), count in outcomes.items() if outcome) > 0.8 * DRAWS


# Several goals, in a table of short episodes

OGBENCH = (
    Mixture({Current(): 0.2, Geometric(0.99): 0.5, Random(): 0.3}),
    {current: 0.2, geometric(0.99): 0.5, anywhere: 0.3},
)
SEVERAL = {
    "the goals of GCIVL": Case(
        *OGBENCH,
        {"actor": Future(own=False), "low": Subgoal(3)},
        {"actor": later, "low": subgoal(3, "desired_goal")},
    ),
    "the goals of HIQL": Case(
        *OGBENCH,
        {"high": Future(own=False), "target": Subgoal(3, limit="high"), "low": Subgoal(3, limit=None)},
        {"high": later, "target": subgoal(3, "high"), "low": subgoal(3)},
    ),
    "a mixture with a subgoal": Case(
        *OGBENCH,
        {"high": Future(), "low": Mixture({Subgoal(3, limit="high"): 0.5, "random": 0.5})},
        {"high": future, "low": mixed({subgoal(3, "high"): 0.5, anywhere: 0.5})},
    ),
    "two equal strategies": Case("future", {future: 1}, {("high", "goal"): "future"}, {("high", "goal"): future}),
    "her_ratio": Case(*OGBENCH, {"actor": "past_desired"}, {"actor": past_desired}, her_ratio=0.6),
    "a user's own strategy": Case(
        Mixture({"episode": 0.5, FirstOfAny(): 0.5}),
        {episode: 0.5, first_of_any: 0.5},
        {"actor": FirstOfAny()},
        {"actor": first_of_any},
    ),
    "a user's own strategy that refers to another goal": Case(
        Geometric(0.9), {geometric(0.9): 1}, {"subgoal": Between()}, {"subgoal": between}
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_goals_have_the_joint_distribution_of(name):
    recorded = make(SEVERAL[name], envs=1)
    recorded.play([whole_episodes(9, 4, 1, 6)])
    check_ended(SEVERAL[name], recorded, recorded.rb.sample(DRAWS))


def test_a_sequence_has_the_goals_of_its_last_transition():
    case = SEVERAL["the goals of GCIVL"]._replace(her_ratio=0.8)
    sampler = SliceSampler(slice_len=3, truncated_key=None)
    recorded = make(case, envs=1, sequence_length=3, sampler=sampler, batch_size=3 * DRAWS)
    recorded.play([whole_episodes(9, 4, 3, 6)])
    batch = recorded.rb.sample()
    for key in (RELABELLED, MEMBER, *case.keys):
        assert torch.equal(batch[key], batch[key][2::3].repeat_interleave(3, 0))
    check_ended(case, recorded, batch[2::3])


# Other properties of a user's own strategy


def test_a_transition_keeps_its_goal_if_the_selected_goal_is_not_in_the_table():
    """Also if a member of a mixture selects it, and for each of several goals."""
    for strategy, extra in ((Mixture({BeyondTheEnd(): 0.5, "final": 0.5}), None), ("final", {"actor": BeyondTheEnd()})):
        recorded = make(Case(strategy, {}, extra or {}), envs=1)
        recorded.play([whole_episodes(5, 3, 4)])
        relabelled = recorded.rb.sample(4000)[RELABELLED]
        count = int(relabelled.sum())
        assert not count if extra else stats.binomtest(count, 4000).pvalue > LEVEL


def test_the_initial_goal_of_a_running_episode_is_saved():
    recorded = make(Case(FromTheBeginning(), {from_the_beginning: 1}), envs=1)
    recorded.play([["go"] * 5])
    recorded.rb.transform[-1].load_state_dict(pickle.loads(pickle.dumps(recorded.rb.transform[-1].state_dict())))
    recorded.play([["go", "truncated"]])
    assert set(recorded.rb.sample(1000)["desired_goal"][:, 1].tolist()) == set(range(8))


# Copies that HindsightAugmentation writes


def test_copies_have_the_joint_distribution_of_several_goals():
    case = Case(Geometric(0.99), {geometric(0.99): 1}, *[SEVERAL["the goals of GCIVL"][place] for place in (2, 3)])
    hindsight = make_augmentation(strategy=case.options["strategy"], n_sampled_goal=5000)
    recorded = Recorded(make_buffer(hindsight, size=DRAWS + 20), Oracle({}, 1), World(1, Goals()))
    recorded.play([whole_episodes(9, 4, 1, 6)])
    stored = recorded.rb.storage[:]
    copies = stored[stored[RELABELLED][:, 0]]
    assert len(copies) == DRAWS
    steps = torch.tensor([[row.step] for row in recorded.oracle.order])[copies["uid"]]
    copies[STEPS_TO_GOAL] = copies["hindsight", "goal_step"] - steps
    check_ended(case, recorded, copies)


def goals_of_copies(rb: Any) -> set[Goal]:
    """Return the goals of the copies that the last write stored, and empty the buffer."""
    stored = rb.storage[:]
    goals = stored["desired_goal"][stored[RELABELLED][:, 0]].long().tolist()
    rb.empty()
    return set(map(tuple, goals))


def test_random_copies_get_the_goals_that_ended_episodes_achieved_last():
    """The table holds four goals, those of the last two episodes."""
    hindsight = make_augmentation(strategy="random", n_sampled_goal=500, max_episode_steps=2, capacity=4)
    rb, world = make_buffer(hindsight, size=10_000), World(1, Goals())
    for lengths, expected in (((2, 2), {0, 1}), ((2,), {1, 2}), ((2, 2, 2), {3, 4, 5})):
        rb.extend(world.written(whole_episodes(*lengths)))
        assert goals_of_copies(rb) == {(number, cell) for number in expected for cell in (1, 2)}


def test_the_goals_so_far_are_forgotten_when_a_state_without_goals_is_loaded():
    world = World(1, Goals())
    used = make_augmentation(strategy="random", n_sampled_goal=50)
    rb = make_buffer(used, world.written(whole_episodes(9)))
    goals_of_copies(rb)
    used.load_state_dict(make_augmentation(strategy="random", n_sampled_goal=50).state_dict())
    rb.extend(world.written(whole_episodes(5)))
    assert goals_of_copies(rb) == {(1, cell) for cell in range(1, 6)}


# Random numbers


@pytest.mark.parametrize(("name", "strategy"), [("future", Future()), ("past_desired", PastDesired())])
def test_a_seed_makes_a_sample_reproducible_by_name_and_as_an_object(name, strategy):
    rb, other = (filled(100, 50, strategy=each, her_ratio=0.5) for each in (name, strategy))
    samples = [*(seeded_sample(rb, 256, seed=seed) for seed in (7, 7, 8)), seeded_sample(other, 256, seed=7)]
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
            {"strategy": {("high", "goal"): "final", "desired_goal": "future"}},
        )
    )
    assert informed - plain == {("hindsight", "steps_to_goal"), ("hindsight", "member")}
    assert extra - plain == {"high", ("high", "goal"), ("next", "high"), ("next", "high", "goal")}


def test_an_extra_goal_may_replace_a_stored_copy_of_the_desired_goal():
    rb = filled(9, strategy={"desired_goal": "future", "observation_goal": "final"})
    rb.empty()
    data = transitions(whole_episodes(3))
    rb.extend(data.set("observation_goal", data["desired_goal"].clone()))
    assert rb.sample(20)["next", "observation_goal"].tolist() == [[0, 3]] * 20


def test_the_representation_of_a_strategy_creates_it_and_it_can_be_pickled():
    single = ["Current()", "Future(own=False)", "Geometric(0.99)", "PastDesired()", "Subgoal(25, limit='high')"]
    for text in [
        *single,
        "Geometric(0.99, truncated=True)",
        "Subgoal(25)",
        "Subgoal(25, limit=None)",
        "Mixture({Current(): 0.25, Random(): 0.75})",
    ]:
        strategy = eval(text)
        assert repr(strategy) == repr(pickle.loads(pickle.dumps(strategy))) == text
        strategies = {"desired_goal": "future", "high": "future", "low": strategy}
        assert repr(make_transform(strategy=strategies).strategies["low"]) == text
    assert repr(Mixture({"current": 0.25, Geometric(0.5): 0.75})) == "Mixture({Current(): 0.25, Geometric(0.5): 0.75})"
    assert repr(Subgoal(25, limit=("high",))) == "Subgoal(25, limit='high')"
