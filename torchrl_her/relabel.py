"""Relabelling, a part of both transforms: goals are replaced and rewards recomputed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
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
from torchrl_her.checks.check import Check, Sample, ratio
from torchrl_her.checks.continuity import ContinuityCheck
from torchrl_her.checks.goal_copies import GoalCopiesCheck
from torchrl_her.checks.missing_ends import MissingEndsCheck
from torchrl_her.checks.replaced_flags import ReplacedFlagsCheck
from torchrl_her.checks.report import Report
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.checks.sample_counts import SampleCounts
from torchrl_her.checks.time_limit import TimeLimitCheck
from torchrl_her.episodes.lanes import Lanes, Tracked
from torchrl_her.episodes.write import THIS_WRITE, RowNames, Write, check_last_dimension, map_goals
from torchrl_her.goals.extra_goals import AnyStrategy, check_not_stored, make_strategies
from torchrl_her.goals.names import DESIRED_STEP, INITIAL_STEP, split_name
from torchrl_her.goals.strategies import Future
from torchrl_her.goals.strategy import DESIRED, goals_apart
from torchrl_her.goals.table import GoalTable, Steps
from torchrl_her.keys import STEPS_TO_GOAL, HERKeys, check_keys, get_entry
from torchrl_her.rewards.goal_reward import GoalReward
from torchrl_her.rewards.reached_reward import ReachedReward
from torchrl_her.rewards.returns import Batch, OneStepReward, where

RELABELLED = ("hindsight", "relabelled")

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

    Keyword Args:
        relabels_all (bool): whether all sampled transitions are relabelled. Default: False.
    """

    def __init__(
        self,
        reward: Reward,
        strategy: AnyStrategy,
        keys: HERKeys,
        goal_fn: GoalMap | None,
        *,
        relabels_all: bool = False,
    ):
        if goal_fn is not None and not callable(goal_fn):
            raise TypeError(f"goal_fn must be a function that maps [batch, *state] to [batch, *goal], got {goal_fn!r}.")
        check_keys(keys)
        self.strategies = make_strategies(strategy, keys)
        self.goal_fn = goal_fn
        self.keys = keys
        self.reward = make_reward(reward, keys, goal_fn)
        self.one_step = OneStepReward(self.reward, keys)
        self.relabels_only_goals = isinstance(self.reward, NoReward)
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
        # Whether samples contain stored and computed rewards, which should agree.
        self._compares_rewards = not (self.one_step.recompute_all or (self.reads_steps and relabels_all))
        self._begin(compares_rewards=self._compares_rewards)

    def _begin(self, *, compares_rewards: bool) -> None:
        self._has_written = False  # a collector's dummy does not count
        self._is_checked = False  # whether the first write was checked for the entries to replace
        continuity = ContinuityCheck(self.keys)
        rewards = RewardCheck(self.reward, self.keys, continuity, compares=compares_rewards, goal_fn=self.goal_fn)
        self.checks: list[Check] = [  # in the order in which they run
            continuity,
            rewards,
            MissingEndsCheck(self.keys, continuity),
            TimeLimitCheck(self.keys, rewards),
            GoalCopiesCheck(self.keys, self.extra_replaced),
            SampleCounts(self.keys, rewards),
            ReplacedFlagsCheck(self.keys.next_terminated, is_recomputed=rewards.recomputes_ends),
        ]

    def restarted(self, *, compares_rewards: bool) -> Relabelling:
        """Return a copy in which nothing was written or sampled."""
        new = copy.copy(self)
        new._begin(compares_rewards=compares_rewards and self._compares_rewards)
        return new

    def for_copy(self) -> Relabelling:
        """Return the object of a copied transform, in which nothing was sampled."""
        new = copy.copy(self)
        new.checks = [check.for_copy() for check in self.checks]
        return new

    def read(
        self,
        tensordict: TensorDictBase,
        earlier_goals: Tensor | None,
        later: Iterable[Transform] | None,
        names: RowNames = THIS_WRITE,
    ) -> Write:
        """Check and read transitions ``[*batch]``.

        ``earlier_goals [n, *goal]`` are goals of earlier writes, if any. The ``later`` transforms can rewrite copies of
        the desired goal in samples; with None, the write is not searched for copies.
        """
        written = Write.read(tensordict, self.keys, self.goal_fn, earlier_goals, names)
        if (relabelled := tensordict.get(RELABELLED, None)) is not None and bool(relabelled.any()):
            first = names.name(int(relabelled.reshape(-1).nonzero()[0]))
            raise ValueError(
                f"Some of these transitions are already relabelled ({first}), so their goals do not belong to the "
                "episode: they were sampled from a buffer or stored by HindsightAugmentation. Write rb.storage[:] "
                "instead of rb[:] or rb.sample(), and leave out transitions of HindsightAugmentation for which "
                f"{RELABELLED!r} is True."
            )
        if not self._is_checked:
            for key in self.one_step.replaced_keys:
                get_entry(tensordict, key, "reward" if key == self.keys.next_reward else "done")
            for key in (self.keys.next_reward, *self.keys.next_flags):
                check_last_dimension(tensordict, key)
            check_not_stored(tensordict, [name for name in self.strategies if name != DESIRED], self.keys)
            self._is_checked = True
        if len(written.done) and (self._has_written or not written.is_dummy):
            for check in self.checks:
                check.on_write(tensordict, written, later)
        return written

    def check_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        """Check written transitions ``[*batch]`` whose episodes are known."""
        if len(written.done) and (self._has_written or not written.is_dummy):
            self._has_written = True
            for check in self.checks:
                check.on_tracked(tensordict, written, tracked)

    def check_sample(self, sample: Sample) -> None:
        """Check a sampled batch."""
        for check in self.checks:
            check.on_sample(sample)

    def report(self, transform: Transform, her_ratio: float, lanes: Lanes, table: GoalTable | None = None) -> Report:
        """Return the report of a transform on its running and ended episodes and its goal table."""
        counts = {name: value for check in self.checks for name, value in check.report().items()}
        lengths, running = lanes.lengths, len(lanes)
        table_size = 0 if table is None else int(table.size)
        # The dummy of a collector can be in the table, but is not counted.
        more = table_size > counts["transitions"] + 1 or (counts["sampled"] and not counts["transitions"])
        return Report(
            transform=repr(transform),
            her_ratio=her_ratio,
            episodes=lengths.episodes + running,
            running=running,
            mean_length=ratio(lengths.total, lengths.episodes),
            min_length=lengths.shortest if lengths.episodes else None,
            max_length=lengths.longest if lengths.episodes else None,
            table_size=None if table is None else table_size,
            capacity=None if table is None else table.capacity,
            others_wrote=bool(more),
            **counts,
        )

    def keep_apart(self, table: GoalTable, tensordict: TensorDictBase, written: Write, steps: Steps) -> None:
        """Keep the goals of new episodes that strategies need apart from outcomes."""
        if not self.apart:
            return
        episode, step = split_name(steps.name)
        first = np.flatnonzero(step == 0)
        if len(first):
            rows = written.rows_of(tensordict.select(self.keys.achieved_goal, self.keys.desired_goal))
            self.keep_first_goals(table, episode[first], rows[torch.from_numpy(first).to(written.goals.device)])

    def keep_first_goals(self, table: GoalTable, episodes: np.ndarray, first: TensorDictBase) -> None:
        """Keep goals apart, given the first transitions ``[n]`` of episodes, whose ids are ``int64 [n]``."""
        table.keep_apart(episodes, DESIRED_STEP, first.get(self.keys.desired_goal))
        if self.apart > 1:
            initial = map_goals(first.get(self.keys.achieved_goal), self.goal_fn).detach()
            table.keep_apart(episodes, INITIAL_STEP, initial.to(table.dtype))

    def set_goals(self, batch: Batch, goals: Sequence[Tensor], relabelled: Tensor) -> None:
        """Set the goals, ``[n, *goal]`` for each strategy, of the transitions to relabel, ``bool [*batch, 1]``."""
        desired, *extra = goals
        for pair, values in zip(self.extra_keys, extra, strict=True):
            for key in pair:
                batch.data.set(key, where(relabelled, values, batch.stored[self.keys.desired_goal]))
        for key in self.goal_keys:
            batch.replace(key, relabelled, desired)

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


