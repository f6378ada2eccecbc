"""TorchRL's replay buffers, without hindsight and with the transforms of this package."""

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
        """Return an empty buffer."""
        return TensorDictReplayBuffer(storage=self.storage(self.size))

    def fill(self) -> None:
        """Write whole episodes, up to 1,000 at once."""
        for transitions in make_transitions(self.size):
            self.extend(self.prepare(transitions))

    def prepare(self, transitions: Transitions) -> TensorDict:
        """Return the transitions as a collector writes them, flattened."""
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
        """Write the transitions in one call."""
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
        """Return the entries that the checks need."""
        keys = ("next", "achieved_goal"), "desired_goal", ("next", "reward")
        achieved, desired, reward = (batch[key].numpy() for key in keys)
        return Sampled(achieved, desired, reward.squeeze(-1))


class Transform(TorchRL):
    """`TorchRL` with `HERTransform`."""

    def make_buffer(self) -> TensorDictReplayBuffer:
        """Return an empty buffer."""
        transform = HERTransform(SparseReward(THRESHOLD), her_ratio=HER_RATIO, capacity=self.size)
        return TensorDictReplayBuffer(storage=self.storage(self.size), transform=transform)


class Untouched(torchrl.envs.Transform):
    """Returns a batch as it is."""

    def forward(self, tensordict: TensorDict) -> TensorDict:
        """Return the batch unchanged."""
        return tensordict


class Undrawn(torchrl.envs.Transform):
    """Sets the stored goals, their rewards and an all-False mark: the minimum work of a relabelling transform."""

    def __init__(self) -> None:
        super().__init__()
        self.reward = SparseReward(THRESHOLD)
        batch_sizes = BATCH_SIZE, BATCHES * BATCH_SIZE
        self.relabelled = {count: torch.zeros(count, 1, dtype=torch.bool) for count in batch_sizes}

    def forward(self, tensordict: TensorDict) -> TensorDict:
        """Return the batch with new entries."""
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
    """`TorchRL` with a transform that does nothing: the cost of calling a transform."""

    def make_buffer(self) -> TensorDictReplayBuffer:
        """Return an empty buffer."""
        return TensorDictReplayBuffer(storage=self.storage(self.size), transform=self.make_transform())

    def make_transform(self) -> torchrl.envs.Transform:
        """Return the transform."""
        return Untouched()


class Floor(NoOp):
    """`TorchRL` with a transform that does the work of hindsight, except for drawing goals."""

    def make_transform(self) -> torchrl.envs.Transform:
        """Return the transform."""
        return Undrawn()


class Packed(TorchRL):
    """`TorchRL` with `PackedStorage`."""

    storage = PackedStorage


class PackedTransform(Transform):
    """`Transform` with `PackedStorage`."""

    storage = PackedStorage


class PackedFloor(Floor):
    """`Floor` with `PackedStorage`."""

    storage = PackedStorage


class PackedFile(TorchRL):
    """`TorchRL` with `PackedStorage` in a memory-mapped file, which is deleted at the end."""

    def make_buffer(self) -> TensorDictReplayBuffer:
        """Return an empty buffer."""
        self.folder = tempfile.TemporaryDirectory()
        storage = PackedStorage(self.size, scratch_dir=self.folder.name)
        return TensorDictReplayBuffer(storage=storage)


class Augmentation(TorchRL):
    """`TorchRL` with `HindsightAugmentation`.

    As for cpprb, copies count as rows: `size` rows are `size / 5` transitions, and `extend(50)` writes 250 rows.
    """

    def make_buffer(self) -> TensorDictReplayBuffer:
        """Return an empty buffer."""
        return TensorDictReplayBuffer(
            storage=self.storage(self.size),
            transform=HindsightAugmentation(SparseReward(THRESHOLD), n_sampled_goal=K, max_episode_steps=EPISODE_STEPS),
        )

    def fill(self) -> None:
        """Write whole episodes, up to 1,000 at once."""
        for transitions in make_transitions(self.size // (K + 1)):
            self.extend(self.prepare(transitions))


class PackedAugmentation(Augmentation):
    """`Augmentation` with `PackedStorage`."""

    storage = PackedStorage


class TorchRLHindsight(TorchRL):
    """TorchRL's `HERReplayBuffer`.

    Writing past its capacity fails, so the buffer has room for a fifth more than `size` rows. When it has grown by a
    tenth, it is emptied and filled again, outside the measured time.
    """

    def make_buffer(self) -> HERReplayBuffer:
        """Return an empty buffer."""
        storage = LazyTensorStorage(self.size + self.size // 5 + EPISODE_STEPS)
        return HERReplayBuffer(self.reward, her_ratio=HER_RATIO, storage=storage)

    @staticmethod
    def reward(transition: TensorDict) -> torch.Tensor:
        """Return the sparse rewards of relabelled transitions."""
        difference = transition["next", "achieved_goal"] - transition["desired_goal"]
        return -(difference.norm(dim=-1, keepdim=True) > THRESHOLD).float()

    def prepare(self, transitions: Transitions) -> TensorDict:
        """Return the transitions, after refilling a buffer that has grown by a tenth."""
        if len(self.buffer) > self.size + self.size // 10:
            self.buffer.empty()
            self.fill()
        return super().prepare(transitions)

    def sample_many(self, count: int) -> Sequence[TensorDict]:
        """Draw several batches in one call.

        The buffer returns relabelled transitions first, so each batch takes every `count`-th transition.
        """
        return self.buffer.sample(count * BATCH_SIZE).view(BATCH_SIZE, count).unbind(1)
