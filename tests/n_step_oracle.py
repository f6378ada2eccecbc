"""An oracle of n-step returns in plain Python, which keeps every lane in a list, and the streams that it judges.

Goals are ``(episode, cell)``: a goal tells which episode it is of. Where cells count the steps, it also tells the step;
where they are few, episodes come back to them, so that new goals are reached on the way all the time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
)
from torchrl.envs import Compose, MultiStepTransform

from torchrl_her import GoalReward, HERTransform

Goal = tuple[float, float]
NEXT_FLAGS = [("next", "terminated"), ("next", "truncated"), ("next", "done")]


def reward_of(achieved: Any, desired: Any) -> Any:
    """A reward that tells pairs of goals apart, of tensors and of tuples."""
    (episode, cell), (other, goal) = (x.unbind(-1) if isinstance(x, torch.Tensor) else x for x in (achieved, desired))
    return 16 * cell - goal + 256 * (episode != other)


def reached(achieved: Any, desired: Any) -> Any:
    equal = achieved == desired
    return equal.all(-1) if isinstance(equal, torch.Tensor) else equal


# The oracle


@dataclass(frozen=True)
class Step:
    """One step of an environment."""

    uid: int
    trajectory: int
    episode: int
    at: int
    start: Goal  # what was achieved before
    outcome: Goal
    desired: Goal
    terminated: bool
    truncated: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def observation(self) -> float:
        return self.uid * 0.5

    @property
    def next_observation(self) -> float:
        return self.uid * 0.5 + 0.25


@dataclass(frozen=True)
class Stream:
    """How environments run, and how what they do is written."""

    n: int
    gamma: float
    lanes: int
    chunk: int  # steps of each lane in a write
    writes: int
    episodes: tuple[tuple[int, str], ...]  # longest lengths and ends, which the lanes take in turn
    cells: tuple[int, ...] | None = None  # the cells that episodes come by, over and over; by default none twice
    layout: str = "[lanes, time]"
    rows: int = 10_000  # of each lane in the storage
    capacity: int = 100_000  # of the goal table
    strategy: str = "future"
    her_ratio: float = 1.0
    tells_terminated: bool = True
    first_publication: int = 64  # the design's number, written down a second time on purpose
    compact: bool = False

    def __iter__(self) -> Iterator[list[list[Step]]]:
        """The writes: for each lane its next ``chunk`` steps."""
        uids, numbers = itertools.count(), itertools.count()
        lanes = [self._lane(lane, uids, numbers) for lane in range(self.lanes)]
        for _ in range(self.writes):
            yield [list(itertools.islice(lane, self.chunk)) for lane in lanes]

    def _lane(self, lane: int, uids: Iterator[int], numbers: Iterator[int]) -> Iterator[Step]:
        for trajectory in itertools.count(lane, self.lanes):
            episode = next(numbers)
            length, end = self.episodes[episode % len(self.episodes)]
            cells = range(length + 1) if self.cells is None else list(itertools.islice(self._walk(episode), length + 1))
            asked = -1 if self.cells is None else (*self.cells, -1)[episode % (len(self.cells) + 1)]
            for at in range(length):
                step = Step(
                    uid=next(uids),
                    trajectory=trajectory,
                    episode=episode,
                    at=at,
                    start=(episode, cells[at]),
                    outcome=(episode, cells[at + 1]),
                    desired=(episode, asked),
                    terminated=cells[at + 1] == asked or (at == length - 1 and end in ("terminated", "both")),
                    truncated=at == length - 1 and end in ("truncated", "both"),
                )
                yield step
                if step.done:
                    break

    def _walk(self, episode: int) -> Iterator[int]:
        return itertools.islice(itertools.cycle(self.cells), episode, None)


ROOT_FLAGS = ("done", "terminated", "truncated")


def expected_of(window: list[Step], goal: Goal | None, gamma: float, tells_terminated: bool = True) -> dict:
    """What comes out of a window that was relabelled with a goal, or, with none, was not."""
    total, count, stops = 0.0, 0, False
    for step in window:
        total += gamma**count * reward_of(step.outcome, goal or step.desired)
        count += 1
        if goal is not None and tells_terminated and reached(step.outcome, goal):
            stops = True
            break
    first, last = window[0], window[-1]
    terminated = last.terminated if goal is None or not tells_terminated else stops
    truncated = last.truncated if count == len(window) else False
    desired = goal or first.desired
    return {
        "uid": first.uid,
        "observation": first.observation,
        "achieved_goal": first.start,
        "desired_goal": desired,
        **dict.fromkeys(ROOT_FLAGS, False),
        "steps_to_next_obs": count,
        "gamma": gamma**count,
        "nonterminal": count > 1,  # TorchRL's name for a window of several steps
        ("next", "observation"): last.next_observation,
        ("next", "achieved_goal"): last.outcome,
        ("next", "desired_goal"): desired,
        ("next", "reward"): total,
        ("next", "original_reward"): reward_of(first.outcome, desired),
        ("next", "terminated"): terminated,
        ("next", "truncated"): truncated,
        ("next", "done"): terminated or truncated,
    }


@dataclass
class Oracle:
    """Every lane in a list, what an n-step transform has let out of it, and what of each episode is known."""

    stream: Stream
    n: int = 0
    lanes: list[list[Step]] = field(default_factory=list)
    windows: dict[int, list[Step]] = field(default_factory=dict)  # by the uid of the first step
    episodes: dict[int, list[Step]] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)  # episode -> how many of its outcomes may be drawn
    let_out: list[int] = field(default_factory=list)  # of each lane

    def __post_init__(self):
        self.n = self.stream.n
        self.lanes = [[] for _ in range(self.stream.lanes)]
        self.let_out = [0] * self.stream.lanes

    def write(self, rows: list[list[Step]]) -> None:
        writes = [[[step]] for step in rows[0]] if self.stream.layout == "add" else [rows]
        for each in writes:
            self._write(each)

    def _write(self, rows: list[list[Step]]) -> None:
        for lane, (steps, new) in enumerate(zip(self.lanes, rows, strict=True)):
            steps.extend(new)
            for step in new:
                self.episodes.setdefault(step.episode, []).append(step)
            for episode in {step.episode for step in new}:
                known = self.episodes[episode]
                doubled = max(self.stream.first_publication, 2 * self.published.get(episode, 0))
                if known[-1].done or len(known) >= doubled:
                    self.published[episode] = len(known)
            for first in range(self.let_out[lane], len(steps) - self.n):
                window = steps[first : first + self.n]
                ends = [index for index, step in enumerate(window) if step.done]
                self.windows[steps[first].uid] = window[: ends[0] + 1] if ends else window
                self.let_out[lane] = first + 1

    def lose_what_is_held_back(self) -> None:
        """What an n-step transform that starts afresh makes of the lanes."""
        self.let_out = [len(steps) for steps in self.lanes]

    def end_episodes(self) -> None:
        self.published = {episode: len(steps) for episode, steps in self.episodes.items()}

    def allowed_goals(self, window: list[Step]) -> list[Goal]:
        """The goals that the strategy may draw for a window, all of whose outcomes are known."""
        first, last = window[0], window[-1]
        length = self.published.get(first.episode, 0)
        if last.at >= length:
            return []
        steps = {
            "future": range(first.at, length),
            "final": [length - 1],
            "episode": range(length),
            "random": range(length),
        }[self.stream.strategy]
        if self.stream.strategy == "random":
            return [step.outcome for episode, end in self.published.items() for step in self.episodes[episode][:end]]
        return [self.episodes[first.episode][at].outcome for at in steps]

    def check(self, sample: TensorDictBase) -> Counter:
        """Check transitions ``[*batch]`` one by one, and count the kinds of them that there were."""
        count: Counter = Counter()
        for row in rows_of(sample):
            relabelled = row.pop(("hindsight", "relabelled"))
            window = self.windows[row["uid"]]
            goal = row["desired_goal"] if relabelled else None
            assert row == expected(window, goal, self.stream), f"{'relabelled' if relabelled else 'original'} {window}"
            allowed = self.allowed_goals(window)
            if relabelled:
                assert goal in allowed, f"{window} was given the goal {goal}"
            elif self.stream.her_ratio == 1.0 and self.stream.capacity >= 10_000:
                assert not allowed, f"{window} was not relabelled"
            count[kind_of(goal, row)] += 1
            count["relabelled" if relabelled else "original"] += 1
        return count


def expected(window: list[Step], goal: Goal | None, stream: Stream) -> dict:
    """What `expected_of` says, with sums that need not be equal to the last bit."""
    row = expected_of(window, goal, stream.gamma, stream.tells_terminated)
    for key in ("gamma", ("next", "reward")):
        row[key] = pytest.approx(row[key], rel=1e-5, abs=1e-3 if key != "gamma" else 1e-6)
    return row


def kind_of(goal: Goal | None, row: dict) -> str:
    """Which of the cases a transition is, told from the oracle's side of it."""
    whose = "original" if goal is None else "new goal"
    if row["next", "terminated"]:
        if row["steps_to_next_obs"] == 1:
            return f"{whose}: terminated at once"
        return f"{whose}: terminated {'and truncated' if row['next', 'truncated'] else 'on the way'}"
    return f"{whose}: {'truncated' if row['next', 'truncated'] else 'goes on'}"


