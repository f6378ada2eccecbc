"""Refuses transitions that lack entries, or that were relabelled before."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey, TensorDictBase

from torchrl_her.episodes.write import Write, check_last_dimension
from torchrl_her.goals.strategies import check_not_stored
from torchrl_her.keys import RELABELLED, HERKeys, get_entry


class EntriesCheck:
    """Refuses writes whose transitions are already relabelled, and a first write that lacks entries to replace.

    Args:
        keys (HERKeys): the keys of the entries.
        replaced (Sequence[NestedKey]): the entries that the reward module replaces.
        extra (Sequence[NestedKey]): the names of extra goals.
    """

    def __init__(self, keys: HERKeys, replaced: Sequence[NestedKey], extra: Sequence[NestedKey]):
        self._keys = keys
        self._replaced = replaced
        self._extra = extra
        self._has_accepted = False  # whether a write had all entries

    def check(self, tensordict: TensorDictBase, written: Write) -> None:
        """Check transitions ``[*batch]``.

        Raises:
            ValueError: if transitions are relabelled, a reward or a flag has no last dimension, or an extra goal would
                replace an entry.
            KeyError: if an entry is missing.
        """
        if (relabelled := tensordict.get(RELABELLED, None)) is not None and bool(relabelled.any()):
            first = written.names.name(int(relabelled.reshape(-1).nonzero()[0]))
            raise ValueError(
                f"Some of these transitions are already relabelled ({first}), so their goals do not belong to the "
                "episode: they were sampled from a buffer or stored by HindsightAugmentation. Write rb.storage[:] "
                "instead of rb[:] or rb.sample(), and leave out transitions of HindsightAugmentation for which "
                f"{RELABELLED!r} is True."
            )
        if self._has_accepted:
            return
        for key in self._replaced:
            get_entry(tensordict, key, "reward" if key == self._keys.next_reward else "done")
        for key in (self._keys.next_reward, *self._keys.next_flags):
            check_last_dimension(key, tensordict.get(key, None), tensordict.batch_size)
        check_not_stored(tensordict, self._extra, self._keys)
        self._has_accepted = True
