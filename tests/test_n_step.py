"""n-step returns under the new goal, against the oracle in plain Python."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import tape
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from n_step_oracle import (
    KEYS,
    NEXT_FLAGS,
    ROOT_FLAGS,
    WALK,
    Oracle,
    Step,
    Stream,
    expected,
    expected_of,
    filled,
    make_buffer,
    make_tensordict,
    make_transform,
    missing,
    reached,
    read_often,
    reward_of,
    rows_of,
    sample_of,
    write,
)
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.data import (
    LazyTensorStorage,
    MultiStep,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs import Compose, MultiStepTransform, RewardScaling, SerialEnv

import torchrl_her
from torchrl_her import EnvReward, GoalReward, HERTransform

# The oracle itself


def hand_made(*outcomes: int, asked: int = 9, end: str = "truncated") -> list[Step]:
    cells = [0, *outcomes]
    return [
        Step(at, 0, 0, at, (0, cells[at]), (0, cells[at + 1]), (0, asked), end == "terminated" and last, not_terminated)
        for at in range(len(outcomes))
        for last in [at == len(outcomes) - 1]
        for not_terminated in [end == "truncated" and last]
    ]


BY_HAND = {
    # outcomes 1, 2, 3 and the goal 9: 16 * cell - goal = 7, 23, 39
    "original": (hand_made(1, 2, 3, end=""), None, 7 + 0.5 * 23 + 0.25 * 39, 3, False, False),
    "original, truncated": (hand_made(1, 2), None, 7 + 0.5 * 23, 2, False, True),
    "original, terminated": (hand_made(1, 2, end="terminated"), None, 7 + 0.5 * 23, 2, True, False),
    "reached at once": (hand_made(1, 2, 3), (0, 1), 15, 1, True, False),
    "reached on the way": (hand_made(1, 2, 3), (0, 2), 14 + 0.5 * 30, 2, True, False),
    "reached twice": (hand_made(1, 2, 1), (0, 1), 15, 1, True, False),
    "reached at a truncation": (hand_made(1, 2, 3), (0, 3), 13 + 0.5 * 29 + 0.25 * 45, 3, True, True),
    "not reached": (hand_made(1, 2, 3), (0, 4), 12 + 0.5 * 28 + 0.25 * 44, 3, False, True),
    "the old goal's end does not end it": (
        hand_made(1, 2, end="terminated"),
        (0, 4),
        12 + 0.5 * 28,
        2,
        False,
        False,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_oracle_agrees_with_sums_by_hand(name):
    window, goal, reward, steps, terminated, truncated = BY_HAND[name]
    row = expected_of(window, goal, 0.5)
    assert row["next", "reward"] == reward
    assert (row["steps_to_next_obs"], row["gamma"]) == (steps, 0.5**steps)
    assert [row[key] for key in NEXT_FLAGS] == [terminated, truncated, terminated or truncated]


# However the data arrives


@st.composite
def streams(draw):
    ends = st.sampled_from(["terminated", "truncated", "both"])
    cells = st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=2, max_size=9).map(tuple))
    layout = draw(st.sampled_from(["[lanes, time]", "[lanes, time] with ids", "[time]", "[time] with ids", "add"]))
    return Stream(
        n=draw(st.integers(1, 5)),
        gamma=draw(st.sampled_from([0.9, 0.5, 1.0, 0.0])),
        lanes=draw(st.integers(1, 4)) if layout.startswith("[lanes") else 1,
        chunk=draw(st.integers(1, 9)),
        writes=draw(st.integers(1, 12)),
        episodes=tuple(draw(st.lists(st.tuples(st.integers(1, 12), ends), min_size=1, max_size=6))),
        cells=draw(cells),
        layout=layout,
        rows=draw(st.sampled_from([10, 17, 10_000])),
        capacity=draw(st.sampled_from([15, 40, 100_000, 100_000])),
        strategy=draw(st.sampled_from(["future", "future", "final", "episode", "random"])),
        her_ratio=draw(st.sampled_from([1.0, 1.0, 0.5])),
        tells_terminated=draw(st.sampled_from([True, True, False])),
        first_publication=draw(st.sampled_from([3, 64])),
        compact=draw(st.booleans()),
    )


@pytest.mark.filterwarnings("ignore:.*left the goal table")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(streams())
def test_however_the_data_arrives_returns_and_flags_are_those_of_the_new_goal(stream):
    rb, oracle = make_buffer(stream), Oracle(stream)
    with mock.patch.object(torchrl_her.episodes.tracker, "FIRST_PUBLICATION", stream.first_publication):
        for lanes in stream:
            write(rb, lanes, stream.layout)
            oracle.write(lanes)
            assert len(rb) == min(len(oracle.windows), stream.rows * stream.lanes)
            if not len(rb):
                continue
            stored = rb.storage[:].clone()
            oracle.check(rb.sample(32))
            oracle.check(rb[:])
            assert (rb.storage[:] == stored).all(), "sampling changed what is stored"
            newest = sorted(oracle.windows)[-1]
            assert newest in rb.storage[:]["uid"], "the last transition that came out of the window is not stored"


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, "prioritized"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_every_case_comes_up_and_is_right_in_a_buffer_that_wrapped_many_times(kind, strategy):
    if kind == "prioritized":
        kind = functools.partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    stream = Stream(**(vars(WALK) | {"rows": 40, "strategy": strategy}))
    rb, oracle = filled(stream, kind=kind)
    count = oracle.check(sample_of(rb))
    # At random, a goal is seldom one of the own episode's.
    assert not missing(count, ("original",) if strategy == "random" else ("original", "new goal"), strategy)
    assert 0.7 < count["relabelled"] / (count["relabelled"] + count["original"]) < 0.85


def test_goals_are_drawn_uniformly_from_the_transitions_own_step_on():
    stream = Stream(n=3, gamma=0.9, lanes=1, chunk=20, writes=1, episodes=((6, "truncated"),), layout="[time]")
    rb, _ = filled(stream)
    rows = rows_of(sample_of(rb, 28_000))
    for at in range(6):  # of the first episode
        drawn = Counter(row["desired_goal"][1] - 1 for row in rows if row["uid"] == at)
        assert sorted(drawn) == list(range(at, 6))
        share = drawn.total() / (6 - at)
        assert all(abs(times - share) < 5 * share**0.5 for times in drawn.values())


def test_more_than_two_dimensions_of_lanes_are_as_good_as_one():
    stream = Stream(**(vars(WALK) | {"lanes": 4, "layout": "[lanes, time]"}))
    oracle = Oracle(stream)
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000, ndim=3), transform=make_transform(stream))
    for lanes in stream:
        rb.extend(make_tensordict(list(itertools.chain(*lanes)), with_ids=False).reshape(2, 2, -1))
        oracle.write(lanes)
    count = read_often(rb, oracle)
    assert not missing(count)
    assert rb[:]["next", "reward"].shape == (2, 2, len(oracle.windows) // 4, 1)


def test_one_transition_can_be_read_by_its_index():
    rb, oracle = filled(Stream(**(vars(WALK) | {"lanes": 1, "layout": "[time]"})))
    count: Counter = Counter()
    for index in range(50):
        count += oracle.check(rb[index].unsqueeze(0))
    assert 30 < count["relabelled"] < 50


def test_the_window_can_be_changed_while_writing():
    oracle = Oracle(WALK)
    rb = make_buffer(WALK)
    for number, lanes in enumerate(WALK):
        rb.transform[0].n_steps = oracle.n = (3, 5, 2)[number % 3]
        write(rb, lanes, WALK.layout)
        oracle.write(lanes)
    assert len(rb) == len(oracle.windows)
    count = oracle.check(sample_of(rb))
    assert not missing(count)


@pytest.mark.parametrize("max_steps", [2, 3, 5, 8])
def test_a_window_over_the_end_that_max_episode_steps_sets_is_not_relabelled(max_steps):
    stream = Stream(n=3, gamma=0.9, lanes=1, chunk=10, writes=6, episodes=((1000, ""),), layout="[time]")
    rb, oracle = filled(stream, transform=make_transform(stream, max_episode_steps=max_steps))
    for row in rows_of(rb[:]):
        window = oracle.windows[row["uid"]]
        first, last = window[0].at, window[-1].at
        is_cut = first // max_steps != last // max_steps
        relabelled = row.pop(("hindsight", "relabelled"))
        assert relabelled == (not is_cut and last < 60 // max_steps * max_steps)
        goal = row["desired_goal"] if relabelled else None
        assert row == expected(window, goal, stream)
        if goal:
            assert first < goal[1] <= (first // max_steps + 1) * max_steps


def test_a_window_over_the_end_of_an_episode_that_fills_the_table_is_not_relabelled():
    """There the end of the episode lies next to its start."""
    stream = Stream(
        n=3, gamma=0.9, lanes=1, chunk=5, writes=3, episodes=((1000, ""),), layout="[time]", capacity=10,
        strategy="episode",
    )  # fmt: skip
    rb, oracle = filled(stream)
    for row in rows_of(rb[:]):
        window = oracle.windows[row["uid"]]
        relabelled = row.pop(("hindsight", "relabelled"))
        assert relabelled == (window[-1].at < 10)  # the step at which the episode is cut
        assert row == expected(window, row["desired_goal"] if relabelled else None, stream)


def test_long_episodes_are_relabelled_while_they_run_as_far_as_their_windows_are_known():
    stream = Stream(n=5, gamma=0.9, lanes=2, chunk=10, writes=15, episodes=((1000, ""),))
    rb, oracle = make_buffer(stream), Oracle(stream)
    relabelled = []
    for lanes in stream:
        write(rb, lanes, stream.layout)
        oracle.write(lanes)
        oracle.check(rb[:])
        relabelled.append(int(rb[:]["hindsight", "relabelled"].sum()) // 2)
    # With 70 steps all are known, of which the n-step transform holds five back. Of the next sixty steps, none is
    # known: the 66 windows of five steps that lie in the first 70. With 140 all are known again.
    assert relabelled == [0] * 6 + [65] + [66] * 6 + [135, 136]


@pytest.mark.parametrize("without", [["truncated"], ["truncated", "terminated"]])
def test_flags_that_the_data_does_not_have_are_not_needed(without):
    stream = Stream(**(vars(WALK) | {"tells_terminated": "terminated" not in without}))
    rb, oracle = make_buffer(stream, kind=TensorDictReplayBuffer), Oracle(stream)
    for lanes in stream:
        data = make_tensordict(list(itertools.chain(*lanes)), with_ids=False).reshape(len(lanes), -1)
        rb.extend(data.exclude(*(("next", name) for name in without)))
        oracle.write(lanes)
    batch = sample_of(rb)
    relabelled = batch["hindsight", "relabelled"].flatten().tolist()
    done, reward = batch["next", "done"].flatten().tolist(), batch["next", "reward"].flatten().tolist()
    goals = [tuple(goal) for goal in batch["desired_goal"].tolist()]
    for index, uid in enumerate(batch["uid"].tolist()):
        window = oracle.windows[uid]
        row = expected(window, goals[index] if relabelled[index] else None, stream)
        if relabelled[index] and stream.tells_terminated:
            assert done[index] == row["next", "terminated"]  # as for single steps: that is all there is to be told
        else:
            assert done[index] == window[-1].done
        assert reward[index] == row["next", "reward"]


def test_keys_can_have_other_names():
    stream = WALK
    names = {"reward": ("agent", "return"), "done": ("agent", "done")}
    transform = Compose(
        MultiStepTransform(
            stream.n,
            stream.gamma,
            reward_keys=[names["reward"]],
            done_key=names["done"],
            done_keys=[("agent", flag) for flag in ("done", "terminated", "truncated")],
        ),
        HERTransform(
            GoalReward(reward_of, terminated_fn=reached),
            reward_key=names["reward"],
            done_key=names["done"],
            achieved_goal_key=("goals", "achieved"),
            desired_goal_key=("goals", "desired"),
            trajectory_key="lane",
            capacity=1000,
        ),
    )
    renamed = {
        "achieved_goal": ("goals", "achieved"),
        "desired_goal": ("goals", "desired"),
        ("next", "achieved_goal"): ("next", "goals", "achieved"),
        ("next", "desired_goal"): ("next", "goals", "desired"),
        ("next", "reward"): ("next", "agent", "return"),
        ("next", "done"): ("next", "agent", "done"),
        ("next", "terminated"): ("next", "agent", "terminated"),
        ("next", "truncated"): ("next", "agent", "truncated"),
        ("collector", "traj_ids"): "lane",
    }
    rb, oracle = make_buffer(stream, transform), Oracle(stream)
    for lanes in stream:
        data = make_tensordict(list(itertools.chain(*lanes))).reshape(len(lanes), -1)
        for old, new in renamed.items():
            data.rename_key_(old, new)
        rb.extend(data)
        oracle.write(lanes)
    batch = sample_of(rb)
    for old, new in renamed.items():
        batch.rename_key_(new, old)
    count = oracle.check(batch)
    assert not missing(count)


@pytest.mark.parametrize("done_keys", [["done"], ["terminated", "truncated"], []])
def test_whichever_flags_torchrls_transform_leaves_alone_they_are_right(done_keys):
    transform = Compose(MultiStepTransform(WALK.n, WALK.gamma, done_keys=done_keys), *make_transform(WALK)[1:])
    rb, oracle = filled(WALK, transform=transform)
    assert not missing(oracle.check(sample_of(rb)))


def test_transforms_after_it_see_the_return_of_the_new_goal():
    scale = RewardScaling(loc=0.0, scale=2.0, in_keys=[("next", "reward")], out_keys=["scaled"])
    rb, oracle = filled(WALK, transform=Compose(*make_transform(WALK), scale))
    batch = sample_of(rb)
    assert not missing(oracle.check(batch))
    torch.testing.assert_close(batch["scaled"], 2 * batch["next", "reward"])


class Swap(torch.nn.Module):
    def forward(self, state):
        return state[..., [1, 0]]


@pytest.mark.parametrize("goal_fn", [lambda state: state[..., [1, 0]], Swap()], ids=["function", "module"])
def test_goal_fn_maps_each_outcome_on_the_way_once(goal_fn):
    """What is achieved are states, ``(cell, episode, more)``: to map a goal again would swap it back."""
    stream = WALK
    transform = make_transform(stream, goal_fn=goal_fn)
    rb, oracle = make_buffer(stream, transform), Oracle(stream)
    achieved = ["achieved_goal", ("next", "achieved_goal")]
    for lanes in stream:
        data = make_tensordict(list(itertools.chain(*lanes))).reshape(len(lanes), -1)
        for key in achieved:
            data[key] = torch.cat([data[key].flip(-1), data[key].sum(-1, keepdim=True)], -1)
        rb.extend(data)
        oracle.write(lanes)
    batch = sample_of(rb)
    for key in achieved:
        batch[key] = batch[key][..., [1, 0]]
    count = oracle.check(batch)
    assert not missing(count)


def test_a_module_that_reads_goals_alone_is_as_good_as_a_function():
    module = TensorDictModule(
        lambda achieved, desired: (
            reward_of(achieved, desired).float().unsqueeze(-1),
            reached(achieved, desired).unsqueeze(-1),
        ),
        in_keys=[("next", "achieved_goal"), "desired_goal"],
        out_keys=[("next", "reward"), ("next", "terminated")],
    )
    transform = Compose(MultiStepTransform(WALK.n, WALK.gamma), HERTransform(module, capacity=1000))
    rb, oracle = filled(WALK, transform=transform)
    count = oracle.check(sample_of(rb))
    assert not missing(count)


def test_appended_one_after_the_other_they_work_as_composed():
    composed = make_transform(WALK)
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000, ndim=2))
    for transform in list(composed):
        rb.append_transform(transform.clone() if transform is composed[0] else copy.deepcopy(transform))
    oracle = Oracle(WALK)
    for lanes in WALK:
        write(rb, lanes, WALK.layout)
        oracle.write(lanes)
    count = oracle.check(sample_of(rb))
    assert not missing(count)


# Real environments and collectors


def check_tape(batch: TensorDictBase, n: int, gamma: float) -> Counter:
    """Check windows of `tape.Tape`, whose goals and observations are ``(environment, episode, state)``."""
    assert gamma == 0.5, "with halves and whole numbers sums are exact"
    rows = batch.reshape(-1)
    keys = [*KEYS[1:], ("hindsight", "relabelled")]
    columns = {key: rows[key].reshape(len(rows), -1).tolist() for key in keys}
    count: Counter = Counter()
    for index in range(len(rows)):
        row = {key: columns[key][index] for key in keys}
        number, episode, state = row["observation"]
        length = tape.length_of(int(number), int(episode))
        steps = int(min(n, length - state))
        relabelled, goal = row["hindsight", "relabelled"][0], row["desired_goal"]
        asked = [number, episode, tape.ASKED]
        assert goal == [number, episode, goal[-1]]
        assert state < goal[-1] <= length if relabelled else goal == asked
        rewards = []
        for later in range(1, steps + 1):
            outcome = [number, episode, state + later]
            rewards.append(sum(int(w) * (a - 2 * g) for w, a, g in zip(tape.WEIGHTS, outcome, goal, strict=True)))
            if outcome == goal:
                break
        stops = relabelled and outcome == goal
        at_end = state + steps == length
        terminated = stops if relabelled else at_end and episode % 2 == 0
        truncated = at_end and episode % 2 == 1 and len(rewards) == steps
        last = [number, episode, state + steps]
        assert row == {
            "observation": row["observation"],
            "achieved_goal": row["observation"],
            "desired_goal": goal,
            **{key: [False] for key in ROOT_FLAGS},
            "steps_to_next_obs": [len(rewards)],
            "gamma": [gamma ** len(rewards)],
            "nonterminal": [len(rewards) > 1],
            ("next", "observation"): last,
            ("next", "achieved_goal"): last,
            ("next", "desired_goal"): goal,
            ("next", "reward"): [sum(gamma**i * reward for i, reward in enumerate(rewards))],
            ("next", "original_reward"): rewards[:1],
            ("next", "terminated"): [terminated],
            ("next", "truncated"): [truncated],
            ("next", "done"): [terminated or truncated],
            ("hindsight", "relabelled"): [relabelled],
        }
        count["relabelled" if relabelled else "original"] += 1
        count["reached on the way"] += stops and len(rewards) > 1
        count["sampled"] += 1
    return count


def tape_transform(n: int = 3, **kwargs: Any) -> Compose:
    reward = EnvReward(functools.partial(tape.make_tape, 0))
    return Compose(MultiStepTransform(n, 0.5), HERTransform(reward, **({"capacity": 10_000} | kwargs)))


def serial(count: int) -> SerialEnv:
    return SerialEnv(count, [functools.partial(tape.make_tape, number) for number in range(count)])


@pytest.mark.parametrize("frames", [6, 60])  # less than the window and more
@pytest.mark.parametrize("how", ["yields", "writes"])
def test_what_a_collector_of_a_batch_of_environments_makes_is_right(how, frames):
    rb = ReplayBuffer(storage=LazyTensorStorage(600, ndim=2), transform=tape_transform(), batch_size=600)
    direct = {"replay_buffer": rb} if how == "writes" else {}
    collector = Collector(serial(3), frames_per_batch=frames, total_frames=960, **direct)
    for data in collector:
        if how == "yields":
            rb.extend(data)
    collector.shutdown()
    assert len(rb) == 600
    count = check_tape(rb.sample(), n=3, gamma=0.5)
    assert 0.7 < count["relabelled"] / count["sampled"] < 0.85
    assert count["reached on the way"] > 50


@pytest.mark.parametrize("how", ["yields", "writes", "adds"])
def test_a_collector_of_one_environment_is_right(how):
    kind = ReplayBuffer if how == "adds" else TensorDictReplayBuffer
    rb = kind(storage=LazyTensorStorage(400), transform=tape_transform(), batch_size=600)
    direct = {"replay_buffer": rb} if how == "writes" else {}
    collector = Collector(tape.make_tape(1), frames_per_batch=20, total_frames=600, **direct)
    for data in collector:
        if how == "yields":
            rb.extend(data)
        elif how == "adds":
            for row in data.unbind(0):
                rb.add(row)
    collector.shutdown()
    assert len(rb) == 400
    count = check_tape(rb.sample(), n=3, gamma=0.5)
    assert 0.7 < count["relabelled"] / count["sampled"] < 0.85
    assert count["reached on the way"] > 50


@pytest.mark.parametrize("filled_before", [False, True], ids=["empty before", "filled before"])
def test_workers_that_write_into_a_shared_buffer_have_windows_of_their_own(filled_before):
    """Of a buffer that the main process filled, TorchRL's transform joins what that holds back to each worker's."""
    spec = tape.make_tape().observation_spec["achieved_goal"]
    rb = ReplayBuffer(
        storage=LazyTensorStorage(2000, shared_init=not filled_before),
        transform=tape_transform(goal_spec=spec),
        shared=True,
        batch_size=500,
    )
    if filled_before:
        (data,) = Collector(tape.make_tape(2), frames_per_batch=103, total_frames=103)
        rb.extend(data)
    workers = [functools.partial(tape.make_tape, number) for number in range(2)]
    collector = MultiAsyncCollector(workers, frames_per_batch=100, total_frames=1500, replay_buffer=rb)
    for _ in collector:
        pass
    collector.shutdown()
    check_tape(rb[:], n=3, gamma=0.5)
    count = check_tape(rb.sample(), n=3, gamma=0.5)
    assert len(rb[:]["observation"][:, 0].unique()) == 2 + filled_before
    assert 0.7 < count["relabelled"] / count["sampled"] < 0.85
    assert count["reached on the way"] > 50


@pytest.mark.parametrize("filled_before", [True, False])
def test_another_process_loses_nothing_after_its_first_write(filled_before):
    spec = tape.make_tape().observation_spec["achieved_goal"]
    chunks = list(Collector(tape.make_tape(2), frames_per_batch=5, total_frames=20))
    observations = []
    for in_another_process in (False, True):
        rb = ReplayBuffer(storage=LazyTensorStorage(2000), transform=tape_transform(goal_spec=spec))
        hindsight = rb.transform[1].share_memory_()
        if filled_before:
            (data,) = Collector(tape.make_tape(3), frames_per_batch=7, total_frames=7)
            rb.extend(data)
        if in_another_process:
            hindsight._process = -1  # as in a fork, whose number is another
        else:
            hindsight.flush()
        for chunk in chunks:
            rb.extend(chunk)
        stored = rb.storage[:]["observation"]
        observations.append(stored[stored[:, 0] == 2])
    assert len(observations[0]) == 20 - 3  # held back
    assert torch.equal(*observations)


@pytest.mark.parametrize("transform", [lambda: MultiStepTransform(3, 0.5), tape_transform], ids=["plain", "hindsight"])
def test_a_shared_buffer_that_its_processes_do_not_set_up_is_beyond_torchrls_transform(transform):
    """The transition that TorchRL sets the storage up with is held back."""
    spec = tape.make_tape().observation_spec["achieved_goal"]
    transform = transform(goal_spec=spec) if transform is tape_transform else transform()
    rb = ReplayBuffer(storage=LazyTensorStorage(2000), transform=transform, shared=True)
    with pytest.raises(RuntimeError, match="if it has not been initialized yet"):
        MultiAsyncCollector([tape.make_tape] * 2, frames_per_batch=100, total_frames=1500, replay_buffer=rb)


# Sequences, saving, devices


def test_the_windows_of_a_sequence_get_one_goal():
    sampler = SliceSampler(slice_len=4, end_key=("next", "done"), truncated_key=None)
    stream = Stream(**(vars(WALK) | {"lanes": 1, "layout": "[time]", "cells": None, "her_ratio": 1.0}))
    transform = make_transform(stream, sequence_length=4)
    rb, oracle = filled(stream, transform=transform, sampler=sampler)
    torch.manual_seed(0)
    batch = rb.sample(400)
    count: Counter = Counter()
    for slice_ in batch.reshape(100, 4).unbind(0):
        assert (slice_["uid"].diff() == 1).all()
        assert (slice_["desired_goal"] == slice_["desired_goal"][0]).all()
        assert slice_["desired_goal"][0, 1] > oracle.windows[int(slice_["uid"][-1])][0].at
        count += oracle.check(slice_)
    assert count["relabelled"] == 400
    assert count["new goal: terminated on the way"] > 0


def line(start: int, steps: int, ends: bool) -> TensorDict:
    """An episode, or a part of one, that goes from ``start`` on by 1: [steps]."""
    states = torch.arange(start, start + steps + 1.0).unsqueeze(-1)
    goals, done = torch.full((steps, 1), -1.0), torch.zeros(steps, 1, dtype=torch.bool)
    done[-1] = ends
    after = {"achieved_goal": states[1:], "desired_goal": goals.clone(), "reward": goals.clone(), "done": done}
    data = TensorDict({"achieved_goal": states[:-1], "desired_goal": goals, "next": after}, [steps])
    data["next", "terminated"], data["next", "truncated"] = torch.zeros_like(done), done.clone()
    return data


PARTLY_KNOWN = {  # windows of episodes of which the table does not have all
    "an episode that goes on": (1_000, [line(0, 70, False), line(70, 30, False)]),
    "a table that is too small": (50, [line(100 * episode, 20, True) for episode in range(12)]),
}


@pytest.mark.parametrize("case", PARTLY_KNOWN)
def test_a_sequence_gets_one_goal_or_keeps_its_own(case):
    capacity, writes = PARTLY_KNOWN[case]
    transform = HERTransform(
        lambda achieved, desired: (achieved == desired).all(-1).float() - 1,
        her_ratio=1.0,
        capacity=capacity,
        sequence_length=4,
    )
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1_000),
        sampler=SliceSampler(slice_len=4, end_key=("next", "done"), truncated_key=None),
        transform=Compose(MultiStepTransform(3, 0.9), transform),
    )
    for data in writes:
        rb.extend(data)
    torch.manual_seed(0)
    batch = rb.sample(4_000).reshape(1_000, 4)
    relabelled = batch["hindsight", "relabelled"].squeeze(-1)
    assert (relabelled == relabelled[:, :1]).all()
    assert (batch["desired_goal"] == batch["desired_goal"][:, :1]).all()
    assert 0 < relabelled.float().mean() < 1


def saved_and_loaded(rb: ReplayBuffer, loaded: ReplayBuffer, how: str, path: Any) -> ReplayBuffer:
    if how == "dumps":
        rb.dumps(path)
        loaded.loads(path)
    else:
        loaded.load_state_dict(rb.state_dict())
    return loaded


@pytest.mark.parametrize("how", ["dumps", "state_dict"])
def test_what_was_saved_is_continued_and_only_what_was_held_back_is_missing(how, tmp_path):
    """The frames that the n-step transform holds back are in no state dict: they are never stored."""
    writes = list(WALK)
    rb, oracle = make_buffer(WALK), Oracle(WALK)
    for lanes in writes[:15]:
        write(rb, lanes, WALK.layout)
        oracle.write(lanes)
    rb = saved_and_loaded(rb, make_buffer(WALK), how, tmp_path)
    oracle.check(rb[:])
    oracle.lose_what_is_held_back()
    for lanes in writes[15:]:
        write(rb, lanes, WALK.layout)
        oracle.write(lanes)
    count = read_often(rb, oracle)
    assert len(rb) == len(oracle.windows) == WALK.lanes * (WALK.chunk * WALK.writes - 2 * WALK.n)
    assert not missing(count)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_windows_that_were_saved_are_right_with_another_window(n, tmp_path):
    rb, oracle = filled(WALK)
    other = Stream(**(vars(WALK) | {"n": n}))
    rb = saved_and_loaded(rb, make_buffer(other), "dumps", tmp_path)
    count: Counter = Counter()
    for row in rows_of(sample_of(rb)):
        relabelled = row.pop(("hindsight", "relabelled"))
        window = oracle.windows[row["uid"]]
        goal = row["desired_goal"] if relabelled else None
        assert row == expected(window, goal, WALK)
        count["relabelled"] += relabelled
    assert count["relabelled"] > 100


def reset_all(lanes: list[list[Step]]) -> list[list[Step]]:
    """What comes after the next reset of every environment."""
    lanes = [list(itertools.dropwhile(lambda step: step.at, steps)) for steps in lanes]
    return [steps[: min(map(len, lanes))] for steps in lanes]


def begins_anew(rb: ReplayBuffer, oracle: Oracle, lanes: list[list[Step]]) -> None:
    """Check that lanes can begin anywhere, and that nothing held back is joined to them."""
    oracle.lose_what_is_held_back()
    oracle.end_episodes()
    before = len(rb)
    for first in range(0, len(lanes[0]) - 7, 8):
        chunk = [steps[first : first + 8] for steps in lanes]
        write(rb, chunk, WALK.layout)
        oracle.write(chunk)
    assert len(rb) > before
    assert len(rb) == len(oracle.windows)
    assert not missing(read_often(rb, oracle))


def half_written() -> tuple[ReplayBuffer, Oracle, list[list[Step]]]:
    """A buffer, and what is not written yet of each lane: all are inside an episode."""
    writes = list(WALK)
    rb, oracle = make_buffer(WALK), Oracle(WALK)
    for lanes in writes[:17]:
        write(rb, lanes, WALK.layout)
        oracle.write(lanes)
    rest = [list(itertools.chain(*steps)) for steps in zip(*writes[17:], strict=True)]
    assert all(steps[0].at for steps in rest)
    return rb, oracle, rest


@pytest.mark.parametrize("how", ["dumps", "state_dict"])
def test_after_loading_all_environments_can_be_reset(how, tmp_path):
    """A process that resumes holds nothing back that a window could join to what comes next."""
    rb, oracle, lanes = half_written()
    rb = saved_and_loaded(rb, make_buffer(WALK), how, tmp_path)
    begins_anew(rb, oracle, reset_all(lanes))


def test_after_flush_all_environments_can_be_reset():
    rb, oracle, lanes = half_written()
    rb.transform[1].flush()
    begins_anew(rb, oracle, reset_all(lanes))


def test_after_flush_lanes_can_go_on_and_nothing_is_lost():
    rb, oracle, lanes = half_written()
    rb.transform[1].flush()
    oracle.end_episodes()
    for first in range(0, len(lanes[0]), WALK.chunk):
        chunk = [steps[first : first + WALK.chunk] for steps in lanes]
        write(rb, chunk, WALK.layout)
        oracle.write(chunk)
    assert len(rb) == len(oracle.windows) == WALK.lanes * (WALK.chunk * WALK.writes - WALK.n)
    assert not missing(read_often(rb, oracle))


def test_an_older_checkpoint_is_continued_and_not_joined_to_what_was_held_back_since(tmp_path):
    rb, oracle, lanes = half_written()
    rb.dumps(tmp_path)
    write(rb, [steps[:9] for steps in lanes], WALK.layout)
    rb.loads(tmp_path)
    oracle.check(rb[:])
    begins_anew(rb, oracle, lanes)


def test_a_copy_of_the_buffer_goes_on_as_the_original_does():
    writes = list(WALK)
    rb, oracle = make_buffer(WALK), Oracle(WALK)
    for lanes in writes[:15]:
        write(rb, lanes, WALK.layout)
        oracle.write(lanes)
    transform = copy.deepcopy(rb.transform)
    copied = make_buffer(WALK, transform)
    other = copy.deepcopy(oracle)
    for lanes in writes[15:]:
        write(copied, lanes, WALK.layout)
        other.write(lanes)
    assert other.check(copied[:]).total() > 0
    for lanes in writes[15:18]:  # the original has not noticed
        write(rb, lanes, WALK.layout)
        oracle.write(lanes)
    oracle.check(rb[:])


FORBIDDEN = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::lift_fresh")


class NoSynchronisation(TorchDispatchMode):
    """Forbids what makes the host wait for a device; to make a tensor there of a Python number does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in FORBIDDEN, name
        if name in ("aten::index.Tensor", "aten::index", "aten::index_put_", "aten::index_put"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), name
        return func(*args, **(kwargs or {}))


