"""Environments that produce transitions, and their form as tensordicts.

A goal is a pair of whole numbers, ``(place, cell)``. Each episode has another place, unless it starts where the last
one ended. So a goal names the step that achieved it, or several steps at which nothing moved. `Goals` translates pairs
to tensors of any shape and dtype, and back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from support.goals import reward_of

Goal = tuple[int, int]

FLAGS = ("terminated", "truncated", "done")
# What happens at a step: the cell grows or stays, or the episode ends afterwards. A silent reset sets no flag. After
# "cut", the next episode starts where this one ended, with the same desired goal.
MOVES = ("go", "go", "go", "stay", "terminated", "truncated", "cut", "silent")


def whole_episodes(*lengths: int) -> list[str]:
    """Return the moves of whole episodes with these numbers of steps."""
    return [move for length in lengths for move in [*["go"] * (length - 1), "truncated"]]


@dataclass(frozen=True)
class Goals:
    """The form of goals: their shape and dtype."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    offset: int = 0  # added to all numbers

    def tensor(self, goals: Sequence[Goal]) -> Tensor:
        """Return goals as a tensor ``[n, *shape]``."""
        pairs = torch.tensor(list(goals), dtype=torch.int64).reshape(len(goals), 2)
        if not self.shape:
            return (pairs[:, 0] * 1000 + pairs[:, 1] + self.offset).to(self.dtype)
        columns = [pairs[:, number % 2] for number in range(torch.Size(self.shape).numel())]
        return torch.stack(columns, 1).reshape(len(goals), *self.shape).add(self.offset).to(self.dtype)

    def pairs(self, goals: Tensor) -> Tensor:
        """Return tensors ``[n, *shape]`` as pairs, ``int64 [n, 2]``."""
        goals = goals.long() - self.offset
        if not self.shape:
            return torch.stack([goals.div(1000, rounding_mode="floor"), goals % 1000], 1)
        return goals.flatten(1)[:, :2]

    def reward(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """Return a reward that differs for different pairs of goals, ``[n]``."""
        return reward_of(self.pairs(achieved), self.pairs(desired)).float()

    def reached(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """Return whether goals are equal, ``bool [n]``."""
        return (self.pairs(achieved) == self.pairs(desired)).all(1)


@dataclass(frozen=True)
class Transition:
    """One transition of an environment."""

    uid: int
    env: int
    trajectory: int  # the collector's id, which is the same after a silent reset
    episode: int
    step: int
    achieved: Goal
    outcome: Goal
    desired: Goal
    terminated: bool
    truncated: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@dataclass
class Env:
    """An environment in the middle of an episode."""

    episode: int
    place: int
    trajectory: int
    step: int = 0
    cell: int = 0


@dataclass
class World:
    """Several environments, each of which `play` advances separately."""

    count: int
    goals: Goals
    envs: list[Env] = field(default_factory=list)
    uids: Any = field(default_factory=itertools.count)
    episodes: Any = field(default_factory=itertools.count)
    places: Any = field(default_factory=itertools.count)
    trajectories: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.envs = [self._reset(next(self.trajectories)) for _ in range(self.count)]

    def _reset(self, trajectory: int) -> Env:
        return Env(next(self.episodes), next(self.places), trajectory)

    def play(self, number: int, moves: Iterable[str]) -> list[Transition]:
        """Return the transitions of an environment, one for each move."""
        return [self._step(number, move) for move in moves]

    def _step(self, number: int, move: str) -> Transition:
        env = self.envs[number]
        cell = env.cell + (move != "stay")
        asked = 3 + 2 * (env.place % 4) if env.place % 2 else 999  # some episodes reach their goal
        transition = Transition(
            uid=next(self.uids),
            env=number,
            trajectory=env.trajectory,
            episode=env.episode,
            step=env.step,
            achieved=(env.place, env.cell),
            outcome=(env.place, cell),
            desired=(env.place, asked),
            terminated=move == "terminated",
            truncated=move in ("truncated", "cut"),
        )
        env.step, env.cell = env.step + 1, cell
        if move in ("terminated", "truncated", "cut", "silent"):
            trajectory = env.trajectory if move == "silent" else next(self.trajectories)
            self.envs[number] = self._reset(trajectory)
        if move == "cut":
            self.envs[number].place, self.envs[number].cell = env.place, cell
        return transition

    def written(self, moves: Iterable[str], number: int = 0) -> TensorDict:
        """Let an environment make its moves, and return the transitions like a collector."""
        return self.tensordict(self.play(number, moves))

    def tensordict(self, rows: Sequence[Transition], *, ids: bool = True) -> TensorDict:
        """Return transitions like a collector, ``[rows]``."""
        count = len(rows)

        def column(values: Iterable[Any], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype).reshape(count, -1)

        def flags(values: Iterable[bool]) -> Tensor:
            return column(values, torch.bool)

        desired = self.goals.tensor([row.desired for row in rows])
        data = TensorDict(
            {
                "uid": torch.tensor([row.uid for row in rows]),
                "observation": column(row.uid / 2 for row in rows),
                "achieved_goal": self.goals.tensor([row.achieved for row in rows]),
                "desired_goal": desired,
                **{key: torch.zeros(count, 1, dtype=torch.bool) for key in FLAGS},
                "next": {
                    "observation": column(row.uid / 2 + 0.25 for row in rows),
                    "achieved_goal": self.goals.tensor([row.outcome for row in rows]),
                    "desired_goal": desired.clone(),
                    "reward": column(reward_of(row.outcome, row.desired) for row in rows),
                    "terminated": flags(row.terminated for row in rows),
                    "truncated": flags(row.truncated for row in rows),
                    "done": flags(row.done for row in rows),
                },
            },
            batch_size=count,
        )
        if ids:
            data["collector", "traj_ids"] = torch.tensor([row.trajectory for row in rows])
        return data


def transitions(moves: Iterable[str], goals: Goals | None = None) -> TensorDict:
    """Return the transitions of a new environment."""
    return World(1, goals or Goals()).written(moves)
