"""The goal table: achieved goals, each named by its episode and step."""

from __future__ import annotations

import math
import pickle
import secrets
import shutil
from collections.abc import Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data import Composite, TensorSpec

from torchrl_her._private import pickled_for_process, warn_user
from torchrl_her.goals.names import STEP_BITS, name_of, split_name

WORD = torch.int64
PLACES_PER_GOAL = 4  # the size of the index
LARGEST_FIRST = 64  # places; the first window of an episode is not larger
# The entries of `GoalTable.counters`: the rows written and the episodes begun since the table was created or cleared,
# the places of the index taken so far, the last episode so far, the one before the first, and how often the table was
# cleared or loaded.
ROWS_WRITTEN, BEGUN, PLACES, LAST, BEFORE_FIRST, GENERATION = range(6)
SHARED_MEMORY = Path("/dev/shm")  # on Linux


class Steps(NamedTuple):
    """The steps of a write in the order of writing. The steps of one episode are a part."""

    name: np.ndarray  # int64 [n], the name of each step
    part: np.ndarray  # int64 [n], the number of its part
    episode: np.ndarray  # int64 [parts], the episode of each part
    begin: np.ndarray  # int64 [parts], its first step in this write
    length: np.ndarray  # int64 [parts], its number of steps after this write
    ended: np.ndarray  # bool [parts], whether the episode ends
    window: np.ndarray  # int64 [parts, 3], the window of the episode; zeros for a new episode


class Found(NamedTuple):
    """Episodes as the table knows them. The numbers are arbitrary if another episode took the place of an episode."""

    is_known: Tensor  # bool [n], whether the episode is in the table
    base: Tensor  # int64 [n], the place of step 0 in the index
    length: Tensor  # int64 [n], the number of steps so far
    oldest: Tensor  # int64 [n], the first step that can be in the table