def test_sampling_makes_no_device_wait():
    rb, _ = filled(WALK)
    batch = rb.storage[:].reshape(-1).clone()
    rb.transform(batch.clone())
    with NoSynchronisation():
        sample = rb.transform(batch)
    assert sample["hindsight", "relabelled"].any()


# What is refused


def is_refused(rb: ReplayBuffer, make_write: Any, message: str) -> None:
    """Check that a write is refused, and that nothing has changed."""
    before = len(rb)
    with pytest.raises((ValueError, TypeError), match=message):
        make_write()
    assert len(rb) == before


def action_reward() -> TensorDictModule:
    return TensorDictModule(
        lambda achieved, desired, action: reward_of(achieved, desired).unsqueeze(-1) - action[..., :1],
        in_keys=[("next", "achieved_goal"), "desired_goal", "action"],
        out_keys=[("next", "reward")],
    )


def observation_reward() -> TensorDictModule:
    return TensorDictModule(
        lambda desired, observation: observation - desired[..., :1],
        in_keys=["desired_goal", ("next", "observation")],
        out_keys=[("next", "reward")],
    )


def root_reward() -> TensorDictModule:
    """How far a step went: what was achieved before is not an outcome of the window."""
    return TensorDictModule(
        lambda before, after: (after - before)[..., :1],
        in_keys=["achieved_goal", ("next", "achieved_goal")],
        out_keys=[("next", "reward")],
    )


