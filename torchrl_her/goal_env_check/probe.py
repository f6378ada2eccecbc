"""Calls a function of the environment with the goals of each step, and with other goals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_her.keys import HERKeys, path_of
from torchrl_her.rewards.env_reward import EnvFunction

STEPS, SECONDS = 2000, 6.0  # default limits
WIDEST = 1000  # observations with more features than this, such as images, are not kept


class Unplayable(Exception):
    """The environment cannot be played. The arguments are the name and the message of the finding."""


@dataclass
class Goals:
    """Reads the goals of an observation."""

    keys: HERKeys
    goal_fn: Callable[[torch.Tensor], torch.Tensor] | None

    def read(self, observation: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the achieved and the desired goal, ``[*goal]``, as copies."""
        goals = []
        for name, key in (("achieved", self.keys.achieved_goal), ("desired", self.keys.desired_goal)):
            try:
                goals.append(np.array(_get(observation, key)))
            except (KeyError, IndexError, TypeError):
                entries = [path if path[1:] else path[0] for path, _ in _leaves(observation) if path]
                kind = type(observation).__name__
                message = f"There is no {name} goal under {key!r}: the observation is a {kind} with entries {entries}."
                raise Unplayable("not-a-goal-env", message) from None
            if goals[-1].dtype.kind not in "biuf":
                raise Unplayable("not-a-goal-env", f"The {name} goal under {key!r} is not one array of numbers.")
        if self.goal_fn is not None:
            goals[0] = torch.as_tensor(self.goal_fn(torch.as_tensor(goals[0]).unsqueeze(0)))[0].numpy(force=True)
        return goals[0], goals[1]

    def rest(self, observation: Any) -> np.ndarray:
        """Return the other numbers of an observation, ``float64 [features]``; empty if there are too many."""
        goals = {path_of(self.keys.achieved_goal), path_of(self.keys.desired_goal)}
        if self.goal_fn is not None:
            goals.remove(path_of(self.keys.achieved_goal))  # the goal is only a part of this entry
        parts = [np.ravel(value) for path, value in _leaves(observation) if path not in goals and _is_number(value)]
        if not parts or sum(map(len, parts)) > WIDEST:
            return np.empty(0)
        return np.concatenate(parts, dtype=np.float64)


@dataclass
class PlayedEpisodes:
    """All played episodes, with one row per step."""

    infos: list[dict[str, Any]]
    achieved: np.ndarray  # [n, *goal], before the step
    next_achieved: np.ndarray  # [n, *goal]
    desired: np.ndarray  # [n, *goal], before the step
    next_desired: np.ndarray  # [n, *goal]
    observation: np.ndarray  # float64 [n, features]
    next_observation: np.ndarray  # float64 [n, features]
    reward: np.ndarray  # float64 [n]
    terminated: np.ndarray  # bool [n]
    episode: np.ndarray  # int64 [n]
    step: np.ndarray  # int64 [n], in the episode


class Watcher:
    """Counts how often arrays of observations are modified after the environment has returned them."""

    def __init__(self) -> None:
        self.modified: Counter[str] = Counter()  # by entry
        self._last: list[tuple[str, np.ndarray, np.ndarray]] = []  # path, array, its copy

    def see(self, observation: Any) -> None:
        """Check the previous observation, when the environment has just returned another one."""
        for path, array, copy in self._last:
            if not np.array_equal(array, copy, equal_nan=array.dtype.kind == "f"):
                self.modified[path] += 1
        leaves = [(".".join(path), value) for path, value in _leaves(observation) if isinstance(value, np.ndarray)]
        self._last = [(path, value, value.copy()) for path, value in leaves]


