"""SAC or TQC with hindsight.

Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) with hindsight experience replay (Andrychowicz et al. 2017,
arXiv:1707.01495). With ``loss=tqc``, truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269)::

    python examples/sac.py
    python examples/sac.py loss=tqc
    python examples/sac.py env.name=FetchReach-v4
    python examples/sac.py resume=outputs/sac/torchrl_her-PointReach-v0/2026-01-31_12-00-00
"""

from training.command import run_command

if __name__ == "__main__":  # before the imports that take seconds
    run_command("sac")

from pathlib import Path

from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate, TQCLoss
from training.parts import hidden_layers, make_adam, make_buffer, make_collector, make_hindsight, make_inputs, speed_up
from training.prepare import prepare
from training.run import Run
from training.settings import SAC, Loss, Speedup

from torchrl_her import NormalizedInputs

# Networks


def make_policy(config: SAC, env: EnvBase, inputs: NormalizedInputs) -> TensorDictSequential:
    """Make the policy, which reads raw observations and goals."""
    spec = env.action_spec.to(config.device)
    network = MLP(len(inputs.mean), 2 * spec.shape[-1], **hidden_layers(config))
    actor = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(network, ["inputs"], ["features"]),
            TensorDictModule(NormalParamExtractor(), ["features"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={
            "low": bound(spec.space.low, config),
            "high": bound(spec.space.high, config),
            "tanh_loc": False,
        },
    )
    return TensorDictSequential(inputs, actor)


def bound(values: Tensor, config: SAC) -> Tensor | float:
    """Return a number if the bounds of all actions are equal. TanhNormal compares tensors, which breaks recording.

    A CUDA graph needs a tensor, because TanhNormal copies numbers to the device.
    """
    are_equal = bool((values == values[0]).all())
    return values[0].item() if are_equal and config.speedup != Speedup.cudagraph else values


def make_critic(config: SAC, env: EnvBase, inputs: NormalizedInputs) -> ValueOperator:
    """Make a critic, which reads normalized inputs and actions and, for TQC, returns quantiles."""
    features, outputs = len(inputs.mean) + env.action_spec.shape[-1], config.quantiles if config.loss == Loss.tqc else 1
    return ValueOperator(MLP(features, outputs, **hidden_layers(config)), in_keys=["inputs", "action"])


# Loss


def make_loss(config: SAC, actor: ProbabilisticActor, critic: ValueOperator) -> SACLoss | TQCLoss:
    options = {"num_qvalue_nets": config.num_critics, "alpha_init": config.alpha_init, "deactivate_vmap": True}
    if config.loss == Loss.tqc:
        loss = TQCLoss(actor, critic, top_quantiles_to_drop_per_net=config.dropped_quantiles, **options)
    else:
        loss = SACLoss(actor, critic, loss_function=config.loss_function.name, **options)
    loss.make_value_estimator(gamma=config.gamma)
    return loss.to(config.device)


# Update and loop


def train(config: SAC, folder: Path) -> Run:
    """Train an agent, and save the run in a folder."""
    env = prepare(config)
    inputs = make_inputs(config, env)
    policy, critic = make_policy(config, env, inputs), make_critic(config, env, inputs)
    loss = make_loss(config, policy[1], critic)  # without `inputs`, which samples already contain
    target_updater = SoftUpdate(loss, tau=config.tau)
    optimizer = make_adam(config, loss.parameters())  # each loss has gradients only for its own networks
    hindsight = make_hindsight(config)
    replay_buffer = make_buffer(config, hindsight, inputs)

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
    collector = make_collector(config, policy, hindsight)
    run = Run(config, folder, collector, hindsight, replay_buffer, policy=policy, loss=loss, optimizer=optimizer)
    for data in run.collect():  # between chunks of steps, it logs, evaluates and saves
        replay_buffer.extend(data)
        for batch in run.batches():  # of the updates that are due
            run.finish_update(batch, fast_update(batch))
    return run
