"""Reward modules: what a relabelled transition earns, and whether it ends the episode."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

GoalFunction = Callable[[Tensor, Tensor], Tensor]


class GoalReward(TensorDictModuleBase):
    """The reward as a function of the achieved and the desired goal.

    It reads ``("next", achieved_goal)`` and ``desired_goal`` and writes ``("next", "reward")``, and with
    ``terminated_fn`` also ``("next", "terminated")``. `HERTransform` makes one of any callable that it is
    given, and sets the keys to its own.

    Args:
        reward_fn (Callable[[Tensor, Tensor], Tensor]): maps achieved and desired goals ``[batch, *goal]`` to
            rewards ``[batch]`` or ``[batch, 1]``. Several batch dimensions come flattened to one.

    Keyword Args:
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): maps the same to bools: whether the
            achieved goal ends the episode, for environments that terminate on success. By default
            ``terminated`` stays as stored.

    Raises:
        TypeError: if a function cannot be called with two arguments.
        ValueError: on the first call, if a function returns another shape.

    Examples:
        >>> from tensordict import TensorDict
        >>> reward = GoalReward(lambda achieved, desired: -(achieved - desired).norm(dim=-1))
        >>> goals = {"desired_goal": torch.ones(5, 2), "next": {"achieved_goal": torch.ones(5, 2)}}
        >>> reward(TensorDict(goals, batch_size=5))["next", "reward"].shape
        torch.Size([5, 1])
    """

    info_keys: tuple[NestedKey, ...] = ()  # what is read besides the goals

    def __init__(self, reward_fn: GoalFunction, *, terminated_fn: GoalFunction | None = None):
        super().__init__()
        self.functions = [_with_two_arguments(reward_fn, "the reward function")]
        if terminated_fn is not None:
            self.functions.append(_with_two_arguments(terminated_fn, "terminated_fn"))
        self.goal_fn: Callable[[Tensor], Tensor] | None = None
        self.set_keys()

    def set_keys(
        self,
        *,
        achieved_goal: NestedKey = "achieved_goal",
        desired_goal: NestedKey = "desired_goal",
        reward: NestedKey = "reward",
        terminated: NestedKey = "terminated",
    ) -> None:
        """Set the keys that are read and written; all but the desired goal's stand under ``"next"``."""
        self.in_keys = [unravel_key(("next", achieved_goal)), unravel_key(desired_goal), *self.info_keys]
        out_keys = [unravel_key(("next", reward)), unravel_key(("next", terminated))]
        self.out_keys = out_keys[: len(self.functions)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward (and the flag) of the transitions into ``tensordict`` and return it."""
        for key, values in self.compute(tensordict).items():
            tensordict.set(key, values)
        return tensordict

    def compute(self, tensordict: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return the reward (and the flag) of the transitions, ``[*batch, 1]``, by the key it belongs under."""
        batch = tensordict.batch_size
        achieved, desired = tensordict.get(self.in_keys[0]), tensordict.get(self.in_keys[1])
        if len(batch) != 1:
            achieved = achieved.reshape(-1, *achieved.shape[len(batch) :])  # [batch, *state]
            desired = desired.reshape(-1, *desired.shape[len(batch) :])  # [batch, *goal]
        if self.goal_fn is not None:
            achieved = self.goal_fn(achieved)
        count = desired.shape[0]
        computed = {}
        for key, values in zip(self.out_keys, self.evaluate(achieved, desired, tensordict), strict=True):
            if values.shape != (count,) and values.shape != (count, 1):
                raise ValueError(
                    f"The function for {key!r} returned the shape {tuple(values.shape)} for goals of the shape "
                    f"{tuple(desired.shape)}: it must return one value per row, {(count,)} or {(count, 1)}. "
                    "A norm, for example, needs dim=-1."
                )
            computed[key] = values.reshape(*batch, 1)
        return computed

    def evaluate(self, achieved: Tensor, desired: Tensor, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the values of the functions, the reward's first."""
        return [_as_tensor(function(achieved, desired)) for function in self.functions]


class SparseReward(GoalReward):
    """0 within a distance of the goal, -1 outside, computed where the tensors are.

    The distance is Euclidean, over all dimensions of a goal.

    Args:
        threshold (float): the distance, in units of the goal, up to which a goal counts as reached. With 0
            the goals have to be equal.

    Keyword Args:
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): see `GoalReward`.

    Examples:
        >>> from tensordict import TensorDict
        >>> achieved = torch.tensor([[0.0, 0.04], [1.0, 0.0]])
        >>> goals = {"desired_goal": torch.zeros(2, 2), "next": {"achieved_goal": achieved}}
        >>> SparseReward(0.05)(TensorDict(goals, batch_size=2))["next", "reward"].flatten()
        tensor([ 0., -1.])
    """

    def __init__(self, threshold: float, *, terminated_fn: GoalFunction | None = None):
        if not isinstance(threshold, Real) or not threshold >= 0:
            raise ValueError(f"threshold is a distance and must be 0 or more, got {threshold!r}.")
        super().__init__(partial(_sparse_reward, threshold=threshold), terminated_fn=terminated_fn)


def _sparse_reward(achieved: Tensor, desired: Tensor, *, threshold: float) -> Tensor:
    if not achieved.is_floating_point():  # bits and pixels, whose difference would wrap around
        achieved, desired = achieved.long(), desired.long()
    difference = (achieved - desired).reshape(len(achieved), -1)
    if not difference.is_floating_point():
        difference = difference.double()
    distance = torch.linalg.vector_norm(difference, dim=-1)  # [batch]
    return torch.add(distance <= threshold, -1.0)  # True counts as 1


class EnvReward(GoalReward):
    """The environment's own ``compute_reward(achieved_goal, desired_goal, info)``.

    Where the environment has ``compute_terminated``, ``("next", "terminated")`` is recomputed with it. Both
    are called once per batch, with NumPy arrays. A function that is not batched (on the first call a reached
    and a missed goal find that out) is called row by row, with a warning.

    Args:
        env: a Gymnasium environment, a TorchRL wrapper of one, or a function that makes either.

    Keyword Args:
        info_keys (sequence of NestedKey): stored entries that are handed over as ``info``, a dictionary from
            the last part of each key to an array ``[batch, ...]`` (to its row, where called row by row).
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): takes the place of the environment's
            ``compute_terminated``; see `GoalReward`.

    Raises:
        TypeError: if the environment has no ``compute_reward``, or if it is a batch of environments.

    Examples:
        >>> import gymnasium, torchrl_her.envs
        >>> reward = EnvReward(gymnasium.make("torchrl_her/PointReach-v0"))
        >>> reward.in_keys
        [('next', 'achieved_goal'), 'desired_goal']
    """

    def __init__(
        self,
        env: Any,
        *,
        info_keys: Sequence[NestedKey] = (),
        terminated_fn: GoalFunction | None = None,
    ):
        base = _goal_environment(env)
        if terminated_fn is None and hasattr(base, "compute_terminated"):
            terminated_fn = _EnvFunction(base, "compute_terminated")
        self.info_keys = tuple(unravel_key(key) for key in info_keys)
        super().__init__(_EnvFunction(base, "compute_reward"), terminated_fn=terminated_fn)

    def evaluate(self, achieved: Tensor, desired: Tensor, tensordict: TensorDictBase) -> list[Tensor]:  # noqa: D102
        info = {}
        for key in self.info_keys:
            value = tensordict.get(key)
            name = key if isinstance(key, str) else key[-1]
            info[name] = value.reshape(len(desired), *value.shape[tensordict.ndim :]).numpy(force=True)
        return [
            function(achieved, desired, info)
            if isinstance(function, _EnvFunction)
            else _as_tensor(function(achieved, desired))
            for function in self.functions
        ]


class _EnvFunction:
    """A function of a goal environment, from tensors to tensors, batched or row by row."""

    def __init__(self, env: Any, name: str):
        self.env = env
        self.name = name
        self.batched: bool | None = None  # not known before the first call

    def __call__(self, achieved: Tensor, desired: Tensor, info: dict[str, np.ndarray] | None = None) -> Tensor:
        arrays = (achieved.numpy(force=True), desired.numpy(force=True), info or {})
        if self.batched is None:
            self.batched = self._is_batched(*arrays)
        values = self._batch(*arrays) if self.batched else self._rows(*arrays)
        if values.ndim == 0:  # the same whatever the goals are
            values = np.full(len(achieved), values)
        return torch.as_tensor(values).to(achieved.device)

    def _batch(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(getattr(self.env, self.name)(achieved, desired, info))

    def _rows(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> np.ndarray:
        rows = range(len(achieved))
        infos = [{name: values[row] for name, values in info.items()} for row in rows]
        return np.array([self._batch(achieved[row], desired[row], infos[row]).item() for row in rows])

    def _is_batched(self, achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]) -> bool:
        """Compare a batch of a reached goal and others, most of them missed, with the same row by row."""
        reached = achieved[0].astype(desired.dtype)
        others = self._other_goals(reached)
        probe = (np.stack([reached] * 9), np.stack([reached, *others]))
        infos = {name: values[[0] * 9] for name, values in info.items()}
        expected = self._rows(*probe, infos)
        try:
            values = self._batch(*probe, infos)
        except Exception:  # whatever it raises, it does not take a batch
            values = np.empty(0)
        if values.shape in ((), (9,), (9, 1)) and np.allclose(values.reshape(-1), expected):
            return True
        warnings.warn(
            f"{self.name} of {type(self.env).__name__} does not take a batch of goals and is called row by row "
            "at every sample, which is slow. Pass a batched function of your own: GoalReward(reward_fn) in "
            "place of EnvReward, or terminated_fn=... for the end of episodes.",
            stacklevel=2,
        )
        return False

    def _other_goals(self, reached: np.ndarray) -> list[np.ndarray]:
        """Draw goals ``[goal]``, of the environment where it tells of them, and around the one that is reached."""
        space = getattr(self.env, "observation_space", None)
        if not isinstance(space, gymnasium.spaces.Dict) or "desired_goal" not in space.spaces:
            return [(reached + offset).astype(reached.dtype) for offset in (1, -1, 2, -2, 5, -5, 10, -10)]
        space = copy.deepcopy(space["desired_goal"])  # leaves the environment's draws alone
        space.seed(0)
        return [np.asarray(space.sample(), dtype=reached.dtype).reshape(reached.shape) for _ in range(8)]


def _goal_environment(env: Any) -> Any:
    """Return the innermost environment, which has ``compute_reward``."""
    if not isinstance(env, (gymnasium.Env, EnvBase)) and callable(env):
        env = env()
    while isinstance(env, TransformedEnv):
        env = env.base_env
    if isinstance(env, (SerialEnv, ParallelEnv)):
        raise TypeError(
            f"EnvReward needs one environment, not a {type(env).__name__}: pass a function that makes one of "
            "its environments."
        )
    base = getattr(env, "unwrapped", env)
    if isinstance(base, gymnasium.vector.VectorEnv) or (isinstance(env, EnvBase) and env.batch_size.numel() > 1):
        raise TypeError("EnvReward needs one environment, not a batch of them: pass a function that makes one.")
    if not hasattr(base, "compute_reward"):
        raise TypeError(
            f"EnvReward needs a goal environment, with compute_reward(achieved_goal, desired_goal, info); "
            f"{type(base).__name__} has none. Pass the reward as a function: GoalReward(reward_fn)."
        )
    return base


def _as_tensor(values: Any) -> Tensor:
    if values is None:
        raise TypeError("A function of achieved and desired goals returned None: it must return one value per row.")
    return torch.as_tensor(values)


def _with_two_arguments(function: GoalFunction, name: str) -> GoalFunction:
    """Check that a function can be called as ``function(achieved_goal, desired_goal)``."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of (achieved_goal, desired_goal), got {function!r}.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return function
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{name} is called with two arguments, (achieved_goal, desired_goal), and takes {signature}: {error}. "
            "A reward that needs more (the action, an info entry) is a TensorDictModule that reads it."
        ) from None
    return function
