"""The goal table holds the newest goals, and a capacity that is too small is reported once."""

import copy
import pickle
import re
import warnings
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, Unbounded

from support.factories import WAYS_TO_COPY, make_transform, same
from support.recorded import recorded_in
from support.world import Goals, World, transitions, whole_episodes
from torchrl_her import HERKeys
from torchrl_her.goals.table import GoalTable

RELABELLED = ("hindsight", "relabelled")


def make_buffer(size, **options):
    transform = make_transform(**{"capacity": size} | options)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=100, deadline=None)
@given(capacity=st.integers(1, 12), writes=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), max_size=8))
def test_the_table_holds_exactly_the_newest_goals(capacity, writes):
    """An episode is relabelled if all of its goals are among the newest, and not if none of them is."""
    world, rb = World(1, Goals()), make_buffer(400, capacity=capacity, strategy="final", her_ratio=1.0)
    rows = []
    for lengths in writes:
        added = world.play(0, whole_episodes(*(min(length, capacity) for length in lengths)))
        rb.extend(world.tensordict(added))
        rows += added
        batch = rb[:]
        last = {row.episode: number for number, row in enumerate(rows)}
        for number, (row, (new,), goal) in enumerate(
            zip(rows, batch[RELABELLED].tolist(), batch["desired_goal"].tolist(), strict=True)
        ):
            first = number - row.step
            if first >= len(rows) - capacity:
                assert new
            if last[row.episode] < len(rows) - capacity:
                assert not new
            assert tuple(goal) == (rows[last[row.episode]].outcome if new else row.desired)


def test_the_state_is_only_as_large_as_the_filled_part_of_the_table_and_is_not_changed_by_later_writes():
    world, rb = World(1, Goals()), make_buffer(1000, capacity=10**6)
    rb.extend(world.written([*whole_episodes(50, 70), *["go"] * 100]))
    state = rb.transform[0].state_dict()
    before = copy.deepcopy(state)
    assert len(pickle.dumps(state)) < 100_000
    rb.extend(world.written([*["go"] * 200, *whole_episodes(50)]))
    assert same(state, before)


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_all_goals_of_long_episodes_are_found_in_a_copy_while_they_run_and_at_their_end(way, tmp_path):
    recorded = recorded_in(make_buffer(2000, her_ratio=1.0, strategy="episode"), 2, "episode")
    for moves, steps in ((["go"] * 150, 150), (["go"] * 63, 213), ([*["go"] * 40, "truncated"], 254)):
        recorded.play([moves] * 2)
        recorded.rb = WAYS_TO_COPY[way](recorded.rb, make_buffer(2000, her_ratio=1.0, strategy="episode"), tmp_path)
        assert recorded.check() == 2 * steps
    for uid in (0, 100, 253):
        goals = recorded.rb.transform(recorded.rb.storage[[uid] * 3000])["desired_goal"][:, 1]
        assert goals.unique().tolist() == list(range(1, 255))


@pytest.mark.parametrize("lengths", [[100_000], [50_000] + [100] * 1000, [1] * 2000])
def test_the_table_takes_56_bytes_and_the_goal_for_each_transition_whatever_is_written(lengths):
    hindsight, moves = make_transform(capacity=10_000), whole_episodes(*lengths)
    empty = len(pickle.dumps(make_transform(capacity=10_000)))
    for part in transitions(moves).split(70):
        hindsight.inv(part)
    assert len(pickle.dumps(hindsight)) - empty < (56 + 8) * 10_000 + 10_000


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("strategy", "least"), [("future", 1.0), ("final", 1.0), ("episode", 0.3)])
def test_an_endless_episode_has_no_more_memory_than_others_and_all_of_its_newest_goals(strategy, least):
    """Earlier steps have left the table. At worst, two thirds of those in the window have left it, too."""
    recorded = recorded_in(make_buffer(50, her_ratio=1.0, strategy=strategy), 1, strategy)
    for _ in range(60):
        recorded.play([["go"] * 17])
        assert recorded.check() >= least * len(recorded.rb)


def test_the_window_of_an_endless_episode_has_no_step_that_has_left_the_table_just_after_it_has_moved():
    world, rb = World(1, Goals()), make_buffer(50, her_ratio=1.0, strategy="episode")
    shares = []
    for _ in range(20):
        rb.extend(world.written(["go"] * 17))
        shares.append(float(rb.transform(rb.storage[:].repeat(20))[RELABELLED].double().mean()))
    assert max(shares[5:]) == 1.0 > min(shares)


def test_an_episode_that_is_much_slower_than_another_keeps_its_goals():
    """Its window has room for a long time, while the other episode takes all other places of the index."""
    world, rb = World(2, Goals()), make_buffer(100, her_ratio=1.0)
    for _ in range(200):
        for number, steps in ((1, 1), (0, 9)):
            rb.extend(world.tensordict(world.play(number, ["go"] * steps)))
        assert rb[:][RELABELLED].all()


def test_an_episode_that_goes_on_after_a_long_pause_keeps_its_newest_goal():
    """Meanwhile, another environment has taken most places of the index."""
    world, rb = World(2, Goals()), make_buffer(100, her_ratio=1.0)
    for pause in (10, 20, 40, 80, 150):
        rows = world.play(1, ["go"])
        rb.extend(world.tensordict(rows))
        for written in range(5, pause + 5, 5):
            rb.extend(world.tensordict(world.play(0, ["go"] * 5)))
            if written <= 95:
                batch = rb[:]
                assert batch[RELABELLED][batch["uid"] == rows[0].uid].item()


