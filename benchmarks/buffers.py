"""The transitions that the benchmarks write, and TorchRL's replay buffers with and without hindsight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import HERReplayBuffer, LazyTensorStorage, Storage, TensorDictReplayBuffer

from torchrl_her import HERTransform, HindsightAugmentation, PackedStorage, SparseReward

BATCH_SIZE = 256
EPISODE_STEPS = 50  # also the transitions of an `extend`
OBSERVATION, GOAL, ACTION = 25, 3, 4
THRESHOLD = 0.05
K = 4  # the paper's k: relabelled goals for each original one
UNREACHABLE = 10.0  # between all achieved goals and all original desired goals


def as_transitions(
    achieved: Tensor, next_achieved: Tensor, desired: Tensor, end: Tensor, ids: Tensor | None = None
) -> TensorDict:
    """Return the transitions that a collector writes: goals ``[*batch, goal]``; ends and ids ``[*batch]``."""
    batch, device = end.shape, end.device
    end = end.unsqueeze(-1)
    root = {"observation": torch.rand(*batch, OBSERVATION, device=device), "achieved_goal": achieved}
    after = {"observation": torch.rand(*batch, OBSERVATION, device=device), "achieved_goal": next_achieved}
    after |= {"desired_goal": desired.clone(), "reward": torch.full((*batch, 1), -1.0, device=device)}
    after |= {"done": end, "truncated": end.clone(), "terminated": torch.zeros_like(end)}
    root |= {"desired_goal": desired, "action": torch.rand(*batch, ACTION, device=device), "next": after}
    if ids is not None:
        root["collector"] = {"traj_ids": ids}
    # Collectors on the CPU set no device.
    return TensorDict(root, batch, device=None if device.type == "cpu" else device)


def make_episodes(count: int, device: Any = None) -> TensorDict:
    """Return episodes of random walks that never reach their goals, ``[count * EPISODE_STEPS]``."""
    steps = 0.06 * torch.rand(count, EPISODE_STEPS + 1, GOAL, device=device) - 0.03
    achieved = torch.rand(count, 1, GOAL, device=device) + steps.cumsum(1)
    desired = (UNREACHABLE + torch.rand(count, 1, GOAL, device=device)).expand(-1, EPISODE_STEPS, -1)
    ids = torch.randint(2**40, (count, 1), device=device).expand(-1, EPISODE_STEPS)
    end = (torch.arange(EPISODE_STEPS, device=device) == EPISODE_STEPS - 1).expand(count, -1)
    return as_transitions(achieved[:, :-1], achieved[:, 1:], desired, end, ids).reshape(-1)


def make_blocks(count: int, device: Any = None) -> Iterator[TensorDict]:
    """Yield ``count`` transitions in blocks of at most 1,000 episodes."""
    episodes = count // EPISODE_STEPS
    for start in range(0, episodes, 1000):
        yield make_episodes(min(1000, episodes - start), device)


class Contender:
    """A replay buffer to compare, with ``size`` rows, ``copies`` of them for each transition.

    ``prepare`` returns the argument of ``extend``, the form in which a training loop has new transitions. ``sample``
    draws a batch, and ``sample_many`` draws several batches in one call. ``read`` returns the next achieved goals,
    desired goals and rewards of a batch as arrays.
    """

    size: int
    buffer: Any
    copies, relabels = 1, True

    def fill(self) -> None:
        for transitions in make_blocks(self.size // self.copies):
            self.extend(self.prepare(transitions))

    def prepare(self, transitions: TensorDict) -> Any:
        return transitions.copy()

    def extend(self, data: Any) -> None:
        self.buffer.extend(data)

    def sample(self) -> Any:
        return self.buffer.sample(BATCH_SIZE)


class TorchRL(Contender):
    """TorchRL's ``TensorDictReplayBuffer``. ``transform`` makes the transform of a buffer of some size."""

    def __init__(self, size: int, storage: type[Storage] = LazyTensorStorage, transform: Any = None):
        self.size, self.relabels = size, transform in (hindsight, augmentation)
        self.copies = K + 1 if transform is augmentation else 1
        self.buffer = TensorDictReplayBuffer(storage=storage(size), transform=transform and transform(size))

    def sample_many(self, count: int) -> Sequence[TensorDict]:
        return self.buffer.sample(count * BATCH_SIZE).split(BATCH_SIZE)

    def read(self, batch: TensorDict) -> tuple[np.ndarray, ...]:
        keys = ("next", "achieved_goal"), "desired_goal", ("next", "reward")
        return tuple(batch[key].numpy() for key in keys)


class TorchRLHindsight(TorchRL):
    """TorchRL's ``HERReplayBuffer``.

    Writing past its capacity fails, so the buffer has room for a fifth more than ``size`` rows. When it has grown by a
    tenth, it is emptied and filled again, outside the measured time.
    """

    def __init__(self, size: int):
        self.size = size
        storage = LazyTensorStorage(size + size // 5 + EPISODE_STEPS)
        self.buffer = HERReplayBuffer(self.reward, her_ratio=K / (K + 1), storage=storage)

    @staticmethod
    def reward(transition: TensorDict) -> Tensor:
        difference = transition["next", "achieved_goal"] - transition["desired_goal"]
        return -(difference.norm(dim=-1, keepdim=True) > THRESHOLD).float()

    def prepare(self, transitions: TensorDict) -> TensorDict:
        if len(self.buffer) > self.size + self.size // 10:
            self.buffer.empty()
            self.fill()
        return transitions.copy()

    def sample_many(self, count: int) -> Sequence[TensorDict]:
        """Draw several batches. A sample begins with relabelled transitions, so each takes every ``count``-th one."""
        return self.buffer.sample(count * BATCH_SIZE).view(BATCH_SIZE, count).unbind(1)


def hindsight(size: int) -> HERTransform:
    return HERTransform(SparseReward(THRESHOLD), capacity=size)


def augmentation(size: int) -> HindsightAugmentation:
    return HindsightAugmentation(SparseReward(THRESHOLD), n_sampled_goal=K, max_episode_steps=EPISODE_STEPS)


# The rows of the tables.
PLAIN, OURS = "`TensorDictReplayBuffer`, no hindsight", "the same with `HERTransform`"
PACKED, PACKED_OURS = "`PackedStorage`, no hindsight", "`PackedStorage` with `HERTransform`"
AUGMENTATION = "with `HindsightAugmentation`"
PAIRS = {"`LazyTensorStorage`": (PLAIN, OURS), "`PackedStorage`": (PACKED, PACKED_OURS)}
BUFFERS: dict[str, Callable[[int], Contender]] = {
    PLAIN: TorchRL,
    OURS: partial(TorchRL, transform=hindsight),
    PACKED: partial(TorchRL, storage=PackedStorage),
    PACKED_OURS: partial(TorchRL, storage=PackedStorage, transform=hindsight),
    AUGMENTATION: partial(TorchRL, transform=augmentation),
    "`PackedStorage` with `HindsightAugmentation`": partial(TorchRL, storage=PackedStorage, transform=augmentation),
    "TorchRL's `HERReplayBuffer`": TorchRLHindsight,
}
