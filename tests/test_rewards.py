"""Reward modules: alone against plain Python loops, and through a replay buffer against calling the environment."""

import copy
import itertools
import math
import pickle
import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from torchrl_her import EnvReward, GoalReward, HERTransform, SparseReward
from torchrl_her.envs import BitFlipping, PointReach

POINT_REACH = "torchrl_her/PointReach-v0"
BIT_FLIPPING = "torchrl_her/BitFlipping-v0"


def goals_of(achieved, desired, batch_size):
    return TensorDict({"desired_goal": desired, "next": {"achieved_goal": achieved}}, batch_size=batch_size)


def rollout(env, steps=120, seed=0):
    env.set_seed(seed)
    torch.manual_seed(seed)
    return env.rollout(steps, break_when_any_done=False)


def sample_of(written, reward, count=200, her_ratio=0.6, **options):
    """What a buffer that holds these transitions returns; "index" tells which one each row is."""
    transform = HERTransform(reward, her_ratio=her_ratio, capacity=1000, **options)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)
    rb.extend(written.clone())
    transform.flush()
    torch.manual_seed(0)
    return rb.sample(count)


def check_sample(batch, written, reward, terminated=None, goal="desired_goal", neighbours=()):
    """Compare a sample row by row with a reward and, where it is given, a termination of one transition.

    ``neighbours`` is where reward and flags stand under "next".
    """
    flags = {name: ("next", *neighbours, name) for name in ("reward", "terminated", "truncated", "done")}
    changed = {goal, ("next", *(goal if isinstance(goal, tuple) else (goal,))), flags["reward"]}
    if terminated is not None:
        changed |= {flags["terminated"], flags["done"]}
    relabelled = batch["hindsight", "relabelled"][:, 0]
    assert 0 < relabelled.sum() < len(batch)
    stored = written[batch["index"]]
    for key in stored.keys(include_nested=True, leaves_only=True):
        as_stored = ~relabelled if key in changed else slice(None)
        assert torch.equal(batch[key][as_stored], stored[key][as_stored]), key
        assert batch[key].dtype == stored[key].dtype, key
    for row in batch[relabelled].unbind(0):
        assert row[flags["reward"]].item() == pytest.approx(reward(row), rel=1e-5)
        if terminated is not None:
            assert row[flags["terminated"]].item() == terminated(row)
            assert row[flags["done"]].item() == (terminated(row) or row[flags["truncated"]].item())


def distance_of_row(row):
    return math.dist(row["next", "achieved_goal"].tolist(), row["desired_goal"].tolist())


# GoalReward


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("batch_size", [(), (1,), (5,), (2, 3), (2, 1, 3)])
def test_a_goal_reward_is_the_function_of_each_pair_of_goals(batch_size, keepdim):
    torch.manual_seed(0)
    achieved, desired = torch.randn(2, *batch_size, 4)
    seen = []

    def reward_fn(achieved, desired):
        seen.append(achieved.shape)
        return -torch.linalg.vector_norm(achieved - desired, dim=-1, keepdim=keepdim)

    reward = GoalReward(reward_fn)(goals_of(achieved, desired, batch_size))["next", "reward"]
    assert reward.shape == (*batch_size, 1)
    assert seen == [(math.prod(batch_size), 4)]
    for place in itertools.product(*map(range, batch_size)):
        expected = -math.dist(achieved[place].tolist(), desired[place].tolist())
        assert reward[place].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch_size", [(5,), (2, 3)])
def test_a_termination_function_is_that_of_each_pair_of_goals(batch_size):
    torch.manual_seed(0)
    achieved, desired = torch.randn(2, *batch_size, 2)
    reward = GoalReward(
        lambda achieved, desired: (achieved - desired).sum(dim=-1),
        terminated_fn=lambda achieved, desired: (achieved > desired).any(dim=-1),
    )
    terminated = reward(goals_of(achieved, desired, batch_size))["next", "terminated"]
    assert terminated.shape == (*batch_size, 1)
    assert terminated.dtype == torch.bool
    for place in itertools.product(*map(range, batch_size)):
        assert terminated[place].item() == any(
            a > d for a, d in zip(achieved[place].tolist(), desired[place].tolist(), strict=True)
        )
    assert 0 < terminated.sum() < math.prod(batch_size)


