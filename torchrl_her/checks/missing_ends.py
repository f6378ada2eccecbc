"""Finds loops that never set the done flag."""

from __future__ import annotations

from collections import Counter

import numpy as np
from tensordict import TensorDictBase

from torchrl_her._private import warn_user
from torchrl_her.checks.continuity import WARM_UP, ContinuityCheck
from torchrl_her.episodes.lanes import Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.keys import HERKeys

SILENT_EPISODES = 10  # that end without a done flag before the warning


class MissingEndsCheck:
    """Warns if episodes end only because the next transition does not continue them, and none with a done flag.

    The first episode of an environment does not continue anything either, so the episodes that begin in the first
    writes are not counted, and as many more are tolerated. Episodes are counted separately for each trajectory id,
    which several collectors can use.

    Args:
        keys (HERKeys): the keys of the entries.
        continuity (ContinuityCheck): knows whether the transitions are out of order, which has its own warning.
    """

    def __init__(self, keys: HERKeys, continuity: ContinuityCheck):
        self._keys = keys
        self._continuity = continuity
        self._is_over = False
        self._begun = 0  # episodes that begin in the first writes
        self._ended: Counter[int] = Counter()  # the number of ended episodes of each trajectory id

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> bool:  # noqa: D102
        if not self._is_over:
            self._is_over = bool(written.done.any() or self._continuity.is_broken)
        if not self._is_over and len(tracked.breaks):
            self._count(written, tracked.breaks)
        return self._is_over

    def _count(self, written: Write, breaks: np.ndarray) -> None:
        if self._continuity.transitions - len(written.done) < WARM_UP:
            self._begun += len(breaks)
            return
        self._ended.update([0] * len(breaks) if written.trajectory is None else written.trajectory[breaks].tolist())
        ended = max(self._ended.values())
        if ended >= SILENT_EPISODES + self._begun and self._continuity.is_broken is False:
            self._is_over = True
            warn_user(
                f"{ended} episodes ended without a done flag, and no transition had one: each time, the next "
                "transition does not continue the episode. Losses and samplers cannot recognize these ends. Set "
                f"{self._keys.next_done!r}, and {self._keys.next_terminated!r} or {self._keys.next_truncated!r}, in "
                "the last transition of each episode. If several environments alternate, write trajectory ids "
                "(keys=HERKeys(trajectory=...)), or each environment in its own row, [environments, steps]."
            )
