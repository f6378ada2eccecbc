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
from torchrl_her.checks.continuity import ContinuityCheck
from torchrl_her.episodes.write import Write, map_goals
from torchrl_her.keys import STEPS_TO_GOAL, HERKeys, get_entry
from torchrl_her.rewards.comparisons import agree, are_discrete
from torchrl_her.rewards.goal_reward import ReachedReward

COMPARED_ROWS = 64  # transitions that are compared in one write; the first ones are compared in every write
ENOUGH_COMPARED = 16  # the check ends when this many compared transitions reach their goal and this many miss it
DISTANCES = 2**22  # distances of one write are computed for at most this many components of goals
# If no transition has missed its goal after this many different desired goals or transitions, none is expected to.
TRIED_GOALS, TRIED_TRANSITIONS = 8, 2000
ENOUGH_MOVED = 32  # transitions that move the achieved goal are judged together when there are this many
PART = 100  # a goal at this part of a step should be reached
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
        step_length (float, optional): the median distance by which a step moves the achieved goal, if most goals at a
            hundredth of a step from an outcome are missed. Only the transition that achieved such a goal can reach it.
    """

    def __init__(
        self,
        reward: TensorDictModuleBase,
        keys: HERKeys,
        continuity: ContinuityCheck,
        *,
        compares: bool,
        goal_fn: Callable[[Tensor], Tensor] | None,
    ):
        self.reward = reward
        self.keys = keys
        self._continuity = continuity
        self.goal_fn = goal_fn
        self.reached_reward: float | None = None
        self._is_over = not reward.out_keys  # only goals are relabelled
        self._reads_steps = STEPS_TO_GOAL in reward.in_keys  # written transitions have no such entry
        self.compares = compares
        self.step_length: float | None = None
        # Transitions that move the achieved goal, with the goals achieved before and after, until they are judged.
        self._moved: list[tuple[TensorDictBase, Tensor, Tensor]] | None = []
        self.recomputes_ends = keys.next_terminated in reward.out_keys
        is_learned = any(each.requires_grad for each in reward.parameters())
        self._is_learned = is_learned or bool(getattr(reward, "recompute_all", False))
        self._checks_ends = not self.recomputes_ends  # until it is known whether episodes end on success
        self._reached = self._missed = 0  # compared transitions
        self._can_miss = False  # whether another goal than its own outcome gave a transition a worse reward
        # The desired goals and the outcomes that were compared until a transition has missed its goal.
        self._desired: set[bytes] = set()
        self._outcomes: list[Tensor] = []
        self._waiting: str | None = None  # a warning that is issued unless the achieved goals are wrong
        self._range = (math.inf, -math.inf)  # of stored rewards
        self._written = self._next = 0  # transitions so far, and those at which the next comparison is due

    def on_write(self, tensordict: TensorDictBase, written: Write) -> None:
        """Compare some of the written transitions ``[*batch]``, and warn about differences.

        Raises:
            KeyError: if there is no reward.
            ValueError: if the reward module writes rewards of another shape, or modifies its input.
        """
        if self._is_over:
            return
        if written.rewards is None:
            get_entry(tensordict, self.keys.next_reward, "reward")  # raises the error
        assert written.rewards is not None
        if self._moved is not None and not self._reads_steps:
            self._check_threshold(tensordict, written)
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
            if not self._can_miss and not self._has_tried_enough():
                return  # the next write is compared, too
        self._next = 2 * self._written if self._written >= COMPARED_ROWS else 0
        self._range = min(low, self._range[0]), max(high, self._range[1])

    def _check_threshold(self, tensordict: TensorDictBase, written: Write) -> None:
        """Keep transitions that move the achieved goal until there are enough of them, then judge the threshold."""
        kept, goals = self._moved, written.goals  # other threads may write, and replace the list, at the same time
        moved = (written.start != written.outcome).nonzero()[0]
        if kept is None or not len(moved):
            return
        if not goals.is_floating_point():
            self._moved = None
            return
        index = torch.from_numpy(moved[:: -(-len(moved) // COMPARED_ROWS)]).to(goals.device)
        rows, after = written.rows_of(tensordict)[index], goals[index]
        before = map_goals(rows.get(self.keys.achieved_goal), self.goal_fn).detach().to(goals.dtype)
        has_moved = (before != after).reshape(len(rows), -1).any(1)
        kept.append((rows[has_moved].clone(), before[has_moved], after[has_moved]))
        if sum(len(each) for *_, each in kept) >= ENOUGH_MOVED:
            self._moved = None
            self._judge_threshold(list(kept))

    def _judge_threshold(self, kept: list[tuple[TensorDictBase, Tensor, Tensor]]) -> None:
        """Find out whether goals at a hundredth of a step from the outcomes are missed.

        Discrete goals are not judged, because they can be reached exactly.
        """
        before, after = (torch.cat([each[place] for each in kept]).double() for place in (1, 2))
        steps = (after - before).reshape(len(before), -1)
        if are_discrete(steps, after.view_as(steps)):
            return
        missed = near_missed = 0
        for rows, start, outcome in kept:
            far, near = self._evaluate(rows), self._evaluate(rows, outcome + (start - outcome) / PART)
            is_missed = is_better(self._evaluate(rows, outcome), far)
            missed += int(is_missed.sum())
            near_missed += int((is_missed & ~is_better(near, far)).sum())
        if near_missed > missed / 2:
            self.step_length = float(steps.norm(dim=1).median())

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

    def _has_tried_enough(self) -> bool:
        """Return whether another goal than a transition's own outcome should have given a worse reward by now."""
        return len(self._desired) >= TRIED_GOALS or self._written >= TRIED_TRANSITIONS

    def _look_for_missed_goals(
        self, rows: TensorDictBase, goals: Tensor, computed: Tensor, best: Tensor, name: Callable[[int], str]
    ) -> None:
        """Find out whether the transitions get a better reward for their own outcome than for another goal."""
        kept = self._outcomes  # other threads may write, and replace the list, at the same time
        kept.append(goals)
        outcomes, desired, rewards = torch.cat(list(kept)), rows.get(self.keys.desired_goal), computed
        others = outcomes.roll(len(outcomes) // 2, 0)[-len(goals) :]
        if not is_better(best, computed).any():
            rewards = self._evaluate(rows, others)
        self._can_miss = bool(is_better(best, rewards).any())
        if self._can_miss:
            self._desired, self._outcomes = set(), []
            return
        values = desired.reshape(len(rows), -1).contiguous().view(torch.uint8).numpy(force=True)
        self._desired.update(goal.tobytes() for goal in values)
        if not self._has_tried_enough():
            return
        self._outcomes = []
        apart = torch.cat([distances(goals, each) for each in (desired, others)])
        if self._is_learned or not apart.any():
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
        differs = ~agree(computed, stored)
        of_row = differs.any(1)
        if not bool(of_row.any()):
            return
        self.compares = False
        has_one_goal = _unchanged(rows, self.keys.desired_goal, self.keys.next_desired_goal).to(goals.device)
        unmoved = _unchanged(rows, self.keys.achieved_goal, self.keys.next_achieved_goal).to(goals.device)
        row = int((of_row.byte() * 2 + has_one_goal.byte()).argmax())  # first choice: a transition with one goal
        agent = int(differs[row].nonzero()[0])
        distance = float(distances(goals[row : row + 1], rows[row : row + 1].get(self.keys.desired_goal)))
        message = (
            f"The reward module gives {_number(computed[row, agent])} for a transition whose stored reward is "
            f"{_number(stored[row, agent])} ({name(row)}); its achieved and desired goal are {distance:.4g} apart. "
        )
        if not has_one_goal[row]:
            warn_user(message + GOAL_CHANGES)
            return
        message += f"Relabelled and original rewards would be inconsistent. {self._advice(rows)}"
        if unmoved[of_row].all():
            self._waiting = message + " In this transition, the achieved goal is the same at the root and under 'next'."
        else:
            warn_user(message)

    def on_tracked(self) -> None:
        """Issue the warning that waits until it is known whether transitions continue each other, if they do."""
        if self._waiting is None or self._continuity.is_broken is None:
            return
        message, self._waiting = self._waiting, None
        if not self._continuity.is_broken:
            warn_user(message)

    def _advice(self, rows: TensorDictBase) -> str:
        for key in getattr(self.reward, "info_keys", ()):
            under_next = unravel_key(("next", key))
            if rows.get(under_next, None) is not None:
                return f"info_keys names {key!r}, which belongs to the previous step: use {under_next!r}."
        return (
            "Use the environment's own reward, EnvReward(env), of an environment with the settings (reward_type, ...) "
            "of the one that collects, and place transforms that scale rewards or normalize goals after the hindsight "
            "transform, in the buffer. If step and compute_reward of the environment differ, check_goal_env(env) shows "
            "how. For a learned reward, pass recompute_all=True to the reward module, such as GoalReward(reward_fn, "
            "recompute_all=True)."
        )

    def _warn_if_ends_are_missing(self, reached: Tensor, terminated: Tensor | None) -> None:
        if terminated is None:
            self._checks_ends = False
            return
        ended = terminated.reshape(len(reached), -1).any(1).to(reached.device)
        if bool((reached & ~ended).any()):
            self._checks_ends = False
        elif bool((reached & ended).any()):
            self._checks_ends = False
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
