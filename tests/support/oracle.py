"""A slow oracle in plain Python: the goals that a transition may get, and its entries with each of them.

It keeps every episode in a list and does not read the stamps of the package: each transition carries its ``uid``.
`Oracle` checks single steps, `NStepOracle` n-step returns, and `AugmentationOracle` hindsight at write time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDictBase

from support.factories import assert_same, filled, make_buffer
from support.goals import reached, reward_of
from support.streams import ROOT_FLAGS, Goal, Stream, Transition, write
from torchrl_her.episodes import tracker

Row = dict[Any, Any]


def expected_of(
    window: Sequence[Transition],
    goal: Goal | None = None,
    gamma: float | None = None,
    writes_terminated: bool = True,
) -> Row:
    """Return the entries of a transition: a single step, or the window of an n-step return with the discount ``gamma``.

    ``goal`` is the new goal, or None if the transition is not relabelled. With ``writes_terminated``, reaching it
    terminates the episode.
    """
    first, last = window[0], window[-1]
    desired = first.desired if goal is None else goal
    total, count, stops = 0.0, 0, False
    for step in window:
        total += (1.0 if gamma is None else gamma) ** count * reward_of(step.outcome, desired)
        count += 1
        if goal is not None and writes_terminated and reached(step.outcome, goal):
            stops = True
            break
    terminated = last.terminated if goal is None or not writes_terminated else stops
    truncated = last.truncated and count == len(window)
    row: Row = {
        "uid": first.uid,
        "observation": first.observation,
        "achieved_goal": first.achieved,
        "desired_goal": desired,
        **dict.fromkeys(ROOT_FLAGS, False),
        ("next", "observation"): last.next_observation,
        ("next", "achieved_goal"): last.outcome,
        ("next", "desired_goal"): desired,
        ("next", "reward"): total,
        ("next", "terminated"): terminated,
        ("next", "truncated"): truncated,
        ("next", "done"): terminated or truncated,
    }
    if gamma is not None:
        row |= {
            "steps_to_next_obs": count,
            "gamma": gamma**count,
            "nonterminal": count > 1,  # TorchRL's name for a window of several steps
            ("next", "original_reward"): reward_of(first.outcome, desired),
        }
    return row


_ANY = Transition(0, 0, 0, 0, (0, 0), (0, 1), (0, -1), False, False)
ENTRIES = list(expected_of([_ANY]))
N_STEP_ENTRIES = list(expected_of([_ANY], gamma=1.0))
RELABELLED = ("hindsight", "relabelled")


def allowed_steps(strategy: str, step: int, length: int) -> range:
    """Return the steps of the episode whose outcomes a transition may get as its new goal."""
    return range({"future": step, "final": length - 1, "episode": 0}[strategy], length)


def as_dicts(sample: TensorDictBase, keys: Iterable[Any]) -> list[Row]:
    """Return transitions ``[*batch]`` as dictionaries of tuples (vectors) and numbers."""
    rows = sample.reshape(-1)
    columns = {}
    for key in keys:
        values = rows[key].reshape(len(rows), -1).tolist()
        columns[key] = [tuple(value) if len(value) > 1 else value[0] for value in values]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class RunningEpisodes(ABC):
    """Tracks running episodes, and finds idle ones.

    An episode is idle when it has waited longer than ``patience``, and more than twice as long as any episode that was
    continued later.
    """

    def __init__(self, patience: int = 0):
        self.patience = patience
        self.count = 0  # written transitions
        self.waits_since: dict[int, int] = {}  # running episode -> transitions written up to its last one
        self.longest_wait = 0  # of a continued episode, in transitions written meanwhile

    def write(self, rows: Sequence[Transition]) -> Any:
        """Record the transitions of one write."""
        before = self.count
        self.count += len(rows)
        continued: dict[int, None] = {}
        for row in rows:
            if row.episode in self.waits_since and row.episode not in continued:
                waited = min(before - self.waits_since[row.episode], 2 * self.longest_wait + len(rows))
                self.longest_wait = max(self.longest_wait, waited)
            continued[row.episode] = None
            if self._ends_with(row):
                self.waits_since.pop(row.episode, None)
                del continued[row.episode]
        self.waits_since |= dict.fromkeys(continued, self.count)
        for episode, since in list(self.waits_since.items()):
            if self.count - since > max(2 * self.longest_wait, self.patience):
                self._is_idle(episode)

    @abstractmethod
    def _ends_with(self, row: Transition) -> bool:
        """Add a transition to its episode, and return whether the episode ends with it."""

    @abstractmethod
    def _is_idle(self, episode: int) -> None:
        """End an idle episode."""


class Oracle(RunningEpisodes):
    """Keeps every episode in a list, and every goal that the table may contain in another."""

    def __init__(self, stream: Stream):
        super().__init__()
        self.stream = stream
        self.entries = N_STEP_ENTRIES if stream.n else ENTRIES
        self.transitions: dict[int, Transition] = {}  # by uid
        self.windows: dict[int, list[Transition]] = {}  # windows that can be sampled, by the uid of their first step
        self.episodes: dict[int, list[Transition]] = {}
        self.published: dict[int, int] = {}  # episode -> number of published steps
        # Transitions whose outcomes were published, one list per write: the order of episodes within a write is
        # not specified.
        self.table: list[list[Transition]] = []

    def write(self, rows: Sequence[Transition]) -> None:
        """Record the transitions of one write, in order."""
        self.table.append([])
        self.transitions |= {row.uid: row for row in rows}
        self.windows |= self._windows_of(rows)
        super().write(rows)
        for episode in dict.fromkeys(row.episode for row in rows):
            if len(self.episodes[episode]) >= max(self.stream.first_publication, 2 * self.published.get(episode, 0)):
                self._publish(episode)

    def _windows_of(self, rows: Sequence[Transition]) -> dict[int, list[Transition]]:
        """Return the windows that a write makes available: single steps."""
        return {row.uid: [row] for row in rows}

    def end_episodes(self) -> None:
        """End all running episodes, as flush() does."""
        self.table.append([])
        for episode in self.episodes:
            self._publish(episode)
        self.waits_since.clear()

    def _ends_with(self, row: Transition) -> bool:
        self.episodes.setdefault(row.episode, []).append(row)
        if row.done:
            self._publish(row.episode)
        return row.done

    def _is_idle(self, episode: int) -> None:
        self._publish(episode)

    def _publish(self, episode: int) -> None:
        if self.published.get(episode, 0) < len(self.episodes[episode]):
            self.published[episode] = len(self.episodes[episode])
            self.table[-1].extend(self.episodes[episode])

    def allowed_goals(self, row: Transition) -> list[Goal]:
        """Return the goals that the strategy may draw for a transition."""
        return [other.outcome for other in self._allowed(row)]

    def _allowed(self, row: Transition) -> list[Transition]:
        """Return the transitions whose outcomes the strategy may draw for this one."""
        length = self.published.get(row.episode, 0)
        if row.step >= length:
            return []
        if self.stream.strategy == "random":
            return [other for episode, end in self.published.items() for other in self.episodes[episode][:end]]
        return [self.episodes[row.episode][step] for step in allowed_steps(self.stream.strategy, row.step, length)]

    def check(self, sample: TensorDictBase) -> Any:
        """Check transitions ``[*batch]`` one by one, and return how many were relabelled."""
        return sum(goal is not None for _, goal, _ in self._check_rows(sample))

    def _check_rows(self, sample: TensorDictBase) -> Iterator[tuple[list[Transition], Goal | None, Row]]:
        """Check transitions one by one, and yield the window, the new goal or None, and the entries of each."""
        relabelled = sample[RELABELLED]
        assert relabelled.shape == (*sample.batch_size, 1)
        assert relabelled.dtype == torch.bool
        assert sample["desired_goal"].dtype == sample["next", "reward"].dtype == torch.float32
        possible, certain = self.in_table()
        for row in as_dicts(sample, [*self.entries, RELABELLED]):
            is_relabelled = row.pop(RELABELLED)
            window = self.windows[row["uid"]]
            goal = row["desired_goal"] if is_relabelled else None
            assert row == self._expected(window, goal), f"{window} {goal=} came back as {row}"
            if goal is not None:
                self._check_goal(window, goal, possible)
            elif self.stream.her_ratio == 1.0 and self.stream.capacity >= len(self.transitions):
                # The table is large enough to keep the goals of all episodes.
                needed = window if self.stream.strategy == "random" else [*window, *self._allowed(window[0])]
                missing = not self._is_known(window) or any(each.uid not in certain for each in needed)
                assert missing, f"{window} was not relabelled"
            yield window, goal, row

    def _check_goal(self, window: list[Transition], goal: Goal, possible: set[Goal]) -> None:
        assert self._is_known(window), f"{window} was given {goal}, and its outcomes are not in the table"
        assert goal in possible, f"{window} was given {goal}, which is not in the table"
        if self.stream.strategy != "random":
            allowed = self.allowed_goals(window[0])
            assert goal in allowed, f"{window} was given {goal}, not one of {allowed}"

    def _is_known(self, window: list[Transition]) -> bool:
        return window[-1].step < self.published.get(window[-1].episode, 0)

    def in_table(self) -> tuple[set[Goal], set[int]]:
        """Return the goals that may be in the table, and the uids of transitions whose outcomes must be in it."""
        possible: set[Goal] = set()
        certain: set[int] = set()
        newer = 0
        for published in reversed(self.table):
            if newer >= self.stream.capacity:
                break
            possible.update(row.outcome for row in published)
            newer += len(published)
            if newer <= self.stream.capacity:
                certain.update(row.uid for row in published)
        return possible, certain

    def _expected(self, window: list[Transition], goal: Goal | None) -> Row:
        return expected_of(window, goal, writes_terminated=self.stream.writes_terminated)


def run(stream: Stream, make_oracle: Callable[[Stream], Oracle] = Oracle) -> float:
    """Write a stream into a buffer, sample after each write, check all transitions, and return the relabelled share."""
    rb, oracle = make_buffer(stream), make_oracle(stream)
    shares = []
    with mock.patch.object(tracker, "FIRST_PUBLICATION", stream.first_publication):
        for lanes in stream:
            write(rb, lanes, stream.layout, oracle)
            assert len(rb) == min(len(oracle.windows), stream.size)
            if not len(rb):
                continue
            stored = rb.storage[:].clone()
            assert max(oracle.windows) in stored["uid"], "the newest transition is not stored"
            if stream.compact:
                left_out = {*ROOT_FLAGS, ("next", "desired_goal")}
                assert left_out.isdisjoint(stored.keys(True)), "redundant entries are stored"
            sample = rb.sample()
            shares.append(float(sample[RELABELLED].float().mean()))
            for batch in (sample, rb[:]):
                oracle.check(batch)
            assert_same(stored, rb.storage[:])
    return sum(shares) / len(shares) if shares else 0.0


def check_share() -> None:
    """Check that the share ``her_ratio`` of the transitions is relabelled at every position in the batch."""
    stream = Stream(2, ((9, "truncated"),), 9, 2, "flat with ids", rows=18, capacity=36, her_ratio=0.3)
    rb, _ = filled(Oracle, stream)
    torch.manual_seed(0)
    relabelled = torch.stack([rb.sample(100)[RELABELLED].squeeze(-1) for _ in range(400)])
    deviation = (0.3 * 0.7 / 400) ** 0.5
    share = relabelled.float().mean(dim=0)  # by position in the batch
    assert ((share - 0.3).abs() < 5 * deviation).all(), "a position in the batch is relabelled too often or too rarely"
