"""The list of all checks."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import NestedKey
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_her.checks.check import Check
from torchrl_her.checks.continuity import ContinuityCheck
from torchrl_her.checks.goal_copies import GoalCopiesCheck
from torchrl_her.checks.replaced_flags import ReplacedFlagsCheck
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.checks.sample_counts import SampleCounts
from torchrl_her.checks.waiting import WaitingCheck
from torchrl_her.keys import HERKeys


def make_checks(
    reward: TensorDictModuleBase,
    keys: HERKeys,
    *,
    compares_rewards: bool,
    goal_fn: Callable[[Tensor], Tensor] | None,
    replaced: frozenset[NestedKey],
) -> list[Check]:
    """Return the checks of a transform, in the order in which they run.

    Args:
        reward (TensorDictModuleBase): the reward module.
        keys (HERKeys): the keys of the entries.

    Keyword Args:
        compares_rewards (bool): whether computed and stored rewards should agree.
        goal_fn (Callable[[Tensor], Tensor] or None): maps achieved entries ``[n, *state]`` to goals ``[n, *goal]``.
        replaced (frozenset[NestedKey]): entries that relabelling replaces besides the goals and rewards.
    """
    continuity = ContinuityCheck(keys)
    rewards = RewardCheck(reward, keys, continuity, compares=compares_rewards, goal_fn=goal_fn)
    return [
        continuity,
        rewards,
        GoalCopiesCheck(keys, replaced),
        SampleCounts(keys, rewards),
        WaitingCheck(),
        ReplacedFlagsCheck(keys.next_terminated, is_recomputed=rewards.recomputes_ends),
    ]
