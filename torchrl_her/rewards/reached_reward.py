"""A reward for goals without a distance: a goal is reached at the step that achieved it."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase

from torchrl_her.keys import STEPS_TO_GOAL


class ReachedReward(TensorDictModuleBase):
    """0 and terminated if a relabelled transition's own outcome is its new goal, otherwise -1.

    For goals that have no distance, such as images and whole observations, as in OGBench (Park et al. 2025,
    arXiv:2410.20092). It reads ``("hindsight", "steps_to_goal")``, ``int64 [*batch, 1]``, which the transform that
    relabels computes for it, and writes ``("next", "reward")``, ``float32 [*batch, 1]``, and ``("next",
    "terminated")``, ``bool [*batch, 1]``. A goal that happens to equal the outcome, but was achieved at another step,
    does not count as reached.

    Transitions that are not relabelled keep their stored reward. So write rewards of 0 and -1, or pass
    ``her_ratio=1``.

    Examples:
        >>> from torchrl_her import HERTransform, ReachedReward
        >>> HERTransform(ReachedReward(), her_ratio=1.0, capacity=1000)
        HERTransform(ReachedReward, strategy=Future(), her_ratio=1.0, capacity=1000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = [STEPS_TO_GOAL]
        self.set_keys()

    def set_keys(self, *, reward: NestedKey = "reward", terminated: NestedKey = "terminated") -> None:
        """Set the keys that are written, which are under ``"next"``."""
        self.out_keys = [unravel_key(("next", reward)), unravel_key(("next", terminated))]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward and ``terminated`` of transitions ``[*batch]`` into ``tensordict`` and return it."""
        reached = tensordict.get(STEPS_TO_GOAL) == 0
        tensordict.set(self.out_keys[0], reached.float().sub_(1.0))
        return tensordict.set(self.out_keys[1], reached)
