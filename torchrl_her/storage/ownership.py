"""Whether a sample owns its memory, so that it can be relabelled in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

Data = TypeVar("Data", bound=TensorDictBase)


class OwnedEntries:
    """The entries of a sample that own their memory. Pickling leaves them out, since a copy can become a storage."""

    def __init__(self, entries: Mapping[NestedKey, Tensor]):
        self._entries = entries

    def has(self, key: NestedKey, value: Tensor) -> bool:
        """Return whether an entry is still what it was in the sample of the storage."""
        return self._entries.get(key) is value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def mark_as_owned(sample: Data) -> Data:
    """Mark a sample that owns its memory, and return it.

    Call it in the ``get`` of a storage if no entry of the result shares memory with the storage or with another entry.
    `HERTransform` relabels marked samples in place, and all others in a shallow copy. An entry that is replaced after
    the sample was marked is not written into. Clone a marked sample before you make a storage of it.

    Args:
        sample (TensorDictBase): transitions ``[*batch]``.

    Raises:
        TypeError: if the sample is not a TensorDict. Samples of tensorclasses cannot be marked.

    Examples:
        A storage whose samples are relabelled in place. Only an index that is a tensor makes a copy:

        >>> import torch
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl_her import mark_as_owned
        >>> class OwningStorage(LazyTensorStorage):
        ...     def get(self, index):
        ...         sample = super().get(index)
        ...         return mark_as_owned(sample) if isinstance(index, torch.Tensor) and index.ndim else sample
    """
    if not isinstance(sample, TensorDictBase):
        raise TypeError(
            f"A sample that can be marked is a TensorDict, got a {type(sample).__name__}: return it unmarked."
        )
    return set_owned(sample, OwnedEntries(dict(sample.items(include_nested=True, leaves_only=True))))


def set_owned(sample: Data, owned: OwnedEntries | None) -> Data:
    """Set which entries of a sample own their memory, and return the sample."""
    sample.owned_entries = owned  # type: ignore[attr-defined]
    return sample


def owned_entries(sample: TensorDictBase) -> OwnedEntries | None:
    """Return the entries of a sample that own their memory, or None if it is not marked."""
    return getattr(sample, "owned_entries", None)
