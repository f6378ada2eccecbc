"""Rewards, and ends of episodes, that are functions of the goals."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_her.keys import STEPS_TO_GOAL, HERKeys

GoalFunction = Callable[[Tensor, Tensor], Tensor]


class GoalReward(TensorDictModuleBase):
    """Reward as a function of the achieved and the desired goal.

    The module reads ``("next", "achieved_goal")`` and ``"desired_goal"``, and writes ``("next", "reward")`` and, with
    ``terminated_fn``, ``("next", "terminated")``, ``[*batch, 1]`` each, in the dtypes that the functions return.
    `HERTransform` wraps plain functions in ``GoalReward`` and sets its keys.

    Args:
        reward_fn (Callable[[Tensor, Tensor], Tensor]): maps achieved and desired goals, ``[batch, *goal]`` each, to
            rewards ``[batch]`` or ``[batch, 1]``, without modifying the goals. Several batch dimensions are flattened
            to one. If it is an ``nn.Module``, the transform includes its parameters.

    Keyword Args:
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): maps the same goals to bools, ``[batch]`` or
            ``[batch, 1]``: whether the achieved goal ends the episode. Pass it if the environment terminates on
            success. By default, ``terminated`` keeps its stored value.
        recompute_all (bool): whether the transform also recomputes the reward of transitions that keep their goal. Use
            it for a learned reward, which changes during training. Default: False.

    Raises:
        TypeError: if a function cannot be called with two arguments or, when called, if it returns None.
        ValueError: when called, if a function returns a tensor of another shape.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_her import GoalReward
        >>> reward = GoalReward(lambda achieved, desired: -(achieved - desired).norm(dim=-1))
        >>> goals = {"desired_goal": torch.ones(5, 2), "next": {"achieved_goal": torch.ones(5, 2)}}
        >>> reward(TensorDict(goals, batch_size=5))["next", "reward"].shape
        torch.Size([5, 1])
    """

    info_keys: tuple[NestedKey, ...] = ()  # keys of the entries that are read in addition to the goals

    def __init__(
        self, reward_fn: GoalFunction, *, terminated_fn: GoalFunction | None = None, recompute_all: bool = False
    ):
        super().__init__()
        self.recompute_all = bool(recompute_all)
        self.functions = [_with_two_arguments(reward_fn, "the reward function")]
        if terminated_fn is not None:
            self.functions.append(_with_two_arguments(terminated_fn, "terminated_fn"))
        for place, function in enumerate(self.functions):
            if isinstance(function, nn.Module):  # registered, so that a learned reward is moved and saved
                self.add_module(f"function_{place}", function)
        self.goal_fn: Callable[[Tensor], Tensor] | None = None
        self.set_keys(HERKeys())

    def set_keys(self, keys: HERKeys) -> None:
        """Set the keys that are read and written."""
        self.in_keys = [keys.next_achieved_goal, keys.desired_goal, *self.info_keys]
        self.out_keys = [keys.next_reward, keys.next_terminated][: len(self.functions)]

    def with_goal_fn(self, goal_fn: Callable[[Tensor], Tensor] | None) -> GoalReward:
        """Return a shallow copy that applies ``goal_fn`` to the achieved goals first.

        The copy does not register ``goal_fn`` if it is a module, since it belongs to the transform.
        """
        reward = copy.copy(self)
        reward.goal_fn = None if goal_fn is None else partial(goal_fn)
        return reward

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward, and ``terminated`` with ``terminated_fn``, into transitions ``[*batch]``; return them."""
        for key, values in zip(self.out_keys, self.compute(tensordict), strict=True):
            tensordict.set(key, values)
        return tensordict

    def compute(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the reward, and ``terminated`` with ``terminated_fn``, of transitions: ``[*batch, 1]`` each."""
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
                raise TypeError(f"The function for {key!r} must return one value per row, but it returned None.")
            values = torch.as_tensor(values)
            if values.shape not in ((count,), (count, 1)):
                raise ValueError(
                    f"The function for {key!r} returned the shape {tuple(values.shape)} for goals of the shape "
                    f"{tuple(desired.shape)}. It must return one value per row, {(count,)} or {(count, 1)}: a norm, "
                    "for example, needs dim=-1."
                )
            computed.append(values.reshape(*batch, 1))
        return computed

    def evaluate(self, achieved: Tensor, desired: Tensor, tensordict: TensorDictBase) -> list[Any]:
        """Return the rewards, and the flags with ``terminated_fn``, for goals ``[batch, *goal]``."""
        return [function(achieved, desired) for function in self.functions]


class SparseReward(GoalReward):
    """Sparse reward: 0 within a distance of the goal and -1 outside.

    The module writes ``("next", "reward")``, ``float32 [*batch, 1]``, on the device of the goals.

    Args:
        threshold (float): the largest distance at which a goal counts as reached, in units of the goal. The distance
            is Euclidean over all dimensions. With 0, the goals must be equal.

    Keyword Args:
        terminated_fn (Callable[[Tensor, Tensor], Tensor], optional): as in `GoalReward`.
        recompute_all (bool): as in `GoalReward`. Default: False.

    Raises:
        ValueError: if ``threshold`` is negative or not a number.
        TypeError: if ``terminated_fn`` cannot be called with two arguments.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_her import SparseReward
        >>> achieved = torch.tensor([[0.0, 0.04], [1.0, 0.0]])
        >>> goals = {"desired_goal": torch.zeros(2, 2), "next": {"achieved_goal": achieved}}
        >>> SparseReward(0.05)(TensorDict(goals, batch_size=2))["next", "reward"].flatten()
        tensor([ 0., -1.])
    """

    def __init__(self, threshold: float, *, terminated_fn: GoalFunction | None = None, recompute_all: bool = False):
        if not isinstance(threshold, Real) or not threshold >= 0:
            raise ValueError(f"threshold is a distance and must be at least 0, got {threshold!r}.")
        reward_fn = partial(_sparse_reward, threshold=threshold)
        super().__init__(reward_fn, terminated_fn=terminated_fn, recompute_all=recompute_all)


def _sparse_reward(achieved: Tensor, desired: Tensor, *, threshold: float) -> Tensor:
    if desired.is_floating_point():
        achieved = achieved.to(desired.dtype)  # the dtype of the goals in the table
    elif not achieved.is_floating_point():  # differences of unsigned integers (bits, pixels) would wrap around
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
    with contextlib.suppress(ValueError):  # some built-in functions do not have a signature
        signature = inspect.signature(function)
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"{name} is called with two arguments, (achieved_goal, desired_goal), but its signature is "
                f"{signature}: {error}. If a reward needs other entries, such as the action, pass a TensorDictModule "
                "that reads them."
            ) from None
    return function


class ReachedReward(TensorDictModuleBase):
    """Reward for goals without a distance: 0 and terminated if a transition achieved its new goal itself, otherwise -1.

    Use it for images and whole observations, as in OGBench ([Park et al., 2024](https://arxiv.org/abs/2410.20092)). The
    module reads ``("hindsight", "steps_to_goal")``, ``int64 [*batch, 1]``, which the hindsight transform provides.
    It writes ``("next", "reward")``, ``float32 [*batch, 1]``, and ``("next", "terminated")``, ``bool [*batch, 1]``. A
    goal counts as reached only at the step that achieved it, even if another step achieved an equal goal.

    Transitions that are not relabelled keep their stored reward. Store rewards of 0 and -1, or pass ``her_ratio=1``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_her import HERTransform, ReachedReward
        >>> steps = TensorDict({"hindsight": {"steps_to_goal": torch.tensor([[0], [3]])}}, batch_size=2)
        >>> ReachedReward()(steps)["next", "reward"].flatten()
        tensor([ 0., -1.])
        >>> HERTransform(ReachedReward(), her_ratio=1.0, capacity=1000)
        HERTransform(ReachedReward, her_ratio=1.0, capacity=1000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = [STEPS_TO_GOAL]
        self.set_keys(HERKeys())

    def set_keys(self, keys: HERKeys) -> None:
        """Set the keys that are written."""
        self.out_keys = [keys.next_reward, keys.next_terminated]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward and ``terminated`` into transitions ``[*batch]`` and return them."""
        reached = tensordict.get(STEPS_TO_GOAL) == 0
        tensordict.set(self.out_keys[0], reached.float().sub_(1.0))
        return tensordict.set(self.out_keys[1], reached)
