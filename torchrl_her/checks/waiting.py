"""Finds samples that wait for the end of episodes that nothing continues."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.checks.async_copy import AsyncCopy, is_capturing
from torchrl_her.checks.check import Check, Sample
from torchrl_her.goals.draw import Draw

SAMPLES_WITHOUT_WRITE = 50  # samples without a write after which running episodes should have ended
LOOK_EVERY = 10  # one sample in this many checks for new writes
SHARE_WAITING = 0.5


class WaitingCheck(Check):
    """Warns if at least half of a sample waits for the end of its episodes long after the last write."""

    def __init__(self) -> None:
        self._has_warned = False
        self._samples = self._writes = self._since_write = 0  # numbers of samples, of writes, of samples since the last
        self._share: AsyncCopy | None = None  # the share of transitions whose episodes are running

    def for_copy(self) -> WaitingCheck:  # noqa: D102
        return WaitingCheck()

    def on_sample(self, sample: Sample) -> None:  # noqa: D102
        draw = sample.draw
        if torch.compiler.is_compiling() or is_capturing(sample.relabelled) or draw is None:
            return
        self._samples += 1
        if self._samples % LOOK_EVERY or self._has_warned:
            return
        writes = draw.table.writes
        self._since_write = self._since_write + LOOK_EVERY if writes == self._writes else 0
        self._writes = writes
        if self._since_write < SAMPLES_WITHOUT_WRITE or not len(draw.step):
            return
        share = self._share = self._share or AsyncCopy(is_waiting(draw).double().mean().reshape(1))
        if (values := share.read()) is None:
            return
        self._share, self._since_write = None, 0
        if values[0] >= SHARE_WAITING:
            self._has_warned = True
            warn_user(
                f"{values[0]:.0%} of the sampled transitions wait for the end of their episode, and nothing was "
                f"written during the last {SAMPLES_WITHOUT_WRITE} samples. They are relabelled once it has ended. If "
                "no more transitions follow, as with a data set, call flush() of HERTransform."
            )


def is_waiting(draw: Draw) -> Tensor:
    """Return which transitions have goals that are not in the table yet, ``bool [n]``."""
    first, last = draw.table.episode_ids
    known = (draw.episode >= max(first, last - draw.table.capacity + 1)) & (draw.episode <= last)
    return known & (draw.step >= draw.length)
