"""The achieved goals of what was written, found by episode and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# What `GoalTable.counters` counts.
GOALS, PLACES, EPISODES = range(3)


class Record(NamedTuple):
    """What the table says of the episodes of a batch of transitions, all ``int64 [batch]``."""

    episode: Tensor  # the id that was found, which is the one asked for where the episode is known
    start: Tensor  # the place of its first step
    length: Tensor  # how many of its steps are published


class GoalTable:
    """A ring of achieved goals in the order they were written, and an index of it by episode and step.

    Three rings make it up:

    - ``goals[row]`` and ``owners[row]``: the achieved goals (outcomes) of the last ``capacity`` transitions,
      and the episodes that they were achieved in;
    - ``places[place]``: rows, the steps of an episode next to each other;
    - ``records[episode]``: where in ``places`` an episode starts, and how many of its steps are published.

    So the outcome of step ``j`` is ``goals[places[start + j]]``. A goal is written once and stays where it
    is: to publish an episode, and to publish it again when it has grown, moves integers only.

    Readers take no lock. Before a row is overwritten its owner becomes 0, after that its new episode; so a
    goal is whole, and of episode e, if its owner is e after the goal was read. Whatever a reader found on the
    way there, in a record that was just being replaced, cannot lead it to a wrong goal. Writers exclude each
    other (the caller holds a lock).

    Args:
        capacity (int): how many goals are kept.
        goal_shape (sequence of int): the shape of one goal.
        dtype (torch.dtype): the dtype of the goals.
        device (torch.device): where the table lives.

    Examples:
        >>> table = GoalTable(10, (1,), torch.float32, torch.device("cpu"))
        >>> episode, row = table.next_episode, table.next_row
        >>> table.append(torch.tensor([[0.0], [0.1], [0.2]]), np.full(3, episode))
        >>> table.publish([(episode, np.arange(row, row + 3))])
        >>> record = table.find(torch.tensor([episode]))
        >>> goal, owner = table.read(table.rows(record, torch.tensor([2])))
        >>> goal, owner == episode
        (tensor([[0.2000]]), tensor([True]))
    """

    def __init__(self, capacity: int, goal_shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        self.goals = torch.zeros(capacity, *goal_shape, dtype=dtype, device=device)
        self.owners = torch.zeros(capacity, dtype=torch.int64, device=device)
        # An episode that is published each time its length has doubled takes up to two places a step.
        self.places = torch.zeros(2 * capacity, dtype=torch.int64, device=device)
        self.records = torch.zeros(capacity, 3, dtype=torch.int64, device=device)
        self.size = torch.zeros((), dtype=torch.int64, device=device)  # how many rows are filled, for readers
        self.counters = torch.zeros(3, dtype=torch.int64)  # of all that was ever written, for writers

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
        """The first unused episode id; 0 is none."""
        return int(self.counters[EPISODES]) + 1

    @property
    def next_row(self) -> int:
        """How many goals were ever written: the row of the next one, not yet taken modulo the capacity."""
        return int(self.counters[GOALS])

    def append(self, goals: Tensor, owners: np.ndarray) -> None:
        """Write goals ``[n, *goal]``, achieved in episodes ``[n]``, from ``next_row`` on."""
        first = self._reserve(GOALS, len(goals))
        owners_on_device = self._tensor(owners)
        for ring, part in _slices(self.capacity, first, len(goals)):
            self.owners[ring] = 0
            self.goals[ring] = goals[part]
            self.owners[ring] = owners_on_device[part]
        if first < self.capacity:
            self.size.fill_(min(first + len(goals), self.capacity))

    def open_episodes(self, count: int) -> None:
        """Use up the next episode ids."""
        self._reserve(EPISODES, count)

    def publish(self, episodes: Sequence[tuple[int, np.ndarray]]) -> None:
        """Make episodes known: pairs of an id and the rows of all its steps, as `next_row` counts them."""
        if not episodes:
            return
        rows = np.concatenate([rows for _, rows in episodes]) % self.capacity
        lengths = np.array([len(rows) for _, rows in episodes])
        first = self._reserve(PLACES, len(rows))
        rows_on_device = self._tensor(rows)
        for ring, part in _slices(len(self.places), first, len(rows)):
            self.places[ring] = rows_on_device[part]
        ids = np.array([episode for episode, _ in episodes])
        records = np.stack([ids, first + np.cumsum(lengths) - lengths, lengths], axis=1)  # [episodes, 3]
        last = slice(-self.capacity, None)  # of two episodes with one record the later one stays
        self.records[self._tensor(ids[last] % self.capacity)] = self._tensor(records[last])

    def _reserve(self, counter: int, count: int) -> int:
        counters = self.counters.numpy()
        first = int(counters[counter])
        counters[counter] += count
        return first

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    # Reading

    def find(self, episodes: Tensor) -> Record:
        """Look episodes ``int64 [batch]`` up."""
        return Record(*self.records.index_select(0, episodes % self.capacity).unbind(1))

    def rows(self, record: Record, steps: Tensor) -> Tensor:
        """Return the rows of the outcomes of steps ``int64 [batch]`` of the episodes."""
        return self.places.index_select(0, (record.start + steps) % len(self.places))

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the goals ``[batch, *goal]`` of rows and, read after them, their owners ``[batch]``."""
        return self.goals.index_select(0, rows), self.owners.index_select(0, rows)

    # Keeping

    _on_device = ("goals", "owners", "places", "records", "size")

    def to(self, device: torch.device) -> None:
        """Move the table."""
        for name in self._on_device:
            setattr(self, name, getattr(self, name).to(device))

    def share_memory_(self) -> None:
        """Move the table into memory that processes share."""
        for name in (*self._on_device, "counters"):
            getattr(self, name).share_memory_()

    @property
    def is_shared(self) -> bool:
        """Whether processes share the table."""
        return self.counters.is_shared()

    def state_dict(self) -> dict[str, Any]:
        """Return what is filled of the table, in tensors that later writes do not change."""
        goals, places, episodes = self.counters.tolist()
        return {
            "capacity": self.capacity,
            "goals": self.goals[:goals].clone(),
            "owners": self.owners[:goals].clone(),
            "places": self.places[:places].clone(),
            "records": self.records[: episodes + 1].clone(),
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
        for name in ("goals", "owners", "places", "records"):
            getattr(self, name).zero_()[: len(state[name])] = state[name]
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
