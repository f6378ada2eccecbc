"""Hindsight Experience Replay for TorchRL, as a transform of the replay buffer."""

from torchrl_her.augmentation import HindsightAugmentation
from torchrl_her.checkpoints import Checkpoints
from torchrl_her.compact import CompactGoals
from torchrl_her.goal_env_check.check import check_goal_env
from torchrl_her.goal_env_check.finding import Finding, GoalEnvReport
from torchrl_her.goal_selection import GoalSelection
from torchrl_her.goal_selectors import Feasible, GoalSelector, LowestDensity, Uniform
from torchrl_her.goals.strategies import (
    Current,
    Episode,
    Final,
    Future,
    Geometric,
    GoalStrategy,
    Mixture,
    PastDesired,
    Random,
    Subgoal,
    Transitions,
    uniform,
)
from torchrl_her.keys import HERKeys
from torchrl_her.movement import MovementPriority
from torchrl_her.normalize import NormalizedInputs
from torchrl_her.offline.load import load_minari, load_ogbench
from torchrl_her.packed_storage.packed_storage import PackedStorage
from torchrl_her.relabel import call_transform
from torchrl_her.rewards.env_reward import EnvReward
from torchrl_her.rewards.goal_reward import GoalReward, ReachedReward, SparseReward
from torchrl_her.transform import HERTransform

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "CompactGoals",
    "Current",
    "EnvReward",
    "Episode",
    "Feasible",
    "Final",
    "Finding",
    "Future",
    "Geometric",
    "GoalEnvReport",
    "GoalReward",
    "GoalSelection",
    "GoalSelector",
    "GoalStrategy",
    "HERKeys",
    "HERTransform",
    "HindsightAugmentation",
    "LowestDensity",
    "Mixture",
    "MovementPriority",
    "NormalizedInputs",
    "PackedStorage",
    "PastDesired",
    "Random",
    "ReachedReward",
    "SparseReward",
    "Subgoal",
    "Transitions",
    "Uniform",
    "call_transform",
    "check_goal_env",
    "load_minari",
    "load_ogbench",
    "uniform",
]
