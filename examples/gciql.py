"""Goal-conditioned implicit Q-learning from data alone, with hindsight.

Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169) with the goals of OGBench (Park et al. 2024,
arXiv:2410.20092). Each sampled transition has one goal for the critics and another for the actor. The goal of the
critics is from the same step, a later step of the episode, or any episode. Only evaluations use the simulator::

    python examples/pointmaze_data.py PointMaze_UMaze-v3
    python examples/gciql.py
    python examples/gciql.py goals=future
    python examples/gciql.py algorithm=bc
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

import gymnasium
import gymnasium_robotics
import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer, TensorStorage
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import IQLLoss, SoftUpdate
from torchrl.record import CSVLogger
from tqdm import tqdm
from training.record import Recorded

from torchrl_her import Current, Future, Geometric, HERTransform, Mixture, Random, SparseReward

gymnasium.register_envs(gymnasium_robotics)

GOAL_RADIUS = 0.45  # metres, as in the environment
EVALUATION_SEED = 1_000_000  # of the first episode
AT_ONCE = 16  # batches sampled in one call, which is faster
NOW = "${now:%Y-%m-%d_%H-%M-%S}"
RUN, SWEEP = f"outputs/gciql/${{env}}/{NOW}", f"outputs/gciql/multirun/{NOW}"  # folders

Speedup = Enum("Speedup", "none record compile")
Algorithm = Enum("Algorithm", "iql bc")
Goals = Enum("Goals", "mixture future")


@dataclass
class Evaluating:
    interval: int = 2_500  # updates
    episodes: int = 100


@dataclass
class Config:
    seed: int = 0
    updates: int = 5_000
    threads: int = 1  # number of PyTorch's threads
    speedup: Speedup = Speedup.record  # how updates run, see training/record.py
    env: str = "PointMaze_UMaze-v3"  # or another maze: PointMaze_Medium-v3
    data: str = "outputs/data/${env}"  # written by: python examples/pointmaze_data.py ENV
    algorithm: Algorithm = Algorithm.iql  # bc: behavioural cloning, which trains only the actor
    goals: Goals = Goals.mixture  # mixture: OGBench's goals for critics and actor; future: one goal for both
    batch_size: int = 256
    learning_rate: float = 1e-3  # falls linearly to 0
    hidden: list[int] = field(default_factory=lambda: [256, 256])  # units of each hidden layer
    gamma: float = 0.99  # also for the geometric goals
    tau: float = 0.005  # step of the target critics' soft update
    expectile: float = 0.9
    temperature: float = 10.0  # inverse temperature: 0 is behavioural cloning
    evaluation: Evaluating = field(default_factory=Evaluating)
    hydra: Any = field(
        default_factory=lambda: {
            "run": {"dir": RUN},
            "sweep": {"dir": SWEEP},
            "callbacks": {"folder": {"_target_": "training.start.FolderOfRun"}},
        }
    )


ConfigStore.instance().store("gciql", Config)


def check(config: DictConfig) -> Config:
    """Return the settings as a dataclass, or exit if they cannot work."""
    if not config.env.startswith("PointMaze_"):
        raise SystemExit(f"env={config.env} must be a PointMaze, such as PointMaze_UMaze-v3.")
    for name in ("updates", "batch_size", "evaluation.interval", "evaluation.episodes"):
        if OmegaConf.select(config, name) < 1:
            raise SystemExit(f"{name}={OmegaConf.select(config, name)} must be 1 or more.")
    if not Path(config.data).is_dir():
        raise SystemExit(f"There is no data in {config.data}: run python examples/pointmaze_data.py {config.env}")
    return cast(Config, OmegaConf.to_object(config))


def reached(achieved_goal: Tensor, desired_goal: Tensor) -> Tensor:
    return (achieved_goal - desired_goal).norm(dim=-1) <= GOAL_RADIUS


def make_replay_buffer(config: Config, data: TensorDict) -> TensorDictReplayBuffer:
    """Make a buffer whose samples have a goal for the critics, ``desired_goal``, and an ``actor_goal``."""
    strategy: Any = Future()
    if config.goals == Goals.mixture:
        mixture = Mixture({Current(): 0.2, Geometric(config.gamma): 0.5, Random(): 0.3})
        strategy = {"desired_goal": mixture, "actor_goal": Future(own=False)}
    reward = SparseReward(GOAL_RADIUS, terminated_fn=reached)
    her = HERTransform(reward, strategy=strategy, her_ratio=1.0, capacity=len(data))
    storage = TensorStorage(her.adopt(data))  # the data itself, not a copy
    return TensorDictReplayBuffer(storage=storage, transform=her, batch_size=AT_ONCE * config.batch_size)


def make_networks(config: Config, batch: TensorDictBase) -> list[TensorDictModule]:
    """Make the actor, the critic Q(s, a, g) and the value V(s, g), for samples like ``batch``."""
    inputs, actions = ["observation", "desired_goal"], batch["action"].shape[-1]
    width = sum(batch[key].shape[-1] for key in inputs)
    norms = {"norm_class": nn.LayerNorm, "norm_kwargs": [{"normalized_shape": units} for units in config.hidden]}
    layers: dict[str, Any] = {"num_cells": config.hidden, "activation_class": nn.ReLU, **norms}
    means = TensorDictModule(MLP(width, actions, **layers), inputs, ["loc"])
    normal = {"scale": 1.0, "validate_args": False}  # the environment clips actions
    actor = ProbabilisticActor(means, ["loc"], distribution_class=IndependentNormal, distribution_kwargs=normal)
    critic = ValueOperator(MLP(width + actions, 1, **layers), in_keys=[*inputs, "action"])
    value = ValueOperator(MLP(width, 1, **layers), in_keys=inputs)
    return [actor, critic, value]


def evaluate(config: Config, actor: ProbabilisticActor) -> dict[str, float]:
    """Return the success rate, and the mean number of steps to the goal or the time limit."""
    episodes, time_limit = config.evaluation.episodes, cast(int, gymnasium.spec(config.env).max_episode_steps)
    envs = gymnasium.make_vec(config.env, episodes, vectorization_mode="sync", continuing_task=False)
    observation, _ = envs.reset(seed=EVALUATION_SEED)
    success, steps = torch.zeros(episodes, dtype=torch.bool), torch.zeros(episodes)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(time_limit):
            action = actor(TensorDict(observation, [episodes]).float())["action"]
            observation, _, terminated, _, _ = envs.step(action.numpy())
            steps += ~success
            success |= torch.from_numpy(terminated)  # later steps, of the next episode, do not count
            if success.all():
                break
    envs.close()
    return {"success": float(success.float().mean()), "steps": float(steps.mean())}


def train(config: Config, folder: Path) -> None:
    """Train an agent, and write logs and the actor into a folder."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    replay_buffer = make_replay_buffer(config, TensorDict.load_memmap(config.data))
    replay_buffer.set_rng(torch.Generator().manual_seed(config.seed))
    actor, critic, value = make_networks(config, replay_buffer.sample())
    weights = {"expectile": config.expectile, "temperature": config.temperature}
    loss = IQLLoss(actor, critic, value, loss_function="l2", deactivate_vmap=True, **weights)
    loss.make_value_estimator(gamma=config.gamma)
    target_updater = SoftUpdate(loss, tau=config.tau)
    learning_rate = torch.tensor(config.learning_rate)  # a tensor, which can change after recording
    # No loss has gradients for the networks of another loss.
    optimizer = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], learning_rate, fused=True)

    def update(batch: TensorDictBase) -> TensorDict:
        for_actor = batch.copy().set("desired_goal", batch.get("actor_goal", batch["desired_goal"]))
        if config.algorithm == Algorithm.bc:
            losses = {"loss_actor": -actor.get_dist(for_actor).log_prob(batch["action"]).mean()}
        else:
            losses = {"loss_actor": loss.actor_loss(for_actor)[0], "loss_qvalue": loss.qvalue_loss(batch)[0]}
            losses["loss_value"] = loss.value_loss(batch)[0]
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        target_updater.step()
        return TensorDict(losses).detach()

    if config.speedup != Speedup.none:
        update = Recorded(update) if config.speedup == Speedup.record else torch.compile(update)
    logger = CSVLogger("logs", log_dir=str(folder))
    bar = tqdm(range(1, config.updates + 1), f"{config.algorithm.name} {config.env}", unit=" updates")
    batches, seconds = list[TensorDictBase](), 0.0
    for step in bar:
        began = time.perf_counter()
        learning_rate.fill_(config.learning_rate * (1 - (step - 1) / config.updates))
        if not batches:
            batches = list(replay_buffer.sample().split(config.batch_size))
        losses = update(batches.pop())
        seconds += time.perf_counter() - began
        if step % config.evaluation.interval == 0 or step == config.updates:
            outcome = evaluate(config, actor)
            metrics = {f"train/{name}": float(value) for name, value in losses.items()}
            metrics |= {f"evaluation/{name}": value for name, value in outcome.items()} | {"train/seconds": seconds}
            for name, value in metrics.items():
                logger.log_scalar(name, value, step)
            bar.set_postfix(success=f"{outcome['success']:.2f}")
    torch.save(actor.state_dict(), folder / "actor.pt")
    print(f"{config.updates:,} updates: success {outcome['success']:.2f}. See {folder}/")


@hydra.main(version_base="1.3", config_path="config", config_name="gciql")
def main(config: DictConfig) -> None:
    train(check(config), Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
