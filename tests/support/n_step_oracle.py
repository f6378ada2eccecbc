"""The oracle for n-step returns, and a stream in which all of their cases occur."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from support.goals import reward_of
from support.oracle import Oracle, Row, expected_of
from support.streams import Goal, Stream, Transition


class NStepOracle(Oracle):
    """Keeps every lane in a list, and the windows that an n-step transform has released."""

    def __init__(self, stream: Stream):
        super().__init__(stream)
        self.n = stream.n
        self.lanes: list[list[Transition]] = [[] for _ in range(stream.lanes)]
        self.let_out = [0] * stream.lanes  # number of released windows of each lane

    def _windows_of(self, rows: Sequence[Transition]) -> dict[int, list[Transition]]:
        windows = {}
        for row in rows:
            self.lanes[row.trajectory % self.stream.lanes].append(row)
        for lane, steps in enumerate(self.lanes):
            for first in range(self.let_out[lane], len(steps) - self.n):
                window = steps[first : first + self.n]
                ends = [index for index, step in enumerate(window) if step.done]
                windows[steps[first].uid] = window[: ends[0] + 1] if ends else window
                self.let_out[lane] = first + 1
        return windows

    def lose_what_is_held_back(self) -> None:
        """Forget all lanes, as a new n-step transform does."""
        self.let_out = [len(steps) for steps in self.lanes]

    def check(self, sample: TensorDictBase) -> Counter[str]:
        """Check transitions ``[*batch]`` one by one, and count their kinds."""
        count: Counter[str] = Counter()
        for _, goal, row in self._check_rows(sample):
            count[kind_of(goal, row)] += 1
            count["original" if goal is None else "relabelled"] += 1
        return count

    def _expected(self, window: list[Transition], goal: Goal | None) -> Row:
        return expected_in_float32(window, goal, self.stream)


def expected_in_float32(window: Sequence[Transition], goal: Goal | None, stream: Stream) -> Row:
    """Return the result of `expected_of`, with sums that are equal up to rounding."""
    row = expected_of(window, goal, stream.gamma, stream.writes_terminated)
    largest = sum(abs(reward_of(step.outcome, row["desired_goal"])) for step in window)
    row["gamma"] = pytest.approx(row["gamma"], rel=1e-6, abs=1e-6)
    row["next", "reward"] = pytest.approx(row["next", "reward"], rel=0, abs=1e-6 * largest + 1e-6)
    return row


def kind_of(goal: Goal | None, row: Row) -> str:
    """Return the case of a transition, by the oracle's entries."""
    whose = "original" if goal is None else "new goal"
    if row["next", "terminated"]:
        if row["steps_to_next_obs"] == 1:
            return f"{whose}: terminated in the first step"
        return f"{whose}: terminated {'and truncated' if row['next', 'truncated'] else 'on the way'}"
    return f"{whose}: {'truncated' if row['next', 'truncated'] else 'continues'}"


CASES = ("continues", "truncated", "terminated in the first step", "terminated on the way", "terminated and truncated")


def missing(
    count: Counter[str], whose: tuple[str, ...] = ("original", "new goal"), strategy: str = "future"
) -> set[str]:
    """Return the cases that did not occur."""
    cases = {f"{who}: {case}" for who in whose for case in CASES}
    if strategy in ("future", "final"):  # a goal that is ahead is reached before the episode ends
        cases -= {"new goal: truncated"}
    return cases - {case for case, times in count.items() if times}


WALK = Stream(
    n=3,
    gamma=0.9,
    lanes=3,
    chunk=7,
    writes=30,
    lengths=((7, "truncated"), (4, "terminated"), (3, "both"), (1, "truncated")),
    cells=(0, 1, 0, 2, 3, 1, 1, 2),
    layout="[lanes, time] with ids",
    her_ratio=0.8,
)
STREAMS = [
    WALK,
    replace(WALK, strategy="episode", her_ratio=1.0, capacity=40),  # windows whose first steps have left the table
    replace(WALK, cells=None, writes_terminated=False, her_ratio=1.0),
    replace(WALK, n=4, gamma=0.5, lengths=((9, "truncated"), (2, "both")), her_ratio=1.0),
    replace(WALK, compact=True),
]


def check_often(rb: ReplayBuffer, oracle: NStepOracle) -> Counter[str]:
    """Check every transition ten times: goals are drawn at every sample."""
    torch.manual_seed(0)
    return sum((oracle.check(rb[:]) for _ in range(10)), Counter())
