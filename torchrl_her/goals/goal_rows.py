"""The memory of the goal table: goals and their owners, side by side."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_her._torchrl import warn_user

SHARED_MEMORY = Path("/dev/shm")  # on Linux
WORD = torch.int64


class GoalRows:
    """Goals and their owners in one matrix, so that a single gather reads both.

    ``goals [capacity, *goal]`` and ``owners int64 [capacity]`` are views of ``matrix int64 [capacity, words]``, which
    has storage offset 0.
    """

    def __init__(self, matrix: Tensor, goal_shape: Sequence[int], dtype: torch.dtype):
        self.matrix = matrix
        self.goal_shape = tuple(goal_shape)
        self.dtype = dtype
        self._goal_strides = torch.empty(self.goal_shape, device="meta").stride()
        self._first = -(-WORD.itemsize // dtype.itemsize)  # offset of the goal in a row, in elements of its dtype
        self.goals, self.owners = self._split(matrix)

    @classmethod
    def make(cls, capacity: int, goal_shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> GoalRows:
        """Allocate rows of zeros. On the CPU, they take memory only as they are written."""
        word = max(WORD.itemsize, dtype.itemsize)
        size = WORD.itemsize + math.prod(goal_shape) * dtype.itemsize
        shape = capacity, -(-size // word) * word // WORD.itemsize
        if device.type == "cuda":
            _check_cuda_memory(math.prod(shape) * WORD.itemsize, device, (capacity, *goal_shape), dtype)
        return cls(zeros(shape, device), goal_shape, dtype)

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the goals ``[n, *goal]`` and the owners ``[n]`` of the rows ``int64 [n]``, with a single gather."""
        return self._split(self.matrix.index_select(0, index))

    def _split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        items = matrix.view(self.dtype)
        strides = items.stride(0), *self._goal_strides
        return items.as_strided((len(matrix), *self.goal_shape), strides, self._first), matrix.select(1, 0)

    def to(self, device: torch.device) -> GoalRows:
        """Return a copy of the rows on another device."""
        if device.type == "cuda" and self.matrix.device != device:
            _check_cuda_memory(self.matrix.nbytes, device, self.goals.shape, self.dtype)
        return GoalRows(self.matrix.to(device), self.goal_shape, self.dtype)

    def __reduce__(self) -> tuple[type[GoalRows], tuple[Any, ...]]:
        # Pickled as views, goals and owners would no longer share memory.
        return GoalRows, (self.matrix, self.goal_shape, self.dtype)

    def share_memory_(self) -> None:
        """Move the rows into shared memory, which allocates memory for all rows."""
        if SHARED_MEMORY.exists() and self.matrix.is_cpu:
            free = shutil.disk_usage(SHARED_MEMORY).free
            _check_room(self.matrix.nbytes, free, self.goals.shape, self.dtype, "in shared memory")
        self.matrix.share_memory_()


def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a tensor of zeros, ``int64``. On the CPU, it takes memory only as it is written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.int64))
    return torch.zeros(shape, dtype=WORD, device=device)


def _check_cuda_memory(size: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
    _check_room(size, torch.cuda.mem_get_info(device)[0], shape, dtype, f"on {device}")


def _check_room(size: int, free: int, shape: Sequence[int], dtype: torch.dtype, place: str) -> None:
    """Raise an error if ``size`` bytes do not fit into ``free`` bytes, and warn if they take more than a quarter."""
    message = (
        f"The goal table for capacity={shape[0]:,} goals, {dtype} {list(shape[1:])}, takes {size / 2**30:.2f} GiB "
        f"{place}, where {free / 2**30:.2f} GiB are free. Pass a smaller capacity (the max_size of the storage is "
        "enough for short episodes), or map goals to smaller goals with goal_fn."
    )
    if size > free:
        raise RuntimeError(message)
    if size > free // 4:
        warn_user(message)
