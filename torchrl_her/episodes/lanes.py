"""Lanes: the running episodes of all environments, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her.episodes.matching import chain_heads, first_in_first_out, hash_goals, queue_sizes, rank_goals
from torchrl_her.episodes.write import Write
from torchrl_her.goals.table import PIECE, spread

# The columns of running episodes: the trajectory id or NO_ID; the episode id; the number of steps so far; the first
# step whose data is kept, the first one of a piece; the number of published steps; the number of transitions that were
# written up to its last one; and the row of the last write that its last transition ends, or -1.
TRAJECTORY, EPISODE, STEPS, FIRST, PUBLISHED, SEEN, ROW = range(7)
COLUMNS = 7
NO_ID = np.iinfo(np.int64).min
MOST_LANES = 1024  # more idle episodes stay open only if their steps take no more memory than the goal table


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


class Published(NamedTuple):
    """Steps of some episodes: the arguments of `GoalTable.append`."""

    episode: np.ndarray  # int64 [n], the episode ids
    begin: np.ndarray  # int64 [n], the first step of each
    length: np.ndarray  # int64 [n], the number of steps of each
    data: Tensor  # [sum(length), ...], achieved goals or packed transitions


class Pool(NamedTuple):
    """Memory for steps that wait, in pieces of 64 steps.

    Pieces are taken from ``free``. A freed piece is not overwritten before the next write, so that an interrupted write
    changes nothing.
    """

    data: Tensor  # [pieces * 64, ...]
    free: np.ndarray  # int64, the numbers of unused pieces

    def take(self, count: int) -> tuple[Pool, np.ndarray]:
        """Return a pool without ``count`` free pieces, and the numbers of these pieces. It grows geometrically."""
        data, free = self
        if (missing := count - len(free)) > 0:
            pieces = len(data) // PIECE
            more = max(missing, pieces // 2)
            data = torch.cat([data, data.new_empty(more * PIECE, *data.shape[1:])])
            free = np.append(free, np.arange(pieces, pieces + more))
        return Pool(data, free[count:]), free[:count]

    def give_back(self, pieces: np.ndarray) -> Pool:
        """Return a pool in which these pieces are free; negative numbers are ignored."""
        return Pool(self.data, np.append(self.free, pieces[pieces >= 0]))


class Running(NamedTuple):
    """The running episodes after a write. A write makes a new object, so that an interrupted write changes nothing.

    In place, a write changes only those parts of the pool that this object does not use.
    """

    lanes: np.ndarray  # int64 [lanes, columns], from the longest to the shortest wait
    arrived: np.ndarray  # void [lanes], the bytes of both goals under "next" of the last transition
    pieces: np.ndarray  # int64 [lanes, pieces], the pieces of the pool with the steps from `first` on; -1 if unused
    pool: Pool
    rows: int = 0  # the number of rows of the last write if each can be an environment, otherwise 0
    rows_are_lanes: bool = False  # whether the rows of consecutive writes were the same environments
    written: int = 0  # the number of transitions so far
    longest_wait: int = 0  # the longest wait of a lane that was continued, in transitions written meanwhile
    to_begin: int | None = None  # the number of episodes expected to begin; None before the first write
    lengths: Lengths = Lengths()
    loaded: int = 0  # the number of loaded episodes that can go on; 0 after the first write

    def without_lanes(self) -> Running:
        """Return the state without running episodes, with the same counters."""
        pool = Pool(self.pool.data, np.arange(len(self.pool.data) // PIECE))
        return self._replace(
            lanes=self.lanes[:0],
            arrived=self.arrived[:0],
            pieces=self.pieces[:0],
            pool=pool,
            rows=0,
            rows_are_lanes=False,
            loaded=0,
        )

    def rows_in_pool(self, lane: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the rows of the pool with steps ``begin, ..., end - 1`` of some lanes, joined, ``int64 [n]``."""
        number, step = spread(begin, end)
        return _rows(self.pieces[lane], number, step - self.lanes[lane, FIRST][number])


