"""Hindsight as a transform of a replay buffer."""

from __future__ import annotations

import os
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.envs import MultiStepTransform

from torchrl_her.compact import bring_back, leave_out, root_flags
from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.goals.strategies import GoalStrategy, StrategyInput, check_rows
from torchrl_her.goals.table import CapacityWatch, GoalTable, check_may_move
from torchrl_her.keys import HERKeys
from torchrl_her.n_step import (
    STEPS,
    NStepReturn,
    Windows,
    check_entries,
    check_has_multi_step,
    check_n_step_rows,
    keep_flags,
)
from torchrl_her.neighbours import Neighbours
from torchrl_her.relabel import RELABELLED, RelabelTransform, check_at_least_one

# Where the stamps stand: int64 [*batch, 2], episode and step. Two entries in a tensordict of their own would
# add a fifth to the price of a write.
STAMP = "hindsight_stamp"


class HERTransform(RelabelTransform):
    """Hindsight Experience Replay (Andrychowicz et al. 2017, arXiv:1707.01495) for any replay buffer.

    Writing stamps each transition with its episode and step and keeps its achieved goal. Sampling replaces
    the desired goal of a share of the transitions, at the root and under ``"next"``, by an achieved goal of
    their episode, and recomputes their rewards.

    Args:
        reward (TensorDictModule or Callable): the reward of a relabelled transition: a module that reads it
            and writes ``("next", "reward")`` (and ``("next", "terminated")``, where it can), such as
            `EnvReward`, `SparseReward` and `GoalReward`, or a function of achieved and desired goals
            ``[batch, *goal]``.

    Keyword Args:
        strategy (str or GoalStrategy): which step's achieved goal is taken: ``"future"`` (default),
            ``"final"``, ``"episode"``, ``"random"``, or an object with a method ``select``.
        her_ratio (float): the probability that a sampled transition is relabelled; k / (k + 1) for the
            paper's k. Default: 0.8.
        achieved_goal_key (NestedKey): read at the root and under ``"next"``. Default: ``"achieved_goal"``.
        desired_goal_key (NestedKey): written at the root and under ``"next"``. Default: ``"desired_goal"``.
        reward_key (NestedKey): under ``"next"``. Default: ``"reward"``.
        done_key (NestedKey): under ``"next"``; its neighbours ``terminated`` and ``truncated`` belong to it.
            Default: ``"done"``.
        trajectory_key (NestedKey, optional): ids ``[*batch]`` that tell the environments apart, used where they
            are present; None for none. Default: ``("collector", "traj_ids")``.
        goal_fn (Callable[[Tensor], Tensor], optional): maps what stands under ``achieved_goal_key``,
            ``[batch, *state]``, to goals ``[batch, *goal]``.
        capacity (int): how many achieved goals are kept: the ``max_size`` of the storage, or two to three
            times that where episodes have 64 steps and more (they are published as they grow).
            Default: 1,000,000.
        goal_spec (TensorSpec, optional): the spec of one goal, to allocate and check at once. By default the
            first write tells. Needed for buffers that processes share.
        max_episode_steps (int, optional): ends an episode after so many steps.
        mask_key (NestedKey, optional): transitions that are False here are padding.
        sequence_length (int, optional): sampled batches are sequences of this length, and each gets one
            goal, drawn for its last transition.
        compact (bool): leaves out of the storage what a transition says twice, the desired goal under
            ``"next"`` and the flags at the root (of the step before, False), and brings it back in samples.
            Default: False.

    A sampled batch has ``("hindsight", "relabelled")``, ``bool [*batch, 1]``. Draws come from torch's default
    random generator.

    Raises:
        ValueError, TypeError: if an argument is wrong; when writing (nothing is stored then), if goals,
            rewards or flags have the wrong shape, an achieved goal is NaN, or with ``compact`` something
            that is to be left out differs.
        KeyError: when writing, if an entry is missing; when sampling, if the transitions were not written
            through this transform.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000), transform=HERTransform(EnvReward(env), capacity=1000), batch_size=64
        ... )
        >>> _ = rb.extend(env.rollout(50))
        >>> rb.sample()["hindsight", "relabelled"].shape
        torch.Size([64, 1])
    """

    requires_shared_write_state = True  # TorchRL then calls share_memory_ for buffers that processes share

    def __init__(
        self,
        reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
        *,
        strategy: str | GoalStrategy = "future",
        her_ratio: float = 0.8,
        achieved_goal_key: NestedKey = "achieved_goal",
        desired_goal_key: NestedKey = "desired_goal",
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        trajectory_key: NestedKey | None = ("collector", "traj_ids"),
        goal_fn: Callable[[Tensor], Tensor] | None = None,
        capacity: int = 1_000_000,
        goal_spec: TensorSpec | None = None,
        max_episode_steps: int | None = None,
        mask_key: NestedKey | None = None,
        sequence_length: int | None = None,
        compact: bool = False,
    ):
        capacity = check_at_least_one("capacity", capacity)
        if max_episode_steps is not None:
            max_episode_steps = check_at_least_one("max_episode_steps", max_episode_steps)
        if sequence_length is not None:
            sequence_length = check_at_least_one("sequence_length", sequence_length)
        keys = HERKeys.make(achieved_goal_key, desired_goal_key, reward_key, done_key, trajectory_key, mask_key)
        super().__init__(reward, strategy, keys, goal_fn, EpisodeTracker(capacity, max_episode_steps))
        self.her_ratio = check_her_ratio(her_ratio)
        self.capacity = capacity
        self.sequence_length = sequence_length
        self.compact = compact
        self._n_step_return: NStepReturn | None = None
        self._windows = Windows()
        self._n_steps, self._gamma = 1, 1.0  # of n-step returns; they can change while training
        self.longest_window = 1  # the most steps that a stored transition spans
        self.table: GoalTable | None = None
        if goal_spec is not None:
            check_goal_spec(goal_spec)
            self.table = GoalTable(capacity, goal_spec.shape, goal_spec.dtype, goal_spec.device or torch.device("cpu"))
        self._capacity_watch = CapacityWatch(capacity)

    # Writing

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stamp transitions with their episode and step, and keep their achieved goals."""
        multi_step = self._check_neighbours()
        if isinstance(tensordict, list):
            tensordict = torch.stack(tensordict)
        batch = tensordict.batch_size
        if not batch.numel():
            stamp = torch.zeros(*batch, 2, dtype=torch.int64, device=tensordict.device)
            return self._as_stored(tensordict, multi_step).set(STAMP, stamp)
        goal_of_table = None if self.table is None else self.table.goals[0]
        written_after = self._order.written_after() if self.her_ratio else None
        written, kept = self._read(tensordict, goal_of_table, written_after)
        stored = self._as_stored(tensordict, multi_step)
        with self._lock:
            self._reset_after_fork()
            if multi_step is not None:
                check_n_step_rows(self.keys.mask, len(batch))
                self._windows.follow(written, batch, multi_step)
                self.longest_window = max(self.longest_window, self._n_steps)
            table = self._table_for(written.goals)
            tracked = self.tracker.track(written, first_episode=table.next_episode)
            table.open_episodes(tracked.opened)
            table.publish(tracked.publications)
        self._capacity_watch.after_write(table.last_draw)

        stamps = tracked.stamps
        if kept is not None:  # padding has the episode 0, and a step that no episode has
            stamps = np.tile([0, self.capacity], (batch.numel(), 1))
            stamps[kept] = tracked.stamps
        stamp = torch.from_numpy(stamps).to(written.goals.device)
        return stored.set(STAMP, stamp.view(*batch, 2))

    def _as_stored(self, tensordict: TensorDictBase, multi_step: MultiStepTransform | None) -> TensorDictBase:
        stored = leave_out(tensordict, self.keys) if self.compact else tensordict
        if multi_step is not None:
            keep_flags(stored, self.keys)
        return stored

    def _check_neighbours(self) -> MultiStepTransform | None:
        """Look at the transforms before and after this one, and return the one that makes n-step transitions."""
        order = Neighbours.around(self)
        if order != self._order:
            replaced = {*self._replaced, *(root_flags(self.keys) if self.compact else [])}
            order.check(replaced, self.keys.next_achieved, RelabelTransform)
            self._order = order
        multi_step = order.multi_step()
        if multi_step is not None:
            check_entries(multi_step, self.keys)
            if self._n_step_return is None:
                self._n_step_return = NStepReturn(self.reward, self.keys, self.goal_fn is not None)
            self._n_steps, self._gamma = multi_step.n_steps, multi_step.gamma
        return multi_step

    def _table_for(self, goals: Tensor) -> GoalTable:
        if self.table is None:
            self.table = GoalTable(self.capacity, goals.shape[1:], goals.dtype, goals.device)
        return self.table

    def flush(self) -> None:
        """End the running episodes: their goals become known, and what is written next begins new ones."""
        with self._lock:
            self._reset_after_fork()
            self._windows.may_begin_anew = True
            if self.table is not None:
                self.table.publish(self.tracker.flush())

    # Sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabel transitions ``[*batch]``; what is given is not written into."""
        if isinstance(tensordict, list):  # an ensemble of list storages calls its members' transforms before it stacks
            return list(self.forward(torch.stack(tensordict)).unbind(0))
        stamp = get_stamp(tensordict, STAMP)
        n_step = self._n_step_for(tensordict)
        replaced = self._replaced if n_step is None else [*self._goal_keys, *n_step.replaced(tensordict)]
        stored = {key: tensordict.get(key) for key in replaced}
        check_are_sampled(stored, self.keys)
        # Rows can have been loaded that were written otherwise: what is not there is brought back, and what stands
        # there from another row before this one is not read.
        repeats = root_flags(self.keys) if self.compact or stored[self.keys.next_desired] is None else None
        # What a storage returns can be the storage itself: what is set goes into a new tensordict.
        tensordict = tensordict.exclude(*stored, RELABELLED, *(repeats or ()))
        if repeats is not None:
            bring_back(tensordict, stored, self.keys)
        episode, step = (stamp if stamp.ndim == 2 else stamp.reshape(-1, 2)).unbind(1)
        table = self._table_at(stored[self.keys.desired], len(tensordict.batch_size))
        goals, relabelled = self._draw(table, episode, step)
        if n_step is not None:
            steps = stored[STEPS].reshape(-1)
            longest = max(self.longest_window, self._n_steps)
            outcomes, whole = n_step.outcomes(table, episode, step, steps, longest)
            if (length := self.sequence_length) is not None:  # all of a sequence that is to be relabelled, or nothing
                whole = (whole | ~relabelled).view(-1, length).all(1).repeat_interleave(length)
            relabelled = relabelled & whole
        relabelled = relabelled.view(*tensordict.batch_size, 1)
        self._set_goals(tensordict, relabelled, goals, stored)
        if n_step is None:
            self._step_reward.recompute(tensordict, relabelled, stored)
        else:
            n_step.recompute(tensordict, relabelled, stored, outcomes, self._gamma)
        return tensordict.set(RELABELLED, relabelled)

    def _n_step_for(self, tensordict: TensorDictBase) -> NStepReturn | None:
        """What recomputes the returns of n-step transitions; None for single steps."""
        if tensordict.get(STEPS, None) is None:
            return None
        if self._n_step_return is None:
            self._check_neighbours()  # another process wrote them
        return check_has_multi_step(self._n_step_return)

    def _draw(self, table: GoalTable, episode: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Draw goals ``[n, *goal]`` for transitions ``[n]``, and say which they relabel, ``bool [n]``."""
        length = self.sequence_length
        if length is None:
            return self._draw_each(table, episode, step)
        check_sequences(len(step), length)
        last = slice(length - 1, None, length)
        goals, relabelled = self._draw_each(table, episode[last], step[last])
        same_episode = episode == episode[last].repeat_interleave(length)
        return goals.repeat_interleave(length, 0), relabelled.repeat_interleave(length) & same_episode

    def _draw_each(self, table: GoalTable, episode: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        start, length = table.find(episode)
        rows = self.strategy.select(StrategyInput(episode, step, start, length, table.owners, table.size))
        check_rows(rows, step, self.strategy)
        wanted = (torch.rand(step.shape, device=step.device) < self.her_ratio) & (step < length)
        goals, owners = table.read(rows)
        if self.strategy.same_episode:
            relabelled = wanted & (owners == episode) & table.start_at(episode, start)
        else:
            wanted = wanted & (table.owners_of(start + step) == episode)
            relabelled = wanted & (owners > 0)
        table.last_draw = wanted, relabelled
        return goals, relabelled

    def _table_at(self, desired: Tensor, dimensions: int) -> GoalTable:
        """The table, moved to where the samples are: data can be written elsewhere than it is stored.

        Raises:
            RuntimeError: if processes share it, and it cannot move.
        """
        table = self.table
        if table is None or table.device != desired.device:
            with self._lock:
                if self.table is None:  # nothing was written since the buffer was loaded without the transform's state
                    self.table = GoalTable(self.capacity, desired.shape[dimensions:], desired.dtype, desired.device)
                check_may_move(self.table, desired.device)
                self.table.to(desired.device)
                table = self.table
        return table

    # In an environment, between processes, on disk

    def share_memory_(self) -> HERTransform:
        """Move the goal table into memory that processes share; TorchRL calls it for shared buffers.

        Raises:
            RuntimeError: if the goals are not known yet.
        """
        if self.table is None:
            raise RuntimeError(
                "A buffer that processes share needs the goal table before the first write: pass "
                'goal_spec=env.observation_spec["achieved_goal"] (of one environment) to HERTransform.'
            )
        if not self.table.is_shared:
            self.table.share_memory_()
            self._lock.share_memory_()
        return self

    def _reset_after_fork(self) -> None:
        """In a forked process, leave the lanes to the process that opened them."""
        if self._process != os.getpid():
            self._process = os.getpid()
            if self._lock.is_shared:
                self.tracker, self._windows = self.tracker.without_lanes(), Windows()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the goal table and the running episodes, for ``state_dict``."""
        with self._lock:
            self._reset_after_fork()
            return {
                "table": None if self.table is None else self.table.state_dict(),
                "lanes": self.tracker.state_dict(),
                "longest_window": self.longest_window,
                "compact": self.compact,
            }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` returned.

        Raises:
            ValueError: if it is that of a transform with other goals, another capacity or another ``compact``.
        """
        check_same_compact(state["compact"], self.compact)
        with self._lock:
            self._reset_after_fork()
            saved = state["table"]
            if saved is not None:
                goals = saved["goals"]
                table = self.table or GoalTable(self.capacity, goals.shape[1:], goals.dtype, goals.device)
                table.load_state_dict(saved)
                self.table = table
            elif self.table is not None:
                self.table.clear()
            self.tracker.load_state_dict(state["lanes"])
            self.longest_window = state["longest_window"]
            self._windows.may_begin_anew = True

    def __getstate__(self) -> dict[str, Any]:
        state = self._state_of_a_copy()
        if self._lock.is_shared:  # lanes belong to the process that writes them
            state |= {"tracker": self.tracker.without_lanes(), "_windows": Windows()}
        return state

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.reward).__name__}, strategy={self.strategy!r}, "
            f"her_ratio={self.her_ratio}, capacity={self.capacity})"
        )


def check_her_ratio(her_ratio: float) -> float:
    """Check that the ratio is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions to each original one it is k / (k + 1)."
        )
    return her_ratio


def check_goal_spec(spec: TensorSpec) -> None:
    """Check that the spec is that of one tensor."""
    if not isinstance(spec, TensorSpec) or isinstance(spec, Composite):
        raise TypeError(
            f"goal_spec must be the spec of one goal, got a {type(spec).__name__}: pass "
            'env.observation_spec["achieved_goal"], of one environment.'
        )


def check_are_sampled(stored: dict[NestedKey, Tensor], keys: HERKeys) -> None:
    """Check that what relabelling replaces is in the sample."""
    for key in (keys.desired, keys.reward):
        if stored[key] is None:
            raise KeyError(
                f"There is no entry {key!r} in what is sampled, and it was written: list the transform that takes it "
                "away after HERTransform."
            )


def get_stamp(tensordict: TensorDictBase, key: str) -> Tensor:
    """Get the stamps of sampled transitions, which those written through HERTransform have."""
    stamp = tensordict.get(key, None)
    if not isinstance(stamp, Tensor):
        raise KeyError(
            f"The sampled transitions carry no stamp under {key!r}: they were written before HERTransform was part "
            "of the buffer, or a transform listed before it takes the stamp away. Make the buffer with "
            "transform=HERTransform(...), then extend it."
        )
    return stamp


def check_sequences(count: int, length: int) -> None:
    """Check that a sampled batch is made of whole sequences."""
    if count % length:
        raise ValueError(
            f"sequence_length={length} and the sampled batch has {count} transitions: it must be a multiple. "
            "Set it to the slice length of the sampler."
        )


def check_same_compact(saved: bool, compact: bool) -> None:
    """Check that what is loaded and what will be written have the same entries."""
    if saved != compact:
        raise ValueError(
            f"The buffer was saved with compact={saved}, and what this one writes, with compact={compact}, has other "
            f"entries: make the transform with compact={saved}, then load."
        )
