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
from torchrl.modules import MLP

from torchrl_her.envs import BitFlipping

ID = "torchrl_her/BitFlipping-v0"
FORMS = [{}, {"image_observation": True}, {"discrete_observation": True}]
OPTIONS = [*FORMS, {"continuous": True}, {"fixed_goal": True}]


def make_torchrl_env(**options):
    env = GymEnv(ID, n_bits=5, categorical_action_encoding=True, **options)
    return env.set_info_dict_reader(default_info_dict_reader(["is_success"]))


def bits_of(value, n_bits):
    """The list of bits that an observation or a goal of any form stands for."""
    if isinstance(value, int):
        return [int(bit) for bit in reversed(f"{value:0{n_bits}b}")]
    pixels = value.flatten().tolist()
    scale = 255 if value.dtype == np.uint8 else 1
    assert not any(pixels[n_bits:])
    return [int(pixel / scale) for pixel in pixels[:n_bits]]


def episode(env, seed, actions):
    """Everything that an environment returns in one episode."""
    returned = [env.reset(seed=seed)]
    returned += [env.step(action) for action in actions]
    return returned


def same(one, other):
    return data_equivalence(one, other, exact=True)


def draws(env, count, key):
    env.reset(seed=0)
    return np.stack([env.reset()[0][key] for _ in range(count)])


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("continuous", [False, True])
def test_actions_flip_their_bits(options, continuous):
    n_bits = 40
    env = BitFlipping(n_bits, continuous=continuous, **options)
    env.action_space.seed(0)
    observation, _ = env.reset(seed=0)
    bits = bits_of(observation["achieved_goal"], n_bits)
    goal = bits_of(observation["desired_goal"], n_bits)
    for _ in range(30):
        action = env.action_space.sample()
        for bit in range(n_bits):
            if action[bit] > 0 if continuous else action == bit:
                bits[bit] = 1 - bits[bit]
        observation, reward, *_ = env.step(action)
        assert observation in env.observation_space
        assert bits_of(observation["observation"], n_bits) == bits
        assert bits_of(observation["achieved_goal"], n_bits) == bits
        assert bits_of(observation["desired_goal"], n_bits) == goal
        assert reward == (0 if bits == goal else -1)


@pytest.mark.parametrize("options", OPTIONS)
def test_flipping_the_wrong_bits_ends_the_episode_with_success(options):
    env = BitFlipping(12, **options)
    for seed in range(10):
        observation, info = env.reset(seed=seed)
        assert info["is_success"] == 0
        wrong = np.flatnonzero(
            np.array(bits_of(observation["achieved_goal"], 12)) != bits_of(observation["desired_goal"], 12)
        )
        actions = [np.isin(np.arange(12), wrong) - 0.5] if options.get("continuous") else wrong
        *before, last = [env.step(action) for action in actions]
        for _, reward, terminated, truncated, info in before:
            assert (reward, terminated, truncated, info) == (-1.0, False, False, {"is_success": 0})
        _, reward, terminated, truncated, info = last
        assert (reward, terminated, info) == (0.0, True, {"is_success": 1})
        assert truncated == (len(actions) == 12)
        assert isinstance(info["is_success"], np.float32)
        assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)


@pytest.mark.parametrize(("max_steps", "expected"), [(None, 6), (1, 1), (9, 9)])
def test_an_episode_is_truncated_at_its_last_step(max_steps, expected):
    env = gymnasium.make(ID, n_bits=6, max_steps=max_steps)
    for seed in (0, 1):
        observation, _ = env.reset(seed=seed)
        wrong = np.flatnonzero(observation["achieved_goal"] != observation["desired_goal"])
        other = (wrong[0] + 1) % 6  # flipping another bit leaves this one wrong
        flags = [env.step(other)[2:4] for _ in range(expected)]
        assert flags == [(False, False)] * (expected - 1) + [(False, True)]


def test_fifteen_bits_are_the_default():
    env = gymnasium.make(ID)
    assert env.action_space == gymnasium.spaces.Discrete(15)
    assert env.observation_space["desired_goal"].shape == (15,)
    assert env.unwrapped.max_steps == 15


