"""Extra goals, steps to the goal, members of mixtures and ReachedReward, checked row by row; refused arguments."""

import pickle
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.agreement import LEVEL, check_consistent
from support.draws import transitions
from support.factories import check_refused, filled, make_buffer, make_transform
from support.goals import reward_of
from support.n_step_oracle import NStepOracle
from support.oracle import RELABELLED, Oracle, as_dicts
from support.presets import Preset, alone, anywhere, current, episode, final
from support.streams import Stream, make_episode, make_tensordict
from torchrl_her import (
    Current,
    Episode,
    Final,
    Future,
    Geometric,
    GoalReward,
    HERTransform,
    HindsightAugmentation,
    Mixture,
    PastDesired,
    Random,
    ReachedReward,
    Subgoal,
)

STEPS_TO_GOAL, MEMBER = ("hindsight", "steps_to_goal"), ("hindsight", "member")
REWARD, TERMINATED = ("next", "reward"), ("next", "terminated")
STREAM = Stream(
    lanes=3,
    lengths=((9, "truncated"), (4, "terminated"), (1, "truncated"), (6, "terminated")),
    chunk=7,
    writes=4,
    layout="[lanes, time] with ids",
    rows=28,
    capacity=500,
    her_ratio=0.7,
)
ANY_STEP = Mixture({Current(): 0.3, Episode(): 0.5, Random(): 0.2})
ALLOWED = [current, episode, anywhere]  # the rules of its members


def sample_of(make_oracle=Oracle, count=3000, stream=STREAM, **options):
    """Return a sample of a buffer, and the oracle."""
    transform = make_transform(stream, **options)
    rb, oracle = filled(make_oracle, stream, transform=transform, batch_size=count)
    return rb.sample(), oracle


def rows_of(batch, *keys):
    """Return for each transition its goal, as (episode, step), and the entries under the given keys."""
    rows = as_dicts(batch, ["uid", "desired_goal", RELABELLED, *keys])
    for row in rows:
        of_episode, state = row["desired_goal"]
        row["goal"] = (of_episode, state - 1)
    return rows


# Entries of samples


def test_the_goal_is_one_that_the_chosen_member_may_draw():
    batch, oracle = sample_of(strategy=ANY_STEP, info=True)
    members = set()
    for row in rows_of(batch, MEMBER):
        transition = oracle.transitions[row["uid"]]
        if not row[RELABELLED]:
            assert row[MEMBER] == -1
            continue
        members.add(row[MEMBER])
        assert row["goal"] in ALLOWED[row[MEMBER]]((transition.episode, transition.step), oracle.published)
    assert members == {0, 1, 2}


@pytest.mark.parametrize("strategy", [ANY_STEP, Future(), "past_desired"])
def test_steps_to_the_goal_are_counted_only_within_the_transitions_own_episode(strategy):
    batch, oracle = sample_of(strategy=strategy, info=True)
    assert batch[STEPS_TO_GOAL].dtype == torch.int64
    for row in rows_of(batch, STEPS_TO_GOAL):
        transition = oracle.transitions[row["uid"]]
        of_episode, step = row["goal"]
        is_ahead = row[RELABELLED] and of_episode == transition.episode and step >= transition.step
        assert row[STEPS_TO_GOAL] == (step - transition.step if is_ahead else -1)


def test_extra_goals_are_at_the_root_and_under_next_and_equal_the_stored_goal_unless_relabelled():
    extra = {"actor_goal": "final", ("high", "goal"): Random()}
    batch, oracle = sample_of(strategy=ANY_STEP, extra_goals=extra, info=True)
    check_consistent(
        batch, Preset(((current, 1.0),) * 3, {"actor_goal": alone(final), ("high", "goal"): alone(anywhere)})
    )
    for row in rows_of(batch, "actor_goal", ("high", "goal")):
        transition = oracle.transitions[row["uid"]]
        if row[RELABELLED]:
            assert row["actor_goal"] == (transition.episode, oracle.published[transition.episode])
        else:
            assert row["actor_goal"] == row["high", "goal"] == row["desired_goal"] == transition.desired


def test_a_subgoal_that_is_a_member_of_a_mixture_has_its_limit():
    low = Mixture({Subgoal(5): 0.7, Current(): 0.3})
    batch, _ = sample_of(strategy=Future(), extra_goals={"low": low}, her_ratio=1.0)
    batch = batch[batch[RELABELLED][:, 0]]
    ahead = (batch["low"] - batch["next", "achieved_goal"])[:, 1]
    assert (batch["low"] <= batch["desired_goal"]).all()
    assert set(ahead.tolist()) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("info", [False, True])
