"""Properties of both environments: the goal API, Gymnasium's rules, and their data in TorchRL."""

import copy
import math
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env, data_equivalence
from torchrl.envs import GymEnv, SerialEnv, check_env_specs, default_info_dict_reader

from torchrl_her.envs import BitFlipping, PointReach

IMAGES, INTEGERS = {"image_observation": True}, {"discrete_observation": True}
GOAL_FORMS = ["PointReach", {}, IMAGES, INTEGERS]  # PointReach, or the options of BitFlipping
FORMS = [*GOAL_FORMS, {"continuous": True}, {"fixed_goal": True}]


def id_of(form):
    return f"torchrl_her/{'PointReach' if form == 'PointReach' else 'BitFlipping'}-v0"


def make_env(form, n_bits=5):
    return PointReach() if form == "PointReach" else BitFlipping(n_bits, **form)


def make_torchrl_env(form):
    options = {} if form == "PointReach" else {"n_bits": 5, **form}
    env = GymEnv(id_of(form), categorical_action_encoding=True, **options)
    return env.set_info_dict_reader(default_info_dict_reader(["is_success"]))


def is_reached(env, achieved, desired):
    """Return whether an achieved goal counts as a desired goal."""
    one, other = (goal.flatten().tolist() for goal in (achieved, desired))
    return math.dist(one, other) <= 0.05 if isinstance(env, PointReach) else one == other


def draw_goals(env, *batch):
    """Draw achieved and desired goals ``[*batch, *goal]``, some of them equal or near."""
    if isinstance(env, PointReach):
        desired = env.np_random.uniform(-1, 1, (*batch, 2)).astype(np.float32)
        return desired + env.np_random.uniform(-0.06, 0.06, desired.shape).astype(np.float32), desired
    goals = [env.reset()[0]["desired_goal"] for _ in range(2 * math.prod(batch))]
    return np.array(goals).reshape(2, *batch, *env.observation_space["desired_goal"].shape)


def draw_actions(env, count):
    env.action_space.seed(0)
    return [env.action_space.sample() for _ in range(count)]


def episode(env, seed, actions):
    """Return all results of an environment in one episode."""
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


def same(one, other):
    return data_equivalence(one, other, exact=True)


@pytest.mark.parametrize(("form", "dtype"), [*((form, None) for form in GOAL_FORMS), ("PointReach", np.float64)])
@pytest.mark.parametrize("batch", [(), (1,), (50,), (6, 7), (2, 3, 4)])
def test_rewards_of_a_batch_equal_the_rewards_of_its_rows(form, dtype, batch):
    env = make_env(form, n_bits=3)
    env.reset(seed=0)
    achieved, desired = (goals.astype(dtype or goals.dtype) for goals in draw_goals(env, *batch))
    reward = env.compute_reward(achieved, desired, {})
    terminated = env.compute_terminated(achieved, desired, {})
    truncated = env.compute_truncated(achieved, desired, {})
    assert reward.shape == terminated.shape == truncated.shape == batch
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, bool, bool)
    for index in np.ndindex(batch):
        reached = is_reached(env, achieved[index], desired[index])
        assert reward[index] == (0.0 if reached else -1.0)
        assert terminated[index] == (reached and form != "PointReach")
        assert not truncated[index]
    if batch == ():
        assert (type(reward), type(terminated), type(truncated)) == (np.float32, np.bool_, np.bool_)
    if reward.size > 20:
        assert set(reward.flatten().tolist()) == {0.0, -1.0}


def test_integers_in_a_column_have_one_reward_each():
    """Checkers of environments reshape batches of integers to ``[batch, 1]``."""
    env = make_env(INTEGERS, n_bits=3)
    goals = np.array([[1], [5]])
    assert env.compute_reward(goals, goals, {}).tolist() == [0.0, 0.0]
    assert env.compute_reward(goals, goals[::-1], {}).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("form", FORMS)
def test_seeds_make_episodes_reproducible(form):
    envs = [make_env(form, n_bits=20) for _ in range(3)]
    actions = draw_actions(envs[0], 20)
    first, again, other = (episode(env, seed, actions) for env, seed in zip(envs, (3, 3, 4), strict=True))
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize("form", ["PointReach", {}, IMAGES])
def test_returned_observations_never_change_and_may_be_modified(form):
    env = make_env(form, n_bits=20)
    actions = draw_actions(env, 20)
    kept = episode(env, 0, actions)
    expected = copy.deepcopy(kept)
    episode(env, 1, actions)
    assert same(kept, expected)

    observation = env.reset(seed=0)[0]
    for action, returned in zip(actions, kept[1:], strict=True):
        for value in observation.values():
            value.fill(1)
        observation = env.step(action)[0]
        assert same(observation, returned[0])