def goal_module() -> TensorDictModule:
    return TensorDictModule(
        lambda achieved, desired: reward_of(achieved, desired).unsqueeze(-1),
        in_keys=[("next", "achieved_goal"), "desired_goal"],
        out_keys=[("next", "reward")],
    )


def her(reward: Any = None, **kwargs: Any) -> HERTransform:
    return HERTransform(reward or GoalReward(reward_of, terminated_fn=reached), **({"capacity": 1000} | kwargs))


def n_step(**kwargs: Any) -> MultiStepTransform:
    return MultiStepTransform(3, 0.9, **kwargs)


REFUSED_TRANSFORMS = {
    "the wrong order": lambda: Compose(her(), n_step()),
    "the wrong order, nested": lambda: Compose(Compose(her()), Compose(n_step())),
    "n steps on both sides": lambda: Compose(n_step(), her(), n_step()),
    "n steps of n steps": lambda: Compose(n_step(), n_step(), her()),
    "a reward of the action": lambda: Compose(n_step(), her(action_reward())),
    "a reward of the observation": lambda: Compose(n_step(), her(observation_reward())),
    "a reward of what was achieved before": lambda: Compose(n_step(), her(root_reward())),
    "a reward of the info": lambda: Compose(
        n_step(), her(EnvReward(functools.partial(tape.make_tape, 0), info_keys=["observation"]))
    ),
    "goal_fn and a module": lambda: Compose(n_step(), her(goal_module(), goal_fn=lambda state: state)),
    "rewards of another name": lambda: Compose(n_step(reward_keys=["income"]), her()),
    "more rewards than one": lambda: Compose(n_step(reward_keys=["reward", "income"]), her()),
    "an end of another name": lambda: Compose(n_step(done_key="truncated"), her()),
}