@pytest.mark.parametrize("as_module", [True, False])
def test_a_function_rewards_relabelled_transitions_and_leaves_the_flags_alone(as_module):
    written = rollout(GymEnv(POINT_REACH))

    def reward_fn(achieved, desired):
        return -(achieved - desired).norm(dim=-1)

    batch = sample_of(written, GoalReward(reward_fn) if as_module else reward_fn)
    check_sample(batch, written, lambda row: -distance_of_row(row))


def test_a_sample_calls_the_function_once_with_all_rows():
    seen = []

    def reward_fn(achieved, desired):
        seen.append(len(achieved))
        return (achieved - desired)[:, 0]

    transform = HERTransform(reward_fn, capacity=1000)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)
    rb.extend(rollout(GymEnv(POINT_REACH)))
    seen.clear()
    rb.sample(64)
    assert seen == [64]


def test_a_termination_function_ends_relabelled_transitions_and_never_changes_truncated():
    written = rollout(GymEnv(POINT_REACH))
    batch = sample_of(
        written,
        GoalReward(
            lambda achieved, desired: -(achieved - desired).norm(dim=-1),
            terminated_fn=lambda achieved, desired: (achieved - desired).norm(dim=-1) < 0.3,
        ),
    )
    check_sample(batch, written, lambda row: -distance_of_row(row), lambda row: distance_of_row(row) < 0.3)
    ends = batch["hindsight", "relabelled"] & batch["next", "terminated"]
    assert (ends & batch["next", "truncated"]).any()
    assert (ends & ~batch["next", "truncated"]).any()


def test_the_transform_gives_its_keys_to_the_reward():
    flat = rollout(GymEnv(POINT_REACH))

    def nested(tensordict):
        reached = {"reached": tensordict["achieved_goal"], "wanted": tensordict["desired_goal"]}
        return {"agent": {"goals": reached}, "observation": tensordict["observation"]}

    under_next = nested(flat["next"])
    under_next["agent"] |= {"flags": {name: flat["next", name] for name in ("done", "terminated", "truncated")}}
    under_next["agent"]["flags"]["reward"] = flat["next", "reward"]
    written = TensorDict({**nested(flat), "next": under_next}, batch_size=flat.batch_size)
    batch = sample_of(
        written,
        SparseReward(0.1, terminated_fn=lambda achieved, desired: (achieved - desired).norm(dim=-1) <= 0.1),
        achieved_goal_key=("agent", "goals", "reached"),
        desired_goal_key=("agent", "goals", "wanted"),
        reward_key=("agent", "flags", "reward"),
        done_key=("agent", "flags", "done"),
    )

    def reached(row):
        achieved, desired = row["next", "agent", "goals", "reached"], row["agent", "goals", "wanted"]
        return math.dist(achieved.tolist(), desired.tolist()) <= 0.1

    goal = ("agent", "goals", "wanted")
    check_sample(batch, written, lambda row: reached(row) - 1.0, reached, goal, neighbours=("agent", "flags"))
    assert torch.equal(batch[goal], batch["next"][goal])


def test_rewards_see_the_goal_that_goal_fn_makes_of_a_state():
    written = rollout(GymEnv(POINT_REACH))
    written["achieved_goal"] = written.pop("observation")
    written["next", "achieved_goal"] = written["next"].pop("observation")  # [n, 4]: position and velocity
    batch = sample_of(
        written, lambda achieved, desired: (achieved - desired).norm(dim=-1), goal_fn=lambda state: -2 * state[:, :2]
    )

    def distance(row):
        return math.dist((-2 * row["next", "achieved_goal"][:2]).tolist(), row["desired_goal"].tolist())

    check_sample(batch, written, distance)
    own_outcome = (batch["desired_goal"] == -2 * batch["next", "achieved_goal"][:, :2]).all(dim=-1)
    assert (batch["next", "reward"][own_outcome] == 0).all()
    assert own_outcome.any()


