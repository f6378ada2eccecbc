"""Hindsight with Ray: collectors and replay buffer run in Ray actors, on one machine or several.

It starts a Ray cluster on this machine, trains DDPG (Lillicrap et al. 2015, arXiv:1509.02971) on PointReach,
stops the cluster and prints the success rate::

    python examples/ray_point_reach.py

``docs/how-to/ray.md`` explains the processes, and how to run the script on a cluster of several machines.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from functools import partial

# Ray reads this when it is imported. Without it, deleting a collector after an interrupt starts another cluster.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import gymnasium
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torchrl import torchrl_logger
from torchrl.collectors.distributed import RayCollector
from torchrl.data import RayReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, GymEnv, set_exploration_type
from torchrl.modules import MLP, AdditiveGaussianModule, EGreedyModule, TanhModule, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate
from tqdm import tqdm

from torchrl_her import EnvReward, HERTransform, PackedStorage, call_transform

# Configuration

ENV = "torchrl_her/PointReach-v0"
EPISODE_STEPS = 50
EVALUATION_EPISODES = 100
EVALUATION_INTERVAL = 500  # environment steps
EVALUATION_SEED = 1_000_000  # of the first episode; training uses smaller seeds
FIRST_UPDATE = 1_000  # environment steps before the first update
UPDATES_PER_STEP = 2
BATCH_SIZE = 256
HIDDEN = 128  # units in each of two layers
LEARNING_RATE, FINAL_LEARNING_RATE = 2e-3, 5e-4  # decreases linearly from the first to the second
GAMMA = 0.95
TAU = 0.05  # of the target networks' soft update
NOISE = 0.2  # standard deviation, added to the actions
RANDOM_ACTIONS = 0.2  # final share of uniform actions; it decreases from 1 until the first update

# Ray starts an actor if enough CPUs are free. These are the resources of one actor. The learner is not an actor.
REPLAY_BUFFER_RESOURCES = {"num_cpus": 1}
COLLECTOR_RESOURCES = {"num_cpus": 1}
WAIT = 60  # seconds to wait for free CPUs
STARTS = 5  # of collectors in a row that write no episode


# Cluster


def free_cpus(wanted: int) -> int:
    """Wait until CPUs are free, and return their number, at most ``wanted``. Ray itself would wait without a limit."""
    until = time.monotonic() + WAIT
    while (free := int(ray.available_resources().get("CPU", 0))) < wanted and time.monotonic() < until:
        time.sleep(0.5)
    if free == 0:
        sys.exit(f"No CPU of the cluster became free within {WAIT} s. Its resources: {ray.cluster_resources()}")
    return min(free, wanted)


# Environment


def make_env() -> GymEnv:
    import torchrl_her.envs  # noqa: F401 (registers PointReach in the process that uses it)

    return GymEnv(ENV)


def evaluate(policy: TensorDictModule) -> float:
    """Return the success rate: the share of greedy episodes whose last step is at the goal."""
    envs = gymnasium.make_vec(ENV, num_envs=EVALUATION_EPISODES, vectorization_mode="sync")
    observation, _ = envs.reset(seed=EVALUATION_SEED)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(EPISODE_STEPS):
            tensordict = policy(TensorDict(observation, batch_size=EVALUATION_EPISODES))
            observation, _, _, truncated, info = envs.step(tensordict["action"].numpy())
    assert truncated.all()  # so this was the last step
    return float(info["is_success"].mean())


# Networks


def make_networks(env: GymEnv) -> tuple[TensorDictModule, TensorDictModule]:
    """Return the policy and the critic, which read observation and desired goal, concatenated."""
    layers = {"num_cells": [HIDDEN, HIDDEN], "activation_class": nn.ReLU}
    inputs = ["observation", "desired_goal"]
    spec = env.action_spec
    policy = TensorDictSequential(
        TensorDictModule(MLP(out_features=spec.shape[-1], **layers), inputs, ["action"]),
        TanhModule(in_keys=["action"], spec=spec),
    )
    critic = ValueOperator(MLP(out_features=1, **layers), in_keys=[*inputs, "action"])
    with torch.no_grad():
        critic(policy(env.fake_tensordict()))  # initializes the lazy layers
    return policy, critic


# Data, in actors


def make_hindsight(capacity: int) -> HERTransform:
    return HERTransform(EnvReward(make_env), capacity=capacity)


def make_replay_buffer(capacity: int) -> RayReplayBuffer:
    """Return a replay buffer with hindsight in a separate actor, which also contains the goal table."""
    free_cpus(1)
    replay_buffer = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(PackedStorage, capacity),
        transform_factory=partial(make_hindsight, capacity),
        remote_config=REPLAY_BUFFER_RESOURCES,
    )
    len(replay_buffer)  # waits for the actor, and raises an error if it failed
    return replay_buffer


def make_exploration(policy: TensorDictModule) -> TensorDictSequential:
    """Return the exploring policy for the collectors. Its last module anneals the share of random actions."""
    spec = make_env().action_spec
    return TensorDictSequential(
        policy,
        AdditiveGaussianModule(spec, sigma_init=NOISE, sigma_end=NOISE),
        EGreedyModule(spec, eps_init=1.0, eps_end=RANDOM_ACTIONS, annealing_num_steps=FIRST_UPDATE),
    )


def make_collector(
    exploration: TensorDictSequential, replay_buffer: RayReplayBuffer, steps: int, collectors: int
) -> RayCollector:
    """Return collectors in separate actors, which write whole episodes into the buffer.

    Each episode is collected with the newest weights. The others collect while the learner makes its updates.
    """
    collector = RayCollector(
        [make_env] * collectors,
        exploration,
        frames_per_batch=EPISODE_STEPS,
        total_frames=steps,
        exploration_type=ExplorationType.RANDOM,
        replay_buffer=replay_buffer,
        remote_configs=COLLECTOR_RESOURCES,
        update_after_each_batch=True,
    )
    collector.update_policy_weights_()
    return collector


def collect(
    exploration: TensorDictSequential, replay_buffer: RayReplayBuffer, steps: int, collectors: int
) -> Iterator[None]:
    """Yield after each written episode. If a collector dies, start new collectors that write into the same buffer."""
    written = failures = 0
    while written < steps:
        try:
            for _ in make_collector(exploration, replay_buffer, steps - written, free_cpus(collectors)):
                written, failures = written + EPISODE_STEPS, 0
                yield
        except (RayActorError, RuntimeError) as error:  # RuntimeError if weights were sent to a dead collector
            len(replay_buffer)  # raises an error if the replay buffer has died
            if isinstance(error, RayTaskError):  # an error in an environment
                raise
            if (failures := failures + 1) == STARTS:
                sys.exit(f"Collectors died {STARTS} times in a row without writing an episode.\n{error}")
            tqdm.write(f"A collector died after {written:,} steps, so new ones are started.\n{error}", file=sys.stderr)
            call_transform(replay_buffer, "flush")  # the new collectors do not continue the running episodes


# Training, in this process


def train(steps: int, collectors: int) -> float:
    """Train an agent, and return its success rate."""
    policy, critic = make_networks(make_env())
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

    replay_buffer = make_replay_buffer(steps + collectors * EPISODE_STEPS)  # written after the last update, too
    exploration = make_exploration(policy)
    success = evaluate(policy)
    interval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; longer for log files
    with tqdm(total=steps, unit=" steps", mininterval=interval) as bar:
        for _ in collect(exploration, replay_buffer, steps, collectors):
            bar.update(EPISODE_STEPS)
            exploration[-1].step(EPISODE_STEPS)
            if bar.n >= FIRST_UPDATE:
                # One call for all updates: separate calls would take twenty times as long.
                sampled = replay_buffer.sample(UPDATES_PER_STEP * EPISODE_STEPS * BATCH_SIZE)
                for batch in sampled.split(BATCH_SIZE):
                    update(batch)
                scheduler.step()
            if bar.n % EVALUATION_INTERVAL == 0 or bar.n == steps:
                success = evaluate(policy)
            bar.set_postfix(success=f"{success:.2f}", refresh=False)
    print(call_transform(replay_buffer, "report"))  # warnings of the actors are only in Ray's log files
    return success


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_000, help="environment steps, of all collectors together")
    parser.add_argument("--collectors", type=int, default=2, help="number of collectors, each in a separate process")
    parser.add_argument("--seed", type=int, default=1, help="seed of the networks; the order of writes is random")
    parser.add_argument("--address", default="local", help='of a cluster: "auto" or host:port (default: start one)')
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.steps % EPISODE_STEPS:
        parser.error(f"--steps must be a multiple of {EPISODE_STEPS}, the steps of an episode")
    if arguments.collectors < 1:
        parser.error("--collectors must be 1 or more")

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # leaves the other cores to the collectors
    torchrl_logger.setLevel("WARNING")
    start = time.perf_counter()
    try:
        local = {"num_cpus": 1 + arguments.collectors, "include_dashboard": False}
        options = local if arguments.address == "local" else {}
        ray.init(address=arguments.address, log_to_driver=False, logging_level=logging.ERROR, **options)
        success = train(arguments.steps, arguments.collectors)
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    except RayActorError as error:  # `collect` replaces collectors, so this is the replay buffer
        sys.exit(f"The replay buffer died, and its transitions are lost.\n{error}")
    finally:
        ray.shutdown()  # ends all actors of this script, and the cluster if the script started it
    seconds = time.perf_counter() - start
    print(f"Success rate of {EVALUATION_EPISODES} greedy episodes: {success:.2f}, after {seconds:.0f} s in total.")


if __name__ == "__main__":
    main()