CASES = ("goes on", "truncated", "terminated at once", "terminated on the way", "terminated and truncated")


def missing(count: Counter, whose: tuple[str, ...] = ("original", "new goal"), strategy: str = "future") -> set[str]:
    """The cases that did not come up."""
    cases = {f"{who}: {case}" for who in whose for case in CASES}
    if strategy in ("future", "final"):  # a goal that is ahead is reached before the episode ends
        cases -= {"new goal: truncated"}
    return cases - {case for case, times in count.items() if times}


KEYS = list(expected_of([Step(0, 0, 0, 0, (0, 0), (0, 1), (0, 2), False, False)], None, 1.0))


def rows_of(sample: TensorDictBase) -> list[dict]:
    """Transitions as dictionaries; goals are tuples, all else numbers."""
    rows = sample.reshape(-1)
    columns = {}
    for key in [*KEYS, ("hindsight", "relabelled")]:
        values = rows[key].reshape(len(rows), -1).tolist()
        columns[key] = [tuple(value) if len(value) > 1 else value[0] for value in values]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


# Writing


def make_tensordict(steps: list[Step], with_ids: bool = True) -> TensorDict:
    def column(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype).reshape(len(steps), -1)

    data = TensorDict(
        {
            "uid": column((step.uid for step in steps), torch.int64).squeeze(-1),
            "observation": column(step.observation for step in steps),
            "action": torch.eye(2)[[step.uid % 2 for step in steps]],
            "achieved_goal": column(step.start for step in steps),
            "desired_goal": column(step.desired for step in steps),
            **{key: torch.zeros(len(steps), 1, dtype=torch.bool) for key in ROOT_FLAGS},
            "next": {
                "observation": column(step.next_observation for step in steps),
                "achieved_goal": column(step.outcome for step in steps),
                "desired_goal": column(step.desired for step in steps),
                "reward": column(reward_of(step.outcome, step.desired) for step in steps),
                "terminated": column((step.terminated for step in steps), torch.bool),
                "truncated": column((step.truncated for step in steps), torch.bool),
                "done": column((step.done for step in steps), torch.bool),
            },
        },
        batch_size=len(steps),
    )
    if with_ids:
        data["collector", "traj_ids"] = torch.tensor([step.trajectory for step in steps])
    return data


