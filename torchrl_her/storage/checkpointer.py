"""Checkpoints of a `PackedStorage` that take the room of what was written, and not of what could be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorStorageCheckpointer

if TYPE_CHECKING:
    from torchrl_her.storage.packed_storage import PackedStorage

METADATA = "storage_metadata.json"


class PackedStorageCheckpointer(TensorStorageCheckpointer):
    """Saves the files of TorchRL's checkpointer, with a hole where nothing was written, and reads what was written.

    Either reads what the other saved. Hooks, which may ask for all rows and return others, are left to TorchRL's.
    """

    def dumps(self, storage: PackedStorage, path: str | Path) -> None:
        """Save a storage into a directory, which is made where it is missing."""
        if self._save_hooks or not storage.initialized:  # TorchRL keeps hooks in no public place
            return super().dumps(storage, path)
        path = Path(path)
        path.mkdir(exist_ok=True)
        storage.write_to(path)
        (path / METADATA).write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": len(storage)}))
        return None

    def loads(self, storage: PackedStorage, path: str | Path) -> None:
        """Fill a storage from a directory.

        Raises:
            ValueError: if what was saved is of another size, or has other entries.
            TypeError: if it is not that of TensorDicts.
        """
        if self._load_hooks:
            return super().loads(storage, path)
        metadata = json.loads((Path(path) / METADATA).read_text())
        if metadata["is_pytree"]:
            raise TypeError(
                f"What was saved in {path} are tensors in no TensorDict, and PackedStorage stores TensorDicts: load it "
                "into a LazyTensorStorage."
            )
        storage.read_from(TensorDict.load_memmap(path), metadata["len"])
        return None
