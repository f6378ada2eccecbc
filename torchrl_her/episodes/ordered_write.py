"""A write while its transitions are assigned to episodes, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her.episodes.lanes import EpisodeSteps, Key
from torchrl_her.episodes.transitions import WrittenTransitions


class TrackedTransitions(NamedTuple):
    """The episodes of the transitions of one write, in the order of writing."""

    stamps: np.ndarray  # int64 [n, 2], the episode id of each transition and its step in the episode
    episodes: list[EpisodeSteps]  # at most one entry per episode
    opened: int  # how many episodes began
    continued: int  # how many open lanes were continued
    breaks: np.ndarray  # int64, the positions of transitions that begin an episode although none had ended
    ambiguous: int  # how many transitions could continue several lanes


@dataclass(slots=True)
class OrderedWrite:
    """The ``n`` transitions of one write, ordered by lane, and the episodes found so far."""

    transitions: WrittenTransitions
    order: np.ndarray | None  # int64 [n], their positions in the order of writing; None if it is the same
    kept: Tensor  # [n, ...], what lanes keep of each
    before: Tensor | None  # [n, rows, ...], what lanes keep before the first transition of an episode
    next_episode: int
    stamps: np.ndarray  # int64 [n, 2]
    episodes: dict[int, EpisodeSteps] = field(default_factory=dict)
    opened: int = 0
    continued: int = 0
    ambiguous: int = 0
    breaks: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, written: WrittenTransitions, kept: Tensor, before: Tensor | None, next_episode: int) -> OrderedWrite:
        """Order transitions by lane, and what lanes keep of them."""
        order, written = _order_by_lane(written)
        if order is not None:
            index = torch.from_numpy(order).to(kept.device)
            kept, before = kept[index], None if before is None else before[index]
        kept = kept.contiguous()  # narrow_copy of other tensors copies all rows first
        return cls(written, order, kept, before, next_episode, np.empty((len(written.done), 2), dtype=np.int64))

    def key(self, position: int, goals: np.ndarray) -> Key:
        """Return the trajectory id of a transition, and the bytes of its goals of ``goals``, ``void [n]``."""
        trajectory = self.transitions.trajectory
        return None if trajectory is None else int(trajectory[position]), goals[position].tobytes()

    def tracked(self) -> TrackedTransitions:
        """Return the results in the order of writing."""
        stamps, breaks = self.stamps, np.array(self.breaks, dtype=np.int64)
        if self.order is not None:
            breaks = self.order[breaks]
            stamps[self.order] = stamps.copy()
        episodes = list(self.episodes.values())
        return TrackedTransitions(stamps, episodes, self.opened, self.continued, breaks, self.ambiguous)


def _order_by_lane(written: WrittenTransitions) -> tuple[np.ndarray | None, WrittenTransitions]:
    """Order transitions lane by lane, each lane in time.

    Return the order, ``int64 [n]`` or None if it is that of writing, and the transitions; their goals keep their order.
    """
    trajectory = written.trajectory
    if trajectory is None or (trajectory[1:] >= trajectory[:-1]).all():
        return None, written
    order = np.argsort(trajectory, kind="stable")
    columns = ("start", "outcome", "done", "begins", "trajectory")
    return order, written._replace(**{name: getattr(written, name)[order] for name in columns})
