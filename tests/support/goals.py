"""One reward and one termination for all goals of the tests.

A goal is a vector of whole numbers, ``[..., 1]``, ``[..., 2]`` or ``[..., 3]``. The last component is *when* it was
achieved (a step or a cell), and the others are *where* (the episode, or the environment and the episode).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# For (environment, episode, cell); shorter goals use the last ones. All sums are whole numbers below 2**24, which
# float32 represents exactly. In an episode's own goals the first two cancel: n-step sums stay small, and precise.
ACHIEVED_WEIGHTS = (65537, 257, 16)
DESIRED_WEIGHTS = (65537, 257, 1)


def reward_of(achieved: Any, desired: Any) -> Any:
    """Return a reward that differs for nearby pairs of goals: numbers, tuples or arrays ``[..., components]``."""
    return _weighed(achieved, ACHIEVED_WEIGHTS) - _weighed(desired, DESIRED_WEIGHTS)


def reached(achieved: Any, desired: Any) -> Any:
    """Return whether goals are equal: a bool, or ``[...]`` for arrays and tensors ``[..., components]``."""
    equal = achieved == desired
    return equal.all(-1) if isinstance(equal, (np.ndarray, torch.Tensor)) else equal


def _weighed(goal: Any, weights: tuple[int, ...]) -> Any:
    if isinstance(goal, (np.ndarray, torch.Tensor)):
        components = [goal[..., index] for index in range(goal.shape[-1])]
    else:
        components = list(goal) if isinstance(goal, tuple) else [goal]
    assert len(components) <= len(weights), f"a goal has at most {len(weights)} components, not {len(components)}"
    return sum(weight * value for weight, value in zip(weights[-len(components) :], components, strict=True))
