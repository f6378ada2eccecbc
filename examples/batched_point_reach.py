"""PointReach as a batch of tensors: thousands of point masses step at once, on any device.

The same task as `torchrl_her.envs.PointReach`, for collecting on a GPU. ``benchmarks/gpu.py`` trains on it.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_her.envs import PointReach


class BatchedPointReach(EnvBase):
    """``num_envs`` point masses that step together, each with its own goal.

    Dynamics, observations and rewards are those of `PointReach`, up to the rounding of ``float32``. Stepping and
    resetting never read a value from the device. Therefore, unlike in `PointReach`, actions that are not finite are not
    an error.

    Args:
        num_envs (int): the number of point masses, which is the batch size.

    Keyword Args:
        device (torch.device or str): the device of all tensors. Default: ``"cpu"``.
        max_episode_steps (int): the step at which an episode is truncated. Default: 50.
        seed (int, optional): the seed of starts and goals. By default, it is drawn from torch's default generator.

    Examples:
        >>> from batched_point_reach import BatchedPointReach
        >>> env = BatchedPointReach(3, seed=0)
        >>> episodes = env.rollout(50)
        >>> episodes["next", "observation"].shape, episodes["next", "reward"].unique()
        (torch.Size([3, 50, 4]), tensor([-1.]))
        >>> episodes["next", "truncated"][:, -2:, 0]
        tensor([[False,  True],
                [False,  True],
                [False,  True]])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int = 50,
        seed: int | None = None,
    ):
        super().__init__(device=device, batch_size=[num_envs])
        self.max_episode_steps = max_episode_steps
        options = {"dtype": torch.float32, "device": self.device}
        sizes = {"observation": 4, "achieved_goal": 2, "desired_goal": 2}
        boxes = {key: Bounded(-1.0, 1.0, (num_envs, size), **options) for key, size in sizes.items()}
        flag = {"dtype": torch.bool, "device": self.device}
        flags = {key: Binary(1, (num_envs, 1), **flag) for key in ("done", "terminated", "truncated")}
        self.observation_spec = Composite(boxes, shape=(num_envs,), device=self.device)
        self.action_spec = Bounded(-1.0, 1.0, (num_envs, 2), **options)
        self.reward_spec = Unbounded((num_envs, 1), **options)
        self.full_done_spec = Composite(flags, shape=(num_envs,), device=self.device)

        self.generator = torch.Generator(self.device)
        self.set_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        self.position, self.velocity, self.goal = torch.zeros(3, num_envs, 2, **options)
        self.steps = torch.zeros(num_envs, 1, dtype=torch.int64, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        start, goal = 2 * torch.rand(2, *self.batch_size, 2, generator=self.generator, device=self.device) - 1
        reset = None if tensordict is None else tensordict.get("_reset", None)  # bool [num_envs, 1]
        if reset is None:
            reset = torch.ones_like(self.steps, dtype=torch.bool)
        self.position = torch.where(reset, start, self.position)
        self.velocity = torch.where(reset, 0.0, self.velocity)
        self.goal = torch.where(reset, goal, self.goal)
        self.steps = torch.where(reset, 0, self.steps)
        return self._state()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        acceleration = PointReach.max_acceleration * tensordict.get("action").clamp(-1.0, 1.0)
        self.velocity = (self.velocity + acceleration * PointReach.dt).clamp(-1.0, 1.0)
        self.position = (self.position + self.velocity * PointReach.dt).clamp(-1.0, 1.0)
        self.steps = self.steps + 1
        return self._state().set("reward", reward(self.position, self.goal).unsqueeze(-1))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.generator.manual_seed(seed)

    def _state(self) -> TensorDict:
        """Return the observations and flags ``[num_envs]``."""
        truncated = self.steps >= self.max_episode_steps
        state = {
            "observation": torch.cat([self.position, self.velocity], dim=-1),
            "achieved_goal": self.position,
            "desired_goal": self.goal,
            "terminated": torch.zeros_like(truncated),
            "truncated": truncated,
            "done": truncated.clone(),
        }
        return TensorDict(state, self.batch_size, device=self.device)


def reward(achieved_goal: Tensor, desired_goal: Tensor) -> Tensor:
    """Return 0 for goals ``[*batch, 2]`` that are at most 0.05 apart, else -1: ``float32 [*batch]``."""
    distance = torch.linalg.vector_norm(achieved_goal - desired_goal, dim=-1)
    return (distance <= PointReach.threshold).float() - 1