def test_without_info_and_extra_goals_samples_have_no_further_entries(info):
    batch, _ = sample_of(strategy=ANY_STEP, info=info)
    plain, _ = sample_of(strategy="future")
    assert set(batch.keys(True)) - set(plain.keys(True)) == ({STEPS_TO_GOAL, MEMBER} if info else set())


def test_a_member_without_probability_is_never_chosen():
    members = {Final(): 0.0, Current(): 0.4, Random(): 0.0, Episode(): 0.6, PastDesired(): 0.0}
    batch, _ = sample_of(strategy=Mixture(members), info=True, count=20_000)
    assert set(batch[MEMBER].flatten().tolist()) == {-1, 1, 3}


@pytest.mark.parametrize(
    "options",
    [{}, {"info": True}, {"extra_goals": {"subgoal": Subgoal(5)}}, {"reward": ReachedReward()}],
    ids=["alone", "with info", "with a subgoal", "with ReachedReward"],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_past_desired_draws_desired_goals_though_the_table_has_wrapped(options, mixed):
    """The row of an evicted desired goal can hold an achieved goal of the transition's own episode."""
    torch.manual_seed(0)
    strategy = Mixture({Final(): 0.5, PastDesired(): 0.5}) if mixed else PastDesired()
    options = {"reward": GoalReward(reward_of)} | options
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(300),
        transform=HERTransform(options.pop("reward"), strategy=strategy, her_ratio=1.0, capacity=300, **options),
        batch_size=1000,
    )
    desired = 0
    for number, length in enumerate([50, 7, 120, 31] * 25):
        rb.extend(transitions(number, 0, length, length))
        batch = rb.sample()
        batch = batch[batch[RELABELLED][:, 0]]
        (of_goal, state), own = batch["desired_goal"].T, batch["achieved_goal"][:, 0]
        is_desired = state == -1
        assert (of_goal != own)[is_desired].all()
        assert is_desired.all() if not mixed else (of_goal == own)[~is_desired].all()
        desired += int(is_desired.sum())
    assert desired > 10_000


def test_past_desired_keeps_the_goal_while_there_is_no_other_episode():
    transform = make_transform(strategy="past_desired", her_ratio=1.0, capacity=100)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform, batch_size=50)
    rb.extend(transitions(0, 0, 9, 9))
    assert not rb.sample()[RELABELLED].any()
    rb.extend(transitions(1, 0, 1, 1))
    batch = rb.sample()
    assert batch[RELABELLED].any()
    goals = batch["desired_goal"][batch[RELABELLED][:, 0]]
    assert torch.equal(goals[:, 0], 1 - batch["achieved_goal"][batch[RELABELLED][:, 0]][:, 0])
    assert (goals[:, 1] == -1).all()


@pytest.mark.filterwarnings("ignore:.*left the goal table")
def test_the_remaining_rows_of_a_partly_evicted_episode_are_goals_of_other_episodes():
    """The table holds the last 20 outcomes of 4 episodes of 8 steps, so the second episode has lost half of its own."""
    transform = make_transform(strategy="random", her_ratio=1.0, capacity=20, info=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(32), transform=transform, batch_size=20_000)
    for number in range(4):
        rb.extend(transitions(number, 0, 8, 8))
    batch = rb.sample()
    check_consistent(batch, Preset(alone(anywhere)))
    episode, step = batch["achieved_goal"].long().T
    assert torch.equal(batch[RELABELLED][:, 0], 8 * episode + step >= 12)
    of_episode, state = batch["desired_goal"][batch[RELABELLED][:, 0]].long().T
    assert stats.chisquare(torch.bincount(8 * of_episode + state - 1)[12:]).pvalue > LEVEL


# ReachedReward

OTHER_REWARDS = pytest.mark.filterwarnings("ignore:ReachedReward gives 0 and -1, and a stored reward is")


