"""The transitions of one write, ordered by lane, while they are assigned to episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her.episodes.lanes import EpisodeSteps, Key
from torchrl_her.episodes.transitions import WrittenTransitions


class TrackedTransitions(NamedTuple):
    """The result of assigning the transitions of one write to episodes, in the order of writing."""

    stamps: np.ndarray  # int64 [n, 2], the episode id of each transition and its step in the episode
    episodes: list[EpisodeSteps]  # the published steps
    opened: int  # the number of episodes that began
    continued: int  # the number of open lanes that were continued
    breaks: np.ndarray  # int64, the positions of transitions that begin an episode although no other had ended
    ambiguous: int  # the number of transitions that could continue several lanes
    cut: int  # the largest known number of steps of an episode that `max_episode_steps` cut; 0 if it cut none


@dataclass(slots=True)
class OrderedWrite:
    """The ``n`` transitions of one write, ordered by lane, and the episodes found so far."""

    transitions: WrittenTransitions
    order: np.ndarray | None  # int64 [n], the position of each transition in the write; None if unchanged
    kept: Tensor  # [n, ...], the data of each transition that lanes keep
    next_episode: int  # the id of the next new episode
    stamps: np.ndarray  # int64 [n, 2]
    episodes: list[EpisodeSteps] = field(default_factory=list)
    opened: int = 0
    continued: int = 0
    ambiguous: int = 0
    cut: int = 0
    breaks: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, written: WrittenTransitions, kept: Tensor, next_episode: int) -> OrderedWrite:
        """Order transitions, and the data that lanes keep of them, by lane."""
        order, written = _order_by_lane(written)
        if order is not None:
            kept = kept[torch.from_numpy(order).to(kept.device)]
        kept = kept.contiguous()  # of a non-contiguous tensor, each narrow_copy would copy all rows
        return cls(written, order, kept, next_episode, np.empty((len(written.done), 2), dtype=np.int64))

    def key(self, position: int, goals: np.ndarray) -> Key:
        """Return the trajectory id and the bytes of the goals of the transition at ``position``.

        ``goals``, ``void [n]``, are the goals at the root or under ``"next"`` of all transitions.
        """
        trajectory = self.transitions.trajectory
        return None if trajectory is None else int(trajectory[position]), goals[position].tobytes()

    def tracked(self) -> TrackedTransitions:
        """Return the results in the order of writing."""
        stamps, breaks = self.stamps, np.array(self.breaks, dtype=np.int64)
        if self.order is not None:
            breaks = self.order[breaks]
            stamps[self.order] = stamps.copy()
        return TrackedTransitions(stamps, self.episodes, self.opened, self.continued, breaks, self.ambiguous, self.cut)


def _order_by_lane(written: WrittenTransitions) -> tuple[np.ndarray | None, WrittenTransitions]:
    """Order transitions lane by lane, and by time within each lane.

    Return the position of each transition in the write, ``int64 [n]`` or None if unchanged, and the ordered
    transitions. Their field ``goals`` is not reordered.
    """
    trajectory = written.trajectory
    if trajectory is None or (trajectory[1:] >= trajectory[:-1]).all():
        return None, written
    order = np.argsort(trajectory, kind="stable")
    columns = ("start", "outcome", "done", "begins", "trajectory")
    return order, written._replace(**{name: getattr(written, name)[order] for name in columns})