class Runs(NamedTuple):
    """The runs of a write: transitions that continue each other, in the order of writing."""

    order: np.ndarray  # int64 [n], the positions of the transitions in the write, ordered by trajectory id
    begin: np.ndarray  # int64 [runs], the place of the first transition of each run in `order`
    end: np.ndarray  # int64 [runs], the place after its last transition
    has_one_run_per_id: bool  # whether each run is the only one with its trajectory id

    @property
    def first(self) -> np.ndarray:
        """The positions of the first transitions in the write."""
        return self.order[self.begin]

    @property
    def last(self) -> np.ndarray:
        """The positions of the last transitions in the write."""
        return self.order[self.end - 1]


@dataclass(frozen=True)
class Parts:
    """The parts of episodes in a write. An episode has one part."""

    order: np.ndarray  # int64 [n], the positions of the transitions in the write, part after part
    begin: np.ndarray  # int64 [parts], the place of the first transition of each part in `order`
    count: np.ndarray  # int64 [parts], the number of transitions
    lane: np.ndarray  # int64 [parts], the lane that the part continues, or -1
    before: np.ndarray  # int64 [parts, columns], this lane, or an episode without steps
    steps: np.ndarray  # int64 [parts], the number of steps of the episode after this write
    last: np.ndarray  # int64 [parts], the position of the last transition in the write
    ended: np.ndarray  # bool [parts], whether the episode ended
    goes_on: np.ndarray  # bool [parts], whether it ended only because of its length, and the next part goes on
    cut: int  # the largest known number of steps of an episode that `max_episode_steps` cut; 0 if it cut none


class Tracked(NamedTuple):
    """The episodes of the transitions of one write."""

    running: Running  # after the write
    stamps: np.ndarray  # int64 [n, 2], the episode id of each transition and its step, in the order of writing
    published: list[Published]
    opened: int  # the number of episodes that began
    continued: int  # the number of runs that continued an episode
    breaks: np.ndarray  # int64, the positions of transitions that begin an episode although no other had ended
    ambiguous: int  # the number of runs that could continue several episodes
    cut: int  # the largest known number of steps of an episode that `max_episode_steps` cut; 0 if it cut none
    loaded: int = 0  # the number of running episodes that were loaded, in the first write after loading


