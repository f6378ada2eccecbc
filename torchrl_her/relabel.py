"""Relabelling, a part of both transforms: goals are replaced and rewards recomputed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase, Transform

from torchrl_her._private import call_with_buffer, without_compiled_call
from torchrl_her.checks.checks import Checks
from torchrl_her.episodes.write import Write, map_goals
from torchrl_her.goals.names import DESIRED_STEP, INITIAL_STEP, split_name
from torchrl_her.goals.strategies import DESIRED, AnyStrategy, Future, goals_apart, make_strategies
from torchrl_her.goals.table import GoalTable, Steps, to_device
from torchrl_her.keys import STEPS_TO_GOAL, HERKeys, check_keys
from torchrl_her.rewards.goal_reward import GoalReward, ReachedReward
from torchrl_her.rewards.returns import Batch, NStepReward, OneStepReward, where

Kind = TypeVar("Kind", bound=Transform)
Reward: TypeAlias = TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor] | None
GoalMap: TypeAlias = Callable[[Tensor], Tensor]


class Relabelling:
    """What a transform relabels, and how: the goals and their strategies, the keys, and the reward.

    Args:
        reward (TensorDictModule or Callable): as in `HERTransform`.
        strategy (str, GoalStrategy or Mapping): as in `HERTransform`.
        keys (HERKeys): the keys of the entries.
        goal_fn (Callable[[Tensor], Tensor] or None): as in `HERTransform`.
    """

    def __init__(self, reward: Reward, strategy: AnyStrategy, keys: HERKeys, goal_fn: GoalMap | None):
        if goal_fn is not None and not callable(goal_fn):
            raise TypeError(f"goal_fn must be a function that maps [batch, *state] to [batch, *goal], got {goal_fn!r}.")
        check_keys(keys)
        self.strategies = make_strategies(strategy, keys)
        self.goal_fn = goal_fn
        self.keys = keys
        self.reward = make_reward(reward, keys, goal_fn)
        self.one_step = OneStepReward(self.reward, keys)
        self.relabels_only_goals = not self.reward.out_keys
        self.apart = goals_apart(self.strategies.values())
        self.goal_keys = (keys.desired_goal, keys.next_desired_goal)
        extra = [key for key in self.strategies if key != DESIRED]
        self.extra_keys = [(key, unravel_key(("next", key))) for key in extra]
        self.extra_replaced = frozenset(key for pair in self.extra_keys for key in pair)
        self.reads_steps = STEPS_TO_GOAL in self.reward.in_keys
        if self.one_step.recompute_all and self.reads_steps:
            raise ValueError(
                "recompute_all=True needs a reward that is computed from the goals, but this one reads the number of "
                "steps to the goal, which transitions with their original goal lack. Replace ReachedReward with "
                "GoalReward(reward_fn, recompute_all=True), or leave recompute_all out."
            )

    def make_checks(self, *, compares: bool = True) -> Checks:
        """Return checks of a transform. If samples contain stored and computed rewards, ``compares`` is True."""
        extra = [key for key, _ in self.extra_keys]
        compares = compares and not self.one_step.recompute_all
        return Checks(self.one_step, self.keys, extra, self.extra_replaced, compares=compares)

    # Writing

    def keep_apart(self, table: GoalTable, tensordict: TensorDictBase, written: Write, steps: Steps) -> None:
        """Keep the goals of new episodes that strategies need apart from outcomes. Call it if `apart` has any."""
        episode, step = split_name(steps.name)
        first = np.flatnonzero(step == 0)
        if len(first):
            rows = written.rows_of(tensordict.select(self.keys.achieved_goal, self.keys.desired_goal))
            self.keep_first_goals(table, episode[first], rows[to_device(first, written.goals.device)])

    def keep_first_goals(self, table: GoalTable, episodes: np.ndarray, first: TensorDictBase) -> None:
        """Keep goals apart, given the first transitions ``[n]`` of episodes, whose ids are ``int64 [n]``."""
        table.keep_apart(episodes, DESIRED_STEP, first.get(self.keys.desired_goal))
        if "initial" in self.apart:
            initial = map_goals(first.get(self.keys.achieved_goal), self.goal_fn).detach()
            table.keep_apart(episodes, INITIAL_STEP, initial.to(table.dtype))

    # Sampling

    def relabel(
        self,
        batch: Batch,
        goals: Sequence[Tensor],
        relabelled: Tensor,
        rewards: OneStepReward | NStepReward,
        *,
        ahead: Tensor | None = None,
        keeps_ahead: bool = False,
        creates_goals: bool = False,
    ) -> None:
        """Set the goals of the transitions to relabel, ``bool [*batch, 1]``, and recompute their rewards.

        Args:
            batch (Batch): the transitions.
            goals (Sequence[Tensor]): the new goals, ``[n, *goal]`` for each strategy.
            relabelled (Tensor): the transitions to relabel.
            rewards (OneStepReward or NStepReward): recomputes the rewards.

        Keyword Args:
            ahead (Tensor, optional): the number of steps to each goal, ``int64 [n]``. Required if the reward reads it.
            keeps_ahead (bool): whether the transitions keep this number.
            creates_goals (bool): whether all transitions get rewards, because they have no stored goals.
        """
        desired, *extra = goals
        for pair, values in zip(self.extra_keys, extra, strict=True):
            for key in pair:
                batch.data.set(key, where(relabelled, values, batch.stored[self.keys.desired_goal]))
        for key in self.goal_keys:
            batch.replace(key, relabelled, desired)
        if ahead is not None:
            own = 0 if creates_goals else -1  # a created goal is the transition's own outcome, zero steps ahead
            batch.data.set(STEPS_TO_GOAL, torch.where(relabelled, ahead.view_as(relabelled), own))
        rewards.recompute(batch, torch.ones_like(relabelled) if creates_goals else relabelled)
        if ahead is not None and not keeps_ahead:
            batch.data.del_(STEPS_TO_GOAL)

    def describe(self, kind: type, arguments: dict[str, Any]) -> str:
        """Return the name of a class, the reward, and the arguments that differ from the defaults of the class.

        Those of a `Relabelling` are added to the given ``arguments``, and entries that are no arguments are ignored.
        """
        strategy = self.strategies if self.extra_keys else self.strategies[DESIRED]
        is_default = repr(strategy) == repr(Future())
        arguments = arguments | {"strategy": "future" if is_default else strategy, "goal_fn": self.goal_fn}
        defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
        changed = [name for name in defaults if name in arguments and arguments[name] != defaults[name]]
        reward = "None" if self.relabels_only_goals else type(self.reward).__name__
        shown = [reward, *(f"{name}={_text_of(arguments[name])}" for name in changed)]
        return f"{kind.__name__}({', '.join(shown)})"


def _text_of(value: Any) -> str:
    """Return the name of a function, a class or the class of a callable object, and the representation of others."""
    return getattr(value, "__name__", type(value).__name__) if callable(value) else repr(value)


def call_transform(replay_buffer: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a buffer's `HERTransform` or `HindsightAugmentation` where the buffer lives.

    The transform of a ``RayReplayBuffer`` is in the actor of the buffer. This function calls the method there, and
    returns a copy of its result. With a buffer of this process, it calls ``getattr(transform, method)``.

    Args:
        replay_buffer (ReplayBuffer): the buffer; also a ``RayReplayBuffer``, or a client of one (``rb.client()``).
        method (str): the name of the method, such as ``"report"`` or ``"flush"``.
        args: positional arguments of the method.
        kwargs: keyword arguments of the method.

    Returns:
        Any: the result of the method.

    Raises:
        AttributeError: if the transform has no such method.
        ValueError: if the buffer has no such transform, or several.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform, call_transform
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> her = HERTransform(EnvReward(env), capacity=1000)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her)
        >>> _ = rb.extend(env.rollout(30))  # the episode would end after 50 steps
        >>> call_transform(rb, "report").running
        1
        >>> call_transform(rb, "flush")
        >>> call_transform(rb, "report").running
        0
    """
    return call_with_buffer(_call_transform, replay_buffer, method, args, kwargs)


