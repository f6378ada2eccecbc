"""Data without desired goals and rewards, and OGBench files, compared with plain Python."""

import math

import numpy as np
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer, TensorStorage

from support.data_sets import REWARD, adopting_buffer, data_of, entries_of, save_ogbench, transitions_of, without_goals
from support.factories import copied_by_state_dict, seeded_sample
from support.goals import reached, reward_of
from support.oracle import RELABELLED
from support.streams import Stream
from torchrl_her import (
    Current,
    Future,
    GoalReward,
    HERTransform,
    Mixture,
    Random,
    ReachedReward,
    SparseReward,
    load_ogbench,
)

LENGTHS = [11, 2, 1, 30, 7]  # states
STEPS_TO_GOAL = ("hindsight", "steps_to_goal")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "maze-v0.npz"


def hindsight(reward=None, **options):
    options = {"her_ratio": 1.0, "achieved_goal_key": "observation", "capacity": 100} | options
    return HERTransform(reward or ReachedReward(), **options)


# Reading files


def test_transitions_follow_the_documentation_of_ogbench(file):
    rows = transitions_of(save_ogbench(file, LENGTHS))
    data = load_ogbench(file)
    assert data.batch_size == (sum(LENGTHS) - len(LENGTHS),)
    assert {*entries_of(data)} == {*rows[0]} - {"trajectory", "step"}
    for key in entries_of(data):
        assert data[key].tolist() == [row[key] for row in rows], key


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_the_dtypes_of_the_file_are_kept(file, dtype):
    save_ogbench(file, LENGTHS, observations=np.zeros((sum(LENGTHS), 8, 8, 3), dtype))
    data = load_ogbench(str(file))
    assert data["observation"].numpy().dtype == data["next", "observation"].numpy().dtype == dtype
    assert data["observation"].shape[1:] == (8, 8, 3)
    assert data["qpos"].dtype == torch.float64
    assert data["action"].dtype == torch.float32


def test_arrays_of_another_length_are_left_out(file):
    save_ogbench(file, LENGTHS, version=np.array(3), names=np.zeros(4))
    assert {"version", "names"}.isdisjoint(load_ogbench(file).keys())


def changed(**arrays):
    return lambda file: save_ogbench(file, LENGTHS, **arrays)


def without_terminals(file):
    np.savez(file, observations=np.zeros((3, 2)), actions=np.zeros((3, 2)))


