"""A storage that keeps each transition in one row of a matrix."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from tensordict import (
    MemoryMappedTensor,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from tensordict.utils import expand_as_right
from torch import Tensor
from torch import multiprocessing as mp
from torchrl.data import TensorStorage

from torchrl_her._private import (
    count_of,
    entries_of,
    manages_its_memory,
    note_write,
    set_count,
    set_entries,
    without_entries,
)
from torchrl_her.packed_storage.checkpointer import TENSOR_SAVED, PackedStorageCheckpointer
from torchrl_her.packed_storage.row_layout import WORD, RowLayout, read_entries

PIECE = 2**26  # bytes that are copied at once between memory and a checkpoint
BY_WRITERS = {"index"}  # added by the writers of TensorDict buffers after `check_write`


@manages_its_memory(PackedStorageCheckpointer)
class PackedStorage(TensorStorage):
    """A drop-in replacement for ``LazyTensorStorage`` that keeps each transition in one row of a matrix.

    A batch is read with a single gather, where ``LazyTensorStorage`` needs one per entry. Samples have the same keys,
    shapes, dtypes and nesting as the transitions that were written, and own their memory. The first write determines
    the layout of a row.

    Args:
        max_size (int): the maximum number of transitions.

    Keyword Args:
        device (torch.device | str, optional): the device of the rows, or ``"auto"`` for the device of the first write.
            Default: the CPU.
        ndim (int): the number of batch dimensions that index transitions, as in ``LazyTensorStorage``. Default: 1.
        scratch_dir (str | Path, optional): a directory for a memory-mapped file with the rows. The file is kept when
            the program ends. By default, the rows are in memory.
        compilable (bool): as in ``LazyTensorStorage``. Default: False.
        shared_init (bool): whether the buffer can be sent to other processes before the first write. The rows are then
            in a file, by default in a temporary directory that is deleted with the storage. Default: False.

    Raises:
        TypeError: if written or loaded data is not a TensorDict or tensorclass, or an entry is not a tensor.
        ValueError: if keys, shapes or dtypes differ from the first write (nothing is stored then), if a loaded storage
            has another size, or if ``device`` is combined with ``scratch_dir`` or ``shared_init``, or
            ``compilable`` with ``shared_init``.
        OSError: if a loaded checkpoint is damaged, or the disk has too little space for one.
        FileExistsError: on the first write, if ``scratch_dir`` already contains the rows of a storage.

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

    device: torch.device | str
    shared_init = False  # until the constructor of TorchRL, which reads `initialized`, has run

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | None = None,
        ndim: int = 1,
        scratch_dir: str | Path | None = None,
        compilable: bool = False,
        shared_init: bool = False,
    ):
        super().__init__(None, max_size, device=device or "cpu", ndim=ndim, compilable=compilable)
        if (scratch_dir is not None or shared_init) and self.device != torch.device("cpu"):
            option = "scratch_dir" if scratch_dir is not None else "shared_init"
            raise ValueError(f"A memory-mapped file is always on the CPU: leave out device={device!r} or {option}.")
        if shared_init and compilable:
            raise ValueError("A compilable storage cannot be shared by processes: leave out compilable or shared_init.")
        if shared_init and scratch_dir is None:
            scratch_dir = tempfile.mkdtemp(prefix="packed_storage_")
            Finalize(self, shutil.rmtree, (scratch_dir,), {"ignore_errors": True}, exitpriority=0)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._layout: RowLayout
        self._rows: Tensor  # int64 [size, *lanes, words]
        self._lanes: int
        self.shared_init = shared_init
        self._allocating: Any = mp.RLock() if shared_init else contextlib.nullcontext()
        self._shared_layout = Path(scratch_dir or "") / f"layout_{uuid4().hex}.pickle"

    @property
    def initialized(self) -> bool:
        """Whether rows are allocated, by this process or, with ``shared_init``, by another one."""
        return self._initialized or (self.shared_init and self._map_shared_rows())

    @initialized.setter
    def initialized(self, value: bool) -> None:
        self._initialized = value

    # Writing

    def allocate(self, data: TensorDictBase) -> None:
        """Allocate rows for transitions like ``data``: a single one, or ``[*environments]`` if ``ndim > 1``."""
        with self._allocating:
            if not self.initialized:  # another process may have been faster
                self._allocate(data)

    def _allocate(self, data: TensorDictBase) -> None:
        lanes = data.batch_size[: self.ndim - 1]
        layout = RowLayout(data, len(lanes))
        shape = self._shape_for(lanes)
        if self.device == "auto":
            self.device = data.device or torch.device("cpu")
        if self.scratch_dir is None:
            rows = torch.empty(*shape, layout.words, dtype=WORD, device=self.device)
        else:
            self.scratch_dir.mkdir(parents=True, exist_ok=True)
            path = self.scratch_dir / "rows.memmap"
            if path.exists():
                raise FileExistsError(
                    f"{path} already contains the rows of another storage: choose another scratch_dir, or delete the "
                    "file if you do not need it. To save and restore a buffer, use rb.dumps and rb.loads."
                )
            size = torch.Size([*shape, layout.words])
            rows = MemoryMappedTensor.empty(size, dtype=WORD, filename=str(path))
            if self.shared_init:
                self._shared_layout.write_bytes(pickle.dumps((layout, rows)))
        self._use(layout, rows)

    def _use(self, layout: RowLayout, rows: Tensor) -> None:
        self._layout, self._rows = layout, rows
        self._lanes = rows.shape[1:-1].numel()
        self.max_size = rows.shape[:-1].numel()
        # TorchRL's samplers, checkpointers and in-place updates work on these views of the rows.
        set_entries(self, layout.view(rows))

    def _map_shared_rows(self) -> bool:
        """Map the rows if another process has allocated them, and return whether they are allocated."""
        with self._allocating:
            if self._shared_layout.exists():
                self._use(*pickle.loads(self._shared_layout.read_bytes()))
        return self._initialized

    def _shape_for(self, lanes: torch.Size) -> torch.Size:
        return torch.Size([-(self.max_size // -lanes.numel()), *lanes])

    def check_write(self, data: Any) -> None:
        """Raise an error if ``data`` cannot be stored. The cursor moves later, so rejected data changes nothing."""
        data = _as_tensordict(data)
        if self.initialized:
            self._layout.check(data, but=BY_WRITERS)
        else:
            read_entries(data, data.batch_dims)

    @torch.no_grad()
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write transitions at an index.

        With ``set_cursor``, the index refers to the first dimension, and the number of stored transitions grows.
        Without it, any index is allowed.
        """
        data = _as_tensordict(data)
        if not self.initialized:
            self.allocate(data if isinstance(cursor, int) else data[0])
        if isinstance(cursor, int) and set_cursor:
            self._rows[cursor] = self._pack(cursor, data)
        elif isinstance(cursor, Tensor) and cursor.ndim == 1 and set_cursor:
            rows = self._pack(cursor, data)
            last = slice(-len(self._rows), None)  # a write larger than the storage keeps its last transitions
            self._rows.index_copy_(0, cursor[last].to(self.device), rows[last])
        else:
            self._layout.check(data, but=BY_WRITERS)
            entries_of(self)[cursor] = data
        note_write(self, cursor, data, set_cursor)

    def _pack(self, cursor: int | Tensor, data: TensorDictBase) -> Tensor:
        try:
            rows = self._layout.pack(data)
        except ValueError:
            # TensorDictMaxValueWriter adds the index in `add` but not in `extend`, and does not call `check_write`.
            given = "index" in data.keys()  # noqa: SIM118
            if given == ("index" in self._layout.columns):
                raise
            index = expand_as_right(torch.as_tensor(cursor), data)
            rows = self._layout.pack(data.exclude("index") if given else data.copy().set("index", index))
        return rows.to(self.device)

    # Reading

    def get(self, index: Any) -> Any:
        """Return the transitions at an index, or one entry of all transitions if the index is a key.

        The result owns its memory, except for ``[:]`` and a key: TorchRL's buffers update stored entries through
        ``[:]`` (``rb.set_``, ``rb.update_``, ``rb[i, j] = ...``), and its samplers read episodes through both. Values
        of ``[:]`` can be changed in place but not replaced, so a change either reaches the storage or is an error.
        """
        indices = index if isinstance(index, tuple) else (index,)
        are_rows = all(isinstance(each, Tensor) and each.dtype == torch.int64 and each.ndim for each in indices)
        if self.initialized and are_rows and len(indices) == self.ndim:  # the indices of samplers
            return self._layout.unpack(self._gather(indices))
        if self.initialized and all(isinstance(each, slice) and each == slice(None) for each in indices):
            return self._layout.view(self._written_rows()).lock_()
        found = super().get(index)
        return _copy(found) if is_tensor_collection(found) else found

    def _written_rows(self) -> Tensor:
        written = -(count_of(self) // -self._lanes)
        return self._rows if written == len(self._rows) else self._rows[:written]

    def _gather(self, index: tuple[Tensor, ...]) -> Tensor:
        rows = self._written_rows()
        if self.ndim == 1 and rows.is_cpu and index[0].ndim == 1:
            # Three times as fast as indexing, but it takes no negative indices.
            with contextlib.suppress(IndexError):
                return rows.index_select(0, index[0])
        return rows[index]

    # In other processes, on disk

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the stored transitions, with one item per entry, as TorchRL's storages do."""
        state = super().state_dict()
        return state | {"_storage": _copy(entries_of(self)).state_dict()} if self.initialized else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        if isinstance(state_dict["_storage"], Tensor):
            raise TypeError(TENSOR_SAVED.format("The state"))
        if state_dict["initialized"]:
            saved = TensorDict()
            saved.load_state_dict(state_dict["_storage"], strict=False)
            self.read_from(lambda: saved, state_dict["_len"])
        else:
            set_count(self, 0)

    def read_from(self, load: Callable[[], TensorDictBase], count: int) -> None:
        """Load the entries ``[size, ...]`` of a storage of the same size, of which ``count`` are written.

        ``load`` returns the entries. It is called again for each of `pieces`, so that memory-mapped entries which were
        read can be released.
        """
        saved = load()
        shape = saved.batch_size[: self.ndim]
        room = self._shape_for(shape[1:])
        if shape != room:
            raise ValueError(
                f"The saved storage has room for {list(shape)} transitions and this one for {list(room)}: create this "
                "one with the size of the saved one."
            )
        if not self.initialized:
            self.allocate(saved[0])
        self._layout.check(saved)
        for piece in self.pieces(count):
            entries_of(self)[piece].update_(load()[piece])
        set_count(self, count)

    def pieces(self, count: int) -> Iterator[slice]:
        """Yield slices of the first dimension that contain ``count`` transitions, each of at most about 64 MB."""
        written, step = -(count // -self._lanes), max(1, PIECE // self._rows[0].nbytes)
        for start in range(0, written, step):
            yield slice(start, min(start + step, written))

    def __getstate__(self) -> dict[str, Any]:
        allocated = self.initialized  # first, because it maps shared rows
        state = without_entries(super().__getstate__())  # views of the rows
        if get_spawning_popen() is None and self.scratch_dir is not None and (allocated or self.shared_init):
            state |= {"_rows": self._rows.clone()} if allocated else {}  # a copy lives in memory
            state |= {"scratch_dir": None, "shared_init": False, "_allocating": contextlib.nullcontext()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.initialized:
            set_entries(self, self._layout.view(self._rows))


def _copy(entries: Any) -> Any:
    """Return a copy with the same bits. ``TensorDict.clone`` adds zero, which changes -0.0 and some dtypes lack."""
    return entries.apply(torch.clone, filter_empty=False)


def _as_tensordict(data: Any) -> TensorDictBase:
    if isinstance(data, list) and all(is_tensor_collection(each) for each in data):
        data = lazy_stack(data)
    if not isinstance(data, TensorDictBase) and (is_non_tensor(data) or not is_tensorclass(data)):
        raise TypeError(
            f"PackedStorage stores TensorDicts and tensorclasses, got a {type(data).__name__}: put tensors into a "
            "TensorDict, or use LazyTensorStorage or ListStorage."
        )
    return data
