"""What DDPG and TD3 share: networks of a deterministic policy, and its exploration."""

from __future__ import annotations

from omegaconf import DictConfig
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules import MLP, AdditiveGaussianModule, EGreedyModule, TanhModule, ValueOperator


def make_networks(config: DictConfig, env: EnvBase, inputs: list[str]) -> tuple[TensorDictSequential, TensorDictModule]:
    """Return the actor and the critic, which read observation and goal side by side."""
    layers = {"num_cells": list(config.hidden), "activation_class": nn.ReLU, "device": config.device}
    width = sum(env.observation_spec[key].shape.numel() for key in config.inputs)
    spec = env.action_spec.to(config.device)
    actor = TensorDictSequential(
        TensorDictModule(MLP(width, spec.shape[-1], **layers), inputs, ["action"]),
        TanhModule(in_keys=["action"], spec=spec),
    )
    critic = ValueOperator(MLP(width + spec.shape[-1], 1, **layers), in_keys=[*inputs, "action"])
    return actor, critic


def make_explorer(config: DictConfig, spec: TensorSpec, policy: TensorDictModuleBase) -> TensorDictSequential:
    """Return the policy with Gaussian noise and, at random, uniform actions in its place."""
    noise, share = config.exploration.noise, config.exploration.random_actions
    explorer = [policy, AdditiveGaussianModule(spec, sigma_init=noise, sigma_end=noise, device=config.device)]
    if share:
        explorer.append(EGreedyModule(spec, eps_init=share, eps_end=share, device=config.device))
    return TensorDictSequential(*explorer)
