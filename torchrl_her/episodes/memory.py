"""The episodes of a transform: the running ones, and the goal table."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp
from torchrl.data import TensorSpec

from torchrl_her.episodes.lanes import BASE, EPISODE, OLDEST, STEPS, WINDOW, Lanes, Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.goals.table import GoalTable, load_table

LOCK_TIMEOUT = 60.0  # seconds; a write takes milliseconds


class WriteLock:
    """Excludes writers in other threads and, once shared, in other processes.

    A process that is killed while it holds a shared lock never releases it, so acquiring the lock times out. The lock
    is reentrant, so that a thread that is interrupted just before the release can write again.
    """

    def __init__(self, shared_lock: Any = None):
        self._lock = shared_lock or threading.RLock()
        self.is_shared = shared_lock is not None

    def share_memory_(self) -> None:
        """Replace the lock with one that also excludes writers in other processes."""
        self._lock = mp.RLock()
        self.is_shared = True

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=LOCK_TIMEOUT):
            raise RuntimeError(
                f"Another writer has held the lock of the hindsight transform for {LOCK_TIMEOUT:.0f} s: a process was "
                "killed or stopped during a write. Restart from the last checkpoint."
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return WriteLock, (self._lock if self.is_shared else None,)

    def __deepcopy__(self, memo: dict[int, Any]) -> WriteLock:
        return WriteLock()


@contextmanager
def exclusive(lock: WriteLock, writer: Any, *attributes: tuple[object, str]) -> Iterator[None]:
    """Exclude other writers. An error or an interrupt undoes the write, so that it can be repeated.

    Args:
        lock (WriteLock): the lock.
        writer (Any): the object with the goal ``table``, or None, from which the goals of the write are removed.
        *attributes (tuple[object, str]): objects and the names of their attributes, which are restored. The block may
            assign new values to these attributes, but must not change the old values.
    """
    before: list[tuple[object, str, Any]] = []
    try:
        with lock:
            before = [(owner, name, getattr(owner, name)) for owner, name in attributes]
            table: GoalTable | None = writer.table
            used = 0 if table is None else table.rows_used
            try:
                yield
            except BaseException:  # before the release, because the next writer continues the episodes
                if table is not None:
                    table.remove_since(used)
                _restore(before)
                before = []
                raise
    except BaseException:  # an interrupt at the release
        _restore(before)
        raise


def _restore(attributes: list[tuple[object, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


class Episodes:
    """The running episodes, and the goals that episodes achieved. Writing adds to both, and sampling reads the goals.

    Args:
        capacity (int): the number of goals in the table.
        apart (Sequence[str]): the goals that the table keeps apart; see `GoalTable`.

    Keyword Args:
        goal_spec (TensorSpec, optional): the spec of a goal. By default, the first write determines it.
        max_episode_steps (int, optional): the number of steps after which an episode ends.
    """

    def __init__(
        self,
        capacity: int,
        apart: Sequence[str],
        *,
        goal_spec: TensorSpec | None = None,
        max_episode_steps: int | None = None,
    ):
        self.capacity, self.apart, self.max_episode_steps = capacity, apart, max_episode_steps
        self.lanes = Lanes(max_episode_steps, patience=capacity - 1)
        self.table = None if goal_spec is None else GoalTable.of_spec(capacity, goal_spec, apart)
        self.lock = WriteLock()
        self._process = os.getpid()  # the process that owns the running episodes
        self._generation = 0  # that of the table for which they run

    def empty_like(self, count: int) -> Episodes:
        """Return an object for the same goals without episodes, for a data set of ``count`` transitions."""
        new = Episodes(self.capacity, self.apart, max_episode_steps=self.max_episode_steps)
        new.lanes = Lanes(self.max_episode_steps, count, most_idle=count)
        if self.table is not None:
            new.table = GoalTable.like(self.table.goals, self.capacity, self.apart)
        return new

    @property
    def goals(self) -> Tensor | None:
        """The goals of the table, ``[rows, *goal]``, or None before the first write."""
        return None if self.table is None else self.table.goals

    # Writing

    @contextmanager
    def writing(self, restart: Callable[[], None]) -> Iterator[None]:
        """Exclude other writers. An error or an interrupt restores the episodes.

        A forked process drops the running episodes of its parent, if both write to the table, and calls ``restart``.
        """
        own = ((self, name) for name in ("table", "_process", "_generation"))
        with exclusive(self.lock, self, (self.lanes, "running"), *own):
            process, table = os.getpid(), self.table
            is_new, self._process = self._process != process, process
            if self.lock.is_shared:
                generation = 0 if table is None else table.generation
                if is_new or generation != self._generation:
                    self.lanes.running = None
                self._generation = generation
                if is_new:
                    restart()
            running = self.lanes.running
            try:
                yield
            except BaseException:
                if table is not None and running is not None:
                    table.set_episodes(*running.lanes[:, [EPISODE, BASE, STEPS, OLDEST]].T)
                raise

    def append(self, written: Write) -> Tracked:
        """Assign the transitions of a write to episodes, and add their goals to the table. Call it in `writing`."""
        table = self.table_like(written.goals)
        tracked = self.lanes.track(written, table.episode_ids[1] + 1)
        table.new_episodes(tracked.opened)
        moved = table.append(tracked.steps, written.goals)
        if len(moved) and len(tracked.is_open):
            windows = tracked.steps.window.take(tracked.is_open, axis=0)
            tracked.running.lanes[-len(tracked.is_open) :, WINDOW] = windows
        self.lanes.running = tracked.running
        return tracked

    def table_like(self, goals: Tensor) -> GoalTable:
        """Return the goal table. The first call creates it, for goals like ``[n, *goal]``."""
        if self.table is None:
            self.table = GoalTable.like(goals, self.capacity, self.apart)
        return self.table

    def flush(self) -> None:
        """End the running episodes. Call it in `writing`."""
        self.lanes.flush()

    def clear(self) -> None:
        """Drop the running episodes and all goals. Call it in `writing`."""
        self.lanes.flush()
        if self.table is not None:
            self.table.clear()
            self._generation = self.table.generation

    # Sampling

    @property
    def is_in_its_process(self) -> bool:
        """Whether this process owns the running episodes. A forked process does not."""
        return self._process == os.getpid()

    @property
    def table_size(self) -> int:
        """The number of goals in the table."""
        return 0 if self.table is None else int(self.table.size)

    def random_goals(self, count: int) -> Tensor | None:
        """Return the goals in random rows of the table, ``[count, *goal]``, or None if it is empty."""
        if self.table is None or not self.table_size:
            return None
        goals, found = self.table.read_any(*self.table.any_goal((count,)))
        if not found.all():  # a row is empty after an interrupt, or other processes write at the same time
            places = found.nonzero().flatten()
            if not len(places):
                return None
            goals = goals[places[torch.arange(count, device=found.device) % len(places)]]
        return goals

    def table_for(self, desired: Tensor, dimensions: int) -> GoalTable:
        """Return the table on the device of sampled goals, ``[*batch, *goal]``.

        Sampled and written data can be on different devices. ``dimensions`` is the number of batch dimensions.
        """
        table = self.table
        if table is None or table.goals.device != desired.device:
            with self.lock:  # without a table, only the storage was loaded, not the state of this transform
                table = self.table_like(desired.reshape(-1, *desired.shape[dimensions:]))
                table.to(desired.device)
        return table

    # Processes, saving

    def share_memory_(self) -> None:
        """Move the goal table into shared memory.

        Raises:
            RuntimeError: if there is no goal table yet.
        """
        if self.table is None:
            raise RuntimeError(
                "A buffer shared between processes needs the goal table before the first write: pass "
                'goal_spec=env.observation_spec["achieved_goal"] (of one environment) to HERTransform.'
            )
        if not self.table.is_shared:
            self.table.share_memory_()
            self.lock.share_memory_()

    def for_copy(self) -> Episodes:
        """Return the object of a copy for another process. Running episodes belong to the process that writes them."""
        copied = copy.copy(self)
        copied.lanes = self.lanes.without_episodes()
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._process = os.getpid()  # an unpickled copy belongs to the process that unpickles it

    def state_dict(self) -> dict[str, Any]:
        """Return the goal table and the running episodes."""
        table = None if self.table is None else self.table.state_dict()
        return {"table": table, "lanes": self.lanes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. It replaces all episodes.

        Raises:
            ValueError: if goals or capacity differ.
        """
        self.table = load_table(self.table, state["table"], self.capacity, self.apart)
        self.lanes.load_state_dict(state["lanes"])
        self._generation = 0 if self.table is None else self.table.generation
