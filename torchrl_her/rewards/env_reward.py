"""Rewards that the environment's own functions compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_her._private import warn_user
from torchrl_her.keys import get_entry, path_of
from torchrl_her.rewards.comparisons import agrees_with_rows, call_rows
from torchrl_her.rewards.goal_reward import GoalFunction, GoalReward

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
        space = getattr(env, "observation_space", None)
        spaces = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
        self.goal_shape = spaces["desired_goal"].shape if "desired_goal" in spaces else None
        self.batched = True  # until a comparison shows otherwise
        self._to_compare = MOST_ROWS

    def __call__(self, achieved: Tensor, desired: Tensor, info: dict[str, np.ndarray] | None = None) -> Tensor:
        """Return the values, ``[batch]`` or ``[batch, 1]``, for goals ``[batch, *goal]``."""
        arrays = (to_numpy(achieved), to_numpy(desired), info or {})
        is_unknown = self._to_compare == MOST_ROWS  # then calls are compared even while they are compiled
        is_due = is_unknown or (self._to_compare > 0 and not torch.compiler.is_compiling())
        if self.batched and is_due and len(achieved):
            self._compare(*arrays)
        values = self._batch(*arrays) if self.batched else call_rows(self._batch, *arrays)
        if values.ndim == 0:  # one value for all goals
            values = np.full(len(achieved), values)
        return torch.as_tensor(values).to(achieved.device)

    def _batch(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(self.function(achieved, desired, _Info(info, self.name)))

    def _compare(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Compare a call with some rows, every second one of which reaches its goal, with calls row by row."""
        if self.goal_shape is not None and math.prod(self.goal_shape) != math.prod(desired.shape[1:]):
            raise ValueError(
                f"{self.name} takes goals of the shape {self.goal_shape}, but stored goals have the shape "
                f"{desired.shape[1:]}. GymEnv converts discrete goals to one-hot vectors: pass it "
                "categorical_action_encoding=True."
            )
        rows = np.linspace(0, len(achieved) - 1, min(len(achieved), ROWS_OF_CALL)).astype(int)
        rows = rows.repeat(2) if len(rows) < 2 else rows
        achieved, desired, info = achieved[rows], desired[rows], {name: entry[rows] for name, entry in info.items()}
        desired[::2] = achieved[::2]
        try:
            expected = call_rows(self._batch, achieved, desired, info)
        except AttributeError as error:
            if not isinstance(error.obj, gymnasium.Env):
                raise
            raise RuntimeError(
                f"{self.name} reads self.{error.name}, which the environment does not have: read the arguments instead "
                "of the running episode's goal, or, if reset sets the attribute, pass an environment that was reset."
            ) from error
        try:
            values = self._batch(achieved, desired, info)
        except Exception:  # any error means that the function does not accept a batch
            values = np.empty(0)
        self._to_compare -= len(rows)
        if expected.min() != expected.max():  # equal values prove little
            self._to_compare = min(self._to_compare, ENOUGH_ROWS)
        self.batched = agrees_with_rows(values, expected)
        if not self.batched:
            warn_user(
                f"{self.name} does not take a batch of goals and is called row by row at every sample, which is slow. "
                "Pass your own batched function: GoalReward(reward_fn) instead of EnvReward for rewards, or "
                "terminated_fn=... for ends of episodes."
            )


def find_function(env: Any, name: str) -> Any:
    """Return the function of the outermost Gymnasium wrapper that defines it, or of the environment, or None."""
    if hasattr(env, "has_wrapper_attr"):  # TorchRL's wrappers forward it
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None
    return getattr(getattr(env, "unwrapped", env), name, None)


def name_of(env: Any) -> str:
    """Return the class name of an environment without its wrappers."""
    return type(getattr(env, "unwrapped", env)).__name__


