"""DDPG with the settings of ``examples/ddpg.py``, without normalization, with an update for CUDA graphs."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate
from torchrl.objectives.value import TD0Estimator

GAMMA = 0.95
TAU = 0.05
LEARNING_RATE = 1e-3
HIDDEN = [128, 128]
INPUTS = ["observation", "achieved_goal", "desired_goal"]
NOISE = 0.2  # standard deviation, in units of the action
RANDOM_ACTIONS = 0.2  # share of uniformly random actions


class ClippedTarget(TD0Estimator):
    """The one-step target, clipped to the range of returns with rewards of -1 and 0."""

    def value_estimate(self, *args, **kwargs) -> Tensor:  # noqa: D102
        return super().value_estimate(*args, **kwargs).clamp(-1 / (1 - GAMMA), 0.0)


class Learner:
    """The networks of DDPG and their update.

    Args:
        transitions (TensorDictBase): transitions of the environment ``[n]``, which determine sizes and device.

    Attributes:
        actor (TensorDictSequential): the greedy policy.
        explorer (TensorDictSequential): the policy with exploration noise.
    """

    def __init__(self, transitions: TensorDictBase):
        device = transitions.device
        width = sum(transitions[key].shape[-1] for key in INPUTS)
        actions = transitions["action"].shape[-1]
        layers = {"num_cells": HIDDEN, "activation_class": nn.ReLU, "device": device}
        self.actor = TensorDictSequential(
            TensorDictModule(MLP(width, actions, **layers), INPUTS, ["action"]),
            TensorDictModule(nn.Tanh(), ["action"], ["action"]),
        )
        self.explorer = TensorDictSequential(self.actor, TensorDictModule(explore, ["action"], ["action"]))
        critic = ValueOperator(MLP(width + actions, 1, **layers), in_keys=[*INPUTS, "action"])
        self._loss = DDPGLoss(self.actor, critic, delay_actor=True)
        target = ClippedTarget(gamma=GAMMA, value_network=self._loss.actor_critic, device=device)
        target.set_keys(value=self._loss.tensor_keys.state_action_value)
        self._loss.make_value_estimator(target)
        self._targets = SoftUpdate(self._loss, tau=TAU)
        trained = [parameter for parameter in self._loss.parameters() if parameter.requires_grad]
        capturable = device is not None and device.type == "cuda"
        self._optimizer = torch.optim.Adam(trained, lr=LEARNING_RATE, fused=True, capturable=capturable)

    def update(self, batch: TensorDictBase) -> None:
        """Take one step of gradient descent on a batch ``[n]``."""
        self._optimizer.zero_grad()
        losses = self._loss(batch)
        (losses["loss_actor"] + losses["loss_value"]).backward()
        self._optimizer.step()
        self._targets.step()


def explore(action: Tensor) -> Tensor:
    """Add Gaussian noise to actions ``[n, actions]``, and replace some of them with uniformly random ones."""
    noisy = (action + NOISE * torch.randn_like(action)).clamp(-1.0, 1.0)
    is_random = torch.rand(*action.shape[:-1], 1, device=action.device) < RANDOM_ACTIONS
    return torch.where(is_random, 2 * torch.rand_like(action) - 1, noisy)