class GoalTable:
    """Achieved goals in the order of writing, and an index that finds them.

    The goals are a ring: `names[row]` says which step achieved `goals[row]`. They leave it in the order in which their
    transitions leave a storage of the same size.

    The index says in which row a step is. The steps of an episode that are in the table have one contiguous range of
    places in the index, the *window* of the episode: step j is at place ``base + j``. The columns of a window are the
    place of step 0, the first step in the window, and the end of its places. A full window moves: it takes along the
    steps that are still in the table, and is twice as large as these. So each goal takes about two places. The index is
    a ring, too.

    A goal is right if its row has the name that was asked for, before and after the goal is read. A writer removes the
    name of a row, changes the goal, and sets the new name. So readers take no lock, and an overwritten window does no
    harm: the names differ. Writers exclude each other with a `WriteLock`, which the caller acquires.

    The desired goals of episodes and the goals of their first states have rows of their own, after the ring: one for
    each episode.

    Args:
        capacity (int): the number of goals in the ring.
        goal_shape (Sequence[int]): the shape of a goal.
        dtype (torch.dtype): the dtype of goals.
        device (torch.device): the device of the table.
        apart (Sequence[str]): the goals that are kept apart from the ring: ``"desired"``, the desired goals of
            episodes, then ``"initial"``, the goals of their first states.
    """

    def __init__(
        self,
        capacity: int,
        goal_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        apart: Sequence[str] = (),
    ):
        self.capacity, self.apart, self.places = capacity, tuple(apart), PLACES_PER_GOAL * capacity
        self.goal_shape, self.dtype = tuple(goal_shape), dtype
        name_bytes = max(WORD.itemsize, dtype.itemsize)  # the goal that follows must be aligned
        size = name_bytes + math.prod(goal_shape) * dtype.itemsize
        words = -(-size // name_bytes) * name_bytes // WORD.itemsize
        self._first = name_bytes // dtype.itemsize  # the offset of the goal in a row, in elements of its dtype
        self._strides = torch.empty(self.goal_shape, device="meta").stride()
        if device.type == "cuda":
            size = capacity * ((1 + len(apart)) * words * WORD.itemsize + 4 * PLACES_PER_GOAL + 4 * WORD.itemsize)
            self._check_room(size, torch.cuda.mem_get_info(device)[0], f"on {device}")
        # The names and goals of all rows, side by side, so that one gather reads both.
        self.matrix = _zeros((capacity * (1 + len(apart)), words), np.int64, device)
        self.index = _zeros((self.places,), np.int32 if capacity < 2**31 else np.int64, device)
        # The columns: the episode, the place of its step 0, its number of steps, and the first step of its window.
        self.episodes = _zeros((capacity, 4), np.int64, device)
        self.size = torch.zeros((), dtype=WORD, device=device)  # the number of rows that contain goals
        self.counters = torch.zeros(6, dtype=WORD, device="cpu")
        # Episodes begin at a random number, so that transitions stamped by another table are recognized, and at a
        # multiple of the capacity, so that they fill `episodes` from the front.
        before_first = secrets.randbelow(2 ** (62 - STEP_BITS) // capacity) * capacity
        self.counters[[LAST, BEFORE_FIRST]] = before_first
        self._make_views()

    @classmethod
    def of_spec(cls, capacity: int, spec: TensorSpec, apart: Sequence[str] = ()) -> GoalTable:
        """Create a table for goals of a spec."""
        if not isinstance(spec, TensorSpec) or isinstance(spec, Composite):
            raise TypeError(
                f"goal_spec must be the spec of one goal, got a {type(spec).__name__}: pass "
                'env.observation_spec["achieved_goal"] of one environment.'
            )
        return cls(capacity, spec.shape, spec.dtype, spec.device or torch.device("cpu"), apart)

    @classmethod
    def like(cls, goals: Tensor, capacity: int, apart: Sequence[str] = ()) -> GoalTable:
        """Create a table for goals like ``[n, *goal]``."""
        return cls(capacity, goals.shape[1:], goals.dtype, goals.device, apart)

    def _make_views(self) -> None:
        self.names, self.goals = self._split(self.matrix)
        self._counts = self.counters.numpy()  # shares memory with the counters; NumPy is faster
        # What a write reads: on a GPU, a copy on the host, so that a write reads nothing back from the device.
        self._host_names = self.names.cpu().numpy()
        self._host_index = self.index.cpu().numpy()
        self._host_episodes = self.episodes.cpu().numpy()

    def _split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the names ``int64 [rows]`` and the goals ``[rows, *goal]`` in a matrix ``[rows, words]``."""
        items = matrix.view(self.dtype)
        strides = items.stride(0), *self._strides
        return matrix[:, 0], items.as_strided((len(matrix), *self.goal_shape), strides, self._first)

    # Writing

    @property
    def episode_ids(self) -> tuple[int, int]:
        """The first and the last episode so far. Episodes are at least 1."""
        return int(self._counts[BEFORE_FIRST]) + 1, int(self._counts[LAST])

    @property
    def rows_used(self) -> int:
        """The number of goals written since the table was created or cleared, including overwritten ones."""
        return int(self._counts[ROWS_WRITTEN])

    @property
    def has_wrapped(self) -> bool:
        """Whether the ring was filled and older goals were overwritten."""
        return self.rows_used > self.capacity

    @property
    def generation(self) -> int:
        """How often the table was cleared or loaded."""
        return int(self._counts[GENERATION])

    def new_episodes(self, count: int) -> int:
        """Begin ``count`` episodes; return the first one. The others follow."""
        first = int(self._counts[LAST]) + 1
        self._counts[LAST] += count
        self._counts[BEGUN] += count
        return first

    def append(self, steps: Steps, goals: Tensor) -> np.ndarray:
        """Add the goals of steps, ``[n, *goal]``; return the parts whose ``window``, which is updated, has moved.

        Places are reserved first: after an interrupt, they stay unused.
        """
        used, total = self.rows_used, len(steps.name)
        if not total:
            return np.empty(0, np.int64)
        self._counts[ROWS_WRITTEN] += total
        if total > self.capacity:
            steps, goals = _last_steps(steps, self.capacity), goals[-self.capacity :]
        name = steps.name
        rings = [*_slices(self.capacity, used + total - len(name), len(name))]
        for ring, _ in rings:
            self._set_names(ring, np.zeros((), np.int64))
        moved = self._make_room(steps)
        for ring, new in rings:
            self.goals[ring] = goals[new]
            self._set_names(ring, name[new])
        base, oldest, _ = steps.window.T
        place = (base[steps.part] + split_name(name)[1]) % self.places
        row = np.concatenate([np.arange(ring.start, ring.stop, dtype=self._host_index.dtype) for ring, _ in rings])
        self._set_index(place, row)
        if used < self.capacity:
            self.size.fill_(min(used + total, self.capacity))
        self.set_episodes(steps.episode, base, steps.length, oldest)
        return moved

    def _make_room(self, steps: Steps) -> np.ndarray:
        """Move full windows, and very old ones, so that there is room for all steps; return their parts, ``int64``."""
        _, _, episode, begin, length, ended, window = steps
        base, oldest, end = window.T
        used = int(self._counts[PLACES])
        is_full = base + length > end
        is_old = end < used + 2 * self.capacity - self.places  # soon overwritten
        moves = (is_full | is_old).nonzero()[0]
        if not len(moves):
            return moves
        kept = self._count_kept(episode[moves], begin[moves], base[moves], oldest[moves])
        first = begin[moves] - kept
        total = length[moves] - first
        mean = self.rows_used // max(1, int(self._counts[BEGUN]))
        least = min(LARGEST_FIRST, 1 << mean.bit_length(), max(1, self.capacity // len(episode)))
        room = np.where(ended[moves], total, np.maximum(2 * total, least))
        ends = used + np.cumsum(room)
        self._counts[PLACES] = ends[-1]
        place = ends - room
        if kept.any():
            number, of_step = spread(np.zeros_like(kept), kept)
            old = (base[moves] + first)[number] + of_step
            rows = self._host_index[old % self.places]
            self._set_index((place[number] + of_step) % self.places, rows)
        window[moves, 0], window[moves, 1], window[moves, 2] = place - first, first, ends
        return moves

    def _count_kept(self, episode: np.ndarray, begin: np.ndarray, base: np.ndarray, oldest: np.ndarray) -> np.ndarray:
        """Return how many of the last steps before ``begin`` are in the table, for each window, ``int64 [n]``."""
        # Goals leave the table in the order of their steps, so a binary search finds the first step that is in it.
        low, high = oldest.copy(), begin.copy()
        for _ in range(int((high - low).max()).bit_length()):
            step = (low + high) // 2
            row = self._host_index[(base + step) % self.places]
            is_kept = (self._host_names[row] == name_of(episode, step)) & (step < begin)
            low, high = np.where(is_kept, low, np.minimum(step + 1, high)), np.where(is_kept, step, high)
        return begin - high

    def set_episodes(self, episode: np.ndarray, base: np.ndarray, length: np.ndarray, oldest: np.ndarray) -> None:
        """Set the base, the length and the oldest step of episodes, ``int64 [n]`` each."""
        host, slot = self._host_episodes, episode % self.capacity
        rows = np.empty((len(slot), 4), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = episode, base, length, oldest
        host.view("V32")[slot, 0] = rows.view("V32")[:, 0]  # faster than rows of four numbers
        if not self.episodes.is_cpu:  # if several episodes have one slot, the last one counts
            device = self.episodes.device
            self.episodes[to_device(slot, device)] = to_device(host[slot], device)

    def remove_since(self, used: int) -> None:
        """Remove the goals of an interrupted write, given `rows_used` before it. Their rows are used again."""
        for ring, _ in _slices(self.capacity, used, self.rows_used - used):
            self._set_names(ring, np.zeros((), np.int64))
        self._counts[ROWS_WRITTEN] = used
        self.size.fill_(min(used, self.capacity))

    def _set_names(self, ring: slice, names: np.ndarray) -> None:
        self._host_names[ring] = names
        if not self.names.is_cpu:
            self.names[ring] = to_device(names, self.names.device)

    def _set_index(self, places: np.ndarray, rows: np.ndarray) -> None:
        self._host_index[places] = rows
        if not self.index.is_cpu:
            device = self.index.device
            self.index[to_device(places, device)] = to_device(rows, device)

    def keep_apart(self, episode: np.ndarray, step: int, goals: Tensor) -> None:
        """Keep the desired goals (step -1) or the goals of first states (step -2) of episodes, ``[n, *goal]``."""
        last = slice(-self.capacity, None)  # if there are more episodes, their rows repeat
        device = self.matrix.device
        row = to_device(episode[last] % self.capacity - step * self.capacity, device)
        self.names[row] = 0
        self.goals[row] = goals[last].to(device)
        self.names[row] = to_device(name_of(episode[last], np.array(step)), device)

    # Reading

    def find(self, episode: Tensor) -> Found:
        """Find episodes ``int64 [n]``."""
        known, base, length, oldest = self.episodes.index_select(0, episode % self.capacity).unbind(1)
        return Found(known == episode, base, length, oldest)

    def read(self, found: Found, episode: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return goals ``[n, *goal]``, and whether each is in the table, ``bool [n]``. Others are arbitrary.

        Args:
            found (Found): the result of `find` for the episodes.
            episode (Tensor): the episodes, ``int64 [n]``.
            step (Tensor): the steps that achieved the goals, ``int64 [n]``.
        """
        row = self.index.index_select(0, (found.base + step) % self.places)
        name = (episode << STEP_BITS) + step
        if self.apart:
            apart = episode % self.capacity + (-step).clamp_max(len(self.apart)) * self.capacity
            row, name = torch.where(step < 0, apart, row), name_of(episode, step)
        matrix = self.matrix.index_select(0, row)
        later = self.names.index_select(0, row)
        # A goal is complete if its row has the same name before and after the goal is read.
        return self._split(matrix)[1], (matrix[:, 0] == name) & (later == name)

    def read_any(self, episode: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the goals of any episodes, such as the result of `any_goal`, as `read` does."""
        goals, is_in_table = self.read(self.find(episode), episode, step)
        return goals, is_in_table & (episode > 0)  # empty rows have the name 0, too

    def any_goal(self, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the episodes and steps of goals in random rows, ``int64 [*shape]`` each. Empty rows give episode 0."""
        share = torch.rand(shape, dtype=torch.float64, device=self.size.device)
        row = share.mul_(self.size).to(torch.int64)
        return split_name(self.names.index_select(0, row.reshape(-1)).view(*shape))

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
            size = self.matrix.nbytes + self.index.nbytes + self.episodes.nbytes
            self._check_room(size, torch.cuda.mem_get_info(device)[0], f"on {device}")
        for name in ("matrix", "index", "episodes", "size"):
            setattr(self, name, getattr(self, name).to(device))
        self._make_views()

    def clear(self) -> None:
        """Remove all goals. Episodes and places are not reused."""
        self._set_names(slice(None), np.zeros((), np.int64))
        self._host_episodes[:] = 0
        self.episodes.zero_()
        self.size.zero_()
        self._counts[[ROWS_WRITTEN, BEGUN]] = 0
        self._counts[GENERATION] += 1

    def share_memory_(self) -> None:
        """Move the table into shared memory, which allocates all of it."""
        tensors = self.matrix, self.index, self.episodes, self.size, self.counters
        if SHARED_MEMORY.exists() and self.matrix.is_cpu:
            size = sum(tensor.nbytes for tensor in tensors)
            self._check_room(size, shutil.disk_usage(SHARED_MEMORY).free, "in shared memory")
        for tensor in tensors:
            tensor.share_memory_()
        self._make_views()

    @property
    def is_shared(self) -> bool:
        """Whether processes share the table."""
        return self.counters.is_shared()

    def __getstate__(self) -> dict[str, Any] | bytes:
        # Pickled as views, names and goals would no longer share memory.
        views = ("names", "goals", "_counts", "_host_names", "_host_index", "_host_episodes")
        state = {name: value for name, value in vars(self).items() if name not in views}
        if self.is_shared and get_spawning_popen() is not None:
            return pickled_for_process(state)
        return state

    def __setstate__(self, state: dict[str, Any] | bytes) -> None:
        vars(self).update(pickle.loads(state) if isinstance(state, bytes) else state)
        self._make_views()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the filled part of the table."""
        rows, places = min(self.rows_used, self.capacity), min(int(self._counts[PLACES]), self.places)
        first, last = self.episode_ids
        episodes = min(last - first + 2, self.capacity)
        state: dict[str, Any] = {"rows0": self._part(0)[:rows].clone()}
        state |= {f"rows{number}": self._part(number)[:episodes].clone() for number in range(1, 1 + len(self.apart))}
        state |= {"index": self.index[:places].clone(), "episodes": self.episodes[:episodes].clone()}
        state |= {"size": self.size.clone(), "counters": self.counters.clone()}
        state["counters"][GENERATION] = 0
        form = {"dtype": str(self.dtype), "goal_shape": list(self.goal_shape)}
        return state | form | {"capacity": self.capacity, "apart": list(self.apart)}

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
        if tuple(state["apart"]) != self.apart:
            kinds = {"desired": "desired goals", "initial": "goals of first states"}
            theirs, ours = (
                " and ".join(kinds[each] for each in apart) or "no further goals"
                for apart in (state["apart"], self.apart)
            )
            raise ValueError(
                f"The saved goal table keeps {theirs}, and this one {ours}. Create the transform "
                "with strategies that need the same goals (see GoalStrategy.needs), then load."
            )
        saved, own = (state["dtype"], tuple(state["goal_shape"])), (str(self.dtype), self.goal_shape)
        if saved != own:
            raise ValueError(
                f"The saved goals are {saved[0]} {saved[1]}, but goals of this transform are {own[0]} {own[1]}. Load "
                "into a transform for the same goals."
            )
        before_first, last = self._counts[[BEFORE_FIRST, LAST]]
        generation = self.generation
        self.matrix.zero_()
        self.episodes.zero_()
        for number in range(1 + len(self.apart)):
            rows = state[f"rows{number}"]
            self._part(number)[: len(rows)] = rows
        for tensor, name in ((self.index, "index"), (self.episodes, "episodes")):
            tensor[: len(state[name])] = state[name]
        self.size.copy_(state["size"])
        self.counters.copy_(state["counters"])
        self._counts[GENERATION] = generation + 1
        if self._counts[BEFORE_FIRST] == before_first:  # no episode is used twice, although the state is older
            self._counts[LAST] = max(last, self._counts[LAST])
        self._make_views()

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


def load_table(
    table: GoalTable | None, state: dict[str, Any] | None, capacity: int, apart: Sequence[str]
) -> GoalTable | None:
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


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device. The host does not wait for the copy."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _zeros(shape: tuple[int, ...], dtype: Any, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On the CPU, it takes memory only as it is written."""
    zeros = torch.from_numpy(np.zeros(shape, dtype))
    return zeros if device.type == "cpu" else zeros.to(device)


def _last_steps(steps: Steps, count: int) -> Steps:
    """Return the last steps of a write."""
    part = steps.part[-count:]
    begin = steps.length - np.bincount(part, minlength=len(steps.length))
    return steps._replace(name=steps.name[-count:], part=part, begin=begin)


def _slices(size: int, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of a ring of ``size`` entries, and of ``count`` new entries, from position ``first`` on."""
    begin = 0
    while begin < count:
        at = (first + begin) % size
        length = min(count - begin, size - at)
        yield slice(at, at + length), slice(begin, begin + length)
        begin += length


def spread(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for the ranges from ``begin`` to ``end``, the number of the range and the value, all joined."""
    count = end - begin
    if (count == 1).all():
        return np.arange(len(count)), begin
    number = np.repeat(np.arange(len(count)), count)
    return number, np.arange(len(number)) + (begin - np.cumsum(count) + count)[number]
