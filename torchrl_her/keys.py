"""The keys of the entries that hindsight reads and writes."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

MASK = ("collector", "mask")  # written by collectors with split_trajs=True
# The number of steps from the transition to the step that achieved its goal, int64 [*batch, 1]; -1 if the goal
# comes from an earlier step or another episode, or the transition is not relabelled.
STEPS_TO_GOAL = ("hindsight", "steps_to_goal")
# The index of the mixture's member that selected the goal, int64 [*batch, 1]; -1 if the transition is not relabelled.
MEMBER = ("hindsight", "member")


class HERKeys(NamedTuple):
    """The keys of the entries, as paths from the root of a transition."""

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
    ) -> HERKeys:
        """Make the keys from the arguments of `HERTransform`."""
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

    @property
    def flags(self) -> tuple[NestedKey, NestedKey, NestedKey]:
        """The keys of the done flags."""
        return self.done, self.terminated, self.truncated


def get_entry(tensordict: TensorDictBase, key: NestedKey, argument: str) -> Tensor:
    """Return the tensor under ``key``.

    Args:
        tensordict (TensorDictBase): transitions ``[*batch]``.
        key (NestedKey): the key of the entry, from the root.
        argument (str): the argument of the transform that sets the key, for the error message.

    Raises:
        KeyError: if there is no such entry. The message lists the entries that are present.
        TypeError: if the entry is not a tensor.
    """
    value = tensordict.get(key, None)
    if isinstance(value, Tensor):
        return value
    if value is not None:
        advice = "Store a tensor with one value per transition, such as torch.full([*batch, 1], value)."
        if "goal" in argument:
            advice = "Concatenate the parts of the goal with CatTensors in the environment, and pass the new key."
        raise TypeError(f"The entry {key!r} must be a tensor, got a {type(value).__name__}. {advice}")
    found = sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True)))
    advice = f"Set {argument}=... to the correct key"
    if isinstance(key, tuple) and key[:2] == ("next", "next"):
        advice = f"Pass {argument} without 'next', which is added automatically"
    elif "goal" in argument and key[0] == "next" and tensordict.get(key[1:], None) is not None:
        advice = (
            "It exists only at the root: a collector with compact_obs=True leaves it out (use False), and so does "
            "NextObservationDelta (pass it in_keys without the goals)"
        )
    raise KeyError(f"These transitions have no entry {key!r}. {advice}. Present entries: {', '.join(found)}.")
