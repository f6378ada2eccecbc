"""What relabelled transitions earn: the reward of one step, or the discounted return of several."""

from __future__ import annotations

import copy
from collections.abc import Callable

import gymnasium
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_her import checks
from torchrl_her.goal_table import GoalTable
from torchrl_her.keys import Keys
from torchrl_her.rewards import GoalReward
from torchrl_her.windows import LAST_FLAGS, flag_keys

# What MultiStepTransform writes besides the reward: how many steps a window has, gamma to that power, whether they
# are several, and the reward of the first.
STEPS = "steps_to_next_obs"
GAMMA = "gamma"
SEVERAL = "nonterminal"
FIRST_REWARD = ("next", "original_reward")
FIRST_ROWS = 64  # of a write, whose rewards are compared with the reward module's


def make_reward(
    reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
    keys: Keys,
    goal_fn: Callable[[Tensor], Tensor] | None,
) -> TensorDictModuleBase:
    """Return a reward module that reads and writes the entries under ``keys``, of a module or a function of goals.

    Raises:
        TypeError: if it is neither.
        ValueError: if the module does not write the reward.
    """
    if isinstance(reward, (EnvBase, gymnasium.Env)):
        raise TypeError("The reward is a module or a function, not an environment: HERTransform(EnvReward(env)).")
    if not isinstance(reward, TensorDictModuleBase):
        reward = GoalReward(reward)
    if isinstance(reward, GoalReward):
        reward = _with_goal_fn(reward, goal_fn)  # another transform may use it with other keys
        reward.set_keys(
            achieved_goal=keys.achieved,
            desired_goal=keys.desired,
            reward=keys.reward[1:],
            terminated=keys.terminated[1:],
        )
    checks.check_out_keys(reward, keys.reward)
    return reward


def _with_goal_fn(reward: GoalReward, goal_fn: Callable[[Tensor], Tensor] | None) -> GoalReward:
    """Return a copy with that function, which may be a module: its transform's, and not registered here, too.

    Copies have one registry of modules in common.
    """
    reward = copy.copy(reward)
    object.__setattr__(reward, "goal_fn", goal_fn)
    return reward


