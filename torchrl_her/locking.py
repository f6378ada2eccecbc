"""The lock that writers take in turn."""

from __future__ import annotations

import threading
from typing import Any

from torch import multiprocessing as mp

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
