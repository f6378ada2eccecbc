"""Rewards, compared with plain Python, or with one call of the environment for each transition."""

import copy
import itertools
import math
import pickle
from functools import partial

import gymnasium
import gymnasium_robotics
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import GymEnv, GymWrapper, StepCounter, TransformedEnv

from support.factories import make_transform
from support.rewards import POINT_REACH, check_relabelled, distance, distance_of_row, goals_of, point_reach, rollout
from torchrl_her import EnvReward, GoalReward, SparseReward
from torchrl_her.envs import BitFlipping, PointReach

BIT_FLIPPING = "torchrl_her/BitFlipping-v0"


@pytest.mark.parametrize(("batch_size", "keepdim"), [((), False), ((1,), True), ((5,), False), ((2, 1, 3), True)])
def test_reward_and_termination_are_the_functions_of_each_pair_of_goals(batch_size, keepdim):
    achieved, desired = torch.randn(2, *batch_size, 2)
    seen = []

    def reward_fn(achieved, desired):
        seen.append(achieved.shape)
        return -torch.linalg.vector_norm(achieved - desired, dim=-1, keepdim=keepdim)

    module = GoalReward(reward_fn, terminated_fn=lambda achieved, desired: (achieved > desired).any(-1, keepdim))
    after = module(TensorDict({"desired_goal": desired, "next": {"achieved_goal": achieved}}, batch_size))["next"]
    assert after["reward"].shape == after["terminated"].shape == (*batch_size, 1)
    assert after["terminated"].dtype == torch.bool
    assert seen == [(math.prod(batch_size), 2)]
    for place in itertools.product(*map(range, batch_size)):
        outcome, goal = achieved[place].tolist(), desired[place].tolist()
        assert after["reward"][place].item() == pytest.approx(-math.dist(outcome, goal), rel=1e-6)
        assert after["terminated"][place].item() == any(a > d for a, d in zip(outcome, goal, strict=True))


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, achieved, desired):
        return -self.layer(achieved - desired).abs()


def test_a_learned_reward_moves_and_is_saved_with_the_transform():
    one, other = (
        make_transform(reward=GoalReward(Learned(), terminated_fn=nn.PairwiseDistance()), capacity=10) for _ in range(2)
    )
    assert len(list(one.parameters())) == 2
    other.load_state_dict(one.state_dict())
    achieved, desired = torch.randn(2, 3, 2)
    rewards = [each.reward(goals_of(achieved, desired))["next", "reward"] for each in (one, other)]
    assert torch.equal(*rewards)
    assert all(parameter.is_meta for parameter in one.to("meta").parameters())


@pytest.mark.parametrize("function", [lambda *goals: goals[0], lambda achieved, desired, scale=1.0: achieved, max])
def test_a_function_that_can_be_called_with_two_arguments_is_not_refused(function):
    GoalReward(function)


def test_the_reward_of_an_environment_takes_goals_and_infos_in_bfloat16():
    class Scaled(PointReach):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return super().compute_reward(achieved_goal, desired_goal, info) * info["scale"]

    reward = EnvReward(Scaled(), info_keys=["scale"])
    given = goals_of(*torch.rand(2, 40, 2, dtype=torch.bfloat16).div(10)).set("scale", torch.rand(40).bfloat16())
    found, expected = (reward(each)["next", "reward"] for each in (given.clone(), given.float()))
    assert torch.equal(found, expected)
    assert found.unique().numel() > 5


