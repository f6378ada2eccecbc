"""Holds transitions back until their episode ends."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_her._torchrl import warn_user
from torchrl_her.episodes.lanes import EpisodeSteps
from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.storage.row_layout import WORD, RowLayout


class HeldTransitions:
    """Transitions that wait for the end of their episode. The lanes of a tracker keep them as packed rows."""

    def __init__(self, tracker: EpisodeTracker):
        self.tracker = tracker  # its lanes keep rows, int64 [steps, words]
        self.layout: RowLayout | None = None  # the layout of the rows; None before the first write
        self.ended: list[EpisodeSteps] = []  # episodes that ended but are not stored yet
        self._has_warned = False

    def __len__(self) -> int:
        return sum(lane.steps for lane in self.tracker.open_lanes()) + sum(len(episode.kept) for episode in self.ended)

    def copy(self) -> HeldTransitions:
        """Return a copy that later changes of this object do not affect."""
        copied = copy.copy(self)
        copied.tracker, copied.ended = self.tracker.copy(), [*self.ended]
        return copied

    def without_transitions(self) -> HeldTransitions:
        """Return an empty object with the same settings, for another process."""
        return HeldTransitions(self.tracker.without_lanes())

    def pack(self, rows: TensorDictBase) -> Tensor:
        """Pack transitions ``[n]`` into rows ``int64 [n, words]``.

        Raises:
            ValueError: if other transitions are held back whose entries differ.
        """
        with torch.no_grad():
            try:
                if self.layout is not None:
                    return self.layout.pack(rows)
            except ValueError:  # the entries differ from the layout
                if len(self):
                    raise
            self.layout = RowLayout(rows, 1)
            return self.layout.pack(rows)

    def unpack(self, packed: Tensor) -> TensorDict:
        """Return rows ``int64 [n, words]`` as transitions ``[n]`` that share their memory."""
        if self.layout is None:
            return TensorDict(batch_size=[len(packed)])
        return self.layout.unpack(packed)

    def take_ended(self) -> list[EpisodeSteps]:
        """Remove and return the ended episodes, which the caller stores."""
        ended, self.ended = self.ended, []
        return ended

    def warn_if_episodes_wait(self) -> None:
        """Warn once if all writes are single transitions, so that nothing is ever stored."""
        if len(self.ended) > 1 and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{len(self.ended)} episodes have ended in writes of one transition, and wait for a larger write: "
                "HindsightAugmentation cannot distinguish such a write from rb.add, which stores one transition. "
                "Extend with several transitions at a time (frames_per_batch), use HERTransform, or extend with an "
                "empty batch, rb.extend(data[:0]).",
            )

    def none(self) -> TensorDict:
        """Return a tensordict ``[0]`` with the entries of the last write."""
        return self.unpack(torch.empty(0, 0 if self.layout is None else self.layout.words, dtype=WORD))

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the transitions, their lanes and the ended episodes."""
        lanes = self.tracker.state_dict()
        kept = [lane.pop("kept") for lane in lanes["lanes"]] + [episode.kept for episode in self.ended]
        # Loaded pieces can be on another device than pieces written after loading.
        rows = self.unpack(torch.cat([piece.to(kept[-1].device) for piece in kept])) if kept else TensorDict()
        return {
            "rows": dict(rows.items(include_nested=True, leaves_only=True)),
            "counts": [len(piece) for piece in kept],
            "lanes": lanes,
            "ended": [episode.episode for episode in self.ended],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. It replaces all transitions."""
        self.layout, self.ended = None, []
        lanes: list[dict[str, Any]] = []
        if state["rows"]:
            rows = TensorDict(batch_size=[sum(state["counts"])])
            for key, value in state["rows"].items():
                rows.set(key, value)
            pieces = iter(self.pack(rows).split(state["counts"]))
            lanes = [lane | {"kept": next(pieces)} for lane in state["lanes"]["lanes"]]
            self.ended = [EpisodeSteps(episode, 0, next(pieces)) for episode in state["ended"]]
        self.tracker.load_state_dict(state["lanes"] | {"lanes": lanes})
