"""Goal environments: correct ones, some of which look faulty, and ones with mistakes."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text

from torchrl_her.envs import BitFlipping, PointReach


class Reach(gymnasium.Env):
    """Correct: a point in the square [-1, 1]² that moves by up to 0.2 in each direction."""

    threshold = 0.2
    dtype = np.float64
    longest = 40

    def __init__(self):
        box = Box(-1.5, 1.5, (2,), self.dtype)
        self.observation_space = Dict(observation=box, achieved_goal=box, desired_goal=box)
        self.action_space = Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1, 1, 2)
        self.goal = self.draw_goal()
        self.time = 0
        return self.observe(), {}

    def draw_goal(self):
        return self.np_random.uniform(-1, 1, 2)

    def step(self, action):
        self.position = np.clip(self.position + 0.2 * action, -1, 1)
        self.time += 1
        observation = self.observe()
        goals = observation["achieved_goal"], observation["desired_goal"]
        info = self.info(*goals)
        reward = self.reward_of_step(*goals, info)
        return observation, reward, self.ends(*goals), self.time >= self.longest, info

    def observe(self):
        return {
            "observation": self.position.astype(self.dtype),
            "achieved_goal": self.position.astype(self.dtype),
            "desired_goal": self.goal.astype(self.dtype),
        }

    def info(self, achieved, desired):
        return {"is_success": apart(achieved, desired) <= self.threshold}

    def reward_of_step(self, achieved, desired, info):
        return self.compute_reward(achieved, desired, info)

    def compute_reward(self, achieved, desired, info):
        return missed(achieved, desired, self.threshold)

    def ends(self, achieved, desired):
        return False


class Dense(Reach):
    """Correct: the reward is the negative distance."""

    def compute_reward(self, achieved, desired, info):
        return -apart(achieved, desired)


class EndsOnSuccess(Reach):
    """Correct: compute_terminated gives the end of an episode."""

    def ends(self, achieved, desired):
        return bool(self.compute_terminated(achieved, desired, {}))

    def compute_terminated(self, achieved, desired, info):
        return apart(achieved, desired) <= self.threshold


def apart(achieved, desired):
    return np.linalg.norm(achieved - desired, axis=-1)


def missed(achieved, desired, threshold=0.2):
    """Return the reward of -1 for missed goals."""
    return -(apart(achieved, desired) > threshold).astype(np.float64)


def variant(base=Reach, **members):
    """Return a subclass with other members."""
    return type("Variant", (base,), members)


def showing(base=Reach, **entries):
    """Return a variant with other entries of the observation, each a function of the environment."""
    return variant(base, observe=lambda s: base.observe(s) | {name: entry(s) for name, entry in entries.items()})


def paying(function, base=Reach):
    """Return a variant whose ``step`` returns another reward than ``compute_reward``."""
    return variant(base, reward_of_step=function)


def computing(function, **members):
    """Return a variant with another ``compute_reward``."""
    return variant(compute_reward=function, **members)


def ending(function, **members):
    """Return a variant with another ``compute_terminated``."""
    return variant(EndsOnSuccess, compute_terminated=function, **members)


class Coasting(Reach):
    """The position does not change in the first step, but the velocity does. The observation has both."""

    def __init__(self):
        super().__init__()
        self.observation_space["observation"] = Box(-1.5, 1.5, (4,), np.float64)

    def reset(self, **options):
        self.velocity = np.zeros(2)
        return super().reset(**options)

    def step(self, action):
        self.position = np.clip(self.position + self.velocity, -1, 1)
        self.velocity = 0.9 * self.velocity + 0.1 * action
        return super().step(np.zeros(2))

    def observe(self):
        return Reach.observe(self) | {"observation": np.append(self.position, self.velocity)}


class Rolling(Reach):
    """The first action gives the ball a direction. It leaves the circle, always after seven steps."""

    def reset(self, **options):
        _, info = super().reset(**options)
        self.position = np.zeros(2)
        return self.observe(), info

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


class Reporting(Reach):
    def __init__(self):
        super().__init__()
        lidar = Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = Dict({**self.observation_space.spaces, "mission": Text(30), "lidar": lidar})

    def observe(self):
        return super().observe() | {"mission": "reach", "lidar": np.array([np.inf, self.position[0], -np.inf])}


def on_a_circle(env):
    """Return a goal that the ball of `Rolling` reaches only after it has left its circle."""
    goal = env.np_random.standard_normal(2)
    return 1.05 * goal / np.linalg.norm(goal)


def lasting(env, achieved, desired):
    env.lasts = apart(achieved, desired) <= 0.2 or (env.time > 1 and env.lasts)
    return {"is_success": env.lasts}


def sets_info(env, achieved, desired, info):
    info["distance"] = apart(achieved, desired)
    return (info["distance"] <= 0.2) - 1.0


def in_its_space(env, achieved, desired, info):
    if np.abs([*achieved.flat, *desired.flat]).max() > 1.5:
        raise ValueError("a goal is outside of the space")
    return missed(achieved, desired)


WITHOUT_SUCCESS: dict = {"info": lambda *_: {}}
CORRECT = {
    "sparse": Reach,
    "dense": Dense,
    "ends on success": EndsOnSuccess,
    "truncates on success": variant(longest=property(lambda s: 0 if apart(s.position, s.goal) <= 0.2 else np.inf)),
    "float32": variant(dtype=np.float32),
    "tiny rewards": variant(Dense, compute_reward=lambda s, a, d, i: -1e-5 * apart(a, d)),
    "rewards of 0 and 1": computing(lambda s, a, d, i: (apart(a, d) <= 0.2).astype(np.float32)),
    "rewards that grow with the goal": computing(
        lambda s, a, d, i: (apart(a, d) <= 0.2) * (1 + np.linalg.norm(d, axis=-1)), **WITHOUT_SUCCESS
    ),
    "a reward that fails for goals outside of the space": computing(in_its_space),
    "an array as reward": paying(lambda s, a, d, i: missed(a, d)[None]),
    "sets entries of info": computing(sets_info),
    "success that lasts": variant(info=lasting),
    "starts at rest, explicit Euler": Coasting,
    "one step": variant(ends=lambda *_: True),
    "40 steps, which it counts in the observation": showing(
        variant(ends=lambda s, a, d: s.time >= 40), observation=lambda s: np.array([s.time / 40, 0.0])
    ),
    "a ball that rolls out of a circle": Rolling,
    "a ball that reaches its goal at times when it leaves the circle": variant(Rolling, draw_goal=on_a_circle),
    "an object that is moved seldom, and never at first": variant(
        longest=20, step=lambda s, a: Reach.step(s, a * (s.time > 0 and s.np_random.random() < 0.3))
    ),
    "ends when it leaves a circle": variant(
        ends=lambda s, a, d: bool(np.linalg.norm(a) > 1.2),
        compute_terminated=lambda s, a, d, i: np.linalg.norm(a, axis=-1) > 1.2,
    ),
    "a grid": Grid,
    "a grid with rounding errors": variant(Grid, width=0.02, threshold=1e-6),
    "unit vectors": showing(
        computing(lambda s, a, d, i: (a * d).sum(-1) - 1, **WITHOUT_SUCCESS),
        achieved_goal=lambda s: s.position / np.linalg.norm(s.position),
        desired_goal=lambda s: s.goal / np.linalg.norm(s.goal),
    ),
    "a text and a lidar in the observation": Reporting,
    "micrometres": variant(
        observe=lambda s: {name: 1e-6 * value for name, value in Reach.observe(s).items()}, threshold=2e-7
    ),
    "PointReach": PointReach,
    "4 bits": lambda: BitFlipping(4),
    "15 bits": BitFlipping,
    "bits as a number": lambda: BitFlipping(4, discrete_observation=True),
    "bits as an image": lambda: BitFlipping(8, image_observation=True),
}


class OftenAhead(Coasting, Dense):
    """The reward of every other step is that of the next position."""

    def reward_of_step(self, achieved, desired, info):
        ahead = np.clip(achieved + self.velocity, -1, 1)
        return self.compute_reward(ahead if self.time % 2 else achieved, desired, info)


class Lagging(Reach):
    """The achieved goal is the position before the step."""

    def observe(self):
        self.late = self.before if self.time else self.position
        self.before = self.position
        return Reach.observe(self) | {"achieved_goal": self.late}


class StaleAtReset(Reach):
    """Reset returns a goal of the previous episode, by default in every other episode on average."""

    entry, attribute, share = "achieved_goal", "position", 0.5

    def reset(self, **options):
        before = getattr(self, self.attribute, np.zeros(2))
        observation, info = super().reset(**options)
        return observation | ({self.entry: before} if self.np_random.random() < self.share else {}), info


def progress(self, achieved, desired, info):
    """Return the progress since the last call."""
    before, self.last = getattr(self, "last", 0.0), float(np.mean(apart(achieved, desired)))
    return before - self.last


def fails(self, **options):
    raise RuntimeError("broken")


# "name of the finding: mistake" -> environment class
FAULTS = {
    "reward-differs: sign": paying(lambda s, a, d, i: -s.compute_reward(a, d, i)),
    "reward-differs: threshold": paying(lambda s, a, d, i: missed(a, d, 0.1)),
    "reward-differs: shaping": paying(lambda s, a, d, i: missed(a, d) - 0.1 * apart(a, d)),
    "reward-differs: half of the rewards are one step early": OftenAhead,
    "reward-misses-achieved-goal: sign": computing(lambda s, a, d, i: -missed(a, d)),
    "reward-misses-achieved-goal: ring": computing(lambda s, a, d, i: missed(apart(a, d)[..., None], 0.1, 0.08)),
    "reward-ignores-desired-goal: current goal": computing(lambda s, a, d, i: missed(a, s.goal)),
    "reward-ignores-achieved-goal: current state": computing(lambda s, a, d, i: missed(s.position, d)),
    "reward-depends-on-state: step count": computing(lambda s, a, d, i: missed(a, d) - 0.01 * s.time),
    "reward-random: earlier calls": computing(progress),
    "reward-random: noise": computing(lambda s, a, d, i: missed(a, d) + s.np_random.random()),
    "reward-modifies-arguments: achieved goal": computing(lambda s, a, d, i: missed(np.subtract(a, d, out=a), 0.0)),
    "reward-fails: missing info": computing(
        lambda s, a, d, i: missed(a, d) - i["energy"], reward_of_step=lambda *_: -1.0
    ),
    "reward-fails: other goals": computing(lambda s, a, d, i: {tuple(s.goal): -1.0}[tuple(d)]),
    "reward-fails: None": computing(lambda *_: None, reward_of_step=lambda *_: 0.0),
    "reward-fails: two values": computing(lambda s, a, d, i: a - d, reward_of_step=lambda *_: 0.0),
    "reward-missing: no reward": computing(None, reward_of_step=lambda *_: 0.0),
    "reward-needs-info: energy": computing(
        lambda s, a, d, i: missed(a, d) - i["energy"], info=lambda s, a, d: {"energy": 0.1 * s.time}
    ),
    "reward-not-batched: if": computing(lambda s, a, d, i: 0.0 if apart(a, d) <= 0.2 else -1.0),
    "reward-not-batched: one value": computing(lambda s, a, d, i: -float(np.linalg.norm(a - d) > 0.2)),
    "reward-not-batched: far goals": computing(
        lambda s, a, d, i: -1.0 if np.any(apart(a, d) > 1) else -apart(a, d), longest=3, info=lambda *_: {}
    ),
    "reward-constant: nothing is reached": variant(threshold=-1),
    "reward-reaches-everything: threshold": variant(threshold=2.0),
    "reward-constant: everything is reached": variant(threshold=6),
    "threshold-too-small: unit": variant(threshold=1e-6),
    "no-goal-reached: far goals": variant(draw_goal=lambda s: s.np_random.uniform(1.3, 1.4, 2)),
    "success-differs: threshold": variant(info=lambda s, a, d: {"is_success": apart(a, d) < 0.1}),
    "success-differs: threshold, with a cost": computing(
        lambda s, a, d, i: missed(a, d) - i["cost"],
        info=lambda s, a, d: {"cost": 0.01 * s.time, "is_success": apart(a, d) < 0.1},
    ),
    "ends-on-success: always": variant(ends=lambda s, a, d: apart(a, d) <= 0.2),
    "ends-on-success: nearer than reached goals": variant(ends=lambda s, a, d: apart(a, d) <= 0.15),
    "terminated-differs: threshold": variant(EndsOnSuccess, ends=lambda s, a, d: apart(a, d) <= 0.15),
    "terminated-differs: fall": variant(
        EndsOnSuccess, ends=lambda s, a, d: bool(apart(a, d) <= 0.2 or np.abs(a).max() >= 1)
    ),
    "terminated-one-verdict: norm": ending(lambda s, a, d, i: bool(np.linalg.norm(a - d) <= 0.2)),
    "terminated-ignores-desired-goal: current goal": ending(lambda s, *_: apart(s.position, s.goal) < 0.2),
    "terminated-ignores-achieved-goal: current state": ending(lambda s, a, d, i: apart(s.position, d) < 0.2),
    "terminated-depends-on-state: time": ending(lambda s, a, d, i: (apart(a, d) < 0.2) | (s.time > 30)),
    "terminated-random: noise": ending(lambda s, *_: s.np_random.random() < 0.5),
    "terminated-fails: missing info": ending(lambda s, a, d, i: i["contact"], ends=lambda *_: False),
    "terminated-fails: other goals": ending(lambda s, a, d, i: {tuple(s.goal): False}[tuple(d)], ends=lambda *_: False),
    "terminated-needs-info: optional info": ending(lambda s, a, d, i: i.get("ends", False)),
    "terminated-modifies-arguments: achieved goal": ending(lambda s, a, d, i: bool(np.subtract(a, d, out=a).any())),
    "terminated-not-batched: None": ending(lambda s, a, d, i: apart(a, d) < 0.2 if a.ndim == 1 else None),
    "terminated-not-batched: bool": ending(lambda s, a, d, i: bool(apart(a, d) <= 0.2)),
    "not-a-goal-env: array": variant(
        observe=lambda s: s.position, step=lambda s, action: (s.position, 0.0, *[False] * 2, {})
    ),
    "goal-shapes-differ": showing(computing(lambda *_: 0.0, **WITHOUT_SUCCESS), desired_goal=lambda s: np.zeros(3)),
    "goal-dtypes-differ: float64 and float32": showing(desired_goal=lambda s: s.goal.astype(np.float32)),
    "desired-goal-far: centimetres": showing(desired_goal=lambda s: 100 * s.goal),
    "desired-goal-far: frame": showing(desired_goal=lambda s: s.goal + np.array([0, 15])),
    "goal-nan: desired": showing(desired_goal=lambda s: s.goal * [1, np.nan]),
    "goal-nan: achieved at times": showing(achieved_goal=lambda s: s.position * (np.nan if s.time == 7 else 1)),
    "goal-nan: infinity": showing(achieved_goal=lambda s: s.position * (np.inf if s.time == 7 else 1)),
    "modified-in-place: one array": showing(
        variant(array=np.zeros(2)), achieved_goal=lambda s: np.add(s.position, 0, out=s.array)
    ),
    "achieved-goal-constant: zero": showing(achieved_goal=lambda s: np.zeros(2)),
    "achieved-goal-unmoved: constant in an episode": showing(achieved_goal=lambda s: s.goal / 2),
    "achieved-goal-stale-at-reset: at times": StaleAtReset,
    "achieved-goal-stale-at-reset: always": variant(StaleAtReset, share=1.0),
    "achieved-goal-lags: in the observation": Lagging,
    "reward-differs: the reward of the next achieved goal": paying(
        lambda s, a, d, i: missed(s.position, d), showing(Lagging, observation=lambda s: np.zeros(2))
    ),
    "achieved-goal-moves-late: noise": showing(Lagging, observation=lambda s: s.np_random.uniform(-1, 1, 2)),
    "achieved-goal-moves-late: the observation, too": showing(Lagging, observation=lambda s: s.late),
    "achieved-goal-moves-late: explicit Euler, without the position": showing(
        Coasting, observation=lambda s: np.append(np.zeros(2), s.velocity)
    ),
    "desired-goal-changes: after 20 steps": showing(desired_goal=lambda s: s.goal * (-1 if s.time > 20 else 1)),
    "desired-goal-stale-at-reset: at times": variant(StaleAtReset, entry="desired_goal", attribute="goal"),
    "one-goal: constant": variant(draw_goal=lambda s: np.array([0.5, 0.5])),
    "desired-goal-in-observation: goal": showing(observation=lambda s: np.append(s.position, s.goal)),
    "desired-goal-in-observation: scaled difference": showing(observation=lambda s: 3 * (s.goal - s.position) + 1),
    "desired-goal-in-observation: distance": showing(observation=lambda s: np.full(2, apart(s.position, s.goal))),
    "desired-goal-in-observation: few goals": showing(variant(longest=200), observation=lambda s: s.goal - s.position),
    "step-fails: first step": variant(step=lambda s, action: fails(s)),
    "step-fails: reset": variant(reset=fails),
    "step-fails: step": variant(info=lambda s, a, d: fails(s) if s.time == 30 else {}),
}
