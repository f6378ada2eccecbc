"""The replay buffers that the benchmark compares, and the transitions that it fills them with.

A contender fills itself with `size` rows. `prepare` brings new transitions into the form that its `extend`
takes, as a training loop would hold them; `read` hands a sampled batch to the checks.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import cpprb
import gymnasium as gym
import numpy as np
import stable_baselines3 as sb3
import torch
import torchrl.envs
from gymnasium.spaces import Box
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage, TensorDictReplayBuffer

from torchrl_her import HERTransform, HindsightAugmentation, PackedStorage, SparseReward

BATCH_SIZE = 256
EPISODE_STEPS = 50  # and what one `extend` writes
OBSERVATION, GOAL, ACTION = 25, 3, 4
THRESHOLD = 0.05
K = 4  # the paper's k: relabelled goals for each original one
HER_RATIO = K / (K + 1)
UNREACHABLE = 10.0  # no achieved goal comes near 10, every original desired goal lies beyond it

Transitions = dict[str, np.ndarray]


def make_episodes(count: int, rng: np.random.Generator) -> Transitions:
    """Random walks towards goals that they cannot reach; arrays of `count * EPISODE_STEPS` rows."""
    steps = rng.uniform(-0.03, 0.03, (count, EPISODE_STEPS + 1, GOAL))
    achieved = (rng.random((count, 1, GOAL)) + steps.cumsum(axis=1)).astype(np.float32)
    observation = rng.random((count, EPISODE_STEPS + 1, OBSERVATION), dtype=np.float32)
    desired = UNREACHABLE + rng.random((count, 1, GOAL), dtype=np.float32)
    last = np.arange(EPISODE_STEPS) == EPISODE_STEPS - 1
    by_episode = {
        "episode": rng.integers(2**40, size=(count, 1)).repeat(EPISODE_STEPS, axis=1),
        "observation": observation[:, :-1],
        "achieved_goal": achieved[:, :-1],
        "desired_goal": desired.repeat(EPISODE_STEPS, axis=1),
        "action": rng.random((count, EPISODE_STEPS, ACTION), dtype=np.float32),
        "next_observation": observation[:, 1:],
        "next_achieved_goal": achieved[:, 1:],
        "reward": np.full((count, EPISODE_STEPS, 1), -1.0, dtype=np.float32),
        "truncated": np.tile(last[:, None], (count, 1, 1)),
    }
    return {key: value.reshape(count * EPISODE_STEPS, *value.shape[2:]) for key, value in by_episode.items()}


def make_transitions(count: int) -> Iterator[Transitions]:
    """`count` transitions in blocks of at most 1,000 episodes."""
    rng = np.random.default_rng(0)
    episodes = count // EPISODE_STEPS
    for start in range(0, episodes, 1000):
        yield make_episodes(min(1000, episodes - start), rng)


def sparse_reward(achieved_goal: np.ndarray, desired_goal: np.ndarray) -> np.ndarray:
    distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
    return -(distance > THRESHOLD).astype(np.float32)


@dataclass
class Sampled:
    """What the checks read of a batch: two arrays `[batch, goal]` and one `[batch]`."""

    next_achieved_goal: np.ndarray
    desired_goal: np.ndarray
    reward: np.ndarray


class TorchRL:
    """TorchRL's `TensorDictReplayBuffer`, full, without hindsight."""

    storage = LazyTensorStorage

    def __init__(self, size: int):
        self.size = size
        self.buffer = self.make_buffer()

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        return TensorDictReplayBuffer(storage=self.storage(self.size), batch_size=BATCH_SIZE)

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
        return self.buffer.sample()

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
        return TensorDictReplayBuffer(storage=self.storage(self.size), transform=transform, batch_size=BATCH_SIZE)


class Untouched(torchrl.envs.Transform):
    """Returns a batch as it is."""

    def forward(self, tensordict: TensorDict) -> TensorDict:
        """The same."""
        return tensordict


