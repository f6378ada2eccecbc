"""Hindsight Experience Replay for TorchRL, as one transform of the replay buffer."""

from torchrl_her.augmentation import HindsightAugmentation
from torchrl_her.compact import CompactGoals
from torchrl_her.diagnosis.goal_env.check import check_goal_env
from torchrl_her.diagnosis.goal_env.finding import Finding, GoalEnvReport
from torchrl_her.goals.strategies import Episode, Final, Future, GoalStrategy, Random, StrategyInput, uniform
from torchrl_her.rewards.env_reward import EnvReward
from torchrl_her.rewards.goal_reward import GoalReward, SparseReward
from torchrl_her.storage.packed_storage import PackedStorage
from torchrl_her.transform import HERTransform

__version__ = "0.1.0"

__all__ = [
    "CompactGoals",
    "EnvReward",
    "Episode",
    "Final",
    "Finding",
    "Future",
    "GoalEnvReport",
    "GoalReward",
    "GoalStrategy",
    "HERTransform",
    "HindsightAugmentation",
    "PackedStorage",
    "Random",
    "SparseReward",
    "StrategyInput",
    "check_goal_env",
    "uniform",
]
