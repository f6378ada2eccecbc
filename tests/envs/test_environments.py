"""BitFlipping and PointReach: the goal API, Gymnasium's rules, their data in TorchRL, and their dynamics."""

import math

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
    return f"torchrl_her.envs:torchrl_her/{'PointReach' if form == 'PointReach' else 'BitFlipping'}-v0"


def make_env(form, n_bits=5):
    return PointReach() if form == "PointReach" else BitFlipping(n_bits, **form)


def draw_actions(env, count):
    env.action_space.seed(0)
    return [env.action_space.sample() for _ in range(count)]


def same(one, other):
    return data_equivalence(one, other, exact=True)


@pytest.mark.parametrize("form", GOAL_FORMS)
@pytest.mark.parametrize("batch", [(), (1,), (2, 3, 4)])
def test_rewards_of_a_batch_equal_the_rewards_of_its_rows(form, batch):
    env, count = make_env(form, n_bits=3), math.prod(batch)
    drawn = [env.reset(seed=seed)[0]["desired_goal"] for seed in range(count + 1)]
    goals = [np.array(each).reshape((*batch, *np.shape(drawn[0]))) for each in (drawn[:count], drawn[1:])]
    if form == "PointReach":
        goals[0] = goals[1] + np.linspace(0, 0.06, goals[1].size, dtype=np.float32).reshape(goals[1].shape)
    values = [getattr(env, f"compute_{name}")(*goals, {}) for name in ("reward", "terminated", "truncated")]
    assert [(each.shape, each.dtype) for each in values] == [(batch, np.float32), (batch, bool), (batch, bool)]
    for index in np.ndindex(batch):
        one, other = (goal[index].flatten().tolist() for goal in goals)
        reached = math.dist(one, other) <= 0.05 if form == "PointReach" else one == other
        assert [each[index] for each in values] == [reached - 1, reached and form != "PointReach", False]


def test_integers_in_a_column_have_one_reward_each_and_one_goal_broadcasts():
    env, goals = make_env(INTEGERS, n_bits=3), np.array([[1], [5]])  # checkers reshape batches of integers like this
    assert env.compute_reward(goals, goals, {}).tolist() == [0.0, 0.0]
    assert env.compute_reward(goals, goals[::-1], {}).tolist() == [-1.0, -1.0]
    achieved = np.array([[0.5, 0.5], [0.0, 0.0]], dtype=np.float32)
    assert PointReach().compute_reward(achieved, achieved[0], {}).tolist() == [0.0, -1.0]


REFUSED_ACTIONS = [
    ({}, [-1, 5, 0.5], "an integer from 0 to 4"),
    ({"continuous": True}, [1, [1, 1], [1, 1, 1, 1, math.nan]], "5 finite numbers"),
    ("PointReach", [0.5, [0.5], [[0.1, 0.2]], [math.inf, 0]], "two finite numbers"),
]


@pytest.mark.parametrize(("form", "actions", "expected"), REFUSED_ACTIONS)
def test_an_action_outside_the_action_space_is_refused_and_changes_nothing(form, actions, expected):
    env, twin = make_env(form), make_env(form)
    assert same(env.reset(seed=0), twin.reset(seed=0))
    for action in actions:
        with pytest.raises(ValueError, match=f"An action must be {expected}"):
            env.step(action)
    (action,) = draw_actions(env, 1)
    assert same(env.step(action), twin.step(action))


@pytest.mark.parametrize("form", [*FORMS, {"render_mode": "rgb_array"}])
@pytest.mark.filterwarnings("error")
def test_gymnasium_accepts_the_environment(form):
    name = "PointReach" if "render_mode" in form else form
    check_env(gymnasium.make(id_of(name), **({} if form == "PointReach" else form)).unwrapped)


def drive_to_goal(tensordict):
    """Set an action that reaches every goal of PointReach, like a damped spring."""
    position, velocity = tensordict["observation"].chunk(2, dim=-1)
    return tensordict.set("action", (4 * (tensordict["desired_goal"] - position) - velocity).clamp(-1, 1))


@pytest.mark.parametrize("form", FORMS)
def test_a_rollout_in_torchrl_has_the_goals_and_the_success_of_each_episode(form):
    options = {} if form == "PointReach" else {"n_bits": 5, **form}

    def make():
        env = GymEnv(id_of(form), categorical_action_encoding=True, **options)
        return env.set_info_dict_reader(default_info_dict_reader(["is_success"]))

    env = SerialEnv(3, make)
    check_env_specs(env)
    env.set_seed(0)
    rollout = env.rollout(200, drive_to_goal if form == "PointReach" else None, break_when_any_done=False)
    after, ended = rollout["next"], rollout["next", "done"][..., 0]
    runs = ~ended[:, :-1]
    assert torch.equal(after["achieved_goal"][:, :-1][runs], rollout["achieved_goal"][:, 1:][runs])
    assert torch.equal(after["desired_goal"], rollout["desired_goal"])
    assert torch.equal(after["is_success"], 1 + after["reward"].squeeze(-1))
    assert after["is_success"].unique().tolist() == [0, 1]
    if form != "PointReach":
        assert torch.equal(after["is_success"] == 1, after["terminated"].squeeze(-1))
        return
    assert ended.nonzero()[:, 1].unique().tolist() == [49, 99, 149, 199]
    assert (after["is_success"][ended] == 1).all()  # every goal can be reached in time
    assert not after["terminated"].any()