BAD = {
    "no terminals": (without_terminals, KeyError, "no array 'terminals'.*present: observations, actions"),
    "cut off": (changed(terminals=np.zeros(51)), ValueError, "last state .* is not terminal"),
    "no transitions": (changed(terminals=np.ones(51)), ValueError, "Every state .* is terminal"),
    "short actions": (changed(actions=np.zeros((50, 2))), ValueError, "one row per state.*'actions': 50"),
    "two terminals": (changed(terminals=np.ones((51, 1))), ValueError, r"shape \(51, 1\)"),
    "empty": (lambda file: save_ogbench(file, []), ValueError, "last state"),
    "strings": (changed(room=np.array(["hall"] * 51)), TypeError, "array 'room' of .* has the dtype <U4.*numbers"),
    "terminals as strings": (changed(terminals=np.array(["0"] * 51)), TypeError, "array 'terminals' .* dtype <U1"),
    "objects": (changed(settings=np.array({})), ValueError, "array 'settings' of .* cannot be read .*allow_pickle"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_in_another_layout_is_refused(name, file):
    save, error, message = BAD[name]
    save(file)
    with pytest.raises(error, match=message) as raised:
        load_ogbench(file)
    assert "maze-v0.npz" in str(raised.value)


# Sampling


def states_of(rows):
    """Return the transition of each outcome, by the observation of the outcome."""
    return {tuple(row["next", "observation"]): row for row in rows}


@pytest.mark.parametrize("way", ["adopted", "copied by state_dict"])
def test_goals_rewards_and_ends_of_ogbenchs_data_are_created(file, way):
    rows = transitions_of(save_ogbench(file, LENGTHS))
    transform = hindsight(strategy=Mixture({Current(): 0.3, Future(): 0.7}), info=True)
    rb = adopting_buffer(load_ogbench(file), transform, batch_size=500)
    if way != "adopted":
        storage = TensorStorage(torch.zeros_like(rb.storage[:]))
        twin = TensorDictReplayBuffer(
            storage=storage, transform=hindsight(strategy=transform.strategy, info=True), batch_size=500
        )
        rb = copied_by_state_dict(rb, twin, None)
    batch, outcomes = rb.sample(), states_of(rows)
    assert batch[RELABELLED].all()
    for row in batch.unbind(0):
        stored, goal = rows[row["index"]], outcomes[tuple(row["desired_goal"].tolist())]
        assert row["observation"].tolist() == stored["observation"]
        assert row["next", "desired_goal"].tolist() == row["desired_goal"].tolist()
        assert goal["trajectory"] == stored["trajectory"]
        ahead = goal["step"] - stored["step"]
        assert ahead >= 0
        assert row[STEPS_TO_GOAL].item() == ahead
        assert row[REWARD].item() == (0.0 if ahead == 0 else -1.0)
        assert row["next", "terminated"].item() is (ahead == 0)
        assert row["next", "truncated"].item() is stored["next", "truncated"][0]
        assert row["next", "done"].item() is (ahead == 0 or stored["next", "truncated"][0])
    assert 0.2 < batch["next", "terminated"].float().mean() < 0.7


def test_goal_fn_maps_states_to_created_goals(file):
    rows = transitions_of(save_ogbench(file, LENGTHS))

    def position(state):
        return state[..., :2]

    reward = SparseReward(0.5)
    rb = adopting_buffer(load_ogbench(file), hindsight(reward, goal_fn=position, strategy="random"), batch_size=300)
    outcomes = {tuple(row["next", "observation"][:2]) for row in rows}
    for row in rb.sample().unbind(0):
        stored, goal = rows[row["index"]], row["desired_goal"].tolist()
        assert tuple(goal) in outcomes
        distance = math.dist(goal, stored["next", "observation"][:2])
        assert row[REWARD].item() == (0.0 if distance <= 0.5 else -1.0)
        assert row["next", "terminated"].item() is False  # the reward module does not write this flag


STREAM = Stream(4, ((5, "truncated"), (8, "terminated"), (3, "truncated")), 8, 6, "flat with ids", 48, 192)
KEPT = [("next", "truncated"), "observation", "uid", "action"]


@pytest.mark.parametrize("kept", ["nothing", "rewards", "flags"])
def test_created_entries_equal_recomputed_ones(kept):
    """Samples equal samples of the same data with goals, if all transitions are relabelled."""
    data = data_of(STREAM)
    dropped = data.exclude("desired_goal", ("next", "desired_goal"), *([] if kept == "rewards" else [REWARD]))
    if kept == "nothing":
        dropped = dropped.exclude(("next", "terminated"))
    batches = []
    for each in (data, dropped):
        reward = GoalReward(reward_of, terminated_fn=reached)
        transform = HERTransform(reward, her_ratio=1.0, capacity=192, extra_goals={"actor_goal": "final"})
        batches.append(seeded_sample(adopting_buffer(each, transform)).exclude("hindsight_stamp"))
    assert {*entries_of(batches[0])} == {*entries_of(batches[1])}
    for key, value in entries_of(batches[0]).items():
        assert torch.equal(value, batches[1][key]), key
        assert value.dtype == batches[1][key].dtype, key


@pytest.mark.parametrize("her_ratio", [1.0, 0.5, 0.0])
def test_missing_rewards_come_from_the_reward_module(her_ratio):
    data = data_of(STREAM)
    reward = GoalReward(reward_of, terminated_fn=reached)
    transform = HERTransform(reward, her_ratio=her_ratio, capacity=192)
    batch = adopting_buffer(data.exclude(REWARD), transform).sample()
    assert abs(batch[RELABELLED].float().mean() - her_ratio) < 0.25
    expected = reward_of(batch["next", "achieved_goal"], batch["desired_goal"])
    assert torch.equal(batch[REWARD].squeeze(-1), expected)
    stored = data[batch["index"]]
    original = ~batch[RELABELLED].squeeze(-1)
    for key in ("desired_goal", ("next", "terminated"), ("next", "done")):
        assert torch.equal(batch[key][original], stored[key][original])


def padded(data):
    data["collector", "mask"] = torch.arange(len(data)) % 48 < 40
    return data


@pytest.mark.parametrize("reward", [ReachedReward(), GoalReward(reward_of, terminated_fn=reached)])
def test_a_transition_that_cannot_be_relabelled_gets_its_own_outcome(reward):
    """Padding is such a transition. Its goal, reward and ends are consistent."""
    data = padded(without_goals(data_of(STREAM)))
    transform = HERTransform(reward, her_ratio=1.0, capacity=192, info=True, extra_goals={"actor_goal": Random()})
    batch = adopting_buffer(data, transform, batch_size=192)[:]
    padding = ~data["collector", "mask"]
    assert torch.equal(batch[RELABELLED].squeeze(-1), ~padding)
    rows = batch[padding]
    for key in ("desired_goal", ("next", "desired_goal"), "actor_goal", ("next", "actor_goal")):
        assert torch.equal(rows[key], rows["next", "achieved_goal"])
    assert (rows[STEPS_TO_GOAL] == 0).all()
    assert rows["next", "terminated"].all()
    assert rows["next", "done"].all()
    if isinstance(reward, ReachedReward):
        assert (rows[REWARD] == 0).all()
    else:
        outcome = rows["next", "achieved_goal"]
        assert torch.equal(rows[REWARD].squeeze(-1), reward_of(outcome, outcome))


def test_the_transform_compiles_with_created_goals(file):
    save_ogbench(file, LENGTHS)
    transform = hindsight()
    rows = transform.adopt(load_ogbench(file))
    transform(rows[:8])
    compiled = torch.compile(transform, backend="eager", fullgraph=True)
    batch = compiled(rows)
    assert batch[RELABELLED].all()
    assert set(batch[REWARD].flatten().tolist()) == {0.0, -1.0}
