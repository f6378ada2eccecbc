"""Observes PyTorch operators: which run, how large their results are, and whether the host would wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave.Tensor")


class Waits(AssertionError):
    """The host waits for the value of a tensor."""


class NoWaits(TorchDispatchMode):
    """Raises `Waits` if the host would wait for a device: to read values, for shapes that depend on values (masks)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        indices = [index for each in args[1:] if isinstance(each, (list, tuple)) for index in each]
        has_mask = any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)
        copies_a_number = "lift_fresh" in name
        if ("index" in name and has_mask) or copies_a_number or any(op in name.split("_out")[0] for op in WAITING):
            raise Waits(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Records the operators that run in ``seen``, with the size of the largest tensor that each computes.

    After each operator, ``then`` is called with the number of operators so far, as another thread could run there.
    """

    def __init__(self, then: Callable[[int], None] = lambda number: None) -> None:
        super().__init__()
        self.then = then
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        makes_none = func._schema.is_mutable or func.is_view
        outs = [] if makes_none else out if isinstance(out, (tuple, list)) else [out]
        self.seen.append((str(func), max((x.numel() for x in outs if isinstance(x, torch.Tensor)), default=0)))
        self.then(len(self.seen))
        return out
