"""An environment whose goals identify the step that achieved them, and a check of single transitions.

Goals and observations are ``(environment, episode, state)``, so each transition can be checked by itself, whatever the
order, the process or the copy. The check shares no code with the package and does not read its stamps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDictBase
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

    def __init__(self, number: int, lengths: tuple[int, ...] = LENGTHS, discrete: bool = False):
        goal = Box(-1, 2**16, (3,), np.float32)
        self.observation_space = Dict({"observation": goal, "achieved_goal": goal, "desired_goal": goal})
        self.action_space = Discrete(2) if discrete else Box(-1, 1, (2,), np.float32)
        self.number, self.lengths = number, lengths
        self.episode, self.state = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.state = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.state += 1
        last = self.state == length_of(self.number, self.episode, self.lengths)
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


def make_tape(number: int = 0, lengths: tuple[int, ...] = LENGTHS, discrete: bool = False) -> GymWrapper:
    """Return the TorchRL environment; ``functools.partial(make_tape, number)`` makes it in other processes."""
    return GymWrapper(Tape(number, lengths, discrete))


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


@dataclass
class Count:
    """The numbers of checked transitions."""

    sampled: int = 0
    relabelled: int = 0

    def __iadd__(self, other: Count) -> Count:
        self.sampled += other.sampled
        self.relabelled += other.relabelled
        return self

    @property
    def share(self) -> float:
        """The share of relabelled transitions."""
        return self.relabelled / self.sampled


def expected_row(
    state: Any, goal: Any = None, n: int = 1, gamma: float = 1.0, lengths: tuple[int, ...] = LENGTHS
) -> dict[Any, Any]:
    """Return the entries of a transition from a state, relabelled with a goal, or original if it is None.

    With ``n > 1``, it is an n-step return. Sums are exact if ``gamma`` is a power of two.
    """
    number, episode, first = map(int, state)
    length = length_of(number, episode, lengths)
    assert 0 <= first < length, f"{state} cannot be: the episode has {length} steps"
    asked, last = (number, episode, ASKED), (number, episode, min(first + n, length))
    desired = asked if goal is None else goal
    outcomes = [(number, episode, step) for step in range(first + 1, last[2] + 1)]
    count = outcomes.index(goal) + 1 if goal in outcomes else len(outcomes)
    reward = sum(gamma**ahead * reward_of(outcome, desired) for ahead, outcome in enumerate(outcomes[:count]))
    is_last = last[2] == length
    terminated = goal in outcomes if goal is not None else is_last and episode % 2 == 0
    truncated = is_last and episode % 2 == 1 and count == len(outcomes)
    entries: dict[Any, Any] = {"observation": tuple(state), "achieved_goal": tuple(state), "desired_goal": desired}
    entries |= {("next", "observation"): last, ("next", "achieved_goal"): last, ("next", "desired_goal"): desired}
    entries |= zip(FLAGS, (terminated, truncated, terminated or truncated), strict=True)
    entries["next", "reward"] = reward
    return entries | ({"steps_to_next_obs": count, "gamma": gamma**count} if n > 1 else {})


def as_dicts(sample: TensorDictBase, keys: Iterable[Any]) -> list[dict[Any, Any]]:
    """Return transitions ``[*batch]`` as dictionaries of tuples (vectors) and numbers."""
    rows = sample.reshape(-1)
    columns = {key: rows[key].reshape(len(rows), -1).tolist() for key in keys}
    values = ([tuple(value) if len(value) > 1 else value[0] for value in column] for column in columns.values())
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def check(
    batch: TensorDictBase,
    strategy: str = "future",
    lengths: tuple[int, ...] = LENGTHS,
    flags: bool = True,
    n: int = 1,
    gamma: float = 1.0,
) -> Count:
    """Check transitions ``[*batch]``, one by one, and count them.

    For "final", any step from the transition's own step on is accepted, because only a part of a running episode is
    published. ``flags=False`` skips the done flags, which a SliceSampler overwrites in TensorDict buffers. ``n`` and
    ``gamma`` are the arguments of a MultiStepTransform.
    """
    count = Count()
    keys = [key for key in expected_row((0, 0, 0), n=n, lengths=lengths) if flags or key not in FLAGS]
    for row in as_dicts(batch, [*keys, RELABELLED]):
        state, goal = row["observation"], row["desired_goal"] if row.pop(RELABELLED) else None
        if goal is not None:
            _check_goal(state, goal, strategy, lengths)
        expected = expected_row(state, goal, n, gamma, lengths)
        assert row == {key: expected[key] for key in keys}, f"{row} must be {expected}"
        count += Count(1, goal is not None)
    return count


def _check_goal(state: Any, goal: Any, strategy: str, lengths: tuple[int, ...]) -> None:
    """Check that a goal was achieved, and that the strategy may draw it for a transition from a state."""
    number, episode, step = goal
    what = f"a transition from {state} has the goal {goal}"
    assert 1 <= step <= length_of(int(number), int(episode), lengths), f"{what}, which no episode achieves"
    assert strategy == "random" or (number, episode) == state[:2], f"{what} of another episode"
    assert strategy not in ("future", "final") or step > state[2], f"{what} of the past"


def places(rows: TensorDictBase) -> list[tuple[int, ...]]:
    """Return where transitions ``[*batch]`` start: environment, episode and state of each."""
    return [tuple(place) for place in rows["observation"].reshape(-1, 3).long().tolist()]


def starts(number: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[int, int, int]]:
    """Yield where the transitions of an environment start, in order and without end."""
    for episode in itertools.count():
        for state in range(length_of(number, episode, lengths)):
            yield number, episode, state


def taken(number: int, steps: int, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, int, int]]:
    """Return where the first transitions of an environment start, in order."""
    return list(itertools.islice(starts(number, lengths), steps))


# Other forms of the data


def in_double_precision(data: TensorDictBase) -> TensorDictBase:
    """Return the transitions with float64 instead of float32."""
    return data.apply(lambda value: value.double() if value.is_floating_point() else value)


def with_images(data: TensorDictBase) -> TensorDictBase:
    """Return the transitions with images ``[4, 5, 3]`` as goals, each number in a channel, and their rewards."""
    data = data.clone()
    for key in ("achieved_goal", "desired_goal"):
        for place in (data, data["next"]):
            place[key] = place[key].to(torch.uint8)[:, None, None, :].expand(-1, 4, 5, 3).clone()
    goals = data["next", "achieved_goal"], data["desired_goal"]
    data["next", "reward"] = image_reward(*goals).unsqueeze(-1).to(data["next", "reward"].dtype)
    return data


def image_reward(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    """Return rewards ``[batch]`` of goals that are images: 0 if they are equal, else -1."""
    return -(achieved != desired).flatten(1).any(dim=1).float()