def test_starts_and_goals_are_uniform():
    env = BitFlipping(10)
    starts, goals = draws(env, 2000, "achieved_goal"), draws(env, 2000, "desired_goal")
    drawn = np.concatenate([starts, goals], axis=1)
    assert set(drawn.flatten().tolist()) == {0.0, 1.0}
    np.testing.assert_allclose(drawn.mean(axis=0), 0.5, atol=0.07)  # six standard errors
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(20), atol=0.14)


@pytest.mark.parametrize(("fixed_goal", "n_pairs"), [(False, 12), (True, 3)])
def test_no_episode_is_solved_at_its_start_and_all_others_are_as_likely(fixed_goal, n_pairs):
    env = BitFlipping(2, fixed_goal=fixed_goal)
    starts, goals = draws(env, 2400, "achieved_goal"), draws(env, 2400, "desired_goal")
    assert (starts != goals).any(axis=1).all()
    pairs, counts = np.unique(np.concatenate([starts, goals], axis=1), axis=0, return_counts=True)
    assert len(pairs) == n_pairs
    np.testing.assert_allclose(counts, 2400 / n_pairs, rtol=0.4)


def test_a_fixed_goal_is_all_ones():
    assert (draws(BitFlipping(7, fixed_goal=True), 20, "desired_goal") == 1).all()


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("batch", [(), (1,), (50,), (6, 7), (2, 3, 4)])
def test_rewards_of_a_batch_are_those_of_its_rows(options, batch):
    env = BitFlipping(3, **options)
    env.reset(seed=0)
    form = env.observation_space["desired_goal"]
    count = math.prod(batch)
    rows = [env.reset()[0]["desired_goal"] for _ in range(2 * count)]
    achieved, desired = np.array(rows).reshape(2, *batch, *form.shape)
    reward = env.compute_reward(achieved, desired, {})
    terminated = env.compute_terminated(achieved, desired, {})
    truncated = env.compute_truncated(achieved, desired, {})
    assert reward.shape == terminated.shape == truncated.shape == batch
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, bool, bool)
    for row, index in enumerate(np.ndindex(batch)):
        same = bits_of(rows[row], 3) == bits_of(rows[count + row], 3)
        assert reward[index] == (0.0 if same else -1.0)
        assert terminated[index] == same
        assert not truncated[index]
    if count > 20:
        assert set(reward.flatten().tolist()) == {0.0, -1.0}


@pytest.mark.parametrize("options", FORMS)
def test_the_reward_of_one_goal_is_a_scalar(options):
    env = BitFlipping(3, **options)
    observation, info = env.reset(seed=0)
    goals = observation["achieved_goal"], observation["desired_goal"]
    assert isinstance(env.compute_reward(*goals, info), np.float32)
    assert isinstance(env.compute_terminated(*goals, info), np.bool_)
    assert isinstance(env.compute_truncated(*goals, info), np.bool_)
    assert env.compute_reward(*goals, info) == -1
    assert env.compute_reward(goals[0], goals[0], info) == 0


@pytest.mark.parametrize("options", OPTIONS)
def test_seeds_make_episodes_reproducible(options):
    space = BitFlipping(20, **options).action_space
    space.seed(0)
    actions = [space.sample() for _ in range(10)]
    first, again = (episode(BitFlipping(20, **options), 3, actions) for _ in range(2))
    assert same(first, again)
    assert not same(first, episode(BitFlipping(20, **options), 4, actions))


