"""Finds time limits that are stored as terminations."""

from __future__ import annotations

import numpy as np
from tensordict import TensorDictBase

from torchrl_her._private import warn_user
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.episodes.lanes import Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.goals.names import split_name
from torchrl_her.goals.table import to_device
from torchrl_her.keys import HERKeys

JUDGED_EPISODES = 20  # the first ones


class TimeLimitCheck:
    """Warns if the first episodes are all terminated after the same number of steps, and none at its goal.

    The flags and rewards of at most 20 ends are read. The first end that is not terminated, or the first episode of
    another length, ends the check.

    Args:
        keys (HERKeys): the keys of the entries.
        rewards (RewardCheck): knows the reward of a reached goal.
    """

    def __init__(self, keys: HERKeys, rewards: RewardCheck):
        self._keys = keys
        self._rewards = rewards
        self._is_over = not rewards.reward.out_keys  # without rewards, reached goals are unknown
        self._length = 0  # of the first episode, in steps
        self._last: list[np.ndarray] = []  # the last rewards of episodes, [episodes, agents] each

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> bool:  # noqa: D102
        if not self._is_over and written.done.any():
            self._look_at_ends(tensordict, written, tracked)
        return self._is_over

    def _look_at_ends(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        ends = np.flatnonzero(written.done)[:JUDGED_EPISODES]
        lengths = split_name(tracked.steps.name[ends])[1] + 1
        self._length = self._length or int(lengths[0])
        # A task of one step has no time limit.
        self._is_over = self._length == 1 or bool((lengths != self._length).any())
        if self._is_over:
            return
        rows = written.rows_of(tensordict.select(self._keys.next_terminated, strict=False))
        terminated = rows[to_device(ends, written.goals.device)].get(self._keys.next_terminated, None)
        if terminated is None or written.rewards is None or not terminated.all():
            self._is_over = True
            return
        self._last.append(written.rewards.double().numpy()[ends])
        if sum(map(len, self._last)) >= JUDGED_EPISODES:
            self._judge(self._rewards.reached_reward)

    def _judge(self, reached_reward: float | None) -> None:
        self._is_over, rewards, self._last = True, np.concatenate(self._last), []
        if reached_reward is None or (np.abs(rewards - reached_reward) < 1e-6).any():
            return
        warn_user(
            f"The first {len(rewards)} episodes were all terminated after {self._length} steps, and none of them at "
            "its goal, so a time limit seems to be stored as a termination. The loss would assume that nothing follows "
            f"their last steps. Store the time limit under {self._keys.next_truncated!r}, and keep "
            f"{self._keys.next_terminated!r} False: step() of gymnasium returns both flags. If the task really ends "
            "after this number of steps, ignore this warning."
        )
