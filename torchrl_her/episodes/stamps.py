"""The stamp of a stored transition: its episode and its step in the episode."""

from __future__ import annotations

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

# The entry of the stamps, int64 [*batch, 2]: episode id and step. Two separate entries would make writing slower.
STAMP = "hindsight_stamp"


def add_padding(stamps: np.ndarray, mask: np.ndarray | None, step: int) -> np.ndarray:
    """Return the stamps of all rows of a write, given the stamps of its transitions without padding, ``int64 [n, 2]``.

    Padding, where ``mask`` is False, gets episode 0 and ``step``, a step that no episode has.
    """
    if mask is None:
        return stamps
    rows = np.tile([0, step], (len(mask), 1))
    rows[mask] = stamps
    return rows


def read_stamps(tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Return the episode ids and the steps of sampled transitions ``[*batch]``, ``int64 [n]`` each."""
    stamp = tensordict.get(STAMP, None)
    if not isinstance(stamp, Tensor):
        raise KeyError(
            f"The sampled transitions have no stamp under {STAMP!r}: they were written before HERTransform was part "
            "of the buffer, or a transform before HERTransform drops the stamp. Create the buffer with "
            "transform=HERTransform(...), then extend it. For an existing data set, store the result of adopt()."
        )
    episode, step = (stamp if stamp.ndim == 2 else stamp.reshape(-1, 2)).unbind(1)
    return episode, step
