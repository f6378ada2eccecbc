"""A transform that adopts a data set: its goals are read, and its transitions stay where they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.episodes.transitions import WrittenTransitions, map_goals
from torchrl_her.goals.table import GoalTable, RowsBefore
from torchrl_her.keys import get_entry
from torchrl_her.n_step import NStepReward
from torchrl_her.neighbours import Neighbours
from torchrl_her.offline.data_set import DataSet, Lacking
from torchrl_her.relabel import RelabelTransform


class AdoptingTransform(RelabelTransform):
    """The part of `HERTransform` that adopts a data set.

    Attributes:
        adopted (Lacking, optional): the entries that the adopted data set lacks; None if nothing was adopted.
    """

    her_ratio: float
    capacity: int
    tracker: EpisodeTracker
    table: GoalTable | None
    _rows_before: RowsBefore
    _ids_around: list[int] | None
    adopted: Lacking | None = None
    _has_checked_stamps = False  # whether a sample of data without desired goals was of the adopted data set

    @abstractmethod
    def _track(self, tensordict: TensorDictBase, written: WrittenTransitions, n_step: NStepReward | None) -> np.ndarray:
        """Assign transitions ``[*batch]`` to episodes and publish goals; return their stamps, ``int64 [n, 2]``."""

    def adopt(self, data: TensorDictBase) -> TensorDictBase:
        """Make the transitions of a data set ready to be sampled with hindsight, without copying them.

        The goals and the ends of episodes are read piece by piece, and the goal table is filled. An episode ends with a
        done flag, with the last transition of its trajectory id, with its row ``[..., T]``, or with the data. Episodes
        of several ids may alternate. The checks are those of a write.

        If the data have no desired goals, ``her_ratio=1`` is needed: goals, rewards and, if the reward module writes
        it, ``terminated`` are created when sampling. A transition that cannot be relabelled, such as padding, gets its
        own outcome as its goal. If only rewards are missing, all samples get those of the reward module.

        Writing to the transform is an error from then on. New transitions belong into a second buffer: combine both
        with ``ReplayBufferEnsemble``.

        Args:
            data (TensorDictBase): transitions ``[N]`` in the order in which they were collected, or ``[..., T]``, the
                last dimension of which is time; in memory or memory-mapped, on any device. It is not modified.

        Returns:
            TensorDictBase: a shallow copy ``[*batch]`` of ``data`` that shares its entries and has one more,
            ``"hindsight_stamp"``, ``int64 [*batch, 2]``. Pass it to ``TensorStorage``, flattened with ``.reshape(-1)``
            if it has several dimensions.

        Raises:
            ValueError: if ``capacity`` is smaller than the data, if something was adopted, written, loaded or shared
                before, if the data have no desired goals and ``her_ratio < 1``, or if `HERTransform` would
                refuse to write the transitions. The transform is then as it was.
            KeyError, TypeError: if an entry is missing, or is no tensor.

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
        self._check_lacking(data_set.lacking)
        before = self.tracker, self.table, self._diagnosis, self._is_checked
        try:
            adopted = data_set.with_stamps(self._track_all(data_set))
        except BaseException:
            self.tracker, self.table, self._diagnosis, self._is_checked = before
            raise
        if self.her_ratio and not data_set.lacking.goals:
            self._diagnosis.search_later(data_set.rows_to_search())
        self.adopted = data_set.lacking
        self._neighbours = self._ids_around = None  # the next sample checks the other transforms
        return adopted

    @property
    def _creates_goals(self) -> bool:
        """Whether samples have new desired goals, rewards and ends only."""
        return self.adopted is not None and self.adopted.goals

    def _track_all(self, data_set: DataSet) -> np.ndarray:
        """Fill a new goal table with the goals of a data set; return the stamps of its rows, ``int64 [rows, 2]``."""
        count = data_set.count
        if not self._rows_before.rows:
            self._check_capacity(count, count)
        if self.table is not None:
            self.table = GoalTable.like(self.table.goals, self.capacity, self._rows_before)
        self.tracker = EpisodeTracker(self.tracker.max_episode_steps, count, publish_running=False, copies=False)
        self._diagnosis = self._diagnosis.restarted(compares_rewards=not any(data_set.lacking))
        self._is_checked = False
        stamps, is_empty = np.empty((len(data_set.ends), 2), np.int64), count > 1
        for piece in data_set.pieces():
            earlier_goals = None if self.table is None else self.table.goals
            written = self._read(piece.data, earlier_goals, None, piece.names)
            is_empty = is_empty and not bool(written.goals.any())
            stamps[piece.rows] = self._track(piece.data, written._replace(done=piece.ends), None)
        if is_empty:
            raise ValueError(
                "All achieved goals of the data set are zeros, so there is nothing to relabel with: look at the data. "
                "MinariExperienceReplay of TorchRL 0.14.1 returns zeros: use load_minari(minari.load_dataset(...))."
            )
        assert self.table is not None
        ended = self.tracker.flush()
        for begin in range(0, len(ended), 256):  # one by one they would be slow, and all at once take memory
            self.table.publish(ended[begin : begin + 256])
        self._check_capacity(int(self.table.counters[0]), count)
        return stamps

    def _check_capacity(self, needed: int, count: int) -> None:
        if needed > self.capacity:
            raise ValueError(
                f"The data set has {count} transitions, whose goals take {needed} rows of the goal table, and capacity "
                f"is {self.capacity}: pass capacity={needed} to HERTransform."
            )

    def _check_untouched(self) -> None:
        if self.adopted is not None:
            raise ValueError("This transform has adopted a data set, and takes one only: make another HERTransform.")
        table = self.table
        if table is not None and table.is_shared:
            raise ValueError("Processes share the goal table already: call adopt() before the buffer is made.")
        if self.tracker.written or (table is not None and table.writes):
            raise ValueError(
                "Transitions were written through this transform or loaded into it, and adopt() needs an empty goal "
                "table: make another HERTransform for the data set, and combine both buffers with ReplayBufferEnsemble."
            )

    def _check_lacking(self, lacking: Lacking) -> None:
        """Check that the entries that a data set lacks can be created."""
        if lacking.goals and self.her_ratio < 1:
            raise ValueError(
                f"The data set has no desired goals under {self.keys.desired!r}, and with her_ratio={self.her_ratio} a "
                "share of the samples would keep theirs: name them with desired_goal_key=..., or pass her_ratio=1."
            )
        if lacking.goals and self._rows_before.desired:
            raise ValueError(
                "The data set has no desired goals, and the strategy PastDesired draws them: leave it out."
            )
        if lacking.rewards and self._reads_steps and self.her_ratio < 1:
            raise ValueError(
                f"The data set has no rewards, and ReachedReward has none for original goals: pass her_ratio=1 (it is "
                f"{self.her_ratio}), or a reward of the goals."
            )

    def _check_no_data_set(self, action: str) -> None:
        """Raise an error if a data set was adopted: an action would overwrite it, or lose its goals."""
        if self.adopted is not None:
            raise RuntimeError(
                f"This HERTransform has adopted a data set, and {action}. Write new transitions to a second buffer "
                "with a HERTransform of its own, and sample from ReplayBufferEnsemble(data_buffer, new_buffer)."
            )

    def _check_around_adopted(self, neighbours: Neighbours) -> None:
        """Check the other transforms of the buffer, which were unknown when the data set was adopted."""
        if self.adopted is None:
            return
        if neighbours.multi_step is not None:
            raise ValueError(
                "MultiStepTransform is listed before HERTransform and makes its windows when transitions are written, "
                "which adopted data never are: samples would be single steps. Leave it out, or write the data set with "
                "rb.extend in place of adopting it."
            )
        self._diagnosis.search(neighbours.after)

    def _create(
        self, sample: TensorDictBase, stored: dict[NestedKey, Any], episode: Tensor, step: Tensor
    ) -> Collection[NestedKey]:
        """Put goals that the data set lacks into the stored entries by key; return the keys that may be lacking.

        Each transition of the sample ``[*batch]`` gets its own outcome, and keeps it if it is not relabelled.
        """
        assert self.adopted is not None
        keys = self.keys
        if not self._creates_goals:
            return (keys.reward,) if self.adopted.rewards else ()
        self._check_lacking(self.adopted)  # her_ratio may have changed
        is_cheap = episode.device.type == "cpu" or not self._has_checked_stamps
        if is_cheap and not torch.compiler.is_compiling():
            self._check_stamps(episode, step)
        batch = sample.batch_size
        states = get_entry(sample, keys.next_achieved, "achieved_goal_key")
        outcomes = map_goals(states.reshape(batch.numel(), *states.shape[len(batch) :]), self.goal_fn).detach()
        stored.update(dict.fromkeys(self._goal_keys, outcomes.view(*batch, *outcomes.shape[1:])))
        return (keys.reward,)

    def _check_stamps(self, episode: Tensor, step: Tensor) -> None:
        """Check that a sample, ``int64 [n]`` each, is of the adopted data set: other rows would keep their outcomes."""
        assert self.table is not None
        first, last = self.table.episode_ids
        unknown = ((episode < first) | (episode > last)) & (step < self.capacity)  # padding has the step capacity
        if bool(unknown.any()):
            raise ValueError(
                "The sample has transitions that this HERTransform has not adopted, and no desired goals: make the "
                "storage of what adopt() returned, and save and load both together."
            )
        self._has_checked_stamps = True

    def _adopted_state(self) -> dict[str, Any]:
        return {"adopted": None if self.adopted is None else self.adopted._asdict()}

    def _check_adopted_state(self, state: dict[str, Any]) -> Lacking | None:
        """Check the result of `_adopted_state`, and return what the saved data set lacked."""
        saved = state.get("adopted")
        lacking = None if saved is None else Lacking(**saved)
        if lacking is None and self.adopted is not None:
            raise ValueError(
                "This HERTransform has adopted a data set, and the saved one had not: load into a new buffer."
            )
        if lacking is not None:
            self._check_lacking(lacking)
        return lacking