def _call_transform(replay_buffer: ReplayBuffer, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = [module for module in replay_buffer.transform.modules() if getattr(module, "relabels", False)]
    if len(found) != 1:
        raise ValueError(
            f"The buffer must have one HERTransform or HindsightAugmentation, but it has {len(found)}: {found}."
        )
    return getattr(found[0], method)(*args, **kwargs)


def make_reward(reward: Reward, keys: HERKeys, goal_fn: GoalMap | None) -> TensorDictModuleBase:
    """Return a reward module that reads and writes the entries under ``keys``."""
    if isinstance(reward, type):
        raise TypeError(f"The reward is the class {reward.__name__}: pass an instance, {reward.__name__}(...).")
    if isinstance(reward, (EnvBase, gymnasium.Env)):
        raise TypeError(
            "The reward must be a module or a function, got an environment: pass HERTransform(EnvReward(env))."
        )
    if reward is None:
        return TensorDictSequential()  # computes nothing
    if not isinstance(reward, TensorDictModuleBase):
        reward = GoalReward(reward)
    if isinstance(reward, (GoalReward, ReachedReward)):
        reward = copy.copy(reward)  # another transform may use the reward with other keys
        reward.set_keys(keys)
    if isinstance(reward, GoalReward):
        reward = reward.with_goal_fn(goal_fn)
    if keys.next_reward not in reward.out_keys:
        raise ValueError(
            f"The reward module must write {keys.next_reward!r}, but its out_keys are {list(reward.out_keys)}. "
            "Change its out_keys, or pass its key, without 'next', as keys=HERKeys(reward=...)."
        )
    return reward


def check_saved_by(name: str, state: dict[str, Any]) -> None:
    """Check that a transform of this class saved the state to load."""
    if "compact" in state:
        raise ValueError(
            "The buffer was saved with CompactGoals, so the stored entries differ. Create the buffer with "
            "Compose(CompactGoals(), HERTransform(...)), then load."
        )
    saved_by = "HindsightAugmentation" if "held" in state else "HERTransform" if "lanes" in state else name
    if saved_by != name:
        raise ValueError(
            f"This state was saved by {saved_by}, not {name}: create the buffer with the transform that saved it, "
            "then load."
        )


def state_of_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a hindsight transform for a copy, in which nothing was sampled or compiled."""
    state = without_compiled_call(state)
    return state | {"_checks": state["_checks"].for_copy(), "_neighbours": None}


def deep_copy(transform: Kind, state: dict[str, Any], memo: dict[int, Any]) -> Kind:
    """Return a transform with a deep copy of a state, for ``__deepcopy__``."""
    copied: Kind = object.__new__(type(transform))
    memo[id(transform)] = copied
    copied.__setstate__(copy.deepcopy(state, memo))
    return copied
