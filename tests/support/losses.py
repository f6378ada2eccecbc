"""TorchRL's losses with small networks that read the tape's observation and desired goal.

The observation and the goal have 3 components, the action 2 (a one-hot vector if it is discrete). A network gets
``[observation, desired_goal]`` or ``[observation, desired_goal, action]``, so columns 3 to 5 of its first layer's
weight belong to the goal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import (
    CQLLoss,
    CrossQLoss,
    DDPGLoss,
    DiscreteSACLoss,
    DQNLoss,
    IQLLoss,
    LossModule,
    REDQLoss,
    SACLoss,
    TD3Loss,
    TQCLoss,
)

from support.tape import make_tape

DISCOUNT = 0.9
ALPHA = 1e-7  # entropy weight: small enough that targets are rewards plus discounted values
STATE_KEYS = ["observation", "desired_goal"]
SIZES = {"observation": 3, "desired_goal": 3, "action": 2}


class ConcatenatingSequential(nn.Sequential):
    """An ``nn.Sequential`` that concatenates its inputs, as ``MLP`` does."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenate the inputs ``[*batch, n]`` and apply the modules."""
        return super().forward(torch.cat(inputs, dim=-1))


def make_mlp(*in_keys: str, out: int = 1) -> MLP:
    """Return a network with one hidden layer that reads the entries under ``in_keys``."""
    inputs = sum(SIZES[key] for key in in_keys)
    return MLP(in_features=inputs, out_features=out, num_cells=[16], activation_class=nn.ReLU)


def make_critic(out: int = 1) -> ValueOperator:
    """Return a critic of state and action with ``out`` values (quantiles)."""
    return ValueOperator(make_mlp(*STATE_KEYS, "action", out=out), in_keys=[*STATE_KEYS, "action"])


def make_deterministic_actor() -> TensorDictModule:
    """Return an actor with actions in (-1, 1)."""
    network = ConcatenatingSequential(make_mlp(*STATE_KEYS, out=2), nn.Tanh())
    return TensorDictModule(network, in_keys=STATE_KEYS, out_keys=["action"])


def make_gaussian_actor(spec: TensorSpec) -> ProbabilisticActor:
    """Return an actor that samples from a squashed normal distribution."""
    network = ConcatenatingSequential(make_mlp(*STATE_KEYS, out=4), NormalParamExtractor())
    moments = TensorDictModule(network, in_keys=STATE_KEYS, out_keys=["loc", "scale"])
    return ProbabilisticActor(moments, spec=spec, in_keys=["loc", "scale"], distribution_class=TanhNormal)


def make_discrete_sac(spec: TensorSpec) -> DiscreteSACLoss:
    """Return a ``DiscreteSACLoss`` with a categorical actor and a network of two action values."""
    logits = TensorDictModule(make_mlp(*STATE_KEYS, out=2), in_keys=STATE_KEYS, out_keys=["logits"])
    actor = ProbabilisticActor(logits, spec=spec, in_keys=["logits"], distribution_class=OneHotCategorical)
    values = TensorDictModule(make_mlp(*STATE_KEYS, out=2), in_keys=STATE_KEYS, out_keys=["action_value"])
    return DiscreteSACLoss(actor, values, action_space=spec, num_actions=2, alpha_init=ALPHA)


DISCRETE = ("DQNLoss", "DiscreteSACLoss")
LOSSES: dict[str, Callable[[TensorSpec], LossModule]] = {
    "DQNLoss": lambda spec: DQNLoss(QValueActor(make_mlp(*STATE_KEYS, out=2), in_keys=STATE_KEYS, spec=spec)),
    "DDPGLoss": lambda spec: DDPGLoss(make_deterministic_actor(), make_critic()),
    "TD3Loss": lambda spec: TD3Loss(make_deterministic_actor(), make_critic(), action_spec=spec),
    "SACLoss": lambda spec: SACLoss(make_gaussian_actor(spec), make_critic(), alpha_init=ALPHA),
    "DiscreteSACLoss": make_discrete_sac,
    "TQCLoss": lambda spec: TQCLoss(make_gaussian_actor(spec), make_critic(out=5), alpha_init=ALPHA),
    "CrossQLoss": lambda spec: CrossQLoss(make_gaussian_actor(spec), make_critic(), alpha_init=ALPHA),
    "REDQLoss": lambda spec: REDQLoss(make_gaussian_actor(spec), make_critic(), alpha_init=ALPHA, min_alpha=ALPHA / 10),
    "IQLLoss": lambda spec: IQLLoss(
        make_gaussian_actor(spec), make_critic(), ValueOperator(make_mlp(*STATE_KEYS), in_keys=STATE_KEYS)
    ),
    "CQLLoss": lambda spec: CQLLoss(make_gaussian_actor(spec), make_critic(), alpha_init=ALPHA),
}


def make_loss(name: str) -> LossModule:
    """Return one of ``LOSSES``, with the same parameters at each call."""
    torch.manual_seed(1)
    loss = LOSSES[name](make_tape(discrete=name in DISCRETE).action_spec)
    loss.make_value_estimator(gamma=DISCOUNT)
    return loss


def targets_of(loss: LossModule, batch: TensorDictBase) -> Tensor:
    """Return the value targets that a loss computes, recorded during its forward."""
    estimate, recorded = loss.value_estimator.value_estimate, []

    def record(*args: Any, **kwargs: Any) -> Tensor:
        recorded.append(estimate(*args, **kwargs))
        return recorded[-1]

    with mock.patch.object(loss.value_estimator, "value_estimate", record):
        loss(batch.clone())
    (targets,) = recorded
    return targets
