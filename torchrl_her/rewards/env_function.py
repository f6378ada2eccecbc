"""Calls functions of a goal environment with tensors."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.rewards.comparisons import agrees_with_rows, call_rows

# The numbers of rows for which calls with a batch are compared with calls row by row: per call, after the first rows
# with different values, and in total.
ROWS_OF_CALL, ENOUGH_ROWS, MOST_ROWS = 32, 256, 2048


class _Info(dict):
    """The ``info`` argument of a function, whose ``KeyError`` says how to add the missing entry."""

    def __init__(self, values: dict[str, np.ndarray], function: str):
        super().__init__(values)
        self.function = function

    def __missing__(self, key: str) -> np.ndarray:
        raise KeyError(
            f"{self.function} reads info[{key!r}], but info has {list(self) or 'no entries'}. Pass the key of the "
            "stored entry in info_keys=[...]."
        )


class EnvFunction:
    """A function of a goal environment that takes and returns tensors.

    It is called with batches if that gives the same values as calls row by row, and row by row otherwise.
    """

    def __init__(self, env: Any, name: str):
        self.function = find_function(env, name)
        self.name = f"{name} of {name_of(env)}"
        self.observation_space = getattr(env, "observation_space", None)
        self.batched: bool | None = None  # unknown before the first call
        self._compared, self._to_compare = 0, MOST_ROWS  # numbers of rows

    def __call__(self, achieved: Tensor, desired: Tensor, info: dict[str, np.ndarray] | None = None) -> Tensor:
        """Return the values, ``[batch]`` or ``[batch, 1]``, for goals ``[batch, *goal]``."""
        arrays = (to_numpy(achieved), to_numpy(desired), info or {})
        could_be_batched = self.batched is not False
        if self.batched is None:
            self.batched = self._is_batched(*arrays)
        if self.batched:
            values = self._batch(*arrays)
            if not torch.compiler.is_compiling() and self._compared < self._to_compare:
                self.batched = self._agrees_with_rows(values, *arrays)
        if not self.batched:
            if could_be_batched:
                warn_user(
                    f"{self.name} does not take a batch of goals and is called row by row at every sample, which is "
                    "slow. Pass your own batched function: GoalReward(reward_fn) instead of EnvReward for rewards, or "
                    "terminated_fn=... for ends of episodes."
                )
            values = call_rows(self._batch, *arrays)
        if values.ndim == 0:  # one value for all goals
            values = np.full(len(achieved), values)
        return torch.as_tensor(values).to(achieved.device)

    def _batch(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(self.function(achieved, desired, _Info(info, self.name)))

    def _is_batched(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> bool:
        """Compare a call with a batch, one reached goal and eight others, with calls row by row."""
        reached = achieved[0].astype(desired.dtype)
        others = self._other_goals(reached)
        probe = (np.stack([reached] * 9), np.stack([reached, *others]))
        infos = {name: values[[0] * 9] for name, values in info.items()}
        try:
            expected = call_rows(self._batch, *probe, infos)
        except AttributeError as error:
            if not isinstance(error.obj, gymnasium.Env):
                raise
            raise RuntimeError(
                f"{self.name} reads self.{error.name}, which the environment does not have: read the arguments instead "
                "of the running episode's goal, or, if reset sets the attribute, pass an environment that was reset."
            ) from error
        try:
            values = self._batch(*probe, infos)
        except Exception:  # any error means that the function does not accept a batch
            values = np.empty(0)
        return agrees_with_rows(values, expected)

    def _agrees_with_rows(
        self, values: np.ndarray, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]
    ) -> bool:
        """Compare the values of a batch with calls for some rows: evenly spaced ones and the two extreme values."""
        count = len(achieved)
        values = np.broadcast_to(values.reshape(-1), count) if values.size in (1, count) else np.full(count, np.nan)
        spread = np.linspace(0, count - 1, min(count, ROWS_OF_CALL - 2)).astype(int)
        chosen = np.unique([*spread, values.argmin(), values.argmax()])
        infos = {name: entry[chosen] for name, entry in info.items()}
        expected = call_rows(self._batch, achieved[chosen], desired[chosen], infos)
        self._compared += len(chosen)
        if expected.min() != expected.max():  # equal values prove little
            self._to_compare = min(self._to_compare, self._compared + ENOUGH_ROWS)
        return np.allclose(values[chosen], expected)

    def _other_goals(self, reached: np.ndarray) -> list[np.ndarray]:
        """Return eight goals ``[goal]`` besides ``reached``.

        They are samples of the observation space or, without one, goals at some offsets.
        """
        space = self.observation_space
        if not isinstance(space, gymnasium.spaces.Dict) or "desired_goal" not in space.spaces:
            wide = reached.astype(np.result_type(reached, np.int64))
            return [(wide + offset).astype(reached.dtype) for offset in (1, -1, 2, -2, 5, -5, 10, -10)]
        space = copy.deepcopy(space["desired_goal"])  # leaves the environment's random state unchanged
        space.seed(0)
        goals = [np.asarray(space.sample(), dtype=reached.dtype) for _ in range(8)]
        if goals[0].size != reached.size:
            raise ValueError(
                f"{self.name} takes goals of the shape {goals[0].shape}, but stored goals have the shape "
                f"{reached.shape}. GymEnv converts discrete goals to one-hot vectors: pass it "
                "categorical_action_encoding=True."
            )
        return [goal.reshape(reached.shape) for goal in goals]


def to_numpy(values: Tensor) -> np.ndarray:
    """Return an array with the values of a tensor. NumPy has no bfloat16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)


def find_function(env: Any, name: str) -> Any:
    """Return the function of the outermost Gymnasium wrapper that defines it, or of the environment, or None."""
    if hasattr(env, "has_wrapper_attr"):  # TorchRL's wrappers forward it
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None
    return getattr(getattr(env, "unwrapped", env), name, None)


def name_of(env: Any) -> str:
    """Return the class name of an environment without its wrappers."""
    return type(getattr(env, "unwrapped", env)).__name__
