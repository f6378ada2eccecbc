"""Goal environments for Gymnasium, registered when this module is imported.

They follow Gymnasium-Robotics' goal API: observations are dictionaries with the keys ``"observation"``,
``"achieved_goal"`` and ``"desired_goal"``, and ``compute_reward(achieved_goal, desired_goal, info)`` takes a batch of
goals. ``info["is_success"]`` is a ``np.float32``: 1 if the desired goal is achieved, and 0 otherwise.

| id | class | end of an episode |
|---|---|---|
| ``"torchrl_her/PointReach-v0"`` | `PointReach` | truncated after 50 steps |
| ``"torchrl_her/BitFlipping-v0"`` | `BitFlipping` | terminates on success, truncated after ``n_bits`` steps |

A worker process that is started with ``spawn`` has not imported this module. Name the module in the id, so that
Gymnasium imports it there:
``"torchrl_her.envs:torchrl_her/PointReach-v0"``.

Examples:
    >>> import torchrl_her.envs
    >>> from torchrl.envs import GymEnv, default_info_dict_reader
    >>> env = GymEnv("torchrl_her/PointReach-v0")
    >>> env = env.set_info_dict_reader(default_info_dict_reader(["is_success"]))
    >>> env.rollout(100)["next", "is_success"].shape
    torch.Size([50])
"""

from gymnasium import register

from torchrl_her.envs.bit_flipping import BitFlipping
from torchrl_her.envs.point_reach import PointReach

__all__ = ["BitFlipping", "PointReach"]

register("torchrl_her/PointReach-v0", "torchrl_her.envs.point_reach:PointReach", max_episode_steps=50)
register("torchrl_her/BitFlipping-v0", "torchrl_her.envs.bit_flipping:BitFlipping")
