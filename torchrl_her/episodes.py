"""Cuts what is written into lanes and episodes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

# A running episode is published from so many steps on, each time that its length has doubled.
FIRST_PUBLICATION = 64


class Written(NamedTuple):
    """The transitions of one write, in the order of writing."""

    start: np.ndarray  # uint8 [n, bytes], the goals at the root, achieved and desired
    outcome: np.ndarray  # uint8 [n, bytes], the same under "next"
    done: np.ndarray  # bool [n], the transition ends its episode
    begins: np.ndarray  # bool [n], it does not continue the one before it; not used where there are ids
    trajectory: np.ndarray | None  # int64 [n], trajectory ids


class Tracked(NamedTuple):
    """What the tracker says of the transitions of one write, in the order of writing."""

    episode: np.ndarray  # int64 [n], the id of each transition's episode
    step: np.ndarray  # int64 [n], its step in the episode
    published: list[tuple[int, np.ndarray]]  # episodes that ended or grew: id, and the rows of all steps
    opened: int  # how many episodes began


@dataclass(slots=True)
class Lane:
    """One environment's stream of transitions, and the episode that runs in it."""

    episode: int
    trajectory: int | None  # the id that the collector gave it
    outcome: bytes = b""  # the goals under "next" of its last transition
    steps: int = 0
    published: int = 0
    rows: list[np.ndarray] = field(default_factory=list)  # where the goal table holds its outcomes

    @property
    def key(self) -> int | bytes:
        """What the transitions that continue the lane are found by."""
        return self.outcome if self.trajectory is None else self.trajectory

    def extend(self, rows: np.ndarray) -> None:
        """Add the steps whose outcomes are in these rows."""
        self.rows.append(rows.copy())  # a view would keep the rows of the other lanes alive
        self.steps += len(rows)

    def publish(self) -> tuple[int, np.ndarray]:
        """Return the episode's id and the rows of all its steps so far."""
        self.rows = [np.concatenate(self.rows)]
        self.published = self.steps
        return self.episode, self.rows[0]


class EpisodeTracker:
    """Tells of each written transition which episode it belongs to, and which step of it it is.

    Transitions with a trajectory id belong to the lane of that id. A run of transitions without one
    continues the open lane whose last outcome it starts from (of several, the one that waited longest),
    else it opens a lane. Within a lane an episode ends with a done flag, after ``max_episode_steps``, or
    where a transition does not start from the outcome of the one before.

    Args:
        capacity (int): a lane that nothing continued for so many transitions is forgotten, and no
            episode gets longer than that.
        max_episode_steps (int, optional): the length after which an episode is ended.
    """

    def __init__(self, capacity: int, max_episode_steps: int | None = None):
        self.capacity = capacity
        self.max_steps = min(capacity, max_episode_steps or capacity)
        self._lanes: dict[int, Lane] = {}  # the open lanes by episode, the one that waited longest first
        self._waiting: dict[int | bytes, deque[Lane]] = {}  # the same lanes by their key

    def track(self, written: Written, *, first_row: int, first_episode: int) -> Tracked:
        """Assign transitions to episodes. The work in Python is per run of transitions, not per transition.

        Args:
            written (Written): the transitions.
            first_row (int): the row of the goal table that holds the first transition's outcome.
            first_episode (int): the first unused episode id.
        """
        order, runs = _cut_into_runs(written)
        rows = first_row + order
        pieces: list[tuple[int, int, int]] = []  # episode, first step, number of steps
        published: list[tuple[int, np.ndarray]] = []
        opened = 0
        for begin, end in runs:
            at = order[begin]
            trajectory = None if written.trajectory is None else int(written.trajectory[at])
            start = written.start[at].tobytes()
            lane = self._take(start if trajectory is None else trajectory)
            if lane is not None and lane.outcome != start:  # a seam: the episode ended without saying so
                published.append(lane.publish())
                lane = None
            while begin < end:
                if lane is None:
                    lane = Lane(first_episode + opened, trajectory)
                    opened += 1
                cut = min(end, begin + self.max_steps - lane.steps)
                pieces.append((lane.episode, lane.steps, cut - begin))
                lane.extend(rows[begin:cut])
                begin = cut
                if written.done[order[cut - 1]] or lane.steps == self.max_steps:
                    published.append(lane.publish())
                    lane = None
            if lane is not None:
                lane.outcome = written.outcome[order[end - 1]].tobytes()
                self._leave_open(lane)
                if lane.steps >= max(FIRST_PUBLICATION, 2 * lane.published):
                    published.append(lane.publish())
        self._forget_lanes_before(first_row + len(order) - self.capacity)
        return Tracked(*_stamps(order, pieces), published, opened)

    def flush(self) -> list[tuple[int, np.ndarray]]:
        """End the running episodes and return them, to be published."""
        published = [lane.publish() for lane in self._lanes.values() if lane.steps > lane.published]
        self._lanes.clear()
        self._waiting.clear()
        return published

    def _take(self, key: int | bytes) -> Lane | None:
        lanes = self._waiting.get(key)
        if lanes is None:
            return None
        lane = lanes.popleft()
        if not lanes:
            del self._waiting[key]
        del self._lanes[lane.episode]
        return lane

    def _leave_open(self, lane: Lane) -> None:
        self._lanes[lane.episode] = lane
        self._waiting.setdefault(lane.key, deque()).append(lane)

    def _forget_lanes_before(self, row: int) -> None:
        while self._lanes:
            lane = next(iter(self._lanes.values()))
            if lane.rows[-1][-1] >= row:
                break
            self._take(lane.key)  # of the lanes with this key it waited longest, too

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the open lanes."""
        return [
            {
                "episode": lane.episode,
                "trajectory": lane.trajectory,
                "outcome": torch.from_numpy(np.frombuffer(lane.outcome, np.uint8).copy()),
                "published": lane.published,
                "rows": torch.from_numpy(np.concatenate(lane.rows)),
            }
            for lane in self._lanes.values()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Replace the open lanes by those that `state_dict` returned."""
        self.flush()
        for saved in state:
            lane = Lane(saved["episode"], saved["trajectory"], saved["outcome"].numpy().tobytes())
            lane.extend(saved["rows"].numpy())
            lane.published = saved["published"]
            self._leave_open(lane)


def _cut_into_runs(written: Written) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Order transitions by lane and time, and cut that order where one does not continue the one before."""
    start, outcome, done, begins, trajectory = written
    order = np.arange(len(done))
    if trajectory is not None:
        order = np.argsort(trajectory, kind="stable")
        start, outcome, done, trajectory = start[order], outcome[order], done[order], trajectory[order]
        begins = np.diff(trajectory, prepend=trajectory[:1]) != 0
    begins = begins.copy()
    begins[:1] = True
    begins[1:] |= done[:-1] | (start[1:] != outcome[:-1]).any(axis=1)
    first = np.flatnonzero(begins).tolist()
    return order, list(zip(first, [*first[1:], len(order)], strict=False))


def _stamps(order: np.ndarray, pieces: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Spread the pieces' episodes and steps over their transitions, in the order of writing."""
    episodes, first_steps, lengths = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    ends = np.cumsum(lengths)
    episode, step = np.empty_like(order), np.empty_like(order)
    episode[order] = np.repeat(episodes, lengths)
    step[order] = np.arange(len(order)) - np.repeat(ends - lengths - first_steps, lengths)
    return episode, step
