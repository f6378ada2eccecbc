"""Finds samplers that overwrite recomputed done flags."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her._torchrl import warn_user
from torchrl_her.diagnosis.sample_counts import AsyncCopy

SAMPLES = 32  # the first ones are compared


class ReplacedFlagsCheck:
    """Warns if ``terminated`` of relabelled transitions was overwritten after the transform returned a sample.

    TensorDict buffers with a slice sampler do that. A sample is compared when the next one is drawn.

    Args:
        terminated (NestedKey): the key of the flag.
    """

    def __init__(self, terminated: NestedKey):
        self.terminated = terminated
        self._left = SAMPLES
        self._last: tuple[TensorDictBase, Tensor] | None = None  # a sample, and its recomputed flags
        self._lost: AsyncCopy | None = None

    def check(self, sample: TensorDictBase) -> None:
        """Compare the flags of the previous sample, and keep this one, ``[*batch]``, for the next call."""
        if self._lost is not None and (lost := self._lost.read()) is not None:
            self._lost = None
            if lost[0]:
                self._left, self._last = 0, None
                warn_user(
                    f"{self.terminated!r} of relabelled transitions was overwritten in an earlier sample, after the "
                    "transform returned it: in a TensorDict buffer, SliceSampler sets the done flags. Transitions that "
                    "reach their new goal do not end then. Pass SliceSampler(..., truncated_key=None)."
                )
        if self._last is not None and self._lost is None:
            earlier, recomputed = self._last
            now = earlier.get(self.terminated, None)
            if now is not None and now is not recomputed and now.shape == recomputed.shape:
                self._lost = AsyncCopy((recomputed & ~now).sum().reshape(1))
        self._left -= self._left > 0
        self._last = (sample, sample.get(self.terminated)) if self._left else None
