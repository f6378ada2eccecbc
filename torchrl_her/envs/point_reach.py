"""PointReach: move a point mass to a goal in the plane."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class PointReach(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Move a point mass to a goal in the square [-1, 1]².

    An action is ``float32 [2]`` in [-1, 1]; values outside are clipped. Multiplied by 10, it is the acceleration ``a``.
    With ``dt = 0.05``, a step computes ``v = clip(v + a * dt, -1, 1)`` and then ``x = clip(x + v * dt, -1, 1)``. Start
    and goal are drawn uniformly from the square, and the mass starts at rest.

    An observation is a dictionary of ``float32`` arrays: ``"observation"`` ``[4]`` (position and velocity),
    ``"achieved_goal"`` ``[2]`` (the position) and ``"desired_goal"`` ``[2]``. The reward is 0 within 0.05 of the goal
    (Euclidean distance) and -1 elsewhere. Episodes never terminate. ``gymnasium.make("torchrl_her/PointReach-v0")``
    truncates them after 50 steps.

    Keyword Args:
        render_mode (str, optional): ``"rgb_array"`` makes ``render`` return a picture of the square from above,
            ``uint8 [256, 256, 3]``. Default: None, no rendering.

    Raises:
        ValueError: if ``render_mode`` has another value. ``step`` raises it for an action that is not two finite
            numbers.

    Examples:
        >>> import gymnasium, numpy as np, torchrl_her.envs
        >>> env = gymnasium.make("torchrl_her/PointReach-v0")
        >>> observation, info = env.reset(seed=0)
        >>> observation["achieved_goal"]
        array([ 0.27392337, -0.46042657], dtype=float32)
        >>> observation, *others = env.step(np.ones(2, dtype=np.float32))
        >>> observation["observation"]  # v = 10 * 0.05 = 0.5 and x moves by 0.5 * 0.05
        array([ 0.29892337, -0.43542656,  0.5       ,  0.5       ], dtype=float32)
        >>> others
        [-1.0, False, False, {'is_success': np.float32(0.0)}]
        >>> env.unwrapped.compute_reward([[0.0, 0.0], [0.04, 0.0], [0.04, 0.04]], [0.0, 0.0], {})
        array([ 0.,  0., -1.], dtype=float32)
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    dt = 0.05
    max_acceleration = 10.0
    threshold = 0.05

    def __init__(self, *, render_mode: str | None = None):
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be None or "rgb_array", got {render_mode!r}.')
        self.render_mode = render_mode
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)
        sizes = {"observation": 4, "achieved_goal": 2, "desired_goal": 2}
        self.observation_space = Dict({key: Box(-1.0, 1.0, (size,), np.float32) for key, size in sizes.items()})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Draw a start and a goal; ``options`` are ignored."""
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1.0, 1.0, (2, 2)).astype(np.float32)
        self.velocity: np.ndarray = np.zeros(2, dtype=np.float32)
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Accelerate for one time step."""
        action = np.asarray(action, dtype=np.float32)
        if action.shape != (2,) or not np.isfinite(action).all():
            raise ValueError(f"An action must be two finite numbers in [-1, 1], got {action!r}.")
        acceleration = self.max_acceleration * action.clip(-1.0, 1.0)
        self.velocity = (self.velocity + acceleration * self.dt).clip(-1.0, 1.0)
        self.position = (self.position + self.velocity * self.dt).clip(-1.0, 1.0)
        info = self._info()
        reward = float(self.compute_reward(self.position, self.goal, info))
        return self._observation(), reward, False, False, info

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> np.ndarray:
        """Return 0 for goals ``[*batch, 2]`` at most 0.05 apart and -1 for others: ``float32 [*batch]``."""
        return self._reached(achieved_goal, desired_goal).astype(np.float32) - np.float32(1)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> np.ndarray:
        """Return False for each pair of goals, ``bool [*batch]``: no goal ends an episode."""
        return np.zeros_like(self._reached(achieved_goal, desired_goal))[()]

    compute_truncated = compute_terminated  # the time limit does not depend on goals

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """Return a picture ``uint8 [256, 256, 3]`` with a green disc around the goal and a blue dot for the mass."""
        if self.render_mode is None:
            return None
        axis = (np.arange(256) + 0.5) / 128 - 1  # centres of the pixels
        pixels = np.stack(np.meshgrid(axis, -axis), axis=-1)  # [row, column, (x, y)], y upwards
        picture = np.full((256, 256, 3), 255, dtype=np.uint8)
        picture[self._reached(pixels, self.goal)] = (120, 200, 120)
        picture[np.linalg.norm(pixels - self.position, axis=-1) <= 0.025] = (40, 80, 200)
        return picture

    def _reached(self, achieved_goal: Any, desired_goal: Any) -> np.ndarray:
        distance = np.linalg.norm(np.asarray(achieved_goal) - np.asarray(desired_goal), axis=-1)  # [*batch]
        return distance <= self.threshold

    def _observation(self) -> dict[str, np.ndarray]:
        # Copies, because the caller may write into an observation.
        return {
            "observation": np.concatenate([self.position, self.velocity]),
            "achieved_goal": self.position.copy(),
            "desired_goal": self.goal.copy(),
        }

    def _info(self) -> dict[str, Any]:
        return {"is_success": self._reached(self.position, self.goal).astype(np.float32)}
