"""Finds samplers that overwrite recomputed done flags."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.checks.sample import AsyncCopy, Sample, is_capturing

SAMPLES = 32  # the number of first samples that are compared


class ReplacedFlagsCheck:
    """Warns if ``terminated`` of relabelled transitions is overwritten after the transform has returned a sample.

    TensorDict buffers with a slice sampler overwrite it. Each sample is compared when the next one is drawn.

    Args:
        terminated (NestedKey): the key of the flag.

    Keyword Args:
        is_recomputed (bool): whether the reward module writes the flag.
    """

    def __init__(self, terminated: NestedKey, *, is_recomputed: bool):
        self.terminated, self.is_recomputed = terminated, is_recomputed
        self._left = SAMPLES if is_recomputed else 0
        self._last: tuple[TensorDictBase, Tensor] | None = None  # a sample, and its recomputed flags
        self._lost: AsyncCopy | None = None

    def for_copy(self) -> ReplacedFlagsCheck:  # noqa: D102
        return ReplacedFlagsCheck(self.terminated, is_recomputed=self.is_recomputed)

    def on_sample(self, sample: Sample) -> None:
        """Compare the flags of the previous sample, and keep this one for the next call."""
        is_eager = not (torch.compiler.is_compiling() or is_capturing(sample.relabelled))
        if is_eager and self.is_recomputed and sample.draw is not None:
            self._compare(sample.data)

    def _compare(self, sample: TensorDictBase) -> None:
        pending, last = self._lost, self._last  # other threads may sample at the same time
        if pending is not None and (lost := pending.read()) is not None:
            self._lost = None
            if lost[0]:
                self._left, self._last = 0, None
                warn_user(
                    f"{self.terminated!r} of relabelled transitions was overwritten in an earlier sample, after the "
                    "transform had returned it, so transitions that reach their new goal are not terminated. If the "
                    "sampler is a SliceSampler, it replaces the flags in TensorDict buffers: pass "
                    "truncated_key=None to it."
                )
        if last is not None and pending is None and self._left:
            earlier, recomputed = last
            now = earlier.get(self.terminated, None)
            if now is not None and now is not recomputed and now.shape == recomputed.shape:
                self._lost = AsyncCopy((recomputed & ~now.bool()).sum().reshape(1))
        self._left -= self._left > 0
        self._last = (sample, sample.get(self.terminated)) if self._left else None
