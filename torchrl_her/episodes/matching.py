"""Cuts a write into runs, and finds which running episode each run continues."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchrl_her.episodes.write import Write

_FACTORS = np.random.default_rng().integers(0, 2**62, 64) * 2 + 1


class Runs(NamedTuple):
    """The runs of a write: transitions that continue each other, in the order of writing."""

    order: np.ndarray  # int64 [n], the positions of the transitions in the write, those of each trajectory id together
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


def cut_into_runs(written: Write, *, at_rows: bool) -> Runs:
    """Return the runs of a write.

    A run ends before a transition that does not continue the previous one and, if ``at_rows``, at the end of a row.
    """
    trajectory, order = written.trajectory, np.arange(len(written.done))
    start, outcome, done, begins = written.start, written.outcome, written.done, written.begins.copy()
    if at_rows:
        begins[:: written.row_length] = True
    is_ordered = True
    begins[0] = True
    if trajectory is not None:
        begins[1:] = trajectory[1:] != trajectory[:-1]
        ids = np.sort(trajectory[begins])
        is_ordered = bool((ids[1:] != ids[:-1]).all())  # the transitions of each id follow each other
        if is_ordered and len(ids) == len(order):  # a frame: one transition of each environment
            return Runs(order, order, order + 1, has_one_run_per_id=True)
        if not is_ordered:
            order = np.argsort(trajectory, kind="stable")
            start, outcome, done, trajectory = start[order], outcome[order], done[order], trajectory[order]
            begins[1:] = trajectory[1:] != trajectory[:-1]
    trajectories = 1 if trajectory is None else np.count_nonzero(begins)
    begins[1:] |= done[:-1]
    begins[1:] |= start[1:] != outcome[:-1]
    begin = begins.nonzero()[0]
    end = np.empty(len(begin), np.int64)
    end[:-1], end[-1] = begin[1:], len(order)
    if not is_ordered:
        in_order = np.argsort(order[begin])
        begin, end = begin[in_order], end[in_order]
    return Runs(order, begin, end, len(begin) == trajectories)


def are_equal(goals: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return which goals are equal, ``bool [n]``, given their bytes, ``void [n]`` each.

    NumPy compares one element after the other, so all are compared at once first.
    """
    if goals.tobytes() == others.tobytes():
        return np.ones(len(goals), np.bool_)
    return goals == others


