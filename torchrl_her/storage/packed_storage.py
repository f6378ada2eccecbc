"""A storage whose transitions are rows of one matrix."""

from __future__ import annotations

import contextlib
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import TensorStorage

from torchrl_her.storage.checkpointer import PackedStorageCheckpointer
from torchrl_her.storage.row_layout import WORD, RowLayout, entries_of

# What the writers of TensorDict buffers add, after they asked for the size and before they write.
ADDED_BY_WRITER: frozenset[NestedKey] = frozenset({"index"})


class PackedStorage(TensorStorage):
    """A storage that reads a sampled transition from one place: a drop-in for ``LazyTensorStorage``.

    A transition is one row of a matrix, so a batch is gathered in one step, where a storage with a column for each
    entry gathers as often as there are entries. Samples have the keys, shapes, dtypes and nesting that were written,
    and memory of their own. The first write lays the rows out.

    Args:
        max_size (int): how many transitions are stored.

    Keyword Args:
        device (torch.device or str, optional): where they are stored, ``"auto"`` for where the first ones are.
            Default: the CPU.
        ndim (int): how many batch dimensions of what is written count transitions. Default: 1.
        scratch_dir (str or Path, optional): a directory for a memory-mapped file with the rows, which stays when the
            program ends. By default they are in memory.
        compilable (bool): as in ``LazyTensorStorage``. Default: False.

    Raises:
        TypeError: when writing, if an entry is not a tensor, or what is written not a tensordict.
        ValueError: when writing, if keys, shapes or dtypes are not those of the first write. Nothing is stored then.
        FileExistsError: on the first write, if ``scratch_dir`` has the rows of a storage.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> from torchrl_her import PackedStorage
        >>> rb = TensorDictReplayBuffer(storage=PackedStorage(1000), batch_size=32)
        >>> transitions = TensorDict({"observation": torch.rand(50, 3), "next": {"reward": torch.rand(50, 1)}}, [50])
        >>> _ = rb.extend(transitions)
        >>> rb.sample()["next", "reward"].shape
        torch.Size([32, 1])
    """

    _default_checkpointer = PackedStorageCheckpointer  # TorchRL asks for it where a buffer is given none
    shared_init = False  # TorchRL asks for it where a storage without rows is sent to another process
    max_size: int
    device: torch.device | str

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | None = None,
        ndim: int = 1,
        scratch_dir: str | Path | None = None,
        compilable: bool = False,
    ):
        super().__init__(None, max_size, device=device or "cpu", ndim=ndim, compilable=compilable)
        if scratch_dir is not None and self.device != torch.device("cpu"):
            raise ValueError(f"Rows in a file are on the CPU: leave out device={device!r}, or scratch_dir.")
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._layout: RowLayout
        self._rows: Tensor  # int64 [size, *lanes, words]
        self._lanes: int

    # Writing

    def _init(self, data: TensorDictBase) -> None:
        """Lay out the rows for one transition, or for one of each lane."""
        lanes = data.batch_size[: self.ndim - 1]
        layout = RowLayout(data, len(lanes))
        shape = self._shape_for(lanes)
        if self.device == "auto":
            self.device = data.device or torch.device("cpu")
        if self.scratch_dir is None:
            self._rows = torch.empty(*shape, layout.words, dtype=WORD, device=self.device)
        else:
            self._rows = _make_file(self.scratch_dir, torch.Size([*shape, layout.words]))
        self._layout = layout
        self._lanes = lanes.numel()
        self.max_size = shape.numel()
        # Views of the rows: TorchRL's samplers, checkpointers and in-place updates work on them.
        self._storage = layout.view(self._rows)
        self.initialized = True

    def _shape_for(self, lanes: torch.Size) -> torch.Size:
        return torch.Size([-(self.max_size // -lanes.numel()), *lanes])

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        # A writer asks for it before it moves its cursor: what does not fit is refused here, and nothing has changed.
        if not (single_data is None and batched_data is None):
            data = _as_tensordict(batched_data if single_data is None else single_data)
            if self.initialized:
                self._layout.check(data, but=ADDED_BY_WRITER)
            else:
                entries_of(data, data.batch_dims)
        return super()._max_size_along_dim0(single_data=single_data, batched_data=batched_data)

    @torch.no_grad()
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write transitions.

        Args:
            cursor: where to write them: an index of the first dimension, or any index where ``set_cursor`` is False.
            data (TensorDictBase or list of it): the transitions.

        Keyword Args:
            set_cursor (bool): whether the storage grows by them. Default: True.

        Raises:
            TypeError, ValueError: as the class says.
        """
        data = _as_tensordict(data)
        if not self.initialized:
            self._init(data if isinstance(cursor, int) else data[0])
        if isinstance(cursor, int) and set_cursor:
            self._rows[cursor] = self._layout.pack(data).to(self.device)
        elif isinstance(cursor, Tensor) and cursor.ndim == 1 and set_cursor:
            rows = self._layout.pack(data).to(self.device)
            last = slice(-len(self._rows), None)  # of more transitions than there is room for, the last ones stay
            self._rows.index_copy_(0, cursor[last].to(self.device), rows[last])
        else:
            self._layout.check(data)
            self._storage[cursor] = data
        if set_cursor:
            self._set_last_cursor(cursor)
            self._get_new_len(data, cursor)
        self._bump_mutation_revision()

    # Reading

    def get(self, index: Any) -> Any:
        """Return transitions, or an entry of all by its key.

        What is returned has memory of its own, but for ``[:]`` and a key: TorchRL's buffers update stored entries
        through the one (``rb.set_``, ``rb.update_``), and its samplers read episodes through both.
        """
        if self.initialized and _are_rows(index, self.ndim):
            return self._layout.unpack(self._gather(index))
        found = super().get(index)
        if not isinstance(found, TensorDictBase):
            return found
        return found.copy() if isinstance(index, slice) and index == slice(None) else found.clone()

    def _gather(self, index: Tensor | tuple[Tensor, ...]) -> Tensor:
        written = -(self._len // -self._lanes)
        rows = self._rows if written == len(self._rows) else self._rows[:written]
        if self.ndim == 1 and rows.is_cpu:
            each = index[0] if isinstance(index, tuple) else index
            if each.ndim == 1:
                # A third of the price of indexing, and knows no negative numbers.
                with contextlib.suppress(IndexError):
                    return rows.index_select(0, each)
        return rows[index]

    # In other processes, on disk

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what is stored, entry by entry, as TorchRL's storages do."""
        state = super().state_dict()
        return state | {"_storage": self._storage.clone().state_dict()} if self.initialized else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: if it is that of a storage of another size, or with other entries.
        """
        if state_dict["initialized"]:
            saved = TensorDict()
            saved.load_state_dict(state_dict["_storage"], strict=False)
            self.read_from(saved, state_dict["_len"])
        else:
            self._len = 0
            self._bump_mutation_revision()

    def write_to(self, directory: Path) -> None:
        """Write what is stored into files with room for all that could be: what was not written takes none."""
        stored = self[:]
        files = self._storage.memmap_like(directory, copy_existing=True)
        files[: len(stored)].update_(stored)

    def read_from(self, saved: TensorDictBase, count: int) -> None:
        """Take over the first transitions of a storage of the same size.

        Args:
            saved (TensorDictBase): all its entries, ``[size, ...]``.
            count (int): how many of them are transitions.

        Raises:
            ValueError: as `load_state_dict` says.
        """
        shape = saved.batch_size[: self.ndim]
        room = self._shape_for(shape[1:])
        if shape != room:
            raise ValueError(
                f"The saved storage has room for {list(shape)} transitions and this one for {list(room)}: make it as "
                "large as it was."
            )
        if not self.initialized:
            self._init(saved[0])
        self._layout.check(saved)
        written = -(count // -self._lanes)
        self._storage[:written].update_(saved[:written])
        self._len = count
        self._bump_mutation_revision()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.initialized:
            del state["_storage"]  # views of the rows, each of which would bring all rows
            if self.scratch_dir is not None and get_spawning_popen() is None:
                state |= {"_rows": self._rows.clone(), "scratch_dir": None}  # a copy is in memory
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.initialized:
            self._storage = self._layout.view(self._rows)


def _as_tensordict(data: Any) -> TensorDictBase:
    if isinstance(data, list) and all(isinstance(each, TensorDictBase) for each in data):
        data = lazy_stack(data)
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"PackedStorage stores TensorDicts, got a {type(data).__name__}. For tensors, tensorclasses and other "
            "structures use LazyTensorStorage or ListStorage."
        )
    return data


def _are_rows(index: Any, dimensions: int) -> bool:
    """Whether an index is what samplers draw: a tensor of integers for each dimension that counts transitions."""
    tensors = index if isinstance(index, tuple) else (index,)
    return len(tensors) == dimensions and all(
        isinstance(each, Tensor) and each.dtype == torch.int64 and each.ndim for each in tensors
    )


def _make_file(directory: Path, shape: torch.Size) -> Tensor:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "rows.memmap"
    if path.exists():
        raise FileExistsError(
            f"{path} holds the rows of another storage. Name another scratch_dir, or delete it if it is not needed; "
            "rb.dumps and rb.loads keep a buffer for later."
        )
    return MemoryMappedTensor.empty(shape, dtype=WORD, filename=str(path))
