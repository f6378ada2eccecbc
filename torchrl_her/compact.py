"""Leaves out of the storage what stands in a transition twice by construction, and brings it back in samples."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her.keys import HERKeys, get_entry


def root_flags(keys: HERKeys) -> list[NestedKey]:
    """Return the keys of the flags of the step before: False at the root of every transition."""
    return [_at_root(key) for key in (keys.done, keys.terminated, keys.truncated)]


def leave_out(tensordict: TensorDictBase, keys: HERKeys) -> TensorDictBase:
    """Return transitions ``[*batch]`` without the desired goal under ``"next"`` and without the flags at the root.

    Raises:
        ValueError: if they say something that the rest of the transition does not.
    """
    flags = [key for key in root_flags(keys) if tensordict.get(key, None) is not None]
    desired = get_entry(tensordict, keys.desired, "desired_goal_key")
    if not torch.equal(desired, get_entry(tensordict, keys.next_desired, "desired_goal_key")):
        raise ValueError(
            f"compact=True leaves {keys.next_desired!r} out, and it differs from {keys.desired!r} in this write: the "
            "goal changes within an episode. Nothing was stored: pass compact=False."
        )
    for key in flags:
        if bool(tensordict.get(key).any()):
            raise ValueError(
                f"compact=True leaves {key!r} out, and it is True in a transition of this write, which begins where "
                "its episode has ended. Nothing was stored: pass compact=False, or reset what is done."
            )
    return tensordict.exclude(keys.next_desired, *flags)


def bring_back(tensordict: TensorDictBase, stored: dict[NestedKey, Tensor], keys: HERKeys) -> None:
    """Set what `leave_out` took away of a sampled batch, whose entries ``stored`` are about to be set anew."""
    stored[keys.next_desired] = stored[keys.desired]
    for key in (keys.done, keys.terminated, keys.truncated):
        flag = stored[key] if key in stored else tensordict.get(key, None)
        if flag is not None:
            tensordict.set(_at_root(key), torch.zeros_like(flag))


def _at_root(key: NestedKey) -> NestedKey:
    return key[1] if len(key) == 2 else key[1:]
