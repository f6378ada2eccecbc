"""HERTransform as a whole: comparison with the oracle, goals of all kinds, copies, saving and cost."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer, Unbounded
from torchrl.envs import Compose, GymEnv, Transform

import torchrl_her.envs  # noqa: F401  # registers PointReach
from support.dispatch import Operations
from support.factories import WAYS_TO_COPY, make_buffer, same, seeded_sample
from support.goals import reached
from support.oracle import run
from support.streams import LAYOUTS, Stream, make_episode, random_stream, write
from torchrl_her import CompactGoals, HERTransform, SparseReward

RELABELLED = ("hindsight", "relabelled")


@pytest.mark.filterwarnings("ignore:.*left the goal table")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_however_the_data_arrives_goals_are_correct_and_transitions_consistent(layout):
    @seed(LAYOUTS.index(layout))
    @settings(max_examples=25, deadline=None, database=None)
    @given(st.randoms(use_true_random=False))
    def check(draw):
        run(random_stream(draw, layout))

    check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_many_wrap_arounds_all_transitions_with_known_goals_are_relabelled(layout):
    lengths = ((5, "truncated"), (8, "terminated"), (3, "truncated"))
    stream = Stream(3, lengths, chunk=8, writes=40, layout=layout, rows=32, capacity=96)
    assert run(stream) > 0.6  # the other transitions belong to running episodes or to the oldest episode


def test_long_episodes_are_relabelled_before_they_end():
    steps, lanes = 1000, 64
    goals = torch.arange(lanes * (steps + 1), dtype=torch.float32).view(lanes, steps + 1, 1)
    episodes = torch.stack([make_episode(each, torch.tensor([-1.0]), truncated=False) for each in goals])
    storage = LazyTensorStorage(lanes * steps)
    rb = ReplayBuffer(storage=storage, transform=HERTransform(SparseReward(0), capacity=lanes * steps))
    for chunk in episodes.split(50, dim=1):
        rb.extend(chunk.reshape(-1))
    assert not rb[:]["next", "done"].any()
    sample = rb.sample(20_000)
    relabelled = sample[RELABELLED].squeeze(-1)
    assert relabelled.float().mean() >= 0.4
    goal, outcome = sample["desired_goal"][relabelled], sample["next", "achieved_goal"][relabelled]
    assert torch.equal(goal // (steps + 1), outcome // (steps + 1)), "a goal of another lane"
    assert (goal >= outcome).all(), "a goal from the past"


# Keys, goals of all kinds, padding, ends of episodes


def episode_of(steps, goal_shape=(2,), dtype=torch.float32, number=0, desired=..., **options):
    """Return an episode with random goals, whose desired goal is cut to the slice ``desired``."""
    generator = torch.Generator().manual_seed(number)
    goals = torch.randint(0, 256, (steps + 2, *goal_shape), generator=generator).to(dtype)
    return make_episode(goals[:-1], goals[-1][desired], **options)


def counting(steps):
    """Return a running episode whose goals count its steps."""
    return make_episode(torch.arange(steps + 1.0)[:, None], torch.tensor([-1.0]), truncated=False)


def buffer_with(transform, *data, size=1000, **kwargs):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=256, **kwargs)
    for td in data:
        rb.extend(td)
    return rb


def hindsight(**options):
    """Return a HERTransform that relabels all transitions with known goals."""
    return HERTransform(SparseReward(0), **({"her_ratio": 1.0} | options))


@pytest.mark.parametrize("goal_shape", [(), (1,), (3,), (3, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64, torch.bfloat16, torch.bool])
def test_a_goal_is_a_tensor_of_any_shape_and_dtype(goal_shape, dtype):
    td = episode_of(6, goal_shape, dtype)
    sample = buffer_with(hindsight(strategy="final"), td).sample()
    assert sample[RELABELLED].all()
    assert sample["desired_goal"].dtype == dtype
    assert sample["desired_goal"].shape == (256, *goal_shape)
    assert (sample["desired_goal"] == td["next", "achieved_goal"][-1]).all()


def half(state):
    return state[..., : state.shape[-1] // 2]


def test_a_reward_shared_by_two_transforms_uses_the_goal_fn_of_each():
    reward, short = SparseReward(0.5), episode_of(6, goal_shape=(4,), desired=slice(2))
    first = buffer_with(HERTransform(reward, goal_fn=half, her_ratio=1.0), short)
    second = buffer_with(HERTransform(reward, her_ratio=1.0), episode_of(6, goal_shape=(4,)))
    for rb, goal_fn in ((first, half), (second, nn.Identity())):
        sample = rb.sample()
        there = reached(goal_fn(sample["next", "achieved_goal"]), sample["desired_goal"])[:, None]
        assert 0 < there.sum() < len(sample)
        assert torch.equal(sample["next", "reward"], there.float() - 1)


def test_nested_keys_work():
    td = episode_of(6)
    goal = td["next", "achieved_goal"][-1]
    names = {"achieved_goal": "reached", "desired_goal": "wanted", "reward": "payoff"}
    for place in (td, td["next"]):
        for key in {*place.keys()} - {"next"}:
            place.rename_key_(key, ("agent", names.get(key, key)))
    transform = HERTransform(
        SparseReward(0, terminated_fn=reached),
        strategy="final",
        her_ratio=1.0,
        achieved_goal_key=("agent", "reached"),
        desired_goal_key=("agent", "wanted"),
        reward_key=("agent", "payoff"),
        done_key=("agent", "done"),
    )
    sample = buffer_with(transform, td).sample()
    after = sample["next", "agent"]
    assert (sample["agent", "wanted"] == goal).all()
    assert (after["wanted"] == goal).all()
    there = reached(after["reached"], goal)[:, None]
    assert there.any()
    assert torch.equal(after["payoff"], there.float() - 1)
    assert torch.equal(after["terminated"], there)
    assert torch.equal(after["done"], there | after["truncated"])


def test_goal_fn_maps_states_to_goals():
    td = episode_of(6, goal_shape=(4,), desired=slice(2))
    seen = []

    def reward(achieved, desired):
        seen.append((achieved.shape, desired.shape))
        return (achieved - desired).abs().sum(-1)

    transform = HERTransform(reward, goal_fn=half, strategy="final", her_ratio=1.0)
    sample = buffer_with(transform, td).sample()
    assert (sample["desired_goal"] == td["next", "achieved_goal"][-1, :2]).all()
    assert sample["next", "achieved_goal"].shape == (256, 4)
    expected = (sample["next", "achieved_goal"][:, :2] - sample["desired_goal"]).abs().sum(-1, keepdim=True)
    assert torch.equal(sample["next", "reward"], expected)
    assert seen[-1] == ((256, 2), (256, 2))


@pytest.mark.parametrize("strategy", ["future", "final", "random"])
def test_padding_is_never_relabelled_and_never_a_goal(strategy):
    data = torch.stack([episode_of(6, number=number) for number in range(3)])  # [3, 6]
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:] = mask[2, 1:] = False
    data["next", "done"][0, 3] = data["next", "done"][2, 0] = True
    data = torch.where(mask, data, torch.zeros_like(data))
    data["collector", "mask"] = mask
    transform = hindsight(strategy=strategy, mask_key=("collector", "mask"), capacity=100)
    rb = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), transform=transform)
    rb.extend(data)
    sample = rb.sample(512)
    assert torch.equal(sample[RELABELLED].squeeze(-1), sample["collector", "mask"])
    assert (sample["desired_goal"][sample["collector", "mask"]] != 0).any(-1).all()


@pytest.mark.parametrize("chunk", [5, 40])
def test_a_loaded_episode_ends_if_it_exceeds_a_smaller_max_episode_steps(chunk):
    td = counting(100)
    before = hindsight(max_episode_steps=50)
    after = hindsight(max_episode_steps=20, strategy="final")
    buffer_with(before, td[:30])
    after.load_state_dict(before.state_dict())
    rows = buffer_with(after, *td[30:70].split(chunk))[:]
    assert rows[RELABELLED].all()  # two episodes of twenty steps each
    assert rows["desired_goal"].flatten().tolist() == [50.0] * 20 + [70.0] * 20


def test_max_episode_steps_ends_an_episode_without_done_flag():
    rows = buffer_with(hindsight(strategy="final", max_episode_steps=5), counting(12))[:]
    assert rows[RELABELLED].flatten().tolist() == [True] * 10 + [False] * 2
    assert rows["desired_goal"].flatten()[:10].tolist() == [5.0] * 5 + [10.0] * 5


def test_an_episode_longer_than_the_table_is_cut():
    td = counting(50)
    td["next", "done"][-1] = True
    rows = buffer_with(hindsight(capacity=20), td)[:]
    relabelled = rows[RELABELLED].flatten()
    assert relabelled[40:].all()  # the episode is cut into 20 + 20 + 10 steps
    assert (rows["desired_goal"] >= rows["next", "achieved_goal"])[relabelled].all()


def test_flush_ends_the_running_episodes():
    transform = hindsight()
    rb = buffer_with(transform, episode_of(12)[:5])
    assert not rb[:][RELABELLED].any()
    transform.flush()
    assert rb[:][RELABELLED].all()
    rb.extend(episode_of(12)[5:])
    stamps = rb[:]["hindsight_stamp"]
    assert stamps[:, 0].diff().tolist() == [0] * 4 + [1] + [0] * 6
    assert stamps[:, 1].tolist() == [*range(5), *range(7)]


def test_reading_no_rows_returns_an_empty_batch():
    rb = buffer_with(hindsight(), episode_of(6))
    nothing = rb[torch.zeros(0, dtype=torch.int64)]
    assert nothing["desired_goal"].shape == (0, *rb[3]["desired_goal"].shape)
    assert nothing[RELABELLED].shape == (0, 1)


def test_rows_with_old_stamps_get_new_stamps_when_written():
    rb = buffer_with(hindsight(), episode_of(6))
    rb.extend(rb.storage[:6].exclude("index").clone())
    assert (rb.storage[6:12]["hindsight_stamp"][:, 0] > rb.storage[:6]["hindsight_stamp"][:, 0]).all()


@pytest.mark.parametrize("trajectory_key", [None, ("collector", "traj_ids")])
def test_trajectory_ids_are_used_unless_trajectory_key_is_none(trajectory_key):
    td = torch.cat([episode_of(3, truncated=False)] * 2)
    td["collector", "traj_ids"] = torch.arange(6) // 3 + 1  # two episodes with the same goals
    rb = buffer_with(hindsight(trajectory_key=trajectory_key), td[[0, 3, 1, 4, 2, 5]])
    episodes = rb.storage[:]["hindsight_stamp"][:, 0]
    assert (episodes[0::2] == episodes[0]).all() == (trajectory_key is not None)


# State


@pytest.mark.parametrize("how", WAYS_TO_COPY)
@pytest.mark.parametrize("layout", ["flat with ids", "one step of all lanes"])
def test_a_copy_goes_on_as_the_original_would(how, layout, tmp_path):
    """The episodes include long ones that are partly published."""
    stream = Stream(3, ((7, "truncated"), (70, "truncated")), 8, 40, layout, rows=240, capacity=720, her_ratio=0.8)
    writes = list(stream)
    original = make_buffer(stream)
    for lanes in writes[:25]:  # stops in the middle of episodes
        write(original, lanes, layout)
    copied = WAYS_TO_COPY[how](original, make_buffer(stream), tmp_path)
    for lanes in [None, *writes[25:]]:
        for rb in (original, copied) if lanes else ():
            write(rb, lanes, layout)
        samples = [seeded_sample(rb, 200) for rb in (original, copied)]
        assert samples[0][RELABELLED].any()
        assert (samples[0] == samples[1]).all()


def test_a_clone_is_independent():
    transform = hindsight()
    rb = buffer_with(transform, episode_of(6)[:3])
    before = copy.deepcopy(transform.get_extra_state())
    clone = transform.clone()
    assert clone.container is None
    assert same(clone.get_extra_state(), before)
    buffer_with(clone, episode_of(6)[3:])
    assert same(transform.get_extra_state(), before)
    assert not same(clone.get_extra_state(), before)
    rb.extend(episode_of(6)[3:])
    assert same(transform.get_extra_state(), clone.get_extra_state())  # both continued the same episode


def test_a_saved_state_does_not_change_with_later_writes():
    rb = buffer_with(hindsight(), episode_of(6)[:3])
    state = rb.transform.state_dict()
    before = copy.deepcopy(state)
    rb.extend(episode_of(6)[3:])
    assert same(state, before)


def test_a_shared_table_is_seen_by_a_copy_without_open_lanes():
    transform = hindsight(goal_spec=Unbounded((2,)), capacity=100).share_memory_()
    assert transform.share_memory_() is transform  # it can be called more than once
    buffer_with(transform, episode_of(6)[:3])
    copied = pickle.loads(pickle.dumps(transform.__getstate__() | {"_lock": None, "_container": None}))
    assert copied["table"].counters.tolist() == transform.table.counters.tolist()
    assert copied["tracker"].state_dict()["lanes"] == []


# Cost


def operations_with(episodes, size, strategy, run):
    """Return the operators that ``run`` executes, and the sizes of their results, in a buffer with some episodes."""
    transform = HERTransform(SparseReward(0), strategy=strategy, capacity=size)
    rb = buffer_with(transform, *[episode_of(20, number=number) for number in range(episodes)], size=size)
    stored = rb.storage[torch.arange(32)]
    with Operations() as operations:
        run(transform, stored)
    return operations.seen


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_the_cost_of_a_sample_does_not_depend_on_how_much_is_stored(strategy):
    few, many = (operations_with(n, 20 * n, strategy, lambda transform, stored: transform(stored)) for n in (2, 500))
    assert few == many
    assert max(numel for _, numel in few) <= 32 * 32  # random draws 32 rows for each transition
    waits = ("_local_scalar_dense", "nonzero", "aten.index.Tensor")
    assert not [name for name, _ in few if any(wait in name for wait in waits)]


def test_the_cost_of_a_write_does_not_depend_on_how_much_is_stored():
    new = episode_of(20, number=1000)
    few, many = (operations_with(n, 100_000, "future", lambda transform, _: transform.inv(new)) for n in (100, 500))
    assert few == many
    assert max(numel for _, numel in few) <= 20 * 4 * 2 * 4  # 20 transitions with four goals of two 4-byte floats


# Regressions


def test_sampling_does_not_change_stored_entries_under_the_keys_of_samples():
    """A ListStorage returns its own tensordicts, and written data can have entries under the keys of samples."""
    rows = episode_of(40)
    rows[RELABELLED] = torch.zeros(40, 1, dtype=torch.bool)
    rb = TensorDictReplayBuffer(storage=ListStorage(100), transform=hindsight(her_ratio=1.0), batch_size=40)
    rb.extend(rows)
    assert all(each[RELABELLED].all() for each in (rb.sample(), rb[:], *(rb[row] for row in range(40))))
    assert not torch.stack([row[RELABELLED] for row in rb.storage[:]]).any()


def test_entries_that_compact_restores_are_not_written_into_the_storage():
    td = episode_of(20)
    for name in ("done", "terminated", "truncated"):
        td["next", "agents", name] = td["next"].pop(name)
    td["agents"] = td["next", "agents"].apply(torch.zeros_like)
    td["agents", "mask"] = torch.ones(20, 1)
    rb = buffer_with(
        Compose(CompactGoals(done_key=("agents", "done")), hindsight(done_key=("agents", "done"), capacity=20)),
        td,
        size=20,
    )
    assert not rb[:]["agents", "done"].any()
    assert set(rb.storage[:]["agents"].keys()) == {"mask"}


def test_its_representation_names_the_settings():
    text = repr(HERTransform(SparseReward(0.05), strategy="final"))
    assert text == "HERTransform(SparseReward, strategy=Final(), her_ratio=0.8, capacity=1000000)"
    assert isinstance(HERTransform(SparseReward(0.05)), Transform)


@pytest.mark.parametrize("name", ["capacity", "sequence_length"])
def test_integer_arguments_may_be_numpy_integers(name):
    transform = hindsight(**{name: np.int64(3)})
    assert type(getattr(transform, name)) is int
    buffer_with(transform, episode_of(6))


def test_goals_do_not_change_with_the_callers_tensors():
    td, expected = episode_of(12), episode_of(12)["next", "achieved_goal"]
    rb = buffer_with(hindsight(strategy="episode"), td[:5])
    td["next", "achieved_goal"][:5] = 777.0
    rb.extend(td[5:])
    goals = rb.sample()["desired_goal"]
    assert reached(goals.unsqueeze(1), expected).any(-1).all()


def test_an_environment_instead_of_a_reward_is_refused():
    with pytest.raises(TypeError, match=r"HERTransform\(EnvReward\(env\)\)"):
        HERTransform(GymEnv("torchrl_her/PointReach-v0"))
