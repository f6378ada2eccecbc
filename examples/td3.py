"""TD3 with hindsight.

Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477) with hindsight experience
replay (Andrychowicz et al. 2017, arXiv:1707.01495)::

    python examples/td3.py
    python examples/td3.py buffer.n_steps=3
    python examples/td3.py env.name=FetchReach-v4
    python examples/td3.py resume=outputs/td3/torchrl_her/PointReach-v0/2026-01-31_12-00-00
"""

from dataclasses import dataclass
from functools import partial
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
from pydantic import PositiveInt
from run import Checkpoints, History, Log, Progress, set_up
from settings import LossFunction, NonNegative, Priority, Settings
from start import check_env, start
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP, TanhModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

from torchrl_her import NormalizedInputs

# Configuration


@dataclass
class Config(Settings):
    algorithm: str = "td3"
    loss_function: LossFunction = LossFunction.smooth_l1
    target_noise: NonNegative = 0.2  # smooths the target policy
    target_noise_clip: NonNegative = 0.5
    actor_interval: PositiveInt = 2  # updates of the critics per update of the actor


ConfigStore.instance().store("td3", Config)


# Networks


def make_policy(config: Config, env: EnvBase, inputs: NormalizedInputs) -> TensorDictSequential:
    """Make the greedy policy, which reads raw observations and goals."""
    spec = env.action_spec.to(config.device)
    layers = {"num_cells": config.hidden, "activation_class": nn.ReLU, "device": config.device}
    actor = MLP(len(inputs.mean), spec.shape[-1], **layers)
    actor = TensorDictModule(actor, ["inputs"], ["action"])
    return TensorDictSequential(inputs, actor, TanhModule(in_keys=["action"], spec=spec))


# Training


def train(config: Config, folder: Path) -> Checkpoints:
    """Train an agent, and save the run in a folder."""
    env = check_env(config)

    set_up(config)
    inputs = make_inputs(config, env)
    policy, spec = make_policy(config, env, inputs), env.action_spec.to(config.device)
    layers = {"num_cells": config.hidden, "activation_class": nn.ReLU, "device": config.device}
    critic = ValueOperator(MLP(len(inputs.mean) + spec.shape[-1], 1, **layers), in_keys=["inputs", "action"])

    loss = TD3Loss(
        policy[1:], critic, action_spec=spec, policy_noise=config.target_noise, noise_clip=config.target_noise_clip,
        loss_function=config.loss_function.name, delay_actor=True, delay_qvalue=True, deactivate_vmap=True,
    )  # fmt: skip
    loss.make_value_estimator(gamma=config.gamma)
    target_updater = SoftUpdate(loss, tau=config.tau)
    actor_optimizer = make_adam(config, loss.actor_network_params.parameters())
    critic_optimizer = make_adam(config, loss.qvalue_network_params.parameters())

    hindsight = make_hindsight(config)
    replay_buffer = make_replay_buffer(config, hindsight, inputs)

    def update(batch: TensorDictBase, with_actor: bool) -> TensorDictBase:
        loss_qvalue, values = loss.value_loss(batch)
        loss_qvalue.backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        losses = {"loss_qvalue": loss_qvalue, "q_value": values["pred_value"], "target_value": values["target_value"]}
        losses["td_error"] = values["td_error"].amax(0)
        if with_actor:
            losses["loss_actor"], _ = loss.actor_loss(batch)
            losses["loss_actor"].backward()
            actor_optimizer.step()
            actor_optimizer.zero_grad()
            target_updater.step()
        return TensorDict(losses).detach()

    update_critics = speed_up(partial(update, with_actor=False), config.speedup)
    update_all = speed_up(partial(update, with_actor=True), config.speedup)
    collector = make_collector(config, policy, gaussian=True)
    evaluate, progress = Evaluation(config), Progress(config)
    history: History = {}
    save = Checkpoints(
        config, folder, collector, hindsight, policy=policy, loss=loss, buffer=replay_buffer, log=history,
        progress=progress.counts, actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer,
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
            batches = replay_buffer.sample(count * config.batch_size).split(config.batch_size)
            for number, batch in enumerate(batches, progress.counts["updates"]):
                with_actor = number % config.actor_interval == 0
                losses.update(update_all(batch) if with_actor else update_critics(batch))
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


@hydra.main(version_base="1.3", config_path="config", config_name="td3")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
