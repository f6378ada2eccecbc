"""Holds transitions back until their episode ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.episodes.lanes import STEPS, Lanes, Published
from torchrl_her.packed_storage.row_layout import WORD, RowLayout


class HeldTransitions:
    """Transitions that wait for the end of their episode. Those of running episodes are packed rows."""

    def __init__(self, lanes: Lanes):
        self.lanes = lanes  # they keep rows, int64 [steps, words]
        self.layout: RowLayout | None = None  # the layout of the rows; None before the first write
        self.ended: tuple[Published, ...] = ()  # episodes that ended but are not stored yet
        self._has_warned = False

    def __len__(self) -> int:
        running = self.lanes.running
        return sum(len(each.data) for each in self.ended) + (
            0 if running is None else int(running.lanes[:, STEPS].sum())
        )

    def drop(self) -> None:
        """Drop all transitions."""
        self.lanes.running, self.layout, self.ended = None, None, ()

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

    def warn_if_episodes_wait(self) -> None:
        """Warn once if all writes are single transitions, so that nothing is ever stored."""
        count = sum(len(each.episode) for each in self.ended)
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
        """Return the entries of the transitions, the running episodes and the ended ones."""
        lanes = self.lanes.state_dict()
        parts = [each.data for each in self.ended] + ([] if lanes["lanes"] is None else [lanes.pop("data")])
        # Loaded transitions can be on another device than those written after loading.
        rows = self.unpack(torch.cat([part.to(parts[-1].device) for part in parts])) if parts else TensorDict()
        return {
            "rows": dict(rows.items(include_nested=True, leaves_only=True)),
            "lanes": lanes,
            "ended": [torch.from_numpy(np.stack([each.episode, each.length])) for each in self.ended],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. It replaces all transitions."""
        self.layout, self.ended, lanes = None, (), state["lanes"]
        if state["rows"]:
            rows = TensorDict(batch_size=[len(next(iter(state["rows"].values())))])
            for key, value in state["rows"].items():
                rows.set(key, value)
            ended = [each.numpy(force=True) for each in state["ended"]]
            counts = [int(count.sum()) for _, count in ended]
            *parts, kept = self.pack(rows).split([*counts, len(rows) - sum(counts)])
            self.ended = tuple(
                Published(episode, np.zeros_like(count), count, part)
                for (episode, count), part in zip(ended, parts, strict=True)
            )
            lanes = lanes | {"data": kept}
        self.lanes.load_state_dict(lanes)