@pytest.mark.parametrize("shape", [(), (3,), (2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.bool])
def test_a_sparse_reward_is_that_of_a_plain_loop(dtype, shape):
    achieved, desired = (4 * torch.randn(2, 40, *shape)).abs().to(dtype)
    achieved[:10] = desired[:10]
    pairs = zip(achieved.reshape(40, -1).tolist(), desired.reshape(40, -1).tolist(), strict=True)
    distances = [math.dist(*pair) for pair in pairs]
    threshold = sum(sorted(distances)[20:22]) / 2
    reward = SparseReward(threshold)(goals_of(achieved, desired))["next", "reward"]
    assert reward.tolist() == [[0.0] if distance <= threshold else [-1.0] for distance in distances]


def pixels(value):
    return torch.full((1, 3, 8, 8), value, dtype=torch.uint8)


PIXELS = math.sqrt(3 * 8 * 8)  # the distance of two images whose pixels differ by one
CORNERS = torch.tensor([[1, 5], [4, 1], [4, 5], [5, 5]])  # at distances 4, 3, 5 and 5.7 from (1, 1)
DOUBLES = torch.tensor([[0.1], [math.nextafter(0.1, 1)]], dtype=torch.float64)
EXACT = {  # achieved goals, desired goals, threshold, and whether each goal is reached
    **{f"{dtype}, at the threshold": (CORNERS.to(dtype), torch.ones(4, 2, dtype=dtype), 5.0, [True, True, True, False])
       for dtype in (torch.float32, torch.uint8)},
    "double precision": (DOUBLES, torch.zeros_like(DOUBLES), 0.1, [True, False]),
    "achieved goals are rounded to the dtype of desired goals": (
        torch.tensor([[5.1], [5.2]], dtype=torch.float64), torch.tensor([[5.1], [5.1]]), 0, [True, False]),
    "not rounded to an integer": (torch.tensor([[0.4]]), torch.tensor([[0]]), 0.05, [False]),
    "not reduced to a byte": (torch.tensor([[256]]), torch.tensor([[0]], dtype=torch.uint8), 0.05, [False]),
    "not reduced to a bool": (torch.tensor([[2]]), torch.tensor([[True]]), 0.05, [False]),
    **{f"pixels {low} and {high}, {margin}": (
           pixels(low), pixels(high), abs(low - high) * PIXELS + margin, [margin > 0])
       for low, high in ((0, 255), (255, 0)) for margin in (-0.1, 0.1)},
    "integers of 61 bits": (2**61 + torch.arange(2), torch.tensor([2**61] * 2), 0, [True, False]),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_goals_are_compared_without_rounding_or_wrapping_around(case):
    achieved, desired, threshold, expected = EXACT[case]
    reward = SparseReward(threshold)(goals_of(achieved, desired))["next", "reward"]
    assert reward.flatten().tolist() == [each - 1.0 for each in expected]


# EnvReward


def by_environment(env):
    """Return functions for the environment's reward and termination of a single transition."""

    def call(name, row):
        return getattr(env, name)(row["next", "achieved_goal"].numpy(), row["desired_goal"].numpy(), {}).item()

    return partial(call, "compute_reward"), partial(call, "compute_terminated")


class Closer(gymnasium.Wrapper):
    """Changes the task: the episode ends within 0.3 of the goal, and the reward differs."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -2 * np.linalg.norm(achieved_goal - desired_goal, axis=-1)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.3


def make_closer():
    return Closer(gymnasium.make(POINT_REACH))


WAYS = {
    "Gymnasium environment": lambda: gymnasium.make(POINT_REACH),
    "TorchRL wrapper": lambda: GymEnv(POINT_REACH),
    "transformed environment": lambda: TransformedEnv(GymEnv(POINT_REACH), StepCounter()),
    "class": lambda: PointReach,
    "id": lambda: POINT_REACH,
    "function": lambda: lambda: TransformedEnv(GymEnv(POINT_REACH), StepCounter()),
    "closer": make_closer,
    "closer, in another wrapper": lambda: gymnasium.wrappers.TimeLimit(gymnasium.Wrapper(make_closer()), 50),
    "closer, in TorchRL": lambda: TransformedEnv(GymWrapper(make_closer()), StepCounter()),
    "closer, of an environment without goals": lambda: Closer(gymnasium.make("CartPole-v1")),
}


@pytest.mark.filterwarnings("ignore:The reward module gives")  # the stored rewards are those of PointReach
@pytest.mark.parametrize("way", WAYS)
def test_reward_and_termination_are_the_environments_for_every_way_to_name_it(way):
    env = make_closer() if "closer" in way else PointReach()
    check_relabelled(EnvReward(WAYS[way]()), *by_environment(env))


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


def test_terminated_fn_replaces_the_environments():
    reward = EnvReward(PointReach(), terminated_fn=lambda achieved, desired: distance(achieved, desired) < 0.2)
    check_relabelled(reward, by_environment(PointReach())[0], lambda row: distance_of_row(row) < 0.2)


def row_by_row(caught):
    """Return the warnings about functions that are not batched."""
    return [str(each.message) for each in caught if "row by row" in str(each.message)]


def point_reach_with(name, **functions):
    """Return a subclass of PointReach with other functions of achieved goal, desired goal and info."""
    return type(name, (PointReach,), {key: staticmethod(function) for key, function in functions.items()})


LikePointMaze = point_reach_with(
    "LikePointMaze", compute_terminated=lambda a, d, i: bool(np.linalg.norm(a - d) <= 0.45)
)
OneNorm = point_reach_with("OneNorm", compute_reward=lambda a, d, i: np.full(a.shape[:-1], -np.linalg.norm(a - d)))
OneGoal = point_reach_with("OneGoal", compute_reward=lambda a, d, i: -math.dist(a, d))
NOT_BATCHED = {
    LikePointMaze: ("compute_terminated", by_environment(PointReach())[0], lambda row: distance_of_row(row) <= 0.45),
    OneNorm: ("compute_reward", lambda row: -distance_of_row(row), lambda row: False),
    OneGoal: ("compute_reward", lambda row: -distance_of_row(row), lambda row: False),
}


@pytest.mark.parametrize("env_class", NOT_BATCHED)
def test_an_unbatched_function_is_called_row_by_row_with_one_warning(env_class, recwarn):
    name, *expected = NOT_BATCHED[env_class]
    module = EnvReward(env_class())
    for shift in (0, 50, 100):
        check_relabelled(module, *expected, written=point_reach().roll(shift, 0), count=100)
    check_relabelled(copy.deepcopy(module), *expected, count=100)
    (warning,) = row_by_row(recwarn)
    assert f"{name} of {env_class.__name__} does not take a batch" in warning
    assert "GoalReward(reward_fn)" in warning
    assert "terminated_fn" in warning


def test_one_verdict_for_a_batch_is_found_although_no_goal_of_the_batch_is_reached():
    one_verdict = point_reach_with("OneVerdict", compute_reward=lambda a, d, i: (np.linalg.norm(a - d) <= 0.05) - 1.0)
    with pytest.warns(UserWarning, match="compute_reward of OneVerdict .* row by row"):
        EnvReward(one_verdict())(goals_of(torch.zeros(40, 2), torch.ones(40, 2)))


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_flag_that_is_the_same_for_all_goals_is_used_for_the_batch():
    like_fetch = point_reach_with("LikeFetch", compute_terminated=lambda achieved, desired, info: False)
    check_relabelled(EnvReward(like_fetch()), by_environment(PointReach())[0], lambda row: False, count=100)


def test_the_reward_of_hand_manipulate_pen_is_called_row_by_row():
    """Its function sets row 2 of the batch instead of the third angle, which most rows do not show."""
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


def test_comparing_calls_does_not_change_the_environments_random_state():
    env, twin = PointReach(), PointReach()
    for each in (env, twin):
        each.reset(seed=0)
        each.observation_space.seed(0)
    EnvReward(env)(point_reach())
    drawn, expected = ([each.reset()[0], each.observation_space.sample()] for each in (env, twin))
    assert str(drawn) == str(expected)


class Plain:
    """Has the function of a goal environment, but is not a Gymnasium environment."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return (np.abs(achieved_goal - 1.0 * desired_goal).max(axis=-1) < 0.5) - 1.0


class Scalar(Plain):
    def compute_reward(self, achieved_goal, desired_goal, info):
        return float(np.abs(achieved_goal - 1.0 * desired_goal).max() < 0.5) - 1


class ObservesAlone(gymnasium.Env, Plain):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))  # it has no goals


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float64])
@pytest.mark.parametrize("env", [Plain(), ObservesAlone(), Plain, Scalar()])
def test_an_environment_without_a_goal_space_may_be_a_class_or_no_gymnasium_environment(env, dtype, recwarn):
    goals = goals_of(torch.tensor([[0, 1], [1, 1]]).to(dtype), torch.tensor([[0, 1], [0, 1]]).to(dtype))
    assert EnvReward(env)(goals)["next", "reward"].tolist() == [[0.0], [-1.0]]
    assert len(recwarn) == len(row_by_row(recwarn)) == isinstance(env, Scalar)


