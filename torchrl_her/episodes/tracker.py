"""Assigns written transitions to lanes and episodes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_her.episodes.lanes import EpisodeLengths, EpisodeSteps, Key, Lane
from torchrl_her.episodes.ordered_write import OrderedWrite, TrackedTransitions
from torchrl_her.episodes.row_lanes import RowLanes
from torchrl_her.episodes.transitions import WrittenTransitions
from torchrl_her.goals.table import PIECE


class EpisodeTracker:
    """Finds the episode and the step of each written transition.

    A run of transitions continues an open lane if both have the same trajectory id (or none) and the run starts at the
    goals at which the lane's last transition arrived. If several lanes match, the run continues the lane of the same
    row of the last write, or else the lane that has waited longest. If no lane matches, the run opens a new lane.

    An episode ends with a done flag, after ``max_episode_steps``, or when its lane is closed. A silent reset carries no
    flag, so lanes that nothing continues must be found by the time that they wait, measured in transitions written
    meanwhile. A lane counts as idle when it has waited more than twice as long as any lane that was later continued. It
    is closed when it has waited for more than ``patience`` transitions.

    Args:
        max_episode_steps (int): the number of steps after which an episode ends.
        patience (int): the number of transitions written to other lanes after which a lane is closed.

    Keyword Args:
        publish_running (bool): whether an episode is also published while it runs: its complete pieces, and all of
            it when its lane becomes idle. If False, an episode is published once, at its end, and a lane is closed only
            when it is idle. Default: True.
        copies (bool): whether lanes copy the written data, so that the caller may overwrite it. Default: True.
    """

    def __init__(self, max_episode_steps: int, patience: int, *, publish_running: bool = True, copies: bool = True):
        self.max_episode_steps = max_episode_steps
        self.patience = patience
        self.publish_running = publish_running
        self.copies = copies
        self.written = 0  # the number of transitions so far
        self.longest_wait = 0  # the longest wait of a lane that was continued, in transitions written meanwhile
        self.lengths = EpisodeLengths()
        self._to_begin: int | None = None  # the number of episodes expected to begin; None before the first write
        self._clear()

    def _clear(self) -> None:
        # Open lanes by episode id, both dicts ordered from the longest to the shortest wait. Idle lanes wait longest.
        self._idle: dict[int, Lane] = {}
        self._lanes: dict[int, Lane] = {}
        self._by_key: dict[Key, tuple[Lane, ...]] = {}  # all open lanes
        self._lanes_of_id: Counter[int | None] = Counter()  # the number of open lanes with each trajectory id
        self._row_lanes = RowLanes()

    def track(self, written: WrittenTransitions, kept: Tensor, first_episode: int) -> TrackedTransitions:
        """Assign the transitions of a write to episodes. Python loops over runs of transitions, not over transitions.

        Args:
            written (WrittenTransitions): the ``n`` transitions.
            kept (Tensor): the data of each transition that lanes keep, ``[n, ...]``.
            first_episode (int): the id of the first new episode. Further new episodes get the ids that follow.
        """
        write = OrderedWrite.of(written, kept, first_episode)
        transitions, row_lanes = write.transitions, self._row_lanes
        self.written += len(transitions.done)
        matches = row_lanes.match(transitions)
        lanes_of_rows = {begin: self._take(lane.key, lane) for begin, lane in matches.items()}
        runs = _cut_into_runs(transitions, write.order, row_lanes.are_lanes)
        row_lanes.check_runs(len(runs))
        if self._to_begin is None:
            self._to_begin = int(transitions.begins.sum())
        left_open = []
        for begin, end in runs:
            lane = self._continue(lanes_of_rows.get(begin), begin, write)
            lane = self._extend(lane, begin, end, write)
            if lane is not None:
                row_lanes.leave_open(lane, end)
                if row_lanes.are_lanes:  # no other row of this write may continue the lane
                    left_open.append(lane)
                else:
                    self._leave_open(lane, self.written)
        for lane in left_open:
            self._leave_open(lane, self.written)
        self._close_waiting_lanes(write.episodes)
        return write.tracked()

    def _continue(self, lane: Lane | None, begin: int, write: OrderedWrite) -> Lane | None:
        """Return the lane that the run from ``begin`` on continues, or None.

        ``lane`` is the lane of the same row, if known. Otherwise a matching open lane is looked up.
        """
        written = write.transitions
        key = write.key(begin, written.start)
        if lane is None:
            write.ambiguous += len(self._by_key.get(key, ())) > 1
            lane = self._take(key)
        if lane is None:
            if not self._claim_beginning(key[0], written, begin):
                write.breaks.append(begin)
            return None
        write.continued += 1
        # A single long pause says little about other lanes, so it counts as at most twice the longest wait so far.
        count = len(written.done)
        waited = min(self.written - count - lane.written, 2 * self.longest_wait + count)
        self.longest_wait = max(self.longest_wait, waited)
        if lane.steps >= self.max_episode_steps:  # loaded from a tracker with a larger max_episode_steps
            self._end(lane, write.episodes)
            return None
        return lane

    def _extend(self, lane: Lane | None, begin: int, end: int, write: OrderedWrite) -> Lane | None:
        """Add a run of transitions to a lane, or to a new one if None; return the lane that stays open, or None."""
        written, stamps = write.transitions, write.stamps
        rows_of = torch.narrow_copy if self.copies else torch.narrow
        while begin < end:
            if lane is None:
                lane = Lane(write.next_episode + write.opened)
                write.opened += 1
            known = lane.steps + end - begin
            cut = min(end, begin + self.max_episode_steps - lane.steps)
            stamps[begin:cut, 0] = lane.episode
            stamps[begin:cut, 1] = np.arange(lane.steps, lane.steps + cut - begin)
            lane.extend(rows_of(write.kept, 0, begin, cut - begin))
            begin = cut
            if written.done[cut - 1] or lane.steps == self.max_episode_steps:
                if not written.done[cut - 1]:
                    write.cut = max(write.cut, known)
                self._end(lane, write.episodes)
                lane = None
        if lane is None:
            return None
        lane.key = write.key(end - 1, written.outcome)
        if self.publish_running:
            lane.publish_into(write.episodes, lane.steps // PIECE * PIECE)
        return lane

    def _claim_beginning(self, trajectory: int | None, written: WrittenTransitions, begin: int) -> bool:
        """Return whether an episode can begin here: with a new trajectory id, in a new row, or after an end.

        Each end allows one beginning.
        """
        if trajectory is not None:
            return not self._lanes_of_id[trajectory]
        if written.row_length > 1 and written.begins[begin]:
            return True
        if self._to_begin:
            self._to_begin -= 1
            return True
        return False

    def _end(self, lane: Lane, episodes: list[EpisodeSteps]) -> None:
        lane.publish_into(episodes, lane.steps)
        self.lengths.add(lane.steps)
        self._to_begin = (self._to_begin or 0) + 1

    def without_lanes(self) -> EpisodeTracker:
        """Return a tracker with the same settings and no open lanes, for another process."""
        options = {"publish_running": self.publish_running, "copies": self.copies}
        return EpisodeTracker(self.max_episode_steps, self.patience, **options)

    def copy(self) -> EpisodeTracker:
        """Return a copy that later writes do not affect. It is fast, because writes copy the lanes that they change."""
        copied = copy.copy(self)
        copied._idle, copied._lanes, copied._by_key = {**self._idle}, {**self._lanes}, {**self._by_key}
        copied._lanes_of_id = self._lanes_of_id.copy()
        copied.lengths, copied._row_lanes = copy.copy(self.lengths), copy.copy(self._row_lanes)
        return copied

    def flush(self) -> list[EpisodeSteps]:
        """End the running episodes and publish their steps."""
        episodes: list[EpisodeSteps] = []
        for lane in self.open_lanes():
            self._end(lane.copy(), episodes)
        self._clear()
        return episodes

    def _take(self, key: Key, lane: Lane | None = None) -> Lane | None:
        """Remove an open lane with this key and return a copy of it, or None if there is none.

        The lane is ``lane`` if given, or else the one that has waited longest.
        """
        lanes = self._by_key.get(key, ())
        lane = next((each for each in lanes if lane is None or each.episode == lane.episode), None)
        if lane is None:
            return None
        self._by_key[key] = tuple(each for each in lanes if each is not lane)
        if not self._by_key[key]:
            del self._by_key[key]
        self._lanes_of_id[key[0]] -= 1
        if not self._lanes_of_id[key[0]]:
            del self._lanes_of_id[key[0]]
        del (self._lanes if lane.episode in self._lanes else self._idle)[lane.episode]
        return lane.copy()

    def _leave_open(self, lane: Lane, written: int) -> None:
        lane.written = written
        self._lanes[lane.episode] = lane
        self._by_key[lane.key] = (*self._by_key.get(lane.key, ()), lane)
        self._lanes_of_id[lane.key[0]] += 1

    def _close_waiting_lanes(self, episodes: list[EpisodeSteps]) -> None:
        """Publish the steps of lanes that became idle, and close lanes that waited too long."""
        idle_after = (min if self.publish_running else max)(2 * self.longest_wait, self.patience)
        for lane in self._waiting(self._lanes, idle_after):
            del self._lanes[lane.episode]
            idle = self._idle[lane.episode] = lane.copy()
            self._by_key[lane.key] = tuple(idle if each is lane else each for each in self._by_key[lane.key])
            idle.publish_into(episodes, idle.steps)
        for lane in self._waiting(self._idle, self.patience):
            self._take(lane.key, lane)
            self.lengths.add(lane.steps)

    def _waiting(self, lanes: dict[int, Lane], patience: int) -> Iterator[Lane]:
        """Yield each lane that has waited for more than ``patience`` transitions; the caller removes it."""
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
                "first": lane.first,
                "steps": lane.steps,
                "published": lane.published,
            }
            for lane in self.open_lanes()
        ]
        return {"written": self.written, "longest_wait": self.longest_wait, "lanes": lanes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. It replaces all open lanes."""
        self._clear()
        for saved in state["lanes"]:
            lane = Lane(saved["episode"])
            lane.kept, lane.first = [saved["kept"]], saved["first"]
            lane.steps, lane.published = saved["steps"], saved["published"]
            lane.key = saved["trajectory"], saved["outcome"].numpy(force=True).tobytes()
            self._leave_open(lane, saved["written"])
        self.written, self.longest_wait = state["written"], state["longest_wait"]


def _cut_into_runs(written: WrittenTransitions, order: np.ndarray | None, at_rows: bool) -> list[tuple[int, int]]:
    """Return the begin and end of each run.

    A run ends before a transition that does not continue the previous one and, if ``at_rows``, at the end of a row.
    """
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
        # Publish in the order of writing, so that episodes leave the table in the same order as the storage.
        runs.sort(key=lambda run: order[run[0]])
    return runs
