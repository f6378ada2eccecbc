"""HERTransform as a whole: what the comparison with the oracle in `test_state_machine.py` leaves out."""

import copy
import gc
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ListStorage, Unbounded
from torchrl.envs import Compose, MultiStepTransform, RenameTransform

from support.dispatch import Operations
from support.factories import WAYS_TO_COPY, make_augmentation, make_buffer, make_transform, same, seeded_sample
from support.goals import reached, reward_of
from support.recorded import recorded_in
from support.world import FLAGS, Goals, World, transitions, whole_episodes
from torchrl_her import CompactGoals, GoalReward, HERKeys, HERTransform, PackedStorage, SparseReward, Subgoal

RELABELLED = ("hindsight", "relabelled")
hindsight = partial(make_transform, capacity=1000, her_ratio=1.0)
buffer_with = partial(make_buffer, batch_size=256)


def record(strategy="future"):
    return recorded_in(buffer_with(hindsight(strategy=strategy)), 1, strategy)


# Keys, goals of all kinds, padding, ends of episodes


GOALS = [((), torch.float64), ((1,), torch.int64), ((3,), torch.bfloat16), ((3, 8, 8), torch.uint8), ((2,), torch.bool)]


@pytest.mark.parametrize("way", WAYS_TO_COPY)
@pytest.mark.parametrize(("goal_shape", "dtype"), GOALS)
def test_a_goal_is_a_tensor_of_any_shape_and_dtype(goal_shape, dtype, way, tmp_path):
    """A copy of the buffer continues the running episode."""
    goals, td = torch.randint(0, 256, (8, *goal_shape)).to(dtype), transitions(whole_episodes(6))
    td["achieved_goal"], td["next", "achieved_goal"] = goals[:6], goals[1:7]
    td["desired_goal"] = td["next", "desired_goal"] = goals[7:].expand(6, *goal_shape)
    td["next", "reward"].fill_(-1)

    def make():
        transform = hindsight(reward=SparseReward(0), strategy="final")
        return buffer_with(transform, size=20, storage=PackedStorage)

    rb = make()
    rb.extend(td[:4])
    rb = WAYS_TO_COPY[way](rb, make(), tmp_path)
    rb.extend(td[4:])
    sample = rb.sample()
    assert sample[RELABELLED].all()
    at_goal = (sample["next", "achieved_goal"] == sample["desired_goal"]).reshape(256, -1).all(1)
    assert torch.equal(sample["next", "reward"].squeeze(-1) == 0, at_goal)
    assert sample["desired_goal"].dtype == dtype
    assert sample["desired_goal"].shape == (256, *goal_shape)
    assert (sample["desired_goal"] == td["next", "achieved_goal"][-1]).all()
    assert rb[torch.zeros(0, dtype=torch.int64)]["desired_goal"].shape == (0, *goal_shape)


def swap(state):
    return state[..., [1, 0]]


class Swap(torch.nn.Module):
    def forward(self, state):
        return swap(state)


NAMES = {
    "achieved_goal": ("goals", "achieved"),
    "desired_goal": ("goals", "desired"),
    ("next", "achieved_goal"): ("next", "goals", "achieved"),
    ("next", "desired_goal"): ("next", "goals", "desired"),
    ("next", "reward"): ("next", "agent", "gain"),
    **{("next", flag): ("next", "agent", flag) for flag in FLAGS},
    **{flag: ("agent", flag) for flag in FLAGS},  # CompactGoals adds them to samples
    ("collector", "traj_ids"): "lane",
}
KEYS = HERKeys(("goals", "achieved"), ("goals", "desired"), ("agent", "gain"), ("agent", "done"), trajectory="lane")
N_STEP_KEYS = {"reward_keys": [("agent", "gain")], "done_key": ("agent", "done"), "done_keys": [("agent", "done")]}


def translated(data):
    """Return transitions under other names, whose achieved entries are states ``(cell, place, more)``."""
    data = data.clone()
    for old, new in NAMES.items():
        if old in data.keys(include_nested=True):
            data.rename_key_(old, new)
    for key in (NAMES["achieved_goal"], NAMES["next", "achieved_goal"]):
        data[key] = torch.cat([data[key].flip(-1), data[key].sum(-1, keepdim=True)], -1)
    return data


