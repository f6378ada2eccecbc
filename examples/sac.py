"""SAC or TQC with hindsight.

Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), or with ``loss=tqc`` truncated quantile critics (Kuznetsov
et al. 2020, arXiv:2005.04269), with hindsight experience replay. ``examples/config/sac.yaml`` has every setting::

    python examples/sac.py
    python examples/sac.py loss=tqc
    python examples/sac.py +task=fetch env.name=FetchReach-v4
    python examples/sac.py resume=outputs/sac/torchrl_her/PointReach-v0/2026-01-31_12-00-00
"""

from __future__ import annotations

from pathlib import Path

import hydra
from common import Normalization, check_actions, make_env, make_replay_buffer
from omegaconf import DictConfig
from settings import start
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate, TQCLoss
from training import Training, make_adam, make_explorer, make_policy, set_up_process, speed_up

# Networks


def make_networks(config: DictConfig, env: EnvBase, inputs: list[str]) -> tuple[ProbabilisticActor, TensorDictModule]:
    """Return the actor and the critic, which read observation and goal side by side."""
    layers = {"num_cells": list(config.hidden), "activation_class": nn.ReLU, "device": config.device}
    width = sum(env.observation_spec[key].shape.numel() for key in config.inputs)
    spec = env.action_spec.to(config.device)
    actions, (low, high) = spec.shape[-1], map(bound, (spec.space.low, spec.space.high))
    actor = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(MLP(width, 2 * actions, **layers), inputs, ["features"]),
            TensorDictModule(NormalParamExtractor(), ["features"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": low, "high": high, "tanh_loc": False},
    )
    values = config.quantiles if config.loss == "tqc" else 1
    critic = ValueOperator(MLP(width + actions, values, **layers), in_keys=[*inputs, "action"])
    return actor, critic


def bound(values: Tensor) -> Tensor | float:
    """Return a number where it is the same for all actions: a distribution checks it with no tensor operations."""
    return values[0].item() if (values == values[0]).all() else values


# Loss


def make_loss(config: DictConfig, actor: ProbabilisticActor, critic: TensorDictModule) -> SACLoss:
    arguments = {"num_qvalue_nets": config.num_critics, "alpha_init": config.alpha_init, "deactivate_vmap": True}
    if config.loss == "tqc":
        loss = TQCLoss(actor, critic, top_quantiles_to_drop_per_net=config.dropped_quantiles, **arguments)
    elif config.loss == "sac":
        loss = SACLoss(actor, critic, **arguments)
    else:
        raise SystemExit(f"loss is 'sac' or 'tqc', not {config.loss!r}.")
    loss.make_value_estimator(gamma=config.gamma)
    return loss


# Training


def train(config: DictConfig, folder: Path) -> Training:
    """Train an agent, and keep what happens in a folder."""
    set_up_process(config)
    env = make_env(config.env)
    check_actions(env, continuous=True)
    box = env.action_spec.space
    if any(isinstance(bound(values), Tensor) for values in (box.low, box.high)):
        config.capture = False  # TanhNormal compares bounds that are tensors, which cannot be recorded
    normalization = Normalization(config, env)
    actor, critic = make_networks(config, env, normalization.keys)
    loss = make_loss(config, actor, critic).to(config.device)
    target_updater = SoftUpdate(loss, tau=config.tau)
    optimizer = make_adam(loss.parameters(), config.learning_rate)  # no loss has gradients for another's parameters

    policy = make_policy(normalization, actor)
    explorer = make_explorer(config, env.action_spec.to(config.device), policy)

    def update(batch: TensorDictBase) -> TensorDictBase:
        losses = loss(batch)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        target_updater.step()
        losses = losses.detach()
        # The loss of the actor is -(value + alpha * entropy).
        return losses.set("q_value", -(losses["loss_actor"] + losses["alpha"] * losses["entropy"]))

    update = speed_up(config, update)
    replay_buffer, hindsight = make_replay_buffer(config, normalization)
    training = Training(config, folder, replay_buffer, hindsight, normalization, policy, loss, optimizer=optimizer)
    for data in training.collect(explorer):
        training.write(data)
        normalization.update(data)
        for batch in training.batches():
            training.record(update(batch), batch)
    return training


@hydra.main(version_base="1.3", config_path="config", config_name="sac")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
