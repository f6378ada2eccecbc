"""The name of a step: one number for its episode and its step in the episode."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

Column = TypeVar("Column", Tensor, np.ndarray)

# The entry with the names of stored transitions, int64 [*batch]. A transition with the name 0 is never relabelled.
STAMP = "hindsight_stamp"
STEP_BITS = 25
STEP_MASK = 2**STEP_BITS - 1
# The steps that name the desired goal of an episode, and the goal achieved in its first state.
DESIRED_STEP, INITIAL_STEP = -1, -2
MOST_STEPS = 2**STEP_BITS - 2  # of an episode; the two largest numbers are the steps -1 and -2


def name_of(episode: Column, step: Column) -> Column:
    """Return the names of steps, ``int64 [n]``."""
    return episode << STEP_BITS | step & STEP_MASK


def split_name(name: Column) -> tuple[Column, Column]:
    """Return the episode and the step, at least 0, of each name, ``int64 [n]`` each."""
    return name >> STEP_BITS, name & STEP_MASK


def read_stamps(tensordict: TensorDictBase) -> Tensor:
    """Return the names of sampled transitions ``[*batch]``, ``int64 [n]``."""
    stamp = tensordict.get(STAMP, None)
    if not isinstance(stamp, Tensor):
        raise KeyError(
            f"The sampled transitions have no stamp under {STAMP!r}: they were written before HERTransform was part "
            "of the buffer, or a transform before HERTransform drops the stamp. Create the buffer with "
            "transform=HERTransform(...), then extend it. For an existing data set, store the result of adopt()."
        )
    return stamp if stamp.ndim == 1 else stamp.reshape(-1)