@pytest.mark.parametrize("goal_fn", [swap, Swap()], ids=["function", "module"])
@pytest.mark.parametrize("kind", ["one step", "n steps", "augmentation", "compact", "compact augmentation"])
def test_with_other_keys_and_a_goal_fn_samples_are_the_same_under_other_names(kind, goal_fn):
    """The transforms share a reward, and mapping a goal twice would swap it back."""
    make = make_augmentation if "augmentation" in kind else hindsight
    reward = GoalReward(reward_of, terminated_fn=reached)
    data = transitions([*["go"] * 4, "terminated", "go", "stay", "truncated", "go"] * 4)
    batches = []
    other = {"keys": KEYS, "goal_fn": goal_fn}
    for change, options, n_keys in ((TensorDict.clone, {}, {}), (translated, other, N_STEP_KEYS)):
        torch.manual_seed(0)
        before = [MultiStepTransform(3, 0.9, **n_keys)] if kind == "n steps" else []
        before += [CompactGoals()] if "compact" in kind else []
        rb = buffer_with(Compose(*before, make(reward=reward, **options)), *map(change, data.split(9)))
        batches.append(seeded_sample(rb, 500).exclude("hindsight_stamp"))
    assert batches[0][RELABELLED].any()
    assert same(translated(batches[0]), batches[1])


@pytest.mark.parametrize("chunk", [5, 40])
def test_a_loaded_episode_ends_if_it_exceeds_a_smaller_max_episode_steps(chunk):
    td = transitions(["go"] * 70)
    before, after = hindsight(max_episode_steps=50), hindsight(max_episode_steps=20, strategy="final")
    buffer_with(before, td[:30])
    after.load_state_dict(before.state_dict())
    rows = buffer_with(after, *td[30:].split(chunk))[:]
    assert rows["desired_goal"][:, 1].tolist() == [50.0] * 20 + [70.0] * 20  # two episodes of twenty steps each


@pytest.mark.parametrize("trajectory", [None, ("collector", "traj_ids")])
def test_trajectory_ids_are_used_unless_their_key_is_none(trajectory):
    """The goals of both episodes are the same, so that only ids separate them."""
    td = transitions(whole_episodes(3))[[0, 0, 1, 1, 2, 2]].set(("collector", "traj_ids"), torch.arange(6) % 2)
    rb = buffer_with(hindsight(strategy="final", keys=HERKeys(trajectory=trajectory)), td)
    stamps = rb.storage[:]["hindsight_stamp"]
    assert ((stamps[::2] >> 25) == (stamps[0] >> 25)).all() == (trajectory is not None)


# State


def test_a_clone_and_a_saved_state_do_not_change_with_later_writes():
    transform, td = hindsight(), transitions(whole_episodes(6))
    rb = buffer_with(transform, td[:3])
    state, clone = transform.state_dict(), transform.clone()
    before = copy.deepcopy(state)
    assert clone.container is None
    rb.extend(td[3:])
    assert same(state, before)
    assert same(clone.state_dict(), before)
    buffer_with(clone, td[3:])
    assert same(clone.state_dict(), transform.state_dict())  # both continued the same episode


# Cost


def operations_of(run, episodes, size, **options):
    """Return the operators that ``run`` executes, and the sizes of their results, in a buffer with some episodes."""
    transform, world = hindsight(capacity=size, her_ratio=0.8, **options), World(1, Goals())
    rb = buffer_with(transform, *[world.written(whole_episodes(20)) for _ in range(episodes)], size=size)
    stored = rb.storage[torch.arange(32)]
    with Operations() as operations:
        run(transform, stored)
    return operations.seen


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_the_cost_of_a_sample_does_not_depend_on_how_much_is_stored(strategy):
    few, many = (operations_of(lambda her, stored: her(stored), n, 20 * n, strategy=strategy) for n in (2, 300))
    assert few == many
    assert max(numel for _, numel in few) <= 32 * 32  # random draws 32 rows for each transition
    waits = ("_local_scalar_dense", "nonzero", "aten.index.Tensor")
    assert not [name for name, _ in few if any(wait in name for wait in waits)]


def test_the_cost_of_a_write_does_not_depend_on_how_much_is_stored():
    new = transitions(whole_episodes(20))
    few, many = (operations_of(lambda her, _: her.inv(new), n, 100_000) for n in (100, 300))
    assert few == many
    assert max(numel for _, numel in few) <= 20 * 4 * 2 * 4  # 20 transitions with four goals of two 4-byte floats


