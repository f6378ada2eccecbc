"""The demo: an agent learns to reach goals, with hindsight and without.

It trains DDPG (Lillicrap et al. 2015, arXiv:1509.02971) on PointReach, on the CPU, and writes a table and two pictures
to ``outputs/demo/``::

    python examples/demo.py --seeds 1
    python examples/demo.py --seeds 11 12 13 14 15

Each seed is trained twice, with hindsight and without. The only difference is ``her_ratio=0``.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import demo_pictures
import torch
from point_reach import ENV, EPISODE_STEPS, EVALUATION_INTERVAL, EVALUATION_SEED, evaluate, make_networks
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler
from torchrl import torchrl_logger
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import ExplorationType, GymEnv
from torchrl.modules import AdditiveGaussianModule, EGreedyModule
from torchrl.objectives import DDPGLoss, SoftUpdate
from tqdm import tqdm

from torchrl_her import EnvReward, HERTransform, PackedStorage

# Configuration


@dataclass(frozen=True)
class Config:
    """The settings of a run. Steps are environment steps."""

    name: str
    her_ratio: float = 0.8
    total_steps: int = 4_000
    random_steps: int = 1_000  # first steps, with uniform actions and no updates
    updates_per_step: int = 2
    batch_size: int = 256
    hidden: int = 128  # units in each of two layers
    learning_rate: float = 2e-3
    final_learning_rate: float = 5e-4  # reached linearly
    gamma: float = 0.95
    tau: float = 0.05  # of the target networks' soft update
    noise: float = 0.2  # standard deviation, added to the actions
    random_actions: float = 0.2  # share of uniform actions


WITH = Config("with hindsight")
WITHOUT = Config("without hindsight", her_ratio=0.0)


@dataclass
class Result:
    """The results of a run."""

    config: Config
    seed: int
    curve: dict[int, float]  # success rate by environment steps
    training_seconds: float  # without the evaluations
    episodes: list[dict[str, Any]]  # for the second picture


# Environment


def make_env(seed: int) -> GymEnv:
    env = GymEnv(ENV)
    env.set_seed(seed)
    return env


# Data


def make_collector(config: Config, policy: TensorDictModule, env: GymEnv) -> Collector:
    """Return a collector of whole episodes with exploration."""
    spec, noise, share = env.action_spec, config.noise, config.random_actions
    exploration = TensorDictSequential(
        policy,
        AdditiveGaussianModule(spec, sigma_init=noise, sigma_end=noise),
        EGreedyModule(spec, eps_init=share, eps_end=share),
    )
    return Collector(
        env,
        exploration,
        frames_per_batch=EPISODE_STEPS,
        total_frames=config.total_steps,
        init_random_frames=config.random_steps,
        exploration_type=ExplorationType.RANDOM,
        auto_register_policy_transforms=False,
    )


def make_replay_buffer(config: Config, env: GymEnv) -> TensorDictReplayBuffer:
    hindsight = HERTransform(EnvReward(env), her_ratio=config.her_ratio, capacity=config.total_steps)
    storage = PackedStorage(config.total_steps)
    return TensorDictReplayBuffer(storage=storage, transform=hindsight, batch_size=config.batch_size)


# Training


def make_optimizer(config: Config, loss: nn.Module) -> tuple[Optimizer, LRScheduler]:
    """Return an optimizer and a scheduler of its learning rate, to be stepped once per episode."""
    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=config.learning_rate, fused=True)
    episodes = (config.total_steps - config.random_steps) // EPISODE_STEPS
    share_left = config.final_learning_rate / config.learning_rate
    return optimizer, LinearLR(optimizer, 1.0, share_left, total_iters=episodes)


def train(config: Config, seed: int) -> Result:
    """Train an agent, and evaluate it as it learns."""
    torch.manual_seed(seed)
    env = make_env(seed)
    policy, critic = make_networks(config.hidden, env)
    loss = DDPGLoss(policy, critic, delay_actor=True)
    loss.make_value_estimator(gamma=config.gamma)
    target_updater = SoftUpdate(loss, tau=config.tau)
    optimizer, scheduler = make_optimizer(config, loss)
    replay_buffer = make_replay_buffer(config, env)

    def update() -> None:
        losses = loss(replay_buffer.sample())
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_value"]).backward()
        optimizer.step()
        target_updater.step()

    curve, training_seconds, steps = {0: evaluate(policy)}, 0.0, 0
    start = time.perf_counter()
    for data in make_collector(config, policy, env):
        replay_buffer.extend(data)
        steps += data.numel()
        if steps >= config.random_steps:
            for _ in range(config.updates_per_step * data.numel()):
                update()
            scheduler.step()
        if steps % EVALUATION_INTERVAL == 0:
            training_seconds += time.perf_counter() - start
            curve[steps] = evaluate(policy)
            start = time.perf_counter()
        progress.put((config.name, seed, steps, curve[max(curve)]))
    return Result(config, seed, curve, training_seconds, relabelled_episodes(replay_buffer))


def relabelled_episodes(replay_buffer: TensorDictReplayBuffer) -> list[dict[str, Any]]:
    """Return three stored episodes, and the new goals of transitions sampled from them.

    These are the episodes that moved farthest among those that missed their goal.
    """
    stored = replay_buffer.storage[:].reshape(-1, EPISODE_STEPS)  # [episodes, steps], not relabelled
    missed = stored["next", "reward"][:, -1, 0] < 0
    went = torch.linalg.vector_norm(stored["next", "achieved_goal"][:, -1] - stored["achieved_goal"][:, 0], dim=-1)
    sampled: Any = torch.cat([replay_buffer.sample() for _ in range(8)])
    sampled = sampled[sampled["hindsight", "relabelled"].flatten()]
    episodes = []
    for index in (went * missed).topk(3).indices.sort().values:
        episode = stored[index]
        transitions = sampled[sampled["collector", "traj_ids"] == episode["collector", "traj_ids"][0]]
        episodes.append(
            {
                "first_step": int(index) * EPISODE_STEPS + 1,
                "path": torch.cat([episode["achieved_goal"], episode["next", "achieved_goal"][-1:]]).numpy(),
                "desired_goal": episode["desired_goal"][0].numpy(),  # [2]
                "positions": transitions["achieved_goal"].numpy(),  # [sampled, 2]
                "relabelled_goals": transitions["desired_goal"].numpy(),  # [sampled, 2]
            }
        )
    return episodes


# Runs, in two processes

progress: multiprocessing.Queue


def set_up_process(queue: multiprocessing.Queue) -> None:
    global progress
    progress = queue
    torch.set_num_threads(1)  # the runs share the cores
    torchrl_logger.setLevel("WARNING")


def train_all(runs: list[tuple[Config, int]], processes: int) -> list[Result]:
    """Train the runs, several at the same time, and show their progress."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    bars: dict[tuple[str, int], tqdm] = {}
    with ProcessPoolExecutor(processes, context, set_up_process, (queue,)) as pool:
        futures = [pool.submit(train, config, seed) for config, seed in runs]
        totals = {(config.name, seed): config.total_steps for config, seed in runs}
        while not (all(future.done() for future in futures) and queue.empty()):
            try:
                name, seed, steps, success = queue.get(timeout=1.0)
            except Empty:
                continue
            if (name, seed) not in bars:
                bars[name, seed] = make_bar(f"{name}, seed {seed}", totals[name, seed])
            bar = bars[name, seed]
            bar.set_postfix(success=f"{success:.2f}", refresh=False)
            bar.update(steps - bar.n)
            if bar.n == bar.total:
                bar.close()
        return [future.result() for future in futures]


