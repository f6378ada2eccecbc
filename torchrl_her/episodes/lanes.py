"""A lane, its running episode, and the steps that it hands over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Key = tuple[int | None, bytes]  # the trajectory id, and the bytes of the achieved and the desired goal


class EpisodeSteps(NamedTuple):
    """The steps of an episode that ended, grew or became idle."""

    episode: int
    kept: Tensor  # [steps, ...], the per-step data from the first step on: achieved goals, or packed transitions
    before: int  # how many of the steps were handed over before


class EpisodeLengths:
    """The lengths of the episodes that ended."""

    def __init__(self) -> None:
        self.count = self.total = self.longest = self.shortest = 0

    def add(self, steps: int) -> None:  # noqa: D102
        self.shortest = min(steps, self.shortest) if self.count else steps
        self.longest = max(steps, self.longest)
        self.count += 1
        self.total += steps


@dataclass(slots=True, eq=False)
class Lane:
    """One environment's stream of transitions, and its running episode."""

    episode: int
    key: Key = (None, b"")  # of the last transition, with its goals under "next"; the next transition must match it
    written: int = 0  # the tracker's count of transitions when the lane was last continued
    kept: list[Tensor] = field(default_factory=list)  # pieces [steps, ...], the per-step data of the running episode
    steps: int = 0
    published: int = 0  # how many steps were handed over

    def extend(self, kept: Tensor) -> None:
        """Append further steps."""
        if self.kept and self.kept[0].device != kept.device:  # loaded from another device
            self.kept = [piece.to(kept.device) for piece in self.kept]
        self.kept.append(kept)
        self.steps += len(kept)

    def publish_into(self, episodes: dict[int, EpisodeSteps]) -> None:
        """Hand over all steps so far, if there are new ones."""
        if self.steps == self.published:
            return
        if len(self.kept) > 1:
            self.kept = [torch.cat(self.kept)]
        earlier = episodes.pop(self.episode, None)  # of the same write
        before = self.published if earlier is None else earlier.before
        episodes[self.episode] = EpisodeSteps(self.episode, self.kept[0], before)
        self.published = self.steps
