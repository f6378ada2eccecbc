"""Hindsight with Ray: collectors and replay buffer run in Ray actors, on one machine or several.

It starts a Ray cluster on this machine, trains the networks of `ddpg.py` on PointReach, stops the cluster and prints
the success rate::

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

import ddpg
import ray
from ray.exceptions import RayActorError, RayTaskError
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.collectors.distributed import RayCollector
from torchrl.data import RayReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import ExplorationType
from torchrl.modules import AdditiveGaussianModule, EGreedyModule
from torchrl.objectives import SoftUpdate
from tqdm import tqdm
from training.command import plain_ddpg
from training.environments import Evaluation, make_env, make_reward
from training.parts import make_adam, make_inputs
from training.prepare import prepare
from training.settings import DDPG

from torchrl_her import HERTransform, PackedStorage, call_transform

EPISODE_STEPS = 50
FIRST_UPDATE = 1_000  # environment steps before the first update
RESOURCES = {"num_cpus": 1}  # of each actor; Ray starts one if enough CPUs are free. The learner is not an actor.
WAIT = 60  # seconds to wait for free CPUs
STARTS = 5  # of collectors in a row that write no episode


def free_cpus(wanted: int) -> int:
    """Wait until CPUs are free, and return their number, at most ``wanted``. Ray itself would wait without a limit."""
    until = time.monotonic() + WAIT
    while (free := int(ray.available_resources().get("CPU", 0))) < wanted and time.monotonic() < until:
        time.sleep(0.5)
    if free == 0:
        sys.exit(f"No CPU of the cluster became free within {WAIT} s. Its resources: {ray.cluster_resources()}")
    return min(free, wanted)


# Data, in actors


def make_hindsight(config: DDPG) -> HERTransform:
    return HERTransform(make_reward(config.env), capacity=config.buffer.size)


def make_replay_buffer(config: DDPG) -> RayReplayBuffer:
    """Return a replay buffer with hindsight in a separate actor, which also contains the goal table."""
    free_cpus(1)
    replay_buffer = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(PackedStorage, config.buffer.size),
        transform_factory=partial(make_hindsight, config),
        remote_config=RESOURCES,
    )
    len(replay_buffer)  # waits for the actor, and raises an error if it failed
    return replay_buffer


def make_collector(
    config: DDPG, policy: TensorDictSequential, replay_buffer: RayReplayBuffer, steps: int, collectors: int
) -> RayCollector:
    """Return collectors in separate actors, which write whole episodes into the buffer.

    Each episode is collected with the newest weights. The others collect while the learner makes its updates.
    """
    collector = RayCollector(
        [partial(make_env, config.env)] * collectors,
        policy,
        frames_per_batch=EPISODE_STEPS,
        total_frames=steps,
        exploration_type=ExplorationType.RANDOM,
        replay_buffer=replay_buffer,
        remote_configs=RESOURCES,
        update_after_each_batch=True,
    )
    collector.update_policy_weights_()
    return collector


def collect(
    config: DDPG, policy: TensorDictSequential, replay_buffer: RayReplayBuffer, collectors: int
) -> Iterator[None]:
    """Yield after each written episode. If a collector dies, start new collectors that write into the same buffer."""
    written = failures = 0
    while (steps := config.total_steps - written) > 0:
        try:
            for _ in make_collector(config, policy, replay_buffer, steps, free_cpus(collectors)):
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


def train(config: DDPG, collectors: int) -> float:
    """Train an agent, and return its success rate."""
    env = prepare(config)
    inputs, spec = make_inputs(config, env), env.action_spec
    policy, critic = ddpg.make_policy(config, env, inputs), ddpg.make_critic(config, env, inputs)
    loss = ddpg.make_loss(config, policy[1:], critic)
    target_updater, optimizer = SoftUpdate(loss, tau=config.tau), make_adam(config, loss.parameters())
    exploring = TensorDictSequential(
        policy,
        AdditiveGaussianModule(spec, sigma_init=config.exploration.noise, sigma_end=config.exploration.noise),
        EGreedyModule(spec, eps_end=config.exploration.random_actions, annealing_num_steps=FIRST_UPDATE),
    )

    def update(batch: TensorDictBase) -> None:
        losses = loss(batch)
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_value"]).backward()
        optimizer.step()
        target_updater.step()

    replay_buffer = make_replay_buffer(config)
    with tqdm(total=config.total_steps, unit=" steps", mininterval=0.2 if sys.stderr.isatty() else 10.0) as bar:
        for _ in collect(config, exploring, replay_buffer, collectors):
            bar.update(EPISODE_STEPS)
            exploring[-1].step(EPISODE_STEPS)  # in the learner: buffers are sent to the collectors with the weights
            if bar.n >= FIRST_UPDATE:
                # One call for all updates: separate calls would take twenty times as long.
                sampled = replay_buffer.sample(int(config.updates_per_step * EPISODE_STEPS) * config.batch_size)
                for batch in sampled.split(config.batch_size):
                    update(inputs(batch))
    print(call_transform(replay_buffer, "report"))  # warnings of the actors are only in Ray's log files
    return Evaluation(config)(policy)["success"].mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_000, help="environment steps, of all collectors together")
    parser.add_argument("--collectors", type=int, default=2, help="number of collectors, each in a separate process")
    parser.add_argument("--address", default="local", help='of a cluster: "auto" or host:port (default: start one)')
    arguments = parser.parse_args()
    settings: dict = {"evaluation": {"episodes": 100}, "normalization": {"enabled": False}}
    config = plain_ddpg(total_steps=arguments.steps, updates_per_step=2, **settings)
    try:
        local = {"num_cpus": 1 + arguments.collectors, "include_dashboard": False}
        options = local if arguments.address == "local" else {}
        ray.init(address=arguments.address, log_to_driver=False, logging_level=logging.ERROR, **options)
        success = train(config, arguments.collectors)
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    except RayActorError as error:  # `collect` replaces collectors, so this is the replay buffer
        sys.exit(f"The replay buffer died, and its transitions are lost.\n{error}")
    finally:
        ray.shutdown()  # ends all actors of this script, and the cluster if the script started it
    print(f"Success rate of 100 greedy episodes: {success:.2f}.")


if __name__ == "__main__":
    main()
