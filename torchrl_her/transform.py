"""Hindsight as a transform of a replay buffer."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch import multiprocessing as mp
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, Transform

from torchrl_her import checks
from torchrl_her.episodes import EpisodeTracker, Written
from torchrl_her.goal_table import GoalTable
from torchrl_her.rewards import GoalReward
from torchrl_her.strategies import Choice, GoalStrategy, make_strategy

# Where the stamps stand: int64 [*batch, 2], episode and step. Two entries in a tensordict of their own would
# add a fifth to the price of a write.
STAMP = "hindsight_stamp"
RELABELLED = ("hindsight", "relabelled")


class HERTransform(Transform):
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
        trajectory_key (NestedKey): ids ``[*batch]`` that tell the environments apart, used where they are
            present. Default: ``("collector", "traj_ids")``.
        goal_fn (Callable[[Tensor], Tensor], optional): maps what stands under ``achieved_goal_key``,
            ``[batch, *state]``, to goals ``[batch, *goal]``.
        capacity (int): how many achieved goals are kept: the ``max_size`` of the storage, or more.
            Default: 1,000,000.
        goal_spec (TensorSpec, optional): the spec of one goal, to allocate and check at once. By default the
            first write tells. Needed for buffers that processes share.
        max_episode_steps (int, optional): ends an episode after so many steps.
        mask_key (NestedKey, optional): transitions that are False here are padding.
        sequence_length (int, optional): sampled batches are sequences of this length, and each gets one
            goal, drawn for its last transition.

    A sampled batch has ``("hindsight", "relabelled")``, ``bool [*batch, 1]``. Draws come from torch's default
    random generator.

    Raises:
        ValueError, TypeError: if an argument is wrong; when writing (nothing is stored then), if goals,
            rewards or flags have the wrong shape, or an achieved goal is NaN.
        KeyError: when writing, if an entry is missing; when sampling, if the transitions were not written
            through this transform.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward
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
        trajectory_key: NestedKey = ("collector", "traj_ids"),
        goal_fn: Callable[[Tensor], Tensor] | None = None,
        capacity: int = 1_000_000,
        goal_spec: TensorSpec | None = None,
        max_episode_steps: int | None = None,
        mask_key: NestedKey | None = None,
        sequence_length: int | None = None,
    ):
        super().__init__()
        checks.check_at_least_one("capacity", capacity)
        checks.check_at_least_one("max_episode_steps", max_episode_steps)
        checks.check_at_least_one("sequence_length", sequence_length)
        self.her_ratio = checks.check_her_ratio(her_ratio)
        self.strategy = make_strategy(strategy)
        self.goal_fn = goal_fn
        self.capacity = capacity
        self.sequence_length = sequence_length

        self.achieved_goal_key = unravel_key(achieved_goal_key)
        self.desired_goal_key = unravel_key(desired_goal_key)
        self.next_achieved_goal_key = unravel_key(("next", achieved_goal_key))
        self.next_desired_goal_key = unravel_key(("next", desired_goal_key))
        self.reward_key = unravel_key(("next", reward_key))
        self.done_key = unravel_key(("next", done_key))
        self.terminated_key = (*self.done_key[:-1], "terminated")
        self.truncated_key = (*self.done_key[:-1], "truncated")
        self.trajectory_key = trajectory_key
        self.mask_key = mask_key

        self.reward = self._make_reward(reward)
        self.tracker = EpisodeTracker(capacity, max_episode_steps)
        self.table: GoalTable | None = None
        if goal_spec is not None:
            self.table = GoalTable(capacity, goal_spec.shape, goal_spec.dtype, goal_spec.device or torch.device("cpu"))
        self._lock: Any = threading.Lock()
        self._writes = 0
        self._told_of_capacity = False

    def _make_reward(self, reward: Any) -> TensorDictModuleBase:
        if not isinstance(reward, TensorDictModuleBase):
            reward = GoalReward(reward)
        if isinstance(reward, GoalReward):
            reward.goal_fn = self.goal_fn
            reward.set_keys(
                achieved_goal=self.achieved_goal_key,
                desired_goal=self.desired_goal_key,
                reward=self.reward_key[1:],
                terminated=self.terminated_key[1:],
            )
        if self.reward_key not in reward.out_keys:
            raise ValueError(
                f"The reward module writes {list(reward.out_keys)} and not {self.reward_key!r}: give it that out_key, "
                "or name the one it has with reward_key=... (without 'next')."
            )
        recomputed = (self.reward_key, self.terminated_key)
        self._recomputed = [key for key in recomputed if key in reward.out_keys]
        self._reward_writes_more = len(reward.out_keys) > len(self._recomputed)
        self._replaced = [self.desired_goal_key, self.next_desired_goal_key, *self._recomputed]
        if self.terminated_key in self._recomputed:
            self._replaced.append(self.done_key)
        return reward

    # Writing

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stamp transitions with their episode and step, and keep their achieved goals."""
        written, kept = self._read(tensordict)
        with self._lock:
            table = self._table_for(written.goals)
            tracked = self.tracker.track(written, first_episode=table.next_episode)
            table.open_episodes(tracked.opened)
            table.publish(tracked.publications)
        self._tell_of_capacity()

        stamps = np.zeros((tensordict.numel(), 2), dtype=np.int64)
        stamps[kept, 0], stamps[kept, 1] = tracked.episode, tracked.step
        stamp = torch.from_numpy(stamps).to(written.goals.device)
        return tensordict.set(STAMP, stamp.view(*tensordict.batch_size, 2))

    def _read(self, tensordict: TensorDictBase) -> tuple[Written, np.ndarray | slice]:
        """Check what is written, and return what of it counts, and which rows those are that are no padding."""
        checks.check_single_steps(tensordict)
        batch, count = tensordict.batch_size, tensordict.numel()
        achieved, desired, next_achieved, next_desired = (
            checks.get_entry(tensordict, key, argument)
            for key, argument in (
                (self.achieved_goal_key, "achieved_goal_key"),
                (self.desired_goal_key, "desired_goal_key"),
                (self.next_achieved_goal_key, "achieved_goal_key"),
                (self.next_desired_goal_key, "desired_goal_key"),
            )
        )
        checks.check_same_shape("achieved goal", achieved, next_achieved)
        checks.check_same_shape("desired goal", desired, next_desired)
        goals = next_achieved.reshape(count, *next_achieved.shape[len(batch) :])  # [n, *state]
        if self.goal_fn is not None:
            goals = self.goal_fn(goals)  # [n, *goal]
        table_shape = None if self.table is None else self.table.goal_shape
        checks.check_goal_shape(goals.shape[1:], desired.shape[len(batch) :], table_shape)
        goals = goals.to(desired.dtype)

        done = self._per_transition(tensordict, self.done_key, np.bool_, "done_key")
        trajectory = self._per_transition(tensordict, self.trajectory_key, np.int64)
        kept: np.ndarray | slice = slice(None)
        if self.mask_key is not None:
            kept = self._per_transition(tensordict, self.mask_key, np.bool_, "mask_key")
            goals = goals[torch.from_numpy(kept).to(goals.device)]
        checks.check_finite(goals)
        if not self._writes:
            self._check_first_write(tensordict)
        row_length = batch[-1] if len(batch) > 1 else count
        written = Written(
            goals=goals,
            start=_as_bytes(count, achieved, desired)[kept],
            outcome=_as_bytes(count, next_achieved, next_desired)[kept],
            done=done[kept],
            begins=(np.arange(count) % row_length == 0)[kept],
            trajectory=None if trajectory is None else trajectory[kept],
        )
        return written, kept

    def _per_transition(
        self, tensordict: TensorDictBase, key: NestedKey, dtype: Any, argument: str | None = None
    ) -> Any:
        """Get a flag or an id, ``[n]``; without an argument to name it by, it may be missing."""
        if argument is None and tensordict.get(key, None) is None:
            return None
        value = checks.get_entry(tensordict, key, argument or "")
        checks.check_one_per_transition(key, value, tensordict.numel())
        return value.reshape(-1).numpy(force=True).astype(dtype, copy=False)

    def _check_first_write(self, tensordict: TensorDictBase) -> None:
        """Check what later writes have in common with the first one: the reward and the order of transforms."""
        one = tensordict.reshape(-1)[:1].copy()
        with torch.no_grad():
            checks.check_reward(self.reward(one.copy()), one, self.reward_key)
        if self.terminated_key in self._recomputed:
            checks.get_entry(tensordict, self.terminated_key, "done_key")
        compose = self.__dict__["_container"] and self.__dict__["_container"]()
        if compose is not None:
            listed = list(compose)
            keys = {
                self.desired_goal_key,
                self.next_desired_goal_key,
                self.next_achieved_goal_key,
                self.reward_key,
            }
            checks.check_order(listed[: listed.index(self)], keys)

    def _table_for(self, goals: Tensor) -> GoalTable:
        if self.table is None:
            self.table = GoalTable(self.capacity, goals.shape[1:], goals.dtype, goals.device)
        return self.table

    def flush(self) -> None:
        """End the running episodes: their goals become known, and what is written next begins new ones."""
        with self._lock:
            if self.table is not None:
                self.table.publish(self.tracker.flush())

    # Sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabel transitions ``[*batch]``; what is given is not written into."""
        stamp = checks.get_stamp(tensordict, STAMP)
        stored = {key: tensordict.get(key) for key in self._replaced}
        # What a storage returns can be the storage itself: what is set goes into a new tensordict.
        tensordict = tensordict.exclude(*stored)
        if self.table is None:  # nothing was written since the buffer was loaded without the transform's state
            goals, relabelled = (
                stored[self.desired_goal_key],
                torch.zeros_like(stamp[..., 0], dtype=torch.bool),
            )
        else:
            goals, relabelled = self._draw(*stamp.reshape(-1, 2).unbind(1))
        relabelled = relabelled.view(*tensordict.batch_size, 1)
        for key in (self.desired_goal_key, self.next_desired_goal_key):
            tensordict.set(key, _where(relabelled, goals, stored[key]))
        self._recompute(tensordict, relabelled, stored)
        return tensordict.set(RELABELLED, relabelled)

    def _draw(self, episode: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Draw goals ``[n, *goal]`` for transitions ``[n]``, and say which they relabel, ``bool [n]``."""
        length = self.sequence_length
        if length is None:
            return self._draw_each(episode, step)
        checks.check_sequences(len(step), length)
        last = slice(length - 1, None, length)
        goals, relabelled = self._draw_each(episode[last], step[last])
        same_episode = episode == episode[last].repeat_interleave(length)
        return goals.repeat_interleave(length, 0), relabelled.repeat_interleave(length) & same_episode

    def _draw_each(self, episode: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        table = self._table_on(episode.device)
        start, length = table.find(episode)
        choice = Choice(episode, step, length, partial(table.rows, start), table.owners, table.size)
        rows = self.strategy.select(choice)
        checks.check_rows(rows, step, self.strategy)
        wanted = (torch.rand(step.shape, device=step.device) < self.her_ratio) & (step < length)
        owners = episode
        if not self.strategy.same_episode:
            owners = table.owners.index_select(0, rows).clamp(min=1)
            wanted = wanted & (table.owners.index_select(0, table.rows(start, step)) == episode)
        goals, found = table.read(rows)
        relabelled = wanted & (found == owners)
        table.last_draw = wanted, relabelled
        return goals, relabelled

    def _recompute(self, tensordict: TensorDictBase, relabelled: Tensor, stored: dict[NestedKey, Tensor]) -> None:
        """Set the reward, and the flags where the reward module tells them, of relabelled transitions."""
        computed = self.reward(tensordict.copy() if self._reward_writes_more else tensordict)
        for key in self._recomputed:
            new = computed.get(key).detach().to(stored[key].dtype)
            tensordict.set(key, _where(relabelled, new, stored[key]))
        if self.done_key in stored:
            ended = tensordict.get(self.terminated_key)
            truncated = tensordict.get(self.truncated_key, None)
            if truncated is not None:
                ended = ended | truncated
            tensordict.set(self.done_key, _where(relabelled, ended, stored[self.done_key]))

    def _table_on(self, device: torch.device) -> GoalTable:
        """The table, moved to where the samples are: data can be written elsewhere than it is stored."""
        assert self.table is not None
        if self.table.device != device:
            with self._lock:
                self.table.to(device)
        return self.table

    def _tell_of_capacity(self) -> None:
        """Now and then, look at the last draw: were goals lost that had been there?"""
        self._writes += 1
        if self._told_of_capacity or self._writes % 16 or self.table is None:
            return
        wanted, relabelled = (int(flags.sum()) for flags in self.table.last_draw)
        if wanted - relabelled <= max(8, 0.2 * wanted):
            return
        self._told_of_capacity = True
        lost = 1 - relabelled / wanted
        enough = f"about {math.ceil(self.capacity / (1 - lost)):,}" if relabelled else "the max_size of the storage"
        warnings.warn(
            f"{lost:.0%} of the transitions that were to be relabelled were not, because their goals have left "
            f"the goal table: HERTransform(capacity={self.capacity:,}) is too small for what the storage holds. "
            f"It takes {enough} (for episodes of 64 steps and more up to twice the max_size of the storage).",
            stacklevel=2,
        )

    # In an environment, between processes, on disk

    def set_container(self, container: Transform | EnvBase) -> None:
        """Take note of the container, which must not be an environment."""
        super().set_container(container)
        if self.parent is not None:
            raise ValueError(
                "HERTransform relabels what a replay buffer samples and cannot be a transform of an environment: "
                "pass it to the buffer, ReplayBuffer(transform=HERTransform(...))."
            )

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
            self._lock = mp.Lock()
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return the goal table and the running episodes, for ``state_dict``."""
        return {
            "table": None if self.table is None else self.table.state_dict(),
            "lanes": self.tracker.state_dict(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` returned."""
        table = state["table"]
        with self._lock:
            if table is None:
                self.table = None
            else:
                self._table_for(table["goals"]).load_state_dict(table)
            self.tracker.load_state_dict(state["lanes"])

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.table is not None and self.table.is_shared:
            # Lanes belong to the process that writes them.
            state["tracker"] = EpisodeTracker(self.tracker.capacity, self.tracker.max_steps)
        else:
            del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_lock": threading.Lock(), **state})

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.reward).__name__}, strategy={self.strategy!r}, "
            f"her_ratio={self.her_ratio}, capacity={self.capacity})"
        )


def _where(relabelled: Tensor, new: Tensor, stored: Tensor) -> Tensor:
    """Choose by transition, ``bool [*batch, 1]``, between entries ``[*batch, ...]``."""
    if stored.ndim != relabelled.ndim:
        batch = relabelled.shape[:-1]
        relabelled = relabelled.view(*batch, *[1] * (stored.ndim - len(batch)))
    return torch.where(relabelled, new.reshape(stored.shape), stored)


def _as_bytes(count: int, *entries: Tensor) -> np.ndarray:
    """Put entries of ``count`` transitions next to each other, as ``uint8 [count, bytes]``."""
    rows = [entry.detach().reshape(count, -1).contiguous().cpu().view(torch.uint8).numpy() for entry in entries]
    return np.concatenate(rows, axis=1)
