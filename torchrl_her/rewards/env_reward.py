"""The reward of a goal environment, computed by the environment's own functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_her.keys import get_entry
from torchrl_her.rewards.env_function import EnvFunction, find_function, name_of
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
        if terminated_fn is None and find_function(env, "compute_terminated") is not None:
            terminated_fn = EnvFunction(env, "compute_terminated")
        if isinstance(info_keys, str):
            raise TypeError(f"info_keys must be a list of keys, got the string {info_keys!r}: [{info_keys!r}].")
        self.info_keys = tuple(unravel_key(key) for key in info_keys)
        super().__init__(EnvFunction(env, "compute_reward"), terminated_fn=terminated_fn)

    def evaluate(self, achieved: Tensor, desired: Tensor, tensordict: TensorDictBase) -> list[Any]:  # noqa: D102
        info = {}
        for key in self.info_keys:
            value = get_entry(tensordict, key, "info_keys")
            name = key if isinstance(key, str) else key[-1]
            info[name] = value.reshape(len(desired), *value.shape[tensordict.ndim :]).numpy(force=True)
        return [
            function(achieved, desired, info) if isinstance(function, EnvFunction) else function(achieved, desired)
            for function in self.functions
        ]


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
    if find_function(env, "compute_reward") is None:
        raise TypeError(
            f"EnvReward needs a goal environment, with compute_reward(achieved_goal, desired_goal, info); "
            f"{name_of(env)} has none. Pass the reward as a function: GoalReward(reward_fn)."
        )
    if is_made and hasattr(env, "reset"):
        env.reset()  # some environments set up their rewards when they are reset
    return env
