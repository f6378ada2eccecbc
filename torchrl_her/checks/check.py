"""The interface of the checks, which show whether hindsight works."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_her.episodes.lanes import Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.goals.draw import Draw


class Sample(NamedTuple):
    """A sampled batch after relabelling."""

    data: TensorDictBase  # [*batch]
    relabelled: Tensor  # bool [*batch, 1]
    draw: Draw | None = None  # None if transitions are relabelled when they are written
    has_returns: bool = False  # whether the rewards are n-step returns, which do not show whether a goal is reached


class Check:
    """Warns if hindsight does not work, or counts something for the report. A check overrides the methods it needs."""

    def on_write(self, tensordict: TensorDictBase, written: Write, later: Iterable[Transform] | None) -> None:
        """Check transitions ``[*batch]`` before they change anything.

        Copies of goals that one of the ``later`` transforms rewrites in samples are harmless; None means that the write
        is not searched for copies.
        """

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        """Check transitions ``[*batch]`` whose episodes are known."""

    def on_sample(self, sample: Sample) -> None:
        """Check a sampled batch. This is also called while sampling is compiled."""

    def report(self) -> dict[str, Any]:
        """Return fields of the `Report`."""
        return {}

    def for_copy(self) -> Check:
        """Return the check of a copied transform, in which the counts of samples are 0."""
        return self


def ratio(part: float, whole: float) -> float | None:
    """Return a share, or None of nothing."""
    return part / whole if whole else None
