"""Cuts what is written into lanes and episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her.episodes.transitions import WrittenTransitions

# A running episode is published from so many steps on, each time that its length has doubled.
FIRST_PUBLICATION = 64


class EpisodeGoals(NamedTuple):
    """An episode that ended or grew, and hands over its achieved goals."""

    episode: int
    goals: Tensor  # [steps, *goal], what each step from the first on achieved
    before: int  # how many of the steps were handed over before


class Tracked(NamedTuple):
    """What the tracker says of the transitions of one write, in the order of writing."""

    stamps: np.ndarray  # int64 [n, 2], the id of each transition's episode and its step in it
    publications: list[EpisodeGoals]  # at most one of each episode
    opened: int  # how many episodes began


@dataclass(slots=True)
class Lane:
    """One environment's stream of transitions, and the episode that runs in it."""

    episode: int
    trajectory: int | None  # the id that the collector gave it
    outcome: bytes = b""  # what stood under the goals' keys under "next" in its last transition
    written: int = 0  # how many transitions had been written when it was last continued
    goals: list[Tensor] = field(default_factory=list)  # what the episode's steps achieved, in pieces
    steps: int = 0
    published: int = 0

    @property
    def key(self) -> tuple[int | None, bytes]:
        """What the transitions that continue the lane are found by."""
        return self.trajectory, self.outcome

    def extend(self, goals: Tensor) -> None:
        """Add the achieved goals of further steps."""
        if self.goals and self.goals[0].device != goals.device:  # loaded from another device
            self.goals = [piece.to(goals.device) for piece in self.goals]
        self.goals.append(goals)
        self.steps += len(goals)

    def publish_into(self, publications: dict[int, EpisodeGoals]) -> None:
        """Hand over the achieved goals of all steps so far, where there are new ones; once in a write."""
        if self.steps == self.published:
            return
        self.goals = [torch.cat(self.goals)]
        earlier = publications.pop(self.episode, None)
        before = self.published if earlier is None else earlier.before
        publications[self.episode] = EpisodeGoals(self.episode, self.goals[0], before)
        self.published = self.steps

    @property
    def has_doubled(self) -> bool:
        """Whether a running episode is to be published."""
        return self.steps >= max(FIRST_PUBLICATION, 2 * self.published)


