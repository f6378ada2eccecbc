"""Rewards of relabelled transitions: one-step rewards, and n-step returns with a ``MultiStepTransform``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import MultiStepTransform

from torchrl_her._private import drop_waiting_steps, has_forward_hooks
from torchrl_her.episodes.write import Write
from torchrl_her.goals.table import Found, GoalTable
from torchrl_her.keys import STEPS_TO_GOAL, HERKeys
from torchrl_her.rewards.goal_reward import GoalReward

# Entries that MultiStepTransform writes in addition to the reward: the number of steps in a window, gamma to the power
# of that number, whether the window has more than one step, and the reward of the first step.
WINDOW_STEPS = "steps_to_next_obs"
GAMMA = "gamma"
SEVERAL = "nonterminal"
FIRST_REWARD = ("next", "original_reward")
# The done flags of a window's last step, bool [*batch, flags].
LAST_FLAGS = ("next", "hindsight_flags")


@dataclass
class Batch:
    """Transitions that are being relabelled."""

    data: TensorDictBase  # [*batch], receives the new entries
    stored: dict[NestedKey, Any]  # the stored values of the replaced entries; None for entries that are created
    # Of n-step transitions: [n, longest, *goal], the goals achieved in each window; and bool [n], whether the goal
    # table holds the complete window. One-step rewards read no goals from the table.
    outcomes: Tensor | None = None
    available: Tensor | bool = True

    def replace(self, key: NestedKey, relabelled: Tensor, new: Tensor) -> None:
        """Set an entry of the transitions to relabel, ``bool [*batch, 1]``; the others keep the stored value.

        An entry that is not stored is created for all transitions.
        """
        stored = self.stored[key]
        self.data.set(key, new if stored is None else where(relabelled, new, stored))


class OneStepReward:
    """Recomputes the one-step reward, and the done flags if the reward module writes ``terminated``.

    If the reward module has a true attribute ``recompute_all``, the reward of transitions that are not relabelled is
    recomputed too.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: HERKeys):
        self.reward = reward
        self.keys = keys
        self.recompute_all = bool(getattr(reward, "recompute_all", False))
        self._recomputed = [key for key in (keys.next_reward, keys.next_terminated) if key in reward.out_keys]
        self.replaced_keys = list(self._recomputed)
        if keys.next_terminated in self._recomputed:
            self.replaced_keys.append(keys.next_done)
        self._read = [key for key in self.replaced_keys if key in reward.in_keys]
        # Whether calling `GoalReward.compute` directly gives the same result as the module, but faster.
        is_goal_reward = getattr(reward.forward, "__func__", None) is GoalReward.forward
        self._is_plain = is_goal_reward and list(reward.out_keys) == self._recomputed and not self._read

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the entries that `recompute` replaces."""
        return self.replaced_keys

    def recompute(self, batch: Batch, relabelled: Tensor) -> None:
        """Set the rewards and done flags of the transitions to relabel, ``bool [*batch, 1]``."""
        if not self._recomputed:
            return
        for key, new in zip(self._recomputed, self._compute(batch), strict=True):
            includes_originals = self.recompute_all and key == self.keys.next_reward
            replaced = torch.ones_like(relabelled) if includes_originals else relabelled
            batch.replace(key, replaced, new.detach() if new.requires_grad else new)
        if self.keys.next_done in batch.stored:
            ended = batch.data.get(self.keys.next_terminated)
            truncated = batch.data.get(self.keys.next_truncated, None)
            if truncated is not None:
                ended = ended | truncated
            batch.replace(self.keys.next_done, relabelled, ended)

    def _compute(self, batch: Batch) -> list[Tensor]:
        """Return the entries that the reward module writes for the new goals, ``[*batch, ...]`` each."""
        reward = self.reward
        if isinstance(reward, GoalReward) and self._is_plain and not has_forward_hooks(reward):
            return reward.compute(batch.data)
        # The module gets a copy, since it can also write other entries. The copy lacks the replaced entries, so that an
        # entry that the module fails to write is detected.
        data = batch.data.exclude(*self.replaced_keys)
        for key in self._read:
            if batch.stored[key] is not None:
                data.set(key, batch.stored[key])
        computed = reward(data)
        return [computed.get(key) for key in self._recomputed]


class NStepReward:
    """Recomputes the n-step return of each window of ``MultiStepTransform`` under a new goal.

    A window consists of consecutive steps of one row of a write. Each write is therefore checked: the steps of a row
    must continue each other.

    In a sample, the reward module evaluates each step of a window with the new goal. If a step ends the episode, the
    sum stops there. A window gets the done flags of its last step. ``MultiStepTransform`` itself keeps the flags of the
    first step, with which a loss would bootstrap beyond the end of an episode.
    """

    def __init__(self, one_step: OneStepReward, has_goal_fn: bool, multi_step: MultiStepTransform):
        reward, keys, self.recompute_all = one_step.reward, one_step.keys, one_step.recompute_all
        name = type(reward).__name__
        known = (keys.next_achieved_goal, keys.desired_goal, keys.next_desired_goal, STEPS_TO_GOAL)
        if others := [key for key in reward.in_keys if key not in known]:
            raise ValueError(
                "With MultiStepTransform, only the goals of the steps in a window are kept, so the reward must be a "
                f"function of the goals, but {name} also reads {others}. Pass GoalReward(reward_fn), or remove "
                "MultiStepTransform."
            )
        if isinstance(reward, GoalReward):
            reward = reward.with_goal_fn(None)  # the goal table holds mapped goals
        elif has_goal_fn and keys.next_achieved_goal in reward.in_keys:
            raise ValueError(
                "With MultiStepTransform and goal_fn, only the mapped goals of the steps in a window are kept, but "
                f"{name} reads the unmapped entry {keys.next_achieved_goal!r}. Pass GoalReward(reward_fn)."
            )
        self.reward = reward
        self.keys = keys
        self.multi_step = multi_step
        self.gamma = multi_step.gamma  # as of the last write
        # Whether the next write may drop the waiting steps: at the first write of a process and after loading.
        self.may_restart = True
        self._writes_terminated = keys.next_terminated in reward.out_keys
        self._rows = torch.Size()  # the batch size of the last write without the time dimension
        # The last step of each row: the goals under "next" (void), the trajectory id and the done flag, [rows, 1] each.
        self._last: list[np.ndarray] | None = None

    # Writing

    def check_write(self, written: Write, batch: torch.Size) -> None:
        """Check that each row of transitions ``[*rows, steps]`` continues the same row of the last write.

        After the end of an episode, a row can begin a new one.
        """
        if not batch:
            raise ValueError(
                "MultiStepTransform needs transitions with a time dimension, got a single transition: use extend "
                "instead of add."
            )
        if written.mask is not None:
            raise ValueError(
                f"MultiStepTransform would sum over the padding that {self.keys.mask!r} marks. Collect with "
                "split_trajs=False, or remove MultiStepTransform."
            )
        rows, last = batch[:-1], self._last
        if last is not None and rows != self._rows:
            if not self.may_restart:
                raise ValueError(
                    f"This write has {rows.numel()} row(s), {list(rows)}, but the last write had {self._rows.numel()}, "
                    f"{list(self._rows)}. MultiStepTransform combines the steps of a row over consecutive writes: "
                    "extend with [environments, steps], with the same environments in every write."
                )
            last = None
        ids = np.zeros(len(written.done), np.int64) if written.trajectory is None else written.trajectory
        columns = (written.start, written.outcome, ids, written.done)
        start, *ends = (column.reshape(rows.numel(), -1) for column in columns)  # [rows, steps] each
        follows = steps_that_follow(start, ends, last)
        if last is not None and self.may_restart and not follows[:, 0].all():
            last, follows[:, 0] = None, True
        if not follows.all():
            raise ValueError(
                f"Row {int(np.argwhere(~follows)[0][0])} of this write has transitions that do not continue each "
                "other, and no done flag between them, so windows of MultiStepTransform would mix episodes. Extend "
                "with [environments, steps], not flattened, and pass ndim=2 to the storage. All environments must "
                "advance together and be reset only when they are done. After a refused or lost write, call flush()."
            )
        if last is None:
            drop_waiting_steps(self.multi_step)
        self._rows, self._last, self.may_restart = rows, [column[:, -1:].copy() for column in ends], False
        self.gamma = self.multi_step.gamma

    def keep_flags(self, tensordict: TensorDictBase) -> None:
        """Copy the done flags of each step to an entry that ``MultiStepTransform`` takes from a window's last step."""
        keys = present_flags(tensordict, self.keys)
        flags = [tensordict.get(key).reshape(*tensordict.batch_size, 1) for key in keys]
        tensordict.set(LAST_FLAGS, torch.cat(flags, dim=-1))

    def flush(self) -> None:
        """Drop the last steps of each row, whose windows are incomplete. The next write begins new rows."""
        drop_waiting_steps(self.multi_step)
        self._last, self.may_restart = None, True

    # Sampling

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the entries that `recompute` replaces."""
        written = [key for key in (GAMMA, SEVERAL, FIRST_REWARD) if tensordict.get(key, None) is not None]
        return [self.keys.next_reward, WINDOW_STEPS, *written, *present_flags(tensordict, self.keys)]

    def read_goals(self, batch: Batch, table: GoalTable, episode: Tensor, step: Tensor, longest_window: int) -> None:
        """Read the achieved goals of all windows into the batch, and find out which windows the goal table holds.

        In windows that are shorter than the longest one, the last goal is repeated.

        Args:
            batch (Batch): the ``n`` transitions.
            table (GoalTable): the goal table.
            episode (Tensor): the episode id of each transition, ``int64 [n]``.
            step (Tensor): the first step of each window, ``int64 [n]``.
            longest_window (int): the largest number of steps that a written transition spans.
        """
        steps = batch.stored[WINDOW_STEPS].reshape(-1)
        longest = max(longest_window, self.multi_step.n_steps)  # n_steps can change during training
        ahead = torch.arange(longest, device=steps.device).expand(len(steps), -1)
        ahead = torch.minimum(ahead, steps.unsqueeze(1) - 1)  # [n, longest]
        steps_of_windows = step.unsqueeze(1) + ahead
        found = Found(*(column.repeat_interleave(longest) for column in table.find(episode)))
        goals, is_in_table = table.read(found, episode.repeat_interleave(longest), steps_of_windows.flatten())
        batch.outcomes = goals.view(*ahead.shape, *goals.shape[1:])
        batch.available = is_in_table.view(ahead.shape).all(1)

    def recompute(self, batch: Batch, relabelled: Tensor) -> None:
        """Set the returns and done flags of relabelled windows. The other windows get the flags of their last step."""
        data, stored, outcomes, available = batch.data, batch.stored, batch.outcomes, batch.available
        assert outcomes is not None, "read_goals() comes first"
        assert isinstance(available, Tensor)
        steps, gamma = stored[WINDOW_STEPS].reshape(-1, 1), self.gamma  # [n, 1]
        rewards, ends = self._evaluate(data.get(self.keys.desired_goal), outcomes, data.get(STEPS_TO_GOAL, None))
        with_new_reward = relabelled
        if self.recompute_all:  # windows with their original goal keep their length
            ends = ends & relabelled.reshape(-1, 1)
            with_new_reward = relabelled | available.view_as(relabelled)
        counts = steps_that_count(steps, ends)
        taken = counts.sum(1, keepdim=True)  # [n, 1]
        new = {
            self.keys.next_reward: discounted_sum(rewards, counts, gamma),
            FIRST_REWARD: rewards[:, :1],
            WINDOW_STEPS: taken,
            GAMMA: gamma ** taken.double(),
            SEVERAL: taken > 1,
        }
        flags = data.get(LAST_FLAGS).reshape(len(steps), -1).split(1, dim=1)
        last_flags = dict(zip(present_flags(stored, self.keys), flags, strict=True))
        new |= last_flags
        if self.keys.next_truncated in last_flags:
            new[self.keys.next_truncated] = last_flags[self.keys.next_truncated] & (taken == steps)
        if self._writes_terminated:
            new[self.keys.next_terminated] = ends.any(1, keepdim=True)
            new[self.keys.next_done] = new[self.keys.next_terminated] | new.get(self.keys.next_truncated, False)
        for key, value in stored.items():
            if key in new:
                kept = last_flags[key].view_as(value) if key in last_flags else value
                is_reward = key in (self.keys.next_reward, FIRST_REWARD)
                data.set(key, where(with_new_reward if is_reward else relabelled, new[key], kept))

    def _evaluate(self, desired: Tensor, outcomes: Tensor, steps_to_goal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the reward of each outcome, ``float64 [n, longest]``, and whether it ends the episode."""
        shape, goal_shape = outcomes.shape[:2], outcomes.shape[2:]
        desired = desired.reshape(-1, 1, *goal_shape).expand_as(outcomes).flatten(0, 1)
        steps = TensorDict(batch_size=[shape.numel()], device=outcomes.device)
        steps.set(self.keys.next_achieved_goal, outcomes.flatten(0, 1))
        for key in (self.keys.desired_goal, self.keys.next_desired_goal):
            steps.set(key, desired)
        if steps_to_goal is not None:
            left = steps_to_goal.reshape(-1, 1) - torch.arange(shape[1], device=outcomes.device)
            steps.set(STEPS_TO_GOAL, left.clamp(min=-1).reshape(-1, 1))
        with torch.no_grad():
            steps = self.reward(steps)
        rewards = steps.get(self.keys.next_reward).reshape(shape).double()
        if not self._writes_terminated:
            return rewards, torch.zeros_like(rewards, dtype=torch.bool)
        return rewards, steps.get(self.keys.next_terminated).reshape(shape).bool()


