"""Correct goal environments that look faulty."""

import numpy as np
from gymnasium.spaces import Box, Dict, Text

from support.goal_envs import Dense, EndsOnSuccess, Reach, apart, observed, variant
from torchrl_her.envs import BitFlipping, PointReach


class Coasting(Reach):
    """The position is not in the observation, and does not change in the first step."""

    def reset(self, **options):
        self.velocity = np.zeros(2)
        return super().reset(**options)

    def step(self, action):
        self.position = np.clip(self.position + self.velocity, -1, 1)
        self.velocity = 0.9 * self.velocity + 0.1 * action
        return super().step(np.zeros(2))

    def observe(self):
        return observed(self, observation=self.velocity.copy())


class Putt(Reach):
    """The first action hits a ball, which then slows down."""

    longest = 10

    def reset(self, **options):
        super().reset(**options)
        self.position = np.zeros(2)
        return self.observe(), {}

    def step(self, action):
        self.velocity = action if self.time == 0 else 0.3 * self.velocity
        self.position = np.clip(self.position + 0.5 * self.velocity, -1, 1)
        return super().step(np.zeros(2))


class Directions(Reach):
    """Goals are unit vectors, and the reward is their scalar product."""

    def observe(self):
        goals = {"achieved_goal": self.position, "desired_goal": self.goal}
        return observed(self, **{name: goal / np.linalg.norm(goal) for name, goal in goals.items()})

    def compute_reward(self, achieved, desired, info):
        return (achieved * desired).sum(-1) - 1

    def info(self, achieved, desired):
        return {}


class Reporting(Reach):
    def __init__(self):
        super().__init__()
        lidar = Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = Dict({**self.observation_space.spaces, "mission": Text(30), "lidar": lidar})

    def observe(self):
        return observed(self, mission="reach", lidar=np.array([np.inf, self.position[0], -np.inf]))


def ended(result):
    observation, reward, _, truncated, info = result
    return observation, reward, True, truncated, info


def rewarded_by_an_array(result):
    observation, reward, *rest = result
    return observation, np.array([reward]), *rest


def in_micrometres(observation):
    return {name: 1e-6 * value for name, value in observation.items()}


def lasting(env, achieved, desired):
    env.lasts = apart(achieved, desired) <= 0.2 or (env.time > 1 and env.lasts)
    return env.lasts


def started_at_zero(env, **options):
    _, info = Reach.reset(env, **options)
    env.position = np.zeros(2)
    return env.observe(), info


def truncated_on_success(result):
    observation, reward, _, _, info = result
    return observation, reward, False, reward == 0, info


CORRECT = {
    "sparse": Reach,
    "dense": Dense,
    "ends on success": EndsOnSuccess,
    "truncates on success": variant(longest=np.inf, step=lambda s, a: truncated_on_success(Reach.step(s, a))),
    "float32": variant(dtype=np.float32),
    "tiny rewards": variant(Dense, compute_reward=lambda s, a, d, i: -1e-5 * apart(a, d)),
    "rewards with an offset": variant(Dense, compute_reward=lambda s, a, d, i: 1000 - apart(a, d)),
    "rewards of 0 and 1": variant(compute_reward=lambda s, a, d, i: (apart(a, d) <= 0.2).astype(np.float32)),
    "starts at rest, explicit Euler": Coasting,
    "one step": variant(step=lambda s, a: ended(Reach.step(s, a))),
    "one step, dense": variant(Dense, step=lambda s, a: ended(Reach.step(s, a))),
    "unit vectors": Directions,
    "rewards that grow with the goal": variant(
        compute_reward=lambda s, a, d, i: (apart(a, d) <= 0.2) * (1 + np.linalg.norm(d, axis=-1)), info=lambda *_: {}
    ),
    "a text and a lidar in the observation": Reporting,
    "an array as reward": variant(step=lambda s, a: rewarded_by_an_array(Reach.step(s, a))),
    "micrometres": variant(observe=lambda s: in_micrometres(Reach.observe(s)), threshold=2e-7),
    "success that lasts": variant(info=lambda s, a, d: {"is_success": lasting(s, a, d)}),
    "ends when it leaves a circle": variant(
        ends=lambda s, a, d: bool(np.linalg.norm(a) > 1.2),
        compute_terminated=lambda s, a, d, i: np.linalg.norm(a, axis=-1) > 1.2,
    ),
    "starts at one place": variant(reset=lambda s, **options: started_at_zero(s, **options)),
    "PointReach": PointReach,
    "4 bits": lambda: BitFlipping(4),
    "15 bits": BitFlipping,
    "bits as a number": lambda: BitFlipping(4, discrete_observation=True),
    "bits as an image": lambda: BitFlipping(8, image_observation=True),
}
