"""TorchRL's replay buffers, with and without hindsight, and the transforms of this package."""

import tempfile
from collections.abc import Sequence

import torch
import torchrl.envs
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage, TensorDictReplayBuffer

from contenders.transitions import (
    BATCH_SIZE,
    BATCHES,
    EPISODE_STEPS,
    HER_RATIO,
    THRESHOLD,
    K,
    Sampled,
    Transitions,
    make_transitions,
)
from torchrl_her import HERTransform, HindsightAugmentation, PackedStorage, SparseReward


class TorchRL:
    """TorchRL's `TensorDictReplayBuffer`, full, without hindsight."""

    storage = LazyTensorStorage

    def __init__(self, size: int):
        self.size = size
        self.buffer = self.make_buffer()

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        return TensorDictReplayBuffer(storage=self.storage(self.size))

    def fill(self) -> None:
        """Write whole episodes, up to 1,000 at once."""
        for transitions in make_transitions(self.size):
            self.extend(self.prepare(transitions))

    def prepare(self, transitions: Transitions) -> TensorDict:
        """What a collector writes, flattened."""
        data = {key: torch.from_numpy(value) for key, value in transitions.items()}
        return TensorDict(
            {
                "observation": data["observation"],
                "achieved_goal": data["achieved_goal"],
                "desired_goal": data["desired_goal"],
                "action": data["action"],
                "collector": {"traj_ids": data["episode"]},
                "next": {
                    "observation": data["next_observation"],
                    "achieved_goal": data["next_achieved_goal"],
                    "desired_goal": data["desired_goal"],
                    "reward": data["reward"],
                    "done": data["truncated"],
                    "truncated": data["truncated"],
                    "terminated": torch.zeros_like(data["truncated"]),
                },
            },
            batch_size=len(data["episode"]),
        )

    def extend(self, data: TensorDict) -> None:
        """Write the transitions at once."""
        self.buffer.extend(data)

    def sample(self) -> TensorDict:
        """Draw one batch."""
        return self.buffer.sample(BATCH_SIZE)

    def sample_many(self, count: int) -> Sequence[TensorDict]:
        """Draw several batches in one call."""
        return self.buffer.sample(count * BATCH_SIZE).split(BATCH_SIZE)

    def __len__(self) -> int:
        return len(self.buffer)

    def read(self, batch: TensorDict) -> Sampled:
        """What the checks need."""
        keys = ("next", "achieved_goal"), "desired_goal", ("next", "reward")
        achieved, desired, reward = (batch[key].numpy() for key in keys)
        return Sampled(achieved, desired, reward.squeeze(-1))


class Transform(TorchRL):
    """The same buffer with HERTransform."""

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        transform = HERTransform(SparseReward(THRESHOLD), her_ratio=HER_RATIO, capacity=self.size)
        return TensorDictReplayBuffer(storage=self.storage(self.size), transform=transform)


class Untouched(torchrl.envs.Transform):
    """Returns a batch as it is."""

    def forward(self, tensordict: TensorDict) -> TensorDict:
        """The same."""
        return tensordict


class Undrawn(torchrl.envs.Transform):
    """Sets the stored goals, their rewards and an all-False mark: the least that any relabelling transform does."""

    def __init__(self) -> None:
        super().__init__()
        self.reward = SparseReward(THRESHOLD)
        batch_sizes = BATCH_SIZE, BATCHES * BATCH_SIZE
        self.relabelled = {count: torch.zeros(count, 1, dtype=torch.bool) for count in batch_sizes}

    def forward(self, tensordict: TensorDict) -> TensorDict:
        """The batch, with new entries."""
        keys = "desired_goal", ("next", "desired_goal"), ("next", "reward")
        relabelled = self.relabelled[len(tensordict)]
        stored = [tensordict.get(key) for key in keys]
        tensordict = tensordict.exclude(*keys)
        for key, value in zip(keys[:2], stored[:2], strict=True):
            tensordict.set(key, torch.where(relabelled, value, value))
        computed = self.reward(tensordict).get(keys[2])
        tensordict.set(keys[2], torch.where(relabelled, computed, stored[2]))
        return tensordict.set(("hindsight", "relabelled"), relabelled)


class NoOp(TorchRL):
    """The first buffer with a transform that does nothing: what TorchRL takes for calling one."""

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        return TensorDictReplayBuffer(storage=self.storage(self.size), transform=self.make_transform())

    def make_transform(self) -> torchrl.envs.Transform:
        """The transform."""
        return Untouched()


class Floor(NoOp):
    """The first buffer with a transform that does everything that hindsight does, except drawing goals."""

    def make_transform(self) -> torchrl.envs.Transform:
        """The transform."""
        return Undrawn()


class Packed(TorchRL):
    """The first buffer with `PackedStorage`."""

    storage = PackedStorage


class PackedTransform(Transform):
    """The same with HERTransform."""

    storage = PackedStorage


class PackedFloor(Floor):
    """As `Floor`, with `PackedStorage`."""

    storage = PackedStorage


class PackedFile(TorchRL):
    """`PackedStorage` in a memory-mapped file, which is deleted in the end."""

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        self.folder = tempfile.TemporaryDirectory()
        storage = PackedStorage(self.size, scratch_dir=self.folder.name)
        return TensorDictReplayBuffer(storage=storage)


class Augmentation(TorchRL):
    """The same buffer with HindsightAugmentation.

    As with cpprb, copies count as stored: `size` rows are `size / 5` transitions, and an `extend(50)` writes 250 rows.
    """

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        return TensorDictReplayBuffer(
            storage=self.storage(self.size),
            transform=HindsightAugmentation(SparseReward(THRESHOLD), n_sampled_goal=K, max_episode_steps=EPISODE_STEPS),
        )

    def fill(self) -> None:
        """Write whole episodes, up to 1,000 at once."""
        for transitions in make_transitions(self.size // (K + 1)):
            self.extend(self.prepare(transitions))


class PackedAugmentation(Augmentation):
    """The same with PackedStorage."""

    storage = PackedStorage


class TorchRLHindsight(TorchRL):
    """TorchRL's `HERReplayBuffer`.

    It fails when it is written past its capacity, so it has room for a fifth more than it is filled with.
    When it has grown by a tenth, it is emptied and filled again, outside the clock.
    """

    def make_buffer(self) -> HERReplayBuffer:
        """An empty buffer."""
        storage = LazyTensorStorage(self.size + self.size // 5 + EPISODE_STEPS)
        return HERReplayBuffer(self.reward, her_ratio=HER_RATIO, storage=storage)

    @staticmethod
    def reward(transition: TensorDict) -> torch.Tensor:
        """The sparse reward of relabelled transitions."""
        difference = transition["next", "achieved_goal"] - transition["desired_goal"]
        return -(difference.norm(dim=-1, keepdim=True) > THRESHOLD).float()

    def prepare(self, transitions: Transitions) -> TensorDict:
        """As above, in a buffer that has grown by less than a tenth."""
        if len(self.buffer) > self.size + self.size // 10:
            self.buffer.empty()
            self.fill()
        return super().prepare(transitions)

    def sample_many(self, count: int) -> Sequence[TensorDict]:
        """Draw several batches in one call.

        Its relabelled transitions come first, so each batch takes every `count`-th transition.
        """
        return self.buffer.sample(count * BATCH_SIZE).view(BATCH_SIZE, count).unbind(1)
