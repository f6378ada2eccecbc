"""A device without a GPU: tensors on the host that claim another device. It counts when the host would wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("meta")
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave")


class OnDevice(torch.Tensor):
    """A tensor on the device. Its values are in ``stored``, on the host."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=DEVICE
        )

    def __init__(self, values: torch.Tensor) -> None:
        self.stored = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on the device, outside of Device()")


class Device(TorchDispatchMode):
    """Runs operators of tensors on the device, and counts those for which the host would wait in ``waits``."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        flat = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        to = kwargs.get("device")
        is_here = any(isinstance(x, OnDevice) for x in flat)
        lands_here = to == DEVICE if to is not None else is_here
        moves = name in ("_to_copy", "copy_") and len({isinstance(x, OnDevice) for x in flat} | {lands_here}) > 1
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        has_mask = name.startswith("index") and any(x.dtype == torch.bool for x in flat[1:])
        if (moves and (blocks or not lands_here)) or (is_here and (name in WAITING or has_mask)):
            self.waits[name] += 1
        if to == DEVICE:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(OnDevice, lambda x: x.stored, (args, kwargs))
        out = func(*args, **kwargs)
        if func._schema.is_mutable and is_here:
            return flat[0]
        return tree_map_only(torch.Tensor, OnDevice, out) if lands_here else out
