"""Packs the entries of a transition into one row of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, is_tensorclass
from torch import Tensor

from torchrl_her._private import make_tensordict

WORD = torch.int64  # rows consist of whole words, which aligns their entries


@dataclass
class Column:
    """An entry and its position in a row, in items of its dtype."""

    dtype: torch.dtype
    shape: torch.Size
    number: int = 0  # its index among the columns
    start: int = 0
    end: int = 0
    strides: tuple[int, ...] = ()  # within a row


@dataclass(frozen=True)
class Group:
    """A nested tensordict: its entries, and its batch dimensions after the row dimensions."""

    batch: torch.Size
    entries: dict[str, Column | Group]
    tensorclass: Any  # the class, if it is a tensorclass


class RowLayout:
    """Packs transitions into rows, and unpacks rows into transitions.

    The layout is read from example transitions, whose first ``dimensions`` batch dimensions index rows. Entries are
    ordered by item size, largest first, so each is aligned, and entries of one dtype are contiguous.
    """

    def __init__(self, transitions: TensorDictBase, dimensions: int = 0):
        self.columns, self.root = read_entries(transitions, dimensions)
        order = sorted(self.columns.values(), key=lambda column: (-column.dtype.itemsize, str(column.dtype)))
        size = 0  # bytes
        for number, column in enumerate(order):
            column.number = number
            column.start = size // column.dtype.itemsize
            column.end = column.start + column.shape.numel()
            column.strides = torch.empty(column.shape, device="meta").stride()
            size = column.end * column.dtype.itemsize
        alignment = max(WORD.itemsize, order[0].dtype.itemsize)
        self.words = -(-max(size, 1) // alignment) * alignment // WORD.itemsize
        self._blocks = {dtype: list(columns) for dtype, columns in groupby(order, lambda column: column.dtype)}
        sizes = {
            dtype: (columns[-1].end - columns[0].start) * dtype.itemsize for dtype, columns in self._blocks.items()
        }
        self._largest = max(sizes, key=sizes.__getitem__)

    def check(self, transitions: TensorDictBase, but: Set[NestedKey] = frozenset()) -> list[Any]:
        """Return the value of each column. The entries in ``but`` may be missing.

        Raises:
            ValueError: if the entries of the transitions differ from the columns.
        """
        values: list[Any] = [None] * len(self.columns)
        dimensions = len(self._batch_of(transitions))
        fit = _collect(self.root, transitions, dimensions, values)
        missing = [key for key, column in self.columns.items() if values[column.number] is None]
        if not fit or set(missing) - but:
            differences = "; ".join(self._differences(transitions, dimensions, but))
            raise ValueError(
                f"The entries differ from earlier transitions: {differences}. Nothing was stored: exclude() new "
                "entries and add missing ones, or create a new buffer."
            )
        return values

    def _batch_of(self, transitions: TensorDictBase) -> torch.Size:
        """Return the batch dimensions that index rows."""
        return transitions.batch_size[: transitions.batch_dims - len(self.root.batch)]

    def _differences(self, transitions: TensorDictBase, dimensions: int, but: Set[NestedKey]) -> Iterator[str]:
        found, stored = (
            {key: f"{column.dtype} {list(column.shape)}" for key, column in columns.items()}
            for columns in (read_entries(transitions, dimensions)[0], self.columns)
        )
        for key in stored | found:
            if key not in stored:
                yield f"{key!r} is new"
            elif key not in found:
                if key not in but:
                    yield f"{key!r} is missing"
            elif found[key] != stored[key]:
                yield f"{key!r} is {found[key]} and was {stored[key]}"

    def pack(self, transitions: TensorDictBase) -> Tensor:
        """Return transitions ``[*rows]`` as a matrix ``int64 [*rows, words]``.

        Raises:
            ValueError: if the entries of the transitions differ from the columns.
        """
        values = self.check(transitions)
        batch = self._batch_of(transitions)
        device = transitions.device or values[0].device
        rows = torch.empty(*batch, self.words, dtype=WORD, device=device)
        for dtype, columns in self._blocks.items():
            parts = [values[column.number].to(device).reshape(*batch, column.end - column.start) for column in columns]
            rows.view(dtype)[..., columns[0].start : columns[-1].end] = torch.cat(parts, dim=-1)
        return rows

    def view(self, rows: Tensor) -> TensorDict:
        """Return transitions as views of rows ``[*rows, words]``, which start at the beginning of their memory."""
        return _view(self.root, {dtype: (rows.view(dtype), 0) for dtype in self._blocks}, rows.shape[:-1], rows.device)

    def unpack(self, rows: Tensor) -> TensorDict:
        """Return transitions that take over the memory of rows ``[*rows, words]``, which start at its beginning.

        Entries of one dtype share memory. Entries of different dtypes do not, because ``torch.save`` refuses that.
        """
        items = {}
        for dtype, columns in self._blocks.items():
            first, last = columns[0].start, columns[-1].end
            block = rows.view(dtype)
            items[dtype] = (block, 0) if dtype == self._largest else (block[..., first:last].clone(), first)
        return _view(self.root, items, rows.shape[:-1], rows.device)


def read_entries(transitions: TensorDictBase, dimensions: int) -> tuple[dict[NestedKey, Column], Group]:
    """Return the entries of transitions, flat and nested. The first ``dimensions`` batch dimensions index rows."""
    columns: dict[NestedKey, Column] = {}
    root = _read(transitions, dimensions, (), columns)
    if not columns:
        raise ValueError("PackedStorage got a tensordict without entries: write transitions with at least one tensor.")
    return columns, root


def _read(
    transitions: TensorDictBase, dimensions: int, parent: tuple[str, ...], columns: dict[NestedKey, Column]
) -> Group:
    entries: dict[str, Column | Group] = {}
    needed = "PackedStorage and HindsightAugmentation store tensors of one shape each"
    for name in transitions.keys():  # noqa: SIM118
        key: NestedKey = (*parent, name) if parent else name
        try:
            value = transitions.get(name)
        except RuntimeError as error:  # a stack of different shapes
            raise TypeError(f"{needed}, but {key!r} has several shapes: {error}") from None
        if is_tensor_collection(value) and not is_non_tensor(value):
            entries[name] = _read(value, dimensions, (*parent, name), columns)
        elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            entries[name] = columns[key] = Column(value.dtype, value.shape[dimensions:])
        else:
            raise TypeError(
                f"{needed}, but {key!r} is a {type(value).__name__}: exclude() it before writing, or use "
                "LazyTensorStorage or ListStorage with HERTransform."
            )
    kind = type(transitions) if is_tensorclass(transitions) else None
    return Group(transitions.batch_size[dimensions:], entries, kind)


def _collect(group: Group, transitions: TensorDictBase, dimensions: int, values: list[Any]) -> bool:
    """Set the value of each column, and return whether the entries match the group."""
    for name, value in transitions.items():
        entry = group.entries.get(name)
        if entry is None and is_tensor_collection(value) and value.is_empty():
            continue
        if isinstance(entry, Column):
            if not isinstance(value, Tensor) or value.dtype != entry.dtype or value.shape[dimensions:] != entry.shape:
                return False
            values[entry.number] = value
        elif entry is None or not is_tensor_collection(value) or not _collect(entry, value, dimensions, values):
            return False
    return True


def _view(
    group: Group, items: Mapping[torch.dtype, tuple[Tensor, int]], batch: torch.Size, device: torch.device
) -> TensorDict:
    """Return a tensordict of views. For each dtype, ``items`` has the rows in this dtype and their first item."""
    entries: dict[str, Any] = {}
    for name, entry in group.entries.items():
        if isinstance(entry, Group):
            entries[name] = _view(entry, items, batch, device)
        else:
            row, first = items[entry.dtype]
            entries[name] = row.as_strided(batch + entry.shape, row.stride()[:-1] + entry.strides, entry.start - first)
    tensordict = make_tensordict(entries, batch + group.batch, device)
    return tensordict if group.tensorclass is None else group.tensorclass.from_tensordict(tensordict)
