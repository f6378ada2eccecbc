import math

import gymnasium
import numpy as np
import pytest

from torchrl_her.envs import PointReach

ID = "torchrl_her/PointReach-v0"


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
            assert observation in env.observation_space
            for axis in range(2):
                v[axis] = clip(v[axis] + 10 * clip(float(action[axis])) * 0.05)
                x[axis] = clip(x[axis] + v[axis] * 0.05)
            assert observation["observation"].tolist() == pytest.approx([*x, *v], abs=1e-5)
            assert observation["achieved_goal"].tolist() == observation["observation"][:2].tolist()
            hit_wall |= 1.0 in x
            hit_speed_limit |= -1.0 in v
    assert hit_wall
    assert hit_speed_limit


def test_starts_and_goals_are_uniform_and_independent_and_a_start_may_be_a_success():
    env = PointReach()
    env.reset(seed=0)
    observations, infos = zip(*(env.reset() for _ in range(2000)), strict=True)
    drawn = np.array([[*each["achieved_goal"], *each["desired_goal"]] for each in observations])
    np.testing.assert_allclose(drawn.mean(axis=0), 0, atol=0.08)  # six standard errors
    np.testing.assert_allclose(drawn.std(axis=0), math.sqrt(1 / 3), atol=0.04)
    np.testing.assert_allclose(drawn.min(axis=0), -1, atol=0.02)
    np.testing.assert_allclose(drawn.max(axis=0), 1, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(4), atol=0.14)
    assert all((each["observation"][2:] == 0).all() for each in observations)
    near = [math.dist(row[:2], row[2:]) <= 0.05 for row in drawn.tolist()]
    assert any(near)
    assert [info["is_success"] for info in infos] == near


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


def test_reward_and_success_of_a_step_match_its_goals():
    env = PointReach()
    seen = set()
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        for _ in range(50):
            force = 4 * (observation["desired_goal"] - observation["achieved_goal"])
            observation, reward, terminated, truncated, info = env.step(force - observation["observation"][2:])
            assert reward == env.compute_reward(observation["achieved_goal"], observation["desired_goal"], info)
            assert info["is_success"] == 1 + reward
            assert isinstance(info["is_success"], np.float32)
            assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
            seen.add(reward)
    assert seen == {0.0, -1.0}


def test_the_picture_shows_the_mass_and_the_goal_at_their_positions():
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
