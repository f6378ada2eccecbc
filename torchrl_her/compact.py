"""Compact storage: redundant entries of goal-conditioned transitions are not stored."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from torchrl_her._private import set_container_of_buffer
from torchrl_her.keys import get_entry, keys_of_hindsight


class CompactGoals(Transform):
    """Save memory: do not store redundant entries, and restore them in samples.

    Within an episode, the desired goal under ``"next"`` equals the desired goal at the root, and the done flags at the
    root are always False. Place ``CompactGoals`` first in ``Compose``:
    ``Compose(CompactGoals(), MultiStepTransform(...), HERTransform(...))``.

    The keys of the entries are those of the hindsight transform.

    Raises:
        ValueError: if the two desired goals of a written transition differ, or a flag at the root is True (a refused
            write stores nothing), if a loaded buffer was saved without ``CompactGoals``, or if ``CompactGoals``
            comes after the hindsight transform.
        KeyError: if written or sampled transitions have no desired goal.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> from torchrl.envs import Compose, GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import CompactGoals, EnvReward, HERTransform
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> hindsight = HERTransform(EnvReward(env), capacity=1000)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=Compose(CompactGoals(), hindsight))
        >>> _ = rb.extend(env.rollout(50))
        >>> ("next", "desired_goal") in rb.storage[:].keys(True)
        False
        >>> ("next", "desired_goal") in rb.sample(8).keys(True)
        True
    """

    leaves_out_entries = True  # the order of transforms depends on it
    set_container = set_container_of_buffer

    @property
    def left_out(self) -> list[NestedKey]:
        """The keys of the entries that are not stored."""
        keys = keys_of_hindsight(self)
        return [keys.next_desired_goal, *keys.flags]

    def check_write(self, tensordict: TensorDictBase) -> None:
        """Raise an error if an entry of transitions ``[*batch]`` to be left out is not redundant.

        The hindsight transform sees a write first. It calls this method before it changes its own state.
        """
        keys = keys_of_hindsight(self)
        desired = get_entry(tensordict, keys.desired_goal, "desired_goal")
        if not torch.equal(desired, get_entry(tensordict, keys.next_desired_goal, "desired_goal")):
            raise ValueError(
                f"CompactGoals leaves {keys.next_desired_goal!r} out, but it differs from {keys.desired_goal!r} in "
                "this write: the goal changes within an episode. Nothing was stored. Remove CompactGoals from the "
                "buffer."
            )
        for key in keys.flags:
            flag = tensordict.get(key, None)
            if flag is not None and bool(flag.any()):
                raise ValueError(
                    f"CompactGoals leaves {key!r} out, but it is True in this write: a step was taken after the "
                    "episode had ended. Nothing was stored. Reset the environment when it is done, or "
                    "remove CompactGoals from the buffer."
                )

    def _inv_call(self, tensordict: Any) -> TensorDictBase | None:
        """Return transitions ``[*batch]`` without the redundant entries."""
        if tensordict is None:  # HindsightAugmentation holds all transitions back
            return None
        if isinstance(tensordict, list):
            tensordict = torch.stack(tensordict)
        if tensordict.batch_size.numel():
            self.check_write(tensordict)
        return tensordict.exclude(*self.left_out)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled transitions ``[*batch]`` with the redundant entries restored; the input is not modified."""
        if isinstance(tensordict, list):  # an ensemble of list storages transforms its samples before stacking them
            return list(self.forward(torch.stack(tensordict)).unbind(0))
        keys = keys_of_hindsight(self)
        desired = get_entry(tensordict, keys.desired_goal, "desired_goal")
        tensordict = tensordict.copy().set(keys.next_desired_goal, desired)
        for key, next_key in zip(keys.flags, keys.next_flags, strict=True):
            flag = tensordict.get(next_key, None)
            if flag is not None:
                tensordict.set(key, torch.zeros_like(flag))
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """Return a marker for ``state_dict``, so that loading into a buffer without CompactGoals fails."""
        return {"compact": True}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raise an error if the state belongs to another transform."""
        if "compact" not in state:
            raise ValueError(
                "The buffer was saved without CompactGoals, so the stored entries differ. Create the buffer without "
                "CompactGoals, then load."
            )
