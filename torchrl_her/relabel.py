"""The base of both transforms: goals are replaced, and rewards recomputed."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeVar

import gymnasium
import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase, Transform

from torchrl_her._torchrl import without_compiled_call
from torchrl_her.diagnosis.goal_copies import GoalCopies, warn_if_goal_is_copied
from torchrl_her.episodes.transitions import WrittenTransitions, read_transitions
from torchrl_her.goals.strategies import GoalStrategy, make_strategy
from torchrl_her.goals.table import GoalTable, WriteLock
from torchrl_her.keys import HERKeys, get_entry
from torchrl_her.rewards.goal_reward import GoalReward

RELABELLED = ("hindsight", "relabelled")
# The entry of the stamps, int64 [*batch, 2]: episode and step. Two entries would make writing slower.
STAMP = "hindsight_stamp"
FIRST_ROWS = 64  # rows of the first write on which the reward module is checked

Self = TypeVar("Self", bound="RelabelTransform")


@dataclass
class Batch:
    """Transitions that are being relabelled."""

    data: TensorDictBase  # [*batch], a shallow copy that the new entries are set in
    stored: dict[NestedKey, Tensor]  # the entries that relabelling replaces, as stored


@dataclass
class SampledBatch(Batch):
    """Transitions that are relabelled when they are sampled; n is the number of transitions in ``[*batch]``."""

    table: GoalTable
    episode: Tensor  # int64 [n]
    step: Tensor  # int64 [n]
    longest_window: int  # the most steps that a stored transition spans
    outcomes: Tensor | None = None  # [n, longest_window, *goal], the goals achieved in each window of n-step returns


class Rewards(Protocol):
    """Recomputes the rewards of relabelled transitions: one-step or n-step rewards."""

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the entries that `recompute` replaces."""

    def available(self, batch: SampledBatch) -> Tensor | bool:
        """Return which rewards can be recomputed from the goal table: ``bool [n]``, or True for all."""

    def recompute(self, batch: SampledBatch, relabelled: Tensor) -> None:
        """Set the rewards and done flags of relabelled transitions, ``bool [*batch, 1]``; others keep theirs."""


class OneStepReward:
    """The reward of one step, and the done flags if the reward module writes ``terminated``."""

    def __init__(self, reward: TensorDictModuleBase, keys: HERKeys):
        self.reward = reward
        self.keys = keys
        self._recomputed = [key for key in (keys.reward, keys.terminated) if key in reward.out_keys]
        self.replaced_keys = list(self._recomputed)
        if keys.terminated in self._recomputed:
            self.replaced_keys.append(keys.done)
        self._read = [key for key in self.replaced_keys if key in reward.in_keys]
        self._writes_more = len(reward.out_keys) > len(self._recomputed)

    def check(self, tensordict: TensorDictBase) -> None:
        """Check the reward module on written transitions ``[*batch]``, and warn if its rewards differ from theirs.

        Raises:
            KeyError: if an entry that relabelling replaces is missing.
            ValueError: if the reward has another shape.
        """
        for key in self.replaced_keys:
            get_entry(tensordict, key, "reward_key" if key == self.keys.reward else "done_key")
        rows = tensordict.reshape(-1)
        if self.keys.mask is not None:
            rows = rows[rows.get(self.keys.mask).reshape(-1)]
        # With a single row, a wrong shape can look like the right one.
        rows = rows[:FIRST_ROWS] if len(rows) > 1 else tensordict.reshape(-1)[:1].expand(2)
        with torch.no_grad():
            computed = self.reward(rows.clone())  # the user's function may modify its arguments
        check_reward(computed, rows, self.keys.reward)
        warn_if_rewards_differ(computed.get(self.keys.reward), rows.get(self.keys.reward))

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:  # noqa: D102
        return self.replaced_keys

    def available(self, batch: SampledBatch) -> bool:  # noqa: D102
        return True

    def recompute(self, batch: Batch, relabelled: Tensor) -> None:  # noqa: D102
        data, stored = batch.data, batch.stored
        for key in self._read:
            data.set(key, stored[key])
        computed = self.reward(data.copy() if self._writes_more else data)
        for key in self._recomputed:
            data.set(key, where(relabelled, computed.get(key).detach(), stored[key]))
        if self.keys.done in stored:
            ended = data.get(self.keys.terminated)
            truncated = data.get(self.keys.truncated, None)
            if truncated is not None:
                ended = ended | truncated
            data.set(self.keys.done, where(relabelled, ended, stored[self.keys.done]))


