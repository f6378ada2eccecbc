"""Lanes: the running episodes of environments, and their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_her.goals.table import PIECE

Key = tuple[int | None, bytes]  # the trajectory id, and the bytes of the achieved and the desired goal


class EpisodeSteps(NamedTuple):
    """Published steps of an episode."""

    episode: int  # the episode id
    first: int  # the first step
    kept: Tensor  # [steps, ...], the data of each step: achieved goals or packed transitions


class EpisodeLengths:
    """Statistics of the lengths, in steps, of ended episodes."""

    def __init__(self) -> None:
        self.count = self.total = self.longest = self.shortest = 0

    def add(self, steps: int) -> None:  # noqa: D102
        self.shortest = min(steps, self.shortest) if self.count else steps
        self.longest = max(steps, self.longest)
        self.count += 1
        self.total += steps


@dataclass(slots=True, eq=False)
class Lane:
    """The running episode of one environment, and the goals from which its next transition must start."""

    episode: int  # the id of the running episode
    key: Key = (None, b"")  # the trajectory id and the goals under "next" of the last transition
    written: int = 0  # the tracker's count of transitions when the lane was last continued
    kept: list[Tensor] = field(default_factory=list)  # parts [steps, ...], the data of each step from `first` on
    first: int = 0  # the first step of the first piece that is not complete or not published
    steps: int = 0  # the number of steps of the episode
    published: int = 0  # the number of published steps

    def copy(self) -> Lane:
        """Return a copy that shares the kept data."""
        return Lane(self.episode, self.key, self.written, [*self.kept], self.first, self.steps, self.published)

    def extend(self, kept: Tensor) -> None:
        """Append the data ``[steps, ...]`` of new steps."""
        if self.kept and self.kept[0].device != kept.device:  # loaded steps can be on another device
            self.kept = [piece.to(kept.device) for piece in self.kept]
        self.kept.append(kept)
        self.steps += len(kept)

    def publish_into(self, episodes: list[EpisodeSteps], until: int) -> None:
        """Publish the steps before ``until`` if some are new. Steps of a complete piece are no longer kept then."""
        if until <= self.published:
            return
        if len(self.kept) > 1:
            self.kept = [torch.cat(self.kept)]
        episodes.append(EpisodeSteps(self.episode, self.first, self.kept[0][: until - self.first]))
        self.published, complete = until, until // PIECE * PIECE
        if complete > self.first:
            self.kept, self.first = [self.kept[0][complete - self.first :].clone()], complete
