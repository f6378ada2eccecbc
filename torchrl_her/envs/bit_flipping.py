"""BitFlipping: flip one bit at a time until all bits equal the goal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space

IMAGE_SHAPE = (1, 36, 36)  # as in Stable-Baselines3's BitFlippingEnv


class BitFlipping(gymnasium.Env[dict[str, Any], Any]):
    """Flip bits until they equal a goal.

    The environment is described in section 3.1 of the [HER paper](https://arxiv.org/abs/1707.01495).

    Action ``i`` flips bit ``i``. The reward is 0 if all bits equal the goal, and -1 otherwise. An episode terminates on
    success and is truncated after ``max_steps``; if the last step succeeds, both flags are True. Goal and start are
    drawn uniformly, and a start that equals the goal is drawn again.

    Observations are dictionaries with the keys ``"observation"``, ``"achieved_goal"`` (both hold the bits) and
    ``"desired_goal"``. Each value is ``float32 [n_bits]`` of 0 and 1, unless another encoding is chosen.

    Args:
        n_bits (int): the number of bits. Default: 15, with which DQN fails without hindsight.

    Keyword Args:
        max_steps (int, optional): the number of steps after which an episode is truncated. Default: ``n_bits``.
        fixed_goal (bool): whether the goal is always all ones, as in Stable-Baselines3's environment. This is easier,
            because the policy can ignore the goal. Default: False.
        continuous (bool): whether actions are ``float32 [n_bits]`` in [-1, 1]. Such an action flips every bit whose
            entry is above 0. Default: False.
        image_observation (bool): whether bits and goals are images ``uint8 [1, 36, 36]``. The first ``n_bits`` pixels,
            row by row, are 255 for set bits, and all other pixels are 0. At most 1,296 bits. Default: False.
        discrete_observation (bool): whether bits and goals are an ``int`` in which bit i counts ``2**i``. At most 62
            bits. TorchRL's ``GymEnv`` converts it to a one-hot vector of ``2**n_bits`` entries, unless you pass
            ``categorical_action_encoding=True``. Default: False.

    Raises:
        ValueError: if an argument is out of range, or both encodings are chosen. ``step`` raises it for an action
            outside the action space (continuous: not ``n_bits`` finite numbers).

    Examples:
        >>> import gymnasium, torchrl_her.envs
        >>> env = gymnasium.make("torchrl_her/BitFlipping-v0", n_bits=4)
        >>> observation, info = env.reset(seed=1)
        >>> observation["achieved_goal"], observation["desired_goal"]
        (array([0., 0., 1., 1.], dtype=float32), array([0., 1., 1., 1.], dtype=float32))
        >>> observation, *others = env.step(1)
        >>> observation["achieved_goal"], *others
        (array([0., 1., 1., 1.], dtype=float32), 0.0, True, False, {'is_success': np.float32(1.0)})
        >>> env.unwrapped.compute_reward([[0, 0, 1, 1], [1, 1, 1, 1]], [1, 1, 1, 1], {})
        array([-1.,  0.], dtype=float32)
    """

    def __init__(
        self,
        n_bits: int = 15,
        *,
        max_steps: int | None = None,
        fixed_goal: bool = False,
        continuous: bool = False,
        image_observation: bool = False,
        discrete_observation: bool = False,
    ):
        if image_observation and discrete_observation:
            raise ValueError(
                "Observations are images or integers: set only one of image_observation, discrete_observation."
            )
        if n_bits < 1:
            raise ValueError(f"n_bits must be at least 1, got {n_bits}.")
        if image_observation and n_bits > np.prod(IMAGE_SHAPE):
            raise ValueError(f"n_bits must be at most {np.prod(IMAGE_SHAPE)}, the pixels of an image, got {n_bits}.")
        if discrete_observation and n_bits > 62:
            raise ValueError(f"n_bits must be at most 62, to fit into an int64, got {n_bits}.")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, or None for n_bits, got {max_steps}.")
        self.n_bits = n_bits
        self.max_steps = n_bits if max_steps is None else max_steps
        self.fixed_goal = fixed_goal
        self.continuous = continuous
        self.image_observation = image_observation
        self.discrete_observation = discrete_observation
        self.action_space = Box(-1.0, 1.0, (n_bits,), np.float32) if continuous else Discrete(n_bits)
        keys = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = Dict({key: self._goal_space() for key in keys})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw a goal and a start that differs from it; ``options`` are ignored."""
        super().reset(seed=seed)
        self.goal = np.ones(self.n_bits, dtype=bool) if self.fixed_goal else self._draw()
        self.bits = self.goal
        while np.array_equal(self.bits, self.goal):
            self.bits = self._draw()
        self.n_steps = 0
        return self._observation(), {"is_success": np.float32(0)}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Flip one bit, or, with continuous actions, any number of bits."""
        if self.continuous:
            action = np.asarray(action, dtype=np.float32)
            if action.shape != (self.n_bits,) or not np.isfinite(action).all():
                raise ValueError(f"An action must be {self.n_bits} finite numbers in [-1, 1], got {action!r}.")
            flipped = action > 0  # [n_bits]
        else:
            if not self.action_space.contains(action):
                raise ValueError(f"An action must be an integer from 0 to {self.n_bits - 1}, got {action!r}.")
            flipped = np.arange(self.n_bits) == action
        self.bits = self.bits ^ flipped
        self.n_steps += 1
        success = np.array_equal(self.bits, self.goal)
        info = {"is_success": np.float32(success)}
        return self._observation(), float(success) - 1.0, success, self.n_steps >= self.max_steps, info

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> np.ndarray:
        """Return 0 for equal goals ``[*batch, *goal]`` and -1 for different ones: ``float32 [*batch]``."""
        return self.compute_terminated(achieved_goal, desired_goal, info).astype(np.float32) - np.float32(1)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> np.ndarray:
        """Return whether goals ``[*batch, *goal]`` (or integers ``[batch, 1]``) are equal: ``bool [*batch]``."""
        same = np.asarray(achieved_goal) == np.asarray(desired_goal)  # [*batch, *goal]
        goal_dims = 3 if self.image_observation else 0 if self.discrete_observation and same.shape[1:] != (1,) else 1
        return np.all(same, axis=tuple(range(-goal_dims, 0)))

    def compute_truncated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> np.ndarray:
        """Return False for each pair of goals, ``bool [*batch]``: the time limit does not depend on goals."""
        return np.zeros_like(self.compute_terminated(achieved_goal, desired_goal, info))[()]

    def _goal_space(self) -> Space[Any]:
        if self.image_observation:
            return Box(0, 255, IMAGE_SHAPE, np.uint8)
        return Discrete(2**self.n_bits) if self.discrete_observation else Box(0.0, 1.0, (self.n_bits,), np.float32)

    def _encode(self, bits: np.ndarray) -> np.ndarray | int:
        if self.image_observation:
            pixels = np.zeros(IMAGE_SHAPE, dtype=np.uint8)
            pixels.reshape(-1)[: self.n_bits] = 255 * bits
            return pixels
        return sum(1 << int(i) for i in np.flatnonzero(bits)) if self.discrete_observation else bits.astype(np.float32)

    def _draw(self) -> np.ndarray:
        return self.np_random.integers(0, 2, self.n_bits).astype(bool)

    def _observation(self) -> dict[str, Any]:
        return {
            "observation": self._encode(self.bits),
            "achieved_goal": self._encode(self.bits),
            "desired_goal": self._encode(self.goal),
        }
