"""DDPG with hindsight, as in the Fetch experiments of Plappert et al. 2018.

Deep deterministic policy gradients (Lillicrap et al. 2015, arXiv:1509.02971), with settings that learn every task.
Large actions have a cost, and an average of the policy is evaluated. Sparse rewards are scaled, and targets clipped to
the range of possible returns::

    python examples/ddpg.py
    python examples/ddpg.py env.name=FetchPush-v4 total_steps=240000
    python examples/ddpg.py resume=outputs/ddpg/torchrl_her-PointReach-v0/2026-01-31_12-00-00
"""

from training.command import run_command

if __name__ == "__main__":  # before the imports that take seconds
    run_command("ddpg")

from copy import deepcopy
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.modules import MLP, TanhModule, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate
from torchrl.objectives.value import TD0Estimator
from training.parts import hidden_layers, make_adam, make_buffer, make_collector, make_hindsight, make_inputs, speed_up
from training.prepare import prepare
from training.run import Run
from training.settings import DDPG, Settings

from torchrl_her import NormalizedInputs

# Networks


def make_policy(config: Settings, env: EnvBase, inputs: NormalizedInputs) -> TensorDictSequential:
    """Make the greedy policy, which reads raw observations and goals."""
    spec = env.action_spec.to(config.device)
    actor = TensorDictModule(MLP(len(inputs.mean), spec.shape[-1], **hidden_layers(config)), ["inputs"], ["action"])
    return TensorDictSequential(inputs, actor, TanhModule(in_keys=["action"], spec=spec))


def make_critic(config: Settings, env: EnvBase, inputs: NormalizedInputs) -> ValueOperator:
    """Make a critic, which reads normalized inputs and actions."""
    features = len(inputs.mean) + env.action_spec.shape[-1]
    return ValueOperator(MLP(features, 1, **hidden_layers(config)), in_keys=["inputs", "action"])


# Loss


class ClippedTarget(TD0Estimator):
    """The temporal-difference target, clipped to the returns that are possible with a range of rewards."""

    def __init__(self, rewards: list[float], *, gamma: float, **kwargs):
        super().__init__(gamma=gamma, **kwargs)
        self.returns = [reward / (1 - gamma) for reward in rewards]

    def value_estimate(self, *args, **kwargs) -> Tensor:  # noqa: D102
        return super().value_estimate(*args, **kwargs).clamp(*self.returns)


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


def make_loss(config: Any, actor: TensorDictSequential, critic: TensorDictModule) -> DDPGLoss:
    penalty, options = config.action_penalty, {"delay_actor": True, "loss_function": config.loss_function.name}
    loss = PenalizedLoss(actor, critic, penalty, **options) if penalty else DDPGLoss(actor, critic, **options)
    if config.reward_range:
        rewards = [config.reward_scale * reward for reward in config.reward_range]
        estimator = ClippedTarget(rewards, gamma=config.gamma, value_network=loss.actor_critic, device=config.device)
        estimator.set_keys(value=loss.tensor_keys.state_action_value)
        return loss.make_value_estimator(estimator)
    loss.make_value_estimator(gamma=config.gamma)
    return loss


# Update and loop


def train(config: DDPG, folder: Path) -> Run:
    """Train an agent, and save the run in a folder."""
    env = prepare(config)
    inputs = make_inputs(config, env)
    policy, critic = make_policy(config, env, inputs), make_critic(config, env, inputs)
    actor = policy[1:]  # without `inputs`, which samples already contain
    averaged = TensorDictSequential(inputs, *deepcopy(actor))  # the policy that is evaluated and saved
    weights, average = TensorDict.from_module(actor).data, TensorDict.from_module(averaged[1:]).data
    loss = make_loss(config, actor, critic)
    target_updater = SoftUpdate(loss, tau=config.tau)
    actor_optimizer = make_adam(config, actor.parameters())
    critic_optimizer = make_adam(config, critic.parameters())
    hindsight = make_hindsight(config)
    replay_buffer = make_buffer(config, hindsight, inputs)

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
    collector = make_collector(config, policy, hindsight, gaussian=True)
    optimizers = {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    run = Run(config, folder, collector, hindsight, replay_buffer, policy=averaged, loss=loss, **optimizers)
    for data in run.collect():  # between chunks of steps, it logs, evaluates and saves
        replay_buffer.extend(data)
        for batch in run.batches():  # of the updates that are due
            run.finish_update(batch, fast_update(batch))
    return run