@pytest.mark.parametrize(
    ("form", "actions", "expected"),
    [
        ({}, [-1, 5, 0.5], "an integer from 0 to 4"),
        ({"continuous": True}, [1, [1, 1], [[1, 1, 1, 1, 1]], [1, 1, 1, 1, math.nan]], "5 finite numbers"),
        ("PointReach", [0.5, [0.5], [0.1, 0.2, 0.3], [[0.1, 0.2]], [math.nan, 0], [math.inf, 0]], "two finite numbers"),
    ],
)
def test_an_action_outside_the_action_space_is_refused_and_changes_nothing(form, actions, expected):
    env, twin = make_env(form), make_env(form)
    assert same(env.reset(seed=0), twin.reset(seed=0))
    for action in actions:
        with pytest.raises(ValueError, match=f"An action must be {expected}"):
            env.step(action)
    (action,) = draw_actions(env, 1)
    assert same(env.step(action), twin.step(action))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
@pytest.mark.parametrize(
    ("form", "limit"), [("PointReach", {"max_episode_steps": 11}), ({}, {"n_bits": 20, "max_steps": 11})]
)
def test_a_copy_continues_like_the_original(form, limit, copy_of):
    env = gymnasium.make(id_of(form), **limit)
    env.reset(seed=0)
    first, *actions = draw_actions(env, 11)
    env.step(first)
    twin = copy_of(env)
    original, copied = ([each.step(action) for action in actions] for each in (env, twin))
    assert original[-1][3]
    assert same([*original, env.reset()], [*copied, twin.reset()])


@pytest.mark.parametrize(
    ("form", "more"), [*((form, {}) for form in FORMS), ("PointReach", {"render_mode": "rgb_array"})]
)
@pytest.mark.filterwarnings("error")
def test_gymnasium_accepts_the_environment(form, more):
    options = more if form == "PointReach" else form
    check_env(gymnasium.make(id_of(form), **options).unwrapped)


@pytest.mark.parametrize("env", [PointReach, BitFlipping])
def test_the_id_can_name_the_module_that_registers_it(env):
    assert isinstance(gymnasium.make(f"torchrl_her.envs:torchrl_her/{env.__name__}-v0").unwrapped, env)


@pytest.mark.parametrize("form", FORMS)
def test_a_rollout_in_torchrl_has_the_goals_of_each_episode(form):
    env = make_torchrl_env(form)
    check_env_specs(env)
    env.set_seed(0)
    for _ in range(10):
        rollout = env.rollout(100)
        for key in ("observation", "achieved_goal", "desired_goal"):
            assert rollout[key].dtype == env.observation_spec[key].dtype
            assert torch.equal(rollout["next", key][:-1], rollout[key][1:])
        assert (rollout["next", "desired_goal"] == rollout["desired_goal"][0]).all()
        assert (rollout["desired_goal"] == rollout["desired_goal"][0]).all()
        done = rollout["next", "done"].flatten().tolist()
        assert done == [False] * (len(rollout) - 1) + [True]
        if form == "PointReach" or not rollout["next", "terminated"][-1]:
            assert not rollout["next", "terminated"].any()
            assert len(rollout) == (50 if form == "PointReach" else 5)


def drive_to_goal(tensordict):
    """Set an action that reaches every goal of PointReach, like a damped spring."""
    position, velocity = tensordict["observation"].chunk(2, dim=-1)
    force = 4 * (tensordict["desired_goal"] - position) - velocity
    return tensordict.set("action", force.clamp(-1, 1))


@pytest.mark.parametrize("n_envs", [None, 3])
@pytest.mark.parametrize("form", FORMS)
def test_an_info_reader_passes_success_to_torchrl(form, n_envs):
    env = make_torchrl_env(form) if n_envs is None else SerialEnv(n_envs, lambda: make_torchrl_env(form))
    check_env_specs(env)
    env.set_seed(0)
    rollout = env.rollout(200, drive_to_goal if form == "PointReach" else None, break_when_any_done=False)
    success = rollout["next", "is_success"]
    assert success.dtype == torch.float32
    assert torch.equal(success, 1 + rollout["next", "reward"].squeeze(-1))
    assert success.unique().tolist() == [0, 1]
    if form == "PointReach":
        assert (success[rollout["next", "truncated"].squeeze(-1)] == 1).all()  # every goal can be reached in time
        distance = (rollout["achieved_goal"] - rollout["desired_goal"]).norm(dim=-1)
        assert torch.equal(rollout["is_success"], (distance <= 0.05).float())
    else:
        assert torch.equal(success, rollout["next", "terminated"].squeeze(-1).float())
        assert (rollout["is_success"] == 0).all()
