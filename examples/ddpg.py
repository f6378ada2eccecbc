"""DDPG with hindsight, as in the Fetch experiments of Plappert et al. 2018.

Deep deterministic policy gradients (Lillicrap et al. 2015, arXiv:1509.02971). Targets are clipped to the range of
possible returns. ``action_penalty`` makes large actions costly; ``average`` evaluates an average of the policy::

    python examples/ddpg.py
    python examples/ddpg.py +task=fetch_push
    python examples/ddpg.py resume=outputs/ddpg/torchrl_her/PointReach-v0/2026-01-31_12-00-00
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from common import (
    Evaluation,
    make_adam,
    make_collector,
    make_hindsight,
    make_inputs,
    make_replay_buffer,
    make_reward,
    speed_up,
)
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from run import Checkpoints, History, Log, Progress, set_up
from settings import Decay, NonNegative, Priority, Settings
from start import check_env, start
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP, TanhModule, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate
from torchrl.objectives.value import TD0Estimator

from torchrl_her import NormalizedInputs

# Configuration


@dataclass
class Config(Settings):
    algorithm: str = "ddpg"
    clip_target: bool = True  # to [-1 / (1 - gamma), 0]: for rewards from -1 to 0
    action_penalty: NonNegative = 0.0  # weight of the mean square of the actor's actions in its loss
    average: Decay = 0.0  # of the moving average of the actor's weights, which is evaluated; 0: the actor itself


ConfigStore.instance().store("ddpg", Config)


def check_rewards(config: Config, env: EnvBase) -> None:
    """Check that rewards, including the rewards of reached goals, cannot lead to returns outside the clipped range."""
    steps = env.rollout(100)
    goals = steps[config.env.desired_goal]
    reached = TensorDict({"desired_goal": goals, "next": steps["next"].copy().set("achieved_goal", goals)}, len(goals))
    rewards = torch.cat([steps["next", "reward"], make_reward(config.env).forward(reached)["next", "reward"]])
    if config.gamma >= 1 or rewards.max() > 0 or rewards.min() < -1:
        raise SystemExit(
            f"clip_target=true needs gamma < 1 and rewards from -1 to 0, but {config.env.name} gives {rewards.min():g} "
            f"to {rewards.max():g} (gamma={config.gamma}): use clip_target=false."
        )


# Networks


def make_policy(config: Config, env: EnvBase, inputs: NormalizedInputs) -> TensorDictSequential:
    """Make the greedy policy, which reads raw observations and goals."""
    spec = env.action_spec.to(config.device)
    layers = {"num_cells": config.hidden, "activation_class": nn.ReLU, "device": config.device}
    actor = MLP(len(inputs.mean), spec.shape[-1], **layers)
    actor = TensorDictModule(actor, ["inputs"], ["action"])
    return TensorDictSequential(inputs, actor, TanhModule(in_keys=["action"], spec=spec))


# Loss


class ClippedTarget(TD0Estimator):
    """The temporal-difference target, clipped to the possible returns for rewards from -1 to 0."""

    def __init__(self, *, gamma: float, **kwargs):
        super().__init__(gamma=gamma, **kwargs)
        self.lowest = -1 / (1 - gamma)

    def value_estimate(self, *args, **kwargs) -> Tensor:  # noqa: D102
        return super().value_estimate(*args, **kwargs).clamp(self.lowest, 0.0)


class PenalizedLoss(DDPGLoss):
    """DDPG with a penalty on large actions. The loss of the actor has no importance weights."""

    def __init__(self, actor: TensorDictSequential, critic: TensorDictModule, penalty: float, **kwargs):
        super().__init__(actor, critic, **kwargs)
        self.penalty = penalty

    def loss_actor(self, tensordict: TensorDictBase) -> tuple[Tensor, dict]:  # noqa: D102
        data = tensordict.select(*self.actor_in_keys)
        with self.actor_network_params.to_module(self.actor_network):
            data = self.actor_network(data)
        with self.value_network_params.detach().to_module(self.value_network):
            data = self.value_network(data)
        return self.penalty * data["action"].square().mean() - data["state_action_value"].mean(), {}


def make_loss(config: Config, actor: TensorDictSequential, critic: TensorDictModule) -> DDPGLoss:
    penalty, options = config.action_penalty, {"delay_actor": True, "loss_function": config.loss_function.name}
    loss = PenalizedLoss(actor, critic, penalty, **options) if penalty else DDPGLoss(actor, critic, **options)
    if config.clip_target:
        estimator = ClippedTarget(gamma=config.gamma, value_network=loss.actor_critic, device=config.device)
        estimator.set_keys(value=loss.tensor_keys.state_action_value)
        return loss.make_value_estimator(estimator)
    loss.make_value_estimator(gamma=config.gamma)
    return loss


# Training


def train(config: Config, folder: Path) -> Checkpoints:
    """Train an agent, and save the run in a folder."""
    env = check_env(config)
    if config.clip_target:
        check_rewards(config, env)

    set_up(config)
    inputs = make_inputs(config, env)
    policy = make_policy(config, env, inputs)
    actor, spec = policy[1:], env.action_spec.to(config.device)  # without `inputs`, which samples already contain
    layers = {"num_cells": config.hidden, "activation_class": nn.ReLU, "device": config.device}
    critic = ValueOperator(MLP(len(inputs.mean) + spec.shape[-1], 1, **layers), in_keys=["inputs", "action"])
    averaged = TensorDictSequential(inputs, *deepcopy(actor))  # the policy that is evaluated and saved
    weights, average = TensorDict.from_module(actor).data, TensorDict.from_module(averaged[1:]).data

    loss = make_loss(config, actor, critic)
    target_updater = SoftUpdate(loss, tau=config.tau)
    actor_optimizer = make_adam(config, actor.parameters())
    critic_optimizer = make_adam(config, critic.parameters())

    hindsight = make_hindsight(config)
    replay_buffer = make_replay_buffer(config, hindsight, inputs)

    def update(batch: TensorDictBase) -> TensorDictBase:
        losses = loss(batch)
        (losses["loss_actor"] + losses["loss_value"]).backward()  # neither has gradients for the network of the other
        actor_optimizer.step()
        critic_optimizer.step()
        loss.zero_grad()
        target_updater.step()
        average.lerp_(weights, 1 - config.average)
        losses = losses.select("loss_actor", "loss_value", "pred_value", "target_value")
        return losses.rename_key_("pred_value", "q_value").set("td_error", batch["td_error"]).detach()

    fast_update = speed_up(update, config.speedup)
    collector = make_collector(config, policy, gaussian=True)
    evaluate, progress = Evaluation(config), Progress(config)
    history: History = {}
    save = Checkpoints(
        config, folder, collector, hindsight, policy=averaged, loss=loss, buffer=replay_buffer, log=history,
        progress=progress.counts, actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer,
    )  # fmt: skip
    with progress.paused():
        save.resume_or_start()
        log = Log(config, folder, history)
        if not progress.steps:
            log("evaluation", evaluate(averaged), 0)
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
                log("evaluation", evaluate(averaged), progress.steps)
            if progress.due(config.checkpoint.interval):
                save(progress.steps)
    for tool in (evaluate, progress, log):
        tool.close()
    return save


@hydra.main(version_base="1.3", config_path="config", config_name="ddpg")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