class EpisodeTracker:
    """Tells of each written transition which episode it belongs to, and which step of it it is.

    A run of transitions continues the open lane that has its trajectory id, or like it has none, and whose last
    outcome it starts from (of several, the one that waited longest), else it opens a lane. An episode ends with
    a done flag, after ``max_episode_steps``, or when nothing continues its lane any more.

    That last end is told by nothing. So an episode hands over its goals, and stays open, as soon as its lane is
    idle: when it has waited twice as long as any lane that went on ever did.

    Args:
        capacity (int): a lane that nothing continued for so many transitions is forgotten, and no
            episode gets longer than that.
        max_episode_steps (int, optional): the length after which an episode is ended.
    """

    def __init__(self, capacity: int, max_episode_steps: int | None = None):
        self.capacity = capacity
        self.max_steps = min(capacity, max_episode_steps or capacity)
        self.written = 0  # how many transitions
        self.longest_wait = 0  # of lanes that went on, how many transitions were written to others meanwhile
        # The open lanes by episode, those that waited longest first, and before all of them the idle ones.
        self._idle: dict[int, Lane] = {}
        self._lanes: dict[int, Lane] = {}
        self._by_key: dict[tuple[int | None, bytes], deque[Lane]] = {}  # all of them

    def track(self, written: WrittenTransitions, first_episode: int) -> Tracked:
        """Assign transitions to episodes, of which new ones get the ids from ``first_episode`` on.

        The work in Python is per run of transitions that continue each other, not per transition.
        """
        order, written, runs = _cut_into_runs(written)
        before = self.written
        self.written += len(written.done)
        stamps = np.empty((len(written.done), 2), dtype=np.int64)
        publications: dict[int, EpisodeGoals] = {}
        opened = 0
        for begin, end in runs:
            trajectory = None if written.trajectory is None else int(written.trajectory[begin])
            lane = self._take((trajectory, written.start[begin].tobytes()))
            if lane is not None:
                # One that was paused for long says little of the others, so it counts for twice the longest at most.
                waited = min(before - lane.written, 2 * self.longest_wait + len(written.done))
                self.longest_wait = max(self.longest_wait, waited)
                if lane.steps >= self.max_steps:  # loaded into a tracker whose episodes are shorter
                    lane.publish_into(publications)
                    lane = None
            while begin < end:
                if lane is None:
                    lane = Lane(first_episode + opened, trajectory)
                    opened += 1
                cut = min(end, begin + self.max_steps - lane.steps)
                stamps[begin:cut, 0] = lane.episode
                stamps[begin:cut, 1] = np.arange(lane.steps, lane.steps + cut - begin)
                lane.extend(written.goals[begin:cut].clone())  # the caller may go on to use his tensors
                begin = cut
                if written.done[cut - 1] or lane.steps == self.max_steps:
                    lane.publish_into(publications)
                    lane = None
            if lane is not None:
                lane.outcome = written.outcome[end - 1].tobytes()
                self._leave_open(lane)
                self._left_running(lane, publications)
        self._leave_idle(publications)
        if order is not None:
            stamps[order] = stamps.copy()
        return Tracked(stamps, list(publications.values()), opened)

    def without_lanes(self) -> EpisodeTracker:
        """Return a tracker with the same settings, for another process."""
        return EpisodeTracker(self.capacity, self.max_steps)

    def flush(self) -> list[EpisodeGoals]:
        """End the running episodes and hand over their goals."""
        publications: dict[int, EpisodeGoals] = {}
        for lane in self._open_lanes():
            lane.publish_into(publications)
        self._clear()
        return list(publications.values())

    def _take(self, key: tuple[int | None, bytes]) -> Lane | None:
        lanes = self._by_key.get(key)
        if lanes is None:
            return None
        lane = lanes.popleft()
        if not lanes:
            del self._by_key[key]
        del (self._lanes if lane.episode in self._lanes else self._idle)[lane.episode]
        return lane

    def _leave_open(self, lane: Lane) -> None:
        lane.written = self.written
        self._lanes[lane.episode] = lane
        self._by_key.setdefault(lane.key, deque()).append(lane)

    def _left_running(self, lane: Lane, publications: dict[int, EpisodeGoals]) -> None:
        """Hand over the goals of an episode that has become long, and goes on."""
        if lane.has_doubled:
            lane.publish_into(publications)

    def _leave_idle(self, publications: dict[int, EpisodeGoals]) -> None:
        """Hand over the goals of lanes that have become idle, and forget those that were for long."""
        patience = min(2 * self.longest_wait, self.capacity - 1)
        for lane in self._waiting(self._lanes, patience):
            lane.publish_into(publications)
            self._idle[lane.episode] = self._lanes.pop(lane.episode)
        for lane in self._waiting(self._idle, self.capacity - 1):
            self._take(lane.key)  # of the lanes with this key it waited longest, too

    def _waiting(self, lanes: dict[int, Lane], patience: int) -> Iterator[Lane]:
        """Yield each lane that nothing continued for more transitions than that, to be taken from ``lanes``."""
        while lanes:
            lane = next(iter(lanes.values()))
            if self.written - lane.written <= patience:
                break
            yield lane

    def _open_lanes(self) -> Iterator[Lane]:
        return chain(self._idle.values(), self._lanes.values())

    def _clear(self) -> None:
        for lanes in (self._idle, self._lanes, self._by_key):
            lanes.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the open lanes."""
        lanes = [
            {
                "episode": lane.episode,
                "trajectory": lane.trajectory,
                "outcome": torch.from_numpy(np.frombuffer(lane.outcome, np.uint8).copy()),
                "written": lane.written,
                "goals": torch.cat(lane.goals),
                "published": lane.published,
            }
            for lane in self._open_lanes()
        ]
        return {"written": self.written, "longest_wait": self.longest_wait, "lanes": lanes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the open lanes by those that `state_dict` returned."""
        self._clear()
        for saved in state["lanes"]:
            lane = Lane(saved["episode"], saved["trajectory"], saved["outcome"].numpy(force=True).tobytes())
            lane.extend(saved["goals"])
            lane.published = saved["published"]
            self.written = saved["written"]
            self._leave_open(lane)
        self.written, self.longest_wait = state["written"], state["longest_wait"]


class EndedEpisodes(EpisodeTracker):
    """Hands an episode over once, when it has ended.

    A lane that nothing continues ends, too: when it has waited twice as long as any lane that went on ever did, and
    not before so many transitions were written as ``capacity`` says.
    """

    def __init__(self, capacity: int, max_episode_steps: int):
        super().__init__(capacity, max_episode_steps)
        self.max_steps = max_episode_steps

    def without_lanes(self) -> EndedEpisodes:  # noqa: D102
        return EndedEpisodes(self.capacity, self.max_steps)

    def _left_running(self, lane: Lane, publications: dict[int, EpisodeGoals]) -> None:
        """Leave it: it goes on."""

    def _leave_idle(self, publications: dict[int, EpisodeGoals]) -> None:
        for lane in self._waiting(self._lanes, max(2 * self.longest_wait, self.capacity)):
            lane.publish_into(publications)
            self._take(lane.key)  # of the lanes with this key it waited longest, too


def _cut_into_runs(written: WrittenTransitions) -> tuple[np.ndarray | None, WrittenTransitions, list[tuple[int, int]]]:
    """Neighbours transitions by lane and time, and cut that order where one does not continue the one before.

    Returns:
        The order, None for that of writing; the transitions in it; and where each run begins and ends.
    """
    order = None
    trajectory = written.trajectory
    if trajectory is not None and (trajectory[1:] < trajectory[:-1]).any():  # not lane after lane already
        order = np.argsort(trajectory, kind="stable")
        written = written.at(order)
        trajectory = written.trajectory
    begins = written.begins.copy()
    begins[:1] = True
    if trajectory is not None:
        begins[1:] = trajectory[1:] != trajectory[:-1]
    begins[1:] |= written.done[:-1]
    begins[1:] |= written.start[1:] != written.outcome[:-1]
    first = begins.nonzero()[0].tolist()
    runs = list(zip(first, [*first[1:], len(begins)], strict=False))
    if order is not None:
        # Episodes are published in the order of writing, so that they leave the table as they leave the storage.
        runs.sort(key=lambda run: order[run[0]])
    return order, written, runs
