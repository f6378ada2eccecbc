"""The reward of a relabelled transition as a function of its goals, and whether it ends the episode."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

GoalFunction = Callable[[Tensor, Tensor], Tensor]


class GoalReward(TensorDictModuleBase):
    """The reward as a function of the achieved and the desired goal.

    It reads ``("next", achieved_goal)`` and ``desired_goal``, and writes ``("next", "reward")`` and, with
    ``terminated_fn``, ``("next", "terminated")``. `HERTransform` wraps a callable in it and sets the keys.

    Args:
        reward_fn (Callable[[Tensor, Tensor], Tensor]): maps achieved and desired goals ``[batch, *goal]`` to rewards
            ``[batch]`` or ``[batch, 1]``, without modifying them. Several batch dimensions are flattened to one.

    Keyword Args:
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): maps the same goals to bools: whether the achieved
            goal ends the episode. For environments that terminate on success. By default, ``terminated`` keeps its
            stored value.

    Raises:
        TypeError: if a function cannot be called with two arguments.
        ValueError: on the first call, if a function returns another shape.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_her import GoalReward
        >>> reward = GoalReward(lambda achieved, desired: -(achieved - desired).norm(dim=-1))
        >>> goals = {"desired_goal": torch.ones(5, 2), "next": {"achieved_goal": torch.ones(5, 2)}}
        >>> reward(TensorDict(goals, batch_size=5))["next", "reward"].shape
        torch.Size([5, 1])
    """

    info_keys: tuple[NestedKey, ...] = ()  # entries that are read besides the goals

    def __init__(self, reward_fn: GoalFunction, *, terminated_fn: GoalFunction | None = None):
        super().__init__()
        self.functions = [_with_two_arguments(reward_fn, "the reward function")]
        if terminated_fn is not None:
            self.functions.append(_with_two_arguments(terminated_fn, "terminated_fn"))
        for place, function in enumerate(self.functions):
            if isinstance(function, nn.Module):  # a learned reward is moved and saved with this module
                self.add_module(f"function_{place}", function)
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
        """Set the keys that are read and written. All except ``desired_goal`` are under ``"next"``."""
        self.in_keys = [unravel_key(("next", achieved_goal)), unravel_key(desired_goal), *self.info_keys]
        out_keys = [unravel_key(("next", reward)), unravel_key(("next", terminated))]
        self.out_keys = out_keys[: len(self.functions)]

    def with_goal_fn(self, goal_fn: Callable[[Tensor], Tensor] | None) -> GoalReward:
        """Return a shallow copy that maps achieved goals with ``goal_fn`` before it compares them.

        The copy does not register a ``goal_fn`` that is a module: it belongs to the transform.
        """
        reward = copy.copy(self)
        reward.goal_fn = None if goal_fn is None else partial(goal_fn)
        return reward

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward (and ``terminated``) of transitions ``[*batch]`` into ``tensordict`` and return it."""
        for key, values in zip(self.out_keys, self.compute(tensordict), strict=True):
            tensordict.set(key, values)
        return tensordict

    def compute(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the reward (and ``terminated``) of transitions ``[*batch]``: ``[*batch, 1]`` each."""
        batch = tensordict.batch_size
        achieved, desired = tensordict.get(self.in_keys[0]), tensordict.get(self.in_keys[1])
        if len(batch) != 1:
            achieved = achieved.reshape(-1, *achieved.shape[len(batch) :])  # [batch, *state]
            desired = desired.reshape(-1, *desired.shape[len(batch) :])  # [batch, *goal]
        if self.goal_fn is not None:
            achieved = self.goal_fn(achieved)  # [batch, *goal]
        count, computed = desired.shape[0], []
        for key, values in zip(self.out_keys, self.evaluate(achieved, desired, tensordict), strict=True):
            if values is None:
                raise TypeError(f"The function for {key!r} returned None: it must return one value per row.")
            values = torch.as_tensor(values)
            if values.shape not in ((count,), (count, 1)):
                raise ValueError(
                    f"The function for {key!r} returned the shape {tuple(values.shape)} for goals of the shape "
                    f"{tuple(desired.shape)}: it must return one value per row, {(count,)} or {(count, 1)}. "
                    "A norm, for example, needs dim=-1."
                )
            computed.append(values.reshape(*batch, 1))
        return computed

    def evaluate(self, achieved: Tensor, desired: Tensor, tensordict: TensorDictBase) -> list[Any]:
        """Return the rewards, and with ``terminated_fn`` the flags, of goals ``[batch, *goal]``."""
        return [function(achieved, desired) for function in self.functions]


class SparseReward(GoalReward):
    """0 within a distance of the goal and -1 outside, on the device of the goals.

    Args:
        threshold (float): the Euclidean distance over all dimensions, in units of the goal, up to which a goal is
            reached. With 0 the goals must be equal.

    Keyword Args:
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): see `GoalReward`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_her import SparseReward
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
    if desired.is_floating_point():
        achieved = achieved.to(desired.dtype)  # the dtype in which the table keeps goals
    elif not achieved.is_floating_point():  # bits and pixels, whose difference would wrap around
        achieved, desired = achieved.long(), desired.long()
    difference = achieved - desired
    if difference.ndim != 2:
        difference = difference.reshape(len(difference), difference.shape[1:].numel())
    if not difference.is_floating_point():
        difference = difference.double()
    distance = torch.linalg.vector_norm(difference, dim=-1)  # [batch]
    return distance.le_(threshold).float().sub_(1.0)


def _with_two_arguments(function: GoalFunction, name: str) -> GoalFunction:
    """Check that a function can be called as ``function(achieved_goal, desired_goal)``."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of (achieved_goal, desired_goal), got {function!r}.")
    with contextlib.suppress(ValueError):  # some built-in functions have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"{name} is called with two arguments, (achieved_goal, desired_goal), and takes {signature}: {error}. "
                "A reward that needs more (the action, an info entry) is a TensorDictModule that reads it."
            ) from None
    return function
