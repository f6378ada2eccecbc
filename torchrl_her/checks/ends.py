"""Finds ends of episodes that are stored without a flag, or with the wrong one."""

from __future__ import annotations

from collections import Counter

import numpy as np
from tensordict import TensorDictBase

from torchrl_her._private import warn_user
from torchrl_her.checks.continuity import WARM_UP, ContinuityCheck
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.episodes.lanes import Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.goals.names import split_name
from torchrl_her.goals.table import to_device
from torchrl_her.keys import HERKeys

SILENT_EPISODES = 10  # that end without a done flag before the warning
JUDGED_EPISODES = 20  # the first ones, for time limits


class MissingEndsCheck:
    """Warns if episodes end only because the next transition does not continue them, and none with a done flag.

    The first episode of an environment does not continue anything either, so the episodes that begin in the first
    writes are not counted, and as many more are tolerated. Episodes are counted separately for each trajectory id,
    which several collectors can use.

    Args:
        keys (HERKeys): the keys of the entries.
        continuity (ContinuityCheck): knows whether the transitions are out of order, which has its own warning.
    """

    def __init__(self, keys: HERKeys, continuity: ContinuityCheck):
        self._keys = keys
        self._continuity = continuity
        self._is_over = False
        self._begun = 0  # episodes that begin in the first writes
        self._ended: Counter[int] = Counter()  # the number of ended episodes of each trajectory id

    def on_tracked(self, written: Write, tracked: Tracked) -> None:
        """Count the episodes that ended without a flag."""
        if self._is_over:
            return
        self._is_over = bool(written.done.any() or self._continuity.is_broken)
        breaks = tracked.breaks
        if self._is_over or not len(breaks):
            return
        if self._continuity.transitions - len(written.done) < WARM_UP:
            self._begun += len(breaks)
            return
        self._ended.update([0] * len(breaks) if written.trajectory is None else written.trajectory[breaks].tolist())
        ended = max(self._ended.values())
        if ended >= SILENT_EPISODES + self._begun and self._continuity.is_broken is False:
            self._is_over = True
            warn_user(
                f"{ended} episodes ended without a done flag, and no transition had one: the next transition does not "
                f"continue the episode. Losses and samplers cannot recognize these ends. Set {self._keys.next_done!r}, "
                f"and {self._keys.next_terminated!r} or {self._keys.next_truncated!r}, in the last transition of each "
                "episode. If environments alternate, write trajectory ids, or [environments, steps]."
            )


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
        self._last: list[list[float]] = []  # the last rewards of episodes, [episodes, agents]

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        """Read the ends of the first episodes."""
        if self._is_over or not written.done.any():
            return
        ends = np.flatnonzero(written.done)[:JUDGED_EPISODES]
        lengths = split_name(tracked.steps.name[ends])[1] + 1
        self._length = self._length or int(lengths[0])
        rows = written.rows_of(tensordict.select(self._keys.next_terminated, strict=False))
        terminated = rows[to_device(ends, written.goals.device)].get(self._keys.next_terminated, None)
        has_limit = self._length > 1 and (lengths == self._length).all()  # a task of one step has no time limit
        if not has_limit or terminated is None or written.rewards is None or not terminated.all():
            self._is_over = True
            return
        self._last += written.rewards[ends].tolist()
        if len(self._last) < JUDGED_EPISODES:
            return
        self._is_over = True
        reached_reward = self._rewards.reached_reward
        if reached_reward is None or (np.abs(np.array(self._last) - reached_reward) < 1e-6).any():
            return
        warn_user(
            f"The first {len(self._last)} episodes were all terminated after {self._length} steps, and none of them at "
            "its goal, so a time limit seems to be stored as a termination. The loss would assume that nothing follows "
            f"their last steps. Store the time limit under {self._keys.next_truncated!r}, and keep "
            f"{self._keys.next_terminated!r} False: step() of gymnasium returns both flags. If the task really ends "
            "after this number of steps, ignore this warning."
        )
