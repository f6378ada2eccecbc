"""Holds transitions back until their episode ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.episodes.lanes import Lanes, Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.goals.names import split_name
from torchrl_her.goals.table import to_device
from torchrl_her.packed_storage.row_layout import WORD, RowLayout


class Log(NamedTuple):
    """Transitions in the order of writing. A write makes a new object, so that an interrupted write changes nothing.

    In place, a write changes only rows from ``used`` on.
    """

    rows: Tensor  # int64 [size, words], packed transitions
    names: np.ndarray  # int64 [size], the name of each transition; 0 if it is no longer held back
    used: int = 0  # the number of rows written
    held: int = 0  # the number of transitions that are held back
    ended: np.ndarray = np.empty(0, np.int64)  # episodes that have ended and were not taken, in the order of their ends
    episodes: int = 0  # the number of episodes so far

    def with_transitions(self, rows: Tensor, names: np.ndarray) -> Log:
        """Return a log with more transitions, ``[n, words]``. If it is full, only those held back are kept."""
        old = self
        if self.used + len(rows) > len(self.names):
            kept = np.flatnonzero(self.names[: self.used])
            size = 2 * (len(kept) + len(rows))
            memory, new_names = rows.new_empty(size, rows.shape[1]), np.zeros(size, np.int64)
            if len(kept):
                memory[: len(kept)] = self.rows[to_device(kept, self.rows.device)].to(rows.device)
            new_names[: len(kept)] = self.names[kept]
            old = self._replace(rows=memory, names=new_names, used=len(kept))
        end = old.used + len(rows)
        old.rows[old.used : end] = rows
        old.names[old.used : end] = names
        return old._replace(used=end, held=old.held + len(rows))


class HeldTransitions:
    """Transitions that wait for the end of their episode, as packed rows."""

    def __init__(self, lanes: Lanes):
        self.lanes = lanes
        self.drop()
        self._has_warned = False

    def __len__(self) -> int:
        return self.log.held

    def drop(self) -> None:
        """Drop all transitions."""
        self.lanes.running = None
        self.layout: RowLayout | None = None  # the layout of the rows; None before the first write
        self.log = Log(torch.empty(0, 0, dtype=WORD), np.empty(0, np.int64))

    def add(self, rows: TensorDictBase, written: Write) -> Tracked:
        """Hold transitions ``[n]`` back, without padding.

        Raises:
            ValueError: if other transitions are held back whose entries differ.
        """
        packed = self._pack(rows)
        tracked = self.lanes.track(written, self.log.episodes + 1)
        log = self.log.with_transitions(packed, tracked.steps.name)
        ended, episodes = np.append(log.ended, tracked.ended), log.episodes + tracked.opened
        self.log = log._replace(ended=ended, episodes=episodes)
        self.lanes.running = tracked.running
        return tracked

    def flush(self) -> None:
        """End the running episodes."""
        self.log = self.log._replace(ended=np.append(self.log.ended, self.lanes.flush()))

    def take_ended(self) -> tuple[Tensor, np.ndarray]:
        """Take the packed transitions of ended episodes, ``int64 [sum(length), words]``, and the lengths, ``int64``."""
        log = self.log
        names, ended = log.names.copy(), log.ended
        episode, step = split_name(names[: log.used])
        first = ended.min()
        order = np.full(ended.max() - first + 2, -1)  # of the ends, for each episode from the first one on
        order[ended - first] = np.arange(len(ended))
        of_row = order[(episode - first).clip(-1, len(order) - 1)]
        taken = np.flatnonzero(of_row >= 0)
        taken = taken[np.lexsort((step[taken], of_row[taken]))]
        names[taken] = 0
        self.log = log._replace(names=names, held=log.held - len(taken), ended=ended[:0])
        lengths = np.bincount(of_row[taken], minlength=len(ended))
        return log.rows.index_select(0, to_device(taken, log.rows.device)), lengths

    def _pack(self, rows: TensorDictBase) -> Tensor:
        with torch.no_grad():
            try:
                if self.layout is not None:
                    return self.layout.pack(rows)
            except ValueError:  # the entries differ from the layout
                if len(self):
                    raise
            self.layout = RowLayout(rows, 1)
            self.log = self.log._replace(rows=torch.empty(0, 0, dtype=WORD), names=self.log.names[:0], used=0)
            return self.layout.pack(rows)

    def unpack(self, packed: Tensor) -> TensorDict:
        """Return rows ``int64 [n, words]`` as transitions ``[n]`` that share their memory."""
        if self.layout is None:
            return TensorDict(batch_size=[len(packed)])
        return self.layout.unpack(packed)

    def warn_if_episodes_wait(self) -> None:
        """Warn once if all writes are single transitions, so that nothing is ever stored."""
        count = len(self.log.ended)
        if count > 1 and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{count} episodes have ended in writes of one transition, and wait for a larger write: "
                "HindsightAugmentation cannot distinguish such a write from rb.add, which stores one transition. "
                "Extend with several transitions at a time (frames_per_batch), use HERTransform, or extend with an "
                "empty batch, rb.extend(data[:0]).",
            )

    def empty_batch(self) -> TensorDict:
        """Return a tensordict ``[0]`` with the entries of the last write."""
        return self.unpack(torch.empty(0, 0 if self.layout is None else self.layout.words, dtype=WORD))

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the transitions and their episodes."""
        log = self.log
        kept = np.flatnonzero(log.names[: log.used])
        rows = self.unpack(log.rows[to_device(kept, log.rows.device)]) if len(kept) else TensorDict()
        return {
            "rows": dict(rows.items(include_nested=True, leaves_only=True)),
            "names": torch.from_numpy(log.names[kept]),
            "ended": torch.from_numpy(log.ended.copy()),
            "episodes": log.episodes,
            "lanes": self.lanes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. It replaces all transitions."""
        self.drop()
        names = state["names"].numpy(force=True)
        if len(names):
            rows = TensorDict(batch_size=[len(names)])
            for key, value in state["rows"].items():
                rows.set(key, value)
            self.log = self.log.with_transitions(self._pack(rows), names)
        self.log = self.log._replace(ended=state["ended"].numpy(force=True).copy(), episodes=state["episodes"])
        self.lanes.load_state_dict(state["lanes"])