def play(
    env: Any, goals: Goals, probes: Iterable[Probe], watcher: Watcher, steps: int | None, seed: int
) -> Iterator[tuple[Any, ...]]:
    """Yield the steps of episodes with random actions, each with the fields of `PlayedEpisodes`.

    In every second episode, an action is repeated as long as it approaches the goal. The first episode takes at most
    half of the steps, each later one at most a tenth.
    """
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)
    until = time.monotonic() + (SECONDS if steps is None else np.inf)
    steps = STEPS if steps is None else steps
    visited: list[np.ndarray] = []
    played = episode = 0
    while played < steps and time.monotonic() < until:
        observation = reset(env, seed if episode == 0 else None)
        watcher.see(observation)
        before, rest = goals.read(observation), goals.rest(observation)
        visited.append(before[0])
        action, is_over, step = env.action_space.sample(), False, 0
        longest = steps // 2 if episode == 0 else max(1, steps // 10)
        while not is_over and step < longest and played < steps and time.monotonic() < until:
            observation, reward, terminated, is_over, info = _step(env, action)
            watcher.see(observation)
            after, next_rest = goals.read(observation), goals.rest(observation)
            recent = 10 if rng.random() < 0.5 else len(visited)  # goals nearby, and far away
            other = visited[-1 - rng.integers(min(recent, len(visited)))]
            for probe in probes:
                probe.observe(after[0], before[1], info, other)
            if episode % 2 == 0 or distance(after[0], before[1]) >= distance(*before):
                action = env.action_space.sample()
            visited.append(after[0])
            goals_of_step = before[0], after[0], before[1], after[1]
            yield info, *goals_of_step, rest, next_rest, reward, terminated, episode, step
            before, rest, step, played = after, next_rest, step + 1, played + 1
        episode += 1


def reset(env: Any, seed: int | None = None) -> Any:
    """Reset an environment and return the observation."""
    try:
        observation, _ = env.reset(seed=seed)
    except Exception as error:
        raise Unplayable("step-fails", f"reset failed: {type(error).__name__}: {error}.") from error
    return observation


