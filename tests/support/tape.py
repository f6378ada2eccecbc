"""An environment whose goals identify the step that achieved them, and a check of single transitions.

Goals and observations are ``(environment, episode, state)``, so each transition can be checked by itself, whatever the
order, the process or the copy. The check shares no code with the package and does not read its stamps.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, SerialEnv

from support.goals import reached, reward_of

LENGTHS = (5, 9, 2, 7, 1, 12)
ASKED = 200  # the state of every desired goal, which no episode reaches
RELABELLED = ("hindsight", "relabelled")
FLAGS = [("next", "terminated"), ("next", "truncated"), ("next", "done")]


def length_of(number: int, episode: int, lengths: tuple[int, ...] = LENGTHS) -> int:
    """Return the length of an episode, which differs between environments at any time."""
    return lengths[(episode + number) % len(lengths)]


class Tape(gymnasium.Env):
    """Counts its steps and ignores actions. Episodes are terminated and truncated in turn."""

    def __init__(self, number: int, discrete: bool = False):
        goal = Box(-1, 2**16, (3,), np.float32)
        self.observation_space = Dict({"observation": goal, "achieved_goal": goal, "desired_goal": goal})
        self.action_space = Discrete(2) if discrete else Box(-1, 1, (2,), np.float32)
        self.number, self.episode, self.state = number, -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.state = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.state += 1
        last = self.state == length_of(self.number, self.episode)
        observation = self._observation()
        reward = float(reward_of(observation["achieved_goal"], observation["desired_goal"]))
        terminates = self.episode % 2 == 0
        return observation, reward, last and terminates, last and not terminates, {}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return reward_of(achieved_goal, desired_goal)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return reached(achieved_goal, desired_goal)

    def _observation(self) -> dict[str, np.ndarray]:
        state = np.array([self.number, self.episode, self.state], np.float32)
        goal = np.array([self.number, self.episode, ASKED], np.float32)
        return {"observation": state, "achieved_goal": state.copy(), "desired_goal": goal}


def make_tape(number: int = 0, discrete: bool = False) -> GymWrapper:
    """Return the TorchRL environment; ``functools.partial(make_tape, number)`` makes it in other processes."""
    return GymWrapper(Tape(number, discrete))


def make_serial(*numbers: int, discrete: bool = False) -> SerialEnv:
    """Return a SerialEnv of the environments with these numbers."""
    return SerialEnv(len(numbers), [functools.partial(make_tape, number, discrete=discrete) for number in numbers])


def collect(
    env: Any, frames: int, batches: int = 1, kind: Any = Collector, policy: Any = None, **options: Any
) -> list[TensorDictBase]:
    """Return the batches of a collector; options are the collector's."""
    collector = kind(env, policy, frames_per_batch=frames, total_frames=frames * batches, **options)
    yielded = list(collector)
    collector.shutdown()
    return yielded


@functools.cache
def collected(frames: int = 60, discrete: bool = False) -> TensorDictBase:
    """Return the first transitions of the tape. Do not modify them."""
    torch.manual_seed(0)
    return collect(make_tape(discrete=discrete), frames)[0]


# Checks