@OTHER_REWARDS
@pytest.mark.parametrize("info", [False, True])
def test_a_goal_is_reached_only_at_the_step_that_achieved_it(info):
    batch, oracle = sample_of(reward=ReachedReward(), strategy=ANY_STEP, info=info)
    assert (STEPS_TO_GOAL in batch.keys(True)) == info
    reached = 0
    for row in rows_of(batch, REWARD, TERMINATED, ("next", "done"), ("next", "truncated")):
        transition = oracle.transitions[row["uid"]]
        if row[RELABELLED]:
            here = row["goal"] == (transition.episode, transition.step)
            assert (row[REWARD], row[TERMINATED]) == (0.0 if here else -1.0, here)
            reached += here
        else:
            stored = (reward_of(transition.outcome, transition.desired), transition.terminated)
            assert (row[REWARD], row[TERMINATED]) == stored
        assert row["next", "done"] == (row[TERMINATED] or row["next", "truncated"])
    assert 300 < reached < 2000


def test_an_equal_goal_of_another_step_is_not_reached():
    transform = HERTransform(ReachedReward(), strategy=Subgoal(2, limit=None), her_ratio=1.0, capacity=100)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    rb.extend(make_episode(torch.zeros(9, 2), torch.ones(2)))
    assert rb[:][REWARD].flatten().tolist() == [-1.0] * 7 + [0.0]
    assert rb[:][TERMINATED].flatten().tolist() == [False] * 7 + [True]


@OTHER_REWARDS
@pytest.mark.parametrize("info", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_n_step_returns_end_where_the_goal_is_reached(compact, info):
    gamma, n = 0.9, 3
    stream = replace(STREAM, n=n, gamma=gamma, compact=compact)
    extra = {"subgoal": Subgoal(2)}
    batch, oracle = sample_of(
        NStepOracle, stream=stream, reward=ReachedReward(), strategy=ANY_STEP, info=info, extra_goals=extra
    )
    kinds = set()
    for row in rows_of(batch, REWARD, TERMINATED, "steps_to_next_obs"):
        window = oracle.windows[row["uid"]]
        total, taken, terminated = 0.0, 0, window[-1].terminated
        for step in window:
            here = row[RELABELLED] and row["goal"] == (step.episode, step.step)
            reward = (0.0 if here else -1.0) if row[RELABELLED] else reward_of(step.outcome, step.desired)
            total += gamma**taken * reward
            taken += 1
            if here:
                break
        if row[RELABELLED]:
            terminated = here
            kinds.add((here, taken))
        assert row[REWARD] == pytest.approx(total, rel=1e-5)
        assert (row[TERMINATED], row["steps_to_next_obs"]) == (terminated, taken)
    assert {(True, steps) for steps in range(1, n + 1)} | {(False, n)} <= kinds


@OTHER_REWARDS
def test_a_copy_that_an_augmentation_writes_reaches_the_goal_of_its_own_step():
    transform = HindsightAugmentation(ReachedReward(), strategy=Mixture({Current(): 0.3, Episode(): 0.7}))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)
    rb.extend(transitions(0, 0, 60, 60))
    stored = rb.storage[:]
    copies = stored[stored[RELABELLED][:, 0]]
    assert STEPS_TO_GOAL not in copies.keys(True)
    reached = copies["desired_goal"] == copies["next", "achieved_goal"]  # no goal is achieved twice
    assert torch.equal(copies[TERMINATED], reached.all(1, keepdim=True))
    assert torch.equal(copies[REWARD], copies[TERMINATED].float() - 1)
    assert 40 < copies[TERMINATED].sum() < 120


# Refused arguments


def hindsight(strategy="future", **options):
    return HERTransform(ReachedReward(), strategy=strategy, **options)


def with_extra(*keys):
    return lambda: hindsight(extra_goals=dict.fromkeys(keys, "future"))


