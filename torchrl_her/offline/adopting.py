"""Adopting a data set: its goals are copied to the goal table, and its transitions stay where they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her.episodes.lanes import Lanes
from torchrl_her.episodes.transitions import WrittenTransitions, map_goals
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import get_entry
from torchrl_her.n_step import NStepReward
from torchrl_her.neighbours import Neighbours
from torchrl_her.offline.data_set import DataSet, MissingEntries
from torchrl_her.relabel import RelabelTransform


class AdoptingTransform(RelabelTransform):
    """The part of `HERTransform` that adopts a data set.

    Attributes:
        adopted (MissingEntries, optional): the entries that the adopted data set lacks; None if nothing was adopted.
    """

    her_ratio: float
    capacity: int
    lanes: Lanes
    table: GoalTable | None
    _apart: int
    _ids_around: list[int] | None
    adopted: MissingEntries | None = None
    _has_checked_stamps = False  # whether a sample without desired goals has passed the check

    @abstractmethod
    def _track(self, tensordict: TensorDictBase, written: WrittenTransitions, n_step: NStepReward | None) -> np.ndarray:
        """Assign transitions ``[*batch]`` to episodes, publish goals, and return the stamps, ``int64 [n, 2]``."""

    def adopt(self, data: TensorDictBase) -> TensorDictBase:
        """Prepare the transitions of a data set for sampling with hindsight, without copying them.

        The data set is read in pieces: its goals fill the goal table, and its transitions are checked as in a write. An
        episode ends at a done flag, at the last transition of its trajectory id, at the end of its row ``[..., T]``, or
        at the end of the data set. Transitions of several trajectory ids may alternate.

        If the data set has no desired goals, ``her_ratio=1`` is required. Sampling then creates desired goals and
        rewards, and also ``terminated`` if the reward module writes it. A transition that cannot be relabelled,
        such as padding, gets its own outcome as its goal. If only the rewards are missing, the reward module computes
        all of them.

        Afterwards, writing to the transform is an error. Put new transitions into a second buffer, and combine both
        buffers with ``ReplayBufferEnsemble``.

        Args:
            data (TensorDictBase): transitions ``[N]`` in the order of collection, or ``[..., T]`` with time as the last
                dimension; in memory or memory-mapped, on any device. The data set is not modified.

        Returns:
            TensorDictBase: a shallow copy of ``data``, ``[*batch]``, that shares all entries and adds
                ``"hindsight_stamp"``, ``int64 [*batch, 2]``. Pass it to ``TensorStorage``, flattened with
                ``.reshape(-1)`` if it has several dimensions. Otherwise, each row holds T transitions, and a sample of
                256 rows has the batch size ``[256, T]``.

        Raises:
            ValueError: if ``capacity`` is smaller than the data set; if the transform has adopted, written, loaded or
                shared transitions before; if desired goals are missing and ``her_ratio < 1``; or if a write would
                refuse the transitions. The transform is then unchanged.
            KeyError: if an entry is missing.
            TypeError: if ``data`` is not a TensorDict, or an entry is not a tensor.

        Examples:
            >>> import torch
            >>> from torchrl.data import TensorDictReplayBuffer, TensorStorage
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> data = torch.cat([env.rollout(50) for _ in range(10)])
            >>> her = HERTransform(EnvReward(env), capacity=len(data))
            >>> rb = TensorDictReplayBuffer(storage=TensorStorage(her.adopt(data)), transform=her, batch_size=64)
            >>> rb.sample()["hindsight", "relabelled"].any()
            tensor(True)
        """
        self._check_untouched()
        data_set = DataSet(data, self.keys, self.goal_fn)
        self._check_missing(data_set.missing)
        before = self.lanes, self.table, self._diagnosis, self._is_checked
        try:
            adopted = data_set.with_stamps(self._track_all(data_set))
        except BaseException:
            self.lanes, self.table, self._diagnosis, self._is_checked = before
            raise
        if self.her_ratio and not data_set.missing.goals:
            self._diagnosis.search_later(data_set.rows_to_search())
        self.adopted = data_set.missing
        self._neighbours = self._ids_around = None  # the next sample checks the other transforms
        return adopted

    @property
    def _creates_goals(self) -> bool:
        """Whether the data set has no desired goals, so that every sample gets a new goal, reward and end."""
        return self.adopted is not None and self.adopted.goals

    def _track_all(self, data_set: DataSet) -> np.ndarray:
        """Fill a new goal table with the goals of a data set; return the stamps of its rows, ``int64 [rows, 2]``."""
        count = data_set.count
        if count > self.capacity:
            raise ValueError(
                f"The data set has {count} transitions, but the goal table holds only {self.capacity} goals: pass "
                f"capacity={count} to HERTransform."
            )
        if self.table is not None:
            self.table = GoalTable.like(self.table.goals, self.capacity, self._apart)
        self.lanes = Lanes(self.lanes.max_episode_steps, count)
        self._diagnosis = self._diagnosis.restarted(compares_rewards=not any(data_set.missing))
        self._is_checked = False
        stamps, is_empty = np.empty((len(data_set.ends), 2), np.int64), count > 1
        for piece in data_set.pieces():
            earlier_goals = None if self.table is None else self.table.goals
            written = self._read(piece.data, earlier_goals, None, piece.names)
            is_empty = is_empty and not bool(written.goals.any())
            stamps[piece.rows] = self._track(piece.data, written._replace(done=piece.ends), None)
        if is_empty:
            raise ValueError(
                "All achieved goals of the data set are zeros, so relabelling has no effect: check the data set. "
                "MinariExperienceReplay of TorchRL 0.14.1 returns zeros: use load_minari(minari.load_dataset(...))."
            )
        assert self.table is not None
        for steps in self.lanes.flush():
            self.table.append(*steps)
        return stamps

    def _check_untouched(self) -> None:
        if self.adopted is not None:
            raise ValueError("This HERTransform has already adopted a data set: create another one for each data set.")
        table = self.table
        if table is not None and table.is_shared:
            raise ValueError("Processes already share the goal table: call adopt() before you create the buffer.")
        if self.lanes.running is not None or (table is not None and table.writes):
            raise ValueError(
                "adopt() needs an empty goal table, but transitions were written or loaded through this HERTransform: "
                "create another one for the data set, and combine both buffers with ReplayBufferEnsemble."
            )

    def _check_missing(self, missing: MissingEntries) -> None:
        """Check that the missing entries of a data set can be created."""
        if missing.goals and self.her_ratio < 1:
            raise ValueError(
                f"The data set has no desired goals under {self.keys.desired_goal!r}, and with "
                f"her_ratio={self.her_ratio} some samples would need them: pass their key as "
                "keys=HERKeys(desired_goal=...), or pass her_ratio=1."
            )
        if missing.goals and any("desired" in each.needs for each in self.strategies.values()):
            raise ValueError(
                "The data set has no desired goals, but the strategy PastDesired draws from them: use another strategy."
            )
        if missing.rewards and self._reads_steps and self.her_ratio < 1:
            raise ValueError(
                "The data set has no rewards, and ReachedReward cannot compute rewards for original goals: pass "
                f"her_ratio=1 (got {self.her_ratio}), or a reward that reads the goals, such as SparseReward."
            )

    def _check_no_data_set(self, action: str) -> None:
        """Raise an error if a data set was adopted; ``action`` says how it would be lost."""
        if self.adopted is not None:
            raise RuntimeError(
                f"This HERTransform has adopted a data set, and {action}. Write new transitions to a second buffer "
                "with its own HERTransform, and sample from ReplayBufferEnsemble(data_buffer, new_buffer)."
            )

    def _check_around_adopted(self, neighbours: Neighbours) -> None:
        """Check the other transforms of the buffer, which were unknown when the data set was adopted."""
        if self.adopted is None:
            return
        if neighbours.multi_step is not None:
            raise ValueError(
                "MultiStepTransform computes n-step returns when transitions are written, but adopted data is never "
                "written, so all samples would be single steps. Remove it, or write the data set with rb.extend "
                "instead of adopting it."
            )
        if neighbours.movement_priority is not None:
            raise ValueError(
                "MovementPriority sets priorities when transitions are written, but adopted data is never written, so "
                "they would be sampled uniformly. Remove it, or write the data set with rb.extend instead of adopting "
                "it."
            )
        self._diagnosis.search(neighbours.after)

    def _create(
        self, sample: TensorDictBase, stored: dict[NestedKey, Any], episode: Tensor, step: Tensor
    ) -> Collection[NestedKey]:
        """Add missing desired goals to the entries in ``stored``, and return the keys that may be missing.

        The goal of each transition ``[*batch]`` is its own outcome. Relabelling replaces it.
        """
        assert self.adopted is not None
        keys = self.keys
        if not self._creates_goals:
            return (keys.next_reward,) if self.adopted.rewards else ()
        self._check_missing(self.adopted)  # her_ratio may have changed
        is_cheap = episode.device.type == "cpu" or not self._has_checked_stamps
        if is_cheap and not torch.compiler.is_compiling():
            self._check_stamps(episode, step)
        batch = sample.batch_size
        states = get_entry(sample, keys.next_achieved_goal, "achieved_goal")
        outcomes = map_goals(states.reshape(batch.numel(), *states.shape[len(batch) :]), self.goal_fn).detach()
        stored.update(dict.fromkeys(self._goal_keys, outcomes.view(*batch, *outcomes.shape[1:])))
        return (keys.next_reward,)

    def _check_stamps(self, episode: Tensor, step: Tensor) -> None:
        """Check that the transitions with these episode ids and steps, ``int64 [n]`` each, were adopted.

        Others would get their own outcomes as goals.
        """
        assert self.table is not None
        first, last = self.table.episode_ids
        unknown = ((episode < first) | (episode > last)) & (step < self.capacity)  # padding has the step capacity
        if bool(unknown.any()):
            raise ValueError(
                "The sample has no desired goals, and contains transitions that this HERTransform has not adopted: "
                "create the storage from the result of adopt(), and save and load storage and transform together."
            )
        self._has_checked_stamps = True

    def _adopted_state(self) -> dict[str, Any]:
        return {"adopted": None if self.adopted is None else self.adopted._asdict()}

    def _check_adopted_state(self, state: dict[str, Any]) -> MissingEntries | None:
        """Check the result of `_adopted_state`, and return the entries that the saved data set lacked."""
        saved = state.get("adopted")
        missing = None if saved is None else MissingEntries(**saved)
        if missing is None and self.adopted is not None:
            raise ValueError(
                "This HERTransform has adopted a data set, but the saved one had not: load into a new buffer."
            )
        if missing is not None:
            self._check_missing(missing)
        return missing
