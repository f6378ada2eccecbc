"""The goal table: achieved goals of episodes, indexed by episode and step."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data import Composite, TensorSpec

from torchrl_her.goals.goal_rows import GoalRows, zeros

# The entries of `GoalTable.counters`: the number of rows and of episode ids used so far, the id before the first one,
# the number of writes, and the version, which is odd while a writer changes the table.
ROWS, EPISODES, BEFORE_FIRST, WRITES, VERSION = range(5)


class RowsBefore(NamedTuple):
    """The additional rows of an episode, in front of its first step."""

    desired: bool = False  # its desired goal
    initial: bool = False  # the achieved goal of its first state

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.desired + self.initial


NO_ROWS_BEFORE = RowsBefore()


class GoalTable:
    """A ring buffer of achieved goals, in which the steps of an episode are contiguous.

    - ``goals[row]`` is a goal and ``owners[row]`` the id of the episode that achieved it, or 0 for an empty row.
    - ``starts[episode]`` is the row at which an episode starts and ``lengths[episode]`` the number of its steps in the
      table. Only the entries of stored episodes are used, so they stay in the processor's cache.

    Step j of an episode achieved ``goals[starts[episode] + j]``. Rows and episode ids are taken modulo the capacity. In
    front of its first step, an episode can have a row for its desired goal, whose owner is minus the id, and a row for
    the achieved goal of its first state, in this order.

    Readers take no lock. If the `version` is the same before and after a read, nothing was written in between.
    Otherwise, the owners show which goals are valid: a writer sets the owner of a row to 0, then overwrites the goal,
    then sets the owner to the new episode. A goal is complete and belongs to episode e if its owner is e before and
    after the goal is read. It is the goal of step j if the episode still starts j rows earlier: when a longer version
    of an episode is published, its start changes before its rows. Writers exclude each other with a `WriteLock`, which
    the caller acquires.
    """

    def __init__(
        self,
        capacity: int,
        goal_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        before: RowsBefore = NO_ROWS_BEFORE,
    ):
        self.capacity = capacity
        self.rows_before = before
        self.has_gaps = before.desired  # whether some of the first `size` rows can be empty or can hold desired goals
        self._rows = GoalRows.make(capacity, goal_shape, dtype, device)
        self.starts, self.lengths = (zeros((capacity,), device) for _ in range(2))
        # The number of rows written so far, from row 0 on.
        self.size = torch.zeros((), dtype=torch.int64, device=device)
        # Ids begin at a random number, so that transitions stamped by another table are recognized, and at a multiple
        # of the capacity, so that they fill the ring buffers from the front.
        before_first = secrets.randbelow(2**62 // capacity) * capacity
        self.counters = torch.zeros(5, dtype=torch.int64, device="cpu")
        self.counters[BEFORE_FIRST] = before_first
        self._counts = self.counters.numpy()  # shares memory with the counters; NumPy is faster

    @classmethod
    def of_spec(cls, capacity: int, spec: TensorSpec, before: RowsBefore = NO_ROWS_BEFORE) -> GoalTable:
        """Create a table for goals of a spec."""
        if not isinstance(spec, TensorSpec) or isinstance(spec, Composite):
            raise TypeError(
                f"goal_spec must be the spec of one goal, got a {type(spec).__name__}: pass "
                'env.observation_spec["achieved_goal"] of one environment.'
            )
        return cls(capacity, spec.shape, spec.dtype, spec.device or torch.device("cpu"), before)

    @classmethod
    def like(cls, goals: Tensor, capacity: int, before: RowsBefore = NO_ROWS_BEFORE) -> GoalTable:
        """Create a table for goals like ``[n, *goal]``."""
        return cls(capacity, goals.shape[1:], goals.dtype, goals.device, before)

    @property
    def goals(self) -> Tensor:
        """The goals ``[capacity, *goal]``."""
        return self._rows.goals

    @property
    def owners(self) -> Tensor:
        """The owners ``int64 [capacity]`` of the goals, not contiguous in memory."""
        return self._rows.owners

    # Writing

    @property
    def episode_ids(self) -> tuple[int, int]:
        """The first and the last episode id used so far. Ids are at least 1."""
        _, count, before_first, *_ = self._counts.tolist()
        return before_first + 1, before_first + count

    @property
    def next_episode(self) -> int:
        """The next unused episode id."""
        return self.episode_ids[1] + 1

    @property
    def writes(self) -> int:
        """The number of writes of all processes so far."""
        return int(self._counts[WRITES])

    @property
    def version(self) -> int | None:
        """A number that changes with every write of goals, or None if it is unavailable.

        It is unavailable while a writer changes the table, in compiled graphs, and on a GPU, where writes are
        asynchronous.
        """
        if torch.compiler.is_compiling() or not self.goals.is_cpu:
            return None
        version = int(self._counts[VERSION])
        return None if version % 2 else version

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep the version odd while the table changes, and increase it afterwards.

        If the process is killed in between, the version stays odd until the next write.
        """
        self._counts[VERSION] |= 1
        try:
            yield
        except BaseException:
            self.has_gaps = True  # of the rows that were not written
            raise
        finally:
            self._counts[VERSION] += 1

    @property
    def rows_used(self) -> int:
        """The number of rows written since the table was created or cleared, including overwritten ones."""
        return int(self._counts[ROWS])

    @property
    def has_wrapped(self) -> bool:
        """Whether the ring buffer was filled and older goals were overwritten."""
        return self.rows_used > self.capacity

    def open_episodes(self, count: int) -> int:
        """Begin a write with ``count`` new episodes; return the first of their consecutive ids."""
        first = self.next_episode
        self._counts[EPISODES] += count
        self._counts[WRITES] += 1
        if self._counts[EPISODES] > self.capacity:
            for ring, _ in _slices(self.capacity, first, count):
                self.lengths[ring] = 0  # until then, the length of an old episode
        return first

    def publish(self, publications: Sequence[tuple[int, Tensor, int]]) -> None:
        """Append the goals of episodes to the ring buffer.

        Args:
            publications (Sequence[tuple[int, Tensor, int]]): for each episode: its id; its rows ``[rows, *goal]``, at
                most ``capacity`` (the rows before its first step, then the goals of all steps); and the number of steps
                that were published earlier.
        """
        if not publications:
            return
        with self._changing():
            self._publish(publications)

    def _publish(self, publications: Sequence[tuple[int, Tensor, int]]) -> None:
        ids = [episode for episode, _, _ in publications]
        lengths = [len(goals) for _, goals, _ in publications]
        parts = [goals.to(self.goals.device) for _, goals, _ in publications]
        goals = torch.cat(parts) if len(parts) > 1 else parts[0]  # a single long episode is not copied twice
        for episode, _, already_published in publications:
            if already_published:  # empty the old rows, so that each step is in the table only once
                self.has_gaps = True
                start = self.starts[episode % self.capacity] - self.rows_before.rows
                count = already_published + self.rows_before.rows
                rows = (start + torch.arange(count, device=start.device)) % self.capacity
                owners = self.owners[rows]
                self.owners[rows] = torch.where(owners.abs() == episode, 0, owners)

        first = self.rows_used
        self._counts[ROWS] += len(goals)
        begins = [*accumulate(lengths, initial=first)][:-1]
        self._set(self.starts, ids, [begin + self.rows_before.rows for begin in begins])
        of_rows = np.repeat(ids, lengths)
        if self.rows_before.desired:
            of_rows[[begin - first for begin in begins]] *= -1
        owners = torch.from_numpy(of_rows).to(goals.device)
        for ring, part in _slices(self.capacity, first, len(goals)):
            self.owners[ring].fill_(0)
            self.goals[ring].copy_(goals[part])
            self.owners[ring].copy_(owners[part])
        if first < self.capacity:
            self.size.fill_(min(first + len(goals), self.capacity))

        self._set(self.lengths, ids, [length - self.rows_before.rows for length in lengths])

    def _set(self, column: Tensor, episodes: list[int], values: list[int]) -> None:
        """Set the start or the length of episodes. On the CPU, NumPy is faster for the few episodes of a write."""
        index = [episode % self.capacity for episode in episodes]
        if column.is_cpu:
            column.numpy()[index] = values
        else:
            column.index_copy_(0, torch.tensor(index).to(column.device), torch.tensor(values).to(column.device))

    # Reading

    def find(self, episodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the starts and lengths of episodes, ``int64 [batch]`` each; arbitrary values for evicted episodes."""
        index = episodes % self.capacity
        # Lengths are written after starts and read before them, so a length never exceeds the episode at its start.
        lengths = self.lengths.index_select(0, index)
        return self.starts.index_select(0, index), lengths

    def read(self, rows: Tensor, since: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the goals ``[batch, *goal]`` in rows and their owners ``[batch]``, 0 for rows changed by a writer.

        ``since`` is the version before the rows were looked up. If it is None or the version has changed, owners are
        read before and after the goals.
        """
        index = rows % self.capacity
        if since is not None:
            found = self._rows.read(index)
            if self.version == since:
                return found
        before = self.owners.index_select(0, index)
        goals = self.goals.index_select(0, index)
        after = self.owners.index_select(0, index)
        return goals, after.masked_fill_(before != after, 0)

    def start_at(self, episodes: Tensor, starts: Tensor, since: int | None = None) -> Tensor | bool:
        """Return whether episodes still start at the rows returned by `find`, ``bool [batch]``, or True for all."""
        if since is not None and self.version == since:
            return True
        return self.starts.index_select(0, episodes % self.capacity) == starts

    # Moving, saving

    def to(self, device: torch.device) -> None:
        """Move the table to another device. The rows move last, since readers, without a lock, look at their device."""
        if self.is_shared and self.goals.device != device:
            raise RuntimeError(
                f"The sampled transitions are on {device}, but the goal table is shared between processes on "
                f"{self.goals.device}. Pass HERTransform a goal_spec on the device of the storage."
            )
        rows = self._rows.to(device)
        for name in ("starts", "lengths", "size"):
            setattr(self, name, getattr(self, name).to(device))
        self._rows = rows

    def clear(self) -> None:
        """Remove all goals. Episode ids are not reused."""
        with self._changing():
            for tensor in (self.owners, self.lengths, self.size, self.counters[ROWS]):
                tensor.zero_()
        self.has_gaps = self.rows_before.desired or self.is_shared

    def share_memory_(self) -> None:
        """Move the table into shared memory, which allocates memory for all rows."""
        self.has_gaps = True  # writes of other processes can create gaps
        self._rows.share_memory_()
        for tensor in (self.starts, self.lengths, self.size, self.counters):
            tensor.share_memory_()
        self._counts = self.counters.numpy()

    @property
    def is_shared(self) -> bool:
        """Whether processes share the table."""
        return self.counters.is_shared()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._counts = self.counters.numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the filled part of the table."""
        rows, episodes, *_ = self.counters.tolist()
        filled = {"goals": rows, "owners": rows, "starts": episodes + 1, "lengths": episodes + 1}
        state: dict[str, Any] = {name: getattr(self, name)[:count].clone() for name, count in filled.items()}
        return state | {
            "capacity": self.capacity,
            "before": tuple(self.rows_before),
            "has_gaps": self.has_gaps,
            "size": self.size.clone(),
            "counters": self.counters[:VERSION].clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: if capacity, goals or additional rows of episodes differ. The table then stays unchanged.
        """
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"The saved goal table holds {state['capacity']} goals, but this one holds {self.capacity}. "
                f"Create the transform with capacity={state['capacity']}, then load."
            )
        if tuple(state["before"]) != self.rows_before:
            raise ValueError(
                f"The saved goal table keeps additional goals of episodes, {RowsBefore(*state['before'])}, and this "
                f"one {self.rows_before}. Create the transform with strategies that need the same additional goals "
                "(see GoalStrategy), then load."
            )
        saved, own = ((goals.dtype, tuple(goals.shape[1:])) for goals in (state["goals"], self.goals))
        if saved != own:
            raise ValueError(
                f"The saved goals are {saved[0]} {saved[1]}, but goals of this transform are {own[0]} {own[1]}. Load "
                "into a transform for the same goals."
            )
        self.has_gaps = state["has_gaps"] or self.is_shared
        with self._changing():
            self.owners.zero_()
            self.lengths.zero_()
            for name in ("goals", "owners", "starts", "lengths"):
                getattr(self, name)[: len(state[name])] = state[name]
            self.size.copy_(state["size"])
            self.counters[:VERSION] = state["counters"]


def _slices(size: int, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of a ring buffer of ``size`` entries, and of ``count`` new entries for positions from ``first`` on.

    If there are more new entries than the ring buffer holds, only the last ones are written.
    """
    begin = max(0, count - size)
    while begin < count:
        at = (first + begin) % size
        length = min(count - begin, size - at)
        yield slice(at, at + length), slice(begin, begin + length)
        begin += length