def hash_goals(goals: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
    """Return hashes ``int64 [n]`` of the bytes of goals, ``void [n]``, and of trajectory ids, ``int64 [n]``.

    Equal goals and ids have equal hashes. The reverse has to be checked.
    """
    words = _words(goals)
    # Small numbers in floating point differ in their high bits only, which a product would lose.
    return (words ^ (words >> 31)) @ np.resize(_FACTORS[1:], words.shape[1]) + trajectory * _FACTORS[0]


def rank_goals(goals: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
    """Return numbers ``int64 [n]`` that are equal exactly if goals and trajectory ids are; slower than a hash."""
    return np.unique(np.column_stack([trajectory, _words(goals)]), axis=0, return_inverse=True)[1].reshape(-1)


def _words(goals: np.ndarray) -> np.ndarray:
    """Return bytes, ``void [n]``, as integers, ``int64 [n, words]``."""
    data = np.ascontiguousarray(goals).view(np.uint8).reshape(len(goals), goals.itemsize)
    return np.pad(data, ((0, 0), (0, -goals.itemsize % 8))).view(np.int64)


def first_in_first_out(key: np.ndarray, is_put: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair events of queues: each event puts an item into the queue of its key or takes the oldest item.

    Args:
        key (np.ndarray): the queue of each event, ``int64 [n]``, in the order of time.
        is_put (np.ndarray): whether the event puts an item, ``bool [n]``.

    Returns:
        tuple[np.ndarray, np.ndarray]: for each event that takes an item, the event that put it, or -1 if the queue was
        empty, ``int64 [n]``; and the number of items in the queue before each event, ``int64 [n]``.
    """
    order = np.argsort(key, kind="stable")
    ordered, puts = key[order], is_put[order]
    begins = np.append(True, ordered[1:] != ordered[:-1])
    is_empty, size = queue_sizes(np.where(puts, 1, -1), begins)
    takes = ~puts & ~is_empty

    def number_in_queue(events: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of earlier events in the same queue and the number of events in earlier queues."""
        earlier = np.cumsum(events) - events
        return earlier, earlier[begins][np.cumsum(begins) - 1]

    taken, taken_before = number_in_queue(takes)
    _, put_before = number_in_queue(puts)
    item = np.full(len(key), -1)
    item[order[takes]] = order[puts][(put_before + taken - taken_before)[takes]]
    sizes = np.empty(len(key), np.int64)
    sizes[order] = size
    return item, sizes


def queue_sizes(change: np.ndarray, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Follow the sizes of queues, whose events are joined. A change that would make a queue negative does not happen.

    Args:
        change (np.ndarray): the number of items that each event adds, at least -1, ``int64 [n]``.
        begins (np.ndarray): whether an event is the first of its queue, ``bool [n]``.

    Returns:
        tuple[np.ndarray, np.ndarray]: whether the change did not happen, ``bool [n]``; and the size before each event,
        ``int64 [n]``.
    """
    queue = np.cumsum(begins) - 1
    total = np.cumsum(change)
    level = total - (total - change)[begins][queue]  # as if queues could be negative
    # The lowest level so far in the same queue: each queue is shifted below all earlier ones.
    shift = queue * (2 * np.abs(change).sum() + 1)
    lowest = np.minimum(np.minimum.accumulate(level - shift) + shift, 0)
    lowest_before = np.where(begins, 0, np.append(0, lowest[:-1]))
    return lowest < lowest_before, level - change - lowest_before


def chain_heads(previous: np.ndarray) -> np.ndarray:
    """Return the first run of the chain of each run, ``int64 [runs]``, given the run that it continues, or -1."""
    head = np.where(previous < 0, np.arange(len(previous)), previous)
    while (head[head] != head).any():  # the distance doubles
        head = head[head]
    return head


def is_in(values: np.ndarray, few: np.ndarray) -> np.ndarray:
    """Return which values occur among a few others, ``bool [n]``; faster than ``np.isin``, which sorts all of them."""
    few = np.sort(few)
    place = np.searchsorted(few, values).clip(max=len(few) - 1)
    return few[place] == values


def find_breaks(
    written: Write, runs: Runs, begins: np.ndarray, last: np.ndarray, running: np.ndarray, to_begin: int
) -> tuple[np.ndarray, int]:
    """Return the positions where an episode begins although none could, and the number of episodes expected to begin.

    An episode can begin with a new trajectory id, in a new row, or after the end of another one: each end allows one
    beginning.

    Args:
        written (Write): the transitions.
        runs (Runs): their runs.
        begins (np.ndarray): which runs begin an episode, ``bool [runs]``.
        last (np.ndarray): the positions of the last transitions of episodes, ``int64 [n]``.
        running (np.ndarray): the trajectory ids of running episodes before the write, ``int64 [lanes]``.
        to_begin (int): the number of episodes expected to begin before the write.
    """
    first = runs.first
    if written.trajectory is not None:
        return first[_begin_while_running(written, runs, begins, running)], to_begin + len(last)
    claims = begins & ~(written.begins[first] & (written.row_length > 1))
    count = int(np.count_nonzero(claims))
    if count <= to_begin:  # the usual case
        return first[:0], to_begin - count + len(last)
    ends = np.bincount(np.searchsorted(runs.end, last, side="right"), minlength=len(first))
    change = np.append(to_begin, np.column_stack([-claims.astype(np.int64), ends]))
    refused, size = queue_sizes(change, np.arange(len(change)) == 0)
    return first[refused[1::2]], int(size[-1] + change[-1])


def _begin_while_running(written: Write, runs: Runs, begins: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Return which of the runs in ``begins`` start while another episode with the same id is running, ``bool [runs]``.

    ``running`` are the trajectory ids of running episodes before the write, ``int64 [lanes]``.
    """
    assert written.trajectory is not None
    lanes = len(running)
    if not begins.any() or (runs.has_one_run_per_id and (~begins).sum() == lanes):  # all running episodes go on
        return np.zeros_like(begins)
    ids = np.concatenate([running, written.trajectory[runs.first]])
    change = np.concatenate([np.ones(lanes, np.int64), ~written.done[runs.last] - (~begins).astype(np.int64)])
    event = np.flatnonzero(np.isin(ids, ids[lanes:][begins]))
    event = event[np.argsort(ids[event], kind="stable")]
    before = np.zeros(len(ids), np.int64)
    before[event] = queue_sizes(change[event], np.append(True, ids[event[1:]] != ids[event[:-1]]))[1]
    return begins & (before[lanes:] > 0)