SUM = r"The probabilities of Mixture\({Future\(\): 0.5, Random\(\): 0.4}\) must sum to 1, got the sum 0.9"
DISCOUNT = "discount must be at least 0 and less than 1, got "
STEPS = "steps must be an integer of at least 1, got "
USED = "extra_goals has the key .* which transitions or another extra goal already use"
REFUSED = {
    "no members": (lambda: Mixture({}), ValueError, "needs strategies and their probabilities"),
    "a list of members": (lambda: Mixture([Future()]), ValueError, "needs strategies and their probabilities"),
    "a sum of 0.9": (lambda: Mixture({Future(): 0.5, Random(): 0.4}), ValueError, SUM),
    "a negative probability": (lambda: Mixture({Future(): -0.5, Random(): 1.5}), ValueError, r"in \[0, 1\], got -0.5"),
    "no number": (lambda: Mixture({Future(): None}), ValueError, r"in \[0, 1\], got None"),
    "an unknown member": (lambda: Mixture({"nearest": 1.0}), ValueError, "Unknown strategy 'nearest': use one of"),
    "a class as a member": (lambda: Mixture({Future: 1.0}), TypeError, "name or a GoalStrategy"),
    **{f"a discount of {value!r}": (lambda value=value: Geometric(value), ValueError, DISCOUNT + repr(value))
       for value in (1.0, -0.1, float("nan"), "0.9", True)},
    **{f"{value!r} steps": (lambda value=value: Subgoal(value), ValueError, STEPS + repr(value))
       for value in (0, -3, 2.5, True)},
    **{f"the key {key!r}": (with_extra(key), ValueError, USED)
       for key in ("achieved_goal", "desired_goal", "reward", "done", "terminated", "collector", "index",
                   ("collector", "traj_ids"), ("achieved_goal", "part"), ("next", "goal"), ("hindsight", "goal"))},
    "the same key twice": (with_extra("goal", ("goal",)), ValueError, USED),
    "a key under another one": (with_extra("goal", ("goal", "of_the_actor")), ValueError, USED),
    "a key above another one": (with_extra(("goal", "of_the_actor"), "goal"), ValueError, USED),
    "an unknown extra strategy": (lambda: hindsight(extra_goals={"a": "nearest"}), ValueError, "Unknown strategy"),
    "a list of keys": (lambda: hindsight(extra_goals=["a"]), TypeError, "extra_goals must map keys to strategies"),
    "a limit that is missing": (
        lambda: hindsight(extra_goals={"low": Subgoal(2, limit="high")}), ValueError, "refers to 'high', for which no"
    ),
    "a limit that comes later": (
        lambda: hindsight(extra_goals={"low": Subgoal(2, limit="high"), "high": "future"}), ValueError, "place that"
    ),
    "a limit of itself": (
        lambda: hindsight(extra_goals={"low": Subgoal(2, limit="low")}), ValueError, "refers to 'low', for which no"
    ),
    "a desired goal with a limit": (
        lambda: hindsight(Subgoal(2, limit="high"), extra_goals={"high": "future"}), ValueError, "is drawn first"
    ),
    "desired goals when writing": (
        lambda: HindsightAugmentation(ReachedReward(), strategy=PastDesired()), ValueError, "only HERTransform keeps"
    ),
    "all rewards of steps": (
        lambda: hindsight(recompute_all_rewards=True), ValueError, r"Replace ReachedReward with GoalReward\(reward_fn\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("key", ["observation", "action", "goal_of_the_sensor"])
def test_an_extra_goal_replaces_no_stored_entry_except_copies_of_the_desired_goal(key):
    rb = make_buffer(STREAM, make_transform(STREAM, extra_goals={key: "future"}))
    data = make_tensordict(next(iter(STREAM))[0])
    data["goal_of_the_sensor"] = data["desired_goal"] + 1
    check_refused(rb, lambda: rb.extend(data[None]), ValueError, f"would replace the stored entry '{key}'")
    if key == "goal_of_the_sensor":
        data["goal_of_the_sensor"] -= 1
        rb.extend(data[None])
        assert rb.sample()["next", key].shape == (64, 2)


# Strategies as objects

REPRESENTED = {
    "Current()": Current(),
    "Future()": Future(),
    "Future(own=False)": Future(own=False),
    "Geometric(0.99)": Geometric(0.99),
    "PastDesired()": PastDesired(),
    "Subgoal(25)": Subgoal(25),
    "Subgoal(25, limit='high')": Subgoal(25, limit="high"),
    "Subgoal(25, limit=None)": Subgoal(25, limit=None),
    "Mixture({Current(): 0.25, Random(): 0.75})": Mixture({"current": 0.25, Random(): 0.75}),
}


@pytest.mark.parametrize("text", REPRESENTED)
def test_the_representation_of_a_strategy_creates_it_and_it_can_be_pickled(text):
    strategy = REPRESENTED[text]
    assert repr(strategy) == text
    assert repr(pickle.loads(pickle.dumps(strategy))) == text
    assert repr(eval(text)) == text
    extra = {"high": "future", "low": strategy}
    assert repr(hindsight(extra_goals=extra).strategies["low"]) == text
