"""Streams of transitions: how environments run, and how their transitions are written into a buffer.

Goals are ``(episode, cell)``. By default, cells count the steps, so a goal identifies the step that achieved it. If a
stream has few cells, episodes revisit them, and new goals are often reached on the way.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from support.goals import reward_of

Goal = tuple[float, ...]
ROOT_FLAGS = ("done", "terminated", "truncated")
NEXT_FLAGS = [("next", "terminated"), ("next", "truncated"), ("next", "done")]

FLAT_LAYOUTS = (
    "flat with ids",
    "flat, time first, with ids",
    "one step of all lanes",
    "one step of all lanes, with ids",
)
LAYOUTS = ("[lanes, time]", "[lanes, time] with ids", *FLAT_LAYOUTS[:3], "add", "add with ids", "plain add")


@dataclass(frozen=True)
class Transition:
    """One transition of an environment."""

    uid: int
    trajectory: int  # the collector's id, which is the same after a silent reset
    episode: int  # the true episode, counted over all lanes
    step: int
    achieved: Goal
    outcome: Goal  # the goal achieved by acting: ("next", "achieved_goal")
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


Lanes = list[list[Transition]]  # the next transitions of each environment, in order of time


@dataclass(frozen=True)
class Stream:
    """How environments run, and how their transitions are written. Iterating yields the lanes of each write."""

    lanes: int
    lengths: tuple[tuple[int, str], ...]  # longest lengths and ends of episodes, used by the lanes in turn
    chunk: int  # steps of each lane in a write
    writes: int
    layout: str = "[lanes, time]"
    rows: int = 10_000  # rows of each lane in the storage
    capacity: int = 100_000  # of the goal table
    strategy: str = "future"
    her_ratio: float = 1.0
    cells: tuple[int, ...] | None = (
        None  # the cells that episodes visit repeatedly; by default, no cell is visited twice
    )
    n: int = 0  # steps of the returns of a MultiStepTransform; 0 for none
    gamma: float = 1.0
    writes_terminated: bool = True  # whether reaching a new goal terminates
    first_publication: int = 64  # duplicated from the package on purpose
    compact: bool = False

    @property
    def with_ids(self) -> bool:
        return "ids" in self.layout

    @property
    def size(self) -> int:
        """The number of rows in the storage."""
        return self.rows * self.lanes

    def __iter__(self) -> Iterator[Lanes]:
        uids, episodes = itertools.count(), itertools.count()
        lanes = [self._lane(lane, uids, episodes) for lane in range(self.lanes)]
        for _ in range(self.writes):
            yield [list(itertools.islice(lane, self.chunk)) for lane in lanes]

    def _lane(self, trajectory: int, uids: Iterator[int], episodes: Iterator[int]) -> Iterator[Transition]:
        while True:
            episode = next(episodes)
            length, end = self.lengths[episode % len(self.lengths)]
            cells, asked = self._cells(episode, length)
            for step in range(length):
                last = step == length - 1
                row = Transition(
                    uid=next(uids),
                    trajectory=trajectory,
                    episode=episode,
                    step=step,
                    achieved=(episode, cells[step]),
                    outcome=(episode, cells[step + 1]),
                    desired=(episode, asked),
                    terminated=cells[step + 1] == asked or (last and end in ("terminated", "both")),
                    truncated=last and end in ("truncated", "both"),
                )
                yield row
                if row.done:
                    break
            if end != "silent":  # a silent reset keeps the collector's id
                trajectory += self.lanes

    def _cells(self, episode: int, length: int) -> tuple[Sequence[int], int]:
        """Return the ``length + 1`` cells that an episode visits, and its desired cell."""
        if self.cells is None:
            return range(length + 1), -1
        visited = itertools.islice(itertools.cycle(self.cells), episode, episode + length + 1)
        return list(visited), (*self.cells, -1)[episode % (len(self.cells) + 1)]


def random_stream(draw: random.Random, layout: str, least_chunk: int = 2) -> Stream:
    """Return a one-step stream; draw from hypothesis' ``randoms(use_true_random=False)`` or ``random.Random(0)``."""
    # By default, chunks have at least two steps: TorchRL's two-dimensional storage does not accept [lanes, 1].
    lanes, chunk, writes = draw.randint(1, 4), draw.randint(least_chunk, 7), draw.randint(1, 12)
    stored = draw.randint(1, writes)  # in chunks
    ends = ["terminated", "truncated", "silent"]
    return Stream(
        lanes=lanes,
        lengths=tuple((draw.randint(1, 9), draw.choice(ends)) for _ in range(draw.randint(1, 6))),
        chunk=chunk,
        writes=writes,
        layout=layout,
        rows=stored * chunk,
        capacity=draw.choice([10, max(10, stored * lanes * chunk), 10_000]),
        strategy=draw.choice(["future", "final", "episode", "random"]),
        her_ratio=draw.choice([1.0, 1.0, 0.5]),
        first_publication=draw.choice([3, 64]),
        compact=draw.choice([False, True]),
    )


