"""What the transforms that relabel have in common, whether they do it when sampling or when writing."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase, Transform

from torchrl_her import checks
from torchrl_her.copies import GoalCopies
from torchrl_her.episodes import EpisodeTracker, Written
from torchrl_her.keys import Keys
from torchrl_her.locking import WriteLock
from torchrl_her.order import Order
from torchrl_her.reading import read_written
from torchrl_her.returns import StepReward, make_reward, where
from torchrl_her.strategies import GoalStrategy, make_strategy

RELABELLED = ("hindsight", "relabelled")

Self = TypeVar("Self", bound="Hindsight")


class Hindsight(Transform):
    """A transform of replay buffers that relabels transitions: `HERTransform` and `HindsightAugmentation`."""

    def __init__(
        self,
        reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
        strategy: str | GoalStrategy,
        keys: Keys,
        goal_fn: Callable[[Tensor], Tensor] | None,
        tracker: EpisodeTracker,
    ):
        super().__init__()
        checks.check_goal_fn(goal_fn)
        self.strategy = make_strategy(strategy)
        self.goal_fn = goal_fn
        self.keys = keys
        self.reward = make_reward(reward, keys, goal_fn)
        self.tracker = tracker
        self._step_reward = StepReward(self.reward, keys)
        self._goal_keys = (keys.desired, keys.next_desired)
        self._replaced = [*self._goal_keys, *self._step_reward.replaced]  # of single steps
        self._lock = WriteLock()
        self._process = os.getpid()
        self._order = Order([], [])
        self._is_checked = False  # what all writes have in common is, in the first one
        self._copies = GoalCopies()

    def _read(
        self, tensordict: TensorDictBase, goal: Tensor | None, written_after: set[NestedKey] | None
    ) -> tuple[Written, np.ndarray | None]:
        """Check transitions ``[*batch]`` and read what of them counts, see `read_written`.

        Args:
            tensordict: the transitions.
            goal: one of those that were written before, if any were.
            written_after: the entries that other transforms write anew in every sample; None where entries that
                contain the desired goal do no harm.
        """
        read = read_written(tensordict, self.keys, self.goal_fn, goal)
        if not self._is_checked:
            self._step_reward.check(tensordict)
            self._is_checked = True
        if self._copies.undecided and written_after is not None:
            self._copies.check(tensordict, self.keys.achieved, self.keys.desired, written_after)
        return read

    def _set_goals(
        self, tensordict: TensorDictBase, relabelled: Tensor, goals: Tensor, stored: dict[NestedKey, Tensor]
    ) -> None:
        """Give goals ``[n, *goal]`` to the transitions that are relabelled, ``bool [*batch, 1]``."""
        for key in self._goal_keys:
            tensordict.set(key, where(relabelled, goals, stored[key]))

    def set_container(self, container: Transform | EnvBase) -> None:
        """Take note of the container, which must not be an environment."""
        super().set_container(container)
        if self.parent is not None:
            self.reset_parent()
            name = type(self).__name__
            raise ValueError(
                f"{name} relabels the transitions of a replay buffer and cannot be a transform of an environment: "
                f"pass it to the buffer, ReplayBuffer(transform={name}(...))."
            )

    def clone(self: Self) -> Self:
        """Return a transform with a state of its own."""
        return copy.deepcopy(self)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._state_of_a_copy(), memo))  # it is nobody else's, and has the lanes
        return copied

    def _state_of_a_copy(self) -> dict[str, Any]:
        # What compile() made works on the table of this one.
        return super().__getstate__() | {"_order": Order([], []), "_compiled_call_impl": None}