def make_transform(stream: Stream, **kwargs: Any) -> Compose:
    reward = GoalReward(reward_of, terminated_fn=reached if stream.tells_terminated else None)
    arguments = {name: getattr(stream, name) for name in ("strategy", "her_ratio", "capacity", "compact")} | kwargs
    return Compose(MultiStepTransform(stream.n, stream.gamma), HERTransform(reward, **arguments))


def make_buffer(stream: Stream, transform: Any = None, kind: Any = ReplayBuffer, **kwargs: Any) -> ReplayBuffer:
    ndim = 2 if stream.layout.startswith("[lanes") else 1
    storage = LazyTensorStorage(stream.rows * stream.lanes, ndim=ndim)
    transform = make_transform(stream) if transform is None else transform
    return kind(storage=storage, transform=transform, **kwargs)


def write(rb: ReplayBuffer, lanes: list[list[Step]], layout: str) -> None:
    steps = list(itertools.chain(*lanes))
    data = make_tensordict(steps, with_ids="ids" in layout)
    if layout.startswith("[lanes"):
        rb.extend(data.reshape(len(lanes), -1))
    elif layout.startswith("[time"):
        rb.extend(data)
    else:
        for row in data.unbind(0):
            rb.add(row)


def filled(stream: Stream, **kwargs: Any) -> tuple[ReplayBuffer, Oracle]:
    rb, oracle = make_buffer(stream, **kwargs), Oracle(stream)
    for lanes in stream:
        write(rb, lanes, stream.layout)
        oracle.write(lanes)
    return rb, oracle


def read_often(rb: ReplayBuffer, oracle: Oracle) -> Counter:
    """Check every transition ten times: goals are drawn afresh."""
    torch.manual_seed(0)
    return sum((oracle.check(rb[:]) for _ in range(10)), Counter())


def sample_of(rb: ReplayBuffer, count: int = 2_000) -> TensorDictBase:
    torch.manual_seed(0)
    return rb.sample(count)


WALK = Stream(
    n=3,
    gamma=0.9,
    lanes=3,
    chunk=7,
    writes=30,
    episodes=((7, "truncated"), (4, "terminated"), (3, "both"), (1, "truncated")),
    cells=(0, 1, 0, 2, 3, 1, 1, 2),
    layout="[lanes, time] with ids",
    her_ratio=0.8,
)


STREAMS = [
    WALK,
    replace(WALK, cells=None, tells_terminated=False, her_ratio=1.0),
    replace(WALK, n=4, gamma=0.5, episodes=((9, "truncated"), (2, "both")), her_ratio=1.0),
    replace(WALK, strategy="episode", her_ratio=1.0, capacity=40),  # windows whose first steps have left the table
    replace(WALK, compact=True),
]


def run(package: Any) -> None:
    """Write streams through a transform of ``package``, and check every transition as it goes, and at the end often."""
    for stream in STREAMS:
        reward = package.GoalReward(reward_of, terminated_fn=reached if stream.tells_terminated else None)
        hindsight = package.HERTransform(
            reward,
            strategy=stream.strategy,
            her_ratio=stream.her_ratio,
            capacity=stream.capacity,
            compact=stream.compact,
        )
        rb = make_buffer(stream, Compose(MultiStepTransform(stream.n, stream.gamma), hindsight))
        oracle = Oracle(stream)
        for lanes in stream:
            write(rb, lanes, stream.layout)
            oracle.write(lanes)
            if len(rb):
                oracle.check(rb[:])
        read_often(rb, oracle)
