"""The reward of transforms that relabel goals only."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase


class NoReward(TensorDictModuleBase):
    """Computes no reward, for ``HERTransform(None)``: relabelled transitions keep their stored reward, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys: list[NestedKey] = []
        self.out_keys: list[NestedKey] = []

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return transitions unchanged."""
        return tensordict
