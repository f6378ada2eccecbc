"""Priorities from the movement of the achieved goal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.episodes.stamps import STAMP, read_stamps
from torchrl_her.keys import get_entry
from torchrl_her.storage.buffer_transform import BufferTransform


class MovementPriority(BufferTransform):
    """Prioritize transitions by how far the achieved goal moves in their episode.

    In manipulation tasks, an untrained agent rarely moves the object. Relabelling an episode without movement only
    teaches the agent to leave the object where it is. With this transform, a prioritized buffer samples episodes with
    movement more often. The method is energy-based prioritization
    ([Zhao and Tresp, 2018](https://arxiv.org/abs/1810.01363)), with the length of the path instead of the energy.

    Each written transition gets an entry ``"movement"``, ``float32 [*batch]``: ``lowest + min(path / far, 1)``, where
    ``path`` is the length of the path of the achieved goal in the transition's episode. Pass
    ``priority_key="movement"`` to the buffer, and place the transform before `HERTransform`, which identifies the
    episodes: ``Compose(MovementPriority(...), HERTransform(...))``. If possible, write whole episodes: the path of an
    episode includes only the steps in the same write.

    Args:
        far (float): the length of the path, in units of the goal, at which the priority reaches its maximum.

    Keyword Args:
        lowest (float): the priority of transitions in episodes without movement. Default: 0.05.
        achieved_goal_key (NestedKey): as in `HERTransform`. Default: ``"achieved_goal"``.
        goal_fn (Callable[[Tensor], Tensor], optional): as in `HERTransform`.

    Raises:
        ValueError: if ``far`` or ``lowest`` is not positive.
        TypeError: if a written achieved goal is not a tensor.
        KeyError: if written transitions have no achieved goal, or if no `HERTransform` comes after this transform. A
            refused write stores nothing.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> from torchrl.envs import Compose, GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform, MovementPriority
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=1.0,
        ...     beta=0.0,
        ...     storage=LazyTensorStorage(1000),
        ...     transform=Compose(MovementPriority(far=0.5), HERTransform(EnvReward(env), capacity=1000)),
        ...     priority_key="movement",
        ... )
        >>> _ = rb.extend(env.rollout(50))
        >>> bool((rb.storage[:]["movement"] > 0.05).all())
        True
    """

    def __init__(
        self,
        far: float,
        *,
        lowest: float = 0.05,
        achieved_goal_key: NestedKey = "achieved_goal",
        goal_fn: Callable[[Tensor], Tensor] | None = None,
    ):
        if far <= 0 or lowest <= 0:
            raise ValueError(f"far and lowest must be positive, got far={far} and lowest={lowest}.")
        super().__init__()
        self.far, self.lowest, self.goal_fn = float(far), float(lowest), goal_fn
        self.achieved_goal_key = unravel_key(achieved_goal_key)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled transitions unchanged."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict is None or tensordict.get(STAMP, None) is None:  # HindsightAugmentation can return None
            raise KeyError(
                "These transitions have no stamps of HERTransform, which MovementPriority needs. It does not work with "
                "HindsightAugmentation. With HERTransform, place it before: Compose(MovementPriority(...), "
                "HERTransform(...))."
            )
        ids, _ = read_stamps(tensordict)
        found, episode = ids.unique(return_inverse=True)
        begin, end = self._goals(tensordict, ()), self._goals(tensordict, ("next",))
        path = torch.zeros(len(found), device=end.device).index_add_(0, episode, (end - begin).norm(dim=1))
        path = torch.where(found == 0, 0.0, path)  # padding
        priority = self.lowest + (path / self.far).clamp_max(1.0)
        return tensordict.set("movement", priority[episode].view(tensordict.batch_size))

    def _goals(self, tensordict: TensorDictBase, place: tuple[str, ...]) -> Tensor:
        """Return the achieved goals at the root, ``()``, or under ``("next",)``, flattened to ``float32 [n, goal]``."""
        achieved = get_entry(tensordict, unravel_key((*place, self.achieved_goal_key)), "achieved_goal_key")
        achieved = achieved.reshape(-1, *achieved.shape[tensordict.ndim :])
        goals = achieved if self.goal_fn is None else self.goal_fn(achieved)
        return goals.float().reshape(len(goals), -1)
