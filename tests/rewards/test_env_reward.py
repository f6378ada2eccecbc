"""EnvReward, compared with one call of the environment for each transition."""

import copy
import math
import pickle
import warnings
from functools import partial

import gymnasium
import gymnasium_robotics
import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from support.refused import VectorizedInProcess
from support.rewards import POINT_REACH, check_relabelled, distance, distance_of_row, goals_of, point_reach, rollout
from torchrl_her import EnvReward, HERTransform
from torchrl_her.envs import BitFlipping, PointReach

BIT_FLIPPING = "torchrl_her/BitFlipping-v0"


def by_environment(env):
    """Return functions for the environment's reward and termination of a single transition."""

    def call(name, row):
        return getattr(env, name)(row["next", "achieved_goal"].numpy(), row["desired_goal"].numpy(), {}).item()

    return partial(call, "compute_reward"), partial(call, "compute_terminated")


def row_by_row(caught):
    """Return the warnings about functions that are not batched."""
    return [str(each.message) for each in caught if "row by row" in str(each.message)]


WAYS = {
    "Gymnasium environment": lambda: gymnasium.make(POINT_REACH),
    "TorchRL wrapper": lambda: GymEnv(POINT_REACH),
    "transformed environment": lambda: TransformedEnv(GymEnv(POINT_REACH), StepCounter()),
    "class": lambda: PointReach,
    "id": lambda: POINT_REACH,
    "function of a Gymnasium environment": lambda: lambda: gymnasium.make(POINT_REACH),
    "function of a TorchRL environment": lambda: lambda: TransformedEnv(GymEnv(POINT_REACH), StepCounter()),
}


class Closer(gymnasium.Wrapper):
    """Changes the task of an environment: the episode ends within 0.3 of the goal, and the reward differs."""

    def step(self, action):
        observation, _, _, truncated, info = self.env.step(action)
        goals = observation["achieved_goal"], observation["desired_goal"]
        reward, terminated = self.compute_reward(*goals, info), self.compute_terminated(*goals, info)
        return observation, float(reward), bool(terminated), truncated, info

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -2 * np.linalg.norm(achieved_goal - desired_goal, axis=-1)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.3


def make_closer():
    return Closer(gymnasium.make(POINT_REACH))


