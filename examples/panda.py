"""Tasks of panda-gym in which every episode has 50 steps and resets are reproducible, for the training scripts.

In the tasks of panda-gym 3, an episode ends when the goal is reached. Here it continues, as in panda-gym 2 and in the
Fetch tasks, so the policy has to stay at the goal. The tasks are ``PandaReachFixed-v3``, ``PandaPushFixed-v3``,
``PandaSlideFixed-v3`` and ``PandaPickAndPlaceFixed-v3``::

    pip install -c constraints.txt panda-gym
    python examples/sac.py env.name=panda:PandaReachFixed-v3
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import panda_gym  # noqa: F401 (registers its tasks)
from torch import Tensor


class NotTerminated(gymnasium.Wrapper):
    """Continues the episode when the goal is reached, and makes resets reproducible.

    A reset of panda-gym without a seed draws from a new random generator, even if an earlier reset had a seed.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset with a seed, which the last seed determines if none is passed."""
        return self.env.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Make a step that does not terminate the episode."""
        observation, reward, _, truncated, info = self.env.step(action)
        return observation, reward, False, truncated, info


def ten_heights(goals: Tensor) -> Tensor:
    """Return positions of the object with ten times their height, so that lifting counts more than pushing."""
    return goals * goals.new_tensor([1.0, 1.0, 10.0])


def make(task: str, **kwargs: Any) -> gymnasium.Env:
    """Make a task without a time limit. `gymnasium.register` below adds one of 50 steps."""
    return NotTerminated(gymnasium.make(f"{task}-v3", **kwargs).unwrapped)


for name in ("PandaReach", "PandaPush", "PandaSlide", "PandaPickAndPlace"):
    gymnasium.register(f"{name}Fixed-v3", partial(make, name), max_episode_steps=50)