class NoReward(TensorDictSequential):
    """Computes nothing, for ``HERTransform(None)``."""


def make_reward(reward: Reward, keys: HERKeys, goal_fn: GoalMap | None) -> TensorDictModuleBase:
    """Return a reward module that reads and writes the entries under ``keys``."""
    if isinstance(reward, type):
        raise TypeError(f"The reward is the class {reward.__name__}: pass an instance, {reward.__name__}(...).")
    if isinstance(reward, (EnvBase, gymnasium.Env)):
        raise TypeError(
            "The reward must be a module or a function, got an environment: pass HERTransform(EnvReward(env))."
        )
    if reward is None:
        return NoReward()
    if isinstance(reward, NoReward):
        return reward
    if not isinstance(reward, TensorDictModuleBase):
        reward = GoalReward(reward)
    if isinstance(reward, GoalReward):
        reward = reward.with_goal_fn(goal_fn)  # a copy: another transform may use the reward with other keys
        reward.set_keys(keys)
    if isinstance(reward, ReachedReward):
        reward = copy.copy(reward)
        reward.set_keys(keys)
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
    return state | {"_relabelling": state["_relabelling"].for_copy(), "_neighbours": None}


def deep_copy(transform: Kind, state: dict[str, Any], memo: dict[int, Any]) -> Kind:
    """Return a transform with a deep copy of a state, for ``__deepcopy__``."""
    copied: Kind = object.__new__(type(transform))
    memo[id(transform)] = copied
    copied.__setstate__(copy.deepcopy(state, memo))
    return copied
