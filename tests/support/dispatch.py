"""Observes PyTorch operators: which run, how large their results are, and whether the host would wait."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave.Tensor")


class Waits(AssertionError):
    """The host waits for the value of a tensor."""


class NoWaits(TorchDispatchMode):
    """Raises `Waits` if the host would wait for a device.

    The host waits to read values, for shapes that depend on values (masks), and to copy a Python number to the device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        by_mask = "index" in name and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for indices in args[1:]
            if isinstance(indices, (list, tuple))
            for index in indices
        )
        if by_mask or any(value in name.split("_out")[0] for value in (*WAITING, "lift_fresh")):
            raise Waits(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Records the operators that run in ``seen``, with the size of the largest tensor that each computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outs = out if isinstance(out, (tuple, list)) else [out]
        makes_none = func._schema.is_mutable or func.is_view
        made = [x.numel() for x in outs if isinstance(x, torch.Tensor) and not makes_none]
        self.seen.append((str(func), max(made, default=0)))
        return out
