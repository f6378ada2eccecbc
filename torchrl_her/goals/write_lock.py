"""The lock with which writers of a goal table exclude each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import multiprocessing as mp

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
def exclusive(lock: WriteLock, *attributes: tuple[object, str]) -> Iterator[None]:
    """Exclude other writers. An error or an interrupt restores attributes, so that the write can be repeated.

    Args:
        lock (WriteLock): the lock.
        *attributes (tuple[object, str]): objects and the names of their attributes. The block may assign new values to
            these attributes, but must not change the old values.
    """
    before: list[tuple[object, str, Any]] = []
    try:
        with lock:
            before = [(owner, name, getattr(owner, name)) for owner, name in attributes]
            try:
                yield
            except BaseException:  # before the release, because the next writer continues the episodes
                _restore(before)
                before = []
                raise
    except BaseException:  # an interrupt at the release
        _restore(before)
        raise


def _restore(attributes: list[tuple[object, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)
