"""Goal environments: a correct one, and variants of it with mistakes."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


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
        return {"is_success": np.linalg.norm(achieved - desired) <= self.threshold}

    def reward_of_step(self, achieved, desired, info):
        return self.compute_reward(achieved, desired, info)

    def compute_reward(self, achieved, desired, info):
        return -(np.linalg.norm(achieved - desired, axis=-1) > self.threshold).astype(np.float64)

    def ends(self, achieved, desired):
        return False


class Dense(Reach):
    """Correct: the reward is the negative distance."""

    def compute_reward(self, achieved, desired, info):
        return -np.linalg.norm(achieved - desired, axis=-1)


class EndsOnSuccess(Reach):
    """Correct: compute_terminated gives the end of an episode."""

    def ends(self, achieved, desired):
        return bool(self.compute_terminated(achieved, desired, {}))

    def compute_terminated(self, achieved, desired, info):
        return np.linalg.norm(achieved - desired, axis=-1) <= self.threshold


def variant(base=Reach, **members):
    """Return a subclass with other members."""
    return type("Variant", (base,), members)


def apart(achieved, desired):
    return np.linalg.norm(achieved - desired, axis=-1)


# Mistakes in compute_reward


def is_missed(self, achieved, desired, info):
    return -float(apart(achieved, self.goal) > self.threshold)


def from_state(self, achieved, desired, info):
    return -(apart(self.position, desired) > self.threshold).astype(float)


def with_counter(self, achieved, desired, info):
    return -(apart(achieved, desired) > self.threshold).astype(float) - 0.01 * self.time


def with_potential(self, achieved, desired, info):
    """Return the progress since the last call."""
    before, self.last = getattr(self, "last", 0.0), float(np.mean(apart(achieved, desired)))
    return before - self.last


def with_noise(self, achieved, desired, info):
    return -apart(achieved, desired) + 0.1 * np.random.standard_normal()  # noqa: NPY002


def in_place(self, achieved, desired, info):
    achieved -= desired
    return -(np.linalg.norm(achieved, axis=-1) > self.threshold).astype(float)


def with_energy(self, achieved, desired, info):
    return -(apart(achieved, desired) > self.threshold).astype(float) - info["energy"]


def energy_in_info(self, achieved, desired):
    return {"energy": 0.1 * self.time}


def of_one_pair(self, achieved, desired, info):
    return 0.0 if apart(achieved, desired) <= self.threshold else -1.0


def observed(self, **entries):
    return Reach.observe(self) | entries


class InPlace(Reach):
    """The achieved goal is always the same array."""

    def __init__(self):
        super().__init__()
        self.array = np.zeros(2)

    def observe(self):
        self.array[:] = self.position
        return observed(self, achieved_goal=self.array)


class Lagging(Reach):
    def reset(self, **options):
        self.last = None
        return super().reset(**options)

    def observe(self):
        observation = observed(self, achieved_goal=self.position if self.last is None else self.last)
        self.last = self.position.copy()
        return observation


class LaggingInItsReward(Lagging):
    """The reward is computed from the true position."""

    def observe(self):
        return super().observe() | {"observation": np.zeros(2)}

    def reward_of_step(self, achieved, desired, info):
        return self.compute_reward(self.position, desired, info)


class StaleAchieved(Reach):
    def reset(self, **options):
        before = getattr(self, "position", np.zeros(2))
        observation, info = super().reset(**options)
        return observation | {"achieved_goal": before}, info


class SometimesStale(Reach):
    """The achieved goal is stale in every other episode, on average."""

    def reset(self, **options):
        before = getattr(self, "position", np.zeros(2))
        observation, info = super().reset(**options)
        return (observation | {"achieved_goal": before} if self.np_random.random() < 0.5 else observation), info


class ZeroAtReset(Reach):
    def reset(self, **options):
        observation, info = super().reset(**options)
        return observation | {"achieved_goal": np.full(2, -1.4)}, info


class StaleDesired(Reach):
    def reset(self, **options):
        before = getattr(self, "goal", np.zeros(2))
        observation, info = super().reset(**options)
        return observation | {"desired_goal": before}, info


class Wandering(Reach):
    def step(self, action):
        if self.time == 20:
            self.goal = self.draw_goal()
        return super().step(action)


# name of the mistake: environment class, name of the finding
FAULTS = {
    "sign": (variant(reward_of_step=lambda s, a, d, i: -s.compute_reward(a, d, i)), "reward-differs"),
    "sign of both": (
        variant(compute_reward=lambda s, a, d, i: (apart(a, d) > 0.2) * 1.0),
        "reward-misses-achieved-goal",
    ),
    "sign, dense": (variant(compute_reward=lambda s, a, d, i: apart(a, d)), "reward-misses-achieved-goal"),
    "scale": (variant(reward_of_step=lambda s, a, d, i: 10 * s.compute_reward(a, d, i)), "reward-differs"),
    "scale, dense": (
        variant(Dense, reward_of_step=lambda s, a, d, i: 10 * s.compute_reward(a, d, i)),
        "reward-differs",
    ),
    "0 and 1": (variant(reward_of_step=lambda s, a, d, i: 1 + s.compute_reward(a, d, i)), "reward-differs"),
    "threshold": (variant(reward_of_step=lambda s, a, d, i: -float(apart(a, d) > 0.1)), "reward-differs"),
    "threshold a little different": (
        variant(reward_of_step=lambda s, a, d, i: -float(apart(a, d) > 0.18)),
        "reward-differs",
    ),
    "shaping": (
        variant(reward_of_step=lambda s, a, d, i: s.compute_reward(a, d, i) - 0.1 * apart(a, d)),
        "reward-differs",
    ),
    "current goal": (variant(compute_reward=is_missed), "reward-ignores-desired-goal"),
    "current goal, dense": (
        variant(compute_reward=lambda s, a, d, i: -apart(a, s.goal)),
        "reward-ignores-desired-goal",
    ),
    "current state": (variant(compute_reward=from_state), "reward-ignores-achieved-goal"),
    "step count": (variant(compute_reward=with_counter), "reward-depends-on-state"),
    "earlier calls": (variant(compute_reward=with_potential), "reward-depends-on-state"),
    "random": (variant(compute_reward=with_noise), "reward-random"),
    "modifies an argument": (variant(compute_reward=in_place), "reward-modifies-arguments"),
    "missing info": (variant(compute_reward=with_energy, reward_of_step=lambda *a: -1.0), "reward-fails"),
    "stored info": (variant(compute_reward=with_energy, info=energy_in_info), "reward-needs-info"),
    "not batched": (variant(compute_reward=of_one_pair), "reward-not-batched"),
    "one value for a batch": (
        variant(compute_reward=lambda s, a, d, i: -float(np.linalg.norm(a - d) > 0.2)),
        "reward-not-batched",
    ),
    "nothing reached": (variant(threshold=-1), "reward-constant"),
    "own goal missed": (
        variant(compute_reward=lambda s, a, d, i: -1.0 + (apart(a, d) > 0.02) * (apart(a, d) < 0.2)),
        "reward-misses-achieved-goal",
    ),
    "everything reached": (variant(threshold=2.5), "reward-reaches-everything"),
    "no reward": (variant(compute_reward=None, reward_of_step=lambda *a: 0.0), "reward-missing"),
    "error": (variant(compute_reward=lambda s, a, d: 0.0, reward_of_step=lambda *a: 0.0), "reward-fails"),
    "None": (variant(compute_reward=lambda s, a, d, i: None, reward_of_step=lambda *a: 0.0), "reward-fails"),
    "two values": (variant(compute_reward=lambda s, a, d, i: a - d, reward_of_step=lambda *a: 0.0), "reward-fails"),
    "ends on success": (variant(ends=lambda s, a, d: bool(apart(a, d) <= 0.2)), "ends-on-success"),
    "ends on success, dense": (variant(Dense, ends=lambda s, a, d: bool(apart(a, d) <= 0.2)), "ends-on-success"),
    "ends nearer than reached goals": (variant(ends=lambda s, a, d: bool(apart(a, d) <= 0.15)), "ends-on-success"),
    "success with a cost": (
        variant(
            compute_reward=lambda s, a, d, i: Reach.compute_reward(s, a, d, i) - i["cost"],
            info=lambda s, a, d: {"cost": 0.01 * s.time, "is_success": bool(apart(a, d) < 0.1)},
        ),
        "success-differs",
    ),
    "terminated differs": (
        variant(EndsOnSuccess, ends=lambda s, a, d: bool(apart(a, d) <= 0.15)),
        "terminated-differs",
    ),
    "terminated never": (variant(EndsOnSuccess, ends=lambda s, a, d: False), "terminated-differs"),
    "one verdict": (
        variant(EndsOnSuccess, compute_terminated=lambda s, a, d, i: bool(np.linalg.norm(a - d) <= 0.2)),
        "terminated-one-verdict",
    ),
    "terminated by the current goal": (
        variant(EndsOnSuccess, compute_terminated=lambda s, a, d, i: bool(apart(s.position, s.goal) <= 0.2)),
        "terminated-ignores-desired-goal",
    ),
    "endless": (variant(longest=np.inf), "endless"),
    "time limit as terminated": (variant(ends=lambda s, a, d: s.time >= 40), "time-limit-terminates"),
    "time limit as terminated, dense": (variant(Dense, ends=lambda s, a, d: s.time >= 40), "time-limit-terminates"),
    "threshold far too small": (variant(threshold=1e-6), "no-goal-reached"),
    "shapes": (variant(observe=lambda s: observed(s, desired_goal=np.zeros(3))), "goal-shapes-differ"),
    "dtypes": (variant(observe=lambda s: observed(s, desired_goal=s.goal.astype(np.float32))), "goal-dtypes-differ"),
    "centimetres": (variant(observe=lambda s: observed(s, desired_goal=100 * s.goal)), "desired-goal-far"),
    "degrees": (variant(observe=lambda s: observed(s, desired_goal=np.rad2deg(s.goal))), "desired-goal-far"),
    "frame": (variant(observe=lambda s: observed(s, desired_goal=np.add(s.goal, [0, 15]))), "desired-goal-far"),
    "NaN": (variant(observe=lambda s: observed(s, desired_goal=s.goal * [1, np.nan])), "goal-nan"),
    "NaN at times": (
        variant(observe=lambda s: observed(s, achieved_goal=s.position * (np.nan if s.time == 7 else 1))),
        "goal-nan",
    ),
    "one array": (InPlace, "modified-in-place"),
    "constant": (variant(observe=lambda s: observed(s, achieved_goal=np.zeros(2))), "achieved-goal-constant"),
    "constant in an episode": (
        variant(observe=lambda s: observed(s, achieved_goal=s.goal / 2)),
        "achieved-goal-unmoved",
    ),
    "stale achieved goal": (StaleAchieved, "achieved-goal-stale-at-reset"),
    "stale achieved goal, sometimes": (SometimesStale, "achieved-goal-stale-at-reset"),
    "constant achieved goal at reset": (ZeroAtReset, "achieved-goal-jumps"),
    "lagging": (Lagging, "achieved-goal-lags"),
    "lagging in its reward": (LaggingInItsReward, "achieved-goal-lags"),
    "lagging, observations are noise": (
        variant(Lagging, observe=lambda s: Lagging.observe(s) | {"observation": s.np_random.uniform(-1, 1, 2)}),
        "achieved-goal-moves-late",
    ),
    "lagging, nonlinear observations": (
        variant(Lagging, observe=lambda s: Lagging.observe(s) | {"observation": np.sin(3 * s.position)}),
        "achieved-goal-moves-late",
    ),
    "changing goal": (Wandering, "desired-goal-changes"),
    "stale desired goal": (StaleDesired, "desired-goal-stale-at-reset"),
    "one goal": (variant(draw_goal=lambda s: np.array([0.5, 0.5])), "one-goal"),
    "goal in the observation": (
        variant(observe=lambda s: observed(s, observation=np.append(s.position, s.goal))),
        "desired-goal-in-observation",
    ),
    "relative goal": (
        variant(observe=lambda s: observed(s, observation=s.goal - s.position)),
        "desired-goal-in-observation",
    ),
    "scaled relative goal": (
        variant(observe=lambda s: observed(s, observation=3 * (s.goal - s.position) + 1)),
        "desired-goal-in-observation",
    ),
    "distance": (
        variant(observe=lambda s: observed(s, observation=np.append(s.position, apart(s.position, s.goal)))),
        "desired-goal-in-observation",
    ),
    "is_success": (variant(info=lambda s, a, d: {"is_success": bool(apart(a, d) < 0.1)}), "success-differs"),
    "outside": (variant(observe=lambda s: observed(s, observation=s.position + 1)), "observation-outside-space"),
    "other dtype": (
        variant(dtype=np.float32, observe=lambda s: observed(s, observation=s.position)),
        "observation-outside-space",
    ),
}
