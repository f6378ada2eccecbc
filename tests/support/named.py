"""Parts of TorchRL's replay buffers, by their names in the tables of the docs."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torchrl.data

from torchrl_her import PackedStorage


def named(words: str) -> Callable[..., Any]:
    """Return the named class with its arguments; ``"LazyTensorStorage(ndim=2)"`` then takes the number of rows."""
    name, _, arguments = words.partition("(")
    kind = PackedStorage if name == "PackedStorage" else getattr(torchrl.data, name)
    return partial(kind, **eval(f"dict({arguments or ')'}"))


def on_disk(size: int) -> PackedStorage:
    """Return a packed storage in a file that is deleted together with it."""
    folder = tempfile.TemporaryDirectory()
    storage = PackedStorage(size, scratch_dir=folder.name)
    weakref.finalize(storage, folder.cleanup)
    return storage


NDIM = {"LazyTensorStorage": (1, 2, 3), "LazyMemmapStorage": (1, 2), "PackedStorage": (1, 2, 3)}
NAMES = [f"{name}(ndim={ndim})" if ndim > 1 else name for name in NDIM for ndim in NDIM[name]]
STORAGES = {name: named(name) for name in (*NAMES, "ListStorage", "LazyStackStorage", "CompressedListStorage")}
STORAGES["PackedStorage(scratch_dir=...)"] = on_disk

SLICES = {"slice_len": 2, "truncated_key": None}  # in a TensorDict buffer slice samplers overwrite the done flags
PRIORITIES = {"alpha": 0.7, "beta": 0.5}
SAMPLERS: dict[str, dict[str, Any]] = {
    "RandomSampler": {},
    "SamplerWithoutReplacement": {},
    "PrioritizedSampler": PRIORITIES,
    "SliceSampler": SLICES,
    "SliceSamplerWithoutReplacement": SLICES | {"strict_length": False},
    "PrioritizedSliceSampler": PRIORITIES | SLICES,
}


def sampler_of(name: str, size: int) -> Any:
    """Return a sampler for a storage of this size."""
    return named(name)(**({"max_capacity": size} if "Prioritized" in name else {}), **SAMPLERS[name])
