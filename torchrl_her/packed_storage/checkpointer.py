"""Saves and loads the rows of a PackedStorage."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorStorageCheckpointer

from torchrl_her._private import entries_of, hooks_of

METADATA = "storage_metadata.json"
TENSOR_SAVED = (
    "{} has tensors outside of a TensorDict, but PackedStorage stores TensorDicts: load it into a LazyTensorStorage."
)


class PackedStorageCheckpointer(TensorStorageCheckpointer):
    """Saves the same files as TorchRL's checkpointer, but sparse: rows without transitions take no space on disk.

    Each checkpointer can load the files of the other. If there are hooks, which may change rows, TorchRL's checkpointer
    is used.

    An interrupted save cannot be loaded, because the metadata is deleted first and written last, when all other files
    are on the disk.
    """

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Save a PackedStorage into a directory, which is created if it does not exist.

        Raises:
            OSError: if the disk has too little space. Nothing is written then.
            TypeError: if tensordict cannot load the dtype of an entry.
        """
        save_hooks, _ = hooks_of(self)
        if save_hooks or not storage.initialized:
            return super().dumps(storage, path)
        path = Path(path)
        path.mkdir(exist_ok=True)
        stored, metadata, unfinished = storage[:], path / METADATA, path / f".{METADATA}"
        overwritten = 512 * sum(getattr(file.stat(), "st_blocks", 0) for file in path.rglob("*.memmap"))
        check_space(path, "The transitions take", stored.bytes(), overwritten)
        metadata.unlink(missing_ok=True)
        sync(path)
        entries_of(storage).memmap_like(path, copy_existing=True)  # full size, sparse
        for piece in storage.pieces(len(storage)):
            _load(path)[piece].update_(stored[piece])
        unfinished.write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": len(storage)}))
        for each in path.rglob("*"):
            sync(each)
        unfinished.replace(metadata)
        sync(path)

    def loads(self, storage: Any, path: str | Path) -> None:
        """Load a PackedStorage from a directory.

        Raises:
            OSError: if files are missing or shorter than the metadata says. The storage does not change then.
            TypeError: if the directory has tensors outside of a TensorDict.
            ValueError: if the saved storage has another size or other entries.
        """
        _, load_hooks = hooks_of(self)
        if load_hooks:
            return super().loads(storage, path)
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"There is no saved storage in {path}: check the path.")
        metadata = _read(path / METADATA)
        if metadata and metadata["is_pytree"]:
            raise TypeError(TENSOR_SAVED.format(path))
        damaged = [str(file.relative_to(path)) for file in _damaged_files(path)] if metadata else [METADATA]
        if damaged:
            raise OSError(
                f"The storage in {path} is damaged, or its save was interrupted: {', '.join(damaged)} missing or too "
                "short. Load an earlier checkpoint."
            )
        storage.read_from(lambda: _load(path), metadata["len"])


def _load(path: Path) -> Any:
    try:
        return TensorDict.load_memmap(path)
    except KeyError as dtype:
        raise TypeError(
            f"tensordict cannot load {dtype} from a checkpoint: write entries of this dtype as integers, with "
            ".view(torch.uint8)."
        ) from None


def check_space(path: Path, subject: str, needed: int, overwritten: int = 0) -> None:
    """Raise an error if ``needed`` bytes do not fit on the disk: a memory-mapped file would then end the process."""
    free = shutil.disk_usage(path).free + overwritten
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{subject} {needed / 1e6:,.1f} MB, and the disk of {path} has {free / 1e6:,.1f} MB free: free "
            f"{(needed - free) / 1e6:,.1f} MB more, or save to another disk. Nothing was written.",
        )


def sync(path: Path) -> None:
    """Wait until a file, or the list of files in a directory, is on the disk."""
    if os.name == "nt":
        return  # Windows cannot open directories
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, which is empty if the file is missing or cut off."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def _damaged_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a saved tensordict that are missing, or shorter than its metadata says."""
    entries = _read(folder / "meta.json")
    if not entries:
        yield folder / "meta.json"
        return
    files = {unquote(file.name): file for file in folder.iterdir()}
    if "_tensordict" in files:  # of a tensorclass
        yield from _damaged_files(files["_tensordict"])
    for key, entry in entries.items():
        if isinstance(entry, dict) and "type" in entry:
            yield from _damaged_files(files.get(key, folder / key))
        elif isinstance(entry, dict) and "dtype" in entry and not entry.get("is_nested"):
            name = f"{key or '%'}.memmap"
            size = getattr(torch, entry["dtype"].removeprefix("torch.")).itemsize * torch.Size(entry["shape"]).numel()
            if (files[name].stat().st_size if name in files else 0) < size:
                yield files.get(name, folder / name)
