"""Notices a goal table that is too small for what the storage holds."""

from __future__ import annotations

import math
import warnings

import numpy as np
from torch import Tensor

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