# SparseReward


def distance_in_python(one, other):
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool])
def test_a_sparse_reward_is_that_of_a_plain_loop(dtype, shape):
    torch.manual_seed(0)
    size = 40
    achieved, desired = (4 * torch.randn(2, size, *shape)).abs().to(dtype)
    achieved[:10] = desired[:10]
    distances = [distance_in_python(*pair) for pair in zip(achieved, desired, strict=True)]
    threshold = (sorted(distances)[20] + sorted(distances)[21]) / 2
    reward = SparseReward(threshold)(goals_of(achieved, desired, size))["next", "reward"]
    assert reward.shape == (size, 1)
    assert reward.flatten().tolist() == [0.0 if distance <= threshold else -1.0 for distance in distances]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64])
def test_a_goal_exactly_at_the_threshold_is_reached(dtype):
    achieved = torch.tensor([[1, 5], [4, 1], [4, 5], [5, 5]], dtype=dtype)
    desired = torch.ones_like(achieved)
    reward = SparseReward(5.0)(goals_of(achieved, desired, 4))["next", "reward"]
    assert reward.flatten().tolist() == [0.0, 0.0, 0.0, -1.0]  # at distances 4, 3, 5 and 5.7


def test_goals_in_double_precision_are_compared_in_double_precision():
    achieved = torch.tensor([[0.1], [math.nextafter(0.1, 1)]], dtype=torch.float64)
    reward = SparseReward(0.1)(goals_of(achieved, torch.zeros_like(achieved), 2))["next", "reward"]
    assert reward.flatten().tolist() == [0.0, -1.0]


def test_goals_are_compared_in_the_dtype_in_which_they_are_kept():
    achieved = torch.tensor([[5.1], [5.2]], dtype=torch.float64)
    desired = torch.tensor([[5.1], [5.1]], dtype=torch.float32)
    reward = SparseReward(0)(goals_of(achieved, desired, 2))["next", "reward"]
    assert reward.flatten().tolist() == [0.0, -1.0]


def test_goals_of_two_dtypes_are_not_rounded_to_one():
    pairs = [(0.4, torch.tensor([[0]])), (256, torch.tensor([[0]], dtype=torch.uint8)), (2, torch.tensor([[True]]))]
    for achieved, desired in pairs:
        goals = goals_of(torch.tensor([[achieved]]), desired, 1)
        assert SparseReward(0.05)(goals)["next", "reward"].item() == -1.0


@pytest.mark.parametrize(("low", "high"), [(0, 255), (10, 11), (255, 0)])
def test_the_difference_of_pixels_does_not_wrap_around(low, high):
    achieved = torch.full((1, 3, 8, 8), low, dtype=torch.uint8)
    desired = torch.full((1, 3, 8, 8), high, dtype=torch.uint8)
    distance = abs(low - high) * math.sqrt(3 * 8 * 8)
    for threshold, expected in ((distance - 0.1, -1.0), (distance + 0.1, 0.0)):
        assert SparseReward(threshold)(goals_of(achieved, desired, 1))["next", "reward"].item() == expected


@pytest.mark.parametrize("bits", [20, 40, 61])
def test_large_integers_that_differ_are_not_the_same_goal(bits):
    achieved = torch.tensor([2**bits, 2**bits + 1])
    desired = torch.tensor([2**bits, 2**bits])
    reward = SparseReward(0)(goals_of(achieved, desired, 2))["next", "reward"]
    assert reward.flatten().tolist() == [0.0, -1.0]


def test_a_sparse_reward_relabels_as_the_environment_that_it_describes():
    written = rollout(GymEnv(POINT_REACH))
    batch = sample_of(written, SparseReward(0.05))
    env = PointReach()
    check_sample(
        batch,
        written,
        lambda row: env.compute_reward(row["next", "achieved_goal"].numpy(), row["desired_goal"].numpy(), {}),
    )
    assert set(batch["next", "reward"].flatten().tolist()) == {0.0, -1.0}


