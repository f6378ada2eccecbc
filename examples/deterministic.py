"""What DDPG and TD3 share: networks of a deterministic policy, and its noise."""

from __future__ import annotations

from omegaconf import DictConfig
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule, ValueOperator


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


def make_noise(config: DictConfig, spec: TensorSpec) -> AdditiveGaussianModule:
    """Return the Gaussian noise of actions."""
    noise = config.exploration.noise
    return AdditiveGaussianModule(spec, sigma_init=noise, sigma_end=noise, device=config.device)
