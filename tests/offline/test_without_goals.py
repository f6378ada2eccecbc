"""Data without desired goals and rewards, and OGBench files, compared with plain Python."""

import math

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.data_sets import adopting_buffer, adopting_transform, entries_of, record, save_ogbench
from support.factories import copied_by_state_dict, make_transform, seeded_sample
from torchrl_her import Current, Future, HERKeys, Mixture, Random, ReachedReward, SparseReward, load_ogbench

LENGTHS = [11, 2, 1, 30, 7]  # states
DESIRED, REWARD = ["desired_goal", ("next", "desired_goal")], ("next", "reward")
RELABELLED, STEPS_TO_GOAL = ("hindsight", "relabelled"), ("hindsight", "steps_to_goal")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "maze-v0.npz"


def ogbench_transform(reward=None, **options):
    options |= {"her_ratio": 1.0, "keys": HERKeys(achieved_goal="observation"), "capacity": 100}
    return make_transform(reward=reward or ReachedReward(), **options)


def transitions_of(arrays):
    """Return the transitions in the arrays of a file: (s0, a0, s1), (s1, a1, s2), ... of each trajectory."""
    trajectories = [[]]
    for state, terminal in enumerate(arrays["terminals"]):
        trajectories[-1].append(state)
        if terminal:
            trajectories.append([])
    return [
        {
            "observation": arrays["observations"][state].tolist(),
            "action": arrays["actions"][state].tolist(),
            "qpos": arrays["qpos"][state].tolist(),
            ("next", "observation"): arrays["observations"][state + 1].tolist(),
            ("next", "done"): [state + 1 == states[-1]],
            ("next", "truncated"): [state + 1 == states[-1]],
            ("next", "terminated"): [False],
            "trajectory": number,
            "step": step,
        }
        for number, states in enumerate(trajectories)
        for step, state in enumerate(states[:-1])
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_transitions_follow_the_documentation_of_ogbench(file, dtype):
    images = np.random.default_rng(0).integers(0, 255, (sum(LENGTHS), 4, 4, 3)).astype(dtype)
    arrays = save_ogbench(file, LENGTHS, observations=images, version=np.array(3), names=np.zeros(4))
    rows, data = transitions_of(arrays), load_ogbench(str(file))
    assert data.batch_size == (sum(LENGTHS) - len(LENGTHS),)
    assert {*entries_of(data)} == {*rows[0]} - {"trajectory", "step"}, "arrays of another length are left out"
    for key, value in entries_of(data).items():
        assert value.tolist() == [row[key] for row in rows], key
    assert data["observation"].numpy().dtype == data["next", "observation"].numpy().dtype == dtype
    assert data["qpos"].dtype == torch.float64
    assert data["action"].dtype == torch.float32


@pytest.mark.parametrize("is_copied", [False, True])
def test_goals_rewards_and_ends_of_ogbenchs_data_are_created(file, is_copied):
    rows = transitions_of(save_ogbench(file, LENGTHS))
    options = {"strategy": Mixture({Current(): 0.3, Future(): 0.7}), "info": True}
    rb = adopting_buffer(load_ogbench(file), ogbench_transform(**options), batch_size=500)
    if is_copied:
        storage = LazyTensorStorage(len(rows))
        twin = TensorDictReplayBuffer(storage=storage, transform=ogbench_transform(**options), batch_size=500)
        rb = copied_by_state_dict(rb, twin, None)
    batch, outcomes = rb.sample(), {tuple(row["next", "observation"]): row for row in rows}
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
    transform = ogbench_transform(SparseReward(0.5), goal_fn=lambda state: state[..., :2], strategy="random")
    rb = adopting_buffer(load_ogbench(file), transform, batch_size=300)
    outcomes = {tuple(row["next", "observation"][:2]) for row in rows}
    for row in rb.sample().unbind(0):
        stored, goal = rows[row["index"]], row["desired_goal"].tolist()
        assert tuple(goal) in outcomes
        distance = math.dist(goal, stored["next", "observation"][:2])
        assert row[REWARD].item() == (0.0 if distance <= 0.5 else -1.0)
        assert row["next", "terminated"].item() is False  # the reward module does not write this flag


def test_the_transform_compiles_with_created_goals(file):
    save_ogbench(file, LENGTHS)
    transform = ogbench_transform()
    rows = transform.adopt(load_ogbench(file))
    transform(rows[:8])
    batch = torch.compile(transform, backend="eager", fullgraph=True)(rows)
    assert batch[RELABELLED].all()
    assert set(batch[REWARD].flatten().tolist()) == {0.0, -1.0}


MOVES = [["go"] * 10 + ["terminated"] + ["go"] * 4 + ["truncated"] + ["go"] * 8] * 4


@pytest.mark.parametrize("stored", ["no goals", "rewards", "flags"])
def test_created_entries_equal_recomputed_ones(stored):
    """Samples equal samples of the same data with goals, if all transitions are relabelled."""
    data, recorded = record(MOVES)
    dropped = {"no goals": [REWARD, ("next", "terminated")], "flags": [REWARD], "rewards": []}[stored]
    batches = []
    for each in (data, data.exclude(*DESIRED, *dropped)):
        transform = adopting_transform(recorded, strategy={"desired_goal": "future", "actor_goal": "final"})
        batches.append(entries_of(seeded_sample(adopting_buffer(each, transform)).exclude("hindsight_stamp")))
    assert batches[0].keys() == batches[1].keys()
    for key, value in batches[0].items():
        assert torch.equal(value, batches[1][key]), key
        assert value.dtype == batches[1][key].dtype, key


@pytest.mark.parametrize("her_ratio", [0.5, 0.0])
def test_missing_rewards_come_from_the_reward_module(her_ratio):
    data, recorded = record(MOVES)
    transform = adopting_transform(recorded, her_ratio=her_ratio)
    batch = adopting_buffer(data.exclude(REWARD), transform).sample()
    relabelled = batch[RELABELLED].squeeze(-1)
    assert abs(relabelled.float().mean() - her_ratio) < 0.25
    expected = recorded.world.goals.reward(batch["next", "achieved_goal"], batch["desired_goal"])
    assert torch.equal(batch[REWARD].squeeze(-1), expected)
    for key in ("desired_goal", ("next", "terminated"), ("next", "done")):
        assert torch.equal(batch[key][~relabelled], data[batch["index"]][key][~relabelled])


@pytest.mark.parametrize("reward", [ReachedReward(), None])
def test_a_transition_that_cannot_be_relabelled_gets_its_own_outcome(reward):
    """Padding is such a transition. Its goal, reward and ends are consistent."""
    data, recorded = record(MOVES)
    data["collector", "mask"] = torch.arange(len(data)) % 48 < 40
    options = {"reward": reward} if reward else {}
    strategy = {"desired_goal": "final", "actor_goal": Random()}
    transform = adopting_transform(recorded, info=True, strategy=strategy, **options)
    batch = adopting_buffer(data.exclude(*DESIRED, REWARD), transform)[:]
    padding = ~data["collector", "mask"]
    assert torch.equal(batch[RELABELLED].squeeze(-1), ~padding)
    rows = batch[padding]
    outcome = rows["next", "achieved_goal"]
    for key in ("desired_goal", ("next", "desired_goal"), "actor_goal", ("next", "actor_goal")):
        assert torch.equal(rows[key], outcome)
    assert (rows[STEPS_TO_GOAL] == 0).all()
    assert rows["next", "terminated"].all()
    assert rows["next", "done"].all()
    rewards = 0.0 if reward else recorded.world.goals.reward(outcome, outcome)
    assert (rows[REWARD].squeeze(-1) == rewards).all()