def test_the_transitions_of_an_unknown_episode_keep_their_goals():
    """A new episode takes the place of the one that began ``capacity`` episodes before it."""
    world, rb = World(1, Goals()), make_buffer(100, capacity=10, strategy="random", her_ratio=1.0)
    rb.extend(world.written(whole_episodes(*[1] * 30)))
    assert rb[:][RELABELLED].flatten().tolist() == [False] * 20 + [True] * 10


def test_a_row_that_an_interrupted_write_has_emptied_is_no_goal(monkeypatch):
    """The write has removed the oldest goals, and the first place of the index can lead to one of their rows."""
    hindsight, world = make_transform(capacity=20), World(1, Goals())
    hindsight.inv(world.written(whole_episodes(10, 10)))
    with monkeypatch.context() as context:
        context.setattr(GoalTable, "set_episodes", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            hindsight.inv(world.written(whole_episodes(8)))
    goals = {tuple(goal) for goal in hindsight.random_goals(500).long().tolist()}
    assert goals == {(0, 9), (0, 10), *((1, cell) for cell in range(1, 11))}


def test_a_state_with_long_episodes_is_loaded_into_shared_memory():
    saved, world = make_transform(capacity=20_000), World(1, Goals())
    for _ in range(180):
        written = saved.inv(world.written(["go"] * 50))
    loaded = make_transform(goal_spec=Unbounded((2,)), capacity=20_000, her_ratio=1.0).share_memory_()
    loaded.load_state_dict(saved.state_dict())
    assert loaded(written)[RELABELLED].all()
    assert loaded(loaded.inv(world.written(["go"] * 50)))[RELABELLED].all()


@pytest.mark.filterwarnings("error")
# Warnings


def warnings_of(lengths, writes=1, size=1000, parts=1, samples=1, **options):
    """Write episodes, in parts, sample after each part, and return the warnings."""
    world, rb = World(1, Goals()), make_buffer(size, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(writes):
            for part in world.written(whole_episodes(*lengths)).chunk(parts):
                rb.extend(part)
                for _ in range(samples):
                    rb.sample(512)
    return [str(each.message) for each in caught]


def test_a_table_too_small_for_the_storage_is_reported_once_with_the_capacity_to_use():
    (message,) = warnings_of([10, 10], 200, capacity=250, strategy="final")
    pattern = r"^(\d+)% of the transitions .*capacity=250\) is too small\. .*the storage.* at least (\d+)"
    lost, enough = re.search(pattern, message).groups()
    assert 20 <= int(lost) <= 90
    assert 250 < int(enough) <= 1100  # estimated from 500 draws; the storage holds 1,000
    (other,) = warnings_of([5] * 4, 200, capacity=5)  # hardly any goal of the samples is left
    assert "capacity=5) is too small" in other
    assert "Pass the number of transitions that the storage can hold" in other
    assert "Pass the number of transitions that the storage can hold" in message


@pytest.mark.parametrize(
    ("lengths", "writes", "options"),
    [
        ([10, 10], 200, {"capacity": 1000}),
        ([10], 100, {"capacity": 50, "samples": 0}),  # it may be too small, but nothing is sampled
        ([1] * 7, 200, {"strategy": "random"}),
        ([600], 10, {}),
        ([600], 10, {"parts": 12, "capacity": 3000}),
    ],
)
def test_a_table_that_is_large_enough_or_not_used_is_not_reported(lengths, writes, options):
    assert warnings_of(lengths, writes, **options) == []


@pytest.mark.parametrize("parts", [1, 50])
def test_an_episode_longer_than_the_table_is_not_split(parts):
    """The goals of the last transitions, which are in a storage of the same size, are in the table."""
    recorded = recorded_in(make_buffer(20, her_ratio=1.0))
    moves = whole_episodes(*[50] * 4)
    for begin in range(0, len(moves), len(moves) // parts):
        recorded.play([moves[begin : begin + len(moves) // parts]])
        assert recorded.check() == len(recorded.rb)
    assert warnings_of([50], 10, size=20, parts=parts, capacity=20) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("padding", [False, True])
def test_running_episodes_and_padding_are_not_mistaken_for_lost_goals(padding):
    """There are more episodes than the table has goals."""
    envs, length, size = (1, 2, 1000) if padding else (80, 20, 2000)
    world, rb = World(envs, Goals()), make_buffer(size, keys=HERKeys(mask="mask" if padding else None), her_ratio=1.0)
    moves = [whole_episodes(*[length] * 1200)[env % length :] for env in range(envs)]  # each at a different step
    for now in range(0, 2400, 16) if padding else range(0, 1000, 5):
        steps = 16 if padding else 5
        rows = [row for env in range(envs) for row in world.play(env, moves[env][now : now + steps])]
        data = world.tensordict(rows)
        if padding:
            data["mask"] = torch.ones(len(rows), dtype=torch.bool)
            data = torch.cat([data, data.apply(torch.zeros_like)])
        rb.extend(data)
        rb.sample(512)
    assert world.envs[0].episode > 10