def make_bar(description: str, total: int) -> tqdm:
    interval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; longer for log files
    return tqdm(desc=f"{description:32}", total=total, unit=" steps", mininterval=interval)


def print_table(results: list[Result], path: Path) -> None:
    """Print the table, and write it as CSV."""
    header: list[Any] = ["run", "seed", "steps", "success", "training seconds"]
    rows: list[list[Any]] = []
    for result in results:
        steps = result.config.total_steps
        row = [result.config.name, result.seed, steps, f"{result.curve[steps]:.2f}", f"{result.training_seconds:.1f}"]
        rows.append(row)
    for name, *values in [header, *rows]:
        print(f"{name:20}", *(f"{value!s:>16}" for value in values))
    print("Training seconds are wall time on one thread, without the evaluations.")
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="each is trained with and without hindsight")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time, with one thread each")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder of table and pictures")
    arguments = parser.parse_args()
    if not all(0 <= seed < EVALUATION_SEED for seed in arguments.seeds):
        parser.error(f"seeds must be from 0 to {EVALUATION_SEED - 1}: the evaluation uses the larger ones")

    start = time.perf_counter()
    runs = [(config, seed) for seed in dict.fromkeys(arguments.seeds) for config in (WITH, WITHOUT)]
    results = train_all(runs, arguments.processes)

    arguments.output.mkdir(parents=True, exist_ok=True)
    print_table(results, arguments.output / "table.csv")
    demo_pictures.draw_success(results, arguments.output / "success.png")
    first_with = next(result for result in results if result.config.name == WITH.name)
    demo_pictures.draw_relabelled(first_with.episodes, arguments.output / "hindsight.png")
    print(f"{time.perf_counter() - start:.0f} s in total. Pictures and table: {arguments.output}/")


if __name__ == "__main__":
    main()
