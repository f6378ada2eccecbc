"""Where the entries stand that hindsight reads and writes."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import NestedKey, unravel_key


class Keys(NamedTuple):
    """Where the entries stand, from the root of a transition."""

    achieved: NestedKey
    desired: NestedKey
    next_achieved: NestedKey
    next_desired: NestedKey
    reward: NestedKey
    done: NestedKey
    terminated: NestedKey
    truncated: NestedKey
    trajectory: NestedKey | None
    mask: NestedKey | None

    @classmethod
    def make(
        cls,
        achieved_goal: NestedKey,
        desired_goal: NestedKey,
        reward: NestedKey,
        done: NestedKey,
        trajectory: NestedKey | None,
        mask: NestedKey | None,
    ) -> Keys:
        """Make them from the arguments of HERTransform: flags and rewards are under ``"next"``, goals in both."""
        next_done = unravel_key(("next", done))
        return cls(
            achieved=unravel_key(achieved_goal),
            desired=unravel_key(desired_goal),
            next_achieved=unravel_key(("next", achieved_goal)),
            next_desired=unravel_key(("next", desired_goal)),
            reward=unravel_key(("next", reward)),
            done=next_done,
            terminated=(*next_done[:-1], "terminated"),
            truncated=(*next_done[:-1], "truncated"),
            trajectory=None if trajectory is None else unravel_key(trajectory),
            mask=None if mask is None else unravel_key(mask),
        )
