"""Reads tensors of a GPU without synchronization."""

from __future__ import annotations

import torch
from torch import Tensor


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
