"""Goal-conditioned implicit Q-learning from data alone, with hindsight.

Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169) with the goals of OGBench (Park et al. 2024,
arXiv:2410.20092): each sampled transition has a goal for the critics, a mixture of the present, the future and the
whole data set, and another for the actor. ``examples/config/gciql.yaml`` has every setting::

    python examples/pointmaze_data.py PointMaze_UMaze-v3
    python examples/gciql.py
    python examples/gciql.py goals=future
    python examples/gciql.py algorithm=bc
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium_robotics
import hydra
import torch
from capture import Captured
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

from torchrl_her import Current, Future, Geometric, HERTransform, Mixture, Random, SparseReward

gymnasium.register_envs(gymnasium_robotics)

GOAL_RADIUS = 0.45  # metres, of the environment
EVALUATION_SEED = 1_000_000  # of the first of the episodes
BATCHES_AT_ONCE = 16  # sampled in one call, which is faster

# Configuration


def check_settings(config: DictConfig) -> None:
    for name, one, other in (("algorithm", "iql", "bc"), ("goals", "mixture", "future")):
        if config[name] not in (one, other):
            raise SystemExit(f"{name} is {one!r} or {other!r}, not {config[name]!r}.")
    if not config.env.startswith("PointMaze_"):
        raise SystemExit(f"{config.env} is not a PointMaze: PointMaze_UMaze-v3, say.")
    for name in ("updates", "batch_size", "evaluation.interval", "evaluation.episodes"):
        value = OmegaConf.select(config, name)
        if not isinstance(value, int) or value < 1:
            raise SystemExit(f"{name}={value} has to be 1 or more.")


# Data


def load_data(config: DictConfig) -> TensorDict:
    if not Path(config.data).is_dir():
        raise SystemExit(f"There are no data in {config.data}: python examples/pointmaze_data.py {config.env}")
    return TensorDict.load_memmap(config.data)  # [steps]


def reached(achieved_goal: Tensor, desired_goal: Tensor) -> Tensor:
    return (achieved_goal - desired_goal).norm(dim=-1) <= GOAL_RADIUS


def make_replay_buffer(config: DictConfig, data: TensorDict) -> TensorDictReplayBuffer:
    """Return a buffer whose samples have a goal for the critics, ``desired_goal``, and an ``actor_goal``."""
    goals: dict[str, Any] = {"strategy": Future()}
    if config.goals == "mixture":
        goals["strategy"] = Mixture({Current(): 0.2, Geometric(config.gamma): 0.5, Random(): 0.3})
        goals["extra_goals"] = {"actor_goal": Future(own=False)}
    reward = SparseReward(GOAL_RADIUS, terminated_fn=reached)
    her = HERTransform(reward, **goals, her_ratio=1.0, capacity=len(data))
    storage = TensorStorage(her.adopt(data))  # the data themselves, not a copy
    return TensorDictReplayBuffer(storage=storage, transform=her, batch_size=BATCHES_AT_ONCE * config.batch_size)


# Networks


def make_networks(config: DictConfig, batch: TensorDictBase) -> list[TensorDictModule]:
    """Return the actor, the critic Q(s, a, g) and the value V(s, g), for samples like ``batch``."""
    inputs, actions = ["observation", "desired_goal"], batch["action"].shape[-1]
    width = sum(batch[key].shape[-1] for key in inputs)
    norms = [{"normalized_shape": units} for units in config.hidden]
    layers = {
        "num_cells": list(config.hidden), "activation_class": nn.ReLU, "norm_class": nn.LayerNorm, "norm_kwargs": norms
    }  # fmt: skip
    actor = ProbabilisticActor(
        TensorDictModule(MLP(width, actions, **layers), inputs, ["loc"]),
        in_keys=["loc"],
        distribution_class=IndependentNormal,
        distribution_kwargs={"scale": 1.0, "validate_args": False},  # the environment clips
    )
    critic = ValueOperator(MLP(width + actions, 1, **layers), in_keys=[*inputs, "action"])
    value = ValueOperator(MLP(width, 1, **layers), in_keys=inputs)
    return [actor, critic, value]


# Evaluation


def evaluate(config: DictConfig, actor: ProbabilisticActor) -> dict[str, float]:
    """Play greedy episodes, with the environment's own starts and goals, the same every time.

    Success is the share that comes within the goal's radius before the environment's time limit; steps are the mean
    number of steps until then, with the time limit for the others.
    """
    episodes, time_limit = config.evaluation.episodes, gymnasium.spec(config.env).max_episode_steps
    assert time_limit is not None
    envs = gymnasium.make_vec(config.env, episodes, vectorization_mode="sync", continuing_task=False)
    observation, _ = envs.reset(seed=EVALUATION_SEED)
    success, steps = torch.zeros(episodes, dtype=torch.bool), torch.zeros(episodes)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(time_limit):
            action = actor(TensorDict(observation, [episodes]).float())["action"]
            observation, _, terminated, _, _ = envs.step(action.numpy())
            steps += ~success
            success |= torch.from_numpy(terminated)  # the steps of the next episode do not count
            if success.all():
                break
    envs.close()
    return {"success": float(success.float().mean()), "steps": float(steps.mean())}


# Training


def train(config: DictConfig, folder: Path) -> None:
    """Train an agent, and write logs and the actor into a folder."""
    check_settings(config)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    replay_buffer = make_replay_buffer(config, load_data(config))
    replay_buffer.set_rng(torch.Generator().manual_seed(config.seed))
    actor, critic, value = make_networks(config, replay_buffer.sample())
    weights = {"expectile": config.expectile, "temperature": config.temperature}
    loss = IQLLoss(actor, critic, value, loss_function="l2", deactivate_vmap=True, **weights)
    loss.make_value_estimator(gamma=config.gamma)
    target_updater = SoftUpdate(loss, tau=config.tau)
    learning_rate = torch.tensor(config.learning_rate)  # falls to 0
    # No loss has gradients for the networks of another.
    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, learning_rate, fused=True)

    def update(batch: TensorDictBase) -> TensorDict:
        for_actor = batch.copy()  # the advantage is computed at the actor's goal, too
        for_actor["desired_goal"] = batch.get("actor_goal", batch["desired_goal"])
        if config.algorithm == "bc":
            losses = {"loss_actor": -actor.get_dist(for_actor).log_prob(batch["action"]).mean()}
        else:
            losses = {
                "loss_actor": loss.actor_loss(for_actor)[0],
                "loss_qvalue": loss.qvalue_loss(batch)[0],
                "loss_value": loss.value_loss(batch)[0],
            }
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        target_updater.step()
        return TensorDict(losses).detach()

    update = Captured(update) if config.capture else update
    logger = CSVLogger("logs", log_dir=str(folder))
    bar = tqdm(range(1, config.updates + 1), f"{config.algorithm} {config.env}", unit=" updates")
    bar.mininterval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; a log file needs few lines
    batches: list[TensorDictBase] = []
    training_seconds = 0.0
    for step in bar:
        began = time.perf_counter()
        learning_rate.fill_(config.learning_rate * (1 - (step - 1) / config.updates))
        if not batches:
            batches = list(replay_buffer.sample().split(config.batch_size))
        losses = update(batches.pop())
        training_seconds += time.perf_counter() - began
        if step % config.evaluation.interval == 0 or step == config.updates:
            outcome = evaluate(config, actor)
            metrics = {f"train/{name}": float(value) for name, value in losses.items()}
            metrics |= {f"evaluation/{name}": value for name, value in outcome.items()}
            for name, value in (metrics | {"time/training_seconds": training_seconds}).items():
                logger.log_scalar(name, value, step)
            bar.set_postfix(success=f"{outcome['success']:.2f}")
    torch.save(actor.state_dict(), folder / "actor.pt")
    print(f"{config.updates:,} updates: success {outcome['success']:.2f}. See {folder}/")


@hydra.main(version_base="1.3", config_path="config", config_name="gciql")
def main(config: DictConfig) -> None:
    train(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