@pytest.mark.parametrize("chunk", [2, 20])  # less than the window, of which TorchRL stores nothing, and more
@pytest.mark.parametrize("name", REFUSED_TRANSFORMS)
def test_transforms_that_cannot_give_right_returns_are_refused(name, chunk):
    stream = Stream(**(vars(WALK) | {"chunk": chunk, "writes": 1}))
    rb = make_buffer(stream, REFUSED_TRANSFORMS[name]())
    (lanes,) = stream
    data = make_tensordict(list(itertools.chain(*lanes))).reshape(stream.lanes, -1)
    data["next", "income"] = data["next", "reward"].clone()
    is_refused(rb, lambda: rb.extend(data), "MultiStepTransform")


# Episodes of seven steps in writes of five: after two, three and four writes all lanes are inside an episode.
SEVENS = Stream(
    n=3, gamma=0.9, lanes=4, chunk=5, writes=12, episodes=((7, "truncated"),), layout="[lanes, time] with ids"
)


def block(lanes: list[list[Step]], with_ids: bool) -> TensorDict:
    return make_tensordict(list(itertools.chain(*lanes)), with_ids).reshape(len(lanes), -1)


# From the writes (each ``[lanes, time]``), and how many were written before, to a write that must not follow them.
MIXED = {
    "flattened": lambda writes, k: writes[k].reshape(-1),
    "flattened, time first": lambda writes, k: writes[k].transpose(0, 1).reshape(-1),
    "one step of all lanes": lambda writes, k: writes[k][:, 0],
    "a reset inside a row": lambda writes, k: torch.cat([writes[k][:, :2], writes[k + 4][:, 1:]], 1),
    "a reset inside one row": lambda writes, k: torch.cat(
        [writes[k][:-1], torch.cat([writes[k][-1:, :2], writes[k + 4][-1:, 2:]], 1)]
    ),
    "n steps": lambda writes, k: writes[k].set("steps_to_next_obs", torch.ones(4, 5, dtype=torch.int64)),
}
MIXED_LATER = {
    "the rows of another worker": lambda writes, k: writes[k].roll(2, 0),
    "a reset between writes": lambda writes, k: torch.cat(writes, 1)[:, 7 * (5 * k // 7 + 1) :][:, :5],
    "fewer rows": lambda writes, k: writes[k][:3],
    "more rows": lambda writes, k: torch.cat([writes[k], writes[k]]),
    "rows of rows": lambda writes, k: writes[k].reshape(2, 2, 5),
    "a single row": lambda writes, k: writes[k][0],
}


@pytest.mark.parametrize("with_ids", [True, False], ids=["with ids", "without ids"])
@pytest.mark.parametrize(
    ("name", "before"), [*itertools.product(MIXED, [0, 2, 3, 4]), *itertools.product(MIXED_LATER, [2, 3, 4])]
)
def test_a_write_that_would_mix_lanes_in_a_window_is_refused_and_leaves_no_trace(name, before, with_ids):
    stream = Stream(**(vars(SEVENS) | {"layout": "[lanes, time] with ids" if with_ids else "[lanes, time]"}))
    rb, oracle = make_buffer(stream), Oracle(stream)
    steps = list(stream)
    bad = (MIXED | MIXED_LATER)[name]([block(lanes, with_ids) for lanes in steps], before)
    for lanes in steps[:before]:
        write(rb, lanes, stream.layout)
        oracle.write(lanes)
    is_refused(rb, lambda: rb.extend(bad), "MultiStep")
    for lanes in steps[before:]:
        write(rb, lanes, stream.layout)
        oracle.write(lanes)
    oracle.check(rb[:])
    assert len(rb) == len(oracle.windows) == 4 * (60 - 3)


def test_lanes_that_stand_at_the_same_goals_are_told_apart_by_their_ids():
    rb = make_buffer(SEVENS)
    still = {"start": (0, 0), "outcome": (0, 0), "desired": (0, 1)}
    first, second = ([[replace(step, **still) for step in steps] for steps in lanes] for lanes in list(SEVENS)[1:3])
    write(rb, first, SEVENS.layout)
    is_refused(rb, lambda: write(rb, second[1:] + second[:1], SEVENS.layout), "MultiStep")
    write(rb, second, SEVENS.layout)
    assert len(rb) == 4 * (10 - 3)


@pytest.mark.parametrize("with_ids", [True, False], ids=["with ids", "without ids"])
def test_lanes_that_follow_each_other_after_an_end_are_not_refused(with_ids):
    """Whole episodes one after the other: no window reaches over an end."""
    stream = Stream(**(vars(SEVENS) | {"chunk": 7}))
    joined = Stream(**(vars(stream) | {"lanes": 1, "layout": "[time] with ids" if with_ids else "[time]"}))
    rb, oracle = make_buffer(joined), Oracle(joined)
    for lanes in stream:
        lanes = [list(itertools.chain(*lanes))]
        write(rb, lanes, joined.layout)
        oracle.write(lanes)
    oracle.check(rb[:])
    assert len(rb) == len(oracle.windows) == 4 * 12 * 7 - 3


def test_flattened_data_of_a_collector_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(600), transform=tape_transform())
    collector = Collector(serial(3), frames_per_batch=60, total_frames=60)
    is_refused(rb, lambda: [rb.extend(data.reshape(-1)) for data in collector], "MultiStep")
    collector.shutdown()


def test_collectors_in_turn_are_refused():
    """As an asynchronous collector yields the batches of its workers; here the workers' ids collide, too."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(600, ndim=2), transform=tape_transform())
    workers = [
        Collector(
            SerialEnv(2, [functools.partial(tape.make_tape, number + other) for number in range(2)]),
            frames_per_batch=20,
            total_frames=200,
        )
        for other in (0, 2)
    ]
    first, second = (next(iter(worker)) for worker in workers)
    rb.extend(first)
    is_refused(rb, lambda: rb.extend(second), "MultiStep")
    for worker in workers:
        worker.shutdown()


def test_resets_that_nothing_announces_are_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(600, ndim=2), transform=tape_transform())
    collector = Collector(serial(2), frames_per_batch=20, total_frames=200, reset_at_each_iter=True)
    first, second = itertools.islice(collector, 2)
    collector.shutdown()
    rb.extend(first)
    is_refused(rb, lambda: rb.extend(second), "MultiStep")


def test_n_step_data_from_a_collectors_postprocessing_is_refused():
    postproc = MultiStep(gamma=0.5, n_steps=3)
    collector = Collector(serial(2), frames_per_batch=20, total_frames=20, postproc=postproc)
    (data,) = collector
    collector.shutdown()
    for transform in (tape_transform(), tape_transform()[1]):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(600, ndim=2), transform=transform)
        is_refused(rb, lambda rb=rb: rb.extend(data.clone()), "MultiStep")


def test_torchrls_own_limits():
    """A TensorDictReplayBuffer can neither ``add`` through a MultiStepTransform, nor take one step of several lanes."""
    single = Stream(**(vars(WALK) | {"layout": "add", "lanes": 1}))
    rb = make_buffer(single, n_step(), kind=TensorDictReplayBuffer)
    with pytest.raises(RuntimeError, match="Not enough dimensions"):
        write(rb, next(iter(single)), "add")
    rb = make_buffer(single, kind=TensorDictReplayBuffer)
    is_refused(rb, lambda: write(rb, next(iter(single)), "add"), "MultiStepTransform.*use extend")

    steps = list(Stream(**(vars(WALK) | {"chunk": 1})))
    for transform in (n_step(), make_transform(WALK)):
        rb = make_buffer(WALK, transform, kind=TensorDictReplayBuffer)
        for lanes in steps[:3]:
            write(rb, lanes, WALK.layout)
        with pytest.raises(RuntimeError, match="tensor shape is incompatible"):
            write(rb, steps[3], WALK.layout)
