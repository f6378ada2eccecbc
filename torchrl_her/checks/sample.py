"""A sampled batch as the checks see it, and values read from a GPU without waiting."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_her.goals.draw import Draw


class Sample(NamedTuple):
    """A sampled batch after relabelling."""

    data: TensorDictBase  # [*batch]
    relabelled: Tensor  # bool [*batch, 1]
    draw: Draw | None = None  # None if transitions are relabelled when they are written
    has_returns: bool = False  # whether the rewards are n-step returns, which do not show whether a goal is reached


def is_capturing(values: Tensor) -> bool:
    """Return whether operations on a tensor are captured in a CUDA graph instead of executed."""
    return values.is_cuda and torch.cuda.is_current_stream_capturing()


class AsyncCopy:
    """An asynchronous copy of a tensor ``[n]`` to the host."""

    def __init__(self, values: Tensor):
        self._event = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()
        else:
            self._values = values.cpu()

    def read(self) -> list[float] | None:
        """Return the values, or None if the copy has not finished."""
        if self._event is not None and not self._event.query():
            return None
        return self._values.numpy().tolist()
