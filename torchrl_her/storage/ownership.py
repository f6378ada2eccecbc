"""Marks samples that own their memory and can be relabelled in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

Data = TypeVar("Data", bound=TensorDictBase)


class OwnedEntries:
    """The entries of a sample that own their memory.

    Pickling drops the mark, because the copy could become a storage.
    """

    def __init__(self, entries: Mapping[NestedKey, Tensor]):
        self._entries = entries

    def has(self, key: NestedKey, value: Tensor) -> bool:
        """Return whether ``value`` is still the entry that the storage returned."""
        return self._entries.get(key) is value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def mark_as_owned(sample: Data) -> Data:
    """Mark a sample as the owner of its memory, so that `HERTransform` relabels it in place.

    Call this function in the ``get`` method of a storage if no entry of the result shares memory with the storage or
    with another entry. Samples without the mark are relabelled in a shallow copy. If you replace an entry of a marked
    sample, `HERTransform` does not write into the new tensor. Clone a marked sample before you use it as a storage.

    Args:
        sample (TensorDictBase): transitions ``[*batch]``.

    Returns:
        TensorDictBase: the same object, marked.

    Raises:
        TypeError: if the sample is not a TensorDict. Tensorclasses cannot be marked.

    Examples:
        A storage whose samples are relabelled in place. Only indexing with a tensor makes a copy:

        >>> import torch
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl_her import mark_as_owned
        >>> class OwningStorage(LazyTensorStorage):
        ...     def get(self, index):
        ...         sample = super().get(index)
        ...         return mark_as_owned(sample) if isinstance(index, torch.Tensor) and index.ndim else sample
        >>> storage = OwningStorage(1000)
    """
    if not isinstance(sample, TensorDictBase):
        raise TypeError(
            f"Only TensorDicts can be marked, got a {type(sample).__name__}: return the sample without a mark."
        )
    return set_owned(sample, OwnedEntries(dict(sample.items(include_nested=True, leaves_only=True))))


def set_owned(sample: Data, owned: OwnedEntries | None) -> Data:
    """Set the entries of a sample that own their memory, and return the sample."""
    sample.owned_entries = owned  # type: ignore[attr-defined]
    return sample


def owned_entries(sample: TensorDictBase) -> OwnedEntries | None:
    """Return the entries of a sample that own their memory, or None if it is not marked."""
    return getattr(sample, "owned_entries", None)