@pytest.mark.parametrize("options", [{}, {"image_observation": True}])
def test_what_was_returned_is_never_changed_and_may_be_written_to(options):
    env = BitFlipping(20, **options)
    kept = episode(env, 0, range(10))
    expected = copy.deepcopy(kept)
    episode(env, 1, range(10))
    assert same(kept, expected)

    observation = env.reset(seed=0)[0]
    for action, returned in enumerate(kept[1:]):
        for value in observation.values():
            value.fill(1)
        observation = env.step(action)[0]
        assert same(observation, returned[0])


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_like_the_original(copy_of):
    env = gymnasium.make(ID, n_bits=20, max_steps=5)
    env.reset(seed=0)
    env.step(3)
    twin = copy_of(env)
    original, copied = ([each.step(action) for action in range(4)] for each in (env, twin))
    assert original[-1][3]
    assert same([*original, env.reset()], [*copied, twin.reset()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_bits": 0}, "n_bits must be at least 1, got 0"),
        ({"n_bits": -3}, "n_bits must be at least 1, got -3"),
        ({"max_steps": 0}, "max_steps must be at least 1.*got 0"),
        ({"n_bits": 1297, "image_observation": True}, "n_bits must be at most 1296.*got 1297"),
        ({"n_bits": 63, "discrete_observation": True}, "n_bits must be at most 62.*got 63"),
        ({"image_observation": True, "discrete_observation": True}, "set one of"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BitFlipping(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"n_bits": 1},
        {"n_bits": 1296, "image_observation": True},
        {"n_bits": 62, "discrete_observation": True},
    ],
)
def test_the_ends_of_the_ranges_work(options):
    env = BitFlipping(**options)
    n_bits = options["n_bits"]
    before = bits_of(env.reset(seed=0)[0]["achieved_goal"], n_bits)
    observation, *_ = env.step(n_bits - 1)
    assert observation in env.observation_space
    assert bits_of(observation["achieved_goal"], n_bits) == [*before[:-1], 1 - before[-1]]


@pytest.mark.parametrize(
    ("continuous", "action"),
    [
        (False, -1),
        (False, 3),
        (False, 0.5),
        (True, 1),
        (True, [1, 1]),
        (True, [[1, 1, 1]]),
        (True, [1, 1, math.nan]),
    ],
)
def test_an_action_outside_the_action_space_is_refused(continuous, action):
    env = BitFlipping(3, continuous=continuous)
    env.reset(seed=0)
    before = env.bits
    with pytest.raises(ValueError, match="An action must be"):
        env.step(action)
    assert np.array_equal(env.bits, before)


@pytest.mark.parametrize("options", OPTIONS)
def test_gymnasium_accepts_the_environment(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ID, **options).unwrapped)


def test_the_id_can_name_the_module_that_registers_it():
    assert isinstance(gymnasium.make(f"torchrl_her.envs:{ID}").unwrapped, BitFlipping)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_rollout_in_torchrl_has_the_goals_of_each_episode(options):
    env = make_torchrl_env(**options)
    check_env_specs(env)
    env.set_seed(0)
    torch.manual_seed(0)
    for _ in range(10):
        rollout = env.rollout(20)
        for key in ("observation", "achieved_goal", "desired_goal"):
            assert torch.equal(rollout["next", key][:-1], rollout[key][1:])
        assert (rollout["next", "desired_goal"] == rollout["desired_goal"][0]).all()
        assert (rollout["desired_goal"] == rollout["desired_goal"][0]).all()
        done = rollout["next", "done"].flatten().tolist()
        assert done == [False] * (len(rollout) - 1) + [True]
        assert len(rollout) == 5 or rollout["next", "terminated"][-1]


def test_networks_take_the_observations_of_a_rollout():
    rollout = GymEnv(ID).rollout(3)
    assert MLP(in_features=30, out_features=15)(rollout["observation"], rollout["desired_goal"]).shape == (
        3,
        15,
    )


@pytest.mark.parametrize("n_envs", [None, 3])
@pytest.mark.parametrize("options", FORMS)
def test_an_info_reader_takes_success_to_torchrl(n_envs, options):
    env = make_torchrl_env(**options)
    if n_envs is not None:
        env = SerialEnv(n_envs, lambda: make_torchrl_env(**options))
        check_env_specs(env)
    env.set_seed(0)
    torch.manual_seed(0)
    rollout = env.rollout(200, break_when_any_done=False)
    success = rollout["next", "is_success"]
    assert success.dtype == torch.float32
    assert torch.equal(success, rollout["next", "terminated"].squeeze(-1).float())
    assert torch.equal(success, 1 + rollout["next", "reward"].squeeze(-1))
    assert success.unique().tolist() == [0, 1]
    assert (rollout["is_success"] == 0).all()
