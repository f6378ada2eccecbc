"""TD3 with hindsight.

Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477) with hindsight experience
replay (Andrychowicz et al. 2017, arXiv:1707.01495). ``examples/config/td3.yaml`` has every setting::

    python examples/td3.py
    python examples/td3.py buffer.n_steps=3
    python examples/td3.py +task=fetch env.name=FetchReach-v4
    python examples/td3.py resume=outputs/td3/torchrl_her/PointReach-v0/2026-01-31_12-00-00
"""

from __future__ import annotations

from pathlib import Path

import hydra
from common import Normalization, check_actions, make_env, make_replay_buffer
from deterministic import make_networks, make_noise
from omegaconf import DictConfig
from settings import start
from tensordict import TensorDict, TensorDictBase
from torchrl.objectives import SoftUpdate, TD3Loss
from training import Training, make_adam, make_explorer, make_policy, set_up_process, speed_up

# Training


def train(config: DictConfig, folder: Path) -> Training:
    """Train an agent, and keep what happens in a folder."""
    set_up_process(config)
    env = make_env(config.env)
    check_actions(env, continuous=True)
    normalization = Normalization(config, env)
    actor, critic = make_networks(config, env, normalization.keys)
    spec = env.action_spec.to(config.device)
    loss = TD3Loss(
        actor, critic, action_spec=spec, policy_noise=config.target_noise, noise_clip=config.target_noise_clip,
        delay_actor=True, delay_qvalue=True, deactivate_vmap=True,
    )  # fmt: skip
    loss.make_value_estimator(gamma=config.gamma)
    target_updater = SoftUpdate(loss, tau=config.tau)
    actor_interval = config.actor_interval
    actor_optimizer = make_adam(loss.actor_network_params.flatten_keys().values(), config.learning_rate)
    critic_optimizer = make_adam(loss.qvalue_network_params.flatten_keys().values(), config.learning_rate)

    policy = make_policy(normalization, actor)
    explorer = make_explorer(config, spec, policy, make_noise(config, spec))

    def update(batch: TensorDictBase, with_actor: bool) -> TensorDictBase:
        loss_qvalue, values = loss.value_loss(batch)
        loss_qvalue.backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        batch.set("td_error", values["td_error"].detach().amax(0))  # the priority
        losses = {"loss_qvalue": loss_qvalue, "q_value": values["pred_value"], "target_value": values["target_value"]}
        if with_actor:
            losses["loss_actor"], _ = loss.actor_loss(batch)
            losses["loss_actor"].backward()
            actor_optimizer.step()
            actor_optimizer.zero_grad()
            target_updater.step()
        return TensorDict(losses).detach()

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
            with_actor = training.counters["updates"] % actor_interval == 0
            training.record(update(batch, with_actor), batch)
    return training


@hydra.main(version_base="1.3", config_path="config", config_name="td3")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
