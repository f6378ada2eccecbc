"""HindsightAugmentation in real buffers, compared with an oracle in plain Python."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tensordict import NonTensorStack, TensorDict, tensorclass
from tensordict.nn import TensorDictModule
from torchrl import envs
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from support import refused
from support.augmentation_oracle import GOAL_STEP, AugmentationOracle, run
from support.draws import transitions
from support.factories import WAYS_TO_COPY, assert_same, check_refused, make_augmentation, make_transform, same
from support.goals import reward_of
from support.oracle import RELABELLED
from support.rewards import distance
from support.streams import FLAT_LAYOUTS, Stream, make_episode, make_tensordict, random_stream, rows_of
from torchrl_her import (
    Current,
    Future,
    Geometric,
    GoalStrategy,
    HindsightAugmentation,
    Mixture,
    PackedStorage,
    PastDesired,
    ReachedReward,
    Subgoal,
)
from torchrl_her.goals.reservoir import GoalReservoir


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    draw=st.randoms(use_true_random=False),
    layout=st.sampled_from(FLAT_LAYOUTS),
    copies=st.integers(1, 4),
    max_episode_steps=st.sampled_from([1, 4, 1000]),
    patience=st.sampled_from([0, 10, 1000]),
    flushes=st.sets(st.integers(0, 11)),
)
def test_however_the_data_arrives_each_episode_is_stored_once_with_k_copies(draw, layout, **options):
    run(random_stream(draw, layout, least_chunk=1), **options)


# Buffers


def make(kind=TensorDictReplayBuffer, storage=LazyTensorStorage, size=1000, transform=None, **options):
    """Return a buffer with the given transform, or with an augmentation with the given options."""
    return kind(storage=storage(size), transform=transform or make_augmentation(**options), batch_size=32)


def written_by_one_lane(lengths, writes, chunk):
    """Return the transitions of one environment in each write."""
    return [rows for (rows,) in Stream(1, lengths, chunk, writes, "flat with ids")]


(EPISODE,) = written_by_one_lane(((5, "terminated"),), writes=1, chunk=5)
KINDS = {
    "ReplayBuffer": ReplayBuffer,
    "TensorDictReplayBuffer": TensorDictReplayBuffer,
    "PrioritizedReplayBuffer": partial(PrioritizedReplayBuffer, alpha=0.7, beta=0.5),
    "TensorDictPrioritizedReplayBuffer": partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5),
    "sync=False": partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5, sync=False),
}
STORAGES = [LazyTensorStorage, PackedStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]


def growing(rb, *lane):
    """Write a lane, check the result of each write, and yield the rows of the storage and the stored episodes."""
    oracle = AugmentationOracle()
    for rows in written_by_one_lane(*lane):
        index = rb.extend(make_tensordict(rows))
        due = oracle.write(rows)
        if due:
            oracle.check(due, rb[:][index])
        yield index.flatten().tolist(), due


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", STORAGES)
def test_buffers_grow_when_episodes_end_and_return_the_rows_that_were_written(kind, storage):
    rb, size = make(KINDS[kind], storage), 0
    for index, due in growing(rb, ((5, "terminated"), (2, "truncated")), 5, 3):
        assert index == list(range(size, size + 5 * sum(map(len, due))))
        size = len(rb)
    assert size == 70
    batch = rb.sample()
    assert batch[RELABELLED].shape == batch[GOAL_STEP].shape == (32, 1)


def test_sampling_returns_the_stored_rows_and_leaves_them():
    rb = make()
    rb.extend(make_tensordict(EPISODE))
    stored = rb.storage[:].clone()
    for _ in range(3):
        batch = rb.sample()
        assert_same(batch.exclude("index"), stored[batch["index"]].exclude("index"))
    assert_same(stored, rb.storage[:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_buffer_holds_the_last_transitions_and_their_copies(kind):
    rb, written = make(KINDS[kind], size=100), {}
    for index, due in growing(rb, ((5, "terminated"), (2, "truncated"), (8, "silent")), 60, 7):
        written |= dict.fromkeys(index, due)
    assert len(rb) == 100
    assert rb[:][RELABELLED].float().mean() == 0.8  # a transition is evicted together with its copies
    for index, due in written.items():
        assert int(rb[:]["uid"][index]) in {row.uid for row in rows_of(due)}


def check_not_written(rb, write, match):
    """Check that a write is refused and changes neither the number of rows nor the transform."""
    before = len(rb), copy.deepcopy(rb.transform.state_dict())
    with pytest.raises(ValueError, match=match):
        write()
    assert same((len(rb), rb.transform.state_dict()), before)


USE_EXTEND = r"rb.extend.*HERTransform works with add"


@pytest.mark.parametrize("kind", KINDS)
def test_adding_and_setting_single_transitions_is_refused_with_the_remedy(kind):
    rb, data = make(KINDS[kind]), make_tensordict(EPISODE)
    rb.extend(data)
    rb.extend(data[:2])
    check_not_written(rb, lambda: rb.__setitem__(0, data[2]), USE_EXTEND)
    if isinstance(rb, TensorDictReplayBuffer):
        check_not_written(rb, lambda: rb.add(data[2]), USE_EXTEND)
    assert len(rb.extend(data[2:])) == 25


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_that_one_transition_completes_waits_for_a_larger_or_an_empty_write(kind):
    rb, data = make(KINDS[kind]), make_tensordict(EPISODE)
    hindsight = rb.transform[0]
    assert [len(rb.extend(row)) for row in data.split(1)] == [0] * 5
    assert hindsight.held_back == 5
    assert len(rb.extend(data[:2])) == 25
    assert len(rb.extend(data[2:4])) == len(rb.extend(data[4:])) == 0
    assert len(rb.extend(data[:0])) == 25
    assert hindsight.held_back == 0


def test_a_plain_buffer_adds_transitions_to_an_episode_that_waits():
    rb, data = make(ReplayBuffer), make_tensordict(EPISODE)
    for row in data:
        rb.add(row)
    assert len(rb) == 0
    assert len(rb.extend(data[:0])) == 25


@pytest.mark.filterwarnings("error")
def test_a_warning_says_that_nothing_is_stored_if_all_writes_are_single_transitions():
    rb, data = make(), make_tensordict(EPISODE)
    for row in (*data.split(1), *data[:4].split(1)):
        rb.extend(row)
    with pytest.warns(UserWarning, match=r"2 episodes have ended .* cannot distinguish such a write from rb\.add"):
        rb.extend(data[4:])
    for row in data.split(1):
        rb.extend(row)  # no second warning


@pytest.mark.parametrize(
    ("ndim", "change", "match"),
    [
        (2, lambda data: data.reshape(1, 5), r"got the batch size \[1, 5\].*HERTransform"),
        (1, lambda data: data.set("steps_to_next_obs", torch.ones(5, 1)), "n-step transitions"),
    ],
    ids=["several dimensions", "n steps"],
)
def test_data_of_other_shapes_and_of_n_steps_is_refused(ndim, change, match):
    rb = make(storage=partial(LazyTensorStorage, ndim=ndim))
    check_refused(rb, lambda: rb.extend(change(make_tensordict(EPISODE))), ValueError, match)


# With other transforms


KEEP_ONE = "keep one HERTransform, or one HindsightAugmentation"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: envs.MultiStepTransform(3, 0.9), "n-step returns under a new goal, use HERTransform"),
        (make_transform, KEEP_ONE),
        (make_augmentation, KEEP_ONE),
        (lambda: envs.Reward2GoTransform(out_keys=["reward_to_go"]), "Reward2GoTransform sums the rewards"),
    ],
)
def test_conflicting_transforms_are_refused_in_either_order(other, match, first):
    pair = (other(), make_augmentation()) if first else (make_augmentation(), other())
    rb = make(transform=envs.Compose(*pair))
    with pytest.raises(ValueError, match=match):
        rb.extend(make_tensordict(EPISODE, with_ids=False))
    assert len(rb) == 0


@pytest.mark.parametrize("first", [True, False])
def test_transforms_of_samples_see_the_relabelled_transitions_in_either_order(first):
    scale = envs.RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])
    rb = make(transform=envs.Compose(*((scale, make_augmentation()) if first else (make_augmentation(), scale))))
    rb.extend(make_tensordict(EPISODE))
    batch = rb.sample()
    reward = reward_of(batch["next", "achieved_goal"], batch["desired_goal"]).unsqueeze(-1)
    assert torch.equal(batch["next", "reward"], 2 * reward)


def test_a_transform_that_changes_written_data_must_come_after_it():
    cast = envs.DTypeCastTransform(torch.float32, torch.float64, in_keys_inv=["observation"])
    rb = make(transform=envs.Compose(cast, make_augmentation()))
    with pytest.raises(ValueError, match="Place it after HindsightAugmentation"):
        rb.extend(make_tensordict(EPISODE))
    rb = make(transform=envs.Compose(make_augmentation(), envs.DoubleToFloat()))
    assert len(rb.extend(make_tensordict(EPISODE))) == 25


def test_flushed_transitions_are_not_changed_twice_by_a_transform_of_written_data():
    cast = envs.DTypeCastTransform(torch.float64, torch.float32, in_keys=["observation"], in_keys_inv=["observation"])
    rb = make(transform=envs.Compose(make_augmentation(), cast))
    assert len(rb.extend(make_tensordict(EPISODE[:3]))) == 0
    assert len(rb.extend(rb.transform[0].flush())) == 15
    assert rb.storage[:]["observation"].dtype == torch.float64


def test_an_entry_that_contains_the_desired_goal_is_refused_unless_sampling_recomputes_it():
    def data(goal):
        td = make_tensordict(EPISODE)
        for where in (td, td["next"]):
            where["desired_goal"] += goal
            where["both"] = torch.cat([where["observation"], where["desired_goal"]], dim=-1)
        td["next", "reward"] = reward_of(td["next", "achieved_goal"], td["desired_goal"]).unsqueeze(-1)
        return td

    def recompute(*place):
        keys = [(*place, "observation"), (*place, "desired_goal")]
        return envs.CatTensors(keys, (*place, "both"), del_keys=False, sort=False)

    rb = make()
    for goal in range(7):
        rb.extend(data(-2.0 * goal))
    with pytest.warns(UserWarning, match="copy of the desired goal is in 'both'"):
        rb.extend(data(-14.0))
    rb = make(transform=envs.Compose(make_augmentation(), recompute(), recompute("next")))
    for goal in range(8):
        rb.extend(data(-2.0 * goal))
    batch = rb.sample()
    assert torch.equal(batch["both"], torch.cat([batch["observation"], batch["desired_goal"]], dim=-1))


# Keys, goals and rewards of all kinds


def test_rewards_are_computed_in_one_call_per_write():
    calls = []

    def reward(achieved, desired):
        calls.append(len(achieved))
        return reward_of(achieved, desired)

    rb = make(transform=HindsightAugmentation(reward))
    for number, chunk in enumerate(written_by_one_lane(((5, "terminated"), (2, "truncated")), writes=6, chunk=20)):
        calls.clear()
        index = rb.extend(make_tensordict(chunk))
        # Rewards are compared with stored rewards at the first write, and again when the number of transitions doubles.
        # The first comparison also computes rewards for other goals.
        assert len(calls) in ((1, 3) if number else (4,))
        assert calls[-1] == len(index)


def test_other_keys_a_goal_function_images_and_a_reward_that_reads_the_action():
    steps = 6
    images = torch.randint(0, 256, (steps + 1, 3, 4, 4), dtype=torch.uint8)
    data = make_episode(images, torch.randint(0, 256, (4, 4), dtype=torch.uint8)).set("act", torch.rand(steps, 2))
    for old, new in {"achieved_goal": ("agent", "seen"), "desired_goal": ("agent", "goal")}.items():
        data.rename_key_(old, new)
        data["next"].rename_key_(old, new)
    data["next"].rename_key_("reward", ("agent", "gain")).rename_key_("done", "agent_done")

    def gain(seen, goal, act):
        return ((seen[:, 0].float() - goal.float()) ** 2).sum((1, 2)).unsqueeze(-1) + act[:, :1]

    next_gain = ("next", "agent", "gain")
    reward = TensorDictModule(gain, [("next", "agent", "seen"), ("agent", "goal"), "act"], [next_gain])
    data = reward(data)
    hindsight = HindsightAugmentation(
        reward,
        strategy="final",
        n_sampled_goal=1,
        achieved_goal_key=("agent", "seen"),
        desired_goal_key=("agent", "goal"),
        reward_key=("agent", "gain"),
        done_key="agent_done",
        goal_fn=lambda seen: seen[:, 0],
    )
    rb = make(transform=hindsight)
    rb.extend(data[:2])
    rb.extend(data[2:])
    written = rb.storage[:]
    original, copied = written[::2], written[1::2]
    assert (original.select(*data.keys(True, True)) == data).all()
    assert torch.equal(copied["agent", "goal"], images[-1:, 0].expand(steps, 4, 4))
    assert torch.equal(copied["next", "agent", "goal"], copied["agent", "goal"])
    assert torch.equal(copied[next_gain], gain(images[1:], copied["agent", "goal"], data["act"]))
    assert torch.equal(copied["next", "terminated"], data["next", "terminated"])
    assert copied[GOAL_STEP].eq(steps - 1).all()


def test_padding_is_not_stored():
    rb, oracle = make(mask_key="mask"), AugmentationOracle()
    for chunk in written_by_one_lane(((5, "terminated"), (3, "truncated")), writes=2, chunk=8):
        data = make_tensordict(chunk)
        padding = data.apply(torch.zeros_like)
        data["mask"], padding["mask"] = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
        assert len(rb.extend(padding[:1])) == 0  # padding may come first
        index = rb.extend(torch.stack([data, padding], dim=1).reshape(-1))
        oracle.check(oracle.write(chunk), rb.storage[index])
        assert len(rb.extend(padding)) == 0
    assert len(rb) == 80


@pytest.mark.parametrize("chunk", [9, 1], ids=["in one write", "step by step"])
@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (2, [-1, 2, -1, 3, -1, 4, -1, -1, -1, 2, -1, 3, -1, -1]),
        (-2, [-1, -1, -1, 0, -1, 1, -1, 2, -1, -1, -1, 0, -1, 1]),
    ],
)
def test_steps_outside_the_episode_make_no_copies(ahead, expected, chunk):
    class Wrong(GoalStrategy):
        def select(self, choice):
            return choice.start + choice.step + ahead  # beyond the end or before the start

    rb = make(strategy=Wrong(), n_sampled_goal=1)
    for part in written_by_one_lane(((5, "terminated"), (4, "terminated")), 9 // chunk, chunk):
        rb.extend(make_tensordict(part))
    rb.extend(rb.transform[0].flush())
    assert rb[:][GOAL_STEP].flatten().tolist() == expected


@pytest.mark.parametrize("same_episode", [True, False], ids=["own episode", "with the reservoir"])
def test_a_strategy_sees_the_rows_of_the_ended_episodes(same_episode):
    class OwnOutcome(GoalStrategy):
        def select(self, choice):
            rows = choice.start + choice.step
            assert torch.equal(choice.owners[rows], choice.episode)
            assert choice.size == 9  # all goals so far, also in the reservoir
            assert choice.starts is None  # starts of other episodes are not known
            assert (choice.step < choice.length).all()
            return rows

    strategy = OwnOutcome()
    strategy.same_episode = same_episode
    rb = make(strategy=strategy, n_sampled_goal=1)
    for part in written_by_one_lane(((5, "terminated"), (4, "terminated")), 1, 9):
        rb.extend(make_tensordict(part))
    rb.extend(rb.transform[0].flush())
    assert rb[:][GOAL_STEP].flatten().tolist() == [-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 0, -1, 1, -1, 2, -1, 3]


@pytest.mark.filterwarnings("ignore:ReachedReward gives 0 and -1, and a stored reward is")
@pytest.mark.parametrize("strategy", ["future", "random", Mixture({Current(): 0.5, Geometric(0.5): 0.5})], ids=repr)
def test_copies_have_extra_goals_and_rewards_of_reached_steps(strategy):
    """Achieved goals are (episode, step + 1), and desired goals are (episode, -1)."""
    lengths = [6, 1, 3]
    extra_goals = {"actor_goal": Future(own=False), "subgoal": Subgoal(2)}
    rb = make(reward=ReachedReward(), strategy=strategy, extra_goals=extra_goals, n_sampled_goal=20)
    rb.extend(torch.cat([transitions(e, 0, length, length) for e, length in enumerate(lengths)]))
    seen = set()
    for row in rb[:]:
        episode, step = row["achieved_goal"].int().tolist()
        goals = [row[key].int().tolist() for key in ("desired_goal", "actor_goal", "subgoal")]
        assert goals == [row["next", key].int().tolist() for key in ("desired_goal", "actor_goal", "subgoal")]
        if not row[RELABELLED]:
            assert goals == [[episode, -1]] * 3
            continue
        (of_episode, state), (actor_episode, actor_state), subgoal = goals
        ahead = state - 1 - step if of_episode == episode and state - 1 >= step else None
        last = lengths[episode] - 1
        assert actor_episode == episode
        assert min(step + 1, last) <= actor_state - 1 <= last
        assert subgoal == [episode, 1 + min(step + 2, last, step + (2 if ahead is None else ahead))]
        assert row["next", "terminated"] == (ahead == 0)
        assert row["next", "reward"] == (0 if ahead == 0 else -1)
        seen.add(ahead)
    assert {0, 1, 2} <= seen
    assert (None in seen) == (strategy == "random")
    assert "steps_to_goal" not in rb[:]["hindsight"]


@pytest.mark.parametrize("strategy", [PastDesired(), Mixture({Future(): 0.5, PastDesired(): 0.5})], ids=repr)
def test_strategies_that_need_goals_which_are_not_kept_are_refused(strategy):
    for options in ({"strategy": strategy}, {"extra_goals": {"actor_goal": strategy}}):
        with pytest.raises(ValueError, match="desired goals of episodes, which only HERTransform keeps"):
            make_augmentation(**options)


@tensorclass
class Seen:
    image: torch.Tensor


@pytest.mark.parametrize("parts", [[5], [2, 3]], ids=["in one write", "held back"])
def test_nested_entries_keep_their_batch_sizes(parts):
    data = make_tensordict(EPISODE)
    data["agents"] = TensorDict(position=torch.rand(5, 3, 2), batch_size=[5, 3])
    data["next", "seen"] = Seen(image=torch.rand(5, 4), batch_size=[5])
    rb = make(n_sampled_goal=1)
    for part in data.split(parts):
        rb.extend(part)
    written = rb[:]
    assert written["agents"].batch_size == (10, 3)
    assert torch.equal(written["agents", "position"][::2], data["agents", "position"])
    assert isinstance(written["next", "seen"], Seen)
    assert torch.equal(written["next", "seen"].image[1::2], data["next", "seen"].image)


@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_all_past_goals_are_equally_likely_to_be_in_the_reservoir(chunk):
    torch.manual_seed(0)
    number = torch.arange(60)
    kept = torch.zeros(60)
    runs = 600
    for _ in range(runs):
        reservoir = GoalReservoir(20)
        for part in number.split(chunk):
            reservoir.add(part.float().unsqueeze(-1), part, part + 1)
        places = reservoir.episodes
        assert len(set(places.tolist())) == reservoir.filled == 20
        assert torch.equal(reservoir.goals.squeeze(-1).long(), places)
        assert torch.equal(reservoir.steps, places + 1)
        kept[places] += 1
    # A run adds at most 1 to each count, so the variance of a count is runs * p * (1 - p).
    statistic = float(((kept - runs / 3) ** 2).sum() / (runs / 3 * 2 / 3)) * 59 / 60
    assert 1e-3 < stats.chi2.sf(statistic, 59) < 1 - 1e-3


def test_random_goals_also_come_from_episodes_that_have_left_the_buffer():
    rb = make(strategy="random", reservoir_size=100, size=50)
    for chunk in written_by_one_lane(((5, "truncated"),), writes=200, chunk=5):
        index = rb.extend(make_tensordict(chunk))
    episodes = set(rb.storage[index]["desired_goal"][5:, 0].tolist())
    assert len(episodes) > 10
    assert min(episodes) < 100


# Bad input


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_sampled_goal": -1}, "n_sampled_goal must be an integer of at least 0, got -1"),
        ({"max_episode_steps": 0}, "max_episode_steps must be"),
        ({"reservoir_size": 2.5}, "reservoir_size must be"),
        ({"strategy": "past"}, "Unknown strategy 'past'"),
    ],
)
def test_wrong_arguments_are_named_in_the_error(options, match):
    with pytest.raises(ValueError, match=match):
        make_augmentation(**options)


def with_entry(key, value):
    return lambda data: data.clone().set(key, value)


def with_double_goals(data):
    goals = [key for key in data.keys(True, True) if "goal" in str(key)]
    return data.clone().update({key: data[key].double() for key in goals})


BAD = {
    "no goal": (lambda data: data.exclude("desired_goal"), KeyError, "desired_goal"),
    "NaN": (with_entry(("next", "achieved_goal"), torch.full((5, 2), torch.nan)), ValueError, "NaN"),
    "another shape": (
        with_entry("observation", torch.zeros(5, 3)),
        ValueError,
        r"entries differ from earlier transitions: 'observation' is torch.float32 \[3\] and was",
    ),
    "text": (
        with_entry("text", NonTensorStack(*"abcde")),
        TypeError,
        "'text' is a NonTensorStack: exclude.* with HERTransform",
    ),
    "an additional entry": (with_entry("more", torch.zeros(5, 1)), ValueError, "'more' is new"),
    "goals of another dtype": (with_double_goals, ValueError, "float64"),
}


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_bad_writes_lose_nothing(bad, flushed):
    spoil, error, match = BAD[bad]
    rb, data = make(), make_tensordict(EPISODE)
    rb.extend(data)
    rb.extend(data[:3])
    if flushed:
        rb.transform[0].flush()
    check_refused(rb, lambda: rb.extend(spoil(data)), error, match)
    assert len(rb.extend(data[3:])) == 25


def holding_back_three():
    hindsight = make_augmentation()
    hindsight.inv(make_tensordict(EPISODE[:3]))
    return hindsight


def loaded():
    """Return a buffer whose transform has loaded three transitions that were held back."""
    rb = make()
    rb.transform[0].load_state_dict(holding_back_three().state_dict())
    return rb


@pytest.mark.parametrize(
    ("spoil", "match"),
    [(with_double_goals, "entries differ"), (lambda data: data[3:].exclude("observation"), "'observation'")],
    ids=["goals of another dtype", "a missing entry"],
)
def test_bad_writes_after_loading_lose_nothing(spoil, match):
    rb, data = loaded(), make_tensordict(EPISODE)
    check_refused(rb, lambda: rb.extend(spoil(data)), ValueError, match)
    assert len(rb.extend(data[3:])) == 25


def test_entries_may_change_while_nothing_is_held_back():
    rb = make(storage=ListStorage)
    more = make_tensordict(EPISODE).set("more", torch.zeros(5, 1))
    for data in (more, make_tensordict(EPISODE), more):
        assert len(rb.extend(data[:3])) == 0
        assert len(rb.extend(data[3:])) == 25


def test_held_back_transitions_are_bounded_by_the_lanes_and_the_steps_of_an_episode():
    rb = make(max_episode_steps=50, size=50_000)
    hindsight = rb.transform[0]
    for lanes in Stream(8, ((700, "truncated"),), chunk=10, writes=60, layout="flat with ids"):
        rb.extend(make_tensordict(rows_of(lanes)))
        assert hindsight.held_back < 8 * 50


# Saving, copies, processes


def copied_by_torch_save(rb, twin, path):
    torch.save(rb.state_dict()["_transforms"], path / "state")
    twin.load_state_dict(rb.state_dict() | {"_transforms": torch.load(path / "state", weights_only=True)})
    return twin


WAYS = WAYS_TO_COPY | {
    "torch.save": copied_by_torch_save,
    "clone": lambda rb, twin, path: make(transform=rb.transform[0].clone()),
}


@pytest.mark.parametrize("strategy", ["future", "random"])
@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_transitions_that_are_held_back_are_copied_and_saved(way, flushed, strategy, tmp_path):
    chunks = [rows_of(lanes) for lanes in Stream(3, ((5, "truncated"), (9, "terminated")), 4, 8, "flat with ids")]
    rb = make(strategy=strategy)
    for chunk in chunks[:5]:
        rb.extend(make_tensordict(chunk))
    if flushed:
        rb.transform[0].flush()
    twin = WAYS[way](rb, make(strategy=strategy), tmp_path)
    assert twin.transform[0].held_back == rb.transform[0].held_back > 0
    for chunk in chunks[5:]:
        batches = []
        for buffer in (rb, twin):
            torch.manual_seed(7)
            index = buffer.extend(make_tensordict(chunk))
            batches.append(buffer.storage[index].exclude("index") if len(index) else None)
        assert same(*batches)
    assert same(rb.transform[0].get_extra_state()["held"], twin.transform[0].get_extra_state()["held"])


def test_integer_arguments_may_be_numpy_integers(tmp_path):
    options = {name: np.int64(5) for name in ("n_sampled_goal", "max_episode_steps", "reservoir_size")}
    rb, twin = (make(strategy="random", **options) for _ in range(2))
    rb.extend(make_tensordict(EPISODE))
    WAYS["dumps"](rb, twin, tmp_path)
    assert len(twin) == len(rb) == 30


def test_a_reservoir_of_another_size_is_not_loaded():
    state = make_augmentation(strategy="random", reservoir_size=10).state_dict()
    with pytest.raises(ValueError, match="reservoir_size=10"):
        make_augmentation(strategy="random", reservoir_size=20).load_state_dict(state)


def test_loading_a_checkpoint_without_past_goals_drops_those_of_the_replaced_buffer():
    rb, saved = (make(strategy=strategy, reward=distance) for strategy in ("random", "future"))
    rb.extend(refused.transitions(0, 25))  # goals (0, step)
    rb.load_state_dict(saved.state_dict())
    rb.extend(refused.transitions(25, 25))  # goals (1, step)
    relabelled = rb[:][rb[:][RELABELLED].squeeze(-1)]
    assert len(relabelled) == 100
    assert relabelled["desired_goal"][:, 0].unique().tolist() == [1.0]


def test_loading_a_reservoir_draws_nothing():
    saved, loaded = make_augmentation(strategy="random"), make_augmentation(strategy="random")
    saved.reservoir.add(torch.rand(20, 1), torch.arange(20), torch.arange(20))
    before = torch.get_rng_state()
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert same(loaded.reservoir.state_dict(), saved.reservoir.state_dict())


@pytest.mark.parametrize("saves", [make_transform, make_augmentation])
def test_a_checkpoint_of_the_other_hindsight_transform_is_refused(saves):
    loads = make_augmentation if saves is make_transform else make_transform
    saved, other = saves(), loads()
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"saved by {type(saved).__name__}, not {type(other).__name__}: create"):
        other.load_state_dict(saved.state_dict())
    assert same(other.state_dict(), before)


def test_flush_directly_after_loading_stores_the_transitions_that_were_held_back():
    rb = loaded()
    assert len(rb.extend(rb.transform[0].flush())) == 15
    assert len(rb.extend(rb.transform[0].flush())) == 0


def test_a_copy_for_another_process_does_not_contain_the_transitions_held_back():
    hindsight = holding_back_three()
    assert pickle.loads(pickle.dumps(hindsight)).held_back == 3
    hindsight.share_memory_()
    assert pickle.loads(pickle.dumps(hindsight)).held_back == 0
    copied = copy.deepcopy(hindsight)
    assert copied.held_back == hindsight.held_back == 3
    assert pickle.loads(pickle.dumps(copied)).held_back == 3, "a deep copy is not shared"


@pytest.mark.parametrize(("is_shared", "left"), [(True, 0), (False, 3)])
def test_a_forked_process_drops_the_transitions_that_its_parent_holds_back(is_shared, left):
    hindsight = holding_back_three()
    if is_shared:
        hindsight.share_memory_()
    hindsight._process = -1  # as in a fork, whose process id differs
    hindsight.flush()
    assert hindsight.held_back == left


def test_a_first_write_of_one_transition_names_a_missing_key():
    with pytest.raises(KeyError, match="no entry 'achieved_goal'"):
        make().extend(make_tensordict(EPISODE)[:1].exclude("achieved_goal"))


def test_an_empty_nested_entry_may_appear_and_disappear():
    rb, data = make(), make_tensordict(EPISODE)
    rb.extend(data[:2])
    assert len(rb.extend(data[2:].set("more", TensorDict(batch_size=[3])))) == 25
