"""Prioritized replay with hindsight: DQN learns to flip 15 bits into a goal pattern.

DQN alone does not learn this (Andrychowicz et al. 2017, section 3.1). Here it is combined with hindsight, as a
transform of the buffer, and with prioritized replay (Schaul et al. 2016, arXiv:1511.05952). The script shows the whole
loop of sampling, computing the loss and updating the priorities::

    python examples/prioritized_bit_flipping.py
"""

from __future__ import annotations

import argparse
import sys

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import torchrl_logger
from torchrl.collectors import Collector
from torchrl.data import TensorDictPrioritizedReplayBuffer
from torchrl.envs import ExplorationType, GymEnv, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate
from tqdm import tqdm

import torchrl_her.envs  # noqa: F401 (registers BitFlipping)
from torchrl_her import EnvReward, HERTransform, PackedStorage

# Configuration

ENV = "torchrl_her/BitFlipping-v0"
BITS = 15
TOTAL_STEPS = 5_000
STEPS_PER_CHUNK = 25  # collected at a time, followed by as many updates
BATCH_SIZE = 128
HIDDEN = 256  # units, in one layer
LEARNING_RATE = 1e-3
GAMMA = 0.98
TAU = 0.05  # of the target network's soft update
RANDOM_ACTIONS = 0.2  # share of uniform actions
# DQNLoss writes the squared TD error, so 0.3 corresponds to the paper's 0.6 for the absolute error.
ALPHA = 0.3
BETA = 0.4  # rises linearly to 1
EVALUATION_EPISODES = 200
EVALUATION_SEED = 1_000_000  # of the first episode; training uses smaller seeds


# Environment


def make_env(seed: int) -> GymEnv:
    env = GymEnv(ENV, n_bits=BITS, categorical_action_encoding=True)
    env.set_seed(seed)
    return env


def evaluate(policy: TensorDictModule) -> float:
    """Return the success rate: the share of greedy episodes that reach their goal."""
    envs = gymnasium.make_vec(ENV, num_envs=EVALUATION_EPISODES, vectorization_mode="sync", n_bits=BITS)
    observation, _ = envs.reset(seed=EVALUATION_SEED)
    solved = torch.zeros(EVALUATION_EPISODES, dtype=torch.bool)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(BITS):
            tensordict = policy(TensorDict(observation, batch_size=EVALUATION_EPISODES))
            observation, _, terminated, _, _ = envs.step(tensordict["action"].numpy())
            solved |= torch.from_numpy(terminated)
    return float(solved.float().mean())


# Network


def make_policy(env: GymEnv) -> TensorDictSequential:
    """Return the greedy policy, whose network reads the observation and the goal, concatenated."""
    values = TensorDictModule(
        MLP(in_features=2 * BITS, out_features=BITS, num_cells=[HIDDEN], activation_class=nn.ReLU),
        in_keys=["observation", "desired_goal"],
        out_keys=["action_value"],
    )
    return TensorDictSequential(values, QValueModule(spec=env.action_spec))


# Data


def make_collector(policy: TensorDictModule, env: GymEnv) -> Collector:
    exploration = EGreedyModule(env.action_spec, eps_init=RANDOM_ACTIONS, eps_end=RANDOM_ACTIONS)
    return Collector(
        env,
        TensorDictSequential(policy, exploration),
        frames_per_batch=STEPS_PER_CHUNK,
        total_frames=TOTAL_STEPS,
        exploration_type=ExplorationType.RANDOM,
        auto_register_policy_transforms=False,
    )


def make_replay_buffer(env: GymEnv, seed: int) -> TensorDictPrioritizedReplayBuffer:
    replay_buffer = TensorDictPrioritizedReplayBuffer(
        alpha=ALPHA,
        beta=BETA,
        storage=PackedStorage(TOTAL_STEPS),
        transform=HERTransform(EnvReward(env), capacity=TOTAL_STEPS),
        batch_size=BATCH_SIZE,
    )
    replay_buffer.set_rng(torch.Generator().manual_seed(seed))  # by default, the sampler draws from NumPy's generator
    return replay_buffer


# Training


def train(seed: int) -> float:
    """Train an agent and return its success rate."""
    torch.manual_seed(seed)
    env = make_env(seed)
    policy = make_policy(env)
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    loss.make_value_estimator(gamma=GAMMA)
    target_updater = SoftUpdate(loss, tau=TAU)
    optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE)
    replay_buffer = make_replay_buffer(env, seed)

    def update() -> None:
        batch = replay_buffer.sample()  # relabelled, with "index" and "priority_weight"
        value = loss(batch)["loss"]  # weights the transitions, and writes "td_error" into the batch
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        target_updater.step()
        replay_buffer.update_tensordict_priority(batch)

    interval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; longer for log files
    bar = tqdm(desc=f"seed {seed}", total=TOTAL_STEPS, unit=" steps", mininterval=interval)
    for data in make_collector(policy, env):
        replay_buffer.extend(data)
        for _ in range(data.numel()):
            update()
        bar.update(data.numel())
        replay_buffer.sampler.beta = BETA + (1 - BETA) * bar.n / TOTAL_STEPS
    bar.close()
    return evaluate(policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # faster for a network of this size
    torchrl_logger.setLevel("WARNING")
    success = train(arguments.seed)
    print(f"Seed {arguments.seed}: {success:.0%} of {EVALUATION_EPISODES} episodes reach their goal.")


if __name__ == "__main__":
    main()
