"""The goal table: achieved goals, each named by its episode and step."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data import Composite, TensorSpec

from torchrl_her._private import warn_user

PIECE = 64  # steps; the pieces of an episode are contiguous in the table and never move
# The steps that name the desired goal of an episode, and the goal achieved in its first state.
DESIRED_STEP, INITIAL_STEP = -1, -2
SHARED_PIECES = 128  # of an episode in shared memory, where the memory for pieces cannot grow
# The columns of `GoalTable.episodes`: the first row, the number of steps in the table, and the row of `pieces` plus 1.
START, LENGTH, LONG = range(3)
# The entries of `GoalTable.counters`: the numbers of rows, episode ids and episodes of several pieces so far, the id
# before the first one, and the number of writes.
ROWS, EPISODES, LONG_EPISODES, BEFORE_FIRST, WRITES = range(5)
SHARED_MEMORY = Path("/dev/shm")  # on Linux
WORD = torch.int64


class GoalTable:
    """A ring buffer of goals. Each row says which goal it holds: ``names[row] = (episode, step)``.

    A goal is right if its row has the name that was asked for, before and after the goal is read. A writer removes the
    name of a row, changes the goal, and sets the new name. So readers take no lock. If two rows have the same name,
    both are right, but `any_goal` draws this goal twice as often. Writers exclude each other with a `WriteLock`, which
    the caller acquires.

    An episode that was written at once is contiguous: step j is in row ``start + j``, where ``start, length, long`` are
    ``episodes[e % capacity]``. Otherwise, ``long`` is not 0, and the steps are in pieces of 64, each contiguous: step
    j < 64 is in row ``start + j``, and a later one in row ``pieces[long - 1, j // 64 - 1] + j % 64``. All rows are
    taken modulo the capacity. The desired goals of episodes and the goals of their first states have rows of their own,
    one for each episode, after the ring.

    Args:
        capacity (int): the number of rows of the ring.
        goal_shape (Sequence[int]): the shape of a goal.
        dtype (torch.dtype): the dtype of goals.
        device (torch.device): the device of the table.
        apart (int): the goals that are kept apart from the ring: 0 for none, 1 for desired goals, 2 for these and the
            goals of first states.
    """

    def __init__(
        self, capacity: int, goal_shape: Sequence[int], dtype: torch.dtype, device: torch.device, apart: int = 0
    ):
        self.capacity, self.apart = capacity, apart
        self.goal_shape, self.dtype = tuple(goal_shape), dtype
        self._strides = torch.empty(self.goal_shape, device="meta").stride()
        self._first = 2 * WORD.itemsize // dtype.itemsize  # offset of the goal in a row, in elements of its dtype
        size = 2 * WORD.itemsize + math.prod(goal_shape) * dtype.itemsize
        words = -(-size // 16) * 2 if dtype.itemsize > 8 else -(-size // 8)
        if device.type == "cuda":
            self._check_room(capacity * (1 + apart) * words * 8, torch.cuda.mem_get_info(device)[0], f"on {device}")
        # The names and goals of all rows, side by side, so that one gather reads both.
        self.matrix = _zeros((capacity * (1 + apart), words), device)
        self.episodes = _zeros((capacity, 3), device)
        # The first row of each piece but the first, of episodes that are not contiguous. It grows in both dimensions.
        self.pieces = torch.zeros(0, 0, dtype=torch.int32 if capacity < 2**31 else torch.int64, device=device)
        self._most_long = capacity // (PIECE // 2) + 1  # rows of pieces; older ones are then overwritten
        self.size = torch.zeros((), dtype=WORD, device=device)  # the number of rows that contain goals
        self.counters = torch.zeros(5, dtype=WORD, device="cpu")
        # Ids begin at a random number, so that transitions stamped by another table are recognized, and at a multiple
        # of the capacity, so that they fill `episodes` from the front.
        self.counters[BEFORE_FIRST] = secrets.randbelow(2**62 // capacity) * capacity
        self._make_views()

    @classmethod
    def of_spec(cls, capacity: int, spec: TensorSpec, apart: int = 0) -> GoalTable:
        """Create a table for goals of a spec."""
        if not isinstance(spec, TensorSpec) or isinstance(spec, Composite):
            raise TypeError(
                f"goal_spec must be the spec of one goal, got a {type(spec).__name__}: pass "
                'env.observation_spec["achieved_goal"] of one environment.'
            )
        return cls(capacity, spec.shape, spec.dtype, spec.device or torch.device("cpu"), apart)

    @classmethod
    def like(cls, goals: Tensor, capacity: int, apart: int = 0) -> GoalTable:
        """Create a table for goals like ``[n, *goal]``."""
        return cls(capacity, goals.shape[1:], goals.dtype, goals.device, apart)

    def _make_views(self) -> None:
        self.names, self.goals = self._split(self.matrix)
        self._counts = self.counters.numpy()  # shares memory with the counters; NumPy is faster

    def _split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the names ``int64 [rows, 2]`` and the goals ``[rows, *goal]`` in a matrix ``[rows, words]``."""
        items = matrix.view(self.dtype)
        strides = items.stride(0), *self._strides
        return matrix[:, :2], items.as_strided((len(matrix), *self.goal_shape), strides, self._first)

    # Writing

    @property
    def episode_ids(self) -> tuple[int, int]:
        """The first and the last episode id used so far. Ids are at least 1."""
        before_first, count = int(self._counts[BEFORE_FIRST]), int(self._counts[EPISODES])
        return before_first + 1, before_first + count

    @property
    def rows_used(self) -> int:
        """The number of rows written since the table was created or cleared, including overwritten ones."""
        return int(self._counts[ROWS])

    @property
    def has_wrapped(self) -> bool:
        """Whether the ring buffer was filled and older goals were overwritten."""
        return self.rows_used > self.capacity

    @property
    def writes(self) -> int:
        """The number of writes of all processes so far."""
        return int(self._counts[WRITES])

    def new_episodes(self, count: int) -> int:
        """Begin a write with ``count`` new episodes; return the first of their consecutive ids."""
        first = self.episode_ids[1] + 1
        self._counts[EPISODES] += count
        self._counts[WRITES] += 1
        if self._counts[EPISODES] > self.capacity:
            for ring, _ in _slices(self.capacity, first, count):
                self.episodes[ring, LENGTH] = 0  # until then, the length of an older episode
        return first

    def append(self, episode: np.ndarray, begin: np.ndarray, count: np.ndarray, goals: Tensor) -> None:
        """Add the goals of steps ``begin, ..., begin + count - 1`` of some episodes.

        Args:
            episode (np.ndarray): episode ids, ``int64 [n]``.
            begin (np.ndarray): the first step of each, a multiple of 64, ``int64 [n]``.
            count (np.ndarray): the number of steps of each, at least 1, ``int64 [n]``.
            goals (Tensor): the goals of all steps, episode after episode, ``[sum(count), *goal]``.
        """
        used, ends, steps = self.rows_used, np.cumsum(count), begin + count
        number = np.arange(len(goals))
        step = number + np.repeat(begin - ends + count, count)
        names = torch.from_numpy(np.stack([np.repeat(episode, count), step], axis=1)).to(self.matrix.device)
        for ring, part in _slices(self.capacity, used, len(goals)):
            self.names[ring] = 0
            self.goals[ring] = goals[part]
            self.names[ring] = names[part]
        slot, first = episode % self.capacity, (used + ends - count) % self.capacity
        begins = begin == 0
        self._set(self.episodes, slot[begins], START, first[begins])
        self._set(self.episodes, slot[begins], LONG, np.zeros_like(slot[begins]))
        if not begins.all():
            self._add_pieces(*(column[~begins] for column in (slot, begin, count, first)))
        self._set(self.episodes, slot, LENGTH, steps)
        self._counts[ROWS] = used + len(goals)
        if used < self.capacity:
            self.size.fill_(min(used + len(goals), self.capacity))

    def _add_pieces(self, slot: np.ndarray, begin: np.ndarray, count: np.ndarray, first: np.ndarray) -> None:
        """Record the rows of steps ``begin, ..., begin + count - 1``, which follow earlier steps, from ``first`` on."""
        index = self.episodes[torch.from_numpy(slot).to(self.episodes.device)].numpy(force=True)
        start, _, long = index.T
        _, once = np.unique(slot, return_index=True)
        becomes_long = once[long[once] == 0]  # so far, these episodes are contiguous
        numbers = (int(self._counts[LONG_EPISODES]) + np.arange(len(becomes_long))) % self._most_long + 1
        self._counts[LONG_EPISODES] += len(becomes_long)
        is_new = long == 0
        long = long.copy()
        long[is_new] = numbers[np.searchsorted(slot[becomes_long], slot[is_new])]
        run, piece = spread(np.ones_like(becomes_long), begin[becomes_long] // PIECE)
        earlier = becomes_long[run]
        rows = (start[earlier] + piece * PIECE) % self.capacity
        of, number = spread(np.zeros_like(begin), -(-count // PIECE))
        self._grow(int(long.max()), int((begin + count - 1).max()) // PIECE)
        self._set(self.pieces, long[earlier] - 1, piece - 1, rows)
        new = begin[of] // PIECE + number - 1
        self._set(self.pieces, long[of] - 1, new, (first[of] + number * PIECE) % self.capacity)
        self._set(self.episodes, slot, LONG, long)

    def _grow(self, rows: int, width: int) -> None:
        """Make `pieces` large enough, so that its size grows geometrically."""
        have_rows, have_width = self.pieces.shape
        if rows > have_rows or width > have_width:
            rows = have_rows if rows <= have_rows else min(max(rows, 2 * have_rows), self._most_long)
            width = have_width if width <= have_width else max(width, 2 * have_width)
            self.pieces = torch.nn.functional.pad(self.pieces, (0, width - have_width, 0, rows - have_rows))

    def keep_apart(self, episode: np.ndarray, step: int, goals: Tensor) -> None:
        """Keep the desired goals (step -1) or the goals of first states (step -2) of episodes, ``[n, *goal]``."""
        last = slice(-self.capacity, None)  # if there are more episodes, their rows repeat
        row = torch.from_numpy(episode[last] % self.capacity - step * self.capacity).to(self.matrix.device)
        names = torch.from_numpy(np.stack([episode[last], np.full_like(episode[last], step)], axis=1))
        self.names[row] = 0
        self.goals[row] = goals[last].to(self.matrix.device)
        self.names[row] = names.to(self.matrix.device)

    @staticmethod
    def _set(matrix: Tensor, row: np.ndarray, column: Any, values: np.ndarray) -> None:
        """Set elements of a matrix. On the CPU, NumPy is faster for the few episodes of a write."""
        if matrix.is_cpu:
            matrix.numpy()[row, column] = values
            return
        if np.isscalar(column):  # of several values for a row, the last one counts
            last = len(row) - 1 - np.unique(row[::-1], return_index=True)[1]
            row, values = row[last], values[last]
        index = [torch.from_numpy(np.broadcast_to(each, len(row)).copy()).to(matrix.device) for each in (row, column)]
        matrix[tuple(index)] = torch.from_numpy(values).to(matrix.device, matrix.dtype)

    # Reading

    def lengths(self, episode: Tensor) -> Tensor:
        """Return the number of steps in the table of each episode, ``int64 [n]``; arbitrary for old episodes."""
        return self.episodes.index_select(0, episode % self.capacity)[:, LENGTH]

    def rows(self, episode: Tensor, step: Tensor) -> Tensor:
        """Return the row in which each goal is, if it is in the table, ``int64 [n]``."""
        slot = episode % self.capacity
        start, _, long = self.episodes.index_select(0, slot).unbind(1)
        row = start + step
        pieces = self.pieces  # read once, because a writer can replace it
        if pieces.numel():
            width = pieces.shape[1]
            piece = (step // PIECE).clamp(0, width)
            place = ((long - 1) * width + piece - 1).clamp(0, pieces.numel() - 1)
            later = pieces.view(-1).index_select(0, place) + step % PIECE
            row = torch.where((piece > 0) & (long > 0), later, row)
        row = row % self.capacity
        if self.apart:
            row = torch.where(step < 0, slot + (-step).clamp_max(self.apart) * self.capacity, row)
        return row

    def read(self, episode: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return goals ``[n, *goal]``, and whether each is in the table, ``bool [n]``. Others are arbitrary."""
        row = self.rows(episode, step)
        matrix = self.matrix.index_select(0, row)
        later = self.names.index_select(0, row)
        # A goal is complete if its row has the same name before and after the goal is read.
        asked = torch.stack([episode, step], dim=1)
        found = ((matrix[:, :2] == asked) & (later == asked)).all(1)
        return self._split(matrix)[1], found & (episode > 0)  # empty rows have the episode 0

    def any_goal(self, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the episodes and steps of goals in random rows, ``int64 [*shape]`` each."""
        share = torch.rand(shape, dtype=torch.float64, device=self.size.device)
        row = share.mul_(self.size).to(torch.int64)
        episode, step = self.names.index_select(0, row.reshape(-1)).view(*shape, 2).unbind(-1)
        return episode, step

    # Moving, saving

    def to(self, device: torch.device) -> None:
        """Move the table to another device."""
        if self.matrix.device == device:
            return
        if self.is_shared:
            raise RuntimeError(
                f"The sampled transitions are on {device}, but the goal table is shared between processes on "
                f"{self.matrix.device}. Pass HERTransform a goal_spec on the device of the storage."
            )
        if device.type == "cuda":
            self._check_room(self.matrix.nbytes, torch.cuda.mem_get_info(device)[0], f"on {device}")
        for name in ("matrix", "episodes", "pieces", "size"):
            setattr(self, name, getattr(self, name).to(device))
        self._make_views()

    def clear(self) -> None:
        """Remove all goals. Episode ids are not reused."""
        self.names.zero_()
        self.episodes.zero_()
        self.size.zero_()
        self._counts[[ROWS, LONG_EPISODES]] = 0

    def share_memory_(self, max_steps: int | None = None) -> None:
        """Move the table into shared memory, which allocates all of it. ``max_steps`` are those of an episode."""
        if SHARED_MEMORY.exists() and self.matrix.is_cpu:
            self._check_room(self.matrix.nbytes, shutil.disk_usage(SHARED_MEMORY).free, "in shared memory")
        width = SHARED_PIECES - 1 if max_steps is None else -(-max_steps // PIECE) - 1
        self._grow(self._most_long, width)
        for tensor in (self.matrix, self.episodes, self.pieces, self.size, self.counters):
            tensor.share_memory_()
        self._make_views()

    @property
    def is_shared(self) -> bool:
        """Whether processes share the table."""
        return self.counters.is_shared()

    def __getstate__(self) -> dict[str, Any] | bytes:
        # Pickled as views, names and goals would no longer share memory.
        state = {name: value for name, value in vars(self).items() if name not in ("names", "goals", "_counts")}
        if self.is_shared and get_spawning_popen() is not None:
            # Collectors pickle environments with cloudpickle, which would copy shared tensors.
            return bytes(ForkingPickler.dumps(state))
        return state

    def __setstate__(self, state: dict[str, Any] | bytes) -> None:
        vars(self).update(ForkingPickler.loads(state) if isinstance(state, bytes) else state)
        self._make_views()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the filled part of the table."""
        rows, episodes = min(self.rows_used, self.capacity), min(int(self._counts[EPISODES]) + 1, self.capacity)
        state: dict[str, Any] = {"rows0": self._part(0)[:rows].clone()}
        state |= {f"rows{number}": self._part(number)[:episodes].clone() for number in range(1, 1 + self.apart)}
        longs = min(int(self._counts[LONG_EPISODES]), len(self.pieces))
        longest = self.episodes[:, LENGTH] * (self.episodes[:, LONG] > 0)
        width = max(0, -(-int(longest.max()) // PIECE) - 1)  # `pieces` can be wider
        state |= {"episodes": self.episodes[:episodes].clone(), "pieces": self.pieces[:longs, :width].clone()}
        state |= {"size": self.size.clone(), "counters": self.counters.clone()}
        return state | {"capacity": self.capacity, "dtype": str(self.dtype), "goal_shape": list(self.goal_shape)}

    def _part(self, number: int) -> Tensor:
        """Return the ring (0), or the rows of desired goals (1) or of first states (2), ``int64 [capacity, words]``."""
        return self.matrix.narrow(0, number * self.capacity, self.capacity)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: if the capacity, the goals, or those kept apart differ. The table then stays unchanged.
        """
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"The saved goal table holds {state['capacity']} goals, but this one holds {self.capacity}. "
                f"Create the transform with capacity={state['capacity']}, then load."
            )
        if (apart := sum(name.startswith("rows") for name in state) - 1) != self.apart:
            kinds = "no further goals", "desired goals", "desired goals and goals of first states"
            raise ValueError(
                f"The saved goal table keeps {kinds[apart]}, and this one {kinds[self.apart]}. Create the transform "
                "with strategies that need the same goals (see GoalStrategy.needs), then load."
            )
        saved, own = (state["dtype"], tuple(state["goal_shape"])), (str(self.dtype), self.goal_shape)
        if saved != own:
            raise ValueError(
                f"The saved goals are {saved[0]} {saved[1]}, but goals of this transform are {own[0]} {own[1]}. Load "
                "into a transform for the same goals."
            )
        width = state["pieces"].shape[1]
        if self.is_shared and width > self.pieces.shape[1]:
            raise ValueError(
                f"The saved goal table has episodes of up to {(width + 1) * PIECE} steps, but this one, in shared "
                f"memory, of {(self.pieces.shape[1] + 1) * PIECE}. Create the transform with a larger "
                "max_episode_steps, then load."
            )
        if not self.is_shared:
            self.pieces = self.pieces.new_zeros(state["pieces"].shape)
        self.names.zero_()
        self.episodes.zero_()
        for number in range(1 + self.apart):
            rows = state[f"rows{number}"]
            self._part(number)[: len(rows)] = rows
        self.episodes[: len(state["episodes"])] = state["episodes"]
        self.pieces[: len(state["pieces"]), :width] = state["pieces"]
        self.size.copy_(state["size"])
        self.counters.copy_(state["counters"])

    def _check_room(self, size: int, free: int, place: str) -> None:
        """Check that ``size`` bytes fit into ``free`` bytes, and warn if they take more than a quarter."""
        message = (
            f"The goal table for capacity={self.capacity:,} goals, {self.dtype} {list(self.goal_shape)}, takes "
            f"{size / 2**30:.2f} GiB {place}, where {free / 2**30:.2f} GiB are free. Pass a smaller capacity (the "
            "max_size of the storage is enough), or map goals to smaller goals with goal_fn."
        )
        if size > free:
            raise RuntimeError(message)
        if size > free // 4:
            warn_user(message)


def load_table(table: GoalTable | None, state: dict[str, Any] | None, capacity: int, apart: int) -> GoalTable | None:
    """Return a table with a saved state, the result of `GoalTable.state_dict`, or an empty one for None.

    ``table`` is the present one, if any; a new one has ``capacity`` rows and keeps the goals ``apart``.
    """
    if state is None:
        if table is not None:
            table.clear()
        return table
    if table is None:
        dtype = getattr(torch, state["dtype"].removeprefix("torch."))
        table = GoalTable(capacity, state["goal_shape"], dtype, state["size"].device, apart)
    table.load_state_dict(state)
    return table


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a tensor of zeros, ``int64``. On the CPU, it takes memory only as it is written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.int64))
    return torch.zeros(shape, dtype=WORD, device=device)


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


def spread(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for the ranges from ``begin`` to ``end``, the number of the range and the value, all joined."""
    count = end - begin
    number = np.repeat(np.arange(len(count)), count)
    return number, np.arange(len(number)) + (begin - np.cumsum(count) + count)[number]
