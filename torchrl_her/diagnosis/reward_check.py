"""Checks the reward module on written transitions, whose rewards are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_her._torchrl import warn_user
from torchrl_her.episodes.transitions import WrittenTransitions
from torchrl_her.keys import STEPS_TO_GOAL, HERKeys, get_entry
from torchrl_her.rewards.comparisons import agree
from torchrl_her.rewards.reached_reward import ReachedReward

ROWS = 64  # transitions that are compared in one write
ENOUGH = 16  # the check ends when this many compared transitions reach their goal and this many miss it
DISTANCES = 2**22  # distances of one write are computed for at most this many components of goals


class RewardCheck:
    """Compares the reward module with stored rewards, until enough reached and missed goals have been compared.

    A goal counts as reached if the stored reward equals the module's reward with the transition's own outcome as its
    goal. The first write is compared, then each write with a reward outside the range of earlier ones, and the next
    write after the number of transitions has doubled.

    Attributes:
        reached_reward (float, optional): the reward of a reached goal; None if it is unknown or varies.
        recomputes_ends (bool): whether the reward module writes ``terminated``.
        compares (bool): whether stored and computed rewards should agree.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: HERKeys, *, compares: bool = True):
        self.reward = reward
        self.keys = keys
        self.reached_reward: float | None = None
        self._is_over = False
        self.compares = compares
        self.recomputes_ends = keys.terminated in reward.out_keys
        self._checks_ends = not self.recomputes_ends  # until it is known whether episodes end on success
        self._reached = self._missed = 0  # compared transitions
        self._range = (math.inf, -math.inf)  # of stored rewards
        self._written = self._next = 0  # transitions so far, and those at which the next comparison is due

    def check(self, tensordict: TensorDictBase, written: WrittenTransitions) -> None:
        """Compare some of the written transitions ``[*batch]``, and warn about differences.

        Raises:
            KeyError: if there is no reward.
            ValueError: if the reward module writes rewards of another shape, or modifies its input.
        """
        if self._is_over or not len(written.done):
            return
        stored = get_entry(tensordict, self.keys.reward, "reward_key")
        values = stored.float().numpy(force=True)
        if written.mask is not None:
            values = values.reshape(len(written.mask), -1)[written.mask]
        low, high = float(values.min()), float(values.max())
        self._written += len(written.done)
        if self._written < self._next and self._range[0] <= low and high <= self._range[1]:
            return
        self._next = 2 * self._written
        self._range = min(low, self._range[0]), max(high, self._range[1])
        if STEPS_TO_GOAL in self.reward.in_keys:  # written transitions have no such entry
            self._check_values(values)
            return

        rows, goals = written.rows_of(tensordict), written.goals
        chosen = self._choose(rows, goals)
        rows, goals = rows[chosen], goals[chosen]
        if len(rows) == 1:  # with a single row, a wrong shape can look correct
            rows, goals, chosen = rows.expand(2), goals.expand(2, *goals.shape[1:]), chosen.expand(2)
        self._compare(rows, goals, lambda row: written.name(int(chosen[row])))

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
        if count <= ROWS:
            return torch.arange(count, device=goals.device)
        candidates = torch.arange(0, count, -(-goals.numel() // DISTANCES), device=goals.device)
        order = distances(goals[candidates], rows.get(self.keys.desired)[candidates]).argsort()
        nearest = order[torch.from_numpy(np.geomspace(1, len(order), 30).astype(int) - 1).to(order.device)]
        rewards = rows.get(self.keys.reward).reshape(count, -1).sum(1)
        extremes = torch.stack([rewards.argmin(), rewards.argmax()])
        evenly = torch.linspace(0, count - 1, 32, device=goals.device).long()
        return torch.cat([candidates[nearest], extremes, evenly]).unique()

    def _compare(self, rows: TensorDictBase, goals: Tensor, name: Callable[[int], str]) -> None:
        computed, stored = self._evaluate(rows), rows.get(self.keys.reward)
        own = rows.copy()
        for key in (self.keys.desired, self.keys.next_desired):
            own.set(key, goals)
        best, computed, stored = (
            each.to(goals.device).double().reshape(len(rows), -1) for each in (self._evaluate(own), computed, stored)
        )
        reached = agree(stored, best).all(1)
        self.reached_reward = float(best[0, 0]) if agree(best, best[:1, :1]).all() else None
        if self.compares:
            self._warn_if_rewards_differ(computed, stored, rows, goals, name)
        if self._checks_ends:
            self._warn_if_ends_are_missing(reached, rows.get(self.keys.terminated, None))
        self._reached += int(reached.sum())
        self._missed += int((~reached).sum())
        self._is_over = min(self._reached, self._missed) >= ENOUGH

    def _evaluate(self, rows: TensorDictBase) -> Tensor:
        """Return the reward module's rewards of transitions ``[n]``, or raise an error if it misbehaves."""
        given = rows.clone()
        with torch.no_grad():
            reward = self.reward(given).get(self.keys.reward, None)
        stored = rows.get(self.keys.reward)
        if reward is None or reward.numel() != stored.numel() or reward.shape[:1] != stored.shape[:1]:
            got = "nothing" if reward is None else f"the shape {tuple(reward.shape)}"
            several = stored.numel() > len(rows)
            raise ValueError(
                f"The reward module wrote {got} under {self.keys.reward!r}, but stored rewards have the shape "
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
        return reward

    def _warn_if_rewards_differ(
        self, computed: Tensor, stored: Tensor, rows: TensorDictBase, goals: Tensor, name: Callable[[int], str]
    ) -> None:
        differs = ~agree(computed, stored)
        if not bool(differs.any()):
            return
        self.compares = False
        row, agent = differs.nonzero()[0].tolist()
        distance = float(distances(goals[row : row + 1], rows[row : row + 1].get(self.keys.desired)))
        warn_user(
            f"The reward module gives {computed[row, agent]:.6g} for a transition whose stored reward is "
            f"{stored[row, agent]:.6g} ({name(row)}); its achieved and desired goal are {distance:.4g} apart. "
            f"Relabelled and original rewards would be inconsistent. {self._advice(rows)}"
        )

    def _advice(self, rows: TensorDictBase) -> str:
        for key in getattr(self.reward, "info_keys", ()):
            under_next = unravel_key(("next", key))
            if rows.get(under_next, None) is not None:
                return f"info_keys names {key!r}, which belongs to the previous step: use {under_next!r}."
        return (
            "Use the environment's own reward, EnvReward(env), with goals in its units: place transforms that scale "
            "rewards or normalize goals after the hindsight transform, in the buffer. For a learned reward, pass "
            "recompute_all_rewards=True to HERTransform."
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
                f"{self.keys.terminated!r}: a relabelled transition that reaches its new goal would not be "
                "terminated, and the loss would bootstrap from the state after it. Pass terminated_fn=lambda achieved, "
                "desired: ... to EnvReward, SparseReward or GoalReward."
            )


def distances(achieved: Tensor, desired: Tensor) -> Tensor:
    """Return the Euclidean distances of goals ``[n, *goal]``, ``float32 [n]``."""
    return torch.linalg.vector_norm((achieved.float() - desired.float()).reshape(len(achieved), -1), dim=1)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one != one)).all())
