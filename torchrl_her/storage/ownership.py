"""Whether a sample owns its memory, so that it can be relabelled in place."""

from __future__ import annotations

from typing import TypeVar

from tensordict import TensorDictBase

Data = TypeVar("Data", bound=TensorDictBase)


def mark_as_owned(sample: Data) -> Data:
    """Mark a sample that owns its memory, and return it.

    For the ``get`` of a storage, if no entry of its result shares memory with the storage or with another entry.
    `HERTransform` writes new goals, rewards and done flags into such samples, and into shallow copies of all others.
    What is made of a marked sample, such as a copy, is not marked.

    Args:
        sample (TensorDictBase): transitions ``[*batch]``.

    Examples:
        A storage whose samples are relabelled in place. An index of tensors makes a copy, other indices may not:

        >>> import torch
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl_her import mark_as_owned
        >>> class OwningStorage(LazyTensorStorage):
        ...     def get(self, index):
        ...         found = super().get(index)
        ...         return mark_as_owned(found) if isinstance(index, torch.Tensor) and index.ndim else found
    """
    sample.owns_memory = True  # type: ignore[attr-defined]
    return sample


def owns_memory(sample: TensorDictBase) -> bool:
    """Return whether a sample is marked as one that owns its memory."""
    return getattr(sample, "owns_memory", False) is True
