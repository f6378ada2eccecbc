"""Follows the windows that ``MultiStepTransform`` makes, so that none mixes episodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import MultiStepTransform

from torchrl_her import checks
from torchrl_her.episodes import Written
from torchrl_her.keys import Keys

# Where the flags of a window's last step stand: bool [*batch, flags].
LAST_FLAGS = ("next", "hindsight_flags")


class Columns(NamedTuple):
    """Written transitions ``[rows, steps]``, as their windows will be made."""

    start: np.ndarray  # void, the goals that a transition starts from
    outcome: np.ndarray  # void, those that it leads to
    trajectory: np.ndarray  # int64
    done: np.ndarray  # bool

    @classmethod
    def of(cls, written: Written, rows: int) -> Columns:
        """Lay the transitions of one write out in rows."""
        ids = np.zeros(len(written.done), np.int64) if written.trajectory is None else written.trajectory
        return cls(*(column.reshape(rows, -1) for column in (written.start, written.outcome, ids, written.done)))

    def follow(self, before: Columns | None) -> np.ndarray:
        """Say which transitions go on where their row stood, or after an end: ``bool [rows, steps]``."""
        columns = (self.outcome, self.trajectory, self.done)
        first = columns if before is None else before[1:]
        stood, was_in, ended = (
            np.concatenate((one[:, -1:], other[:, :-1]), axis=1) for one, other in zip(first, columns, strict=True)
        )
        follow = (self.start == stood) & (self.trajectory == was_in) | ended
        if before is None:
            follow[:, 0] = True
        return follow


class Windows:
    """What ``MultiStepTransform`` holds back, row by row, and what may come next.

    Attributes:
        may_begin_anew (bool): whether a write may leave what is held back behind: in a process that has just begun
            to write, after ``flush`` and after loading.
    """

    def __init__(self) -> None:
        self.may_begin_anew = True
        self._rows = torch.Size()
        self._last: Columns | None = None

    def follow(self, written: Written, batch: torch.Size, multi_step: MultiStepTransform) -> None:
        """Check that each row of ``[*rows, steps]`` transitions goes on where it stopped, or after an end.

        Raises:
            ValueError: if a window would mix episodes.
        """
        rows = batch[:-1]
        columns = Columns.of(written, rows.numel())
        last = self._last
        if self.may_begin_anew and not (last and rows == self._rows and columns.follow(last)[:, 0].all()):
            last = None
        if last is not None:
            checks.check_same_rows(rows, self._rows)
        checks.check_one_lane_per_row(columns.follow(last))
        if last is None:
            forget_held_back(multi_step)
        self._rows, self._last, self.may_begin_anew = rows, columns, False


def forget_held_back(multi_step: MultiStepTransform) -> None:
    """Forget the last transitions, which wait for their windows, before others come that would be joined to them."""
    multi_step._buffer = None  # TorchRL has no public way


def keep_flags(tensordict: TensorDictBase, keys: Keys) -> None:
    """Write each step's flags once more, where ``MultiStepTransform`` takes them from a window's last step."""
    flags = [tensordict.get(key).reshape(*tensordict.batch_size, 1) for key in flag_keys(tensordict, keys)]
    tensordict.set(LAST_FLAGS, torch.cat(flags, dim=-1))


def flag_keys(tensordict: TensorDictBase | dict[NestedKey, Tensor], keys: Keys) -> list[NestedKey]:
    """Return where the flags stand that there are."""
    return [key for key in (keys.done, keys.terminated, keys.truncated) if tensordict.get(key, None) is not None]


def check_entries(multi_step: MultiStepTransform, keys: Keys) -> None:
    """Check that ``MultiStepTransform`` and HERTransform mean the same reward and the same flag.

    Raises:
        ValueError: if they do not.
    """
    summed = [unravel_key(("next", key)) for key in multi_step.reward_keys]
    checks.check_n_step_entries(summed, keys.reward, unravel_key(("next", multi_step.done_key)), keys.done)
