"""Hindsight with Ray: the collectors and the replay buffer in processes of their own, on one machine or several.

It starts a Ray cluster on this machine, trains DDPG (Lillicrap et al. 2015, arXiv:1509.02971) on PointReach,
stops the cluster and prints the success rate::

    python examples/ray_point_reach.py

What runs where, and what to change for a cluster of several machines: ``docs/how-to/ray.md``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

# Ray reads it when it is imported. Else what is left of a collector that was interrupted starts another cluster.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import ray
import torch
from point_reach import ENV, EPISODE_STEPS, EVALUATION_EPISODES, EVALUATION_INTERVAL, evaluate, make_networks
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch.optim.lr_scheduler import LinearLR
from torchrl import torchrl_logger
from torchrl.collectors.distributed import RayCollector
from torchrl.data import RayReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, GymEnv
from torchrl.modules import AdditiveGaussianModule, EGreedyModule
from torchrl.objectives import DDPGLoss, SoftUpdate
from tqdm import tqdm

from torchrl_her import EnvReward, HERTransform, PackedStorage

# Configuration

FIRST_UPDATE = 1_000  # environment steps before it
UPDATES_PER_STEP = 2
BATCH_SIZE = 256
HIDDEN = 128  # units in each of two layers
LEARNING_RATE, FINAL_LEARNING_RATE = 2e-3, 5e-4  # falls linearly
GAMMA = 0.95
TAU = 0.05  # of the target networks' soft update
NOISE = 0.2  # standard deviation, added to the actions
RANDOM_ACTIONS = 0.2  # share of uniform actions, which falls from 1 until the first update

# Ray counts CPUs, and starts an actor where enough are left. This is for one; the learner is not counted.
REPLAY_BUFFER_RESOURCES = {"num_cpus": 1}
COLLECTOR_RESOURCES = {"num_cpus": 1}


# Cluster


@contextmanager
def ray_cluster(address: str, actors: int) -> Iterator[None]:
    """Start a cluster for so many actors on this machine, or connect to a running one.

    In the end, whatever happened, all that this script has made there is stopped, and the cluster if it was started.
    """
    local: dict[str, Any] = {"num_cpus": actors, "include_dashboard": False} if address == "local" else {}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        yield
    finally:
        ray.shutdown()


# Environment, made in the process that uses it


def make_env() -> GymEnv:
    import torchrl_her.envs  # noqa: F401 (registers PointReach, in each of the processes)

    return GymEnv(ENV)


# Data, in actors


def make_hindsight(capacity: int) -> HERTransform:
    return HERTransform(EnvReward(make_env), capacity=capacity)


def make_replay_buffer(capacity: int) -> RayReplayBuffer:
    """Return a replay buffer in an actor of its own, with hindsight: the goal table is there, too."""
    replay_buffer = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(PackedStorage, capacity),
        transform_factory=partial(make_hindsight, capacity),
        remote_config=REPLAY_BUFFER_RESOURCES,
    )
    len(replay_buffer)  # waits for the actor, and tells what went wrong there
    return replay_buffer


def make_exploration(policy: TensorDictModule) -> TensorDictSequential:
    """Return the policy with noise, of which the collectors have copies; its last module anneals."""
    spec = make_env().action_spec
    return TensorDictSequential(
        policy,
        AdditiveGaussianModule(spec, sigma_init=NOISE, sigma_end=NOISE),
        EGreedyModule(spec, eps_init=1.0, eps_end=RANDOM_ACTIONS, annealing_num_steps=FIRST_UPDATE),
    )


def make_collector(
    exploration: TensorDictSequential, replay_buffer: RayReplayBuffer, steps: int, collectors: int
) -> RayCollector:
    """Return collectors in actors of their own, which write whole episodes into the buffer.

    Each starts an episode with the newest weights, and goes on while the learner learns from the others'.
    """
    return RayCollector(
        [make_env] * collectors,
        exploration,
        frames_per_batch=EPISODE_STEPS,
        total_frames=steps,
        exploration_type=ExplorationType.RANDOM,
        replay_buffer=replay_buffer,
        remote_configs=COLLECTOR_RESOURCES,
        update_after_each_batch=True,
    )


# Training, in this process


def train(steps: int, collectors: int) -> float:
    """Train an agent, and return its success rate."""
    policy, critic = make_networks(HIDDEN, make_env())
    loss = DDPGLoss(policy, critic, delay_actor=True)
    loss.make_value_estimator(gamma=GAMMA)
    target_updater = SoftUpdate(loss, tau=TAU)
    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=True)
    share_left = FINAL_LEARNING_RATE / LEARNING_RATE
    scheduler = LinearLR(optimizer, 1.0, share_left, total_iters=max(1, (steps - FIRST_UPDATE) // EPISODE_STEPS))

    def update(batch: TensorDict) -> None:
        losses = loss(batch)
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_value"]).backward()
        optimizer.step()
        target_updater.step()

    replay_buffer = make_replay_buffer(steps + collectors * EPISODE_STEPS)  # some are ahead at the end
    exploration = make_exploration(policy)
    collector = make_collector(exploration, replay_buffer, steps, collectors)
    collector.update_policy_weights_()
    success = evaluate(policy)
    interval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; a log file needs few lines
    with tqdm(total=steps, unit=" steps", mininterval=interval) as bar:
        for _ in collector:  # an episode was written
            bar.update(EPISODE_STEPS)
            exploration[-1].step(EPISODE_STEPS)
            if bar.n >= FIRST_UPDATE:
                # One call for all of the updates: one for each would take twenty times as long.
                sampled = replay_buffer.sample(UPDATES_PER_STEP * EPISODE_STEPS * BATCH_SIZE)
                for batch in sampled.split(BATCH_SIZE):
                    update(batch)
                scheduler.step()
            if bar.n % EVALUATION_INTERVAL == 0 or bar.n == steps:
                success = evaluate(policy)
            bar.set_postfix(success=f"{success:.2f}", refresh=False)
    return success


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_000, help="environment steps, of all collectors together")
    parser.add_argument("--collectors", type=int, default=2, help="each is a process of its own")
    parser.add_argument("--seed", type=int, default=1, help="of the networks; who is first with an episode is chance")
    parser.add_argument("--address", default="local", help='of a running cluster: "auto", or host:port of its head')
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.steps % EPISODE_STEPS:
        parser.error(f"--steps is a multiple of an episode's {EPISODE_STEPS}")
    if arguments.collectors < 1:
        parser.error("--collectors is at least 1")

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the collectors need the other core
    torchrl_logger.setLevel("WARNING")
    start = time.perf_counter()
    try:
        with ray_cluster(arguments.address, actors=1 + arguments.collectors):
            success = train(arguments.steps, arguments.collectors)
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    seconds = time.perf_counter() - start
    print(f"Success rate of {EVALUATION_EPISODES} greedy episodes: {success:.2f}, after {seconds:.0f} s in all.")


if __name__ == "__main__":
    main()
