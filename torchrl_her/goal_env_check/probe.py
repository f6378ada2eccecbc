"""Calls a function of the environment with the goals of each step, and with other goals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_her.keys import path_of
from torchrl_her.rewards.env_function import EnvFunction

EVERY = 4  # other goals and repeated calls are tried after one step in this many
LATER = 200  # for at most this many steps, values are computed again after the last episode


class Values(NamedTuple):
    """The values of the function after each step for several pairs of goals, ``float64 [n]`` each."""

    actual: np.ndarray  # the achieved and the desired goal
    own: np.ndarray  # the achieved goal for both
    other: np.ndarray  # the achieved goal, and another goal as the desired one; every second other goal is far away
    swapped: np.ndarray  # the goals of `other`, exchanged
    again: np.ndarray  # `actual` repeated: the second call, then the third and the fourth
    third: np.ndarray
    fourth: np.ndarray


class Probe:
    """Calls ``compute_reward`` or ``compute_terminated`` after each step.

    Args:
        function: ``function(achieved_goal, desired_goal, info)`` of one pair of goals.
        info_keys: the stored entries that become ``info``.
    """

    def __init__(self, function: Callable[..., Any], info_keys: Iterable[NestedKey]):
        self.is_of_env = isinstance(function, EnvFunction)
        self.function = function.function if isinstance(function, EnvFunction) else _of_arrays(function)
        self.info_keys = {path_of(key)[-1] for key in info_keys}
        self.failure = ""  # the error of the first failed call; no calls follow it
        self.modified: Counter[str] = Counter()  # in how many calls each argument was modified
        self.calls = 0
        self.read: set[str] = set()  # the entries of info that were read
        self.later: dict[int, float] = {}  # step -> value, computed after the last episode
        self._values: list[tuple[float, ...]] = []
        self._far_fails = False

    def values(self, every: int = 1) -> Values:
        """Return one row in ``every``. The fields after the first two are NaN except in one row of `EVERY`."""
        columns = np.array(self._values, dtype=np.float64).reshape(len(self._values), len(Values._fields))
        return Values(*columns[::every].T)

    def observe(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any], other: np.ndarray) -> None:
        """Call the function after a step, with the goals of the step and with an ``other`` goal ``[*goal]``."""
        if self.failure:
            return
        first = self.call(achieved, desired, info), self.call(achieved, achieved, info)
        if len(self._values) % EVERY:
            self._values.append((*first, *[np.nan] * 5))
            return
        if not self._far_fails and len(self._values) % (2 * EVERY) == 0:
            far = far_from(achieved)
            with_far = self._call_far(achieved, far, info), self._call_far(far, achieved, info)
            self._far_fails = bool(np.isnan(with_far).any())
            other = other if self._far_fails else far
        with_other = self.call(achieved, other, info), self.call(other, achieved, info)
        repeated = [self.call(achieved, desired, info) for _ in range(3)]
        self._values.append((*first, *with_other, *repeated))

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

    def _call_far(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> float:
        """Call with a goal that may be invalid, so that an error is not a failure."""
        before = self.failure
        value = self.call(achieved, desired, info)
        self.failure = before
        return value


def far_from(goal: np.ndarray) -> np.ndarray:
    """Return a goal ``[*goal]`` far from another one, perhaps outside the goal space."""
    if goal.dtype == bool:
        return ~goal
    if np.issubdtype(goal.dtype, np.integer):
        is_bits = goal.min() >= 0 and goal.max() <= 1
        largest = 1 if is_bits else int(goal.max()) + 1
        return np.minimum(largest - goal.astype(np.int64), np.iinfo(goal.dtype).max).astype(goal.dtype)
    return goal + 1000 * (1 + np.abs(goal)).astype(goal.dtype)


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
