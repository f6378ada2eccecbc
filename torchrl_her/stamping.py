"""The writing half of HERTransform: it stamps transitions and keeps their goals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_her._torchrl import ids_around, warn_user
from torchrl_her.compact import check_saved_without_compact_goals
from torchrl_her.episodes.lanes import STEPS, Lanes, Published
from torchrl_her.episodes.stamps import STAMP, add_padding
from torchrl_her.episodes.transitions import WrittenTransitions
from torchrl_her.goals.table import PIECE, SHARED_PIECES, GoalTable, load_table
from torchrl_her.n_step import NStepReward, check_n_step_keys
from torchrl_her.neighbours import Neighbours
from torchrl_her.offline.adopting import AdoptingTransform
from torchrl_her.relabel import SAVED_BY_THE_OTHER


class StampingTransform(AdoptingTransform):
    """The writing half of `HERTransform`: episodes, goal table, and saving and loading both."""

    identifies_episodes = True  # MovementPriority needs the stamps of a transform that does
    requires_shared_write_state = True  # TorchRL then calls share_memory_ for buffers that processes share

    _added_keys: list[NestedKey]  # the entries that only samples have

    def _make_table(self, capacity: int, goal_spec: TensorSpec | None, max_episode_steps: int | None) -> None:
        """Create the lanes, and the goal table if the spec of a goal is given."""
        self.capacity = capacity
        self._max_episode_steps = max_episode_steps
        self._splits_silently = max_episode_steps is None or max_episode_steps > capacity  # until the warning
        self.lanes = Lanes(min(capacity, max_episode_steps or capacity), patience=capacity - 1)
        self.table = None if goal_spec is None else GoalTable.of_spec(capacity, goal_spec, self._apart)
        self.longest_window = 1  # the largest number of steps that a stored transition spans
        self._n_step: NStepReward | None = None  # set if a MultiStepTransform comes before
        self._ids_around: list[int] | None = None  # the ids of the other transforms at the last check

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stamp transitions ``[*batch]`` with their episode and step, and keep their achieved goals."""
        self._check_no_data_set("a write would overwrite it (its files, if it is memory-mapped)")
        neighbours = self._neighbours
        if neighbours is None or ids_around(self) != self._ids_around:
            neighbours = self._check_neighbours()
        if isinstance(tensordict, list):
            tensordict = torch.stack(tensordict)
        batch, written = tensordict.batch_size, None
        if batch.numel():
            earlier_goals = None if self.table is None else self.table.goals
            written = self._read(tensordict, earlier_goals, neighbours.after if self.her_ratio else None)
            neighbours.check_write(tensordict)
        n_step = None if neighbours.multi_step is None else self._n_step
        if n_step is not None:
            n_step.keep_flags(tensordict)
        if written is None:
            return tensordict.set(STAMP, torch.zeros(*batch, 2, dtype=torch.int64, device=tensordict.device))
        stamps = torch.from_numpy(self._track(tensordict, written, n_step)).to(written.goals.device)
        return tensordict.set(STAMP, stamps.view(*batch, 2))

    def _track(self, tensordict: TensorDictBase, written: WrittenTransitions, n_step: NStepReward | None) -> np.ndarray:
        """Assign transitions ``[*batch]`` to episodes and publish goals; return their stamps, ``int64 [n, 2]``."""
        with self._writing():
            if n_step is not None:
                n_step.check_write(written, tensordict.batch_size)
                self.longest_window = max(self.longest_window, n_step.multi_step.n_steps)
            goals, table = written.goals, self.table
            if table is None:
                table = self.table = GoalTable.like(goals, self.capacity, self._apart)
            tracked = self.lanes.track(written, goals, table.episode_ids[1] + 1)
            table.new_episodes(tracked.opened)
            for steps in tracked.published:
                table.append(*steps)
            if self._apart:
                first = np.flatnonzero(tracked.stamps[:, 1] == 0)
                rows = written.rows_of(tensordict.select(self.keys.achieved_goal, self.keys.desired_goal))
                self._keep_apart(table, tracked.stamps[first, 0], rows[torch.from_numpy(first).to(goals.device)])
            if tracked.cut and self._splits_silently:
                self._splits_silently = False
                self._warn_of_split(max(tracked.cut, self.lanes.max_episode_steps + 1))
            self.lanes.running = tracked.running
            self._diagnosis.check_tracked(tensordict, written, tracked, table)
        return add_padding(tracked.stamps, written.mask, step=self.capacity)

    def _warn_of_split(self, needed: int) -> None:
        longest = self.lanes.max_episode_steps
        if longest < self.capacity:
            cause = f"An episode has at least {needed} steps, but one in shared memory at most {longest}"
            remedy = f"Pass max_episode_steps={needed}, or more."
        else:
            cause = f"An episode has at least {needed} steps, but capacity is {self.capacity}"
            remedy = f"Pass the number of transitions that the storage can hold as capacity, and at least {needed}."
        warn_user(
            f"{cause}, so hindsight splits it: new goals come only from the same part. {remedy} If you want to split "
            "episodes, pass max_episode_steps."
        )

    def _check_neighbours(self) -> Neighbours:
        """Return the other transforms of the buffer, and check them if they changed."""
        neighbours = Neighbours.of(self)
        self._check_around_adopted(neighbours)
        if neighbours != self._neighbours:
            replaced = {*self._goal_keys, *self._one_step.replaced_keys, *self._added_keys}
            neighbours.check_hindsight(replaced, self.keys)
            multi_step = neighbours.multi_step
            if multi_step is not None:
                check_n_step_keys(multi_step, self.keys)
                if self._n_step is None:
                    self._n_step = NStepReward(self._one_step, self.goal_fn is not None, multi_step)
                self._n_step.multi_step = multi_step  # a copy of the buffer has its own MultiStepTransform
            self._neighbours = neighbours
        self._ids_around = ids_around(self)
        return neighbours

    def clear(self) -> None:
        """Drop the running episodes and all goals. Call it together with ``rb.empty()``.

        Raises:
            RuntimeError: if the transform has adopted a data set.

        Examples:
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> her = HERTransform(EnvReward(env), capacity=1000)
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her)
            >>> _ = rb.extend(env.rollout(50))
            >>> rb.empty()
            >>> her.clear()
            >>> her.report().table_size
            0
        """
        self._check_no_data_set("its goals would be lost")
        with self._writing():
            self._end_episodes()
            if self.table is not None:
                self.table.clear()

    def flush(self) -> None:
        """End the running episodes, so that their transitions can be relabelled. The next write begins new episodes.

        Steps that wait in a ``MultiStepTransform`` because their windows are incomplete are dropped.

        Examples:
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> her = HERTransform(EnvReward(env), her_ratio=1.0, capacity=1000)
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her, batch_size=64)
            >>> _ = rb.extend(env.rollout(30))  # the episode would end after 50 steps
            >>> rb.sample()["hindsight", "relabelled"].any()
            tensor(False)
            >>> her.flush()
            >>> rb.sample()["hindsight", "relabelled"].all()
            tensor(True)
        """
        with self._writing():
            for steps in self._end_episodes():
                assert self.table is not None
                self.table.append(*steps)

    def _end_episodes(self) -> list[Published]:
        """End the running episodes and return the steps that are not in the goal table."""
        self._diagnosis.continuity.loaded_lanes = 0
        if self._n_step is not None:
            self._n_step.flush()
        return self.lanes.flush()

    # Processes, saving

    def _table_at(self, desired: Tensor, dimensions: int) -> GoalTable:
        """Return the table, moved to the device of the sampled goals.

        Sampled and written data can be on different devices. ``dimensions`` is the number of batch dimensions.
        """
        table = self.table
        if table is None or table.goals.device != desired.device:
            with self._lock:
                if self.table is None:  # only the storage was loaded, without the state of this transform
                    goals = desired.flatten(0, dimensions - 1) if dimensions else desired[None]
                    self.table = GoalTable.like(goals, self.capacity, self._apart)
                table = self.table
                table.to(desired.device)
        return table

    def share_memory_(self) -> StampingTransform:
        """Move the goal table into shared memory. TorchRL calls this method for buffers shared between processes.

        Raises:
            RuntimeError: if there is no goal table yet: pass ``goal_spec``.
        """
        if self.table is None:
            raise RuntimeError(
                "A buffer shared between processes needs the goal table before the first write: pass "
                'goal_spec=env.observation_spec["achieved_goal"] (of one environment) to HERTransform.'
            )
        if not self.table.is_shared:
            self.table.share_memory_(self._max_episode_steps)
            longest = self._max_episode_steps or SHARED_PIECES * PIECE
            self.lanes.max_episode_steps = min(self.capacity, longest)
            self._lock.share_memory_()
        return self

    def _state_before_write(self) -> dict[str, Any]:
        return {"lanes": copy.copy(self.lanes)}

    def _reset_after_fork(self) -> None:
        if self._lock.is_shared:
            self.lanes = self.lanes.without_episodes()
            if self._n_step is not None:
                self._n_step.forget_rows()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the goal table and the running episodes for ``state_dict``."""
        with self._writing():
            return {
                "table": None if self.table is None else self.table.state_dict(),
                "lanes": self.lanes.state_dict(),
                "longest_window": self.longest_window,
                **self._adopted_state(),
            }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state` of a transform with the same goals and capacity.

        Raises:
            ValueError: if goals, capacity or strategies differ from the saved ones, or if another transform saved it.
        """
        check_saved_without_compact_goals(state)
        if "held" in state:
            raise ValueError(SAVED_BY_THE_OTHER.format("HindsightAugmentation", "HERTransform"))
        with self._writing():
            adopted = self._check_adopted_state(state)
            lanes = state["lanes"]["lanes"]
            longest = 0 if lanes is None else max(lanes[:, STEPS].tolist(), default=0)
            if self._lock.is_shared and longest > self.lanes.max_episode_steps:
                raise ValueError(
                    f"A saved running episode has {longest} steps, but episodes in shared memory have at most "
                    f"{self.lanes.max_episode_steps}. Create the transform with max_episode_steps={longest} or more, "
                    "then load."
                )
            self.table = load_table(self.table, state["table"], self.capacity, self._apart)
            self.lanes.load_state_dict(state["lanes"])
            self.adopted, self._has_checked_stamps = adopted, False
            self._diagnosis.continuity.loaded_lanes = len(self.lanes)
            self.longest_window = state["longest_window"]
            if self._n_step is not None:
                self._n_step.may_restart = True

    def __getstate__(self) -> dict[str, Any]:
        state = self._state_of_copy()
        if self._lock.is_shared:  # the open lanes belong to the process that writes them
            state |= {"lanes": self.lanes.without_episodes(), "_n_step": None}
        return state
