"""Packs the entries of a transition into one row of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, is_tensorclass
from torch import Tensor

from torchrl_her._torchrl import make_tensordict

WORD = torch.int64  # a row is a whole number of words, so that its entries are aligned

STORED = "PackedStorage and HindsightAugmentation store tensors of one shape each"  # begins messages

Entry = tuple[torch.dtype, torch.Size]  # its shape in one row


@dataclass(frozen=True)
class Column:
    """The place of an entry in a row, in items of the entry's dtype."""

    number: int  # its position among the columns
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]  # within a row
    start: int
    end: int


@dataclass(frozen=True)
class Group:
    """A nested tensordict: its entries, and its batch dimensions beyond those that count rows."""

    batch: torch.Size
    entries: dict[str, Column | Group]
    tensorclass: Any  # the class, if it is a tensorclass


class RowLayout:
    """Packs transitions into rows, and unpacks rows into transitions.

    It is made from example transitions, whose first ``dimensions`` batch dimensions count rows. Entries are ordered by
    item size, largest first: each is aligned, and entries of one dtype are contiguous.
    """

    def __init__(self, transitions: TensorDictBase, dimensions: int = 0):
        found = entries_of(transitions, dimensions)
        self.columns: dict[NestedKey, Column] = {}
        end = 0  # bytes
        for key, (dtype, shape) in sorted(found.items(), key=lambda item: (-item[1][0].itemsize, str(item[1][0]))):
            start, items = end // dtype.itemsize, shape.numel()
            strides = torch.empty(shape, device="meta").stride()
            self.columns[key] = Column(len(self.columns), dtype, shape, strides, start, start + items)
            end += items * dtype.itemsize
        alignment = max(WORD.itemsize, *(dtype.itemsize for dtype, _ in found.values()))
        self.words = -(-max(end, 1) // alignment) * alignment // WORD.itemsize
        self._blocks = {
            dtype: list(columns) for dtype, columns in groupby(self.columns.values(), lambda column: column.dtype)
        }
        sizes = {dtype: sum(column.shape.numel() for column in self._blocks[dtype]) for dtype in self._blocks}
        self._largest = max(sizes, key=lambda dtype: sizes[dtype] * dtype.itemsize)
        self._root = self._group(transitions, dimensions, ())

    def _group(self, transitions: TensorDictBase, dimensions: int, parent: tuple[str, ...]) -> Group:
        entries: dict[str, Column | Group] = {}
        for name, value in transitions.items():
            nested = is_tensor_collection(value)
            key = (*parent, name)
            entries[name] = self._group(value, dimensions, key) if nested else self.columns[key if parent else name]
        kind = type(transitions) if is_tensorclass(transitions) else None
        return Group(transitions.batch_size[dimensions:], entries, kind)

    def check(self, transitions: TensorDictBase, but: Set[NestedKey] = frozenset()) -> list[Any]:
        """Return the value of each column, or raise an error if entries differ; those in ``but`` may be missing."""
        values: list[Any] = [None] * len(self.columns)
        dimensions = len(self._batch_of(transitions))
        fit = _collect(self._root, transitions, dimensions, values)
        missing = [key for key, column in self.columns.items() if values[column.number] is None]
        if not fit or not but >= set(missing):
            differences = "; ".join(self._differences(entries_of(transitions, dimensions), but))
            raise ValueError(
                f"The entries differ from those of earlier transitions: {differences}. Nothing was stored: exclude() "
                "what is new and give what is missing, or make a new buffer."
            )
        return values

    def _batch_of(self, transitions: TensorDictBase) -> torch.Size:
        """Return the batch dimensions that count rows."""
        return transitions.batch_size[: transitions.batch_dims - len(self._root.batch)]

    def _differences(self, found: dict[NestedKey, Entry], but: Set[NestedKey]) -> Iterator[str]:
        stored: dict[NestedKey, Entry] = {key: (column.dtype, column.shape) for key, column in self.columns.items()}
        for key in {**stored, **found}:
            if key not in stored:
                yield f"{key!r} is new"
            elif key not in found:
                if key not in but:
                    yield f"{key!r} is missing"
            elif found[key] != stored[key]:
                is_now, was = (f"{dtype} {list(shape)}" for dtype, shape in (found[key], stored[key]))
                yield f"{key!r} is {is_now} and was {was}"

    def pack(self, transitions: TensorDictBase) -> Tensor:
        """Return transitions ``[*rows]`` as ``int64 [*rows, words]``, or raise an error if their entries differ."""
        values = self.check(transitions)
        batch = self._batch_of(transitions)
        device = transitions.device or values[0].device
        rows = torch.empty(*batch, self.words, dtype=WORD, device=device)
        for dtype, columns in self._blocks.items():
            parts = [values[column.number].to(device).reshape(*batch, column.end - column.start) for column in columns]
            rows.view(dtype)[..., columns[0].start : columns[-1].end] = torch.cat(parts, dim=-1)
        return rows

    def view(self, rows: Tensor) -> TensorDict:
        """Return transitions that are views of rows ``[*rows, words]``, which begin at the start of their memory."""
        return _view(self._root, {dtype: (rows.view(dtype), 0) for dtype in self._blocks}, rows.shape[:-1], rows.device)

    def unpack(self, rows: Tensor) -> TensorDict:
        """Return transitions that take over the memory of rows ``[*rows, words]``, which begin at its start.

        Entries of one dtype share memory. Entries of different dtypes do not, since ``torch.save`` would refuse them.
        """
        items = {}
        for dtype, columns in self._blocks.items():
            first, last = columns[0].start, columns[-1].end
            block = rows.view(dtype)
            items[dtype] = (block, 0) if dtype == self._largest else (block[..., first:last].clone(), first)
        return _view(self._root, items, rows.shape[:-1], rows.device)


def entries_of(transitions: TensorDictBase, dimensions: int) -> dict[NestedKey, Entry]:
    """Return the dtype and shape of each entry, or raise an error if one is not a tensor or there is none."""
    found = dict(_entries(transitions, dimensions, ()))
    if not found:
        raise ValueError("PackedStorage got a tensordict without entries: there is nothing to store.")
    return found


def _entries(
    transitions: TensorDictBase, dimensions: int, parent: tuple[str, ...]
) -> Iterator[tuple[NestedKey, Entry]]:
    for name in transitions.keys():  # noqa: SIM118
        key: NestedKey = (*parent, name) if parent else name
        try:
            value = transitions.get(name)
        except RuntimeError as error:  # a stack of different shapes
            raise TypeError(f"{STORED}; {key!r} has several: {error}") from None
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from _entries(value, dimensions, (*parent, name))
        elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            yield key, (value.dtype, value.shape[dimensions:])
        else:
            raise TypeError(
                f"{STORED}; {key!r} is a {type(value).__name__}: exclude() it from what is written, or use "
                "LazyTensorStorage or ListStorage, and HERTransform."
            )


def _collect(group: Group, transitions: TensorDictBase, dimensions: int, values: list[Any]) -> bool:
    """Set the value of each column; return whether all entries are those of the group."""
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
    """Make a tensordict of views of rows, given as items of each dtype and the first item of these in a row."""
    entries: dict[str, Any] = {}
    for name, entry in group.entries.items():
        if isinstance(entry, Group):
            entries[name] = _view(entry, items, batch, device)
        else:
            row, first = items[entry.dtype]
            entries[name] = row.as_strided(batch + entry.shape, row.stride()[:-1] + entry.strides, entry.start - first)
    tensordict = make_tensordict(entries, batch + group.batch, device)
    return tensordict if group.tensorclass is None else group.tensorclass.from_tensordict(tensordict)