class BufferTransform(Transform):
    """A transform of replay buffers, which refuses to be one of an environment."""

    def set_container(self, container: Transform | EnvBase) -> None:
        """Set the container, which must not be an environment."""
        super().set_container(container)
        if self.parent is not None:
            self.reset_parent()
            name = type(self).__name__
            raise ValueError(
                f"{name} is a transform of replay buffers and cannot be a transform of an environment: pass it to the "
                f"buffer, ReplayBuffer(transform={name}(...))."
            )


class RelabelTransform(BufferTransform):
    """A transform that relabels transitions: `HERTransform` and `HindsightAugmentation`."""

    def __init__(
        self,
        reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
        strategy: str | GoalStrategy,
        keys: HERKeys,
        goal_fn: Callable[[Tensor], Tensor] | None,
    ):
        super().__init__()
        check_goal_fn(goal_fn)
        self.strategy = make_strategy(strategy)
        self.goal_fn = goal_fn
        self.keys = keys
        self.reward = make_reward(reward, keys, goal_fn)
        self._one_step = OneStepReward(self.reward, keys)
        self._goal_keys = (keys.desired, keys.next_desired)
        self._lock = WriteLock()
        self._process = os.getpid()  # the process that owns the open lanes
        self._neighbours: Any = None  # the other transforms of the buffer; None before the first write
        self._is_checked = False  # whether the reward module was checked on the first write
        self._copies: GoalCopies | None = GoalCopies()  # None when the search is over

    def _read(
        self, tensordict: TensorDictBase, earlier_goal: Tensor | None, rewritten: set[NestedKey] | None
    ) -> WrittenTransitions:
        """Check and read transitions ``[*batch]``.

        Args:
            tensordict: the transitions.
            earlier_goal: a goal ``[*goal]`` of an earlier write, if there was one.
            rewritten: entries that other transforms write or drop in every sample; None to skip the search for copies
                of the desired goal.
        """
        written = read_transitions(tensordict, self.keys, self.goal_fn, earlier_goal)
        if not self._is_checked:
            self._one_step.check(tensordict)
            self._is_checked = True
        copies = self._copies  # which another thread may set to None
        if copies is not None and rewritten is not None:
            copies = warn_if_goal_is_copied(tensordict, self.keys, rewritten, copies)
            self._copies = None if self._copies is None else copies
        return written

    def _set_goals(self, batch: Batch, goals: Tensor, relabelled: Tensor) -> None:
        """Give goals ``[n, *goal]`` to the relabelled transitions, ``bool [*batch, 1]``."""
        for key in self._goal_keys:
            batch.data.set(key, where(relabelled, goals, batch.stored[key]))

    def clone(self: Self) -> Self:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._state_of_copy(), memo))  # with the open lanes
        return copied

    def _state_of_copy(self) -> dict[str, Any]:
        return without_compiled_call(super().__getstate__()) | {"_neighbours": None}


def make_reward(
    reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
    keys: HERKeys,
    goal_fn: Callable[[Tensor], Tensor] | None,
) -> TensorDictModuleBase:
    """Return a reward module that reads and writes the entries under ``keys``.

    Raises:
        TypeError: if the reward is neither a module nor a function.
        ValueError: if the module does not write the reward.
    """
    if isinstance(reward, (EnvBase, gymnasium.Env)):
        raise TypeError("The reward is a module or a function, not an environment: HERTransform(EnvReward(env)).")
    if not isinstance(reward, TensorDictModuleBase):
        reward = GoalReward(reward)
    if isinstance(reward, GoalReward):
        reward = reward.with_goal_fn(goal_fn)  # a copy: another transform may use the reward with other keys
        reward.set_keys(
            achieved_goal=keys.achieved,
            desired_goal=keys.desired,
            reward=keys.reward[1:],
            terminated=keys.terminated[1:],
        )
    if keys.reward not in reward.out_keys:
        raise ValueError(
            f"The reward module writes {list(reward.out_keys)} and not {keys.reward!r}: give it that out_key, or name "
            "the one it has with reward_key=... (without 'next')."
        )
    return reward