class StepReward:
    """The reward of single steps, and the flags where the reward module tells them.

    Attributes:
        replaced (list of NestedKey): the entries that are set.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: Keys):
        self.reward = reward
        self.keys = keys
        self.recomputed = [key for key in (keys.reward, keys.terminated) if key in reward.out_keys]
        self.replaced = list(self.recomputed)
        if keys.terminated in self.recomputed:
            self.replaced.append(keys.done)
        self._read = [key for key in self.replaced if key in reward.in_keys]
        self._is_computed = type(reward).forward is GoalReward.forward
        self._writes_more = len(reward.out_keys) > len(self.recomputed)

    def check(self, tensordict: TensorDictBase) -> None:
        """Check that the reward module can work on written transitions ``[*batch]``, and earns what they earned.

        Raises:
            KeyError: if an entry that is set is missing.
            ValueError: if the reward has another shape.
        """
        for key in self.replaced:
            checks.get_entry(tensordict, key, "reward_key" if key == self.keys.reward else "done_key")
        rows = tensordict.reshape(-1)
        if self.keys.mask is not None:
            rows = rows[rows.get(self.keys.mask).reshape(-1)]
        # Of one row, a wrong shape can look like the right one.
        rows = rows[:FIRST_ROWS] if len(rows) > 1 else tensordict.reshape(-1)[:1].expand(2)
        with torch.no_grad():
            computed = self.reward(rows.clone())  # the user's function may work in place
        checks.check_reward(computed, rows, self.keys.reward)
        checks.tell_of_other_rewards(computed.get(self.keys.reward), rows.get(self.keys.reward))

    def recompute(self, tensordict: TensorDictBase, relabelled: Tensor, stored: dict[NestedKey, Tensor]) -> None:
        """Set what relabelled transitions, ``bool [*batch, 1]``, earn for their goals; others keep what is stored."""
        for key in self._read:
            tensordict.set(key, stored[key])
        if self._is_computed:  # saves writing what is read again at once
            computed = self.reward.compute(tensordict)
        else:
            computed = self.reward(tensordict.copy() if self._writes_more else tensordict)
        for key in self.recomputed:
            tensordict.set(key, where(relabelled, computed[key].detach(), stored[key]))
        if self.keys.done in stored:
            ended = tensordict.get(self.keys.terminated)
            truncated = tensordict.get(self.keys.truncated, None)
            if truncated is not None:
                ended = ended | truncated
            tensordict.set(self.keys.done, where(relabelled, ended, stored[self.keys.done]))


class NStepReturn:
    """The return of windows of several steps, as ``MultiStepTransform`` makes them, under a new goal.

    The reward module is asked for each outcome in the window. Where it says that one ends the episode, the sum
    stops there. A window also gets the flags of its last step: ``MultiStepTransform`` leaves those of its first,
    and a loss would bootstrap through an end.

    Args:
        reward (TensorDictModuleBase): the reward module, which may read nothing but goals.
        keys (Keys): where the entries stand.

    Raises:
        ValueError: if the reward module reads more, or goals that the table does not hold.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: Keys, has_goal_fn: bool):
        checks.check_reads_goals_alone(reward, {keys.next_achieved, keys.desired, keys.next_desired}, has_goal_fn)
        if isinstance(reward, GoalReward):
            reward = _with_goal_fn(reward, None)  # the goals of the table are mapped already
        self.reward = reward
        self.keys = keys
        self.tells_ends = keys.terminated in reward.out_keys

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the entries that are set."""
        written = [key for key in (GAMMA, SEVERAL, FIRST_REWARD) if tensordict.get(key, None) is not None]
        return [self.keys.reward, STEPS, *written, *flag_keys(tensordict, self.keys)]

    def outcomes(
        self, table: GoalTable, episode: Tensor, step: Tensor, steps: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Return what the steps of windows ``[batch]`` achieved, and which windows are in the table as a whole.

        Args:
            table: the goal table.
            episode: the ids of the windows' episodes.
            step: their first steps in them.
            steps: how many steps they have.
            longest: the most steps that any has.

        Returns:
            Goals ``[batch, longest, *goal]``, the last one of each window repeated, and ``bool [batch]``.
        """
        start, length = table.find(episode)
        ahead = torch.arange(longest, device=step.device).expand(len(step), -1)
        ahead = torch.minimum(ahead, steps.unsqueeze(1) - 1)  # [batch, longest]
        rows = (start + step).unsqueeze(1) + ahead
        goals, owners = table.read(rows.flatten())
        whole = (owners.view_as(rows) == episode.unsqueeze(1)).all(1) & table.start_at(episode, start)
        whole &= step + steps <= length  # behind an episode that fills the table comes its own start
        return goals.view(*rows.shape, *table.goal_shape), whole

    def recompute(
        self,
        tensordict: TensorDictBase,
        relabelled: Tensor,
        stored: dict[NestedKey, Tensor],
        outcomes: Tensor,
        gamma: float,
    ) -> None:
        """Set the returns of relabelled windows, ``bool [*batch, 1]``, and where they end; others get their flags.

        Args:
            tensordict: the sampled batch, with the new goals.
            relabelled: which of its windows have one.
            stored: the entries of `replaced`, as stored.
            outcomes: ``[n, longest, *goal]``, from `outcomes`, with the batch dimensions flattened to one.
            gamma: the discount.
        """
        steps = stored[STEPS].reshape(-1, 1)  # [n, 1]
        rewards, ends = self._evaluate(tensordict.get(self.keys.desired), outcomes)
        ahead = torch.arange(rewards.shape[1], device=steps.device)
        counts = (ahead < steps) & (ends.cumsum(1) - ends.long() == 0)  # up to the first end, and with it
        discounts = gamma ** ahead.double()
        taken = counts.sum(1, keepdim=True)  # [n, 1]
        new = {
            self.keys.reward: torch.where(counts, rewards * discounts, 0).sum(1, keepdim=True),
            FIRST_REWARD: rewards[:, :1],
            STEPS: taken,
            GAMMA: gamma ** taken.double(),
            SEVERAL: taken > 1,
        }
        flags = tensordict.get(LAST_FLAGS).reshape(len(steps), -1).split(1, dim=1)
        last = dict(zip(flag_keys(stored, self.keys), flags, strict=True))
        new |= last
        if self.keys.truncated in last:
            new[self.keys.truncated] = last[self.keys.truncated] & (taken == steps)
        if self.tells_ends:
            new[self.keys.terminated] = ends.any(1, keepdim=True)
            new[self.keys.done] = new[self.keys.terminated] | new.get(self.keys.truncated, False)
        for key, value in stored.items():
            if key in new:
                kept = last[key].view_as(value) if key in last else value
                tensordict.set(key, where(relabelled, new[key], kept))

    def _evaluate(self, desired: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
        """Ask the reward module for each outcome: rewards ``float64 [n, longest]``, and which end the episode."""
        shape, goal_shape = outcomes.shape[:2], outcomes.shape[2:]
        desired = desired.reshape(-1, 1, *goal_shape).expand_as(outcomes).flatten(0, 1)
        steps = TensorDict(batch_size=[shape.numel()], device=outcomes.device)
        for key, goals in (
            (self.keys.next_achieved, outcomes.flatten(0, 1)),
            (self.keys.desired, desired),
            (self.keys.next_desired, desired),
        ):
            steps.set(key, goals)
        with torch.no_grad():
            steps = self.reward(steps)
        rewards = steps.get(self.keys.reward).reshape(shape).double()
        if not self.tells_ends:
            return rewards, torch.zeros_like(rewards, dtype=torch.bool)
        return rewards, steps.get(self.keys.terminated).reshape(shape).bool()


def where(relabelled: Tensor, new: Tensor, stored: Tensor) -> Tensor:
    """Choose by transition, ``bool [*batch, 1]``, between entries ``[*batch, ...]``."""
    if stored.ndim != relabelled.ndim:
        batch = relabelled.shape[:-1]
        relabelled = relabelled.view([*batch, *[1] * (stored.ndim - len(batch))])
    if new.shape != stored.shape:  # new goals come with the batch dimensions flattened to one
        new = new.reshape(stored.shape)
    return torch.where(relabelled, new.to(stored.dtype), stored)  # one listed before may have cast what is stored
