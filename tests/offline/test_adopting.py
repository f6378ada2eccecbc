"""HERTransform.adopt: a data set in any order is relabelled correctly, where it is and in other storages."""

import pickle
import random
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage, Unbounded
from torchrl.envs import CatTensors, Compose

from support.data_sets import adopting_buffer, adopting_transform, bytes_of, entries_of, record
from support.factories import WAYS_TO_COPY, make_transform, same, seeded_sample
from support.goals import reached
from support.named import SAMPLERS, sampler_of
from support.world import MOVES, Goals, transitions, whole_episodes
from torchrl_her import SparseReward

STAMP = "hindsight_stamp"
SMALL, LARGE = Goals(), Goals((64, 64), torch.float64)  # `adopt` reads a few large goals at a time


def moves_of(seed, steps=48):
    """Return random moves of four environments, with about seven steps in each episode."""
    draw = random.Random(seed)
    return [draw.choices([*MOVES, *["go"] * 12], k=steps) for _ in range(4)]


ORDERS = {  # arguments of `record`, and the batch size of the data
    "one after the other": ({}, (-1,)),
    "alternating every eight rows": ({"writes": 6}, (-1,)),
    "time-major": ({"layout": "time-major"}, (-1,)),
    "[lanes, time]": ({}, (4, -1)),
    "[2, lanes / 2, time]": ({}, (2, 2, -1)),
}


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.sampled_from([*ORDERS]), st.booleans(), st.integers(0, 10**6), st.sampled_from([SMALL, SMALL, LARGE]))
def test_data_in_any_order_with_small_or_large_goals_are_relabelled_correctly(order, ids, seed, goals):
    arguments, shape = ORDERS[order]
    data, recorded = record(moves_of(seed), ids=ids, goals=goals, **arguments)
    data = data.reshape(shape)
    before = data.clone()
    recorded.rb = adopting_buffer(data, adopting_transform(recorded))
    assert recorded.check() == data.numel()
    assert same(before, data)


def test_an_episode_ends_with_its_trajectory_id_and_with_its_row():
    """There is no done flag, and the next trajectory starts with the last goals of this one."""
    data, recorded = record([["go"] * 3 + ["cut"] + ["go"] * 4])
    data["next", "done"].zero_()
    data["next", "truncated"].zero_()
    for each in (data, data.exclude(("collector", "traj_ids")).reshape(2, 4)):
        rows = adopting_buffer(each, adopting_transform(recorded))[:]
        assert rows["desired_goal"][:, 1].tolist() == [4] * 4 + [8] * 4


@pytest.mark.parametrize("goals", [SMALL, LARGE])
def test_padding_is_never_relabelled_and_never_a_goal(goals):
    lengths = (20, 40, 1)
    data, recorded = record([["go"] * length for length in lengths], ids=False, goals=goals)
    padded = torch.zeros_like(data[:1]).expand(3, 40).clone()
    padded["uid"].fill_(-1)
    for lane, (length, rows) in enumerate(zip(lengths, data.split(lengths), strict=True)):
        padded[lane, :length] = rows
    padded["collector", "mask"] = padded["uid"] >= 0
    transform = adopting_transform(recorded)
    recorded.rb = ReplayBuffer(storage=TensorStorage(transform.adopt(padded).reshape(-1)), transform=transform)
    assert recorded.check() == 61


def test_data_can_be_views_and_lazy_stacks():
    data, recorded = record(moves_of(0))
    data = data.reshape(4, -1)
    for given_data in (data.transpose(0, 1).contiguous().transpose(0, 1), lazy_stack(list(data.unbind(0)))):
        recorded.rb = adopting_buffer(given_data, adopting_transform(recorded))
        assert recorded.check() == data.numel()


# Storages and samplers


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_works_on_memory_mapped_data_and_leaves_the_files_untouched(sampler, tmp_path):
    data, recorded = record(moves_of(0))
    data.reshape(4, -1).memmap(tmp_path)
    before, mapped = bytes_of(tmp_path), TensorDict.load_memmap(tmp_path)
    recorded.rb = adopting_buffer(mapped, adopting_transform(recorded), sampler=sampler_of(sampler, 192))
    for _ in range(3):
        batch = recorded.rb.sample()
        assert recorded.check(batch) == len(batch)
    assert STAMP not in mapped
    assert bytes_of(tmp_path) == before


def test_all_entries_are_shared():
    data, recorded = record(moves_of(0), "time-major")
    before, entries = data.clone(), entries_of(data)
    adopted = adopting_transform(recorded).adopt(data)
    assert same(before, data)
    assert adopted[STAMP].dtype == torch.int64
    assert adopted[STAMP].shape == (192,)
    assert {*entries_of(adopted)} == {*entries, STAMP}
    assert all(adopted[key].data_ptr() == entry.data_ptr() for key, entry in entries.items())


# Copies and checkpoints


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized", "ignore:last_cursor is None")
@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_a_copy_samples_the_same_and_refuses_writes(way, tmp_path):
    data, recorded = record(moves_of(0))
    make = partial(adopting_transform, recorded, strategy="future")
    rb = adopting_buffer(data.memmap(tmp_path / "data"), make())
    before = bytes_of(tmp_path / "data")
    twin = TensorDictReplayBuffer(storage=LazyTensorStorage(192), transform=make(), batch_size=64)
    twin = WAYS_TO_COPY[way](rb, twin, tmp_path)
    assert same(seeded_sample(rb), seeded_sample(twin))
    with pytest.raises(RuntimeError, match="adopted a data set"):
        twin.extend(data)
    assert bytes_of(tmp_path / "data") == before


