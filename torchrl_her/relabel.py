"""The base of both transforms: goals are replaced, and rewards recomputed."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

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
FIRST_ROWS = 64  # rows of the first write on which the reward module is checked

Self = TypeVar("Self", bound="RelabelTransform")
Reward: TypeAlias = TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor]
GoalMap: TypeAlias = Callable[[Tensor], Tensor]


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
    longest_window: int  # the most steps that a written transition spans
    outcomes: Tensor | None = None  # [n, longest, *goal], the goals achieved in each window of n-step returns


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
        """Check the reward module on written transitions ``[*batch]``, and warn if its rewards differ from theirs."""
        key = self.keys.reward
        for each in self.replaced_keys:
            get_entry(tensordict, each, "reward_key" if each == key else "done_key")
        rows = tensordict.reshape(-1)
        if self.keys.mask is not None:
            rows = rows[rows.get(self.keys.mask).reshape(-1)]
        # With a single row, a wrong shape can look like the right one.
        rows = rows[:FIRST_ROWS] if len(rows) > 1 else tensordict.reshape(-1)[:1].expand(2)
        with torch.no_grad():
            computed = self.reward(rows.clone()).get(key, None)  # the user's function may modify its arguments
        stored = rows.get(key)
        if computed is None or computed.shape != stored.shape:
            wrote = "nothing" if computed is None else f"the shape {tuple(computed.shape)}"
            raise ValueError(
                f"The reward module wrote {wrote} under {key!r} where rewards of the shape {tuple(stored.shape)} are "
                "stored: it must write one of the same shape."
            )
        warn_if_rewards_differ(computed, stored)

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the entries that `recompute` replaces."""
        return self.replaced_keys

    def available(self, batch: SampledBatch) -> Tensor | bool:
        """Return which rewards can be recomputed from the goal table, ``bool [n]``, or True for all."""
        return True

    def recompute(self, batch: Batch, relabelled: Tensor) -> None:
        """Set the rewards and done flags of relabelled transitions, ``bool [*batch, 1]``; the others keep theirs."""
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

    def __init__(self, reward: Reward, strategy: str | GoalStrategy, keys: HERKeys, goal_fn: GoalMap | None):
        super().__init__()
        if goal_fn is not None and not callable(goal_fn):
            raise TypeError(f"goal_fn must be a function of achieved goals [batch, *state], got {goal_fn!r}.")
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
        self, tensordict: TensorDictBase, earlier_goal: Tensor | None, later: Iterable[Transform] | None
    ) -> WrittenTransitions:
        """Check and read transitions ``[*batch]``, given a goal ``[*goal]`` of an earlier write if there was one.

        Copies of the desired goal are searched for that no ``later`` transform rewrites in samples; None: no search.
        """
        written = read_transitions(tensordict, self.keys, self.goal_fn, earlier_goal)
        if not self._is_checked:
            self._one_step.check(tensordict)
            self._is_checked = True
        copies = self._copies  # which another thread may set to None
        if copies is not None and later is not None:
            copies = warn_if_goal_is_copied(tensordict, self.keys, later, copies)
            self._copies = None if self._copies is None else copies
        return written

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other writers; the first time after a fork, give up the lanes of the parent process."""
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                self._reset_after_fork()
            yield

    def _reset_after_fork(self) -> None:
        raise NotImplementedError

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


def make_reward(reward: Reward, keys: HERKeys, goal_fn: GoalMap | None) -> TensorDictModuleBase:
    """Return a reward module that reads and writes the entries under ``keys``."""
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
    """Return new entries for relabelled transitions, ``bool [*batch, 1]``, and stored ones for the others.

    ``new`` has the shape of ``stored``, ``[*batch, ...]``, or with flattened batch dimensions, ``[n, ...]``.
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
