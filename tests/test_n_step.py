"""n-step returns under the new goal, compared with an oracle in plain Python."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.envs import Compose, MultiStepTransform, RewardScaling

from support.factories import WAYS_TO_COPY, check_refused, filled, make_buffer, make_transform, seeded_sample
from support.goals import reached, reward_of
from support.n_step_oracle import WALK, NStepOracle, check_often, expected_in_float32, missing
from support.oracle import RELABELLED, as_dicts, expected_of, run
from support.streams import NEXT_FLAGS, Lanes, Stream, Transition, make_episode, make_tensordict, rows_of, write
from support.tape import make_tape
from torchrl_her import EnvReward, SparseReward

NEXT_ACHIEVED, NEXT_REWARD = ("next", "achieved_goal"), ("next", "reward")
SEVENS = Stream(n=3, gamma=0.9, lanes=4, chunk=5, writes=12, lengths=((7, "truncated"),), layout=WALK.layout)
RUNNING = Stream(n=3, gamma=0.9, lanes=1, chunk=10, writes=6, lengths=((1000, ""),), layout="flat")
fill = functools.partial(filled, NStepOracle)
n_step = functools.partial(MultiStepTransform, WALK.n, WALK.gamma)
her = functools.partial(make_transform, None, capacity=1000)
slices = functools.partial(SliceSampler, slice_len=4, end_key=("next", "done"), truncated_key=None)
is_refused = functools.partial(check_refused, error=(ValueError, TypeError), message="MultiStep")


def block(lanes: Lanes, with_ids: bool = True) -> TensorDict:
    """Return the data of a write, ``[lanes, time]``."""
    return make_tensordict(rows_of(lanes), with_ids).reshape(len(lanes), -1)


def feed(rb: ReplayBuffer, oracle: NStepOracle, writes: Iterable[Lanes], change: Callable | None = None) -> None:
    """Write to the buffer and to the oracle. The buffer gets the data after ``change``."""
    for lanes in writes:
        if change is None:
            write(rb, lanes, oracle.stream.layout, oracle)
        else:
            rb.extend(change(block(lanes)))
            oracle.write(rows_of(lanes))


def read(batch: TensorDictBase, oracle: NStepOracle) -> Iterator[tuple[dict, list[Transition], Any]]:
    """Yield the entries of each transition, its window, and its new goal or None if it was not relabelled."""
    for row in as_dicts(batch, [*oracle.entries, RELABELLED]):
        goal = row["desired_goal"] if row.pop(RELABELLED) else None
        yield row, oracle.windows[row["uid"]], goal


# The oracle itself


def hand_made(*outcomes: int, end: str = "truncated") -> list[Transition]:
    """Return a window from cell 0 over the given cells, with the goal 9."""
    cells, last = [0, *outcomes], len(outcomes) - 1
    return [
        Transition(at, 0, 0, at, (0, cells[at]), (0, cells[at + 1]), (0, 9), *flags)
        for at in range(len(outcomes))
        for flags in [[at == last and end == flag for flag in ("terminated", "truncated")]]
    ]


BY_HAND = {
    # The rewards 16 * cell - goal of the cells 1, 2, 3 with the goal 9 are 7, 23, 39.
    "original": (hand_made(1, 2, 3, end=""), None, 7 + 0.5 * 23 + 0.25 * 39, 3, False, False),
    "original, truncated": (hand_made(1, 2), None, 7 + 0.5 * 23, 2, False, True),
    "original, terminated": (hand_made(1, 2, end="terminated"), None, 7 + 0.5 * 23, 2, True, False),
    "reached in the first step": (hand_made(1, 2, 3), (0, 1), 15, 1, True, False),
    "reached in the second step": (hand_made(1, 2, 3), (0, 2), 14 + 0.5 * 30, 2, True, False),
    "reached twice": (hand_made(1, 2, 1), (0, 1), 15, 1, True, False),
    "reached at a truncation": (hand_made(1, 2, 3), (0, 3), 13 + 0.5 * 29 + 0.25 * 45, 3, True, True),
    "not reached": (hand_made(1, 2, 3), (0, 4), 12 + 0.5 * 28 + 0.25 * 44, 3, False, True),
    "ended only under the old goal": (hand_made(1, 2, end="terminated"), (0, 4), 12 + 0.5 * 28, 2, False, False),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_oracle_agrees_with_sums_by_hand(name):
    window, goal, reward, steps, terminated, truncated = BY_HAND[name]
    row = expected_of(window, goal, 0.5)
    assert row[NEXT_REWARD] == reward
    assert (row["steps_to_next_obs"], row["gamma"]) == (steps, 0.5**steps)
    assert [row[key] for key in NEXT_FLAGS] == [terminated, truncated, terminated or truncated]


# However the data arrives


@st.composite
def streams(draw):
    ends = st.sampled_from(["terminated", "truncated", "both"])
    cells = st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=2, max_size=9).map(tuple))
    layout = draw(st.sampled_from(["[lanes, time]", "[lanes, time] with ids", "flat", "flat with ids", "add"]))
    return Stream(
        n=draw(st.integers(1, 5)),
        gamma=draw(st.sampled_from([0.9, 0.5, 1.0, 0.0])),
        lanes=draw(st.integers(1, 4)) if layout.startswith("[lanes") else 1,
        chunk=draw(st.integers(1, 9)),
        writes=draw(st.integers(1, 12)),
        lengths=tuple(draw(st.lists(st.tuples(st.integers(1, 12), ends), min_size=1, max_size=6))),
        cells=draw(cells),
        layout=layout,
        rows=draw(st.sampled_from([10, 17, 10_000])),
        capacity=draw(st.sampled_from([15, 40, 100_000, 100_000])),
        strategy=draw(st.sampled_from(["future", "future", "final", "episode", "random"])),
        her_ratio=draw(st.sampled_from([1.0, 1.0, 0.5])),
        writes_terminated=draw(st.sampled_from([True, True, False])),
        first_publication=draw(st.sampled_from([3, 64])),
        compact=draw(st.booleans()),
    )


@pytest.mark.filterwarnings("ignore:.*left the goal table")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(streams())
def test_however_the_data_arrives_returns_and_flags_are_those_of_the_new_goal(stream):
    run(stream, NStepOracle)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, "prioritized"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_every_case_occurs_and_is_right_in_a_buffer_that_wrapped_many_times(kind, strategy):
    if kind == "prioritized":
        kind = functools.partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    rb, oracle = fill(replace(WALK, rows=40, strategy=strategy), kind=kind)
    count = oracle.check(seeded_sample(rb, 2_000))
    # With "random", goals of the transition's own episode are rare.
    assert not missing(count, ("original",) if strategy == "random" else ("original", "new goal"), strategy)
    assert 0.7 < count["relabelled"] / (count["relabelled"] + count["original"]) < 0.85


def test_goals_are_drawn_uniformly_from_the_transitions_own_step_on():
    rb, _ = fill(Stream(n=3, gamma=0.9, lanes=1, chunk=20, writes=1, lengths=((6, "truncated"),), layout="flat"))
    rows = as_dicts(seeded_sample(rb, 28_000), ["uid", "desired_goal"])
    for at in range(6):  # the steps of the first episode
        drawn = Counter(row["desired_goal"][1] - 1 for row in rows if row["uid"] == at)
        assert sorted(drawn) == list(range(at, 6))
        share = drawn.total() / (6 - at)
        assert all(abs(times - share) < 5 * share**0.5 for times in drawn.values())


def test_data_with_two_dimensions_of_lanes_gives_the_same_windows():
    stream = replace(WALK, lanes=4)
    rb, oracle = make_buffer(stream, storage=functools.partial(LazyTensorStorage, ndim=3)), NStepOracle(stream)
    feed(rb, oracle, stream, lambda data: data.exclude("collector").reshape(2, 2, -1))
    assert not missing(check_often(rb, oracle))
    assert rb[:][NEXT_REWARD].shape == (2, 2, len(oracle.windows) // 4, 1)


def test_one_transition_can_be_read_by_its_index():
    rb, oracle = fill(replace(WALK, lanes=1, layout="flat"))
    count = sum((oracle.check(rb[index].unsqueeze(0)) for index in range(50)), Counter())
    assert 30 < count["relabelled"] < 50


def test_the_window_can_be_changed_while_writing():
    rb, oracle = make_buffer(WALK), NStepOracle(WALK)
    for number, lanes in enumerate(WALK):
        rb.transform[0].n_steps = oracle.n = (3, 5, 2)[number % 3]
        feed(rb, oracle, [lanes])
    assert len(rb) == len(oracle.windows)
    assert not missing(oracle.check(seeded_sample(rb, 2_000)))


CUT = {
    **{f"max_episode_steps={steps}": (RUNNING, {"max_episode_steps": steps}, steps) for steps in (2, 3, 5, 8)},
    # In a full table, the last row of the episode is followed by its first row.
    "the table is full": (replace(RUNNING, chunk=5, writes=3, capacity=10, strategy="episode"), {}, 10),
}


@pytest.mark.parametrize("case", CUT)
def test_a_window_over_the_end_of_a_cut_episode_is_not_relabelled(case):
    stream, options, steps = CUT[case]
    rb, oracle = fill(stream, transform=make_transform(stream, **options))
    for row, window, goal in read(rb[:], oracle):
        first, last = window[0].step, window[-1].step
        is_known = last < stream.writes * stream.chunk // steps * steps
        assert (goal is not None) == (is_known and first // steps == last // steps)
        assert row == expected_in_float32(window, goal, stream)
        if goal and stream.strategy == "future":
            assert first < goal[1] <= (first // steps + 1) * steps


def test_long_episodes_are_relabelled_while_they_run_as_far_as_their_windows_are_known():
    stream = replace(RUNNING, n=5, lanes=2, writes=15, layout="[lanes, time]")
    rb, oracle = make_buffer(stream), NStepOracle(stream)
    relabelled = []
    for lanes in stream:
        feed(rb, oracle, [lanes])
        oracle.check(rb[:])
        relabelled.append(int(rb[:][RELABELLED].sum()) // 2)
    # After 70 steps, the table holds them all, and the n-step transform holds back the last five. During the next 60
    # steps, it holds the first 70, which contain 66 windows of five steps. After 140 steps, it holds all again.
    assert relabelled == [0] * 6 + [65] + [66] * 6 + [135, 136]


@pytest.mark.parametrize("without", [["truncated"], ["truncated", "terminated"]])
def test_flags_that_the_data_does_not_have_are_not_needed(without):
    stream = replace(WALK, writes_terminated="terminated" not in without)
    rb, oracle = make_buffer(stream, kind=TensorDictReplayBuffer), NStepOracle(stream)
    absent = [("next", name) for name in without]
    feed(rb, oracle, stream, lambda data: data.exclude("collector", *absent))
    batch = seeded_sample(rb, 2_000)
    assert set(absent).isdisjoint(batch.keys(True))
    for key in absent:
        batch[key] = torch.zeros_like(batch["done"])  # the oracle reads them
    for row, window, goal in read(batch, oracle):
        right = expected_in_float32(window, goal, stream)
        # As for single steps, done equals terminated in relabelled transitions.
        done = right["next", "terminated"] if goal and stream.writes_terminated else window[-1].done
        assert (row["next", "done"], row[NEXT_REWARD]) == (done, right[NEXT_REWARD])


# Configurations


GOAL_MODULE = TensorDictModule(
    lambda *goals: (reward_of(*goals).float().unsqueeze(-1), reached(*goals).unsqueeze(-1)),
    [NEXT_ACHIEVED, "desired_goal"],
    [NEXT_REWARD, ("next", "terminated")],
)
CONFIGURED = {
    "TorchRL sets done only": lambda: Compose(n_step(done_keys=["done"]), her()),
    "TorchRL does not set done": lambda: Compose(n_step(done_keys=["terminated", "truncated"]), her()),
    "TorchRL sets no flag": lambda: Compose(n_step(done_keys=[]), her()),
    "the reward is a module that reads goals alone": lambda: Compose(n_step(), her(GOAL_MODULE)),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_every_case_is_right_when(name):
    rb, oracle = fill(WALK, transform=CONFIGURED[name]())
    assert not missing(oracle.check(seeded_sample(rb, 2_000)))


def test_transforms_appended_one_after_the_other_work_as_composed():
    rb, oracle = make_buffer(WALK, n_step()), NStepOracle(WALK)
    rb.append_transform(her())
    feed(rb, oracle, WALK)
    assert not missing(oracle.check(seeded_sample(rb, 2_000)))


def test_keys_can_have_other_names():
    flags = ("done", "terminated", "truncated")
    renamed = {
        "achieved_goal": ("goals", "achieved"),
        "desired_goal": ("goals", "desired"),
        NEXT_ACHIEVED: ("next", "goals", "achieved"),
        ("next", "desired_goal"): ("next", "goals", "desired"),
        NEXT_REWARD: ("next", "agent", "return"),
        **{("next", flag): ("next", "agent", flag) for flag in flags},
        ("collector", "traj_ids"): "lane",
    }
    goals = {"achieved_goal_key": ("goals", "achieved"), "desired_goal_key": ("goals", "desired")}
    reward, done = ("agent", "return"), ("agent", "done")
    transform = Compose(
        n_step(reward_keys=[reward], done_key=done, done_keys=[("agent", flag) for flag in flags]),
        her(reward_key=reward, done_key=done, trajectory_key="lane", **goals),
    )

    def rename(data: TensorDict, names: dict) -> TensorDict:
        for old, new in names.items():
            data.rename_key_(old, new)
        return data

    rb, oracle = make_buffer(WALK, transform), NStepOracle(WALK)
    feed(rb, oracle, WALK, lambda data: rename(data, renamed))
    assert not missing(oracle.check(rename(seeded_sample(rb, 2_000), {new: old for old, new in renamed.items()})))


def test_transforms_after_it_see_the_return_of_the_new_goal():
    scale = RewardScaling(loc=0.0, scale=2.0, in_keys=[NEXT_REWARD], out_keys=["scaled"])
    rb, oracle = fill(WALK, transform=Compose(n_step(), her(), scale))
    batch = seeded_sample(rb, 2_000)
    assert not missing(oracle.check(batch))
    torch.testing.assert_close(batch["scaled"], 2 * batch[NEXT_REWARD])


def test_all_returns_are_recomputed_if_asked_for():
    """With the original goals, samples of a buffer with wrong rewards equal those of a buffer with correct rewards."""
    samples = []
    for stored, options in ((1.0, {}), (7.0, {"recompute_all_rewards": True})):
        rb = make_buffer(WALK, Compose(n_step(), her(her_ratio=0.0, **options)))
        for lanes in WALK:
            data = block(lanes)
            data[NEXT_REWARD] = stored * data[NEXT_REWARD]
            rb.extend(data)
        samples.append(rb[:])
    right, recomputed = samples
    stale = torch.isclose(recomputed[NEXT_REWARD], 7 * right[NEXT_REWARD]) & (right[NEXT_REWARD] != 0)
    assert stale.float().mean() < 0.2  # windows that are only partly in the table
    for key in (NEXT_REWARD, "steps_to_next_obs", ("next", "done"), ("next", "terminated")):
        one, other = (rows[key].reshape(-1)[~stale.reshape(-1)] for rows in samples)
        torch.testing.assert_close(one, other)


def test_recomputed_returns_with_the_original_goal_do_not_end_where_the_episode_did_not():
    """The walk passes its goal in step 4 and continues, although the reward module ends the episode there."""
    at = torch.arange(13.0).unsqueeze(1)
    data = TensorDict({"achieved_goal": at[:-1], "desired_goal": torch.full((12, 1), 5.0)}, batch_size=12)
    data["next"] = TensorDict({"achieved_goal": at[1:], "desired_goal": torch.full((12, 1), 5.0)}, batch_size=12)
    data["next", "reward"] = (at[1:] == 5).float() - 1
    for flag in ("done", "terminated", "truncated"):
        data["next", flag] = torch.zeros(12, 1, dtype=torch.bool)
    data["next", "done"][-1] = data["next", "truncated"][-1] = True
    reward = SparseReward(0.0, terminated_fn=lambda achieved, desired: (achieved == desired).all(-1))
    transform = Compose(n_step(), her(reward=reward, her_ratio=0.0, recompute_all_rewards=True))
    rb = ReplayBuffer(storage=LazyTensorStorage(12), transform=transform)
    rb.extend(data)
    sample = rb[:]
    rewards = [float(0 if step == 4 else -1) for step in range(12)]
    expected = [sum(WALK.gamma**k * r for k, r in enumerate(rewards[step : step + WALK.n])) for step in range(12)]
    torch.testing.assert_close(sample[NEXT_REWARD].flatten(), torch.tensor(expected)[: len(sample)])
    assert sample["steps_to_next_obs"].flatten().tolist() == [min(WALK.n, 12 - step) for step in range(len(sample))]
    assert not sample["next", "terminated"].any()


class Swap(torch.nn.Module):
    def forward(self, state):
        return state[..., [1, 0]]


@pytest.mark.parametrize("goal_fn", [Swap().forward, Swap()], ids=["function", "module"])
def test_goal_fn_maps_each_outcome_of_a_window_once(goal_fn):
    """The achieved entries are states ``(cell, episode, more)``. Mapping a goal twice would swap it back."""
    rb, oracle = make_buffer(WALK, Compose(n_step(), her(goal_fn=goal_fn))), NStepOracle(WALK)
    achieved = ["achieved_goal", NEXT_ACHIEVED]

    def states(data: TensorDict) -> TensorDict:
        for key in achieved:
            data[key] = torch.cat([data[key].flip(-1), data[key].sum(-1, keepdim=True)], -1)
        return data

    feed(rb, oracle, WALK, states)
    batch = seeded_sample(rb, 2_000)
    for key in achieved:
        batch[key] = batch[key][..., [1, 0]]
    assert not missing(oracle.check(batch))


# Sequences


def test_the_windows_of_a_sequence_get_one_goal():
    stream = replace(WALK, lanes=1, layout="flat", cells=None, her_ratio=1.0)
    rb, oracle = fill(stream, transform=make_transform(stream, sequence_length=4), sampler=slices())
    count: Counter = Counter()
    for sequence in seeded_sample(rb, 400).reshape(100, 4).unbind(0):
        assert (sequence["uid"].diff() == 1).all()
        assert (sequence["desired_goal"] == sequence["desired_goal"][0]).all()
        assert sequence["desired_goal"][0, 1] > oracle.windows[int(sequence["uid"][-1])][0].step
        count += oracle.check(sequence)
    assert count["relabelled"] == 400
    assert count["new goal: terminated on the way"] > 0


def line(start: int, steps: int, ends: bool) -> TensorDict:
    """Return an episode, or a part of one, ``[steps]``, in which the goal grows from ``start`` by 1 in each step."""
    return make_episode(torch.arange(start, start + steps + 1.0).unsqueeze(-1), torch.tensor([-1.0]), truncated=ends)


PARTLY_KNOWN = {  # episodes that are only partly in the table
    "an episode that goes on": (1_000, [line(0, 70, False), line(70, 30, False)]),
    "a table that is too small": (50, [line(100 * episode, 20, True) for episode in range(12)]),
}


@pytest.mark.parametrize("case", PARTLY_KNOWN)
def test_a_sequence_gets_one_goal_or_keeps_its_own(case):
    capacity, writes = PARTLY_KNOWN[case]
    transform = Compose(n_step(), her(SparseReward(0), her_ratio=1.0, capacity=capacity, sequence_length=4))
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000), sampler=slices(), transform=transform)
    for data in writes:
        rb.extend(data)
    batch = seeded_sample(rb, 4_000).reshape(1_000, 4)
    relabelled = batch[RELABELLED].squeeze(-1)
    assert (relabelled == relabelled[:, :1]).all()
    assert (batch["desired_goal"] == batch["desired_goal"][:, :1]).all()
    assert 0 < relabelled.float().mean() < 1


# Saving, loading, flushing


def loaded_or_flushed(how: str, rb: ReplayBuffer, path: Path) -> ReplayBuffer:
    """Copy or flush a buffer. Either way, steps that the n-step transform holds back are dropped."""
    if how != "flush":
        return WAYS_TO_COPY[how](rb, make_buffer(WALK), path)
    rb.transform[1].flush()
    return rb


LOADED_OR_FLUSHED = pytest.mark.parametrize("how", ["dumps", "state_dict", "flush"])


def half_written() -> tuple[ReplayBuffer, NStepOracle, Lanes]:
    """Return a buffer after 17 writes of `WALK`, when all lanes are within an episode, and the rest of each lane."""
    writes = list(WALK)
    rb, oracle = make_buffer(WALK), NStepOracle(WALK)
    feed(rb, oracle, writes[:17])
    rest = [list(itertools.chain(*steps)) for steps in zip(*writes[17:], strict=True)]
    assert all(steps[0].step for steps in rest)
    return rb, oracle, rest


def in_chunks(lanes: Lanes, size: int) -> Iterator[Lanes]:
    """Cut lanes into writes of ``size`` steps. Remaining steps that do not fill a write are left out."""
    for first in range(0, len(lanes[0]) - size + 1, size):
        yield [steps[first : first + size] for steps in lanes]


@LOADED_OR_FLUSHED
def test_lanes_go_on_after_loading_and_after_flush(how, tmp_path):
    rb, oracle, lanes = half_written()
    rb = loaded_or_flushed(how, rb, tmp_path)
    if how == "flush":
        oracle.end_episodes()
    oracle.lose_what_is_held_back()
    oracle.check(rb[:])
    feed(rb, oracle, in_chunks(lanes, WALK.chunk))
    lost = 2 * WALK.n  # steps held back at the end, and when saving or flushing
    assert len(rb) == len(oracle.windows) == WALK.lanes * (WALK.chunk * WALK.writes - lost)
    assert not missing(check_often(rb, oracle))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_loaded_windows_are_correct_in_a_buffer_with_another_window(n, tmp_path):
    rb, oracle = fill(WALK)
    rb = WAYS_TO_COPY["dumps"](rb, make_buffer(replace(WALK, n=n)), tmp_path)
    assert oracle.check(seeded_sample(rb, 2_000))["relabelled"] > 100


def check_fresh_start(rb: ReplayBuffer, oracle: NStepOracle, lanes: Lanes) -> None:
    """Check that lanes can begin anywhere, and that steps that were held back are not joined to them."""
    oracle.lose_what_is_held_back()
    oracle.end_episodes()
    before = len(rb)
    feed(rb, oracle, in_chunks(lanes, 8))
    assert before < len(rb) == len(oracle.windows)
    assert not missing(check_often(rb, oracle))


@LOADED_OR_FLUSHED
def test_after_loading_and_after_flush_all_environments_can_be_reset(how, tmp_path):
    rb, oracle, lanes = half_written()
    rb = loaded_or_flushed(how, rb, tmp_path)
    after_reset = [list(itertools.dropwhile(lambda step: step.step, steps)) for steps in lanes]
    shortest = min(map(len, after_reset))
    check_fresh_start(rb, oracle, [steps[:shortest] for steps in after_reset])


def test_an_older_checkpoint_is_continued_and_not_joined_to_later_frames_held_back(tmp_path):
    rb, oracle, lanes = half_written()
    rb.dumps(tmp_path)
    write(rb, [steps[:9] for steps in lanes], WALK.layout)
    rb.loads(tmp_path)
    oracle.check(rb[:])
    check_fresh_start(rb, oracle, lanes)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, Compose.clone])
def test_a_copy_of_the_buffer_goes_on_as_the_original_does(copy_of):
    rb, oracle, lanes = half_written()
    copied, other = make_buffer(WALK, copy_of(rb.transform)), copy.deepcopy(oracle)
    writes = list(in_chunks(lanes, WALK.chunk))
    feed(copied, other, writes)
    assert other.check(copied[:]).total() > 0
    feed(rb, oracle, writes[:3])  # the original is unchanged
    oracle.check(rb[:])


# Refused transforms and writes


def reward_module(*in_keys: Any) -> TensorDictModule:
    """Return a reward module that reads the given entries."""
    return TensorDictModule(lambda *entries: sum(entry[..., :1] for entry in entries), list(in_keys), [NEXT_REWARD])


REFUSED_TRANSFORMS = {
    "the wrong order": lambda: (her(), n_step()),
    "the wrong order, nested": lambda: (Compose(her()), Compose(n_step())),
    "n steps on both sides": lambda: (n_step(), her(), n_step()),
    "n steps of n steps": lambda: (n_step(), n_step(), her()),
    "a reward of the action": lambda: (n_step(), her(reward_module(NEXT_ACHIEVED, "desired_goal", "action"))),
    "a reward of the observation": lambda: (n_step(), her(reward_module("desired_goal", ("next", "observation")))),
    # The goal achieved before the window is not among its outcomes.
    "a reward of how far a step went": lambda: (n_step(), her(reward_module("achieved_goal", NEXT_ACHIEVED))),
    "a reward of the info": lambda: (n_step(), her(EnvReward(make_tape, info_keys=["observation"]))),
    "goal_fn and a module": lambda: (n_step(), her(reward_module(NEXT_ACHIEVED, "desired_goal"), goal_fn=torch.clone)),
    "rewards of another name": lambda: (n_step(reward_keys=["income"]), her()),
    "more rewards than one": lambda: (n_step(reward_keys=["reward", "income"]), her()),
    "an end of another name": lambda: (n_step(done_key="truncated"), her()),
}


@pytest.mark.parametrize("chunk", [2, 20])  # shorter than the window, so that TorchRL stores nothing yet, and longer
@pytest.mark.parametrize("name", REFUSED_TRANSFORMS)
def test_transforms_that_cannot_give_correct_returns_are_refused(name, chunk):
    (lanes,) = stream = replace(WALK, chunk=chunk, writes=1)
    rb = make_buffer(stream, Compose(*REFUSED_TRANSFORMS[name]()))
    data = block(lanes)
    data["next", "income"] = data[NEXT_REWARD].clone()
    is_refused(rb, lambda: rb.extend(data), message="MultiStepTransform")


# Functions of the writes (each ``[lanes, time]``) and of the number of earlier writes. They return a write that must be
# refused. Episodes have seven steps and writes five, so after two, three and four writes all lanes are within an
# episode.
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
with_and_without_ids = pytest.mark.parametrize("with_ids", [True, False], ids=["with ids", "without ids"])


@with_and_without_ids
@pytest.mark.parametrize(
    ("name", "before"), [*itertools.product(MIXED, [0, 2, 3, 4]), *itertools.product(MIXED_LATER, [2, 3, 4])]
)
def test_a_write_that_would_mix_lanes_in_a_window_is_refused_and_leaves_no_trace(name, before, with_ids):
    stream = replace(SEVENS, layout="[lanes, time] with ids" if with_ids else "[lanes, time]")
    rb, oracle, writes = make_buffer(stream), NStepOracle(stream), list(stream)
    bad = (MIXED | MIXED_LATER)[name]([block(lanes, with_ids) for lanes in writes], before)
    feed(rb, oracle, writes[:before])
    is_refused(rb, lambda: rb.extend(bad))
    feed(rb, oracle, writes[before:])
    oracle.check(rb[:])
    assert len(rb) == len(oracle.windows) == 4 * (60 - 3)


def test_lanes_at_the_same_goals_are_distinguished_by_their_ids():
    rb = make_buffer(SEVENS)
    still = {"achieved": (0, 0), "outcome": (0, 0), "desired": (0, 1)}
    first, second = ([[replace(step, **still) for step in steps] for steps in lanes] for lanes in list(SEVENS)[1:3])
    write(rb, first, SEVENS.layout)
    is_refused(rb, lambda: write(rb, second[1:] + second[:1], SEVENS.layout))
    write(rb, second, SEVENS.layout)
    assert len(rb) == 4 * (10 - 3)


@with_and_without_ids
def test_lanes_that_follow_each_other_after_an_end_are_not_refused(with_ids):
    """The lanes are whole episodes, one after the other, so no window spans two episodes."""
    joined = replace(SEVENS, lanes=1, layout="flat with ids" if with_ids else "flat")
    rb, oracle = make_buffer(joined), NStepOracle(joined)
    feed(rb, oracle, ([list(itertools.chain(*lanes))] for lanes in replace(SEVENS, chunk=7)))
    oracle.check(rb[:])
    assert len(rb) == len(oracle.windows) == 4 * 12 * 7 - 3


def test_limits_of_torchrls_transform():
    """With MultiStepTransform, a TensorDictReplayBuffer supports neither ``add`` nor single steps of several lanes."""
    single = replace(WALK, layout="add", lanes=1)
    rb = make_buffer(single, n_step(), kind=TensorDictReplayBuffer)
    with pytest.raises(RuntimeError, match="Not enough dimensions"):
        write(rb, next(iter(single)), "add")
    rb = make_buffer(single, kind=TensorDictReplayBuffer)
    is_refused(rb, lambda: write(rb, next(iter(single)), "add"), message="MultiStepTransform.*use extend")

    *before, last = replace(WALK, chunk=1, writes=4)
    for transform in (n_step(), make_transform(WALK)):
        rb = make_buffer(WALK, transform, kind=TensorDictReplayBuffer)
        for lanes in before:
            write(rb, lanes, WALK.layout)
        with pytest.raises(RuntimeError, match="tensor shape is incompatible"):
            write(rb, last, WALK.layout)