@pytest.mark.parametrize("threshold", [-0.1, math.nan])
def test_a_threshold_that_is_no_distance_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold is a distance and must be 0 or more, got {threshold}"):
        SparseReward(threshold)


# EnvReward


def by_environment(env):
    """The environment's functions of one transition."""

    def call(name, row):
        return getattr(env, name)(row["next", "achieved_goal"].numpy(), row["desired_goal"].numpy(), {}).item()

    return (lambda row: call("compute_reward", row)), (lambda row: call("compute_terminated", row))


WAYS = {
    "Gymnasium environment": lambda: gymnasium.make(POINT_REACH),
    "TorchRL wrapper": lambda: GymEnv(POINT_REACH),
    "transformed environment": lambda: TransformedEnv(GymEnv(POINT_REACH), StepCounter()),
    "class": lambda: PointReach,
    "function of a Gymnasium environment": lambda: lambda: gymnasium.make(POINT_REACH),
    "function of a TorchRL environment": lambda: lambda: TransformedEnv(GymEnv(POINT_REACH), StepCounter()),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_reward_is_the_environments_for_every_way_to_name_it(way):
    written = rollout(GymEnv(POINT_REACH))
    batch = sample_of(written, EnvReward(WAYS[way]()))
    check_sample(batch, written, *by_environment(PointReach()))


class Closer(gymnasium.Wrapper):
    """A task made of another by a wrapper: to come within 0.3, where the episode ends, for a reward of one's own."""

    def step(self, action):
        observation, _, _, truncated, info = self.env.step(action)
        goals = observation["achieved_goal"], observation["desired_goal"]
        reward, terminated = self.compute_reward(*goals, info), self.compute_terminated(*goals, info)
        return observation, float(reward), bool(terminated), truncated, info

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -2 * np.linalg.norm(achieved_goal - desired_goal, axis=-1)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.3


class NoGoals(gymnasium.Wrapper):
    """A wrapper that leaves the functions to what it wraps."""


WRAPPED = {
    "wrapper": lambda: Closer(gymnasium.make(POINT_REACH)),
    "wrapper in another": lambda: gymnasium.wrappers.TimeLimit(NoGoals(Closer(gymnasium.make(POINT_REACH))), 50),
    "TorchRL wrapper": lambda: GymWrapper(Closer(gymnasium.make(POINT_REACH))),
    "transformed environment": lambda: TransformedEnv(GymWrapper(Closer(gymnasium.make(POINT_REACH))), StepCounter()),
    "wrapper of an environment without goals": lambda: Closer(gymnasium.make("CartPole-v1")),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_a_wrapper_that_changes_the_task_changes_the_reward(way):
    written = rollout(GymWrapper(Closer(gymnasium.make(POINT_REACH))))
    batch = sample_of(written, EnvReward(WRAPPED[way]()))
    check_sample(batch, written, *by_environment(Closer(gymnasium.make(POINT_REACH))))
    assert batch["next", "terminated"].any()


def test_discrete_goals_that_are_stored_as_one_hot_vectors_are_refused_with_the_way_to_go():
    env = GymEnv(BIT_FLIPPING, n_bits=3, discrete_observation=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=HERTransform(EnvReward(env)))
    with pytest.raises(ValueError, match=r"has the shape \(\), and those .* \(8,\).*categorical_action_encoding=True"):
        rb.extend(rollout(env, steps=10))
    assert len(rb) == 0


@pytest.mark.parametrize("form", ["bits", "image_observation", "discrete_observation"])
def test_bit_flipping_ends_where_the_new_goal_is_reached_and_not_where_the_old_one_was(form):
    options = {} if form == "bits" else {form: True}
    env = GymEnv(BIT_FLIPPING, n_bits=3, max_steps=5, categorical_action_encoding=True, **options)
    written = rollout(env)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none says that it is called row by row
        batch = sample_of(written, EnvReward(env), count=400, strategy="episode")
    check_sample(batch, written, *by_environment(BitFlipping(3, **options)))
    before, after = written["next", "terminated"][batch["index"]], batch["next", "terminated"]
    assert (before & ~after).any()
    assert (~before & after).any()
    assert (batch["hindsight", "relabelled"] & batch["next", "truncated"] & ~after).any()
    assert (batch["hindsight", "relabelled"] & batch["next", "truncated"] & after).any()


def test_done_stays_as_stored_where_nothing_is_relabelled_whatever_the_other_flags_say():
    written = rollout(GymEnv(POINT_REACH))
    written["next", "done"] = torch.rand(len(written), 1) < 0.5
    batch = sample_of(written, EnvReward(PointReach()))
    check_sample(batch, written, *by_environment(PointReach()))


def test_terminated_fn_takes_the_place_of_the_environments():
    written = rollout(GymEnv(POINT_REACH))
    reward = EnvReward(PointReach(), terminated_fn=lambda achieved, desired: (achieved - desired).norm(dim=-1) < 0.2)
    by_reward, _ = by_environment(PointReach())
    check_sample(sample_of(written, reward), written, by_reward, lambda row: distance_of_row(row) < 0.2)


class WithoutTermination(gymnasium.Env):
    """A goal environment that has a reward and no ``compute_terminated``, as panda-gym's."""

    observation_space = PointReach().observation_space

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.abs(achieved_goal - desired_goal).sum(axis=-1)


def test_flags_stay_as_stored_where_the_environment_does_not_tell_them():
    written = rollout(GymEnv(POINT_REACH))
    batch = sample_of(written, EnvReward(WithoutTermination()))
    check_sample(batch, written, lambda row: -(row["next", "achieved_goal"] - row["desired_goal"]).abs().sum().item())


class LikePointMaze(PointReach):
    """Its ``compute_terminated`` takes one norm over the whole batch, as PointMaze's does."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(np.linalg.norm(achieved_goal - desired_goal) <= 0.45)


class LikeFetch(PointReach):
    """Its ``compute_terminated`` is one flag, as Fetch's."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return False


class OneNorm(PointReach):
    """Its ``compute_reward`` takes one norm over the whole batch and returns that of it for each row."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        distance = np.linalg.norm(achieved_goal - desired_goal)
        return np.full(achieved_goal.shape[:-1], -distance)


class OneGoal(PointReach):
    """Its ``compute_reward`` raises an error for a batch."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return np.float64(-math.dist(achieved_goal, desired_goal))


NOT_BATCHED = {
    LikePointMaze: ("compute_terminated", lambda row: row["reward"], lambda row: distance_of_row(row) <= 0.45),
    OneNorm: ("compute_reward", lambda row: -distance_of_row(row), lambda row: False),
    OneGoal: ("compute_reward", lambda row: -distance_of_row(row), lambda row: False),
}


@pytest.mark.parametrize("env_class", NOT_BATCHED)
def test_a_function_that_takes_no_batch_is_called_row_by_row_with_one_warning(env_class):
    name, reward, terminated = NOT_BATCHED[env_class]
    if name == "compute_terminated":
        reward, _ = by_environment(PointReach())
    written = rollout(GymEnv(POINT_REACH))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = EnvReward(env_class())
        for seed in range(3):
            batch = sample_of(written.roll(50 * seed, 0), module, count=100)
            check_sample(batch, written.roll(50 * seed, 0), reward, terminated)
    told = [str(each.message) for each in caught if "row by row" in str(each.message)]
    assert len(told) == 1
    assert f"{name} of {env_class.__name__} does not take a batch" in told[0]
    assert "GoalReward(reward_fn)" in told[0]
    assert "terminated_fn" in told[0]


def test_a_flag_that_is_the_same_for_all_goals_is_taken_for_the_batch():
    reward, _ = by_environment(PointReach())
    written = rollout(GymEnv(POINT_REACH))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        module = EnvReward(LikeFetch())
        batch = sample_of(written, module, count=100)
    check_sample(batch, written, reward, lambda row: False)


class OneThreshold(PointReach):
    """Its ``compute_reward`` compares one norm over the whole batch with a large threshold, for all rows."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        reached = np.linalg.norm(achieved_goal - desired_goal) <= 0.5
        return np.full(achieved_goal.shape[:-1], reached - 1.0)


@pytest.mark.filterwarnings("ignore:compute_reward of OneThreshold")
@pytest.mark.parametrize("seed", range(10))
def test_that_a_function_takes_no_batch_is_found_out_wherever_the_first_transition_is(seed):
    written = rollout(GymEnv(POINT_REACH), steps=50, seed=seed)
    rewards = EnvReward(OneThreshold())(written.clone())["next", "reward"]
    assert rewards.flatten().tolist() == [float(distance_of_row(row) <= 0.5) - 1 for row in written.unbind(0)]


def test_what_was_found_out_of_a_function_is_kept_by_a_copy():
    module = EnvReward(LikePointMaze())
    written = rollout(GymEnv(POINT_REACH))
    with pytest.warns(UserWarning, match="row by row"):
        expected = module(written.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (pickle.loads(pickle.dumps(module))(written.clone()) == expected).all()


class PaysForEffort(PointReach):
    """Its reward reads two entries of ``info``, and it takes a batch."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
        return -distance - np.sum(info["effort"] ** 2, axis=-1) - info["fee"]


class PaysForEffortAlone(PaysForEffort):
    """The same for one goal at a time."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        assert achieved_goal.shape == info["effort"].shape == (2,)
        return super().compute_reward(achieved_goal, desired_goal, info)


@pytest.mark.parametrize("env_class", [PaysForEffort, PaysForEffortAlone])
def test_stored_entries_are_handed_to_the_environment_as_info(env_class):
    written = rollout(GymEnv(POINT_REACH))
    written["next", "measured", "effort"] = torch.rand(len(written), 2)
    written["fee"] = torch.rand(len(written))
    module = EnvReward(env_class(), info_keys=[("next", "measured", "effort"), "fee"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = sample_of(written, module)

    def reward(row):
        effort = sum(each**2 for each in row["next", "measured", "effort"].tolist())
        return -distance_of_row(row) - effort - row["fee"].item()

    check_sample(batch, written, reward, lambda row: False)
    assert sum("row by row" in str(each.message) for each in caught) == (env_class is PaysForEffortAlone)


INFO = {
    "a string": ("fee", TypeError, r"info_keys must be a list of keys, got the string 'fee': \['fee'\]"),
    "an entry that is not stored": (["tax"], KeyError, r"no entry 'tax'.*info_keys=\.\.\.; there are"),
    "too few": (["fee"], KeyError, r"compute_reward of PaysForEffort asks info for 'effort', and info has \['fee'\]"),
    "none": ([], KeyError, r"compute_reward of PaysForEffort asks info for 'effort', and info has nothing: name"),
}


@pytest.mark.parametrize("case", INFO)
def test_entries_that_the_environment_does_not_get_are_named(case):
    info_keys, error, message = INFO[case]
    written = rollout(GymEnv(POINT_REACH))
    written["fee"] = torch.rand(len(written))
    with pytest.raises(error, match=message):
        sample_of(written, EnvReward(PaysForEffort(), info_keys=info_keys))


def test_an_error_of_the_environments_own_is_not_taken_for_a_missing_entry():
    class Broken(PointReach):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return {}["far"]

    with pytest.raises(KeyError, match=r"^'far'$"):
        sample_of(rollout(GymEnv(POINT_REACH)), EnvReward(Broken()))


def test_finding_out_whether_a_function_is_batched_leaves_the_environments_draws_alone():
    goals = []
    for ask in (False, True):
        env = PointReach()
        env.reset(seed=0)
        env.observation_space.seed(0)
        if ask:
            EnvReward(env)(rollout(GymEnv(POINT_REACH)))
        goals.append((*env.reset()[0]["desired_goal"], *env.observation_space.sample()["desired_goal"]))
    assert goals[0] == goals[1]


@pytest.mark.parametrize("make", [lambda: GymEnv(BIT_FLIPPING), lambda: gymnasium.make(BIT_FLIPPING), BitFlipping])
def test_the_environment_is_no_part_of_the_state_dict(make):
    reward = EnvReward(make())
    assert reward.state_dict() == {}
    assert list(reward.parameters()) == []
    names = set(HERTransform(reward, capacity=10).state_dict())
    assert names == set(HERTransform(lambda achieved, desired: achieved, capacity=10).state_dict())


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("make", [lambda: GymEnv(BIT_FLIPPING, n_bits=3), lambda: BitFlipping(3)])
def test_a_copy_rewards_as_the_original(make, copy_of):
    written = rollout(GymEnv(BIT_FLIPPING, n_bits=3))
    fresh, used = EnvReward(make()), EnvReward(make())
    expected = used(written.clone())
    assert (expected == written).all()
    for reward in (fresh, used):
        assert (copy_of(reward)(written.clone()) == expected).all()


MAKE_ONE = partial(GymEnv, f"torchrl_her.envs:{POINT_REACH}")
BATCHED = {"SerialEnv": partial(SerialEnv, 2, MAKE_ONE), "ParallelEnv": partial(ParallelEnv, 2, MAKE_ONE)}


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_environments_is_refused(name, transformed):
    env = BATCHED[name]()
    if transformed:
        env = TransformedEnv(env, StepCounter())
    with pytest.raises(TypeError, match=f"one environment, not a {name}: pass a function that makes one"):
        EnvReward(env)
    with pytest.raises(TypeError, match=f"one environment, not a {name}: pass a function that makes one"):
        EnvReward(lambda: env)


@pytest.mark.parametrize(
    "make", [lambda: gymnasium.make_vec(f"torchrl_her.envs:{POINT_REACH}", 2), lambda: MAKE_ONE(num_envs=2)]
)
def test_a_vectorized_environment_is_refused(make):
    env = make()
    with pytest.raises(TypeError, match="one environment, not a batch of them: pass a function that makes one"):
        EnvReward(env)
    env.close()


@pytest.mark.parametrize(
    "env",
    [lambda: gymnasium.make("CartPole-v1"), lambda: GymEnv("CartPole-v1"), lambda: lambda: GymEnv("CartPole-v1")],
)
def test_an_environment_without_goals_is_refused(env):
    with pytest.raises(TypeError, match=r"compute_reward.*CartPoleEnv has none.*GoalReward\(reward_fn\)"):
        EnvReward(env())


# Any module


def test_a_module_may_read_the_action_and_any_other_entry():
    written = rollout(GymEnv(POINT_REACH))
    written["next", "wind"] = torch.rand(len(written), 1)

    def reward_fn(achieved, desired, action, velocity, wind):
        effort = (action**2).sum(dim=-1, keepdim=True)
        return -(achieved - desired).norm(dim=-1, keepdim=True) - effort * wind - velocity[..., 2:].sum(-1, True)

    keys = [("next", "achieved_goal"), "desired_goal", "action", "observation", ("next", "wind")]
    batch = sample_of(written, TensorDictModule(reward_fn, in_keys=keys, out_keys=[("next", "reward")]))

    def reward(row):
        effort = sum(each**2 for each in row["action"].tolist())
        return -distance_of_row(row) - effort * row["next", "wind"].item() - sum(row["observation"][2:].tolist())

    check_sample(batch, written, reward)


def test_a_module_that_writes_terminated_ends_relabelled_transitions():
    written = rollout(GymEnv(POINT_REACH))

    def reward_fn(achieved, desired):
        distance = (achieved - desired).norm(dim=-1, keepdim=True)
        return -distance, distance < 0.3

    module = TensorDictModule(
        reward_fn, [("next", "achieved_goal"), "desired_goal"], [("next", "reward"), ("next", "terminated")]
    )
    batch = sample_of(written, module)
    check_sample(batch, written, lambda row: -distance_of_row(row), lambda row: distance_of_row(row) < 0.3)


def test_what_else_a_module_writes_changes_no_entry():
    written = rollout(GymEnv(POINT_REACH))
    written["next", "success"] = torch.rand(len(written), 1)
    written["observation"] = torch.rand(len(written), 4)

    def reward_fn(achieved, desired):
        distance = (achieved - desired).norm(dim=-1, keepdim=True)
        return -distance, distance, distance.expand(-1, 4), distance

    module = TensorDictModule(
        reward_fn,
        [("next", "achieved_goal"), "desired_goal"],
        [("next", "reward"), ("next", "success"), "observation", "new"],
    )
    batch = sample_of(written, module)
    check_sample(batch, written, lambda row: -distance_of_row(row))
    assert "new" not in batch


def test_a_reward_keeps_the_dtype_that_is_stored():
    written = rollout(GymEnv(POINT_REACH))
    written["next", "reward"] = written["next", "reward"].double()
    batch = sample_of(written, lambda achieved, desired: (achieved == desired).all(dim=-1))
    check_sample(batch, written, lambda row: float(distance_of_row(row) == 0))


def test_a_reward_with_parameters_hands_no_gradient_to_the_sample():
    written = rollout(GymEnv(POINT_REACH))
    weights = torch.nn.Linear(4, 1)
    module = TensorDictModule(
        lambda achieved, desired: weights(torch.cat([achieved, desired], dim=-1)),
        [("next", "achieved_goal"), "desired_goal"],
        [("next", "reward")],
    )
    assert not sample_of(written, module)["next", "reward"].requires_grad


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, achieved, desired):
        return -self.layer(achieved - desired).abs()


def test_a_learned_reward_moves_and_is_saved_with_the_transform():
    def make():
        return HERTransform(GoalReward(Learned(), terminated_fn=nn.PairwiseDistance()), capacity=10)

    one, other = make(), make()
    assert len(list(one.parameters())) == 2
    other.load_state_dict(one.state_dict())
    rewards = [module.reward(goals_of(*GOALS, 3))["next", "reward"] for module in (one, other)]
    assert torch.equal(*rewards)
    assert all(parameter.is_meta for parameter in one.to("meta").parameters())


# Environments that tell little of themselves


class Plain:
    """Not a Gymnasium environment, but with its functions."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return (np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.5).astype(np.float32) - 1


class ObservesAlone(gymnasium.Env, Plain):
    """One whose spaces say nothing of goals."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))


class Scalar(Plain):
    """One that takes a norm over the whole batch."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return float(np.linalg.norm(achieved_goal - desired_goal) < 0.5) - 1


GOALS = torch.tensor([[0.0, 0.0], [3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.1], [0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize("env", [Plain(), ObservesAlone(), Plain], ids=["plain", "observes alone", "made"])
def test_an_environment_that_does_not_tell_of_its_goals_is_called_once_for_a_batch(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards = EnvReward(env)(goals_of(*GOALS, 3))["next", "reward"]
    assert rewards.tolist() == [[0.0], [-1.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.float64])
def test_goals_of_any_dtype_find_out_whether_it_takes_a_batch(dtype):
    class Same:
        def compute_reward(self, achieved_goal, desired_goal, info):
            return (achieved_goal == desired_goal).all(-1) - 1.0

    goals = torch.tensor([[0, 1], [1, 1]]).to(dtype), torch.tensor([[0, 1], [0, 1]]).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards = EnvReward(Same())(goals_of(*goals, 2))["next", "reward"]
    assert rewards.tolist() == [[0.0], [-1.0]]


def test_one_that_does_not_take_a_batch_either_is_called_row_by_row():
    with pytest.warns(UserWarning, match="row by row"):
        rewards = EnvReward(Scalar())(goals_of(*GOALS, 3))["next", "reward"]
    assert rewards.tolist() == [[0.0], [-1.0], [0.0]]
