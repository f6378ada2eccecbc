"""Hindsight Experience Replay for TorchRL, as one transform of the replay buffer."""

from torchrl_her.rewards import EnvReward, GoalReward, SparseReward
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
    "Random",
    "SparseReward",
]
