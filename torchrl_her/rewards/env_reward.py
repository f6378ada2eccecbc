"""The reward of a goal environment, computed by the environment's own functions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_her._torchrl import warn_user
from torchrl_her.keys import get_entry
from torchrl_her.rewards.goal_reward import GoalFunction, GoalReward


class EnvReward(GoalReward):
    """The environment's own ``compute_reward(achieved_goal, desired_goal, info)``.

    If the environment has ``compute_terminated``, it recomputes ``("next", "terminated")``. Both functions are called
    once per batch, with NumPy arrays. The first calls are compared with calls row by row; a function that is not
    batched is called row by row, with a warning.

    Args:
        env: a Gymnasium environment, a TorchRL wrapper of one, or a function that makes either. The outermost Gymnasium
            wrapper that defines ``compute_reward`` is used, and likewise for ``compute_terminated``.

    Keyword Args:
        info_keys (sequence of NestedKey): stored entries that are passed as ``info``, a dictionary from the last part
            of each key to an array ``[batch, ...]`` (or to one row of it, in calls row by row).
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): used instead of the environment's
            ``compute_terminated``; see `GoalReward`.

    Raises:
        TypeError: if the environment has no ``compute_reward``, or if it is a batch of environments.

    Examples:
        >>> import gymnasium, torchrl_her.envs
        >>> from torchrl_her import EnvReward
        >>> reward = EnvReward(gymnasium.make("torchrl_her/PointReach-v0"))
        >>> reward.in_keys
        [('next', 'achieved_goal'), 'desired_goal']
    """

    def __init__(self, env: Any, *, info_keys: Sequence[NestedKey] = (), terminated_fn: GoalFunction | None = None):
        env = _goal_environment(env)
        if terminated_fn is None and _find(env, "compute_terminated") is not None:
            terminated_fn = _EnvFunction(env, "compute_terminated")
        if isinstance(info_keys, str):
            raise TypeError(f"info_keys must be a list of keys, got the string {info_keys!r}: [{info_keys!r}].")
        self.info_keys = tuple(unravel_key(key) for key in info_keys)
        super().__init__(_EnvFunction(env, "compute_reward"), terminated_fn=terminated_fn)

    def evaluate(self, achieved: Tensor, desired: Tensor, tensordict: TensorDictBase) -> list[Any]:  # noqa: D102
        info = {}
        for key in self.info_keys:
            value = get_entry(tensordict, key, "info_keys")
            name = key if isinstance(key, str) else key[-1]
            info[name] = value.reshape(len(desired), *value.shape[tensordict.ndim :]).numpy(force=True)
        return [
            function(achieved, desired, info) if isinstance(function, _EnvFunction) else function(achieved, desired)
            for function in self.functions
        ]


# Rows on which calls with a batch are compared with calls row by row: of one call, in all, and at most in all if the
# values never differ.
ROWS_OF_CALL, ENOUGH_ROWS, MOST_ROWS = 32, 256, 2048


class _Info(dict):
    """The ``info`` argument of a function. Its KeyError says how to add the missing entry."""

    def __init__(self, values: dict[str, np.ndarray], function: str):
        super().__init__(values)
        self.function = function

    def __missing__(self, key: str) -> np.ndarray:
        raise KeyError(
            f"{self.function} reads info[{key!r}], and info has {list(self) or 'nothing'}: name the stored entry with "
            "info_keys=[...]."
        )


class _EnvFunction:
    """A function of a goal environment that takes and returns tensors, called with batches or row by row."""

    def __init__(self, env: Any, name: str):
        self.function = _find(env, name)
        self.name = f"{name} of {_name_of(env)}"
        self.observation_space = getattr(env, "observation_space", None)
        self.batched: bool | None = None  # unknown before the first call
        self._compared, self._to_compare = 0, MOST_ROWS  # rows

    def __call__(self, achieved: Tensor, desired: Tensor, info: dict[str, np.ndarray] | None = None) -> Tensor:
        arrays = (achieved.numpy(force=True), desired.numpy(force=True), info or {})
        if self.batched is None:
            self.batched = self._is_batched(*arrays)
        values = self._batch(*arrays) if self.batched else self._rows(*arrays)
        if self.batched and not torch.compiler.is_compiling() and self._compared < self._to_compare:
            self.batched = self._agrees_with_rows(values, *arrays)
            values = values if self.batched else self._rows(*arrays)
        if values.ndim == 0:  # one value for all goals
            values = np.full(len(achieved), values)
        return torch.as_tensor(values).to(achieved.device)

    def _batch(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(self.function(achieved, desired, _Info(info, self.name)))

    def _rows(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> np.ndarray:
        rows = range(len(achieved))
        infos = [{name: values[row] for name, values in info.items()} for row in rows]
        return np.array([self._batch(achieved[row], desired[row], infos[row]).item() for row in rows])

    def _is_batched(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> bool:
        """Compare the function of a batch, one reached goal and eight others, with its calls row by row."""
        reached = achieved[0].astype(desired.dtype)
        others = self._other_goals(reached)
        probe = (np.stack([reached] * 9), np.stack([reached, *others]))
        infos = {name: values[[0] * 9] for name, values in info.items()}
        expected = self._rows(*probe, infos)
        try:
            values = self._batch(*probe, infos)
        except Exception:  # any error means that it does not take a batch
            values = np.empty(0)
        if values.shape in ((), (9,), (9, 1)) and np.allclose(values.reshape(-1), expected):
            return True
        return self._is_called_row_by_row()

    def _agrees_with_rows(
        self, values: np.ndarray, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]
    ) -> bool:
        """Compare the values of a batch with calls for some of its rows: spread, and those with extreme values."""
        count = len(achieved)
        values = np.broadcast_to(values.reshape(-1), count) if values.size in (1, count) else np.full(count, np.nan)
        spread = np.linspace(0, count - 1, min(count, ROWS_OF_CALL - 2)).astype(int)
        chosen = np.unique([*spread, values.argmin(), values.argmax()])
        infos = {name: entry[chosen] for name, entry in info.items()}
        expected = self._rows(achieved[chosen], desired[chosen], infos)
        self._compared += len(chosen)
        if expected.min() != expected.max():  # of rows whose values are all equal, little can be learned
            self._to_compare = min(self._to_compare, self._compared + ENOUGH_ROWS)
        return np.allclose(values[chosen], expected) or self._is_called_row_by_row()

    def _is_called_row_by_row(self) -> bool:
        warn_user(
            f"{self.name} does not take a batch of goals and is called row by row at every sample, which is slow. Pass "
            "a batched function of your own: GoalReward(reward_fn) in place of EnvReward, or terminated_fn=... for the "
            "end of episodes."
        )
        return False

    def _other_goals(self, reached: np.ndarray) -> list[np.ndarray]:
        """Return eight other goals ``[goal]``: samples of the observation space, or goals near the reached one."""
        space = self.observation_space
        if not isinstance(space, gymnasium.spaces.Dict) or "desired_goal" not in space.spaces:
            wide = reached.astype(np.result_type(reached, np.int64))
            return [(wide + offset).astype(reached.dtype) for offset in (1, -1, 2, -2, 5, -5, 10, -10)]
        space = copy.deepcopy(space["desired_goal"])  # keeps the environment's random state
        space.seed(0)
        goals = [np.asarray(space.sample(), dtype=reached.dtype) for _ in range(8)]
        if goals[0].size != reached.size:
            raise ValueError(
                f"{self.name} takes goals of the shape {goals[0].shape}, and those that are stored have the shape "
                f"{reached.shape}. GymEnv makes one-hot vectors of discrete goals, unless it is given "
                "categorical_action_encoding=True."
            )
        return [goal.reshape(reached.shape) for goal in goals]


def _goal_environment(env: Any) -> Any:
    """Return the environment, or a wrapper of it, that defines ``compute_reward``."""
    is_made = not isinstance(env, (gymnasium.Env, EnvBase)) and callable(env)
    if is_made:
        env = env()
    while isinstance(env, TransformedEnv):
        env = env.base_env
    is_batch = isinstance(env, (SerialEnv, ParallelEnv)) or (isinstance(env, EnvBase) and env.batch_size.numel() > 1)
    if is_batch or isinstance(getattr(env, "unwrapped", env), gymnasium.vector.VectorEnv):
        raise TypeError(
            f"EnvReward needs one environment, not a {type(env).__name__}: pass a function that makes one environment."
        )
    if _find(env, "compute_reward") is None:
        raise TypeError(
            f"EnvReward needs a goal environment, with compute_reward(achieved_goal, desired_goal, info); "
            f"{_name_of(env)} has none. Pass the reward as a function: GoalReward(reward_fn)."
        )
    if is_made and hasattr(env, "reset"):
        env.reset()  # some environments set up their rewards when they are reset
    return env


def _find(env: Any, name: str) -> Any:
    """Return a function of the outermost Gymnasium wrapper that defines it, or of the environment, or None."""
    if hasattr(env, "has_wrapper_attr"):  # also through TorchRL's wrappers
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None
    return getattr(getattr(env, "unwrapped", env), name, None)


def _name_of(env: Any) -> str:
    return type(getattr(env, "unwrapped", env)).__name__
