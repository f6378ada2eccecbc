"""DDPG with hindsight, as in the original Fetch experiments.

Deep deterministic policy gradients (Lillicrap et al. 2015, arXiv:1509.02971) with hindsight experience replay
(Andrychowicz et al. 2017, arXiv:1707.01495): targets are clipped to the returns that are possible, and with
``action_penalty`` (in the Fetch tasks) large actions cost something, so that the actor's tanh does not saturate.
``examples/config/ddpg.yaml`` has every setting::

    python examples/ddpg.py
    python examples/ddpg.py hindsight.enabled=false
    python examples/ddpg.py +task=fetch_push
    python examples/ddpg.py resume=outputs/ddpg/torchrl_her/PointReach-v0/2026-01-31_12-00-00
"""

from __future__ import annotations

from pathlib import Path

import hydra
from common import Normalization, check_actions, make_env, make_replay_buffer, rewards_of
from deterministic import make_networks, make_noise
from omegaconf import DictConfig
from settings import start
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.objectives import DDPGLoss, SoftUpdate
from torchrl.objectives.value import TD0Estimator
from training import Training, make_adam, make_explorer, make_policy, set_up_process, speed_up

# Loss


class ClippedTarget(TD0Estimator):
    """The target of one step, clipped to what a reward of -1 or 0 per step can sum up to."""

    def __init__(self, *, gamma: float, **kwargs):
        super().__init__(gamma=gamma, **kwargs)
        self.lowest = -1 / (1 - gamma)

    def value_estimate(self, *args, **kwargs) -> Tensor:  # noqa: D102
        return super().value_estimate(*args, **kwargs).clamp(self.lowest, 0.0)


def check_clipping(config: DictConfig, env: EnvBase) -> None:
    """Check that returns have the bounds that targets are clipped to."""
    at_goal, elsewhere = rewards_of(env)
    if at_goal > 0 or elsewhere < -1:
        raise SystemExit(
            f"clip_target=true is for rewards from -1 to 0, and {config.env.name} gives {at_goal:g} at the goal and "
            f"{elsewhere:g} elsewhere: use clip_target=false."
        )
    if config.gamma >= 1:
        raise SystemExit("With gamma=1 a sum of rewards has no lowest value to clip to: use clip_target=false.")


def make_loss(config: DictConfig, actor: TensorDictSequential, critic: TensorDictModule) -> DDPGLoss:
    loss = DDPGLoss(actor, critic, delay_actor=True)
    if config.clip_target:
        estimator = ClippedTarget(gamma=config.gamma, value_network=loss.actor_critic, device=config.device)
        estimator.set_keys(value=loss.tensor_keys.state_action_value)
        return loss.make_value_estimator(estimator)
    loss.make_value_estimator(gamma=config.gamma)
    return loss


# Training


def train(config: DictConfig, folder: Path) -> Training:
    """Train an agent, and keep what happens in a folder."""
    set_up_process(config)
    env = make_env(config.env)
    check_actions(env, continuous=True)
    if config.clip_target:
        check_clipping(config, env)
    normalization = Normalization(config, env)
    actor, critic = make_networks(config, env, normalization.keys)
    loss = make_loss(config, actor, critic)
    target_updater = SoftUpdate(loss, tau=config.tau)
    actor_optimizer = make_adam(actor.parameters(), config.learning_rate)
    critic_optimizer = make_adam(critic.parameters(), config.learning_rate)

    policy = make_policy(normalization, actor)
    spec = env.action_spec.to(config.device)
    explorer = make_explorer(config, spec, policy, make_noise(config, spec))

    def update(batch: TensorDictBase) -> TensorDictBase:
        losses = loss(batch)
        total = losses["loss_actor"] + losses["loss_value"]
        if config.action_penalty:
            action = actor(batch.select(*normalization.keys))["action"]
            total = total + config.action_penalty * action.square().mean()
        total.backward()
        actor_optimizer.step()
        critic_optimizer.step()
        actor_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        target_updater.step()
        losses = losses.select("loss_actor", "loss_value", "pred_value", "target_value").detach()
        return losses.rename_key_("pred_value", "q_value")

    update = speed_up(config, update)
    replay_buffer, hindsight = make_replay_buffer(config, normalization)
    training = Training(
        config, folder, replay_buffer, hindsight, normalization, policy, loss,
        actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer,
    )  # fmt: skip
    for data in training.collect(explorer):
        training.write(data)
        normalization.update(data)
        for batch in training.batches():
            training.record(update(batch), batch)
    return training


@hydra.main(version_base="1.3", config_path="config", config_name="ddpg")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