class Lanes:
    """Finds the episode and the step of each written transition, and keeps the data of steps until it is published.

    A write is cut into runs of transitions that continue each other. A run continues a running episode if both have the
    same trajectory id (or none) and the run starts at the goals at which the episode's last transition arrived. If
    several episodes match, the run continues the one of the same row of the last write, or else the one that has waited
    longest. If none matches, a new episode begins.

    An episode ends with a done flag, after ``max_episode_steps``, or when it has waited for too long. A silent reset
    carries no flag, so episodes that nothing continues must be found by their wait, measured in transitions written
    meanwhile. An episode is idle when it has waited more than twice as long as any that was later continued. It ends
    when it has waited for more than ``patience`` transitions, or when there are very many idle episodes.

    Args:
        max_episode_steps (int): the number of steps after which an episode ends.
        patience (int): the number of transitions written meanwhile after which an episode ends.

    Keyword Args:
        publish_running (bool): whether an episode is also published while it runs: its complete pieces, and all of it
            when it is idle. If False, an episode is published once, at its end, and it ends only when it is idle.
            Default: True.
        expects_end (bool): whether the end of the data is known. Then an episode is never idle. Default: False.
    """

    def __init__(
        self, max_episode_steps: int, patience: int, *, publish_running: bool = True, expects_end: bool = False
    ):
        self.max_episode_steps, self.patience = max_episode_steps, patience
        self.publish_running, self.expects_end = publish_running, expects_end
        self.running: Running | None = None  # None before the first write

    def __len__(self) -> int:
        return 0 if self.running is None else len(self.running.lanes)

    @property
    def lengths(self) -> Lengths:
        """Statistics of the lengths of ended episodes."""
        return Lengths() if self.running is None else self.running.lengths

    def without_episodes(self) -> Lanes:
        """Return an object with the same settings and no running episodes, for another process."""
        options = {"publish_running": self.publish_running, "expects_end": self.expects_end}
        return Lanes(self.max_episode_steps, self.patience, **options)

    # Writing

    def track(self, written: Write, data: Tensor, first_episode: int) -> Tracked:
        """Assign the transitions of a write to episodes.

        This changes nothing. The caller assigns `running` of the result once the write is complete.

        Args:
            written (Write): the ``n`` transitions.
            data (Tensor): the data of each transition that is kept until it is published, ``[n, ...]``.
            first_episode (int): the id of the first new episode. Further new episodes get the ids that follow.
        """
        old = self._running_for(written, data)
        none = np.empty(0, np.int64)
        if not len(written.done):
            return Tracked(old, none.reshape(0, 2), [], 0, 0, none, 0, 0)
        tracked = self._track_single_run(written, data, old, first_episode)
        if tracked is None:
            tracked = self._track_runs(written, data, old, first_episode)
        if old.loaded:
            tracked = tracked._replace(running=tracked.running._replace(loaded=0), loaded=old.loaded)
        return tracked

    def _track_runs(self, written: Write, data: Tensor, old: Running, first_episode: int) -> Tracked:
        """Track any write."""
        lane_of_row, rows_are_lanes = _match_rows(written, old, self.max_episode_steps)
        runs = _cut_into_runs(written, at_rows=rows_are_lanes)
        source, ambiguous = self._find_sources(written, runs, old, lane_of_row, rows_are_lanes)
        parts = self._make_parts(written, runs, source, old, first_episode)
        stamps = np.empty((len(parts.order), 2), np.int64)
        stamps[parts.order, 0] = np.repeat(parts.before[:, EPISODE], parts.count)
        stamps[parts.order, 1] = spread(parts.before[:, STEPS], parts.steps)[1]

        new, published = self._add(written, data, old, parts)
        breaks, to_begin = _find_breaks(written, runs, source, old, parts)
        continued = parts.lane[parts.lane >= 0]
        longest_wait = old.longest_wait
        if len(continued):  # a long pause says little about others, so it counts as at most twice the longest wait
            waited = old.written - int(old.lanes[continued, SEEN].min())
            longest_wait = max(longest_wait, min(waited, 2 * longest_wait + len(stamps)))
        rows = _rows_of(written)
        new = new._replace(
            rows=rows if written.trajectory is not None or len(runs.begin) == rows else 0,
            rows_are_lanes=rows_are_lanes,
            longest_wait=longest_wait,
            to_begin=to_begin,
            lengths=old.lengths.with_episodes(parts.steps[parts.ended]),
        )
        new, idle = self._publish_idle(new)
        opened = len(parts.lane) - len(continued)
        return Tracked(new, stamps, published + idle, opened, int((source >= 0).sum()), breaks, ambiguous, parts.cut)

    def _track_single_run(self, written: Write, data: Tensor, old: Running, first_episode: int) -> Tracked | None:
        """Track a write in which one episode goes on within its piece, or a whole one; return None for any other write.

        Without this short path, the general one gives the same result, but takes twice as long for one transition.
        """
        count, ids, start, done = len(written.done), written.trajectory, written.start, written.done
        rows = _rows_of(written)
        if (start[1:] != written.outcome[:-1]).any() or done[:-1].any() or written.begins[1:].any():
            return None
        has_several = 1 < rows == old.rows if ids is None else bool((ids != ids[0]).any())  # environments
        if has_several:
            return None
        trajectory = NO_ID if ids is None else int(ids[0])
        match = np.flatnonzero(old.arrived == start[0])
        old = old._replace(rows=rows if ids is not None or rows == 1 else 0, rows_are_lanes=False)
        if not len(match) and done[-1] and count <= self.max_episode_steps:
            return self._track_whole_episode(written, data, old, trajectory, first_episode)
        if len(match) != 1 or done[-1]:
            return None
        lane, now = int(match[0]), old.lanes[match]
        has_id, episode, before, first, _, seen, _ = now[0].tolist()
        steps, piece = before + count, int(old.pieces[lane, 0])
        is_within_piece = before < steps < min(first + PIECE, self.max_episode_steps) and piece >= 0
        if has_id != trajectory or not is_within_piece:
            return None
        row = piece * PIECE + before - first
        old.pool.data[row : row + count] = data
        now[0, [STEPS, SEEN, ROW]] = steps, old.written + count, rows - 1
        others = np.arange(len(old.lanes)) != lane
        wait = min(old.written - seen, 2 * old.longest_wait + count)
        new = old._replace(
            lanes=np.concatenate([_waiting(old.lanes[others]), now]),
            arrived=np.concatenate([old.arrived[others], written.outcome[-1:]]),
            pieces=np.concatenate([old.pieces[others], old.pieces[match]]),
            written=old.written + count,
            longest_wait=max(old.longest_wait, wait),
        )
        new, idle = self._publish_idle(new)
        return Tracked(new, _stamps(episode, before, steps), idle, 0, 1, match[:0], 0, 0)

    def _track_whole_episode(
        self, written: Write, data: Tensor, old: Running, trajectory: int, episode: int
    ) -> Tracked:
        """Track a write that is a whole episode."""
        length = np.array([len(written.done)])
        to_begin = 1 if old.to_begin is None else old.to_begin
        if written.trajectory is not None:
            is_break = bool((old.lanes[:, TRAJECTORY] == trajectory).any())
        else:
            is_break = written.row_length <= 1 and not to_begin
            to_begin -= written.row_length <= 1 and not is_break
        new = old._replace(
            lanes=_waiting(old.lanes.copy()),
            written=old.written + len(written.done),
            to_begin=to_begin + 1,
            lengths=old.lengths.with_episodes(length),
        )
        new, idle = self._publish_idle(new)
        published = Published(np.array([episode]), np.zeros_like(length), length, data)
        stamps = _stamps(episode, 0, len(written.done))
        return Tracked(new, stamps, [published, *idle], 1, 0, np.flatnonzero([is_break]), 0, 0)

    def _running_for(self, written: Write, data: Tensor) -> Running:
        """Return the running episodes, with a pool for data like ``[n, ...]``."""
        old, none = self.running, np.empty(0, np.int64)
        if old is None:
            old = Running(
                none.reshape(0, COLUMNS), written.outcome[:0], none.reshape(0, 1), Pool(_empty(data, 0), none)
            )
        pool = old.pool.data
        if not len(old.lanes) and (pool.shape[1:], pool.dtype) != (data.shape[1:], data.dtype):
            return old._replace(arrived=written.outcome[:0], pool=Pool(_empty(data, 0), none))
        if pool.device != data.device:  # loaded data can be on another device
            return old._replace(pool=Pool(pool.to(data.device), old.pool.free))
        return old

    def _find_sources(
        self, written: Write, runs: Runs, old: Running, lane_of_row: np.ndarray, rows_are_lanes: bool
    ) -> tuple[np.ndarray, int]:
        """Return what each run continues, ``int64 [runs]``, and the number of runs for which several episodes match.

        Numbers below ``len(lanes)`` are lanes, ``len(lanes) + r`` is run r of this write, and -1 is nothing.
        """
        first, last, lanes = runs.first, runs.last, old.lanes
        source = np.full(len(first), -1)
        if len(lane_of_row):
            row, step = np.divmod(first, written.row_length)
            source = np.where(step == 0, lane_of_row[row], -1)
        left = np.flatnonzero(source < 0)
        if not len(left):
            return source, 0
        is_free = lanes[:, STEPS] < self.max_episode_steps  # after loading or sharing, an episode can be longer
        is_free[source[source >= 0]] = False
        free = np.flatnonzero(is_free)
        # Without ids, no other row of this write may continue the episode of a row.
        are_apart = rows_are_lanes or runs.has_one_run_per_id
        open_runs = np.empty(0, np.int64) if are_apart else np.flatnonzero(~written.done[last])
        if not len(free) + len(open_runs):
            return source, 0
        ids = np.full(len(written.done), NO_ID) if written.trajectory is None else written.trajectory
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
        # The last row is an episode without steps, for the index -1.
        before = np.concatenate([old.lanes, np.zeros((1, COLUMNS), np.int64)]).take(lane, axis=0)
        known = steps = before[:, STEPS] + count
        goes_on = np.zeros(len(steps), bool)
        if steps.max() > longest:
            of, number = spread(np.zeros_like(steps), -(-steps // longest))
            before = before[of] * (number == 0)[:, None]
            lane, known = np.where(number == 0, lane[of], -1), steps[of]
            steps = np.minimum(known - number * longest, longest)
            count = steps - before[:, STEPS]
            goes_on = np.append(number[1:] > 0, False)
        begin = np.cumsum(count) - count
        last = order[begin + count - 1]
        is_cut = (steps == longest) & ~written.done[last]
        new = np.flatnonzero(lane < 0)
        # In the order of writing, so that episodes leave the table in the same order as the storage.
        before[new[np.argsort(order[begin[new]])], EPISODE] = first_episode + np.arange(len(new))
        ended = written.done[last] | is_cut
        return Parts(order, begin, count, lane, before, steps, last, ended, goes_on, int(known[is_cut].max(initial=0)))

    def _add(self, written: Write, data: Tensor, old: Running, parts: Parts) -> tuple[Running, list[Published]]:
        """Add the parts of a write to the running episodes. Return these, and the steps that are published."""
        ended, steps, published = parts.ended, parts.steps, []
        until = np.where(ended, steps, steps // PIECE * PIECE if self.publish_running else 0)
        now = parts.before.copy()
        due = until > now[:, PUBLISHED]
        moves = due & ~ended
        if due.any():
            published = [_publish(data, old, parts, until, np.flatnonzero(due))]
            now[due, PUBLISHED] = until[due]
            now[moves, FIRST] = until[moves]
        now[:, STEPS], now[:, SEEN] = steps, old.written + len(parts.order)
        now[:, TRAJECTORY] = NO_ID if written.trajectory is None else written.trajectory[parts.last]
        row, step = np.divmod(parts.last + 1, written.row_length or 1)
        now[:, ROW] = np.where(step == 0, row - 1, -1)
        is_open = np.flatnonzero(~ended)
        is_open = is_open[np.argsort(parts.last[is_open])]
        lanes, arrived = now.take(is_open, axis=0), written.outcome[parts.last[is_open]]
        pieces, pool = _hold(data, old, parts, lanes[:, FIRST], is_open, moves)
        if (parts.lane >= 0).sum() < len(old.lanes):  # other episodes wait
            is_waiting = np.ones(len(old.lanes), bool)
            is_waiting[parts.lane[parts.lane >= 0]] = False
            lanes = np.concatenate([_waiting(old.lanes[is_waiting]), lanes])
            arrived = np.concatenate([old.arrived[is_waiting], arrived])
            wider = ((0, 0), (0, pieces.shape[1] - old.pieces.shape[1]))
            pieces = np.concatenate([np.pad(old.pieces[is_waiting], wider, constant_values=-1), pieces])
        new = old._replace(lanes=lanes, arrived=arrived, pieces=pieces, pool=pool, written=now[0, SEEN].item())
        return new, published

    def _publish_idle(self, running: Running) -> tuple[Running, list[Published]]:
        """Publish all steps of idle episodes, and end episodes that wait for too long."""
        lanes, seen = running.lanes, running.lanes[:, SEEN]
        idle_after = (min if self.publish_running else max)(2 * running.longest_wait, self.patience)
        if self.expects_end:
            idle_after = self.patience
        idle = int(np.searchsorted(seen, running.written - idle_after))  # the lanes that wait longest
        too_many = len(lanes) - max(MOST_LANES, self.patience // PIECE)
        ended = int(np.searchsorted(seen, running.written - max(idle_after, self.patience)))
        ended = max(ended, min(idle, too_many))
        due = np.flatnonzero(lanes[:idle, PUBLISHED] < lanes[:idle, STEPS])
        published = _publish_lanes(running, due)
        if len(due):
            lanes = lanes.copy()
            lanes[due, PUBLISHED] = lanes[due, STEPS]
            running = running._replace(lanes=lanes)
        if not ended:
            return running, published
        new = running._replace(
            lanes=lanes[ended:],
            arrived=running.arrived[ended:],
            pieces=running.pieces[ended:],
            pool=running.pool.give_back(running.pieces[:ended].reshape(-1)),
            lengths=running.lengths.with_episodes(lanes[:ended, STEPS]),
        )
        return new, published

    def flush(self) -> list[Published]:
        """End the running episodes and return the steps that were not published."""
        old = self.running
        if old is None or not len(old.lanes):
            return []
        steps = old.lanes[:, STEPS]
        self.running = old.without_lanes()._replace(
            to_begin=(old.to_begin or 0) + len(steps), lengths=old.lengths.with_episodes(steps)
        )
        return _publish_lanes(old, np.flatnonzero(old.lanes[:, PUBLISHED] < steps))

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the running episodes as tensors and numbers."""
        running = self.running
        if running is None:
            return {"lanes": None}
        lanes, pool = running.lanes, running.pool.data
        kept = running.rows_in_pool(np.arange(len(lanes)), lanes[:, FIRST], lanes[:, STEPS])
        arrived = running.arrived.view(np.uint8).reshape(len(lanes), running.arrived.itemsize)
        return {
            "lanes": torch.from_numpy(lanes.copy()),
            "arrived": torch.from_numpy(arrived.copy()),
            "data": pool.index_select(0, _index(kept, pool)),
            "written": running.written,
            "longest_wait": running.longest_wait,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. It replaces all running episodes."""
        old = self.running
        if state["lanes"] is None:
            self.running = None if old is None else old.without_lanes()._replace(written=0, longest_wait=0)
            return
        data, lanes = state["data"], state["lanes"].numpy(force=True).copy()
        arrived = np.ascontiguousarray(state["arrived"].numpy(force=True))
        lanes[:, ROW] = -1
        is_long = lanes[:, STEPS] >= self.max_episode_steps
        lanes[is_long, SEEN] = np.iinfo(np.int64).min // 2  # the next write ends these episodes
        number, piece = spread(np.zeros(len(lanes), np.int64), _pieces_of(lanes[:, STEPS] - lanes[:, FIRST]))
        pieces = np.full((len(lanes), 1 + int(piece.max(initial=0))), -1)
        pool, pieces[number, piece] = Pool(_empty(data, 0), np.empty(0, np.int64)).take(len(number))
        running = Running(lanes, arrived.view(f"V{arrived.shape[1]}").reshape(-1), pieces, pool)
        rows = running.rows_in_pool(np.arange(len(lanes)), lanes[:, FIRST], lanes[:, STEPS])
        pool.data.index_copy_(0, _index(rows, data), data)
        by_wait = np.argsort(lanes[:, SEEN], kind="stable")
        to_begin = None if old is None else old.to_begin
        self.running = running._replace(
            lanes=lanes[by_wait],
            arrived=running.arrived[by_wait],
            pieces=pieces[by_wait],
            written=state["written"],
            longest_wait=state["longest_wait"],
            to_begin=(to_begin or 0) + int(is_long.sum()) if is_long.any() else to_begin,
            lengths=self.lengths,
            loaded=int((~is_long).sum()),
        )


def _stamps(episode: int, begin: int, end: int) -> np.ndarray:
    """Return the stamps of steps ``begin, ..., end - 1`` of an episode, ``int64 [n, 2]``."""
    stamps = np.full((end - begin, 2), episode)
    stamps[:, 1] = np.arange(begin, end)
    return stamps


def _waiting(lanes: np.ndarray) -> np.ndarray:
    """Return lanes that a write does not continue. The argument is modified."""
    lanes[:, ROW] = -1
    return lanes


def _rows_of(written: Write) -> int:
    """Return the number of rows of a write if each can be an environment, otherwise 0."""
    return len(written.done) // written.row_length if written.row_length else 0


def _match_rows(written: Write, old: Running, max_episode_steps: int) -> tuple[np.ndarray, bool]:
    """Return the lane that each row of a write continues, and whether the rows are known to be environments.

    Without trajectory ids, only goals identify an episode, and they can be ambiguous: one environment can start where
    another one has just arrived. But consecutive writes ``[environments, steps]`` have the same environments in the
    same rows. So if most rows start where the same row of the last write ended, each of these rows continues its
    episode. In a one-dimensional write, each row is one step.

    Returns:
        tuple[np.ndarray, bool]: for each row, its lane or -1, ``int64 [rows]``, or ``[0]`` if there is none.
    """
    rows, none = _rows_of(written), np.empty(0, np.int64)
    if not rows or rows != old.rows:
        return none, False
    lanes, ids = old.lanes, written.trajectory
    lane = np.flatnonzero(lanes[:, ROW] >= 0)
    row = lanes[lane, ROW]
    start = row * written.row_length
    matches = written.start[start] == old.arrived[lane]
    matches &= lanes[lane, STEPS] < max_episode_steps
    matches &= lanes[lane, TRAJECTORY] == (NO_ID if ids is None else ids[start])
    lane_of_row = np.full(rows, -1)
    lane_of_row[row[matches]] = lane[matches]
    if ids is not None:
        return lane_of_row, False
    # A single environment of a one-dimensional write leaves one episode open, so at most one row matches.
    needed = len(lane) if old.rows_are_lanes else rows
    are_lanes = 2 * int(matches.sum()) > needed or (old.rows_are_lanes and not len(lane))
    return (lane_of_row, True) if are_lanes else (none, False)


def _cut_into_runs(written: Write, *, at_rows: bool) -> Runs:
    """Return the runs of a write.

    A run ends before a transition that does not continue the previous one and, if ``at_rows``, at the end of a row.
    """
    trajectory, order = written.trajectory, np.arange(len(written.done))
    start, outcome, done, begins = written.start, written.outcome, written.done, written.begins.copy()
    if at_rows:
        begins[:: written.row_length] = True
    is_ordered = True
    if trajectory is not None:
        by_id = np.argsort(trajectory, kind="stable")
        is_ordered = bool((by_id == order).all())
        begins[0], begins[1:] = True, np.diff(trajectory[by_id]) != 0
        if begins.all():  # a frame: one transition of each environment
            return Runs(order, order, order + 1, has_one_run_per_id=True)
        if not is_ordered:
            order, start, outcome, done = by_id, start[by_id], outcome[by_id], done[by_id]
    begins[0] = True
    trajectories = 1 if trajectory is None else np.count_nonzero(begins)
    begins[1:] |= done[:-1]
    begins[1:] |= start[1:] != outcome[:-1]
    begin = np.flatnonzero(begins)
    end = np.append(begin[1:], len(order))
    if not is_ordered:
        in_order = np.argsort(order[begin])
        begin, end = begin[in_order], end[in_order]
    return Runs(order, begin, end, len(begin) == trajectories)


def _find_breaks(written: Write, runs: Runs, source: np.ndarray, old: Running, parts: Parts) -> tuple[np.ndarray, int]:
    """Return the positions where an episode begins although none could, and the number of episodes expected to begin.

    An episode can begin with a new trajectory id, in a new row, or after the end of another one: each end allows one
    beginning.
    """
    first, begins = runs.first, source < 0
    to_begin = int(written.begins.sum()) if old.to_begin is None else old.to_begin
    last = parts.last[parts.ended & ~parts.goes_on]
    if written.trajectory is not None:
        return first[_begin_while_running(written, runs, begins, old)], to_begin + len(last)
    claims = begins & ~(written.begins[first] & (written.row_length > 1))
    if claims.sum() <= to_begin:  # the usual case
        return first[:0], to_begin - int(claims.sum()) + len(last)
    ends = np.bincount(np.searchsorted(runs.end, last, side="right"), minlength=len(first))
    change = np.append(to_begin, np.column_stack([-claims.astype(np.int64), ends]))
    refused, size = queue_sizes(change, np.arange(len(change)) == 0)
    return first[refused[1::2]], int(size[-1] + change[-1])


def _begin_while_running(written: Write, runs: Runs, begins: np.ndarray, old: Running) -> np.ndarray:
    """Return which of the runs in ``begins`` start while another episode with the same id is running."""
    assert written.trajectory is not None
    lanes = len(old.lanes)
    if not begins.any() or (runs.has_one_run_per_id and (~begins).sum() == lanes):  # all running episodes go on
        return np.zeros_like(begins)
    ids = np.concatenate([old.lanes[:, TRAJECTORY], written.trajectory[runs.first]])
    change = np.concatenate([np.ones(lanes, np.int64), ~written.done[runs.last] - (~begins).astype(np.int64)])
    event = np.flatnonzero(np.isin(ids, ids[lanes:][begins]))
    event = event[np.argsort(ids[event], kind="stable")]
    running = np.zeros(len(ids), np.int64)
    running[event] = queue_sizes(change[event], np.append(True, ids[event[1:]] != ids[event[:-1]]))[1]
    return begins & (running[lanes:] > 0)


def _publish(data: Tensor, old: Running, parts: Parts, until: np.ndarray, due: np.ndarray) -> Published:
    """Return the steps before ``until`` of the parts that are ``due``, from earlier writes and this one."""
    lane, until, before = parts.lane[due], until[due], parts.before.take(due, axis=0)
    first, earlier, episode = before[:, FIRST], before[:, STEPS], before[:, EPISODE]
    begin = np.cumsum(until - first) - until  # the place of each step in the result is begin + step
    number, step = spread(earlier, until)
    result = data.index_select(0, _index(parts.order[(parts.begin[due] - earlier)[number] + step], data))
    if (first < earlier).any():
        new, result = result, _empty(data, int((until - first).sum()))
        result.index_copy_(0, _index(begin[number] + step, data), new)
        number, step = spread(first, earlier)
        kept = old.pool.data.index_select(0, _index(old.rows_in_pool(lane, first, earlier), data))
        result.index_copy_(0, _index(begin[number] + step, data), kept)
    return Published(episode, first, until - first, result)


def _publish_lanes(running: Running, lane: np.ndarray) -> list[Published]:
    """Return the kept steps of some lanes."""
    if not len(lane):
        return []
    first, steps = running.lanes[lane, FIRST], running.lanes[lane, STEPS]
    pool = running.pool.data
    kept = pool.index_select(0, _index(running.rows_in_pool(lane, first, steps), pool))
    return [Published(running.lanes[lane, EPISODE], first, steps - first, kept)]


def _hold(
    data: Tensor, old: Running, parts: Parts, first: np.ndarray, is_open: np.ndarray, moves: np.ndarray
) -> tuple[np.ndarray, Pool]:
    """Keep the steps from ``first`` on of the parts that stay open; return their pieces ``[open, pieces]``.

    The pieces of the other parts are free after this write.
    """
    if not len(is_open):
        return old.pieces[:0], old.pool.give_back(old.pieces[parts.lane[parts.lane >= 0]].reshape(-1))
    lane, earlier, steps = parts.lane[is_open], parts.before[is_open, STEPS], parts.steps[is_open]
    stays = (lane >= 0) & ~moves[is_open]
    have = np.where(stays, _pieces_of(earlier - first), 0)
    need = _pieces_of(steps - first)
    width = old.pieces.shape[1]
    pieces = np.full((len(lane), max(width, int(need.max(initial=1)))), -1)
    pieces[stays, :width] = old.pieces[lane[stays]]
    number, piece = spread(have, need)
    pool, pieces[number, piece] = old.pool.take(len(number))
    number, step = spread(np.maximum(earlier, first), steps)
    place = parts.order[(parts.begin[is_open] - earlier)[number] + step]
    rows = _rows(pieces, number, step - first[number])
    pool.data.index_copy_(0, _index(rows, data), data.index_select(0, _index(place, data)))
    is_left = parts.lane >= 0
    is_left[is_open[stays]] = False
    return pieces, pool.give_back(old.pieces[parts.lane[is_left]].reshape(-1))


def _pieces_of(steps: np.ndarray) -> np.ndarray:
    """Return the number of pieces that contain steps, ``int64 [n]``."""
    return (steps + PIECE - 1) // PIECE


def _rows(pieces: np.ndarray, lane: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Return the rows of the pool with steps, given their distance from the first kept step of their lane."""
    return pieces[lane, ahead // PIECE] * PIECE + ahead % PIECE


def _empty(data: Tensor, count: int) -> Tensor:
    """Return uninitialized memory for data like ``[n, ...]``."""
    return data.new_empty(count, *data.shape[1:])


def _index(rows: np.ndarray, data: Tensor) -> Tensor:
    """Return an index ``int64 [n]`` on the device of some data."""
    return torch.from_numpy(rows).to(data.device)
