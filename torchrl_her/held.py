"""The transitions that wait for the end of their episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_her import checks


class HeldRows:
    """Transitions by slot: each gets one when it arrives, and gives it back when it leaves.

    Those that leave in the write in which they arrived are never copied into the store. It grows to what is held at
    most at a time, and by as much at least as it holds, so that growing costs nothing on the average.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self, entries: dict | None = None) -> None:
        self._entries = entries  # the shapes and dtypes of what is written, by key
        self._store: TensorDictBase | None = None  # [slots]
        self._free = np.empty(0, dtype=np.int64)
        # Which of the arriving transitions has the slot, -1 for none.
        self._arrival = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._arrival) - len(self._free)

    def admit(self, rows: TensorDictBase) -> None:
        """Check that transitions can be held together with those that are held.

        Raises:
            ValueError: if they have other entries.
        """
        entries = checks.check_same_entries(rows, self._entries if len(self) else None)
        if entries != self._entries:
            self._clear(entries)
        elif self._store is not None:
            self._store = self._store.to(device_of(rows))  # loaded from another device

    def assign(self, count: int) -> np.ndarray:
        """Return slots ``int64 [count]`` for transitions that arrive."""
        if len(self._free) < count:
            more = max(count - len(self._free), len(self._arrival))
            self._free = np.concatenate([self._free, np.arange(more) + len(self._arrival)])
            self._arrival = np.concatenate([self._arrival, np.full(more, -1)])
        slots, self._free = self._free[:count], self._free[count:]
        return slots

    def exchange(
        self, rows: TensorDictBase | None, arriving: np.ndarray, leaving: np.ndarray
    ) -> tuple[TensorDictBase | None, np.ndarray]:
        """Take in ``rows [n]`` with the slots ``arriving [n]``, and give out those with the slots ``leaving [m]``.

        Returns:
            A tensordict with all that leave, and their places in it, ``int64 [m]``.
        """
        self._arrival[arriving] = np.arange(len(arriving))
        places = self._arrival[leaving]
        self._arrival[arriving] = -1
        stays = np.ones(len(arriving), dtype=bool)
        stays[places[places >= 0]] = False
        was_held = places < 0
        given = rows
        if was_held.any():
            held = gather(self._store, torch.from_numpy(leaving[was_held]))
            places[was_held] = np.arange(len(held)) + len(arriving)
            given = held if rows is None else torch.cat([rows, held])
        if stays.any():
            self._put(arriving[stays], gather(rows, torch.from_numpy(stays.nonzero()[0])))
        self._free = np.concatenate([leaving, self._free])
        return given, places

    def _put(self, slots: np.ndarray, rows: TensorDictBase) -> None:
        store = gather(rows, torch.zeros(0, dtype=torch.int64)) if self._store is None else self._store
        if missing := len(self._arrival) - len(store):
            store = torch.cat([store, gather(rows, torch.zeros(missing, dtype=torch.int64))])
        store[torch.from_numpy(slots)] = rows
        self._store = store

    def none(self) -> TensorDict:
        """Return a tensordict ``[0]`` with the entries of what was held last."""
        if self._store is None:
            return TensorDict(batch_size=[0])
        return gather(self._store, torch.zeros(0, dtype=torch.int64))

    def state_dict(self, slots: np.ndarray) -> dict[str, Any]:
        """Return what is held in slots, entry by entry."""
        if self._store is None:
            return {}
        rows = gather(self._store, torch.from_numpy(slots))
        return dict(rows.items(include_nested=True, leaves_only=True))

    def load_state_dict(self, state: dict[str, Any], count: int) -> None:
        """Hold ``count`` transitions, and nothing else, in the slots from 0 on."""
        self._clear()
        if count:
            rows = TensorDict(batch_size=[count])
            for key, value in state.items():
                rows.set(key, value)
            self.admit(rows)
            self._put(self.assign(count), rows)


def gather(rows: TensorDictBase, index: Tensor) -> TensorDict:
    """Return the transitions at ``index``, ``int64 [n]``; faster than ``rows[index]``, and storages store it faster."""
    device = device_of(rows)
    return TensorDict(_gather(rows, index.to(device)), batch_size=index.shape, device=device)


def device_of(rows: TensorDictBase) -> torch.device:
    """Return where the transitions are."""
    return next(iter(rows.values(include_nested=True, leaves_only=True))).device


def _gather(rows: TensorDictBase, index: Tensor) -> dict[str, Any]:
    return {
        key: _gather(value, index)
        if isinstance(value, TensorDictBase) and value.batch_dims == 1
        else value.index_select(0, index)
        if isinstance(value, Tensor) and value.device == index.device
        else value[index]
        for key, value in rows.items()
    }
