import copy
import math
import pickle
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env, data_equivalence
from torchrl.envs import GymEnv, SerialEnv, check_env_specs, default_info_dict_reader

from torchrl_her.envs import PointReach

ID = "torchrl_her/PointReach-v0"


def make_torchrl_env():
    return GymEnv(ID).set_info_dict_reader(default_info_dict_reader(["is_success"]))


def drive_to_goal(tensordict):
    """A policy that reaches every goal: a spring towards it, and a damper."""
    position, velocity = tensordict["observation"].chunk(2, dim=-1)
    force = 4 * (tensordict["desired_goal"] - position) - velocity
    return tensordict.set("action", force.clamp(-1, 1))


def episode(env, seed, actions):
    """Everything that an environment returns in one episode."""
    returned = [env.reset(seed=seed)]
    returned += [env.step(action) for action in actions]
    return returned


def same(one, other):
    return data_equivalence(one, other, exact=True)


def clip(value):
    return min(max(value, -1.0), 1.0)


def test_steps_follow_the_dynamics_of_a_point_mass():
    env = PointReach()
    rng = np.random.default_rng(0)
    hit_wall = hit_speed_limit = False
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        x = [float(value) for value in observation["achieved_goal"]]
        v = [0.0, 0.0]
        direction = rng.uniform(-1, 1, 2)
        for _ in range(60):
            action = (direction + rng.normal(0, 0.5, 2)).astype(np.float32)  # some are out of bounds
            observation, *_ = env.step(action)
            for axis in range(2):
                v[axis] = clip(v[axis] + 10 * clip(float(action[axis])) * 0.05)
                x[axis] = clip(x[axis] + v[axis] * 0.05)
            assert observation["observation"].tolist() == pytest.approx([*x, *v], abs=1e-5)
            assert observation["achieved_goal"].tolist() == observation["observation"][:2].tolist()
            hit_wall |= 1.0 in x
            hit_speed_limit |= -1.0 in v
    assert hit_wall
    assert hit_speed_limit


@pytest.mark.parametrize("action", [[1.0, 1.0], [-1.0, 1.0], [9.0, -9.0]])
def test_a_step_never_leaves_the_square(action):
    env = PointReach()
    env.reset(seed=0)
    for _ in range(100):
        observation, *_ = env.step(np.array(action, dtype=np.float32))
        assert observation in env.observation_space
    assert np.abs(observation["achieved_goal"]).tolist() == [1.0, 1.0]


def test_starts_and_goals_are_uniform_in_the_square_and_independent():
    env = PointReach()
    env.reset(seed=0)
    observations = [env.reset()[0] for _ in range(2000)]
    drawn = np.array([[*each["achieved_goal"], *each["desired_goal"]] for each in observations])
    np.testing.assert_allclose(drawn.mean(axis=0), 0, atol=0.08)  # six standard errors
    np.testing.assert_allclose(drawn.std(axis=0), math.sqrt(1 / 3), atol=0.04)
    np.testing.assert_allclose(drawn.min(axis=0), -1, atol=0.02)
    np.testing.assert_allclose(drawn.max(axis=0), 1, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(4), atol=0.14)
    assert all((each["observation"][2:] == 0).all() for each in observations)


@pytest.mark.parametrize("batch", [(), (1,), (50,), (6, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rewards_of_a_batch_are_those_of_its_rows(batch, dtype):
    rng = np.random.default_rng(0)
    desired = rng.uniform(-1, 1, (*batch, 2)).astype(dtype)
    achieved = (desired + rng.uniform(-0.06, 0.06, (*batch, 2))).astype(dtype)
    env = PointReach()
    reward = env.compute_reward(achieved, desired, {})
    terminated = env.compute_terminated(achieved, desired, {})
    truncated = env.compute_truncated(achieved, desired, {})
    assert reward.shape == terminated.shape == truncated.shape == batch
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, bool, bool)
    for index in np.ndindex(batch):
        distance = math.dist(achieved[index].tolist(), desired[index].tolist())
        assert reward[index] == (0.0 if distance <= 0.05 else -1.0)
        assert not terminated[index]
        assert not truncated[index]
    if reward.size > 20:
        assert set(reward.flatten().tolist()) == {0.0, -1.0}


def test_the_reward_of_one_goal_is_a_scalar():
    env = PointReach()
    goals = np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32)
    assert isinstance(env.compute_reward(*goals, {}), np.float32)
    assert isinstance(env.compute_terminated(*goals, {}), np.bool_)
    assert isinstance(env.compute_truncated(*goals, {}), np.bool_)


def test_one_desired_goal_broadcasts_over_achieved_goals():
    achieved = np.array([[0.5, 0.5], [0.0, 0.0]], dtype=np.float32)
    assert PointReach().compute_reward(achieved, achieved[0], {}).tolist() == [0.0, -1.0]


def test_an_episode_is_truncated_at_step_50_and_never_terminates():
    env = gymnasium.make(ID)
    for seed in range(3):
        env.reset(seed=seed)
        env.unwrapped.goal = env.unwrapped.position.copy()  # reached from the start
        flags = [env.step(np.zeros(2, dtype=np.float32))[1:4] for _ in range(50)]
        assert flags == [(0.0, False, False)] * 49 + [(0.0, False, True)]


def test_reward_and_success_of_a_step_are_those_of_the_goals_it_returns():
    env = PointReach()
    seen = set()
    for seed in range(10):
        observation, info = env.reset(seed=seed)
        assert info["is_success"] == 1 + env.compute_reward(
            observation["achieved_goal"], observation["desired_goal"], info
        )
        for _ in range(50):
            force = 4 * (observation["desired_goal"] - observation["achieved_goal"])
            observation, reward, terminated, truncated, info = env.step(force - observation["observation"][2:])
            assert reward == env.compute_reward(observation["achieved_goal"], observation["desired_goal"], info)
            assert info["is_success"] == 1 + reward
            assert isinstance(info["is_success"], np.float32)
            assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
            seen.add(reward)
    assert seen == {0.0, -1.0}


def test_a_start_at_the_goal_is_a_success():
    env = PointReach()
    started = [env.reset(seed=seed) for seed in range(1000)]
    near = [
        math.dist(observation["achieved_goal"].tolist(), observation["desired_goal"].tolist()) <= 0.05
        for observation, _ in started
    ]
    assert any(near)
    assert [info["is_success"] for _, info in started] == near


def test_seeds_make_episodes_reproducible():
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)
    first, again = (episode(PointReach(), 3, actions) for _ in range(2))
    assert same(first, again)
    assert not same(first, episode(PointReach(), 4, actions))