# Writing


def rows_of(lanes: Iterable[Iterable[Transition]]) -> list[Transition]:
    """Return the transitions of all lanes, one lane after the other."""
    return list(itertools.chain.from_iterable(lanes))


def chunks(lanes: Lanes, layout: str) -> Iterator[list[Transition]]:
    """Yield the transitions of each write, in the order of rows."""
    steps = [list(rows) for rows in zip(*lanes, strict=True)]
    if layout.startswith("one step"):
        yield from steps
    elif layout.startswith("flat, time first"):
        yield rows_of(steps)
    elif "add" in layout:
        yield from ([row] for row in rows_of(steps))
    else:
        yield rows_of(lanes)


def make_tensordict(rows: Sequence[Transition], with_ids: bool = True) -> TensorDict:
    """Return transitions like a collector, ``[rows]``: goals ``[rows, 2]``, flags and rewards ``[rows, 1]``."""

    def column(values: Iterable[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype).reshape(len(rows), -1)

    data = TensorDict(
        {
            "uid": torch.tensor([row.uid for row in rows]),
            "observation": column(row.observation for row in rows),
            "action": torch.eye(2)[[row.uid % 2 for row in rows]],
            "achieved_goal": column(row.achieved for row in rows),
            "desired_goal": column(row.desired for row in rows),
            **{key: torch.zeros(len(rows), 1, dtype=torch.bool) for key in ROOT_FLAGS},
            "next": {
                "observation": column(row.next_observation for row in rows),
                "achieved_goal": column(row.outcome for row in rows),
                "desired_goal": column(row.desired for row in rows),
                "reward": column(reward_of(row.outcome, row.desired) for row in rows),
                "terminated": column((row.terminated for row in rows), torch.bool),
                "truncated": column((row.truncated for row in rows), torch.bool),
                "done": column((row.done for row in rows), torch.bool),
            },
        },
        batch_size=len(rows),
    )
    if with_ids:
        data["collector", "traj_ids"] = torch.tensor([row.trajectory for row in rows])
    return data


def write(rb: ReplayBuffer, lanes: Lanes, layout: str, *oracles: Any) -> None:
    """Write the lanes in the given layout, and record each write in the oracles."""
    for rows in chunks(lanes, layout):
        data = make_tensordict(rows, with_ids="ids" in layout)
        if "add" in layout:
            rb.add(data[0])
        else:
            rb.extend(data.reshape(len(lanes), -1) if layout.startswith("[") else data)
        for oracle in oracles:
            oracle.write(rows)


def extend(rb: ReplayBuffer, lanes: Lanes, shape: tuple[int, ...] | None = None, with_ids: bool = True) -> Any:
    """Write all lanes in one call, by default in the dimensions of the storage; return the result of ``rb.extend``."""
    if shape is None:
        shape = {1: (-1,), 2: (len(lanes), -1), 3: (2, len(lanes) // 2, -1)}[rb.storage.ndim]
    return rb.extend(make_tensordict(rows_of(lanes), with_ids).reshape(shape))


def make_episode(
    goals: torch.Tensor,
    desired: torch.Tensor,
    *,
    reward: float | torch.Tensor = -1.0,
    truncated: bool | torch.Tensor = True,
) -> TensorDict:
    """Return one episode ``[steps]`` with copies of its goals ``[steps + 1, *goal]``, of any shape and dtype.

    ``reward`` is one number for all steps, and ``truncated`` one flag for the last step; or both are ``[steps, 1]``.
    """
    steps = len(goals) - 1
    done = torch.zeros(steps, 1, dtype=torch.bool)
    if isinstance(truncated, torch.Tensor):
        done |= truncated
    else:
        done[-1:] = truncated
    asked = desired.expand(steps, *desired.shape)
    return TensorDict(
        {
            "achieved_goal": goals[:-1],
            "desired_goal": asked,
            "next": {
                "achieved_goal": goals[1:],
                "desired_goal": asked,
                "reward": torch.zeros(steps, 1) + reward,
                "done": done,
                "terminated": torch.zeros_like(done),
                "truncated": done,
            },
        },
        batch_size=[steps],
    ).clone()
