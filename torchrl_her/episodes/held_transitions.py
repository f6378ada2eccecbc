"""Transitions that are held back until their episode ends."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor
from torch import Tensor

from torchrl_her.episodes.tracker import EpisodeSteps, EpisodeTracker
from torchrl_her.storage.row_layout import RowLayout


class HeldTransitions:
    """Transitions that wait for the end of their episode, each packed into a row of bytes that its lane keeps.

    Attributes:
        tracker (EpisodeTracker): the lanes, which keep rows ``int64 [steps, words]``.
        layout (RowLayout, optional): the layout of the rows; None before the first write.
        ended (list of EpisodeSteps): episodes that ended and are not stored yet.
    """

    def __init__(self, tracker: EpisodeTracker):
        self.tracker = tracker
        self.layout: RowLayout | None = None
        self.ended: list[EpisodeSteps] = []
        self._entries: dict[NestedKey, Any] = {}  # the shapes and dtypes of the transitions
        self._has_warned = False

    def __len__(self) -> int:
        return self.tracker.open_steps + sum(len(episode.kept) for episode in self.ended)

    def without_transitions(self) -> HeldTransitions:
        """Return an object with the same settings that holds nothing, for another process."""
        return HeldTransitions(self.tracker.without_lanes())

    def pack(self, rows: TensorDictBase) -> Tensor:
        """Return transitions ``[n]`` as rows ``int64 [n, words]``.

        Raises:
            TypeError: if an entry is not a tensor.
            ValueError: if transitions with other entries are held back.
        """
        entries = check_same_entries(rows, self._entries if self.tracker.has_open_lanes or self.ended else None)
        if self.layout is None or entries != self._entries:
            self.layout, self._entries = RowLayout(rows, 1), entries
        with torch.no_grad():
            return self.layout.pack(rows)

    def unpack(self, packed: Tensor) -> TensorDict:
        """Return rows ``int64 [n, words]`` as transitions, which share their memory."""
        if self.layout is None:
            return TensorDict(batch_size=[len(packed)])
        return self.layout.unpack(packed)

    def take_ended(self) -> list[EpisodeSteps]:
        """Return the episodes that ended, which are stored now."""
        ended, self.ended = self.ended, []
        return ended

    def warn_if_episodes_wait(self) -> None:
        """Warn once if all writes are single transitions, so that nothing is ever stored."""
        if len(self.ended) > 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{len(self.ended)} episodes have ended in writes of one transition, and wait for a larger write: "
                "HindsightAugmentation cannot tell such a write from rb.add, which stores one transition. Extend with "
                "several transitions at a time (frames_per_batch), use HERTransform, or extend with an empty batch.",
                stacklevel=2,
            )

    def none(self) -> TensorDict:
        """Return a tensordict ``[0]`` with the entries of the last write."""
        return self.unpack(torch.empty(0, 0 if self.layout is None else self.layout.words, dtype=torch.int64))

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions entry by entry, and the lanes and ended episodes that they belong to."""
        lanes = self.tracker.state_dict()
        kept = [lane.pop("kept") for lane in lanes["lanes"]] + [episode.kept for episode in self.ended]
        # Loaded pieces can be on another device than those written since.
        rows = self.unpack(torch.cat([piece.to(kept[-1].device) for piece in kept])) if kept else self.none()
        return {
            "rows": dict(rows.items(include_nested=True, leaves_only=True)) if kept else {},
            "counts": [len(piece) for piece in kept],
            "lanes": lanes,
            "ended": [episode.episode for episode in self.ended],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the transitions by those of `state_dict`."""
        self.layout, self.ended = None, []
        lanes: list[dict[str, Any]] = []
        if state["rows"]:
            rows = TensorDict(batch_size=[sum(state["counts"])])
            for key, value in state["rows"].items():
                rows.set(key, value)
            self.tracker.load_state_dict(state["lanes"] | {"lanes": lanes})  # nothing is held back any more
            pieces = iter(self.pack(rows).split(state["counts"]))
            lanes += [lane | {"kept": next(pieces)} for lane in state["lanes"]["lanes"]]
            self.ended = [EpisodeSteps(episode, next(pieces), 0) for episode in state["ended"]]
        self.tracker.load_state_dict(state["lanes"] | {"lanes": lanes})


def check_same_entries(tensordict: TensorDictBase, before: dict[NestedKey, Any] | None) -> dict[NestedKey, Any]:
    """Check that transitions have the same entries as those that are held back, and return their shapes and dtypes."""
    leaves = list(tensordict.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
    if other := [key for key, value in leaves if is_non_tensor(value)]:
        raise TypeError(
            f"HindsightAugmentation copies the transitions that it holds back, and supports only tensors; {other} "
            "are none: exclude() them, or use HERTransform."
        )
    entries = {key: (value.shape[1:], value.dtype) for key, value in leaves}
    if before is not None and entries != before:
        differing = [key for key in {**before, **entries} if before.get(key) != entries.get(key)]
        changes = ", ".join(f"{key!r}: {before.get(key)} before, {entries.get(key)} now" for key in differing)
        raise ValueError(
            f"The entries differ from those of the transitions that are held back ({changes}): write the same entries "
            "each time."
        )
    return entries