def test_what_was_returned_is_never_changed_and_may_be_written_to():
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)
    env = PointReach()
    kept = episode(env, 0, actions)
    expected = copy.deepcopy(kept)
    episode(env, 1, actions)
    assert same(kept, expected)

    observation = env.reset(seed=0)[0]
    for action, returned in zip(actions, kept[1:], strict=True):
        for value in observation.values():
            value.fill(0.3)
        observation = env.step(action)[0]
        assert same(observation, returned[0])


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_like_the_original(copy_of):
    env = gymnasium.make(ID)
    env.reset(seed=0)
    env.step(np.ones(2, dtype=np.float32))
    twin = copy_of(env)
    actions = np.random.default_rng(0).uniform(-1, 1, (10, 2)).astype(np.float32)
    original, copied = ([each.step(action) for action in actions] for each in (env, twin))
    assert same([*original, env.reset()], [*copied, twin.reset()])


@pytest.mark.parametrize("action", [0.5, [0.5], [0.1, 0.2, 0.3], [[0.1, 0.2]], [math.nan, 0], [math.inf, 0]])
def test_an_action_that_is_not_two_finite_numbers_is_refused(action):
    env = PointReach()
    before = env.reset(seed=0)[0]["achieved_goal"]
    with pytest.raises(ValueError, match="two finite numbers"):
        env.step(np.array(action, dtype=np.float32))
    assert np.array_equal(env.position, before)


def test_the_picture_shows_the_mass_and_the_goal_where_they_are():
    env = PointReach(render_mode="rgb_array")
    env.reset(seed=0)
    env.position, env.goal = (np.array(place, dtype=np.float32) for place in ([-0.5, 0.75], [0.5, -0.25]))
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((256, 256, 3), np.uint8)
    assert picture[32, 64].tolist() == [40, 80, 200]  # a quarter of the width from the left, near the top
    assert picture[160, 192].tolist() == [120, 200, 120]
    coloured = (picture != 255).any(axis=-1).mean()
    assert coloured == pytest.approx(math.pi * (0.05**2 + 0.025**2) / 4, rel=0.05)
    assert PointReach().render() is None


def test_an_unknown_render_mode_is_refused():
    with pytest.raises(ValueError, match=r"rgb_array.*'human'"):
        PointReach(render_mode="human")


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_gymnasium_accepts_the_environment(render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ID, render_mode=render_mode).unwrapped)


def test_the_id_can_name_the_module_that_registers_it():
    assert isinstance(gymnasium.make(f"torchrl_her.envs:{ID}").unwrapped, PointReach)


def test_torchrl_accepts_the_environment():
    check_env_specs(make_torchrl_env())


def test_a_rollout_in_torchrl_has_the_goals_of_one_episode():
    env = GymEnv(ID)
    env.set_seed(0)
    rollout = env.rollout(100)
    assert rollout.shape == (50,)
    for key in ("observation", "achieved_goal", "desired_goal"):
        assert rollout[key].dtype == torch.float32
        assert torch.equal(rollout["next", key][:-1], rollout[key][1:])
    assert (rollout["next", "desired_goal"] == rollout["desired_goal"][0]).all()
    assert rollout["next", "truncated"].flatten().tolist() == [False] * 49 + [True]
    assert not rollout["next", "terminated"].any()


@pytest.mark.parametrize("n_envs", [None, 3])
def test_an_info_reader_takes_success_to_torchrl(n_envs):
    env = make_torchrl_env() if n_envs is None else SerialEnv(n_envs, make_torchrl_env)
    check_env_specs(env)
    env.set_seed(0)
    rollout = env.rollout(120, drive_to_goal, break_when_any_done=False)
    success = rollout["next", "is_success"]
    assert success.dtype == torch.float32
    assert torch.equal(success, 1 + rollout["next", "reward"].squeeze(-1))
    assert success.unique().tolist() == [0, 1]
    assert (success[rollout["next", "truncated"].squeeze(-1)] == 1).all()  # every goal can be reached in time
    distance = (rollout["achieved_goal"] - rollout["desired_goal"]).norm(dim=-1)
    assert torch.equal(rollout["is_success"], (distance <= 0.05).float())