def bits_of(value, n_bits):
    """Return the list of bits of an observation or a goal in any encoding."""
    if isinstance(value, int):
        return [int(bit) for bit in reversed(f"{value:0{n_bits}b}")]
    pixels = value.flatten().tolist()
    assert not any(pixels[n_bits:])
    return [int(pixel / (255 if value.dtype == np.uint8 else 1)) for pixel in pixels[:n_bits]]


@pytest.mark.parametrize(
    ("n_bits", "options"), [(40, {}), (1, {}), (40, {"continuous": True}), (1296, IMAGES), (62, INTEGERS)]
)
def test_actions_flip_their_bits(n_bits, options):
    env = BitFlipping(n_bits, **options)
    observation, _ = env.reset(seed=0)
    bits, goal = (bits_of(observation[key], n_bits) for key in ("achieved_goal", "desired_goal"))
    for action in [*draw_actions(env, 30), np.ones(n_bits) if env.continuous else n_bits - 1]:
        for bit in range(n_bits):
            if action[bit] > 0 if env.continuous else action == bit:
                bits[bit] = 1 - bits[bit]
        observation, reward, *_ = env.step(action)
        assert observation in env.observation_space
        assert [bits_of(observation[key], n_bits) for key in ("observation", "achieved_goal")] == [bits, bits]
        assert bits_of(observation["desired_goal"], n_bits) == goal
        assert reward == (0 if bits == goal else -1)


@pytest.mark.parametrize("max_steps", [None, 20])
def test_an_episode_ends_with_success_or_is_truncated_at_its_last_step(max_steps):
    env = BitFlipping(12, max_steps=max_steps)
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        wrong = np.flatnonzero(observation["achieved_goal"] != observation["desired_goal"])
        *before, last = [env.step(action)[1:] for action in wrong]
        assert before == [(-1.0, False, False, {"is_success": 0})] * len(before)
        assert last == (0.0, True, len(wrong) == max_steps or (len(wrong) == 12 and not max_steps), {"is_success": 1})
        assert [type(each) for each in last[:3]] == [float, bool, bool]
        env.reset(seed=seed)
        flags = [env.step(env.n_bits - 1)[2:4] for _ in range(env.max_steps)]
        assert flags[1::2] == [(False, False)] * (env.max_steps // 2 - 1) + [(False, True)]


@pytest.mark.parametrize(("fixed_goal", "n_pairs"), [(False, 12), (True, 3)])
def test_no_episode_is_solved_at_its_start_and_all_other_pairs_are_equally_likely(fixed_goal, n_pairs):
    env = BitFlipping(2, fixed_goal=fixed_goal)
    env.reset(seed=0)
    drawn = [env.reset()[0] for _ in range(2400)]
    starts, goals = (np.array([each[key] for each in drawn]) for key in ("achieved_goal", "desired_goal"))
    assert (starts != goals).any(axis=1).all()
    pairs, counts = np.unique(np.concatenate([starts, goals], axis=1), axis=0, return_counts=True)
    assert len(pairs) == n_pairs
    np.testing.assert_allclose(counts, 2400 / n_pairs, rtol=0.4)
    assert (goals == 1).all() == fixed_goal


def test_steps_follow_the_dynamics_of_a_point_mass():
    env, rng, seen = PointReach(), np.random.default_rng(0), np.empty(0)
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        x, v, direction = observation["achieved_goal"].astype(float), np.zeros(2), rng.uniform(-1, 1, 2)
        for _ in range(60):
            action = (direction + rng.normal(0, 0.5, 2)).astype(np.float32)  # some are out of bounds
            observation, *_ = env.step(action)
            v = np.clip(v + 10 * np.clip(action, -1, 1) * 0.05, -1, 1)
            x = np.clip(x + v * 0.05, -1, 1)
            np.testing.assert_allclose(observation["observation"], [*x, *v], atol=1e-5)
            np.testing.assert_array_equal(observation["achieved_goal"], observation["observation"][:2])
            assert observation in env.observation_space
            seen = np.append(seen, [*x, *v])
    assert (np.abs(seen.reshape(-1, 4)).max(0) == 1).all()  # walls, and limits of the speed


def test_starts_and_goals_are_uniform_and_independent_and_a_start_may_be_a_success():
    env = PointReach()
    env.reset(seed=0)
    observations, infos = zip(*(env.reset() for _ in range(2000)), strict=True)
    drawn = np.array([[*each["observation"], *each["desired_goal"]] for each in observations])
    assert not drawn[:, 2:4].any()  # the mass starts at rest
    drawn = np.delete(drawn, (2, 3), axis=1)
    np.testing.assert_allclose(drawn.mean(axis=0), 0, atol=0.08)  # six standard errors
    np.testing.assert_allclose(np.cov(drawn.T), np.eye(4) / 3, atol=0.05)
    near = [math.dist(row[:2], row[2:]) <= 0.05 for row in drawn.tolist()]
    assert [info["is_success"] for info in infos] == near
    assert any(near)


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
