"""HindsightAugmentation in real buffers: what the comparison with the oracle in `test_state_machine.py` leaves out."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl import envs
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer

from support.factories import forked, make_augmentation, same
from support.goals import reward_of
from support.named import named
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import Goals, World, transitions
from torchrl_her import GoalStrategy, HERKeys, HindsightAugmentation, SparseReward

RELABELLED, GOAL_STEP = ("hindsight", "relabelled"), ("hindsight", "goal_step")


def make(kind=TensorDictReplayBuffer, storage=LazyTensorStorage, size=1000, transform=None, **options):
    """Return a buffer with the given transform, or with an augmentation with the given options."""
    return kind(storage=storage(size), transform=transform or make_augmentation(**options), batch_size=32)


def episodes(*lengths):
    """Return transitions of one environment, over episodes with these lengths."""
    return transitions([move for each in lengths for move in ["go"] * (each - 1) + ["terminated"]])


KINDS = [
    ("ReplayBuffer", "LazyTensorStorage"),
    ("PrioritizedReplayBuffer(alpha=0.7, beta=0.5)", "LazyTensorStorage"),
    ("TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, sync=False)", "LazyTensorStorage"),
    ("TensorDictReplayBuffer", "LazyStackStorage"),
    ("TensorDictReplayBuffer", "CompressedListStorage"),
]


@pytest.mark.parametrize(("kind", "storage"), KINDS)
def test_extend_returns_the_rows_of_ended_episodes_and_evicts_transitions_with_their_copies(kind, storage):
    rb, world = make(named(kind), named(storage), size=50), World(1, Goals())
    for first in (0, 35, 20):  # the first row of each write, in a ring of 50 rows
        data = world.written(["go"] * 4 + ["terminated", "go", "truncated"])
        assert len(rb.extend(data[:3])) == 0
        index = rb.extend(data[3:]).flatten()
        assert index.tolist() == [(first + number) % 50 for number in range(35)]
        rows = rb[:][index]
        assert torch.equal(rows["uid"], data["uid"].repeat_interleave(5))
        reward = reward_of(rows["next", "achieved_goal"], rows["desired_goal"])
        assert torch.equal(rows["next", "reward"], reward.unsqueeze(1))
    assert rb[:][RELABELLED].float().mean() == 0.8
    assert rb.sample()[GOAL_STEP].shape == (32, 1)


def test_an_episode_that_single_transitions_complete_waits_for_a_larger_or_an_empty_write():
    rb, data = make(ReplayBuffer), episodes(5)
    assert [len(rb.extend(row)) for row in data.split(1)] == [0] * 5
    assert rb.transform[0].held_back == 5
    assert len(rb.extend(data[:2])) == 25
    for row in data[2:]:
        rb.add(row)
    assert len(rb) == 25
    assert len(rb.extend(data[:0])) == 25
    assert rb.transform[0].held_back == 0


@pytest.mark.filterwarnings("error")
def test_a_warning_says_that_nothing_is_stored_if_all_writes_are_single_transitions():
    rb, data = make(), episodes(5)
    for row in (*data.split(1), *data[:4].split(1)):
        rb.extend(row)
    with pytest.warns(UserWarning, match=r"2 episodes have ended .* cannot distinguish such a write from rb\.add"):
        rb.extend(data[4:])
    for row in data.split(1):
        rb.extend(row)  # no second warning


def test_a_running_episode_waits_for_its_end_and_a_silent_reset_ends_one_after_a_while():
    recorded = Recorded(make(size=100_000), Oracle({"future": 1.0}, 10**9, 0.5), World(2, Goals()))
    for _ in range(4):
        recorded.play([["go"] * 50, []])
    assert len(recorded.rb) == 0
    recorded.play([["silent"], []])
    for _ in range(12):
        recorded.play([[], ["go"] * 999 + ["truncated"]])
    rows = recorded.rb[:]
    assert (rows["uid"] <= 200).sum() == 201 * 5
    recorded.check(rows[rows["uid"] <= 200])


def test_a_transform_of_written_data_changes_flushed_transitions_once():
    cast = envs.DTypeCastTransform(torch.float64, torch.float32, in_keys=["observation"], in_keys_inv=["observation"])
    rb = make(transform=envs.Compose(make_augmentation(), cast))
    assert len(rb.extend(episodes(5)[:3])) == 0
    assert len(rb.extend(rb.transform[0].flush())) == 15
    assert rb.storage[:]["observation"].dtype == torch.float64


def test_rewards_are_computed_in_one_call_per_write():
    calls = []

    def reward(achieved, desired):
        calls.append(len(achieved))
        return reward_of(achieved, desired)

    rb = make(reward=reward)
    for chunk in episodes(*[5, 2] * 9).split(21):
        calls.clear()
        index = rb.extend(chunk)
        assert calls[-1] == len(index)
        assert len(calls) <= 4  # the other calls compare rewards with stored rewards


NO = -1  # the goal step of an original
AHEAD = {0: [NO, 0, NO, 1, NO, 2, NO, 3], 2: [NO, 2, NO, 3, NO, NO], -2: [NO, NO, NO, 0, NO, 1]}


@pytest.mark.parametrize("ahead", AHEAD)
def test_steps_that_a_strategy_selects_outside_the_episode_make_no_copies(ahead):
    class Ahead(GoalStrategy):
        def select(self, transitions):
            return transitions.episode, transitions.step + ahead  # beyond the end or before the start

    rb = make(strategy=Ahead(), n_sampled_goal=1)
    rb.extend(episodes(4, 4))
    assert rb[:][GOAL_STEP].flatten().tolist() == 2 * AHEAD[ahead]


def test_entries_may_change_while_nothing_is_held_back_and_empty_ones_always():
    rb = make(storage=ListStorage)
    more = episodes(5).set("more", torch.zeros(5, 1))
    for data in (more, episodes(5), more):
        assert len(rb.extend(data[:3])) == 0
        assert len(rb.extend(data[3:].set("empty", TensorDict(batch_size=[2])))) == 25


# Saving, copies, processes


def test_a_transform_with_numpy_integers_continues_from_a_state_that_torch_saved(tmp_path):
    options = {name: np.int64(50) for name in ("n_sampled_goal", "max_episode_steps", "capacity")}
    rb, twin = (make(strategy="random", **options) for _ in range(2))
    data = episodes(3, 3, 9, 3)[:17]
    rb.extend(data[:10])
    rb.transform[0].flush()
    torch.save(rb.transform[0].state_dict(), tmp_path / "state")
    twin.transform[0].load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    written = []
    for buffer in (rb, twin):
        torch.manual_seed(7)
        written.append(buffer.storage[buffer.extend(data[10:])].exclude("index"))
    assert len(written[0]) == 51 * 9
    assert same(*written)
    assert same(*(each.transform[0].state_dict() for each in (rb, twin)))


def test_a_copy_for_another_process_does_not_contain_the_transitions_held_back():
    hindsight = make_augmentation()
    hindsight.inv(episodes(5)[:3])
    assert pickle.loads(pickle.dumps(hindsight)).held_back == 3
    hindsight.share_memory_()
    assert pickle.loads(pickle.dumps(hindsight)).held_back == 0
    copied = copy.deepcopy(hindsight)
    assert copied.held_back == hindsight.held_back == 3
    assert pickle.loads(pickle.dumps(copied)).held_back == 3, "a deep copy is not shared"


def test_a_copy_for_another_process_draws_goals_from_its_own_episodes():
    """Pickled for a process, tensors of both copies share memory."""
    hindsight = make_augmentation(strategy="random", n_sampled_goal=50, max_episode_steps=5)
    hindsight.inv(episodes(5))
    hindsight.share_memory_()
    copied, world, achieved = pickle.loads(ForkingPickler.dumps(hindsight)), World(2, Goals(offset=100)), set()
    for _ in range(3):
        hindsight.inv(world.written(["go"] * 4 + ["terminated"]))
        data = world.written(["go"] * 4 + ["terminated"], 1)
        achieved |= set(map(tuple, data["next", "achieved_goal"].tolist()))
        rows = copied.inv(data)
        assert len(rows) == 5 * (1 + 50)
        assert set(map(tuple, rows["desired_goal"][rows[RELABELLED].squeeze(-1)].tolist())) == achieved


@pytest.mark.parametrize(("is_shared", "left"), [(True, 0), (False, 3)])
def test_a_forked_process_drops_the_transitions_that_its_parent_holds_back(is_shared, left):
    hindsight = make_augmentation()
    hindsight.inv(episodes(5)[:3])
    if is_shared:
        hindsight.share_memory_()

    def flush():
        hindsight.flush()
        assert hindsight.held_back == left

    assert forked(flush) == 0


def test_its_representation_shows_the_arguments_that_differ_from_the_defaults():
    assert repr(HindsightAugmentation(SparseReward(0.05))) == "HindsightAugmentation(SparseReward)"
    options = {"n_sampled_goal": 2, "max_episode_steps": 20_000, "keys": HERKeys(reward="gain"), "strategy": "final"}
    text = "strategy=Final(), n_sampled_goal=2, capacity=20000, keys=HERKeys(reward='gain'), max_episode_steps=20000"
    assert repr(HindsightAugmentation(SparseReward(0.05), **options)) == f"HindsightAugmentation(SparseReward, {text})"