class Undrawn(torchrl.envs.Transform):
    """Sets the goals that were there, their reward, and a mark that says that they are not new.

    What a plain one does that relabels: entries of its own in place of the storage's, and a reward for each row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reward = SparseReward(THRESHOLD)
        self.relabelled = torch.zeros(BATCH_SIZE, 1, dtype=torch.bool)

    def forward(self, tensordict: TensorDict) -> TensorDict:
        """The batch, with new entries."""
        keys = "desired_goal", ("next", "desired_goal"), ("next", "reward")
        stored = [tensordict.get(key) for key in keys]
        tensordict = tensordict.exclude(*keys)
        for key, value in zip(keys[:2], stored[:2], strict=True):
            tensordict.set(key, torch.where(self.relabelled, value, value))
        computed = self.reward(tensordict).get(keys[2])
        tensordict.set(keys[2], torch.where(self.relabelled, computed, stored[2]))
        return tensordict.set(("hindsight", "relabelled"), self.relabelled)


class NoOp(TorchRL):
    """The first buffer with a transform that does nothing: what TorchRL takes for calling one."""

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        return TensorDictReplayBuffer(
            storage=self.storage(self.size), transform=self.make_transform(), batch_size=BATCH_SIZE
        )

    def make_transform(self) -> torchrl.envs.Transform:
        """The transform."""
        return Untouched()


class Floor(NoOp):
    """The first buffer with a transform that draws no goals, and does what is left of hindsight without that."""

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
        return TensorDictReplayBuffer(storage=storage, batch_size=BATCH_SIZE)


class Augmentation(TorchRL):
    """The same buffer with HindsightAugmentation.

    As with cpprb, copies count as stored: `size` rows are `size / 5` transitions, and an `extend(50)` writes 250 rows.
    """

    def make_buffer(self) -> TensorDictReplayBuffer:
        """An empty buffer."""
        return TensorDictReplayBuffer(
            storage=self.storage(self.size),
            transform=HindsightAugmentation(SparseReward(THRESHOLD), n_sampled_goal=K, max_episode_steps=EPISODE_STEPS),
            batch_size=BATCH_SIZE,
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
        return HERReplayBuffer(self.reward, her_ratio=HER_RATIO, storage=storage, batch_size=BATCH_SIZE)

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


class GoalEnv(gym.Env):
    """What Stable-Baselines3's buffer asks of an environment: spaces and `compute_reward`."""

    observation_space = gym.spaces.Dict(
        observation=Box(-np.inf, np.inf, (OBSERVATION,)),
        achieved_goal=Box(-np.inf, np.inf, (GOAL,)),
        desired_goal=Box(-np.inf, np.inf, (GOAL,)),
    )
    action_space = Box(-1, 1, (ACTION,))

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: list) -> np.ndarray:
        """The sparse reward, batched."""
        return sparse_reward(achieved_goal, desired_goal)


class StableBaselines3:
    """Stable-Baselines3's `HerReplayBuffer`, full; `extend` is one `add` per transition (one environment)."""

    def __init__(self, size: int):
        self.size = size
        env = DummyVecEnv([GoalEnv])
        spaces = env.observation_space, env.action_space
        self.buffer = sb3.HerReplayBuffer(size, *spaces, env, "cpu", n_sampled_goal=K, copy_info_dict=False)

    def fill(self) -> None:
        """Add the transitions one by one."""
        for transitions in make_transitions(self.size):
            self.extend(self.prepare(transitions))

    def prepare(self, transitions: Transitions) -> list[tuple]:
        """The arguments of `add`, whose arrays have a leading dimension for the one environment."""
        rows = [
            {key: value[i : i + 1] for key, value in transitions.items()} for i in range(len(transitions["action"]))
        ]
        keys = ("observation", "achieved_goal", "desired_goal")
        return [
            (
                {key: row[key] for key in keys},
                {key: row.get(f"next_{key}", row[key]) for key in keys},
                row["action"],
                row["reward"][0],
                row["truncated"][0],
                [{"TimeLimit.truncated": bool(row["truncated"])}],
            )
            for row in rows
        ]

    def extend(self, data: list[tuple]) -> None:
        """Add the transitions one by one."""
        for transition in data:
            self.buffer.add(*transition)

    def sample(self) -> DictReplayBufferSamples:
        """Draw one batch."""
        return self.buffer.sample(BATCH_SIZE)

    def __len__(self) -> int:
        return self.buffer.size()

    def read(self, batch: DictReplayBufferSamples) -> Sampled:
        """What the checks need."""
        next_achieved_goal = batch.next_observations["achieved_goal"].numpy()
        desired_goal = batch.observations["desired_goal"].numpy()
        return Sampled(next_achieved_goal, desired_goal, batch.rewards.numpy().squeeze(-1))