def steps_that_follow(start: np.ndarray, ends: list[np.ndarray], last: list[np.ndarray] | None) -> np.ndarray:
    """Return whether each transition continues its row or follows the end of an episode, ``bool [rows, steps]``.

    ``start`` are the goals at the root, ``ends`` the goals under "next", the trajectory ids and the done flags, and
    ``last`` the last column of ``ends`` in the last write, ``[rows, 1]`` each. If ``last`` is None, a row can start
    with any transition.
    """
    # Of the previous transition.
    outcome, trajectory, done = (np.concatenate((end[:, -1:], end[:, :-1]), axis=1) for end in ends)
    if last is not None:
        outcome[:, :1], trajectory[:, :1], done[:, :1] = last
    follows = (start == outcome) & (ends[1] == trajectory) | done
    if last is None:
        follows[:, 0] = True
    return follows


def steps_that_count(steps: Tensor, ends: Tensor) -> Tensor:
    """Return whether each step belongs to the return of its window, ``bool [n, longest]``.

    A return includes the ``steps``, ``int64 [n, 1]``, of its window up to and including the first step that ends the
    episode according to ``ends``, ``bool [n, longest]``.
    """
    ahead = torch.arange(ends.shape[1], device=steps.device)
    return (ahead < steps) & (ends.cumsum(1) - ends.long() == 0)


