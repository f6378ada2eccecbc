import gymnasium
import numpy as np
import pytest

from torchrl_her.envs import BitFlipping

ID = "torchrl_her/BitFlipping-v0"
FORMS = [{}, {"image_observation": True}, {"discrete_observation": True}]
OPTIONS = [*FORMS, {"continuous": True}, {"fixed_goal": True}]


def bits_of(value, n_bits):
    """Return the list of bits of an observation or a goal in any encoding."""
    if isinstance(value, int):
        return [int(bit) for bit in reversed(f"{value:0{n_bits}b}")]
    pixels = value.flatten().tolist()
    scale = 255 if value.dtype == np.uint8 else 1
    assert not any(pixels[n_bits:])
    return [int(pixel / scale) for pixel in pixels[:n_bits]]


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
        other = (wrong[0] + 1) % 6  # flipping another bit does not reach the goal
        flags = [env.step(other)[2:4] for _ in range(expected)]
        assert flags == [(False, False)] * (expected - 1) + [(False, True)]


def test_fifteen_bits_are_the_default():
    env = gymnasium.make(ID)
    assert env.action_space == gymnasium.spaces.Discrete(15)
    for space in env.observation_space.values():
        assert (space.shape, space.dtype) == ((15,), np.float32)  # the dtype of networks
    assert env.unwrapped.max_steps == 15


def test_starts_and_goals_are_uniform():
    env = BitFlipping(10)
    starts, goals = draws(env, 2000, "achieved_goal"), draws(env, 2000, "desired_goal")
    drawn = np.concatenate([starts, goals], axis=1)
    assert set(drawn.flatten().tolist()) == {0.0, 1.0}
    np.testing.assert_allclose(drawn.mean(axis=0), 0.5, atol=0.07)  # six standard errors
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(20), atol=0.14)


@pytest.mark.parametrize(("fixed_goal", "n_pairs"), [(False, 12), (True, 3)])
def test_no_episode_is_solved_at_its_start_and_all_other_pairs_are_equally_likely(fixed_goal, n_pairs):
    env = BitFlipping(2, fixed_goal=fixed_goal)
    starts, goals = draws(env, 2400, "achieved_goal"), draws(env, 2400, "desired_goal")
    assert (starts != goals).any(axis=1).all()
    pairs, counts = np.unique(np.concatenate([starts, goals], axis=1), axis=0, return_counts=True)
    assert len(pairs) == n_pairs
    np.testing.assert_allclose(counts, 2400 / n_pairs, rtol=0.4)
    assert (goals == 1).all() == fixed_goal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_bits": 0}, "n_bits must be at least 1, got 0"),
        ({"n_bits": -3}, "n_bits must be at least 1, got -3"),
        ({"max_steps": 0}, "max_steps must be at least 1.*got 0"),
        ({"n_bits": 1297, "image_observation": True}, "n_bits must be at most 1296.*got 1297"),
        ({"n_bits": 63, "discrete_observation": True}, "n_bits must be at most 62.*got 63"),
        ({"image_observation": True, "discrete_observation": True}, "set only one of"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BitFlipping(**options)


@pytest.mark.parametrize(
    ("n_bits", "options"), [(1, {}), (1296, {"image_observation": True}), (62, {"discrete_observation": True})]
)
def test_the_limits_of_the_arguments_work(n_bits, options):
    env = BitFlipping(n_bits, **options)
    before = bits_of(env.reset(seed=0)[0]["achieved_goal"], n_bits)
    observation, *_ = env.step(n_bits - 1)
    assert observation in env.observation_space
    assert bits_of(observation["achieved_goal"], n_bits) == [*before[:-1], 1 - before[-1]]