def test_a_copied_transform_contains_no_rows_of_the_data():
    data, recorded = record(moves_of(0))
    data["image"], data["next", "image"] = torch.zeros(2, 192, 1000)
    transform = adopting_transform(recorded)
    transform.adopt(data)
    assert len(pickle.dumps(transform)) < 60_000
    assert len(pickle.dumps(transform.state_dict())) < 60_000


def test_a_table_of_a_goal_spec_can_be_shared_after_adopting():
    data, recorded = record(moves_of(0))
    transform = adopting_transform(recorded, goal_spec=Unbounded((2,)))
    recorded.rb = adopting_buffer(data, transform)
    transform.share_memory_()
    assert recorded.check() == 192


def test_the_report_counts_the_adopted_episodes_and_reading_changes_no_state():
    data, recorded = record(moves_of(0))
    transform = adopting_transform(recorded)
    recorded.rb = adopting_buffer(data, transform)
    before = pickle.loads(pickle.dumps(transform.state_dict()))
    recorded.rb.sample()
    report = transform.report()
    assert (report.transitions, report.episodes, report.running) == (192, len(recorded.oracle.parts), 0)
    assert report.relabelled == 1.0
    transform.flush()
    assert same(before, pickle.loads(pickle.dumps(transform.state_dict())))
    assert recorded.check() == 192


# What is unlikely causes one warning, at the line of the program, which names a row of the data

KEYS, REWARD = ("achieved_goal", "desired_goal"), ("next", "reward")


def episodes(count, success="truncated"):
    """Return 25 transitions of each episode, except for the second one, which alone reaches its goal, after five."""
    others = whole_episodes(*[25] * (count - 2))
    data = transitions([*whole_episodes(25), *["go"] * 4, success, *others]).exclude("collector")
    data["desired_goal"][30:, 1] = data["next", "desired_goal"][30:, 1] = 999
    data[REWARD] = reached(data["next", "achieved_goal"], data["desired_goal"]).float()[:, None] - 1
    return data


def warnings_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def buffer_over(data, *after, **options):
    """Return the messages of adopting a data set, and a buffer over it."""
    defaults = {"reward": SparseReward(0.5, terminated_fn=reached), "capacity": len(data), "her_ratio": 1.0}
    transform, adopted = make_transform(**defaults | options), []
    found = warnings_of(lambda: adopted.append(transform.adopt(data)))
    storage = TensorStorage(adopted[0])
    return found, TensorDictReplayBuffer(storage=storage, transform=Compose(transform, *after), batch_size=10)


def test_good_data_causes_no_warning():
    found, rb = buffer_over(episodes(20, success="terminated"))
    assert found + warnings_of(rb.sample) == []


def test_shuffled_data_is_reported():
    data = episodes(20)
    (message,) = buffer_over(data[torch.randperm(len(data))])[0]
    assert "do not continue an episode (such as row 1" in message
    assert "shuffled" in message


def test_other_rewards_are_reported():
    data = episodes(10)
    data[REWARD][66] = -7
    (message,) = buffer_over(data)[0]
    assert "(row 66 of the data)" in message


@pytest.mark.parametrize(("her_ratio", "rewritten"), [(1.0, False), (1.0, True), (0.0, False)])
def test_copies_of_the_goal_are_searched_at_the_first_sample(her_ratio, rewritten):
    """Transforms after HERTransform, which may rewrite the copies, are unknown before."""
    data, cat = episodes(20), []
    for place, keys in ((data, [*KEYS]), (data["next"], [("next", key) for key in KEYS])):
        place["observation"] = torch.cat([place[key] for key in KEYS], 1)
        out = "observation" if place is data else ("next", "observation")
        cat.append(CatTensors(keys, out, del_keys=False))
    found, rb = buffer_over(data, *(cat if rewritten else ()), her_ratio=her_ratio)
    assert found == []
    found = warnings_of(rb.sample)
    assert len(found) == (her_ratio == 1.0 and not rewritten)
    assert all("copy of the desired goal is in 'observation'" in message for message in found)
    assert warnings_of(rb.sample) == []


@pytest.mark.filterwarnings("ignore:The reward module gives")
@pytest.mark.parametrize("still", [True, False], ids=["constant goals", "equal goals at each time"])
def test_time_in_the_last_dimension_is_accepted_if_goals_repeat(still):
    """Episodes of one step, [4, 25], end everywhere, and continue along no dimension or along both."""
    data = episodes(5)[:100]
    for flag in ("truncated", "done"):
        data["next", flag].fill_(True)
    goals = torch.ones(100) if still else (torch.arange(100) % 25 % 2 + 1).float()
    for key in ("achieved_goal", ("next", "achieved_goal")):
        data[key] = goals[:, None].expand(-1, 2)
    assert make_transform(capacity=100).adopt(data.reshape(4, 25)).shape == (4, 25)