def discounted_sum(rewards: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum ``[n, 1]`` of the rewards ``float64 [n, longest]`` for which ``counts`` is True."""
    discounts = gamma ** torch.arange(rewards.shape[1], device=rewards.device).double()
    return torch.where(counts, rewards * discounts, 0).sum(1, keepdim=True)


def present_flags(tensordict: TensorDictBase | dict[NestedKey, Tensor], keys: HERKeys) -> list[NestedKey]:
    """Return the keys of the done flags that are present."""
    return [key for key in keys.next_flags if tensordict.get(key, None) is not None]


def check_n_step_keys(multi_step: MultiStepTransform, keys: HERKeys) -> None:
    """Check that ``MultiStepTransform`` and HERTransform have the same reward and done keys."""
    summed = [unravel_key(("next", key)) for key in multi_step.reward_keys]
    ends = unravel_key(("next", multi_step.done_key))
    if summed != [keys.next_reward] or ends != keys.next_done:
        raise ValueError(
            f"MultiStepTransform sums {summed} up to {ends!r}, but HERTransform recomputes {keys.next_reward!r} and "
            f"reads {keys.next_done!r}. Pass both transforms the same done key and the same, single reward key."
        )


def where(relabelled: Tensor, new: Tensor, stored: Tensor) -> Tensor:
    """Return the new values of relabelled transitions, ``bool [*batch, 1]``, and the stored values of the others.

    ``new`` has the shape of ``stored``, ``[*batch, ...]``, or flattened batch dimensions, ``[n, ...]``.
    """
    if stored.ndim != relabelled.ndim:
        batch = relabelled.shape[:-1]
        relabelled = relabelled.view([*batch, *[1] * (stored.ndim - len(batch))])
    if new.shape != stored.shape:
        new = new.reshape(stored.shape)
    if new.dtype != stored.dtype:  # an earlier transform may have changed the dtype of the stored entry
        new = new.to(stored.dtype)
    return torch.where(relabelled, new, stored)