WRAPPED = {
    "wrapper": make_closer,
    "wrapper in another": lambda: gymnasium.wrappers.TimeLimit(gymnasium.Wrapper(make_closer()), 50),
    "TorchRL wrapper": lambda: GymWrapper(make_closer()),
    "transformed environment": lambda: TransformedEnv(GymWrapper(make_closer()), StepCounter()),
    "wrapper of an environment without goals": lambda: Closer(gymnasium.make("CartPole-v1")),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_reward_is_the_environments_for_every_way_to_name_it(way):
    check_relabelled(EnvReward(WAYS[way]()), *by_environment(PointReach()))


@pytest.mark.parametrize("way", WRAPPED)
def test_a_wrapper_that_changes_the_task_changes_the_reward(way):
    written = rollout(GymWrapper(make_closer()))
    batch = check_relabelled(EnvReward(WRAPPED[way]()), *by_environment(make_closer()), written=written)
    assert batch["next", "terminated"].any()


def test_discrete_goals_that_are_stored_as_one_hot_vectors_are_refused_with_the_remedy():
    env = GymEnv(BIT_FLIPPING, n_bits=3, discrete_observation=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=HERTransform(EnvReward(env)))
    with pytest.raises(
        ValueError, match=r"takes goals of the shape \(\), but stored .* \(8,\).*categorical_action_encoding=True"
    ):
        rb.extend(rollout(env, steps=10))
    assert len(rb) == 0


@pytest.mark.filterwarnings("error")  # its functions are batched
@pytest.mark.parametrize("form", ["bits", "image_observation", "discrete_observation"])
def test_bit_flipping_ends_where_the_new_goal_is_reached_and_not_where_the_old_one_was(form):
    options = {} if form == "bits" else {form: True}
    env = GymEnv(BIT_FLIPPING, n_bits=3, max_steps=5, categorical_action_encoding=True, **options)
    written, expected = rollout(env), by_environment(BitFlipping(3, **options))
    batch = check_relabelled(EnvReward(env), *expected, written=written, count=400, strategy="episode")
    before, after = written["next", "terminated"][batch["index"]], batch["next", "terminated"]
    at_time_limit = batch["hindsight", "relabelled"] & batch["next", "truncated"]
    for some in (before & ~after, ~before & after, at_time_limit & ~after, at_time_limit & after):
        assert some.any()


def test_done_stays_as_stored_where_nothing_is_relabelled_whatever_the_other_flags_are():
    written = point_reach()
    written["next", "done"] = torch.rand(len(written), 1) < 0.5
    check_relabelled(EnvReward(PointReach()), *by_environment(PointReach()), written=written)


def test_terminated_fn_replaces_the_environments():
    reward = EnvReward(PointReach(), terminated_fn=lambda achieved, desired: distance(achieved, desired) < 0.2)
    check_relabelled(reward, by_environment(PointReach())[0], lambda row: distance_of_row(row) < 0.2)


class WithoutTermination(gymnasium.Env):
    """A goal environment with a reward but without ``compute_terminated``, like those of panda-gym."""

    observation_space = PointReach().observation_space

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.abs(achieved_goal - desired_goal).sum(axis=-1)


def test_flags_stay_as_stored_where_the_environment_has_no_function_for_them():
    check_relabelled(
        EnvReward(WithoutTermination()),
        lambda row: -(row["next", "achieved_goal"] - row["desired_goal"]).abs().sum().item(),
    )


# Functions that are not batched


def point_reach_with(name, **functions):
    """Return a subclass of PointReach with other functions of achieved goal, desired goal and info."""
    return type(name, (PointReach,), {key: staticmethod(function) for key, function in functions.items()})


def one_flag(achieved, desired, info):
    return bool(np.linalg.norm(achieved - desired) <= 0.45)


def one_norm(achieved, desired, info):
    return np.full(achieved.shape[:-1], -np.linalg.norm(achieved - desired))


def one_threshold(achieved, desired, info):
    return np.full(achieved.shape[:-1], (np.linalg.norm(achieved - desired) <= 0.5) - 1.0)


def one_goal(achieved, desired, info):
    return np.float64(-math.dist(achieved, desired))  # raises an error for a batch


LikePointMaze = point_reach_with("LikePointMaze", compute_terminated=one_flag)
LikeFetch = point_reach_with("LikeFetch", compute_terminated=lambda achieved, desired, info: False)
OneNorm = point_reach_with("OneNorm", compute_reward=one_norm)
OneThreshold = point_reach_with("OneThreshold", compute_reward=one_threshold)
OneGoal = point_reach_with("OneGoal", compute_reward=one_goal)

NOT_BATCHED = {
    LikePointMaze: ("compute_terminated", by_environment(PointReach())[0], lambda row: distance_of_row(row) <= 0.45),
    OneNorm: ("compute_reward", lambda row: -distance_of_row(row), lambda row: False),
    OneGoal: ("compute_reward", lambda row: -distance_of_row(row), lambda row: False),
}


@pytest.mark.parametrize("env_class", NOT_BATCHED)
def test_an_unbatched_function_is_called_row_by_row_with_one_warning(env_class):
    name, *expected = NOT_BATCHED[env_class]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = EnvReward(env_class())
        for shift in (0, 50, 100):
            check_relabelled(module, *expected, written=point_reach().roll(shift, 0), count=100)
    (warning,) = row_by_row(caught)
    assert f"{name} of {env_class.__name__} does not take a batch" in warning
    assert "GoalReward(reward_fn)" in warning
    assert "terminated_fn" in warning


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_flag_that_is_the_same_for_all_goals_is_used_for_the_batch():
    check_relabelled(EnvReward(LikeFetch()), by_environment(PointReach())[0], lambda row: False, count=100)


@pytest.mark.filterwarnings("ignore:compute_reward of OneThreshold")
@pytest.mark.parametrize("seed", range(10))
def test_an_unbatched_function_is_detected_wherever_the_first_transition_is(seed):
    written = rollout(GymEnv(POINT_REACH), steps=50, seed=seed)
    rewards = EnvReward(OneThreshold())(written.clone())["next", "reward"]
    assert rewards.flatten().tolist() == [float(distance_of_row(row) <= 0.5) - 1 for row in written.unbind(0)]


@pytest.mark.filterwarnings("error")
def test_a_copy_keeps_whether_the_functions_are_batched():
    module = EnvReward(LikePointMaze())
    with pytest.warns(UserWarning, match="row by row"):
        expected = module(point_reach())
    assert (pickle.loads(pickle.dumps(module))(point_reach()) == expected).all()


def test_the_probe_does_not_change_the_environments_random_state():
    goals = []
    for probed in (False, True):
        env = PointReach()
        env.reset(seed=0)
        env.observation_space.seed(0)
        if probed:
            EnvReward(env)(point_reach())
        goals.append((*env.reset()[0]["desired_goal"], *env.observation_space.sample()["desired_goal"]))
    assert goals[0] == goals[1]


class Plain:
    """Has the functions of a goal environment, but is not a Gymnasium environment."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return (np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.5).astype(np.float32) - 1


class ObservesAlone(gymnasium.Env, Plain):
    """Its observation space has no goals."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))


class Scalar(Plain):
    """Its reward takes one norm over the whole batch."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return float(np.linalg.norm(achieved_goal - desired_goal) < 0.5) - 1


GOALS = torch.tensor([[0.0, 0.0], [3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.1], [0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("env", "batched"),
    [(Plain(), True), (ObservesAlone(), True), (Plain, True), (Scalar(), False)],
    ids=["plain", "observes alone", "made", "scalar"],
)
def test_an_environment_without_a_goal_space_is_probed_with_goals_near_those_stored(env, batched):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rewards = EnvReward(env)(goals_of(*GOALS))["next", "reward"]
    assert rewards.tolist() == [[0.0], [-1.0], [0.0]]
    assert len(caught) == len(row_by_row(caught)) == (not batched)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.float64])
def test_the_probe_takes_goals_of_any_dtype(dtype):
    class Same:
        def compute_reward(self, achieved_goal, desired_goal, info):
            return (achieved_goal == desired_goal).all(-1) - 1.0

    achieved, desired = torch.tensor([[0, 1], [1, 1]]).to(dtype), torch.tensor([[0, 1], [0, 1]]).to(dtype)
    rewards = EnvReward(Same())(goals_of(achieved, desired))["next", "reward"]
    assert rewards.tolist() == [[0.0], [-1.0]]


# Entries that are passed as info


def less_effort_and_fee(achieved, desired, info):
    effort = np.sum(info["effort"] ** 2, axis=-1)
    return -np.linalg.norm(achieved - desired, axis=-1) - effort - info["fee"]


def less_effort_and_fee_alone(achieved, desired, info):
    assert achieved.shape == info["effort"].shape == (2,)
    return less_effort_and_fee(achieved, desired, info)


PaysForEffort = point_reach_with("PaysForEffort", compute_reward=less_effort_and_fee)
PaysForEffortAlone = point_reach_with("PaysForEffortAlone", compute_reward=less_effort_and_fee_alone)


@pytest.mark.parametrize("env_class", [PaysForEffort, PaysForEffortAlone])
def test_stored_entries_are_passed_to_the_environment_as_info(env_class):
    written = point_reach()
    written["next", "measured", "effort"] = torch.rand(len(written), 2)
    written["fee"] = torch.rand(len(written))

    def reward(row):
        effort = sum(each**2 for each in row["next", "measured", "effort"].tolist())
        return -distance_of_row(row) - effort - row["fee"].item()

    module = EnvReward(env_class(), info_keys=[("next", "measured", "effort"), "fee"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_relabelled(module, reward, lambda row: False, written=written)
    assert len(row_by_row(caught)) == (env_class is PaysForEffortAlone)


INFO = {
    "a string": ("fee", TypeError, r"info_keys must be a list of keys, got the string 'fee': pass \['fee'\]"),
    "an entry that is not stored": (["tax"], KeyError, r"no entry 'tax'.*info_keys=\.\.\. .*Present entries:"),
    "too few": (["fee"], KeyError, r"compute_reward of PaysForEffort reads info\['effort'\], but info has \['fee'\]"),
    "none": ([], KeyError, r"compute_reward of PaysForEffort reads info\['effort'\], but info has no entries"),
}


@pytest.mark.parametrize("case", INFO)
def test_missing_info_entries_are_named_in_the_error(case):
    info_keys, error, message = INFO[case]
    written = point_reach()
    written["fee"] = torch.rand(len(written))
    with pytest.raises(error, match=message):
        check_relabelled(EnvReward(PaysForEffort(), info_keys=info_keys), distance_of_row, written=written)


def test_the_environments_own_key_error_is_not_mistaken_for_a_missing_entry():
    broken = point_reach_with("Broken", compute_reward=lambda achieved, desired, info: {}["far"])
    with pytest.raises(KeyError, match=r"^'far'$"):
        check_relabelled(EnvReward(broken()), distance_of_row)


# The wrapped environment


@pytest.mark.parametrize("make", [lambda: GymEnv(BIT_FLIPPING), lambda: gymnasium.make(BIT_FLIPPING), BitFlipping])
def test_the_environment_is_not_part_of_the_state_dict(make):
    reward = EnvReward(make())
    assert reward.state_dict() == {}
    assert list(reward.parameters()) == []
    assert set(HERTransform(reward, capacity=10).state_dict()) == set(HERTransform(distance, capacity=10).state_dict())


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("make", [lambda: GymEnv(BIT_FLIPPING, n_bits=3), lambda: BitFlipping(3)])
def test_a_copy_gives_the_same_rewards_as_the_original(make, copy_of):
    written = rollout(GymEnv(BIT_FLIPPING, n_bits=3))
    fresh, used = EnvReward(make()), EnvReward(make())
    assert (used(written.clone()) == written).all()
    for reward in (fresh, used):
        assert (copy_of(reward)(written.clone()) == written).all()


MAKE_ONE = partial(GymEnv, f"torchrl_her.envs:{POINT_REACH}")
SEVERAL = {
    "a SerialEnv": partial(SerialEnv, 2, MAKE_ONE),
    "a ParallelEnv": partial(ParallelEnv, 2, MAKE_ONE),
    "a VectorizedInProcess": partial(VectorizedInProcess, POINT_REACH, num_envs=2),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_batch_of_environments_is_refused(name):
    env = SEVERAL[name]()
    transformed = TransformedEnv(env, StepCounter())
    for argument in (env, transformed, lambda: env, lambda: transformed):
        with pytest.raises(TypeError, match=f"a single environment, got {name}: pass a function that creates one"):
            EnvReward(argument)


def test_a_vectorized_environment_of_gymnasium_is_refused():
    with pytest.raises(TypeError, match="a single environment, got a SyncVectorEnv: pass a function that creates one"):
        EnvReward(gymnasium.make_vec(POINT_REACH, 2))


@pytest.mark.parametrize(
    "env",
    [lambda: gymnasium.make("CartPole-v1"), lambda: GymEnv("CartPole-v1"), lambda: lambda: GymEnv("CartPole-v1")],
)
def test_an_environment_without_goals_is_refused(env):
    with pytest.raises(TypeError, match=r"compute_reward.*CartPoleEnv has none.*GoalReward\(reward_fn\)"):
        EnvReward(env())


class SetsOneRow(PointReach):
    """Its reward is correct for small batches of missed goals, but ignores a coordinate of row 2."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        achieved_goal = np.array(achieved_goal)
        if achieved_goal.ndim == 1:
            achieved_goal[1] = desired_goal[1]
        elif len(achieved_goal) > 2:
            achieved_goal[2] = desired_goal[2]
        return -(np.abs(achieved_goal - desired_goal).max(-1) > 0.2).astype(np.float32)


def test_an_unbatched_function_is_detected_on_relabelled_transitions():
    """The probe, in which all goals are missed and most rows are correct, does not detect it."""
    reward = EnvReward(SetsOneRow())
    reward.functions[0].batched = True  # as after a probe without a finding
    achieved = 0.3 * torch.randn(200, 2)
    desired = achieved + 0.2 * torch.randn(200, 2)
    with pytest.warns(UserWarning, match="row by row"):
        values = reward(goals_of(achieved, desired))["next", "reward"].flatten()
    assert torch.equal(values, -((achieved - desired)[:, 0].abs() > 0.2).float())


def test_the_reward_of_hand_manipulate_pen_is_called_row_by_row():
    """Its function sets row 2 of the batch instead of the third angle."""
    gymnasium.register_envs(gymnasium_robotics)
    env = gymnasium.make("HandManipulatePen_BooleanTouchSensors-v1")
    reward, compute = EnvReward(env), env.unwrapped.compute_reward
    rng = np.random.default_rng(0)
    achieved = np.concatenate([np.zeros((400, 3)), rng.normal([1, 0, 0, 0], 0.05, (400, 4))], axis=1)
    achieved[:, 3:] /= np.linalg.norm(achieved[:, 3:], axis=1, keepdims=True)
    desired = achieved[rng.permutation(400)]
    with pytest.warns(UserWarning, match="row by row"):
        values = reward(goals_of(torch.from_numpy(achieved), torch.from_numpy(desired)))["next", "reward"].flatten()
    expected = [float(compute(one, other, {})) for one, other in zip(achieved, desired, strict=True)]
    assert values.tolist() == expected
    assert set(expected) == {0.0, -1.0}


class SetsUpItsReward(PointReach):
    """Its reward needs an attribute that reset sets."""

    def reset(self, **options):
        self.radius = 0.05
        return super().reset(**options)

    def compute_reward(self, achieved_goal, desired_goal, info):
        return (np.linalg.norm(achieved_goal - desired_goal, axis=-1) <= self.radius) - np.float32(1)


def test_an_environment_created_by_a_function_is_reset():
    assert EnvReward(SetsUpItsReward)(goals_of(torch.zeros(2, 2), torch.zeros(2, 2)))["next", "reward"].eq(0).all()


def test_an_info_entry_that_is_not_a_tensor_is_refused():
    data = goals_of(torch.zeros(2, 2), torch.zeros(2, 2)).set_non_tensor("energy", 0.5)
    with pytest.raises(
        TypeError, match=r"'energy' must be a tensor, got a .*Store a tensor with one value per transition"
    ):
        EnvReward(PointReach(), info_keys=["energy"])(data)
