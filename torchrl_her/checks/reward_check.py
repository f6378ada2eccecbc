"""Checks the reward module on written transitions, whose rewards are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.episodes.write import Write
from torchrl_her.keys import STEPS_TO_GOAL, HERKeys
from torchrl_her.rewards.comparisons import agree
from torchrl_her.rewards.goal_reward import ReachedReward

COMPARED_ROWS = 64  # transitions that are compared in one write; the first ones are compared in every write
ENOUGH_COMPARED = 16  # the check ends when this many compared transitions reach their goal and this many miss it
DISTANCES = 2**22  # distances of one write are computed for at most this many components of goals
TRIED = 1000  # if no transition has missed its goal after this many transitions, none is expected to
GOAL_CHANGES = (
    "Its desired goal differs at the root and under 'next', so the two rewards are for different goals. A desired goal "
    "must be constant within an episode: draw it in reset, before the observation is built, and end the episode "
    "(truncated=True) before it changes. Store the last observation of an episode under 'next', not the first one of "
    "the next episode."
)


class RewardCheck:
    """Compares the reward module with stored rewards, until enough reached and missed goals have been compared.

    A goal counts as reached if the stored reward equals the module's reward with the transition's own outcome as its
    goal. This reward must be better than the reward for some other goal; otherwise, reached goals are unknown. The
    first write is compared, then each write with a reward outside the range of earlier ones, and the next write after
    the number of transitions has doubled.

    Attributes:
        reached_reward (float, optional): the reward of a reached goal; None if it is unknown or varies.
        recomputes_ends (bool): whether the reward module writes ``terminated``.
        compares (bool): whether stored and computed rewards should agree.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: HERKeys, *, compares: bool):
        self.reward = reward
        self.keys = keys
        self.reached_reward: float | None = None
        self._is_over = not reward.out_keys  # only goals are relabelled
        self._reads_steps = STEPS_TO_GOAL in reward.in_keys  # written transitions have no such entry
        self.compares = compares
        self.recomputes_ends = keys.next_terminated in reward.out_keys
        is_learned = any(each.requires_grad for each in reward.parameters())
        self._is_learned = is_learned or bool(getattr(reward, "recompute_all", False))
        self._checks_ends = not self.recomputes_ends  # until it is known whether episodes end on success
        self._reached = self._missed = 0  # compared transitions
        self._can_miss = False  # whether another goal than its own outcome gave a transition a worse reward
        self._outcomes: list[Tensor] = []  # compared until a transition has missed its goal
        self._range = (math.inf, -math.inf)  # of stored rewards
        self._written = self._next = 0  # transitions so far, and those at which the next comparison is due

    def on_write(self, tensordict: TensorDictBase, written: Write) -> None:
        """Compare some of the written transitions ``[*batch]``, and warn about differences.

        Raises:
            ValueError: if the reward module writes rewards of another shape, or modifies its input.
        """
        if self._is_over or written.rewards is None:
            return
        values = written.rewards.float().numpy()
        low, high = float(values.min()), float(values.max())
        self._written += len(written.done)
        if self._written < self._next and self._range[0] <= low and high <= self._range[1]:
            return
        if self._reads_steps:
            self._check_values(values)
        else:
            rows, goals = written.rows_of(tensordict), written.goals
            chosen = self._choose(rows, goals)
            self._compare(rows[chosen], goals[chosen], lambda row: written.name(int(chosen[row])))
            if not self._can_miss and self._written < TRIED:
                return  # the next write is compared, too
        self._next = 2 * self._written if self._written >= COMPARED_ROWS else 0
        self._range = min(low, self._range[0]), max(high, self._range[1])

    def _check_values(self, stored: np.ndarray) -> None:
        """Warn if stored rewards have other values than 0 and -1, the rewards of `ReachedReward`."""
        if not isinstance(self.reward, ReachedReward):
            return
        self.reached_reward = 0.0
        others = stored[~np.isin(stored, (0.0, -1.0))]
        if len(others) and self.compares:
            self.compares = False
            warn_user(
                f"ReachedReward gives 0 and -1, and a stored reward is {others.flat[0]:.6g}. Relabelled and original "
                "rewards would be inconsistent: relabel all transitions (her_ratio=1), or pass the environment's own "
                "reward, EnvReward(env)."
            )

    def _choose(self, rows: TensorDictBase, goals: Tensor) -> Tensor:
        """Return up to 64 rows, spread over distances to the goal and over time, with the extreme rewards."""
        count = len(rows)
        if count <= COMPARED_ROWS:
            return torch.arange(count, device=goals.device)
        candidates = torch.arange(0, count, -(-goals.numel() // DISTANCES), device=goals.device)
        order = distances(goals[candidates], rows.get(self.keys.desired_goal)[candidates]).argsort()
        nearest = order[torch.from_numpy(np.geomspace(1, len(order), 30).astype(int) - 1).to(order.device)]
        rewards = rows.get(self.keys.next_reward).reshape(count, -1).sum(1)
        extremes = torch.stack([rewards.argmin(), rewards.argmax()])
        evenly = torch.linspace(0, count - 1, 32, device=goals.device).long()
        return torch.cat([candidates[nearest], extremes, evenly]).unique()

    def _compare(self, rows: TensorDictBase, goals: Tensor, name: Callable[[int], str]) -> None:
        stored = rows.get(self.keys.next_reward).to(goals.device).double().reshape(len(rows), -1)
        computed, best = self._evaluate(rows), self._evaluate(rows, goals)
        if not self._can_miss:
            self._look_for_missed_goals(rows, goals, computed, best, name)
        if not self._can_miss:
            return
        reached = agree(stored, best).all(1)
        self.reached_reward = float(best[0, 0]) if agree(best, best[:1, :1]).all() else None
        if self.compares:
            self._warn_if_rewards_differ(computed, stored, rows, goals, name)
        if self._checks_ends:
            self._warn_if_ends_are_missing(reached, rows.get(self.keys.next_terminated, None))
        self._reached += int(reached.sum())
        self._missed += int((~reached).sum())
        self._is_over = min(self._reached, self._missed) >= ENOUGH_COMPARED

    def _evaluate(self, rows: TensorDictBase, goals: Tensor | None = None) -> Tensor:
        """Return the reward module's rewards of transitions ``[n]``, ``float64 [n, agents]``.

        ``goals``, ``[n, *goal]``, replace the desired goals. An error is raised if the module misbehaves.
        """
        count, stored, rows = len(rows), rows.get(self.keys.next_reward), rows.copy()
        if goals is not None:
            for key in (self.keys.desired_goal, self.keys.next_desired_goal):
                rows.set(key, goals)
        if len(rows) == 1:  # with a single row, a wrong shape can look correct
            rows, stored = rows.expand(2), stored.expand(2, *stored.shape[1:])
        given = rows.clone()
        with torch.no_grad():
            reward = self.reward(given).get(self.keys.next_reward, None)
        if reward is None or reward.numel() != stored.numel() or reward.shape[:1] != stored.shape[:1]:
            got = "nothing" if reward is None else f"the shape {tuple(reward.shape)}"
            several = stored.numel() > len(rows)
            raise ValueError(
                f"The reward module wrote {got} under {self.keys.next_reward!r}, but stored rewards have the shape "
                f"{tuple(stored.shape)}: it must write rewards of this shape."
                + (" For one reward per agent, pass a TensorDictModule that writes all rewards." if several else "")
            )
        for key in self.reward.in_keys:
            before, after = rows.get(key, None), given.get(key, None)
            if key not in self.reward.out_keys and isinstance(before, Tensor) and not _same(before, after):
                raise ValueError(
                    f"The reward module modified its input {key!r}, so goals and rewards of a sample would be "
                    "inconsistent: work on a copy (.clone() of a tensor, .copy() of an array)."
                )
        return reward[:count].to(stored.device).double().reshape(count, -1)

    def _look_for_missed_goals(
        self, rows: TensorDictBase, goals: Tensor, computed: Tensor, best: Tensor, name: Callable[[int], str]
    ) -> None:
        """Find out whether the transitions get a better reward for their own outcome than for another goal."""
        kept = self._outcomes  # other threads may write, and replace the list, at the same time
        kept.append(goals)
        outcomes, rewards = torch.cat(list(kept)), computed
        others = outcomes.roll(len(outcomes) // 2, 0)[-len(goals) :]
        if not is_better(best, computed).any():
            rewards = self._evaluate(rows, others)
        self._can_miss = bool(is_better(best, rewards).any())
        if not self._can_miss and self._written < TRIED:
            return
        self._outcomes = []
        apart = torch.cat([distances(goals, each) for each in (rows.get(self.keys.desired_goal), others)])
        if self._can_miss or self._is_learned or not apart.any():
            return
        self._is_over = True
        row = int(apart.argmax())
        own, other = row % len(rows), torch.cat([computed, rewards])[row]
        warn_user(
            "The reward module gives no transition a better reward for reaching its goal than for missing it: "
            f"{_number(best[own])} for {name(own)} with its own outcome as its goal, and {_number(other)} with a goal "
            f"that is {float(apart[row]):.4g} away. Possible causes: it ignores the desired goal (compute_reward reads "
            "self.goal instead of desired_goal); its sign is wrong; its threshold is so small or so large that no goal "
            "or every goal is reached; or achieved and desired goals have different units or frames of reference. "
            "check_goal_env(env) finds the cause."
        )

    def _warn_if_rewards_differ(
        self, computed: Tensor, stored: Tensor, rows: TensorDictBase, goals: Tensor, name: Callable[[int], str]
    ) -> None:
        moved = ~_unchanged(rows, self.keys.achieved_goal, self.keys.next_achieved_goal).to(goals.device)
        differs = ~agree(computed, stored) & moved[:, None]  # otherwise, the goals under "next" can be wrong
        of_row = differs.any(1)
        if not of_row.any():
            return
        self.compares = False
        has_one_goal = _unchanged(rows, self.keys.desired_goal, self.keys.next_desired_goal).to(goals.device)
        row = int((of_row.byte() * 2 + has_one_goal.byte()).argmax())  # first choice: a transition with one goal
        agent = int(differs[row].nonzero()[0])
        apart = float(distances(goals, rows.get(self.keys.desired_goal))[row])
        warn_user(
            f"The reward module gives {_number(computed[row, agent])} for a transition whose stored reward is "
            f"{_number(stored[row, agent])} ({name(row)}); its achieved and desired goal are {apart:.4g} apart. "
            f"{self._advice(rows) if has_one_goal[row] else GOAL_CHANGES}"
        )

    def _advice(self, rows: TensorDictBase) -> str:
        for key in getattr(self.reward, "info_keys", ()):
            under_next = unravel_key(("next", key))
            if rows.get(under_next, None) is not None:
                return f"info_keys names {key!r}, which belongs to the previous step: use {under_next!r}."
        return (
            "Relabelled and original rewards would be inconsistent. Use the environment's own reward, EnvReward(env), "
            "of an environment with the settings (reward_type, ...) of the one that collects, and place transforms "
            "that scale rewards or normalize goals after the hindsight transform, in the buffer. If step and "
            "compute_reward of the environment differ, check_goal_env(env) shows how. For a learned reward, pass "
            "recompute_all=True, as in GoalReward(reward_fn, recompute_all=True)."
        )

    def _warn_if_ends_are_missing(self, reached: Tensor, terminated: Tensor | None) -> None:
        if terminated is None or not reached.any():
            return
        self._checks_ends = False
        ended = terminated.reshape(len(reached), -1).any(1).to(reached.device)
        if ended[reached].all():
            warn_user(
                "The environment ends an episode when its goal is reached, and the reward module does not recompute "
                f"{self.keys.next_terminated!r}: a relabelled transition that reaches its new goal would not be "
                "terminated, and the loss would bootstrap from the state after it. Pass terminated_fn=lambda achieved, "
                "desired: ... to EnvReward, SparseReward or GoalReward."
            )


def distances(achieved: Tensor, desired: Tensor) -> Tensor:
    """Return the Euclidean distances of goals ``[n, *goal]``, ``float32 [n]``."""
    return torch.linalg.vector_norm((achieved.float() - desired.float()).reshape(len(achieved), -1), dim=1)


def _unchanged(rows: TensorDictBase, key: NestedKey, next_key: NestedKey) -> Tensor:
    """Return which transitions ``[n]`` have the same entry at the root and under ``"next"``, ``bool [n]``."""
    return (rows.get(key) == rows.get(next_key)).reshape(len(rows), -1).all(1)


def _number(value: Tensor) -> str:
    return f"{float(value.reshape(-1)[0]) + 0.0:.6g}"  # + 0.0 turns -0 into 0


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one != one)).all())


def is_better(reward: Tensor, other: Tensor) -> Tensor:
    """Return whether a reward is higher than another one by more than a rounding error, ``bool [n]``.

    Both are ``[n, agents]``; one agent is enough.
    """
    return ((reward > other) & ~torch.isclose(reward, other, rtol=1e-6, atol=0.0)).any(1)