# Other transforms


LEFT_OUT = {*FLAGS, ("next", "desired_goal")}


@pytest.mark.parametrize(("make", "rows", "relabelled"), [(hindsight, 8, 8), (make_augmentation, 30, 24)])
def test_with_compact_goals_redundant_entries_are_not_stored_and_restored_in_samples(make, rows, relabelled):
    recorded = record()
    recorded.rb = buffer_with(Compose(CompactGoals(), make()))
    recorded.oracle.her_ratio = 0.5 if make is make_augmentation else 1.0  # it also stores the originals
    recorded.play([["go"] * 5 + ["terminated", "go", "go"]])
    assert len(recorded.rb) == rows
    assert LEFT_OUT.isdisjoint(recorded.rb.storage[:].keys(True))
    assert recorded.check() == relabelled


def test_compact_goals_alone_changes_only_the_storage_and_later_transforms_see_all_entries():
    compact, data = CompactGoals(), transitions(["go"] * 5 + ["terminated"])
    stored = compact.inv(data.clone())
    assert same(compact(stored), data)
    assert LEFT_OUT.isdisjoint(stored.keys(True))
    rb = buffer_with(Compose(CompactGoals(), RenameTransform(["done"], ["ended"]), hindsight()), data)
    assert "ended" in rb.sample()


def test_compact_goals_restores_nested_flags_in_samples_and_not_in_a_storage_of_tensordicts():
    done, data = ("agents", "done"), transitions(["go"] * 5 + ["terminated"])
    for name in FLAGS:
        data["next", "agents", name] = data["next"].pop(name)
    data["agents"] = data["next", "agents"].apply(torch.zeros_like)
    data["agents", "mask"] = torch.ones(6, 1)
    transform = Compose(CompactGoals(), hindsight(keys=HERKeys(done=done)))
    rb = make_buffer(transform, data, storage=ListStorage)
    assert not rb[:]["agents", "done"].any()
    assert all(set(row["agents"].keys()) == {"mask"} for row in rb.storage[:])


def test_a_deleted_container_is_ignored():
    transform = hindsight()
    container = Compose(transform)
    del container
    gc.collect()
    assert transform.inv(transitions(whole_episodes(6))).batch_size == (6,)


def test_sampling_does_not_change_stored_entries_under_the_keys_of_samples():
    """A ListStorage returns its own tensordicts, and written data can have entries under the keys of samples."""
    rows = transitions(whole_episodes(40)).set(RELABELLED, torch.zeros(40, 1, dtype=torch.bool))
    rb = make_buffer(hindsight(), rows, storage=ListStorage, batch_size=40)
    assert all(each[RELABELLED].all() for each in (rb.sample(), rb[:], *(rb[row] for row in range(40))))
    assert not torch.stack([row[RELABELLED] for row in rb.storage[:]]).any()


def test_its_representation_shows_the_arguments_that_differ_from_the_defaults():
    assert repr(HERTransform(SparseReward(0.05), strategy="future", her_ratio=0.8)) == "HERTransform(SparseReward)"
    options = {"strategy": {"low": Subgoal(2), "desired_goal": "future"}, "keys": HERKeys(desired_goal="target")}
    options |= {"her_ratio": 1.0, "capacity": 50, "goal_fn": swap, "goal_spec": Unbounded(2), "max_episode_steps": 9}
    transform = HERTransform(SparseReward(0.05), sequence_length=3, info=True, **options)
    assert (
        repr(transform)
        == repr(copy.deepcopy(transform))
        == (
            "HERTransform(SparseReward, strategy={'desired_goal': Future(), 'low': Subgoal(2)}, her_ratio=1.0, "
            "capacity=50, keys=HERKeys(desired_goal='target'), goal_fn=swap, goal_spec=UnboundedContinuous, "
            "max_episode_steps=9, sequence_length=3, info=True)"
        )
    )
    assert repr(HERTransform(None, goal_fn=Swap())) == "HERTransform(None, goal_fn=Swap)"


def test_goals_do_not_change_with_the_callers_tensors():
    recorded = record(strategy="episode")
    rows = recorded.world.play(0, ["go"] * 11 + ["terminated"])
    data = recorded.world.tensordict(rows)
    recorded.write(rows[:5], data[:5])
    data["next", "achieved_goal"][:5] = 777.0
    recorded.write(rows[5:], data[5:])
    assert recorded.check() == 12