class Cpprb:
    """cpprb's `HindsightReplayBuffer`, full, uniform sampling.

    It relabels when an episode is written: a transition is stored once with its original goal and k times
    with another one. All of these rows count as stored here, so `size` rows are `size / 5` transitions,
    and an `extend(50)` writes 250 rows.
    """

    def __init__(self, size: int):
        self.size = size
        self.buffer = cpprb.HindsightReplayBuffer(
            size,
            {
                "observation": {"shape": OBSERVATION},
                "achieved_goal": {"shape": GOAL},
                "action": {"shape": ACTION},
                "next_observation": {"shape": OBSERVATION},
                "next_achieved_goal": {"shape": GOAL},
                "done": {},
            },
            EPISODE_STEPS,
            lambda next_achieved_goal, action, goal: sparse_reward(next_achieved_goal, goal)[:, None],
            state="achieved_goal",
            action="action",
            next_state="next_achieved_goal",
            additional_goals=K,
            prioritized=False,
        )

    def fill(self) -> None:
        """Write episode by episode."""
        for transitions in make_transitions(self.size // (K + 1)):
            self.extend(self.prepare(transitions))

    def prepare(self, transitions: Transitions) -> list[tuple]:
        """Each episode's transitions and its original goal."""
        stored = ("observation", "achieved_goal", "action", "next_observation", "next_achieved_goal")
        data = {key: transitions[key] for key in stored} | {"done": transitions["truncated"]}
        starts = range(0, len(transitions["episode"]), EPISODE_STEPS)
        return [
            (
                {key: value[start : start + EPISODE_STEPS] for key, value in data.items()},
                transitions["desired_goal"][start],
            )
            for start in starts
        ]

    def extend(self, data: list[tuple]) -> None:
        """Write and relabel whole episodes."""
        for episode, goal in data:
            self.buffer.add(**episode)
            self.buffer.on_episode_end(goal)

    def sample(self) -> dict[str, np.ndarray]:
        """Draw one batch."""
        return self.buffer.sample(BATCH_SIZE)

    def __len__(self) -> int:
        return self.buffer.get_stored_size()

    def read(self, batch: dict[str, np.ndarray]) -> Sampled:
        """What the checks need."""
        return Sampled(batch["next_achieved_goal"], batch["goal"], batch["rew"].squeeze(-1))


PLAIN, OURS, TORCHRL, SB3 = "no hindsight", "HERTransform", "HERReplayBuffer", "stable-baselines3"
AUGMENTATION, CPPRB = "HindsightAugmentation", "cpprb"
PACKED_AUGMENTATION = "packed, Augmentation"
PACKED, PACKED_OURS = "packed", "packed, HERTransform"
FILE = "packed in a file"
NO_OP, FLOOR, PACKED_FLOOR = "does nothing", "draws nothing", "packed, draws nothing"
WITHOUT_HINDSIGHT = PLAIN, PACKED, FILE, NO_OP, FLOOR, PACKED_FLOOR
FLOORS = NO_OP, FLOOR, PACKED_FLOOR
CONTENDERS = {
    PLAIN: TorchRL,
    OURS: Transform,
    PACKED: Packed,
    PACKED_OURS: PackedTransform,
    AUGMENTATION: Augmentation,
    PACKED_AUGMENTATION: PackedAugmentation,
    TORCHRL: TorchRLHindsight,
    SB3: StableBaselines3,
    CPPRB: Cpprb,
    NO_OP: NoOp,
    FLOOR: Floor,
    PACKED_FLOOR: PackedFloor,
    FILE: PackedFile,
}
