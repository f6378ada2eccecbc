"""SAC or TQC with hindsight.

Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) with hindsight experience replay (Andrychowicz et al. 2017,
arXiv:1707.01495). With ``loss=tqc``, truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269)::

    python examples/sac.py
    python examples/sac.py loss=tqc
    python examples/sac.py env.name=FetchReach-v4
    python examples/sac.py resume=outputs/sac/torchrl_her/PointReach-v0/2026-01-31_12-00-00
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import hydra
from common import (
    Evaluation,
    make_adam,
    make_collector,
    make_hindsight,
    make_inputs,
    make_replay_buffer,
    speed_up,
)
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from pydantic import NonNegativeInt, PositiveInt
from run import Checkpoints, History, Log, Progress, set_up
from settings import Buffer, Exploration, LossFunction, Positive, Priority, Settings
from start import check_env, start
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate, TQCLoss

from torchrl_her import NormalizedInputs

# Configuration

Loss = Enum("Loss", "sac tqc")


@dataclass
class Config(Settings):
    algorithm: str = "sac"
    loss: Loss = Loss.sac
    loss_function: LossFunction = LossFunction.smooth_l1  # TQC has its own
    num_critics: PositiveInt = 2
    alpha_init: Positive = 0.1  # initial weight of the entropy, which is then learned
    quantiles: PositiveInt = 25  # of each critic (TQC)
    dropped_quantiles: NonNegativeInt = 2  # per critic; the highest quantiles of all critics together are dropped (TQC)
    exploration: Exploration = field(default_factory=lambda: Exploration(random_actions=0.0))
    buffer: Buffer = field(default_factory=lambda: Buffer(alpha=0.6))


ConfigStore.instance().store("sac", Config)


# Networks


def make_policy(config: Config, env: EnvBase, inputs: NormalizedInputs) -> TensorDictSequential:
    """Make the policy, which reads raw observations and goals."""
    spec = env.action_spec.to(config.device)
    layers = {"num_cells": config.hidden, "activation_class": nn.ReLU, "device": config.device}
    low, high = bound(spec.space.low), bound(spec.space.high)
    actor = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(MLP(len(inputs.mean), 2 * spec.shape[-1], **layers), ["inputs"], ["features"]),
            TensorDictModule(NormalParamExtractor(), ["features"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": low, "high": high, "tanh_loc": False},
    )
    return TensorDictSequential(inputs, actor)


def bound(values: Tensor) -> Tensor | float:
    """Return a number if the bounds of all actions are equal. TanhNormal compares tensors, which breaks recording."""
    return values[0].item() if (values == values[0]).all() else values


# Training


def train(config: Config, folder: Path) -> Checkpoints:
    """Train an agent, and save the run in a folder."""
    if config.loss == Loss.tqc and config.dropped_quantiles >= config.quantiles:
        raise SystemExit(
            f"dropped_quantiles={config.dropped_quantiles} must be less than quantiles={config.quantiles}."
        )
    if config.loss == Loss.tqc and config.loss_function != LossFunction.smooth_l1:
        name = config.loss_function.name
        raise SystemExit(f"loss=tqc has its own loss: leave loss_function at smooth_l1, not {name}.")
    env = check_env(config)

    set_up(config)
    inputs = make_inputs(config, env)
    policy, actions = make_policy(config, env, inputs), env.action_spec.shape[-1]
    outputs = config.quantiles if config.loss == Loss.tqc else 1
    layers = {"num_cells": config.hidden, "activation_class": nn.ReLU, "device": config.device}
    critic = ValueOperator(MLP(len(inputs.mean) + actions, outputs, **layers), in_keys=["inputs", "action"])

    arguments = {"num_qvalue_nets": config.num_critics, "alpha_init": config.alpha_init, "deactivate_vmap": True}
    if config.loss == Loss.tqc:
        loss = TQCLoss(policy[1], critic, top_quantiles_to_drop_per_net=config.dropped_quantiles, **arguments)
    else:
        loss = SACLoss(policy[1], critic, loss_function=config.loss_function.name, **arguments)
    loss.make_value_estimator(gamma=config.gamma)
    loss = loss.to(config.device)
    target_updater = SoftUpdate(loss, tau=config.tau)
    optimizer = make_adam(config, loss.parameters())  # each loss has gradients only for its own networks

    hindsight = make_hindsight(config)
    replay_buffer = make_replay_buffer(config, hindsight, inputs)

    def update(batch: TensorDictBase) -> TensorDictBase:
        losses = loss(batch)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        target_updater.step()
        # The loss of the actor is -(value + alpha * entropy).
        losses.set("q_value", -(losses["loss_actor"] + losses["alpha"] * losses["entropy"]))
        return losses.set("td_error", batch["td_error"]).detach()

    fast_update = speed_up(update, config.speedup)
    collector = make_collector(config, policy)
    evaluate, progress = Evaluation(config), Progress(config)
    history: History = {}
    save = Checkpoints(
        config, folder, collector, hindsight, policy=policy, loss=loss, buffer=replay_buffer, log=history,
        progress=progress.counts, optimizer=optimizer,
    )  # fmt: skip
    with progress.paused():
        save.resume_or_start()
        log = Log(config, folder, history)
        if not progress.steps:
            log("evaluation", evaluate(policy), 0)
    losses: dict[str, Tensor] = {}
    for data in collector:
        replay_buffer.extend(data)
        if config.normalization.enabled:
            inputs.update(data)
        progress.add(data)
        for count in progress.updates_due():  # several batches in one call of the buffer
            for batch in replay_buffer.sample(count * config.batch_size).split(config.batch_size):
                losses.update(fast_update(batch))
                if config.buffer.prioritized == Priority.error:
                    replay_buffer.update_tensordict_priority(batch.set("td_error", losses["td_error"]))
        with progress.paused():
            if progress.due(config.logger.interval):
                log("train", progress.metrics() | losses, progress.steps)
                losses.clear()
            if progress.due(config.evaluation.interval):
                log("evaluation", evaluate(policy), progress.steps)
            if progress.due(config.checkpoint.interval):
                save(progress.steps)
    for tool in (evaluate, progress, log):
        tool.close()
    return save


@hydra.main(version_base="1.3", config_path="config", config_name="sac")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
