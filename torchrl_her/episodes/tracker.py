"""Cuts written transitions into lanes and episodes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her.episodes.transitions import WrittenTransitions

# The steps of a running episode are handed over from this many on, each time that its length has doubled.
FIRST_PUBLICATION = 64

Key = tuple[int | None, bytes]  # the trajectory id, and the bytes of the achieved and the desired goal


class EpisodeSteps(NamedTuple):
    """The steps of an episode that ended, grew or became idle."""

    episode: int
    kept: Tensor  # [steps, ...], the per-step data from the first step on: achieved goals, or packed transitions
    before: int  # how many of the steps were handed over before


class TrackedTransitions(NamedTuple):
    """The episodes of the transitions of one write, in the order of writing."""

    stamps: np.ndarray  # int64 [n, 2], the episode id of each transition and its step in the episode
    episodes: list[EpisodeSteps]  # at most one entry per episode
    opened: int  # how many episodes began
    continued: int  # how many open lanes were continued
    breaks: np.ndarray  # int64, the positions of transitions that begin an episode although none had ended
    ambiguous: int  # how many transitions could continue several lanes


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
        self.kept = [torch.cat(self.kept)]
        earlier = episodes.pop(self.episode, None)  # of the same write
        before = self.published if earlier is None else earlier.before
        episodes[self.episode] = EpisodeSteps(self.episode, self.kept[0], before)
        self.published = self.steps


class EpisodeTracker:
    """Finds the episode and the step of each written transition.

    A run of transitions continues the open lane that has its trajectory id (or also has none) and whose last outcome
    it starts from. If several lanes do, it continues the one that was written in the same row before, or else the one
    that waited longest; if none does, it opens a lane. An episode ends with a done flag, after ``max_episode_steps``,
    or when nothing continues its lane any more.

    A silent reset carries no flag. So a lane counts as idle when it has waited twice as long as any lane that was
    continued ever did, measured in transitions written meanwhile. A lane is closed when it waited for more than
    ``patience`` transitions.

    With ``publish_running``, the steps of an episode are handed over also while it runs: when its length has doubled,
    and when its lane becomes idle. Without, they are handed over once, and only idle lanes are closed.
    """

    def __init__(self, max_episode_steps: int, patience: int, *, publish_running: bool = True):
        self.max_episode_steps = max_episode_steps
        self.patience = patience
        self.publish_running = publish_running
        self.written = 0  # transitions so far
        self.longest_wait = 0  # of a lane that was continued, in transitions written to other lanes
        self.lengths = EpisodeLengths()
        self._to_begin: int | None = None  # episodes that ended and were not followed by another; None at first
        self._clear()

    def _clear(self) -> None:
        # Open lanes by episode, each dict ordered by how long they have waited. Idle lanes waited longest.
        self._idle: dict[int, Lane] = {}
        self._lanes: dict[int, Lane] = {}
        self._by_key: dict[Key, deque[Lane]] = {}  # all open lanes
        self._lanes_of_id: Counter[int | None] = Counter()  # how many open lanes have a trajectory id
        self._rows = 0  # of the last write
        self._rows_are_lanes = False  # whether each row of the last writes was another environment
        self._lane_of_row: dict[int, Lane] = {}  # the lanes that the last write left open

    def track(
        self, written: WrittenTransitions, kept: Tensor, first_episode: int, initial: Tensor | None = None
    ) -> TrackedTransitions:
        """Assign transitions to episodes. The work in Python is per run of transitions, not per transition.

        Lanes keep the rows ``kept [n, ...]``, before these the row of ``initial [n, ...]`` with which their episode
        begins, if it is given. Episodes that begin in this write get the ids from ``first_episode`` on.
        """
        order, written = _order_by_lane(written)
        if order is not None:
            kept = kept[torch.from_numpy(order).to(kept.device)]
        start, outcome, done, trajectory = written.start, written.outcome, written.done, written.trajectory
        before = self.written
        self.written += len(done)
        stamps = np.empty((len(done), 2), dtype=np.int64)
        episodes: dict[int, EpisodeSteps] = {}
        opened = continued = ambiguous = 0
        breaks = []
        in_rows = self._take_lanes_of_rows(written)
        runs = _cut_into_runs(written, order, self._rows_are_lanes)
        if len(runs) != len(done) // max(1, written.row_length):
            self._rows = 0  # rows are not environments
        if self._to_begin is None:
            self._to_begin = int(written.begins.sum())
        left_open = []
        for begin, end in runs:
            key = (None if trajectory is None else int(trajectory[begin]), start[begin].tobytes())
            lane = in_rows.get(begin)
            if lane is None:
                ambiguous += len(self._by_key.get(key, ())) > 1
                lane = self._take(key)
            if lane is not None:
                continued += 1
                lane = self._continue(lane, before, len(done), episodes)
            elif not self._may_begin(key[0], written, begin):
                breaks.append(begin if order is None else order[begin])
            at = begin
            while at < end:
                if lane is None:
                    lane = Lane(first_episode + opened)
                    if initial is not None:
                        lane.kept.append(initial[at if order is None else order[at]].clone().unsqueeze(0))
                    opened += 1
                cut = min(end, at + self.max_episode_steps - lane.steps)
                stamps[at:cut, 0] = lane.episode
                stamps[at:cut, 1] = np.arange(lane.steps, lane.steps + cut - at)
                lane.extend(kept[at:cut].clone())  # the caller may overwrite its tensors
                at = cut
                if done[cut - 1] or lane.steps == self.max_episode_steps:
                    self._end(lane, episodes)
                    lane = None
            if lane is not None:
                lane.key = key[0], outcome[end - 1].tobytes()
                if written.row_length and end % written.row_length == 0:
                    self._lane_of_row[end // written.row_length - 1] = lane
                if self._rows_are_lanes:  # no other row of this write continues it
                    left_open.append(lane)
                else:
                    self._leave_open(lane)
                if self.publish_running and lane.steps >= max(FIRST_PUBLICATION, 2 * lane.published):
                    lane.publish_into(episodes)
        for lane in left_open:
            self._leave_open(lane)
        self._close_waiting_lanes(episodes)
        if order is not None:
            stamps[order] = stamps.copy()
        positions = np.array(breaks, dtype=np.int64)
        return TrackedTransitions(stamps, list(episodes.values()), opened, continued, positions, ambiguous)

    def _continue(self, lane: Lane, before: int, count: int, episodes: dict[int, EpisodeSteps]) -> Lane | None:
        """Note how long a lane waited until a write of ``count`` transitions; return it, unless its episode is full."""
        # A long pause says little about the other lanes: it counts for at most twice the longest wait.
        waited = min(before - lane.written, 2 * self.longest_wait + count)
        self.longest_wait = max(self.longest_wait, waited)
        if lane.steps >= self.max_episode_steps:  # loaded into a tracker with shorter episodes
            self._end(lane, episodes)
            return None
        return lane

    def _take_lanes_of_rows(self, written: WrittenTransitions) -> dict[int, Lane]:
        """Take the lanes that the last write left in the same rows, if most rows continue theirs; return them by begin.

        Without trajectory ids, an environment can start where another one has just arrived.
        """
        length, start = written.row_length, written.start
        rows = len(start) // length if length and written.trajectory is None else 0
        is_like_last = rows == self._rows > 0
        earlier = self._lane_of_row if is_like_last else {}
        self._rows, self._lane_of_row = rows, {}
        matching = {row: lane for row, lane in earlier.items() if lane.key == (None, start[row * length].tobytes())}
        # One environment that stands still matches in one row at most.
        needed = len(earlier) if self._rows_are_lanes and is_like_last else rows
        self._rows_are_lanes = 2 * len(matching) > needed or (self._rows_are_lanes and is_like_last and not earlier)
        taken = matching if self._rows_are_lanes else {}
        return {row * length: lane for row, lane in taken.items() if self._take(lane.key, lane)}

    def _may_begin(self, trajectory: int | None, written: WrittenTransitions, begin: int) -> bool:
        """Return whether an episode is expected to begin: of a new trajectory, in a new row, or after an end."""
        if trajectory is not None:
            return not self._lanes_of_id[trajectory]
        if written.row_length > 1 and written.begins[begin]:
            return True
        if self._to_begin:
            self._to_begin -= 1
            return True
        return False

    def _end(self, lane: Lane, episodes: dict[int, EpisodeSteps]) -> None:
        lane.publish_into(episodes)
        self.lengths.add(lane.steps)
        self._to_begin = (self._to_begin or 0) + 1

    def without_lanes(self) -> EpisodeTracker:
        """Return a tracker with the same settings and no open lanes, for another process."""
        return EpisodeTracker(self.max_episode_steps, self.patience, publish_running=self.publish_running)

    def flush(self) -> list[EpisodeSteps]:
        """End the running episodes and hand over their steps."""
        episodes: dict[int, EpisodeSteps] = {}
        for lane in self.open_lanes():
            self._end(lane, episodes)
        self._clear()
        return list(episodes.values())

    def _take(self, key: Key, lane: Lane | None = None) -> Lane | None:
        """Remove a lane with this key from the open lanes, by default the one that waited longest, and return it."""
        lanes = self._by_key.get(key)
        if lanes is None or (lane is not None and lane not in lanes):
            return None
        if lane is None:
            lane = lanes[0]
        lanes.remove(lane)
        if not lanes:
            del self._by_key[key]
        self._lanes_of_id[key[0]] -= 1
        if not self._lanes_of_id[key[0]]:
            del self._lanes_of_id[key[0]]
        del (self._lanes if lane.episode in self._lanes else self._idle)[lane.episode]
        return lane

    def _leave_open(self, lane: Lane) -> None:
        lane.written = self.written
        self._lanes[lane.episode] = lane
        self._by_key.setdefault(lane.key, deque()).append(lane)
        self._lanes_of_id[lane.key[0]] += 1

    def _close_waiting_lanes(self, episodes: dict[int, EpisodeSteps]) -> None:
        """Hand over the steps of lanes that became idle, and close lanes that nothing continued for too long."""
        idle_after = (min if self.publish_running else max)(2 * self.longest_wait, self.patience)
        for lane in self._waiting(self._lanes, idle_after):
            lane.publish_into(episodes)
            self._idle[lane.episode] = self._lanes.pop(lane.episode)
        for lane in self._waiting(self._idle, self.patience):
            self._take(lane.key, lane)
            self.lengths.add(lane.steps)

    def _waiting(self, lanes: dict[int, Lane], patience: int) -> Iterator[Lane]:
        """Yield each lane that nothing continued for more than ``patience`` transitions; the caller removes it."""
        while lanes:
            lane = next(iter(lanes.values()))
            if self.written - lane.written <= patience:
                break
            yield lane

    def open_lanes(self) -> Iterator[Lane]:
        """Return the lanes whose episodes are running."""
        return chain(self._idle.values(), self._lanes.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the open lanes as tensors, numbers and lists."""
        lanes = [
            {
                "episode": lane.episode,
                "trajectory": lane.key[0],
                "outcome": torch.from_numpy(np.frombuffer(lane.key[1], np.uint8).copy()),
                "written": lane.written,
                "kept": torch.cat(lane.kept),
                "steps": lane.steps,
                "published": lane.published,
            }
            for lane in self.open_lanes()
        ]
        return {"written": self.written, "longest_wait": self.longest_wait, "lanes": lanes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the open lanes by those of `state_dict`."""
        self._clear()
        for saved in state["lanes"]:
            lane = Lane(saved["episode"])
            lane.kept, lane.steps = [saved["kept"]], saved["steps"]
            lane.published = saved["published"]
            self.written = saved["written"]
            lane.key = saved["trajectory"], saved["outcome"].numpy(force=True).tobytes()
            self._leave_open(lane)
        self.written, self.longest_wait = state["written"], state["longest_wait"]


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


def _cut_into_runs(written: WrittenTransitions, order: np.ndarray | None, at_rows: bool) -> list[tuple[int, int]]:
    """Return the begin and end of each run: cut where a transition does not continue the last, or ``at_rows``."""
    trajectory = written.trajectory
    begins = written.begins.copy()
    if at_rows:
        begins[:: written.row_length] = True
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
    return runs
