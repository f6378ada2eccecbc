"""Rewards that the environment's own functions compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_her.keys import get_entry, path_of
from torchrl_her.rewards.env_function import EnvFunction, find_function, name_of, to_numpy
from torchrl_her.rewards.goal_reward import GoalFunction, GoalReward


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
