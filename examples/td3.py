"""TD3 with hindsight.

Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477) with hindsight experience
replay (Andrychowicz et al. 2017, arXiv:1707.01495)::

    python examples/td3.py
    python examples/td3.py buffer.n_steps=3
    python examples/td3.py env.name=FetchReach-v4
    python examples/td3.py resume=outputs/td3/torchrl_her-PointReach-v0/2026-01-31_12-00-00
"""

from training.command import run_command

if __name__ == "__main__":  # before the imports that take seconds
    run_command("td3")

from functools import partial
from pathlib import Path

from ddpg import make_critic, make_policy  # the networks are those of DDPG
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss
from training.parts import make_adam, make_buffer, make_collector, make_hindsight, make_inputs, speed_up
from training.prepare import prepare
from training.run import Run
from training.settings import TD3

# Loss


def make_loss(config: TD3, actor: TensorDictSequential, critic: ValueOperator, env: EnvBase) -> TD3Loss:
    loss = TD3Loss(
        actor, critic, action_spec=env.action_spec.to(config.device), policy_noise=config.target_noise,
        noise_clip=config.target_noise_clip, loss_function=config.loss_function.name, delay_actor=True,
        delay_qvalue=True, deactivate_vmap=True,
    )  # fmt: skip
    loss.make_value_estimator(gamma=config.gamma)
    return loss


# Update and loop


def train(config: TD3, folder: Path) -> Run:
    """Train an agent, and save the run in a folder."""
    env = prepare(config)
    inputs = make_inputs(config, env)
    policy, critic = make_policy(config, env, inputs), make_critic(config, env, inputs)
    loss = make_loss(config, policy[1:], critic, env)  # without `inputs`, which samples already contain
    target_updater = SoftUpdate(loss, tau=config.tau)
    actor_optimizer = make_adam(config, loss.actor_network_params.parameters())
    critic_optimizer = make_adam(config, loss.qvalue_network_params.parameters())
    hindsight = make_hindsight(config)
    replay_buffer = make_buffer(config, hindsight, inputs)

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
    collector = make_collector(config, policy, hindsight, gaussian=True)
    optimizers = {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    run = Run(config, folder, collector, hindsight, replay_buffer, policy=policy, loss=loss, **optimizers)
    for data in run.collect():  # between chunks of steps, it logs, evaluates and saves
        replay_buffer.extend(data)
        for batch in run.batches():  # of the updates that are due
            actor_is_due = run.updates % config.actor_interval == 0
            run.finish_update(batch, update_all(batch) if actor_is_due else update_critics(batch))
    return run
