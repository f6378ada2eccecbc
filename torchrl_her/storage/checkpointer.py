"""Checkpoints of a `PackedStorage`, which take no disk space for rows that were not written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import TensorStorageCheckpointer

from torchrl_her._torchrl import load_hooks, save_hooks

METADATA = "storage_metadata.json"


class SparseStorage(Protocol):
    """What the checkpointer uses of a `PackedStorage`."""

    initialized: bool

    def __len__(self) -> int: ...
    def write_to(self, directory: Path) -> None: ...  # noqa: D102
    def read_from(self, saved: TensorDictBase, count: int) -> None: ...  # noqa: D102


class PackedStorageCheckpointer(TensorStorageCheckpointer):
    """Saves the same files as TorchRL's checkpointer, sparse where nothing was written.

    Each of the two loads what the other saved. With hooks, which may change rows, TorchRL's checkpointer does the work.
    """

    def dumps(self, storage: SparseStorage, path: str | Path) -> None:
        """Save a storage into a directory, which is created if it does not exist."""
        if save_hooks(self) or not storage.initialized:
            return super().dumps(storage, path)
        path = Path(path)
        path.mkdir(exist_ok=True)
        storage.write_to(path)
        (path / METADATA).write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": len(storage)}))
        return None

    def loads(self, storage: SparseStorage, path: str | Path) -> None:
        """Load a storage from a directory.

        Raises:
            ValueError: if the saved storage has another size or other entries.
            TypeError: if it does not hold TensorDicts.
        """
        if load_hooks(self):
            return super().loads(storage, path)
        metadata = json.loads((Path(path) / METADATA).read_text())
        if metadata["is_pytree"]:
            raise TypeError(
                f"{path} holds tensors outside of a TensorDict, and PackedStorage stores TensorDicts: load it into a "
                "LazyTensorStorage."
            )
        storage.read_from(TensorDict.load_memmap(path), metadata["len"])
        return None
