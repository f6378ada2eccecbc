"""Relabelling, the base of both transforms: goals are replaced and rewards recomputed."""

from __future__ import annotations

import copy
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

import gymnasium
import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase, Transform

from torchrl_her._torchrl import call_with_buffer, has_forward_hooks, without_compiled_call
from torchrl_her.diagnosis.diagnosis import Diagnosis
from torchrl_her.episodes.transitions import THIS_WRITE, RowNames, WrittenTransitions, map_goals, read_transitions
from torchrl_her.goals.draw import Draw
from torchrl_her.goals.extra_goals import AnyStrategy, check_not_stored, make_strategies
from torchrl_her.goals.strategies import Future
from torchrl_her.goals.strategy import DESIRED, GoalStrategy, goals_apart
from torchrl_her.goals.table import DESIRED_STEP, INITIAL_STEP, GoalTable
from torchrl_her.goals.write_lock import WriteLock
from torchrl_her.keys import STEPS_TO_GOAL, HERKeys, check_keys, get_entry
from torchrl_her.rewards.goal_reward import GoalReward
from torchrl_her.rewards.reached_reward import ReachedReward
from torchrl_her.storage.buffer_transform import BufferTransform

RELABELLED = ("hindsight", "relabelled")
SAVED_BY_THE_OTHER = (
    "This state was saved by {}, not {}: create the buffer with the transform that saved it, then load."
)

Self = TypeVar("Self", bound="RelabelTransform")
Reward: TypeAlias = TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor]
GoalMap: TypeAlias = Callable[[Tensor], Tensor]


@dataclass
class Batch:
    """Transitions that are being relabelled."""

    data: TensorDictBase  # [*batch], receives the new entries
    stored: dict[NestedKey, Any]  # the stored values of the replaced entries; None for entries that are created

    def replace(self, key: NestedKey, relabelled: Tensor, new: Tensor) -> None:
        """Set an entry of the transitions to relabel, ``bool [*batch, 1]``; the others keep the stored value.

        An entry that is not stored is created for all transitions.
        """
        stored = self.stored[key]
        self.data.set(key, new if stored is None else where(relabelled, new, stored))


@dataclass
class SampledBatch(Batch):
    """Transitions that are relabelled when they are sampled; n is the number of transitions in ``[*batch]``."""

    table: GoalTable
    episode: Tensor  # int64 [n]
    step: Tensor  # int64 [n]
    longest_window: int  # the largest number of steps that a written transition spans
    outcomes: Tensor | None = None  # [n, longest, *goal], the goals achieved in the window of each n-step transition
    available: Tensor | None = None  # bool [n], whether the goal table holds the complete window
    draw: Draw | None = None


class OneStepReward:
    """Recomputes the one-step reward, and the done flags if the reward module writes ``terminated``.

    If the reward module has a true attribute ``recompute_all``, the reward of transitions that are not relabelled is
    recomputed too.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: HERKeys):
        self.reward = reward
        self.keys = keys
        self.recompute_all = bool(getattr(reward, "recompute_all", False))
        self._recomputed = [key for key in (keys.next_reward, keys.next_terminated) if key in reward.out_keys]
        self.replaced_keys = list(self._recomputed)
        if keys.next_terminated in self._recomputed:
            self.replaced_keys.append(keys.next_done)
        self._read = [key for key in self.replaced_keys if key in reward.in_keys]
        # Whether calling `GoalReward.compute` directly gives the same result as the module, but faster.
        is_goal_reward = getattr(reward.forward, "__func__", None) is GoalReward.forward
        self._is_plain = is_goal_reward and list(reward.out_keys) == self._recomputed and not self._read

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the entries that `recompute` replaces."""
        return self.replaced_keys

    def read_goals(self, batch: SampledBatch) -> Tensor | bool:
        """Return True: one-step rewards read no goals from the goal table, so all of them can be recomputed."""
        return True

    def recompute(self, batch: Batch, relabelled: Tensor) -> None:
        """Set the rewards and done flags of the transitions to relabel, ``bool [*batch, 1]``."""
        for key, new in zip(self._recomputed, self._compute(batch), strict=True):
            includes_originals = self.recompute_all and key == self.keys.next_reward
            replaced = torch.ones_like(relabelled) if includes_originals else relabelled
            batch.replace(key, replaced, new.detach())
        if self.keys.next_done in batch.stored:
            ended = batch.data.get(self.keys.next_terminated)
            truncated = batch.data.get(self.keys.next_truncated, None)
            if truncated is not None:
                ended = ended | truncated
            batch.replace(self.keys.next_done, relabelled, ended)

    def _compute(self, batch: Batch) -> list[Tensor]:
        """Return the entries that the reward module writes for the new goals, ``[*batch, ...]`` each."""
        reward = self.reward
        if isinstance(reward, GoalReward) and self._is_plain and not has_forward_hooks(reward):
            return reward.compute(batch.data)
        # The module gets a copy, since it can also write other entries. The copy lacks the replaced entries, so that an
        # entry that the module fails to write is detected.
        data = batch.data.exclude(*self.replaced_keys)
        for key in self._read:
            if batch.stored[key] is not None:
                data.set(key, batch.stored[key])
        computed = reward(data)
        return [computed.get(key) for key in self._recomputed]


