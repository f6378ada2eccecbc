"""Compact storage: redundant entries of goal-conditioned transitions are not stored."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_her.keys import HERKeys, get_entry
from torchrl_her.storage.buffer_transform import BufferTransform


class CompactGoals(BufferTransform):
    """Save memory: do not store redundant entries, and restore them in samples.

    Within an episode, the desired goal under ``"next"`` equals the desired goal at the root, and the done flags at the
    root are always False. Place ``CompactGoals`` first in ``Compose``:
    ``Compose(CompactGoals(), MultiStepTransform(...), HERTransform(...))``.

    Keyword Args:
        desired_goal_key (NestedKey): the desired goal, as in `HERTransform`. Default: ``"desired_goal"``.
        done_key (NestedKey): the done flag, as in `HERTransform`; ``terminated`` and ``truncated`` are next to it.
            Default: ``"done"``.

    Raises:
        ValueError: if the two desired goals of a written transition differ, or a flag at the root is True (a refused
            write stores nothing), if a loaded buffer was saved without ``CompactGoals``, or if ``CompactGoals``
            comes after the hindsight transform or its keys differ from the keys of that transform.
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

    def __init__(self, *, desired_goal_key: NestedKey = "desired_goal", done_key: NestedKey = "done"):
        super().__init__()
        self._desired = unravel_key(desired_goal_key)
        self._next_desired = unravel_key(("next", desired_goal_key))
        group = unravel_key(("next", done_key))[1:-1]  # the nesting of the flags
        self._flags = [unravel_key(done_key), *(unravel_key((*group, name)) for name in ("terminated", "truncated"))]
        self.left_out: list[NestedKey] = [self._next_desired, *self._flags]  # keys of the entries that are not stored

    def check_keys(self, keys: HERKeys) -> None:
        """Raise an error if the hindsight transform uses other keys."""
        if (self._desired, unravel_key(("next", self._flags[0]))) != (keys.desired, keys.done):
            raise ValueError(
                f"CompactGoals leaves out the desired goal {self._desired!r} and the flag {self._flags[0]!r}, but the "
                f"hindsight transform uses {keys.desired!r} and {keys.done[1:]!r}: pass both transforms the same "
                "desired_goal_key and done_key."
            )

    def check_write(self, tensordict: TensorDictBase) -> None:
        """Raise an error if an entry of transitions ``[*batch]`` to be left out is not redundant.

        The hindsight transform sees a write first. It calls this method before it changes its own state.
        """
        desired = get_entry(tensordict, self._desired, "desired_goal_key")
        if not torch.equal(desired, get_entry(tensordict, self._next_desired, "desired_goal_key")):
            raise ValueError(
                f"CompactGoals leaves {self._next_desired!r} out, but it differs from {self._desired!r} in this write: "
                "the goal changes within an episode. Nothing was stored. Remove CompactGoals from the buffer."
            )
        for key in self._flags:
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
        desired = get_entry(tensordict, self._desired, "desired_goal_key")
        tensordict = tensordict.copy().set(self._next_desired, desired)
        for key in self._flags:
            flag = tensordict.get(unravel_key(("next", key)), None)
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


def check_saved_without_compact_goals(state: dict[str, Any]) -> None:
    """Raise an error if the state to load belongs to CompactGoals instead of the hindsight transform."""
    if "compact" in state:
        raise ValueError(
            "The buffer was saved with CompactGoals, so the stored entries differ. Create the buffer with "
            "Compose(CompactGoals(), HERTransform(...)), then load."
        )
