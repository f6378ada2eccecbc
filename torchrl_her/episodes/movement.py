"""Priorities of transitions in whose episode the achieved goal moves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_her.episodes.stamps import STAMP, read_stamps
from torchrl_her.keys import get_entry
from torchrl_her.storage.buffer_transform import BufferTransform


class MovementPriority(BufferTransform):
    """Gives transitions a priority: how far the achieved goal moves in their episode.

    In tasks where an object must be moved, it lies still in most episodes of an untrained agent. Relabelling such an
    episode only teaches to leave the object where it is. With this transform, a prioritized buffer samples episodes in
    which the object moves more often. It is energy-based prioritization (Zhao and Tresp 2018, arXiv:1810.01363), with
    the length of the path in place of the energy.

    Each written transition gets an entry ``"movement"``, ``float32 [*batch]``: ``lowest + min(path / far, 1)``, where
    ``path`` is the length of the path of the achieved goal in the transition's episode. List the transform before
    `HERTransform`, which identifies the episodes, and pass ``priority_key="movement"`` to the buffer. Write whole
    episodes if possible, since the path is computed for each write.

    Args:
        far (float): the length of the path that gives the highest priority, in units of the goal.

    Keyword Args:
        lowest (float): the priority of transitions in whose episode nothing moves. Default: 0.05.
        achieved_goal_key (NestedKey): as in `HERTransform`. Default: ``"achieved_goal"``.
        goal_fn (Callable, optional): as in `HERTransform`.

    Raises:
        ValueError: if ``far`` or ``lowest`` is not positive.
        KeyError: when writing (nothing is stored then), if there is no achieved goal, or if HERTransform is not listed
            after this transform.

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
        """Return sampled transitions as they are."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.get(STAMP, None) is None:
            raise KeyError(
                "MovementPriority finds no stamps of HERTransform: list it before HERTransform, "
                "Compose(MovementPriority(...), HERTransform(...))."
            )
        ids, _ = read_stamps(tensordict)
        found, episode = ids.unique(return_inverse=True)
        begin, end = self._goals(tensordict, ()), self._goals(tensordict, ("next",))
        path = torch.zeros(len(found), device=end.device).index_add_(0, episode, (end - begin).norm(dim=1))
        path = torch.where(found == 0, 0.0, path)  # padding
        priority = self.lowest + (path / self.far).clamp_max(1.0)
        return tensordict.set("movement", priority[episode].view(tensordict.batch_size))

    def _goals(self, tensordict: TensorDictBase, place: tuple[str, ...]) -> Tensor:
        """Return the goals achieved before, ``()``, or after the steps, ``("next",)``: ``float32 [n, goal]``."""
        achieved = get_entry(tensordict, unravel_key((*place, self.achieved_goal_key)), "achieved_goal_key")
        achieved = achieved.reshape(-1, *achieved.shape[tensordict.ndim :])
        goals = achieved if self.goal_fn is None else self.goal_fn(achieved)
        return goals.float().reshape(len(goals), -1)
