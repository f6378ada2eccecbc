"""The transitions that the benchmarks write into replay buffers."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BATCH_SIZE = 256
BATCHES = 16  # number of batches drawn in one call of `sample_many`
EPISODE_STEPS = 50  # also the number of transitions of one `extend`
OBSERVATION, GOAL, ACTION = 25, 3, 4
THRESHOLD = 0.05
K = 4  # the paper's k: relabelled goals for each original one
HER_RATIO = K / (K + 1)
UNREACHABLE = 10.0  # between all achieved goals and all original desired goals

Transitions = dict[str, np.ndarray]


def make_episodes(count: int, rng: np.random.Generator) -> Transitions:
    """Return random walks that never reach their goals, as arrays of `count * EPISODE_STEPS` rows."""
    steps = rng.uniform(-0.03, 0.03, (count, EPISODE_STEPS + 1, GOAL))
    achieved = (rng.random((count, 1, GOAL)) + steps.cumsum(axis=1)).astype(np.float32)
    observation = rng.random((count, EPISODE_STEPS + 1, OBSERVATION), dtype=np.float32)
    desired = UNREACHABLE + rng.random((count, 1, GOAL), dtype=np.float32)
    last = np.arange(EPISODE_STEPS) == EPISODE_STEPS - 1
    by_episode = {
        "episode": rng.integers(2**40, size=(count, 1)).repeat(EPISODE_STEPS, axis=1),
        "observation": observation[:, :-1],
        "achieved_goal": achieved[:, :-1],
        "desired_goal": desired.repeat(EPISODE_STEPS, axis=1),
        "action": rng.random((count, EPISODE_STEPS, ACTION), dtype=np.float32),
        "next_observation": observation[:, 1:],
        "next_achieved_goal": achieved[:, 1:],
        "reward": np.full((count, EPISODE_STEPS, 1), -1.0, dtype=np.float32),
        "truncated": np.tile(last[:, None], (count, 1, 1)),
    }
    return {key: value.reshape(count * EPISODE_STEPS, *value.shape[2:]) for key, value in by_episode.items()}


def make_transitions(count: int) -> Iterator[Transitions]:
    """Yield `count` transitions in blocks of at most 1,000 episodes."""
    rng = np.random.default_rng(0)
    episodes = count // EPISODE_STEPS
    for start in range(0, episodes, 1000):
        yield make_episodes(min(1000, episodes - start), rng)


def sparse_reward(achieved_goal: np.ndarray, desired_goal: np.ndarray) -> np.ndarray:
    distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
    return -(distance > THRESHOLD).astype(np.float32)


@dataclass
class Sampled:
    """The entries of a batch that the checks need: goals `[batch, goal]` and rewards `[batch]`."""

    next_achieved_goal: np.ndarray
    desired_goal: np.ndarray
    reward: np.ndarray
