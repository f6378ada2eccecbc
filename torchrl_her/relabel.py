"""What the transforms that relabel have in common, whether they do it when sampling or when writing."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase, Transform

from torchrl_her.diagnosis.goal_copies import GoalCopies
from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.episodes.transitions import WrittenTransitions, read_written
from torchrl_her.goals.strategies import GoalStrategy, make_strategy
from torchrl_her.goals.table import WriteLock
from torchrl_her.keys import HERKeys, get_entry
from torchrl_her.neighbours import Neighbours
from torchrl_her.rewards.goal_reward import GoalReward

RELABELLED = ("hindsight", "relabelled")

Self = TypeVar("Self", bound="RelabelTransform")


class RelabelTransform(Transform):
    """A transform of replay buffers that relabels transitions: `HERTransform` and `HindsightAugmentation`."""

    def __init__(
        self,
        reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
        strategy: str | GoalStrategy,
        keys: HERKeys,
        goal_fn: Callable[[Tensor], Tensor] | None,
        tracker: EpisodeTracker,
    ):
        super().__init__()
        check_goal_fn(goal_fn)
        self.strategy = make_strategy(strategy)
        self.goal_fn = goal_fn
        self.keys = keys
        self.reward = make_reward(reward, keys, goal_fn)
        self.tracker = tracker
        self._step_reward = OneStepReward(self.reward, keys)
        self._goal_keys = (keys.desired, keys.next_desired)
        self._replaced = [*self._goal_keys, *self._step_reward.replaced]  # of single steps
        self._lock = WriteLock()
        self._process = os.getpid()
        self._order = Neighbours([], [])
        self._is_checked = False  # what all writes have in common is, in the first one
        self._copies = GoalCopies()

    def _read(
        self, tensordict: TensorDictBase, goal: Tensor | None, written_after: set[NestedKey] | None
    ) -> tuple[WrittenTransitions, np.ndarray | None]:
        """Check transitions ``[*batch]`` and read what of them counts, see `read_written`.

        Args:
            tensordict: the transitions.
            goal: one of those that were written before, if any were.
            written_after: the entries that other transforms write anew in every sample; None where entries that
                contain the desired goal do no harm.
        """
        read = read_written(tensordict, self.keys, self.goal_fn, goal)
        if not self._is_checked:
            self._step_reward.check(tensordict)
            self._is_checked = True
        if self._copies.undecided and written_after is not None:
            self._copies.check(tensordict, self.keys.achieved, self.keys.desired, written_after)
        return read

    def _set_goals(
        self, tensordict: TensorDictBase, relabelled: Tensor, goals: Tensor, stored: dict[NestedKey, Tensor]
    ) -> None:
        """Give goals ``[n, *goal]`` to the transitions that are relabelled, ``bool [*batch, 1]``."""
        for key in self._goal_keys:
            tensordict.set(key, where(relabelled, goals, stored[key]))

    def set_container(self, container: Transform | EnvBase) -> None:
        """Take note of the container, which must not be an environment."""
        super().set_container(container)
        if self.parent is not None:
            self.reset_parent()
            name = type(self).__name__
            raise ValueError(
                f"{name} relabels the transitions of a replay buffer and cannot be a transform of an environment: "
                f"pass it to the buffer, ReplayBuffer(transform={name}(...))."
            )

    def clone(self: Self) -> Self:
        """Return a transform with a state of its own."""
        return copy.deepcopy(self)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._state_of_a_copy(), memo))  # it is nobody else's, and has the lanes
        return copied

    def _state_of_a_copy(self) -> dict[str, Any]:
        # What compile() made works on the table of this one.
        return super().__getstate__() | {"_order": Neighbours([], []), "_compiled_call_impl": None}


def make_reward(
    reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
    keys: HERKeys,
    goal_fn: Callable[[Tensor], Tensor] | None,
) -> TensorDictModuleBase:
    """Return a reward module that reads and writes the entries under ``keys``, of a module or a function of goals.

    Raises:
        TypeError: if it is neither.
        ValueError: if the module does not write the reward.
    """
    if isinstance(reward, (EnvBase, gymnasium.Env)):
        raise TypeError("The reward is a module or a function, not an environment: HERTransform(EnvReward(env)).")
    if not isinstance(reward, TensorDictModuleBase):
        reward = GoalReward(reward)
    if isinstance(reward, GoalReward):
        reward = _with_goal_fn(reward, goal_fn)  # another transform may use it with other keys
        reward.set_keys(
            achieved_goal=keys.achieved,
            desired_goal=keys.desired,
            reward=keys.reward[1:],
            terminated=keys.terminated[1:],
        )
    check_out_keys(reward, keys.reward)
    return reward


def _with_goal_fn(reward: GoalReward, goal_fn: Callable[[Tensor], Tensor] | None) -> GoalReward:
    """Return a copy with that function, which may be a module: its transform's, and not registered here, too.

    Copies have one registry of modules in common.
    """
    reward = copy.copy(reward)
    object.__setattr__(reward, "goal_fn", goal_fn)
    return reward


FIRST_ROWS = 64  # of a write, whose rewards are compared with the reward module's


class OneStepReward:
    """The reward of single steps, and the flags where the reward module tells them.

    Attributes:
        replaced (list of NestedKey): the entries that are set.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: HERKeys):
        self.reward = reward
        self.keys = keys
        self.recomputed = [key for key in (keys.reward, keys.terminated) if key in reward.out_keys]
        self.replaced = list(self.recomputed)
        if keys.terminated in self.recomputed:
            self.replaced.append(keys.done)
        self._read = [key for key in self.replaced if key in reward.in_keys]
        self._is_computed = type(reward).forward is GoalReward.forward
        self._writes_more = len(reward.out_keys) > len(self.recomputed)

    def check(self, tensordict: TensorDictBase) -> None:
        """Check that the reward module can work on written transitions ``[*batch]``, and earns what they earned.

        Raises:
            KeyError: if an entry that is set is missing.
            ValueError: if the reward has another shape.
        """
        for key in self.replaced:
            get_entry(tensordict, key, "reward_key" if key == self.keys.reward else "done_key")
        rows = tensordict.reshape(-1)
        if self.keys.mask is not None:
            rows = rows[rows.get(self.keys.mask).reshape(-1)]
        # Of one row, a wrong shape can look like the right one.
        rows = rows[:FIRST_ROWS] if len(rows) > 1 else tensordict.reshape(-1)[:1].expand(2)
        with torch.no_grad():
            computed = self.reward(rows.clone())  # the user's function may work in place
        check_reward(computed, rows, self.keys.reward)
        warn_if_rewards_differ(computed.get(self.keys.reward), rows.get(self.keys.reward))

    def recompute(self, tensordict: TensorDictBase, relabelled: Tensor, stored: dict[NestedKey, Tensor]) -> None:
        """Set what relabelled transitions, ``bool [*batch, 1]``, earn for their goals; others keep what is stored."""
        for key in self._read:
            tensordict.set(key, stored[key])
        if self._is_computed:  # saves writing what is read again at once
            computed = self.reward.compute(tensordict)
        else:
            computed = self.reward(tensordict.copy() if self._writes_more else tensordict)
        for key in self.recomputed:
            tensordict.set(key, where(relabelled, computed[key].detach(), stored[key]))
        if self.keys.done in stored:
            ended = tensordict.get(self.keys.terminated)
            truncated = tensordict.get(self.keys.truncated, None)
            if truncated is not None:
                ended = ended | truncated
            tensordict.set(self.keys.done, where(relabelled, ended, stored[self.keys.done]))