class RelabelTransform(BufferTransform, ABC):
    """The base of the transforms that relabel transitions: `HERTransform` and `HindsightAugmentation`."""

    relabels = True  # other transforms use the keys of a transform that does

    def __init__(
        self,
        reward: Reward,
        strategy: AnyStrategy,
        keys: HERKeys,
        goal_fn: GoalMap | None,
    ):
        super().__init__()
        if goal_fn is not None and not callable(goal_fn):
            raise TypeError(f"goal_fn must be a function that maps [batch, *state] to [batch, *goal], got {goal_fn!r}.")
        check_keys(keys)
        self.strategies = make_strategies(strategy, keys)
        self.goal_fn = goal_fn
        self.keys = keys
        self.reward = make_reward(reward, keys, goal_fn)
        self._one_step = OneStepReward(self.reward, keys)
        self._apart = goals_apart(self.strategies.values())
        self._goal_keys = (keys.desired_goal, keys.next_desired_goal)
        extra = [key for key in self.strategies if key != DESIRED]
        self._extra_keys = [(key, unravel_key(("next", key))) for key in extra]
        self._reads_steps = STEPS_TO_GOAL in self.reward.in_keys
        if self._one_step.recompute_all and self._reads_steps:
            raise ValueError(
                "recompute_all=True needs a reward that is computed from the goals, but this one reads the number of "
                "steps to the goal, which transitions with their original goal lack. Replace ReachedReward with "
                "GoalReward(reward_fn, recompute_all=True), or leave recompute_all out."
            )
        self._lock = WriteLock()
        self._process = os.getpid()  # the process that owns the open lanes
        self._neighbours: Any = None  # the other transforms of the buffer; None before the first write
        self._is_checked = False  # whether the first write was checked for the entries to replace
        self._diagnosis = Diagnosis(
            self.reward,
            keys,
            compares_rewards=not self._one_step.recompute_all,
            goal_fn=goal_fn,
            replaced=frozenset(key for pair in self._extra_keys for key in pair),
        )

    @property
    def strategy(self) -> GoalStrategy:
        """The strategy of the desired goal."""
        return self.strategies[DESIRED]

    def _read(
        self,
        tensordict: TensorDictBase,
        earlier_goals: Tensor | None,
        later: Iterable[Transform] | None,
        names: RowNames = THIS_WRITE,
    ) -> WrittenTransitions:
        """Check and read transitions ``[*batch]``.

        ``earlier_goals [n, *goal]`` are goals of earlier writes, if any. The ``later`` transforms can rewrite copies of
        the desired goal in samples; with None, the write is not searched for copies.
        """
        written = read_transitions(tensordict, self.keys, self.goal_fn, earlier_goals, names)
        if (relabelled := tensordict.get(RELABELLED, None)) is not None and bool(relabelled.any()):
            first = names.name(int(relabelled.reshape(-1).nonzero()[0]))
            raise ValueError(
                f"Some of these transitions are already relabelled ({first}), so their goals do not belong to the "
                "episode: they were sampled from a buffer or stored by HindsightAugmentation. Write rb.storage[:] "
                "instead of rb[:] or rb.sample(), and leave out transitions of HindsightAugmentation for which "
                f"{RELABELLED!r} is True."
            )
        if not self._is_checked:
            for key in self._one_step.replaced_keys:
                get_entry(tensordict, key, "reward" if key == self.keys.next_reward else "done")
            check_not_stored(tensordict, [name for name in self.strategies if name != DESIRED], self.keys)
            self._is_checked = True
        self._diagnosis.check_write(tensordict, written, later)
        return written

    def _keep_apart(self, table: GoalTable, episodes: np.ndarray, first: TensorDictBase) -> None:
        """Keep the goals that strategies need apart from outcomes, given the first transitions ``[n]`` of episodes."""
        if self._apart and len(episodes):
            table.keep_apart(episodes, DESIRED_STEP, first.get(self.keys.desired_goal))
        if self._apart > 1 and len(episodes):
            initial = map_goals(first.get(self.keys.achieved_goal), self.goal_fn).detach()
            table.keep_apart(episodes, INITIAL_STEP, initial.to(table.dtype))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other writers; at the first write after a fork, drop the lanes of the parent process.

        An error or an interrupt restores the lanes, so that the write can be repeated.
        """
        before: dict[str, Any] = {}
        try:
            with self._lock:
                if self._process != os.getpid():
                    self._process = os.getpid()
                    self._reset_after_fork()
                before = self._state_before_write()
                try:
                    yield
                except BaseException:  # before the release, because the next writer continues the lanes
                    self._restore(before)
                    before = {}
                    raise
        except BaseException:  # an interrupt at the release
            self._restore(before)
            raise

    def _restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @abstractmethod
    def _state_before_write(self) -> dict[str, Any]:
        """Return the attributes that a write changes, as copies if it changes them in place."""

    @abstractmethod
    def _reset_after_fork(self) -> None:
        """Drop the lanes of the parent process."""

    def _set_goals(self, batch: Batch, goals: Sequence[Tensor], relabelled: Tensor) -> None:
        """Set the goals, ``[n, *goal]`` for each strategy, of the transitions to relabel, ``bool [*batch, 1]``."""
        desired, *extra = goals
        for pair, values in zip(self._extra_keys, extra, strict=True):
            for key in pair:
                batch.data.set(key, where(relabelled, values, batch.stored[self.keys.desired_goal]))
        for key in self._goal_keys:
            batch.replace(key, relabelled, desired)

    def _describe(self, kind: type[RelabelTransform], **arguments: Any) -> str:
        """Return the class, the reward, and the arguments that differ from the defaults of the class ``kind``."""
        strategy = self.strategies if self._extra_keys else self.strategy
        is_default = repr(strategy) == repr(Future())
        arguments |= {
            "strategy": "future" if is_default else strategy,
            "keys": self.keys,
            "goal_fn": self.goal_fn,
        }
        defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
        changed = [name for name in defaults if name in arguments and arguments[name] != defaults[name]]
        shown = [type(self.reward).__name__, *(f"{name}={_text_of(arguments[name])}" for name in changed)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def clone(self: Self) -> Self:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._state_of_copy(), memo))  # with the open lanes
        return copied

    def _state_of_copy(self) -> dict[str, Any]:
        state = without_compiled_call(super().__getstate__())
        return state | {"_neighbours": None, "_diagnosis": self._diagnosis.for_copy()}


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
    found = [module for module in replay_buffer.transform.modules() if isinstance(module, RelabelTransform)]
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
    if not isinstance(reward, TensorDictModuleBase):
        reward = GoalReward(reward)
    if isinstance(reward, GoalReward):
        reward = reward.with_goal_fn(goal_fn)  # a copy: another transform may use the reward with other keys
        reward.set_keys(
            achieved_goal=keys.achieved_goal,
            desired_goal=keys.desired_goal,
            reward=keys.reward,
            terminated=keys.terminated,
        )
    if isinstance(reward, ReachedReward):
        reward = copy.copy(reward)
        reward.set_keys(reward=keys.reward, terminated=keys.terminated)
    if keys.next_reward not in reward.out_keys:
        raise ValueError(
            f"The reward module must write {keys.next_reward!r}, but its out_keys are {list(reward.out_keys)}. "
            "Change its out_keys, or pass its key, without 'next', as keys=HERKeys(reward=...)."
        )
    return reward


def where(relabelled: Tensor, new: Tensor, stored: Tensor) -> Tensor:
    """Return the new values of relabelled transitions, ``bool [*batch, 1]``, and the stored values of the others.

    ``new`` has the shape of ``stored``, ``[*batch, ...]``, or flattened batch dimensions, ``[n, ...]``.
    """
    if stored.ndim != relabelled.ndim:
        batch = relabelled.shape[:-1]
        relabelled = relabelled.view([*batch, *[1] * (stored.ndim - len(batch))])
    if new.shape != stored.shape:
        new = new.reshape(stored.shape)
    # An earlier transform may have changed the dtype of the stored entry.
    return torch.where(relabelled, new.to(stored.dtype), stored)


def check_at_least(least: int, name: str, value: int) -> int:
    """Check that an argument is an integer of at least ``least``, and return it as an ``int``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)
