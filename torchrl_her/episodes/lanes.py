"""Lanes: the running episodes of all environments, as arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_her.episodes.matching import (
    Runs,
    are_equal,
    chain_heads,
    cut_into_runs,
    find_breaks,
    first_in_first_out,
    hash_goals,
    is_in,
    rank_goals,
)
from torchrl_her.episodes.write import Write
from torchrl_her.goals.names import MOST_STEPS, name_of
from torchrl_her.goals.table import Steps, spread

# The columns of running episodes: the trajectory id or NO_ID; the episode; the number of steps so far; the number of
# transitions that were written up to its last one; the row of the last write that its last transition ends, or -1; and
# its window in the goal table.
TRAJECTORY, EPISODE, STEPS, SEEN, ROW, BASE, OLDEST, END = range(8)
WINDOW = slice(BASE, END + 1)
COLUMNS = 8
NO_ID = np.iinfo(np.int64).min
MOST_IDLE = 1024  # lanes; more idle episodes do not stay open
FEW_LANES = 16  # a stream is compared with each of them


class Lengths(NamedTuple):
    """Statistics of the lengths, in steps, of ended episodes."""

    episodes: int = 0
    total: int = 0
    shortest: int = 0
    longest: int = 0

    def with_episodes(self, steps: np.ndarray) -> Lengths:
        """Return the statistics with more episodes, ``int64 [n]``."""
        if not len(steps):
            return self
        shortest = min(int(steps.min()), self.shortest) if self.episodes else int(steps.min())
        total = self.total + int(steps.sum())
        return Lengths(self.episodes + len(steps), total, shortest, max(self.longest, int(steps.max())))


class Running(NamedTuple):
    """The running episodes after a write. A write makes a new object, so that an interrupted write changes nothing."""

    lanes: np.ndarray  # int64 [lanes, columns], from the longest to the shortest wait
    arrived: np.ndarray  # void [lanes], the bytes of both goals under "next" of the last transition
    rows: int = 0  # the number of rows of the last write if each can be an environment, otherwise 0
    rows_are_lanes: bool = False  # whether the rows of consecutive writes were the same environments
    written: int = 0  # the number of transitions so far
    longest_wait: int = 0  # the longest wait of a lane that was continued, in transitions written meanwhile
    to_begin: int | None = None  # the number of episodes expected to begin; None before the first write
    lengths: Lengths = Lengths()
    loaded: int = 0  # the number of loaded episodes that can go on; 0 after the first write

    def without_lanes(self) -> Running:
        """Return the state without running episodes, with the same counters."""
        return self._replace(lanes=self.lanes[:0], arrived=self.arrived[:0], rows=0, rows_are_lanes=False, loaded=0)


class Parts(NamedTuple):
    """The parts of episodes in a write. An episode has one part."""

    order: np.ndarray  # int64 [n], the positions of the transitions in the write, part after part
    lane: np.ndarray  # int64 [parts], the lane that the part continues, or -1
    before: np.ndarray  # int64 [parts, columns], this lane, or an episode without steps
    steps: np.ndarray  # int64 [parts], the number of steps of the episode after this write
    last: np.ndarray  # int64 [parts], the position of the last transition in the write
    ended: np.ndarray  # bool [parts], whether the episode ended
    goes_on: np.ndarray  # bool [parts], whether it ended only because of its length, and the next part goes on

    def in_order_of_writing(self) -> Steps:
        """Return the steps of the write."""
        number, step = spread(self.before[:, STEPS], self.steps)
        part = np.empty_like(number)
        name = np.empty_like(number)
        part[self.order] = number
        name[self.order] = name_of(self.before[number, EPISODE], step)
        before = self.before
        return Steps(name, part, before[:, EPISODE], before[:, STEPS], self.steps, self.ended, before[:, WINDOW])


class Tracked(NamedTuple):
    """The episodes of the transitions of one write."""

    running: Running  # after the write
    steps: Steps
    is_open: np.ndarray  # int64, the parts whose episodes run: the last lanes of `running`, in the same order
    ended: np.ndarray  # int64, the episodes that ended
    opened: int = 0  # the number of episodes that began
    continued: int = 0  # the number of runs that continued an episode
    breaks: np.ndarray = np.empty(0, np.int64)  # the positions where an episode begins although no other had ended
    ambiguous: int = 0  # the number of runs that could continue several episodes
    loaded: int = 0  # the number of running episodes that were loaded, in the first write after loading


class Lanes:
    """Finds the episode and the step of each written transition.

    A write is cut into runs of transitions that continue each other. A run continues a running episode if both have the
    same trajectory id (or none) and the run starts at the goals at which the episode's last transition arrived. If
    several episodes match, the run continues the one of the same row of the last write, or else the one that has waited
    longest. If none matches, a new episode begins.

    An episode ends with a done flag, after ``max_episode_steps``, or when it has waited for too long. A silent reset
    carries no flag, so episodes that nothing continues must be found by their wait, measured in transitions written
    meanwhile. An episode is idle when it has waited more than twice as long as any that was later continued. It ends
    when it is idle and has waited for more than ``patience`` transitions, or when there are very many idle episodes.

    Args:
        max_episode_steps (int, optional): the number of steps after which an episode ends.
        patience (int): the number of transitions written meanwhile after which an idle episode ends.

    Keyword Args:
        most_idle (int): the number of episodes from which on idle ones end at once.
    """

    def __init__(self, max_episode_steps: int | None, patience: int, *, most_idle: int = MOST_IDLE):
        self.max_episode_steps = min(max_episode_steps or MOST_STEPS, MOST_STEPS)
        self.patience, self.most_idle = patience, most_idle
        self.running: Running | None = None  # None before the first write

    def __len__(self) -> int:
        return 0 if self.running is None else len(self.running.lanes)

    @property
    def lengths(self) -> Lengths:
        """Statistics of the lengths of ended episodes."""
        return Lengths() if self.running is None else self.running.lengths

    def without_episodes(self) -> Lanes:
        """Return an object with the same settings and no running episodes, for another process."""
        return Lanes(self.max_episode_steps, self.patience, most_idle=self.most_idle)

    # Writing

    def track(self, written: Write, first_episode: int) -> Tracked:
        """Assign the transitions of a write to episodes.

        This changes nothing. The caller assigns `running` of the result once the write is complete.

        Args:
            written (Write): the ``n`` transitions.
            first_episode (int): the first new episode. Further new episodes follow.
        """
        old = self.running or Running(np.empty((0, COLUMNS), np.int64), written.outcome[:0])
        if not len(old.lanes):  # the goals can have another dtype than earlier ones
            old = old._replace(arrived=written.outcome[:0])
        written.check_like(old.arrived)
        if not len(written.done):
            none = np.empty(0, np.int64)
            return Tracked(old, Steps(none, none, none, none, none, none, none.reshape(0, 3)), none, none)
        tracked = self._track_stream(written, old, first_episode) or self._track_runs(written, old, first_episode)
        if old.loaded:
            tracked = tracked._replace(running=tracked.running._replace(loaded=0), loaded=old.loaded)
        return tracked

    def _track_runs(self, written: Write, old: Running, first_episode: int) -> Tracked:
        """Track any write."""
        lane_of, rows_are_lanes = _match_rows(written, old)
        runs = cut_into_runs(written, at_rows=rows_are_lanes)
        source, ambiguous = self._find_sources(written, runs, old, lane_of, rows_are_lanes)
        parts = self._make_parts(written, runs, source, old, first_episode)
        to_begin = int(written.begins.sum()) if old.to_begin is None else old.to_begin
        last = parts.last[parts.ended & ~parts.goes_on]
        breaks, to_begin = find_breaks(written, runs, source < 0, last, old.lanes[:, TRAJECTORY], to_begin)
        rows = written.rows
        if written.trajectory is None and len(runs.begin) != rows:
            rows = 0
        tracked = self._finish(written, old, parts, rows=rows, rows_are_lanes=rows_are_lanes, to_begin=to_begin)
        return tracked._replace(continued=int(np.count_nonzero(source >= 0)), breaks=breaks, ambiguous=ambiguous)

    def _track_stream(self, written: Write, old: Running, first_episode: int) -> Tracked | None:
        """Track the transitions of one environment in order, with any number of ends; return None for other writes.

        Without this short path, the general one gives the same result, but takes twice as long for a few transitions.
        """
        matched = _match_stream(written, old)
        if matched is None:
            return None
        lane, first, last = matched
        lanes, before = np.full(len(last), -1), np.zeros((len(last), COLUMNS), np.int64)
        continued = int(lane >= 0)
        if continued:
            lanes[0], before[0] = lane, old.lanes[lane]
        before[continued:, EPISODE] = np.arange(first_episode, first_episode + len(last) - continued)
        steps = before[:, STEPS] + last + 1 - first
        if steps.max() >= self.max_episode_steps:
            return None
        ended = written.done[last]
        order, goes_on = np.arange(len(written.done)), np.zeros(len(last), np.bool_)
        parts = Parts(order, lanes, before, steps, last, ended, goes_on)
        to_begin = int(written.begins[0]) if old.to_begin is None else old.to_begin
        rows, breaks = written.rows, first[:0]
        if written.trajectory is None:
            if rows > 1:
                rows = 0
            claims = len(last) - 1  # each further episode follows the end of another one
            if not continued and written.row_length <= 1:
                if to_begin:
                    claims += 1
                else:
                    breaks = first[:1]
            to_begin -= claims
        to_begin += int(np.count_nonzero(ended))
        tracked = self._finish(written, old, parts, rows=rows, rows_are_lanes=False, to_begin=to_begin)
        return tracked._replace(continued=continued, breaks=breaks)

    def _find_sources(
        self, written: Write, runs: Runs, old: Running, lane_of: np.ndarray | None, rows_are_lanes: bool
    ) -> tuple[np.ndarray, int]:
        """Return what each run continues, ``int64 [runs]``, and the number of runs for which several episodes match.

        Numbers below ``len(lanes)`` are lanes, ``len(lanes) + r`` is run r of this write, and -1 is nothing.
        """
        first, last, lanes = runs.first, runs.last, old.lanes
        source = np.full(len(first), -1) if lane_of is None else lane_of[first]
        left = (source < 0).nonzero()[0]
        if not len(left):
            return source, 0
        is_free = lanes[:, STEPS] < self.max_episode_steps  # after loading, an episode can be longer
        is_free[source[source >= 0]] = False
        if rows_are_lanes:  # no row continues the episode of another one
            is_free &= lanes[:, ROW] < 0
        free = is_free.nonzero()[0]
        ids = np.full(len(written.done), NO_ID) if written.trajectory is None else written.trajectory
        if written.trajectory is not None and len(free):
            free = free[is_in(lanes[free, TRAJECTORY], ids[first[left]])]
            lane = _match_ids(written, runs, old, free, first[left])
            if lane is not None:
                source[left] = lane
                return source, 0
        # Without ids, no other row of this write may continue the episode of a row.
        are_apart = rows_are_lanes or runs.has_one_run_per_id
        open_runs = np.empty(0, np.int64) if are_apart else np.flatnonzero(~written.done[last])
        if not len(free) + len(open_runs):
            return source, 0
        # Lanes and runs that can be continued, and the runs that continue something, each in the order of time.
        goals = np.concatenate([old.arrived[free], written.outcome[last[open_runs]], written.start[first[left]]])
        trajectory = np.concatenate([lanes[free, TRAJECTORY], ids[last[open_runs]], ids[first[left]]])
        place = np.concatenate([free, len(lanes) + open_runs, left])
        time = np.concatenate([free - len(lanes), 2 * open_runs + 1, 2 * left])
        puts = len(place) - len(left)
        for identify in (hash_goals, rank_goals):
            key = identify(goals, trajectory)
            event = np.flatnonzero(np.isin(key, key[puts:]))
            event = event[np.argsort(time[event], kind="stable")]
            item, waiting = first_in_first_out(key[event], event < puts)
            run, found = event[item >= 0], event[item[item >= 0]]
            if (goals[run] == goals[found]).all() and (trajectory[run] == trajectory[found]).all():
                break  # otherwise, different goals have the same hash
        source[place[run]] = place[found]
        return source, int((waiting[event >= puts] > 1).sum())

    def _make_parts(self, written: Write, runs: Runs, source: np.ndarray, old: Running, first_episode: int) -> Parts:
        """Join the runs of each episode, and cut episodes after ``max_episode_steps``."""
        begin, end, lane, longest = runs.begin, runs.end, source, self.max_episode_steps
        count = end - begin
        is_later = source >= len(old.lanes)  # runs that continue an earlier run
        if is_later.any():
            head = chain_heads(np.where(is_later, source - len(old.lanes), -1))
            by = np.argsort(head, kind="stable")  # the runs of an episode one after the other
            heads = np.flatnonzero(~is_later[by])
            begin, end, lane, count = begin[by], end[by], lane[by[heads]], np.add.reduceat(count[by], heads)
        order = runs.order[spread(begin, end)[1]]
        before = np.zeros((len(lane), COLUMNS), np.int64)
        if len(old.lanes):
            old.lanes.take(lane, axis=0, out=before, mode="wrap")
            before[lane < 0] = 0
        steps = before[:, STEPS] + count
        goes_on = np.zeros(len(steps), bool)
        if steps.max() > longest:
            of, number = spread(np.zeros_like(steps), -(-steps // longest))
            before = before[of] * (number == 0)[:, None]
            lane = np.where(number == 0, lane[of], -1)
            steps = np.minimum(steps[of] - number * longest, longest)
            count = steps - before[:, STEPS]
            goes_on = np.append(number[1:] > 0, False)
        ends = np.cumsum(count)
        last = order[ends - 1]
        new = (lane < 0).nonzero()[0]
        # In the order of writing, so that a later episode has a larger number.
        by_first = np.argsort(order[ends[new] - count[new]])
        before[new[by_first], EPISODE] = np.arange(first_episode, first_episode + len(new))
        return Parts(order, lane, before, steps, last, written.done[last] | (steps == longest), goes_on)

    def _finish(self, written: Write, old: Running, parts: Parts, **changes: Any) -> Tracked:
        """Return the running episodes after a write, whose parts are known, with the given ``changes`` of fields."""
        count, continued = len(written.done), parts.lane[parts.lane >= 0]
        is_open = (~parts.ended).nonzero()[0]
        is_open = is_open[np.argsort(parts.last[is_open], kind="stable")]  # often in order, and then fast
        last = parts.last[is_open]
        lanes, arrived = parts.before.take(is_open, axis=0), written.outcome.take(last)  # faster than an index
        lanes[:, STEPS], lanes[:, SEEN] = parts.steps[is_open], old.written + count
        lanes[:, TRAJECTORY] = NO_ID if written.trajectory is None else written.trajectory[last]
        lanes[:, ROW] = last
        if written.row_length > 1:
            row, step = np.divmod(last + 1, written.row_length)
            lanes[:, ROW] = np.where(step == 0, row - 1, -1)
        longest_wait = old.longest_wait
        if len(continued):  # a long pause says little about others, so it counts as at most twice the longest wait
            waited = old.written - int(old.lanes[continued.min(), SEEN])  # lanes are ordered by their wait
            longest_wait = max(longest_wait, min(waited, 2 * longest_wait + count))
        ended, lengths = parts.before[parts.ended, EPISODE], parts.steps[parts.ended]
        if len(continued) < len(old.lanes):  # other episodes wait
            waiting, written_so_far = np.delete(old.lanes, continued, axis=0), old.written + count
            patience = self._count_ended(waiting[:, SEEN], len(lanes), written_so_far, longest_wait)
            ended = np.concatenate([ended, waiting[:patience, EPISODE]])
            lengths = np.concatenate([lengths, waiting[:patience, STEPS]])
            waiting[:, ROW] = -1
            lanes = np.concatenate([waiting[patience:], lanes])
            arrived = np.concatenate([np.delete(old.arrived, continued)[patience:], arrived])
        running = old._replace(
            lanes=lanes,
            arrived=arrived,
            written=old.written + count,
            longest_wait=longest_wait,
            lengths=old.lengths.with_episodes(lengths),
            **changes,
        )
        opened = len(parts.lane) - len(continued)
        return Tracked(running, parts.in_order_of_writing(), is_open, ended, opened)

    def _count_ended(self, seen: np.ndarray, others: int, written: int, longest_wait: int) -> int:
        """Return how many of the episodes that wait longest end, given the transitions up to their last ones."""
        idle = int(np.searchsorted(seen, written - min(2 * longest_wait, self.patience)))
        ended = int(np.searchsorted(seen, written - max(2 * longest_wait, self.patience)))
        return max(ended, min(idle, len(seen) + others - self.most_idle))

    def flush(self) -> np.ndarray:
        """End the running episodes, and return them, ``int64 [n]``."""
        old = self.running
        if old is None:
            return np.empty(0, np.int64)
        steps = old.lanes[:, STEPS]
        self.running = old.without_lanes()._replace(
            to_begin=(old.to_begin or 0) + len(steps), lengths=old.lengths.with_episodes(steps)
        )
        return old.lanes[:, EPISODE]

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the running episodes as tensors and numbers."""
        running = self.running
        if running is None:
            return {"lanes": None}
        arrived = running.arrived.view(np.uint8).reshape(len(running.lanes), running.arrived.itemsize)
        return {
            "lanes": torch.from_numpy(running.lanes.copy()),
            "arrived": torch.from_numpy(arrived.copy()),
            "written": running.written,
            "longest_wait": running.longest_wait,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. It replaces all running episodes."""
        old = self.running
        if state["lanes"] is None:
            if old is not None:
                self.running = old.without_lanes()._replace(written=0, longest_wait=0)
            return
        lanes = state["lanes"].numpy(force=True).copy()
        arrived = np.ascontiguousarray(state["arrived"].numpy(force=True))
        lanes[:, ROW] = -1
        is_long = lanes[:, STEPS] >= self.max_episode_steps
        lanes[is_long, SEEN] = np.iinfo(np.int64).min // 2  # the next write ends these episodes
        by_wait = np.argsort(lanes[:, SEEN], kind="stable")
        to_begin = None if old is None else old.to_begin
        self.running = Running(
            lanes=lanes[by_wait],
            arrived=arrived.view(f"V{arrived.shape[1]}").reshape(-1)[by_wait],
            written=state["written"],
            longest_wait=state["longest_wait"],
            to_begin=(to_begin or 0) + int(is_long.sum()) if is_long.any() else to_begin,
            lengths=self.lengths,
            loaded=int((~is_long).sum()),
        )


def _match_stream(written: Write, old: Running) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Return the lane that a stream continues, or -1, and the first and the last positions of its episodes.

    A stream is a write of one environment in order, in which at most the first episode continues a lane, and nothing is
    ambiguous. For any other write, return None.
    """
    start, ids, done = written.start, written.trajectory, written.done
    may_be_environments = ids is None and 1 < written.rows == old.rows
    if may_be_environments or len(old.lanes) > FEW_LANES:
        return None
    if len(done) > 1:
        ends = done[:-1]
        if written.begins[1:].any() or not (ends | (start[1:] == written.outcome[:-1])).all():
            return None
        if ids is not None and not (ends | (ids[1:] == ids[:-1])).all():
            return None
    begins = np.empty_like(done)
    begins[0], begins[1:] = True, done[:-1]
    first = begins.nonzero()[0]
    last = np.empty(len(first), np.int64)
    last[:-1], last[-1] = first[1:] - 1, len(done) - 1
    matches = start[first, None] == old.arrived  # [episodes, lanes]
    episode, lane = matches.nonzero()
    if len(episode) > 1 or (len(episode) and episode[0]):
        return None
    if ids is not None and ((ids[first, None] == old.lanes[:, TRAJECTORY]) != matches).any():
        return None
    if ids is None and (old.lanes[lane, TRAJECTORY] != NO_ID).any():
        return None
    return (int(lane[0]) if len(lane) else -1), first, last


def _match_ids(written: Write, runs: Runs, old: Running, free: np.ndarray, first: np.ndarray) -> np.ndarray | None:
    """Return the lane that each run continues, or -1, if trajectory ids alone decide and the goals agree, else None.

    ``free`` are the lanes with the ids of runs, and ``first`` are the first positions of the runs, ``int64 [n]`` each.
    """
    assert written.trajectory is not None
    by_id = free[np.argsort(old.lanes[free, TRAJECTORY])]
    known, ids = old.lanes[by_id, TRAJECTORY], written.trajectory[first]
    if not (runs.has_one_run_per_id and len(known) and (known[1:] != known[:-1]).all()):
        return None
    place = np.searchsorted(known, ids).clip(max=len(known) - 1)
    lane = by_id[place]
    is_found = known[place] == ids
    if (old.arrived[lane[is_found]] != written.start[first[is_found]]).any():
        return None
    return np.where(is_found, lane, -1)


def _match_rows(written: Write, old: Running) -> tuple[np.ndarray | None, bool]:
    """Return the lane that each row of a write continues, and whether the rows are known to be environments.

    Goals can be ambiguous: one environment, or a new episode with the same trajectory id, can start where another one
    has just arrived. But consecutive writes ``[environments, steps]`` have the same environments in the
    same rows. So if most rows start where the same row of the last write ended, each of these rows continues its
    episode. In a one-dimensional write, each row is one step.

    Returns:
        tuple[np.ndarray | None, bool]: for each transition, the lane that it continues as the first of its row, or -1,
        ``int64 [n]``; None if no row is known to continue a lane.
    """
    lanes, ids, rows = old.lanes, written.trajectory, written.rows
    if old.to_begin is None and ids is None and written.row_length > 1:
        return None, True  # in the first write, rows are environments
    if not rows or rows != old.rows:
        return None, False
    lane = (lanes[:, ROW] >= 0).nonzero()[0]
    first = lanes[lane, ROW] * written.row_length
    matches = are_equal(written.start.take(first), old.arrived.take(lane))
    matches &= lanes[lane, TRAJECTORY] == (NO_ID if ids is None else ids[first])
    lane_of = np.full(len(written.done), -1)
    lane_of[first[matches]] = lane[matches]
    # A single environment of a one-dimensional write leaves one episode open, so at most one row matches.
    needed = len(lane) if old.rows_are_lanes else rows
    are_lanes = 2 * np.count_nonzero(matches) > needed or (old.rows_are_lanes and not len(lane))
    if ids is not None:
        return (lane_of if are_lanes or written.row_length > 1 else None), False
    return (lane_of, True) if are_lanes else (None, False)