def lengths_of(places: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Return the lengths ``[n]`` of the episodes of places ``[n, 3]``."""
    return torch.tensor(lengths)[(places[:, 0] + places[:, 1]) % len(lengths)]


def check(
    batch: TensorDictBase,
    strategy: str = "future",
    lengths: tuple[int, ...] = LENGTHS,
    flags: bool = True,
    n: int = 1,
    gamma: float = 1.0,
) -> float:
    """Check transitions ``[*batch]``, and return the share of relabelled ones.

    For "final", any step from the transition's own step on is accepted, because it is the last one of a running episode
    so far. With ``flags=False``, new goals end no episode, and done flags are not checked: a SliceSampler overwrites
    them in TensorDict buffers. ``n`` and ``gamma`` are the arguments of a MultiStepTransform. Sums are exact if
    ``gamma`` is a power of two.
    """
    rows = batch.reshape(-1)
    place, goal, new = rows["observation"].long(), rows["desired_goal"].long(), rows[RELABELLED].reshape(-1)
    step, length = place[:, 2], lengths_of(place, lengths)
    _check(rows, "observation", (step >= 0) & (step < length))
    is_own, is_achieved = (
        (goal[:, :2] == place[:, :2]).all(1),
        (goal[:, 2] >= 1) & (goal[:, 2] <= lengths_of(goal, lengths)),
    )
    may_be_drawn = is_achieved & (is_own | (strategy == "random"))
    if strategy in ("future", "final"):
        may_be_drawn &= goal[:, 2] > step
    _check(rows, "desired_goal", torch.where(new, may_be_drawn, is_own & (goal[:, 2] == ASKED)))

    # The steps of each window, [n, window], which ends with its episode, and where a new goal is reached.
    outcomes = torch.stack([place + torch.tensor([0, 0, ahead]) for ahead in range(1, n + 1)], 1)
    exists = outcomes[..., 2] <= length[:, None]
    hits = exists & new[:, None] & (outcomes == goal[:, None]).all(-1) & flags
    counted = exists & (hits.cumsum(1) - hits.long() == 0)
    last = torch.cat([place[:, :2], torch.minimum(step + n, length)[:, None]], 1)
    is_last, is_even = last[:, 2] == length, place[:, 1] % 2 == 0
    terminated = torch.where(new, hits.any(1), is_last & is_even)
    truncated = is_last & ~is_even & (counted == exists).all(1)
    returns = counted * reward_of(outcomes, goal[:, None]) * gamma ** torch.arange(n).double()
    expected = {"observation": place, "achieved_goal": place, "desired_goal": goal, ("next", "desired_goal"): goal}
    expected |= {("next", "observation"): last, ("next", "achieved_goal"): last, ("next", "reward"): returns.sum(1)}
    if flags:
        expected |= zip(FLAGS, (terminated, truncated, terminated | truncated), strict=True)
    if n > 1:
        expected |= {"steps_to_next_obs": counted.sum(1), "gamma": gamma ** counted.sum(1).double()}
    for key, values in expected.items():
        _check(rows, key, (rows[key].reshape(values.shape) == values).reshape(len(rows), -1).all(1), values)
    return float(new.double().mean())


def _check(rows: TensorDictBase, key: Any, right: Tensor, expected: Tensor | None = None) -> None:
    """Check that an entry is right in all transitions ``[n]``; an error shows the first one in which it is not."""
    for row in (~right).nonzero()[:1, 0].tolist():
        words = f"{key} is wrong" if expected is None else f"{key} must be {expected[row].tolist()}"
        raise AssertionError(f"{words} in {rows[row].to_dict()}")


def places(rows: TensorDictBase) -> list[tuple[int, ...]]:
    """Return where transitions ``[*batch]`` start: environment, episode and state of each."""
    return [tuple(place) for place in rows["observation"].reshape(-1, 3).long().tolist()]


def starts(number: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[int, int, int]]:
    """Yield where the transitions of an environment start, in order and without end."""
    for episode in itertools.count():
        for state in range(length_of(number, episode, lengths)):
            yield number, episode, state


def taken(number: int, steps: int) -> list[tuple[int, ...]]:
    """Return where the first transitions of an environment start, in order."""
    return list(itertools.islice(starts(number), steps))


def ended(steps: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the steps of complete episodes."""
    ends = {place[:2] for place in steps if place[2] + 1 == length_of(place[0], place[1])}
    return [place for place in steps if place[:2] in ends]


def check_nothing_is_lost(
    rows: TensorDictBase, environments: int, steps: int | None = None, only_whole: bool = False
) -> None:
    """Check that the first ``steps`` steps of each environment, by default any number, are there once.

    With ``only_whole``, only those of complete episodes.
    """
    found = sorted(places(rows))
    counts = Counter(number for number, _, _ in found)
    assert sorted(counts) == list(range(environments)), "one of the environments is missing"
    expected: list[tuple[int, ...]] = []
    for number in range(environments):
        those = taken(number, steps or counts[number])
        expected += ended(those) if only_whole else those
    assert found == expected


def in_double_precision(data: TensorDictBase) -> TensorDictBase:
    """Return the transitions with float64 instead of float32."""
    return data.apply(lambda value: value.double() if value.is_floating_point() else value)
