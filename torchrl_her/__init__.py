"""Hindsight Experience Replay for TorchRL, as one transform of the replay buffer."""

from torchrl_her.augmentation import HindsightAugmentation
from torchrl_her.env_reward import EnvReward
from torchrl_her.rewards import GoalReward, SparseReward
from torchrl_her.storage import PackedStorage
from torchrl_her.strategies import Episode, Final, Future, GoalStrategy, Random
from torchrl_her.transform import HERTransform

__all__ = [
    "EnvReward",
    "Episode",
    "Final",
    "Future",
    "GoalReward",
    "GoalStrategy",
    "HERTransform",
    "HindsightAugmentation",
    "PackedStorage",
    "Random",
    "SparseReward",
]
