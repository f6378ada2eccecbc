"""The achieved goals of episodes, found by episode and step."""

from __future__ import annotations

import math
import secrets
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import multiprocessing as mp


class GoalTable:
    """A ring of achieved goals, the steps of an episode next to each other.

    - ``goals[row]`` and ``owners[row]``: a goal, and the episode that it was achieved in (-1: none);
    - ``starts[episode]`` and ``lengths[episode]``: where an episode starts, and how many steps it has here.

    So the outcome of step j is ``goals[starts[episode] + j]``; rows and episode ids are taken modulo the
    capacity.

    Readers take no lock. Before a row is overwritten its owner becomes -1, and after that its new episode. So a
    goal is whole, and of episode e, if its owner was e before the goal was read and is e after; whatever a reader
    met on the way there, in a record that was just being replaced, cannot lead it to another episode's goal. And it
    is that of step j if the episode still starts j rows before: an episode that is published anew, longer, gets its
    new start before its rows. Writers exclude each other (the caller holds a lock).

    Args:
        capacity (int): how many goals are kept.
        goal_shape (sequence of int): the shape of one goal.
        dtype (torch.dtype): the dtype of the goals.
        device (torch.device): where the table lives.

    Examples:
        >>> import torch
        >>> from torchrl_her.goals.table import GoalTable
        >>> table = GoalTable(10, (1,), torch.float32, torch.device("cpu"))
        >>> episode = table.open_episodes(1)
        >>> table.publish([(episode, torch.tensor([[0.0], [0.1], [0.2]]), 0)])
        >>> start, length = table.find(torch.tensor([episode]))
        >>> goal, owner = table.read(start + length - 1)
        >>> goal, owner == episode
        (tensor([[0.2000]]), tensor([True]))
    """

    def __init__(self, capacity: int, goal_shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        self.goals = torch.zeros(capacity, *goal_shape, dtype=dtype, device=device)
        self.owners = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.starts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.size = torch.zeros((), dtype=torch.int64, device=device)  # how many rows are filled, from row 0 on
        # Ids begin anywhere, so that transitions of another table, loaded without it, are not taken for own ones; at a
        # multiple of the capacity, so that they fill the rings from the front.
        before_first = secrets.randbelow(2**62 // capacity) * capacity
        # How many rows and how many episode ids were ever given away, and the id before the first.
        self.counters = torch.tensor([0, 0, before_first], device="cpu")
        # Which transitions of the last sample were to be relabelled, and which of them were.
        self.last_draw = (torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool))

    @property
    def goal_shape(self) -> torch.Size:
        """The shape of one goal."""
        return self.goals.shape[1:]

    @property
    def device(self) -> torch.device:
        """Where the table lives."""
        return self.goals.device

    # Writing

    @property
    def next_episode(self) -> int:
        """The first episode id that was not given away."""
        _, given_away, before_first = self.counters.tolist()
        return before_first + given_away + 1

    def open_episodes(self, count: int) -> int:
        """Give away episode ids, of which no two are the same, and return the first; 0 is none."""
        first = self.next_episode
        self._reserve(1, count)
        for ring, _ in _slices(self.capacity, first, count):
            self.lengths[ring] = 0  # in the place of an episode that is long over
        return first

    def publish(self, publications: Sequence[tuple[int, Tensor, int]]) -> None:
        """Write the goals of episodes behind the newest ones, and make the episodes known.

        Args:
            publications (sequence): triples of an episode id, the goals ``[steps, *goal]`` of its steps from
                the first on (at most ``capacity``), and how many of these steps the table has from when it was
                shorter.
        """
        if not publications:
            return
        ids = np.array([episode for episode, _, _ in publications])
        lengths = np.array([len(goals) for _, goals, _ in publications])
        goals = torch.cat([goals.to(self.device) for _, goals, _ in publications])
        for episode, _, before in publications:
            if before:  # each step of an episode stands in the table once
                start = self.starts[episode % self.capacity]
                rows = (start + torch.arange(before, device=self.device)) % self.capacity
                self.owners[rows] = torch.where(self.owners[rows] == episode, -1, self.owners[rows])

        first = self._reserve(0, len(goals))
        index = self._tensor(ids % self.capacity)
        self.starts.index_copy_(0, index, self._tensor(first + np.cumsum(lengths) - lengths))
        owners = self._tensor(np.repeat(ids, lengths))
        for ring, part in _slices(self.capacity, first, len(goals)):
            self.owners[ring].fill_(-1)
            self.goals[ring].copy_(goals[part])
            self.owners[ring].copy_(owners[part])
        if first < self.capacity:
            self.size.fill_(min(first + len(goals), self.capacity))

        self.lengths.index_copy_(0, index, self._tensor(lengths))

    def _reserve(self, counter: int, count: int) -> int:
        counters = self.counters.numpy()
        first = int(counters[counter])
        counters[counter] += count
        return first

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    # Reading

    def find(self, episodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return where episodes ``int64 [batch]`` start and how long they are, or what is there in their place."""
        index = episodes % self.capacity
        # The length first, which is written last: with the start of a longer version a shorter length is right.
        lengths = self.lengths.index_select(0, index)
        return self.starts.index_select(0, index), lengths

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the goals ``[batch, *goal]`` of rows and their owners ``[batch]``, -1 where that just changed."""
        index = rows % self.capacity
        before = self.owners.index_select(0, index)
        goals = self.goals.index_select(0, index)
        after = self.owners.index_select(0, index)
        return goals, after.masked_fill_(before != after, -1)

    def start_at(self, episodes: Tensor, starts: Tensor) -> Tensor:
        """Say which episodes start where they did when `find` was asked: ``bool [batch]``."""
        return self.starts.index_select(0, episodes % self.capacity) == starts

    def owners_of(self, rows: Tensor) -> Tensor:
        """Return the episodes ``[batch]`` that the goals in rows were achieved in, -1 where there are none."""
        return self.owners.index_select(0, rows % self.capacity)

    # Keeping

    _rings = ("goals", "owners", "starts", "lengths")
    _tensors = (*_rings, "size")

    def to(self, device: torch.device) -> None:
        """Move the table, the goals last: where they are, `device` says, the others are, too."""
        for name in reversed(self._tensors):
            setattr(self, name, getattr(self, name).to(device))

    def clear(self) -> None:
        """Forget the goals; ids and rows that were given away stay given away."""
        self.owners.fill_(-1)
        self.lengths.fill_(0)

    def share_memory_(self) -> None:
        """Move the table into memory that processes share."""
        for name in (*self._tensors, "counters"):
            getattr(self, name).share_memory_()

    @property
    def is_shared(self) -> bool:
        """Whether processes share the table."""
        return self.counters.is_shared()

    def state_dict(self) -> dict[str, Any]:
        """Return what is filled of the table, in tensors that later writes do not change."""
        rows, episodes, _ = self.counters.tolist()
        filled = {"goals": rows, "owners": rows, "starts": episodes + 1, "lengths": episodes + 1}
        state: dict[str, Any] = {name: getattr(self, name)[:count].clone() for name, count in filled.items()}
        return state | {
            "capacity": self.capacity,
            "size": self.size.clone(),
            "counters": self.counters.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: if the state is that of another capacity or of another kind of goals.
        """
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"The saved goal table holds {state['capacity']} goals and this one {self.capacity}: "
                f"make the transform with capacity={state['capacity']}, then load."
            )
        saved = state["goals"]
        if saved.shape[1:] != self.goal_shape or saved.dtype != self.goals.dtype:
            raise ValueError(
                f"The saved goals are {saved.dtype} {tuple(saved.shape[1:])}, those of this transform "
                f"{self.goals.dtype} {tuple(self.goal_shape)}: load into a transform for the same goals."
            )
        self.owners.fill_(-1)
        for name in self._rings:
            getattr(self, name)[: len(state[name])] = state[name]
        self.size.copy_(state["size"])
        self.counters.copy_(state["counters"])


def _slices(size: int, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Lay ``count`` entries from position ``first`` on into a ring: where they go, and which they are.

    Of more entries than the ring holds, the last ones are laid.
    """
    begin = max(0, count - size)
    while begin < count:
        at = (first + begin) % size
        length = min(count - begin, size - at)
        yield slice(at, at + length), slice(begin, begin + length)
        begin += length


# Seconds. A write takes milliseconds.
PATIENCE = 60.0


class WriteLock:
    """Excludes writers in the threads of one process, and once shared in those of several.

    A process that is killed while it holds a shared lock never gives it back, so nobody waits for ever.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.Lock()
        self.is_shared = False

    def share_memory_(self) -> None:
        """Exclude the writers of other processes, too."""
        self._lock = mp.Lock()
        self.is_shared = True

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=PATIENCE):
            raise RuntimeError(
                f"The goal table was locked for {PATIENCE:.0f} s: a process was killed or stopped while it wrote. "
                "Start anew from the last checkpoint."
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"_lock": self._lock if self.is_shared else None, "is_shared": self.is_shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.is_shared:
            self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> WriteLock:
        return WriteLock()


# Looking at a draw waits for the GPU, so it is done at every so many writes, until enough was drawn to tell.
WRITES_BETWEEN = 16
ENOUGH = 1000
SHARE_LOST = 0.2


class CapacityWatch:
    """Counts the transitions that were to be relabelled and were not, and warns once.

    Sampling leaves its last draw with the goal table, where it stays on the device; writing looks at it.

    Args:
        capacity (int): that of the goal table.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.writes = 0
        self._told = False
        self._looked_at: tuple[Tensor, Tensor] | None = None
        self._counts = np.zeros(2)  # transitions that were to be relabelled, and those that were

    def after_write(self, last_draw: tuple[Tensor, Tensor]) -> None:
        """Now and then, look at the last draw: were goals lost that had been there?

        Args:
            last_draw: flags ``bool [batch]`` of those that were to be relabelled, and of those that were.
        """
        self.writes += 1
        if self._told or self.writes % WRITES_BETWEEN or last_draw is self._looked_at:
            return
        self._looked_at = last_draw
        self._counts += np.array([int(flags.sum()) for flags in last_draw])
        wanted, relabelled = self._counts
        if wanted < ENOUGH:
            return
        self._counts[:] = 0
        lost = 1 - relabelled / wanted
        if lost < SHARE_LOST:
            return
        self._told = True
        least = math.ceil(self.capacity / (1 - lost)) if relabelled else self.capacity + 1
        warnings.warn(
            f"{lost:.0%} of the transitions that were to be relabelled were not, because their goals have left "
            f"the goal table: HERTransform(capacity={self.capacity}) is too small for what the storage holds. Pass the "
            "max_size of the storage, or up to three times that where episodes have 64 steps and more; it takes at "
            f"least {least}.",
            stacklevel=2,
        )


def check_may_move(table: GoalTable, device: torch.device) -> None:
    """Check that the goal table is where the samples are, or can come there."""
    if table.is_shared and table.device != device:
        raise RuntimeError(
            f"The sampled transitions are on {device}, and the goal table, which processes share, on {table.device}: "
            "give HERTransform the goal_spec on the device of the storage."
        )
