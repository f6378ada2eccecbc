"""Transitions with random bits in entries of every kind, and bitwise comparisons of tensordicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from torchrl_her import PackedStorage

Entry = tuple[NestedKey, torch.dtype, tuple[int, ...]]  # key, dtype, shape of one row

ENTRIES: list[Entry] = [
    ("observation", torch.float32, (5,)),
    ("scalar", torch.float64, ()),
    ("image", torch.uint8, (2, 3, 3)),
    ("empty", torch.float32, (0,)),
    (("collector", "traj_ids"), torch.int64, ()),
    (("next", "observation"), torch.float32, (5,)),
    (("next", "done"), torch.bool, (1,)),
    (("next", "deep", "half"), torch.float16, (3,)),
    (("next", "deep", "brain"), torch.bfloat16, (1,)),
    ("small", torch.int8, (3,)),
    ("short", torch.int16, (1,)),
    ("int", torch.int32, (2,)),
    ("complex", torch.complex128, (2,)),
]


def make_transitions(count: int, number: int = 0, entries: Sequence[Entry] = ENTRIES) -> TensorDict:
    """Return transitions ``[count]`` with random bits in every entry; "uid" counts from ``number``.

    The floats of the first transition are -0.0, which addition changes to +0.0.
    """
    generator = torch.Generator().manual_seed(number)
    transitions = TensorDict({"uid": torch.arange(number, number + count)}, [count])
    for key, dtype, shape in entries:
        high = 2 if dtype == torch.bool else 256
        size = (count, *shape, dtype.itemsize)
        random = torch.randint(0, high, size, dtype=torch.uint8, generator=generator)
        transitions[key] = _quiet(random.view(dtype)).reshape(count, *shape)
        if dtype.is_floating_point or dtype.is_complex:
            transitions[key][:1] = torch.tensor(-0.0).to(dtype)
    return transitions


def _quiet(value: Tensor) -> Tensor:
    """Replace signalling NaNs by quiet ones, because PyTorch changes them when it copies strided tensors."""
    if value.is_complex():
        return torch.view_as_complex(_quiet(torch.view_as_real(value)))
    changes = value.dtype.itemsize > 1 and value.is_floating_point()
    return torch.where(value.isnan(), torch.nan, value) if changes else value


def bits(tensordict: TensorDictBase) -> list[dict[NestedKey, bytes]]:
    """Return the contents, row by row, as plain Python objects that compare exactly."""
    if not tensordict.batch_size.numel():
        return []
    flat = tensordict.reshape(-1)
    columns = {
        key: [bytes(row.contiguous().reshape(-1).view(torch.uint8).tolist()) for row in value]
        for key, value in flat.items(True, True)
    }
    return [{key: column[row] for key, column in columns.items()} for row in range(len(flat))]


def kinds(tensordict: TensorDictBase) -> list[str]:
    """Return types, shapes, dtypes, batch sizes and devices of all entries and nested tensordicts by key."""
    return sorted(
        f"{key} {type(value)} {value.shape} {value.device} {value.dtype}"
        for key, value in [((), tensordict), *tensordict.items(include_nested=True)]
    )


def identical(one: Any, other: Any) -> bool:
    """Return whether two tensordicts have equal kinds and bits, or two other values are equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return kinds(one) == kinds(other) and bits(one) == bits(other) if isinstance(one, TensorDictBase) else one == other


def both_storages(kind: Any = TensorDictReplayBuffer, size: int = 20, ndim: int = 1, **options: Any) -> Any:
    """Return the same buffer over TorchRL's storage and over PackedStorage."""
    storages = LazyTensorStorage, PackedStorage
    return [kind(storage=storage(size, ndim=ndim), batch_size=8, **options) for storage in storages]


def packed_buffer(size: int = 20, kind: Any = ReplayBuffer, **options: Any) -> Any:
    """Return a buffer over PackedStorage; options are those of the storage."""
    return kind(storage=PackedStorage(size, **options), batch_size=8)
