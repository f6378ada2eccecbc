"""Priorities from the movement of the achieved goal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_her._private import set_container_of_buffer, transforms_around
from torchrl_her.goals.names import read_stamps, split_name
from torchrl_her.keys import HERKeys, check_keys, get_entry, keys_of_hindsight


class MovementPriority(Transform):
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
        keys (HERKeys, optional): the keys of the entries. By default, those of the `HERTransform` in the same buffer.
        goal_fn (Callable[[Tensor], Tensor], optional): as in `HERTransform`.

    Raises:
        ValueError: if ``far`` or ``lowest`` is not a positive, finite number; when sampling, if `HERTransform` has
            adopted a data set, whose transitions have no priorities.
        TypeError: if ``keys`` are not `HERKeys`, or a written achieved goal is not a tensor.
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

    sets_movement = True  # the order of transforms depends on it
    set_container = set_container_of_buffer

    def __init__(
        self,
        far: float,
        *,
        lowest: float = 0.05,
        keys: HERKeys | None = None,
        goal_fn: Callable[[Tensor], Tensor] | None = None,
    ):
        if not (0 < far < math.inf and 0 < lowest < math.inf):
            raise ValueError(f"far and lowest must be positive and finite, got far={far} and lowest={lowest}.")
        if keys is not None:
            check_keys(keys)
        super().__init__()
        self.far, self.lowest, self.goal_fn = float(far), float(lowest), goal_fn
        self._given_keys = keys

    @property
    def _achieved_keys(self) -> tuple[NestedKey, NestedKey]:
        keys = self._given_keys or keys_of_hindsight(self)
        return keys.achieved_goal, keys.next_achieved_goal

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled transitions unchanged."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.check_order()
        ids, _ = split_name(read_stamps(tensordict))
        found, episode = ids.unique(return_inverse=True)
        begin, end = self._goals(tensordict)
        distance = (end - begin).float().reshape(len(end), -1).norm(dim=1)
        path = torch.zeros(len(found), dtype=distance.dtype, device=distance.device).index_add_(0, episode, distance)
        path = torch.where(found == 0, 0.0, path)  # padding
        priority = self.lowest + (path / self.far).clamp_max(1.0)
        return tensordict.set("movement", priority[episode].view(tensordict.batch_size))

    def check_order(self) -> None:
        """Raise an error if no `HERTransform` comes after this transform."""
        _, after = transforms_around(self)
        if not any(getattr(each, "identifies_episodes", False) for each in after):
            raise KeyError(
                "MovementPriority needs the stamps of a HERTransform that comes after it: "
                "Compose(MovementPriority(...), HERTransform(...)). It does not work with HindsightAugmentation."
            )

    def check_write(self, tensordict: TensorDictBase) -> None:
        """Check that transitions ``[*batch]`` have achieved goals. `HERTransform` calls this before it changes."""
        for key in self._achieved_keys:
            get_entry(tensordict, key, "achieved_goal")

    def _goals(self, tensordict: TensorDictBase) -> Iterator[Tensor]:
        """Yield the achieved goals at the root and under ``"next"``, ``[n, *goal]``, in a dtype for differences."""
        for key in self._achieved_keys:
            achieved = get_entry(tensordict, key, "achieved_goal")
            achieved = achieved.reshape(-1, *achieved.shape[tensordict.ndim :])
            goals = achieved if self.goal_fn is None else self.goal_fn(achieved)
            is_float = goals.is_floating_point()
            yield goals.to(torch.promote_types(goals.dtype, torch.float32)) if is_float else goals.long()