def where(relabelled: Tensor, new: Tensor, stored: Tensor) -> Tensor:
    """Return new entries for relabelled transitions, ``bool [*batch, 1]``, and stored entries for the others.

    Args:
        relabelled: which transitions are relabelled.
        new: ``[*batch, ...]``, or with the batch dimensions flattened ``[n, ...]``.
        stored: ``[*batch, ...]``.
    """
    if stored.ndim != relabelled.ndim:
        batch = relabelled.shape[:-1]
        relabelled = relabelled.view([*batch, *[1] * (stored.ndim - len(batch))])
    if new.shape != stored.shape:
        new = new.reshape(stored.shape)
    return torch.where(relabelled, new.to(stored.dtype), stored)  # an earlier transform may have cast the stored entry


def check_at_least_one(name: str, value: int) -> int:
    """Check that an argument is an integer of at least one, and return it as an ``int``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return int(value)


def check_goal_fn(goal_fn: object) -> None:
    """Check that ``goal_fn`` is a function."""
    if goal_fn is not None and not callable(goal_fn):
        raise TypeError(f"goal_fn must be a function of achieved goals [batch, *state], got {goal_fn!r}.")


def check_reward(computed: TensorDictBase, stored: TensorDictBase, reward_key: NestedKey) -> None:
    """Check that the reward module writes rewards of the stored shape."""
    reward, expected = computed.get(reward_key, None), get_entry(stored, reward_key, "reward_key")
    if reward is None or reward.shape != expected.shape:
        got = "nothing" if reward is None else f"the shape {tuple(reward.shape)}"
        raise ValueError(
            f"The reward module wrote {got} under {reward_key!r} where rewards of the shape {tuple(expected.shape)} "
            "are stored: it must write one of the same shape."
        )


def warn_if_rewards_differ(computed: Tensor, stored: Tensor) -> None:
    """Warn if the reward module's rewards for the stored goals differ from the stored rewards, ``[rows, ...]``."""
    new, old = computed.double().flatten(), stored.double().flatten().to(computed.device)
    differs = ~torch.isclose(new, old, rtol=1e-3, atol=1e-3, equal_nan=True)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        warnings.warn(
            f"The reward module gives {new[row]:.6g} for a transition whose stored reward is {old[row]:.6g}: "
            "relabelled and original rewards would be inconsistent. Use the environment's own, "
            "EnvReward(env), and scale rewards after HERTransform.",
            stacklevel=2,
        )


def get_stamp(tensordict: TensorDictBase) -> Tensor:
    """Return the stamps of sampled transitions."""
    stamp = tensordict.get(STAMP, None)
    if not isinstance(stamp, Tensor):
        raise KeyError(
            f"The sampled transitions carry no stamp under {STAMP!r}: they were written before HERTransform was part "
            "of the buffer, or a transform listed before it takes the stamp away. Make the buffer with "
            "transform=HERTransform(...), then extend it."
        )
    return stamp


def check_are_sampled(stored: dict[NestedKey, Tensor], keys: HERKeys) -> None:
    """Check that the goals and the reward are in a sample."""
    if stored[keys.next_desired] is None and stored[keys.desired] is not None:
        raise KeyError(
            f"The sample has no entry {keys.next_desired!r}. If the transitions were written with CompactGoals, list "
            "it here, too: Compose(CompactGoals(), HERTransform(...))."
        )
    for key in (keys.desired, keys.reward):
        if stored[key] is None:
            raise KeyError(
                f"The sample has no entry {key!r}, although it was written: list the transform that drops it after "
                "HERTransform."
            )
