"""A reward for goals without a distance: a transition reaches the goal that it achieved itself."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_her.keys import STEPS_TO_GOAL, HERKeys


class ReachedReward(TensorDictModuleBase):
    """Reward for goals without a distance: 0 and terminated if a transition achieved its new goal itself, otherwise -1.

    Use it for images and whole observations, as in OGBench ([Park et al., 2024](https://arxiv.org/abs/2410.20092)). The
    module reads ``("hindsight", "steps_to_goal")``, ``int64 [*batch, 1]``, which the hindsight transform provides.
    It writes ``("next", "reward")``, ``float32 [*batch, 1]``, and ``("next", "terminated")``, ``bool [*batch, 1]``. A
    goal counts as reached only at the step that achieved it, even if another step achieved an equal goal.

    Transitions that are not relabelled keep their stored reward. Store rewards of 0 and -1, or pass ``her_ratio=1``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_her import HERTransform, ReachedReward
        >>> steps = TensorDict({"hindsight": {"steps_to_goal": torch.tensor([[0], [3]])}}, batch_size=2)
        >>> ReachedReward()(steps)["next", "reward"].flatten()
        tensor([ 0., -1.])
        >>> HERTransform(ReachedReward(), her_ratio=1.0, capacity=1000)
        HERTransform(ReachedReward, her_ratio=1.0, capacity=1000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = [STEPS_TO_GOAL]
        self.set_keys(HERKeys())

    def set_keys(self, keys: HERKeys) -> None:
        """Set the keys that are written."""
        self.out_keys = [keys.next_reward, keys.next_terminated]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward and ``terminated`` into transitions ``[*batch]`` and return them."""
        reached = tensordict.get(STEPS_TO_GOAL) == 0
        tensordict.set(self.out_keys[0], reached.float().sub_(1.0))
        return tensordict.set(self.out_keys[1], reached)