def to_numpy(values: Tensor) -> np.ndarray:
    """Return an array with the values of a tensor. NumPy has no bfloat16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)


class EnvReward(GoalReward):
    """Reward from the environment's own ``compute_reward(achieved_goal, desired_goal, info)``.

    The module writes ``("next", "reward")``, ``[*batch, 1]``. If the environment also has ``compute_terminated`` with
    the same arguments, it writes ``("next", "terminated")``, too. Both functions are called once per batch, with NumPy
    arrays ``[batch, *goal]``. The first calls are compared with calls row by row. A function that does not support
    batches is called row by row, and a warning is issued.

    Args:
        env (gymnasium.Env | EnvBase | Callable | str): a Gymnasium environment, a TorchRL wrapper of one, a function
            without arguments that returns either, or the id of a Gymnasium environment. If Gymnasium wrappers define
            one of the two functions, the function of the outermost wrapper is used.

    Keyword Args:
        info_keys (Sequence[NestedKey]): keys of stored entries to pass as ``info``. ``info`` maps the last part of each
            key to an array ``[batch, ...]``, or to a single row if the function is called row by row. Default: none.
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): replaces the environment's
            ``compute_terminated``, as in `GoalReward`.
        recompute_all (bool): as in `GoalReward`. Default: False.

    Raises:
        TypeError: if the environment has no ``compute_reward``, if it is a batch of environments, if ``info_keys`` is a
            string, or if ``terminated_fn`` cannot be called with two arguments.
        KeyError: when called, if an entry of ``info_keys`` is missing, or if the environment reads another entry of
            ``info``.
        RuntimeError: when called, if a function reads an attribute of the environment that only ``reset`` sets, and
            ``env`` was never reset.
        ValueError: when called, if a function returns an array of the wrong shape, or expects goals of another shape.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward
        >>> reward = EnvReward("torchrl_her/PointReach-v0")
        >>> achieved = torch.tensor([[0.0, 0.0], [0.5, 0.0]])
        >>> goals = {"desired_goal": torch.zeros(2, 2), "next": {"achieved_goal": achieved}}
        >>> reward(TensorDict(goals, batch_size=2))["next", "reward"].flatten()
        tensor([ 0., -1.])
    """

    def __init__(
        self,
        env: Any,
        *,
        info_keys: Sequence[NestedKey] = (),
        terminated_fn: GoalFunction | None = None,
        recompute_all: bool = False,
    ):
        env = _goal_environment(env)
        if terminated_fn is None and find_function(env, "compute_terminated") is not None:
            terminated_fn = EnvFunction(env, "compute_terminated")
        if isinstance(info_keys, str):
            raise TypeError(f"info_keys must be a list of keys, got the string {info_keys!r}: pass [{info_keys!r}].")
        self.info_keys = tuple(unravel_key(key) for key in info_keys)
        super().__init__(EnvFunction(env, "compute_reward"), terminated_fn=terminated_fn, recompute_all=recompute_all)

    def evaluate(self, achieved: Tensor, desired: Tensor, tensordict: TensorDictBase) -> list[Any]:  # noqa: D102
        info = {}
        for key in self.info_keys:
            value = get_entry(tensordict, key, "info_keys")
            info[path_of(key)[-1]] = to_numpy(value.reshape(len(desired), *value.shape[tensordict.ndim :]))
        return [
            function(achieved, desired, info) if isinstance(function, EnvFunction) else function(achieved, desired)
            for function in self.functions
        ]


def open_env(env: Any) -> tuple[Any, bool]:
    """Return an environment, given also its id or a function that creates it, and whether it was created here.

    TorchRL's transforms are left out.
    """
    is_made = isinstance(env, str) or (callable(env) and not isinstance(env, (gymnasium.Env, EnvBase)))
    if is_made:
        env = gymnasium.make(env) if isinstance(env, str) else env()
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env, is_made


def _goal_environment(env: Any) -> Any:
    """Return the environment to use, and check that it has ``compute_reward``."""
    env, is_made = open_env(env)
    is_batch = isinstance(env, (SerialEnv, ParallelEnv)) or (isinstance(env, EnvBase) and env.batch_size.numel() > 1)
    if is_batch or isinstance(getattr(env, "unwrapped", env), gymnasium.vector.VectorEnv):
        raise TypeError(
            f"EnvReward needs a single environment, got a {type(env).__name__}: pass a function that creates one "
            "environment."
        )
    if find_function(env, "compute_reward") is None:
        raise TypeError(
            f"EnvReward needs a goal environment, with compute_reward(achieved_goal, desired_goal, info); "
            f"{name_of(env)} has none. Pass the reward as a function: GoalReward(reward_fn)."
        )
    if is_made and hasattr(env, "reset"):
        env.reset()  # some environments set up their reward in reset
    return env
