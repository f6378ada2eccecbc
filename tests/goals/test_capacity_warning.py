"""A goal table that is too small for the storage is reported once, with the capacity to use."""

import re
import warnings

import pytest
import torch
from tensordict import TensorDict

from support.refused import make_small_buffer, transitions
from support.rewards import nearness


def warnings_of(length, writes, chunk, size=1000, **options):
    """Write episodes of the given length in chunks, sample after each write, and return the warnings."""
    rb = make_small_buffer(size=size, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for write in range(writes):
            rb.extend(transitions(write * chunk, chunk, length))
            rb.sample(512)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_a_table_too_small_for_the_storage_is_reported_once_with_the_capacity_to_use(strategy):
    (message,) = warnings_of(10, 200, 20, capacity=250, strategy=strategy)
    pattern = r"^(\d+)% of the transitions .*capacity=250\) is too small for .* the storage.* at least (\d+)"
    lost, enough = re.search(pattern, message).groups()
    assert 20 <= int(lost) <= 90
    assert 250 < int(enough) <= 1100  # estimated from 500 draws; the storage holds 1,000
    assert "Pass the number of transitions that the storage can hold" in message
    assert warnings_of(10, 200, 20, capacity=1000, strategy=strategy) == []


def test_a_table_with_hardly_any_goal_of_the_samples_is_reported_once():
    (message,) = warnings_of(5, 200, 20, capacity=5)
    assert re.search(
        r"capacity=5\) is too small for .* the storage\. Pass the number of transitions that the storage can hold",
        message,
    )


@pytest.mark.parametrize(
    ("length", "chunk", "capacity"), [(10, 10, 2000), (1, 7, 2000), (30, 20, 2000), (600, 600, 2000), (600, 50, 4000)]
)
@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_table_that_is_large_enough_is_not_reported(strategy, length, chunk, capacity):
    assert warnings_of(length, 200, chunk, size=2000, strategy=strategy, capacity=capacity) == []


@pytest.mark.parametrize(("chunk", "needed"), [(50, 50), (30, 30), (10, 21), (1, 21)])
def test_a_table_smaller_than_an_episode_is_reported_once_with_the_capacity_to_use(chunk, needed):
    first, *later = warnings_of(50, 10 * 50 // chunk, chunk, size=20, capacity=20)
    assert f"at least {needed} rows of the goal table, but capacity is 20, so hindsight splits it" in first
    assert f"and at least {needed}" in first
    assert not any("splits it" in message for message in later)


@pytest.mark.parametrize("options", [{"capacity": 50}, {"capacity": 20, "max_episode_steps": 20}])
def test_episodes_of_the_size_of_the_table_and_those_that_are_cut_on_purpose_are_not_reported(options):
    assert not any("splits" in message for message in warnings_of(50, 20, 25, size=50, **options))


@pytest.mark.filterwarnings("error")
def test_running_episodes_of_many_environments_are_not_mistaken_for_lost_goals():
    lanes, length, size = 80, 20, 2_000
    rb, lane = make_small_buffer(size=size), torch.arange(lanes)
    for now in range(0, 1_000, 5):
        time = torch.arange(now, now + 5).unsqueeze(1) + lane  # [steps, lanes], each lane at a different step
        step, episode = (time % length).flatten(), (lane + lanes * (time // length)).flatten()
        start, desired = torch.stack([episode, step], 1).float(), -torch.ones(len(step), 2)
        outcome, done = start + torch.tensor([0.0, 1.0]), (step == length - 1).unsqueeze(1)
        after = {"achieved_goal": outcome, "desired_goal": desired, "done": done}
        after["reward"] = nearness(outcome, desired).unsqueeze(1)
        rb.extend(TensorDict({"achieved_goal": start, "desired_goal": desired, "next": after}, [len(step)]).clone())
        rb.sample(512)
    assert int(rb.transform[0].table.counters[1]) > size  # more episodes than the table has records


@pytest.mark.filterwarnings("error")
def test_padding_is_not_mistaken_for_lost_goals():
    rb = make_small_buffer(size=1000, mask_key="mask", her_ratio=1.0)
    for first in range(0, 2400, 16):  # more episodes than the table has records, so that of id 0 is used
        chunk = transitions(first, 16, length=2).set("mask", torch.ones(16, dtype=torch.bool))
        rb.extend(torch.cat([chunk, chunk.apply(torch.zeros_like)]))
        rb.sample(2048)


@pytest.mark.filterwarnings("error")
def test_a_buffer_that_is_not_sampled_is_not_reported():
    rb = make_small_buffer(size=1000, capacity=50)
    for write in range(100):
        rb.extend(transitions(10 * write, length=10))
