"""Hindsight in plain Python: every transition in a dictionary, and the goals that it may get.

The oracle reads no stamps of the package: each transition carries its ``uid``. A *part* is what the package may treat
as one episode: it ends with a done flag, after ``max_episode_steps`` and at a flush.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tensordict import TensorDictBase

from support.goals import reward_of
from support.world import FLAGS, Goal, Transition

# The entries that MultiStepTransform adds.
N_STEP_ENTRIES = ("steps_to_next_obs", "gamma", "nonterminal", ("next", "original_reward"))


def _evenly(steps: Sequence[int]) -> dict[int, float]:
    return dict.fromkeys(steps, 1 / len(steps))


def geometric_steps(t: int, T: int, discount: float = 0.5) -> dict[int, float]:
    """Return the probability of each step for a geometric distribution of steps after step t."""
    ahead = {j: (1 - discount) * discount ** (j - t - 1) for j in range(t + 1, T - 1)}
    return ahead | {T - 1: 1 - sum(ahead.values())}


def truncated_geometric_steps(t: int, T: int, discount: float) -> dict[int, float]:
    """Return the probability of each step if it decreases geometrically from step t to the end."""
    weights = {j: discount ** (j - t) for j in range(t, T)}
    return {j: weight / sum(weights.values()) for j, weight in weights.items()}


# The probability of each step from which a strategy draws the goal of step t, in an episode with T steps.
STEPS: dict[str, Callable[[int, int], dict[int, float]]] = {
    "current": lambda t, T: {t: 1.0},
    "future": lambda t, T: _evenly(range(t, T)),
    "later": lambda t, T: _evenly(range(t + 1, T) or [t]),
    "geometric": geometric_steps,  # with the discount 0.5
    "final": lambda t, T: {T - 1: 1.0},
    "episode": lambda t, T: _evenly(range(T)),
}


@dataclass
class Part:
    """Consecutive transitions of one environment."""

    rows: list[Transition] = field(default_factory=list)
    ended: bool = False
    lost: bool = False  # whether its goals were dropped, by clear()
    may_be_split: bool = False  # whether it waited so long that the package may have split it
    written: int = 0  # the number of transitions of all environments up to its last one

    def lengths(self, step: int) -> range:
        """Return the possible numbers of steps, of a part that contains a step."""
        longest = len(self.rows)
        return range(step + 1 if self.may_be_split else longest, longest + 1)


class Oracle:
    """Records writes, and checks samples.

    Args:
        members: the names of the strategies of which each transition gets one, with their probabilities.
        capacity: the capacity of the goal table.
        her_ratio: the share of relabelled transitions.
        max_episode_steps: the number of steps after which an episode is cut.
        n_steps: the number of steps of the returns; 1 without a MultiStepTransform.
        gamma: the discount of n-step returns.
        terminates: whether a transition ends if it reaches its new goal.
        reward: the reward of an outcome and a new goal.
    """

    def __init__(
        self,
        members: dict[str, float],
        capacity: int,
        her_ratio: float = 1.0,
        max_episode_steps: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.9,
        terminates: bool = True,
        reward: Callable[[Goal, Goal], float] = reward_of,
    ):
        self.members, self.capacity, self.her_ratio = members, capacity, her_ratio
        self.max_episode_steps = max_episode_steps
        self.n_steps, self.gamma, self.terminates, self.reward = n_steps, gamma, terminates, reward
        self.count = 0
        self.order: list[Transition] = []  # all transitions, as they were written
        self.parts: list[Part] = []
        self.running: dict[int, Part] = {}  # by environment
        self.place: dict[int, tuple[Part, int]] = {}  # of each uid: its part, and its step there
        self.number: dict[int, int] = {}  # of each uid: how many transitions were written before
        self.windows: dict[int, list[Transition]] = {}  # of each uid that is stored
        self._held: dict[int, list[Transition]] = {}  # by environment: steps whose windows are incomplete

    def write(self, rows: Sequence[Transition]) -> None:
        """Record the transitions of one write."""
        for number, row in enumerate(rows, self.count):
            self.number[row.uid] = number
            part = self.running.get(row.env)
            if part is None or part.rows[-1].episode != row.episode:  # also after a silent reset
                part = self.running[row.env] = Part(written=self.count)
                self.parts.append(part)
            elif self.count - part.written >= self.capacity // 2:
                part.may_be_split = True
            self.place[row.uid] = part, len(part.rows)
            part.rows.append(row)
            is_cut = len(part.rows) == self.max_episode_steps and not part.may_be_split
            if row.done or is_cut:
                self.running.pop(row.env).ended = True
        self.count += len(rows)
        for part in self.running.values():
            if part.rows[-1] in rows:
                part.written = self.count
        self.order += rows
        self._release_windows(rows)

    def _release_windows(self, rows: Sequence[Transition]) -> None:
        """Record the windows that a write completes. A window ends with its episode."""
        for row in rows:
            held = self._held.setdefault(row.env, [])
            held.append(row)
        for held in self._held.values():
            while len(held) > (self.n_steps if self.n_steps > 1 else 0):
                window = held[: self.n_steps]
                ends = [number for number, step in enumerate(window) if step.done]
                self.windows[held.pop(0).uid] = window[: ends[0] + 1] if ends else window

    def flush(self) -> None:
        """End the running episodes."""
        for part in self.parts:
            part.ended = True
        self.running.clear()
        self._held.clear()

    def lose_held_steps(self) -> None:
        """Forget the steps whose windows are incomplete: checkpoints do not contain them."""
        self._held.clear()

    def clear(self) -> None:
        """Forget all goals."""
        self.flush()
        for part in self.parts:
            part.lost = True

    # Checks

    def goals(self, uid: int) -> set[Goal]:
        """Return the goals that a transition may get."""
        part, step = self.place[uid]
        goals: set[Goal] = set()
        for member in self.members:
            if member == "random":
                goals |= {row.outcome for other in self.parts if not other.lost for row in other.rows}
            elif member == "past_desired":
                others = [other for other in self.parts if other is not part or part.may_be_split]
                goals |= {row.desired for other in others if not other.lost for row in other.rows}
            else:
                goals |= {part.rows[j].outcome for T in part.lengths(step) for j in STEPS[member](step, T)}
        return set() if part.lost else goals

    def probabilities(self, uid: int) -> dict[Goal, float] | None:
        """Return the probability of each goal of a relabelled transition, or None if it is not known exactly."""
        part, step = self.place[uid]
        parts = [each for each in self.parts if not each.lost]
        if part.lost or part.may_be_split or self.count > self.capacity:
            return None
        goals: dict[Goal, float] = defaultdict(float)
        for member, weight in self.members.items():
            if member in STEPS:
                steps = STEPS[member](step, len(part.rows))
                drawn = [(part.rows[j].outcome, probability) for j, probability in steps.items()]
            else:
                chosen = parts if member == "random" else [each for each in parts if each is not part]
                rows = [row for each in chosen for row in each.rows]
                if len(rows) < 0.7 * sum(len(each.rows) for each in parts):
                    return None  # the draws of another episode can fail
                drawn = [(row.outcome if member == "random" else row.desired, 1 / len(rows)) for row in rows]
            for goal, probability in drawn:
                goals[goal] += weight * probability
        return {goal: probability for goal, probability in goals.items() if probability}

    def is_in_one_part(self, uid: int) -> bool:
        """Return whether the goal table can contain the whole window of a transition."""
        return all(self.place[step.uid][0] is self.place[uid][0] for step in self.windows[uid])

    def must_be_relabelled(self, uid: int) -> bool:
        """Return whether a transition must get a new goal, because the table holds all goals that it may get."""
        part, _ = self.place[uid]
        if self.her_ratio < 1 or part.lost or "past_desired" in self.members or not self.is_in_one_part(uid):
            return False
        if self.count <= self.capacity:
            return True
        # The goals of this step and later ones are among the newest, and the table still knows the episode.
        looks_ahead = self.members.keys().isdisjoint(("episode", "random"))
        is_new = self.number[uid] >= self.count - self.capacity
        return looks_ahead and is_new and not part.may_be_split and len(self.parts) <= self.capacity

    def check(self, sample: TensorDictBase, stored: dict[int, dict[Any, Any]], decode: Callable[[Any], Any]) -> int:
        """Check transitions ``[n]``, given all entries of those written; return how many are relabelled."""
        relabelled = sample["hindsight", "relabelled"]
        assert relabelled.shape == (*sample.batch_size, 1)
        desired = [tuple(goal) for goal in decode(sample["desired_goal"]).tolist()]
        assert [tuple(goal) for goal in decode(sample["next", "desired_goal"]).tolist()] == desired
        keys = [*next(iter(stored.values())), *(N_STEP_ENTRIES if self.n_steps > 1 else ())]
        for number, row in enumerate(rows_of(sample, ["uid", *keys])):
            uid = row.pop("uid")
            window, goal = self.windows[uid], desired[number]
            if not relabelled[number]:
                assert not self.must_be_relabelled(uid), f"{window} was not relabelled"
                assert self.her_ratio < 1 or goal == window[0].desired
                goal = window[0].desired
            else:
                assert self.her_ratio > 0
                assert goal in self.goals(uid), f"{window} got {goal}, which is none of {self.goals(uid)}"
                assert self.is_in_one_part(uid), f"{window} continues in another part"
            assert desired[number] == goal
            expected = stored[uid] | self._changed(window, goal, bool(relabelled[number]), stored)
            del row["desired_goal"], row["next", "desired_goal"]
            assert row == {key: expected[key] for key in row}, f"{window} with the goal {goal}"
        return int(relabelled.sum())

    def _changed(self, window: list[Transition], goal: Goal, new: bool, stored: dict[int, Any]) -> dict[Any, Any]:
        """Return the entries that differ from those written, for the original or a new goal."""
        reached = [new and self.terminates and step.outcome == goal for step in window]
        count = reached.index(True) + 1 if True in reached else len(window)
        last = window[-1]
        terminated = reached[count - 1] if new and self.terminates else last.terminated
        truncated = last.truncated and count == len(window)
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        changed: dict[Any, Any] = {("next", key): (flags[key],) for key in FLAGS}
        rewards = [(self.reward if new else reward_of)(step.outcome, goal) for step in window[:count]]
        if self.n_steps == 1:
            return changed | ({("next", "reward"): (rewards[0],)} if new else {})
        total = sum(self.gamma**number * reward for number, reward in enumerate(rewards))
        changed |= {("next", key): stored[last.uid]["next", key] for key in ("observation", "achieved_goal")}
        return changed | {
            ("next", "reward"): (pytest.approx(total, rel=1e-4, abs=1e-3),),
            ("next", "original_reward"): (rewards[0],),
            "steps_to_next_obs": count,
            "gamma": pytest.approx(self.gamma**count),
            "nonterminal": count > 1,
        }


def rows_of(data: TensorDictBase, keys: Iterable[Any]) -> list[dict[Any, Any]]:
    """Return transitions ``[n]`` as dictionaries of tuples, and of numbers for entries ``[n]``."""
    columns = {key: data[key] for key in keys}
    lists = {
        key: values.tolist() if values.ndim == 1 else [tuple(row) for row in values.flatten(1).tolist()]
        for key, values in columns.items()
    }
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