def _step(env: Any, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Return the observation, the reward, ``terminated``, whether the episode is over, and a copy of ``info``."""
    try:
        observation, reward, terminated, truncated, info = env.step(action)
        reward = float(np.asarray(reward).item())
    except Exception as error:
        raise Unplayable("step-fails", f"step failed: {type(error).__name__}: {error}.") from error
    info = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in info.items()}
    return observation, reward, bool(terminated), bool(terminated or truncated), info


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Euclidean distance between two goals ``[*goal]``."""
    difference = np.subtract(one, other, dtype=np.float64 if one.size <= WIDEST else np.float32)
    return float(np.sqrt(np.square(difference).sum()))


def distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the Euclidean distance of each pair of goals ``[n, *goal]``, ``float64 [n]``."""
    return np.array([distance(*pair) for pair in zip(one, other, strict=True)])


def _get(observation: Any, key: NestedKey) -> Any:
    for part in path_of(key):
        observation = observation[part]
    return observation


def _leaves(observation: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(observation, dict):
        for name, value in observation.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(observation, tuple):
        for place, value in enumerate(observation):
            yield from _leaves(value, (*path, str(place)))
    else:
        yield path, observation


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.ndarray, np.generic)) and np.asarray(value).dtype.kind in "biuf"


LATER = 200  # for at most this many steps, values are computed again after the last episode


class Values(NamedTuple):
    """The values of the function after each step for several pairs of goals, ``float64 [n]`` each."""

    actual: np.ndarray  # the achieved and the desired goal
    own: np.ndarray  # the achieved goal for both
    other: np.ndarray  # the achieved goal, and another goal as the desired one
    swapped: np.ndarray  # the goals of `other`, exchanged
    again: np.ndarray  # `actual` repeated


class Probe:
    """Calls ``compute_reward`` or ``compute_terminated`` after each step.

    Args:
        name: "reward" or "terminated", the prefix of the findings' names.
        function: ``function(achieved_goal, desired_goal, info)`` of one pair of goals.
        info_keys: the stored entries that become ``info``.
    """

    def __init__(self, name: str, function: Callable[..., Any], info_keys: Iterable[NestedKey]):
        self.name = name
        self.is_of_env = isinstance(function, EnvFunction)
        self.what = f"compute_{name}" if self.is_of_env else f"{name}_fn"  # the name of the function in messages
        self.function = function.function if isinstance(function, EnvFunction) else _of_arrays(function)
        self.info_keys = {path_of(key)[-1] for key in info_keys}
        self.failure = ""  # the error of the first failed call; no calls follow it
        self.modified: Counter[str] = Counter()  # in how many calls each argument was modified
        self.calls = 0
        self.read: set[str] = set()  # the entries of info that were read
        self.later: dict[int, float] = {}  # step -> value, computed after the last episode
        self._values: list[tuple[float, ...]] = []

    @property
    def values(self) -> Values:
        """The values after each step."""
        return Values(*np.array(self._values).reshape(-1, len(Values._fields)).T)

    def observe(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any], other: np.ndarray) -> None:
        """Call the function after a step, with the goals of the step and with an ``other`` goal ``[*goal]``."""
        if not self.failure:
            pairs = (achieved, desired), (achieved, achieved), (achieved, other), (other, achieved), (achieved, desired)
            self._values.append(tuple(self.call(*pair, info) for pair in pairs))

    def observe_later(self, achieved: np.ndarray, desired: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Call the function again with the goals ``[n, *goal]`` of some steps, in a later state of the environment."""
        for step in np.linspace(0, len(achieved) - 1, min(LATER, len(achieved))).astype(int).tolist():
            if not self.failure:
                self.later[step] = self.call(achieved[step], desired[step], infos[step])

    def call(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> float:
        """Return the value for one pair of goals ``[*goal]``, or NaN if the call fails."""
        arguments = {"achieved_goal": np.array(achieved)[()], "desired_goal": np.array(desired)[()]}
        given = _ReadInfo(info)
        self.calls += 1
        try:
            value = np.asarray(self.function(*arguments.values(), given))
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}".removesuffix(": ")
            return np.nan
        finally:
            self.read |= given.read
        for (name, after), before in zip(arguments.items(), (achieved, desired), strict=True):
            if before.tobytes() != after.tobytes():
                self.modified[name] += 1
        if value.size != 1 or value.dtype == object:
            shown = "None" if value.dtype == object else f"the shape {value.shape}"
            self.failure = self.failure or f"it returned {shown} for one pair of goals"
            return np.nan
        return float(value.item())


def _of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of tensors ``[batch, *goal]`` into a function of arrays ``[*goal]``."""

    def call(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        pair = (torch.as_tensor(np.asarray(goal)).unsqueeze(0) for goal in (achieved, desired))
        return torch.as_tensor(function(*pair)).numpy(force=True)

    return call


class _ReadInfo(dict[str, Any]):
    """An ``info`` dictionary that records which of its entries are read before they are replaced."""

    def __init__(self, info: dict[str, Any]):
        super().__init__(info)
        self.given = info
        self.read: set[str] = set()


def _recorded(method: Callable[..., Any], reads_one: bool) -> Callable[..., Any]:
    """Return a method of dict that records the key in its first argument, or all keys."""

    def call(info: _ReadInfo, *arguments: Any) -> Any:
        keys = arguments[:1] if reads_one else dict.keys(info)
        info.read.update(str(key) for key in keys if dict.get(info, key) is info.given.get(key))
        return method(info, *arguments)

    return call


READ_ONE = ("__contains__", "__getitem__", "get", "pop", "setdefault")
READ_ALL = ("__eq__", "__iter__", "__ne__", "__or__", "__reversed__", "__ror__", "copy", "items", "keys")
for _name in (*READ_ONE, *READ_ALL, "popitem", "values"):
    setattr(_ReadInfo, _name, _recorded(getattr(dict, _name), _name in READ_ONE))
