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


class Falling(Reach):
    """An episode ends when the ball reaches the ground, always after eleven steps."""

    def reset(self, **options):
        self.height, self.speed = 1.0, 0.0
        return super().reset(**options)

    def step(self, action):
        self.speed -= 0.015
        self.height += self.speed
        return super().step(action)

    def observe(self):
        return observed(self, observation=np.array([self.height, 0.0]))

    def ends(self, achieved, desired):
        return self.height <= 0


class Rolling(Reach):
    """The first action gives the ball a direction. It leaves the circle, always after seven steps."""

    def reset(self, **options):
        super().reset(**options)
        self.position = np.zeros(2)
        return self.observe(), {}

    def step(self, action):
        if self.time == 0:
            self.velocity = 0.65 * action / np.linalg.norm(action)
        return super().step(self.velocity)

    def ends(self, achieved, desired):
        return bool(np.linalg.norm(achieved) > 0.9)


class Grid(Reach):
    """A point moves by one cell in one of four directions, and reaches only its own cell."""

    width, threshold = 1 / 64, 0.0

    def reset(self, **options):
        super().reset(**options)
        self.position, self.goal = self.width * self.np_random.integers(-40, 41, (2, 2))
        return self.observe(), {}

    def step(self, action):
        action = np.sign(action) * (np.abs(action) == np.abs(action).max())
        self.position = self.position + self.width * action
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


def sets_info(env, achieved, desired, info):
    info["distance"] = apart(achieved, desired)
    return (info["distance"] <= 0.2) - 1.0


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
    "40 steps, which it counts in the observation": variant(
        ends=lambda s, a, d: s.time >= 40, observe=lambda s: observed(s, observation=np.array([s.time / 40, 0.0]))
    ),
    "a ball that falls to the ground, semi-implicit Euler": Falling,
    "a ball that rolls out of a circle": Rolling,
    "an object that is moved seldom, and never at first": variant(
        longest=20, step=lambda s, a: Reach.step(s, a * (s.time > 0 and s.np_random.random() < 0.3))
    ),
    "sets entries of info": variant(compute_reward=sets_info),
    "a grid": Grid,
    "a grid with rounding errors": variant(Grid, width=0.02, threshold=1e-6),
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