@pytest.mark.parametrize("alone", [False, True])
def test_stored_entries_are_passed_to_the_environment_as_info(alone, recwarn):
    def compute_reward(achieved, desired, info):
        assert achieved.shape == info["effort"].shape
        assert achieved.ndim == 1 or not alone
        return -np.linalg.norm(achieved - desired, axis=-1) - np.sum(info["effort"] ** 2, axis=-1) - info["fee"]

    def reward(row):
        effort = sum(each**2 for each in row["next", "measured", "effort"].tolist())
        return -distance_of_row(row) - effort - row["fee"].item()

    written = point_reach()
    written["next", "measured", "effort"] = torch.rand(len(written), 2)
    written["fee"] = torch.rand(len(written))
    env = point_reach_with("Pays", compute_reward=compute_reward)()
    module = EnvReward(env, info_keys=[("next", "measured", "effort"), "fee"])
    check_relabelled(module, reward, lambda row: False, written=written)
    assert len(row_by_row(recwarn)) == alone


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("make", [lambda: GymEnv(BIT_FLIPPING, n_bits=3), lambda: BitFlipping(3)])
def test_the_environment_is_copied_but_not_saved(make, copy_of):
    written = rollout(GymEnv(BIT_FLIPPING, n_bits=3))
    fresh, used = EnvReward(make()), EnvReward(make())
    assert (used(written.clone()) == written).all()
    for reward in (fresh, used):
        assert (copy_of(reward)(written.clone()) == written).all()
        assert not any("function" in key for key in make_transform(reward=reward, capacity=10).state_dict())


def test_an_environment_created_by_a_function_is_reset():
    class SetsUpItsReward(PointReach):
        def reset(self, **options):
            self.radius = 0.05
            return super().reset(**options)

        def compute_reward(self, achieved_goal, desired_goal, info):
            return (np.linalg.norm(achieved_goal - desired_goal, axis=-1) <= self.radius) - np.float32(1)

    assert EnvReward(SetsUpItsReward)(goals_of(torch.zeros(2, 2), torch.zeros(2, 2)))["next", "reward"].eq(0).all()