def where(relabelled: Tensor, new: Tensor, stored: Tensor) -> Tensor:
    """Choose by transition, ``bool [*batch, 1]``, between entries ``[*batch, ...]``."""
    if stored.ndim != relabelled.ndim:
        batch = relabelled.shape[:-1]
        relabelled = relabelled.view([*batch, *[1] * (stored.ndim - len(batch))])
    if new.shape != stored.shape:  # new goals come with the batch dimensions flattened to one
        new = new.reshape(stored.shape)
    return torch.where(relabelled, new.to(stored.dtype), stored)  # one listed before may have cast what is stored


def check_at_least_one(name: str, value: int) -> int:
    """Check that a number of things is a whole number and at least one, and return it as Python's own."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return int(value)


def check_goal_fn(goal_fn: object) -> None:
    """Check that goals can be mapped with it."""
    if goal_fn is not None and not callable(goal_fn):
        raise TypeError(f"goal_fn must be a function of achieved goals [batch, *state], got {goal_fn!r}.")


def check_out_keys(reward: TensorDictModuleBase, reward_key: NestedKey) -> None:
    """Check that the reward module writes the reward."""
    if reward_key not in reward.out_keys:
        raise ValueError(
            f"The reward module writes {list(reward.out_keys)} and not {reward_key!r}: give it that out_key, or name "
            "the one it has with reward_key=... (without 'next')."
        )


def check_reward(computed: TensorDictBase, stored: TensorDictBase, reward_key: NestedKey) -> None:
    """Check that the reward module gives rewards of the shape that is stored."""
    reward, expected = computed.get(reward_key, None), get_entry(stored, reward_key, "reward_key")
    if reward is None or reward.shape != expected.shape:
        got = "nothing" if reward is None else f"the shape {tuple(reward.shape)}"
        raise ValueError(
            f"The reward module wrote {got} under {reward_key!r} where rewards of the shape {tuple(expected.shape)} "
            "are stored: it must write one of the same shape."
        )


def warn_if_rewards_differ(computed: Tensor, stored: Tensor) -> None:
    """Warn if the reward module gives other rewards for the stored goals than are stored, ``[rows, ...]``."""
    new, old = computed.double().flatten(), stored.double().flatten().to(computed.device)
    differs = ~torch.isclose(new, old, rtol=1e-3, atol=1e-3, equal_nan=True)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        warnings.warn(
            f"The reward module gives {new[row]:.6g} for a transition whose stored reward is {old[row]:.6g}: "
            "relabelled transitions would have rewards of another kind than the others. Use the environment's own, "
            "EnvReward(env), and scale rewards after HERTransform.",
            stacklevel=2,
        )
