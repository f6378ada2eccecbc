"""TorchRL's losses with small networks that read the tape's observation and desired goal.

The observation and the goal have 3 components, the action 2 (a one-hot vector if it is discrete).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import objectives
from torchrl.data import TensorSpec
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator

from support.tape import make_tape

DISCOUNT = 0.9
ENTROPY = {"alpha_init": 1e-7}  # small enough that targets are rewards plus discounted values
STATE_KEYS = ["observation", "desired_goal"]


def mlp(out: int = 1, action: bool = False) -> MLP:
    """Return a network with one hidden layer that reads the state and, with ``action=True``, the action."""
    return MLP(in_features=8 if action else 6, out_features=out, num_cells=[16], activation_class=nn.ReLU)


def critic(out: int = 1) -> ValueOperator:
    """Return a critic of state and action with ``out`` values (quantiles)."""
    return ValueOperator(mlp(out, action=True), in_keys=[*STATE_KEYS, "action"])


def module(out: int, out_key: str) -> TensorDictModule:
    """Return a network of the state."""
    return TensorDictModule(mlp(out), in_keys=STATE_KEYS, out_keys=[out_key])


def gaussian(spec: TensorSpec) -> ProbabilisticActor:
    """Return an actor that samples from a squashed normal distribution."""
    moments = TensorDictModule(NormalParamExtractor(), in_keys=["features"], out_keys=["loc", "scale"])
    network = TensorDictSequential(module(4, "features"), moments)
    return ProbabilisticActor(network, spec=spec, in_keys=["loc", "scale"], distribution_class=TanhNormal)


def discrete_sac(spec: TensorSpec) -> objectives.DiscreteSACLoss:
    """Return a ``DiscreteSACLoss`` with a categorical actor and a network of two action values."""
    actor = ProbabilisticActor(module(2, "logits"), spec=spec, in_keys=["logits"], distribution_class=OneHotCategorical)
    return objectives.DiscreteSACLoss(actor, module(2, "action_value"), action_space=spec, num_actions=2, **ENTROPY)


DISCRETE = ("DQNLoss", "DiscreteSACLoss")
LOSSES: dict[str, Callable[[TensorSpec], objectives.LossModule]] = {
    "DQNLoss": lambda spec: objectives.DQNLoss(QValueActor(mlp(2), in_keys=STATE_KEYS, spec=spec)),
    "DDPGLoss": lambda spec: objectives.DDPGLoss(module(2, "action"), critic()),
    "TD3Loss": lambda spec: objectives.TD3Loss(module(2, "action"), critic(), action_spec=spec),
    "SACLoss": lambda spec: objectives.SACLoss(gaussian(spec), critic(), **ENTROPY),
    "DiscreteSACLoss": discrete_sac,
    "TQCLoss": lambda spec: objectives.TQCLoss(gaussian(spec), critic(out=5), **ENTROPY),
    "CrossQLoss": lambda spec: objectives.CrossQLoss(gaussian(spec), critic(), **ENTROPY),
    "REDQLoss": lambda spec: objectives.REDQLoss(gaussian(spec), critic(), min_alpha=1e-8, **ENTROPY),
    "IQLLoss": lambda spec: objectives.IQLLoss(gaussian(spec), critic(), ValueOperator(mlp(), in_keys=STATE_KEYS)),
    "CQLLoss": lambda spec: objectives.CQLLoss(gaussian(spec), critic(), **ENTROPY),
}


def make_loss(name: str) -> objectives.LossModule:
    """Return one of ``LOSSES``, with the same parameters at each call."""
    torch.manual_seed(1)
    loss = LOSSES[name](make_tape(discrete=name in DISCRETE).action_spec)
    loss.make_value_estimator(gamma=DISCOUNT)
    return loss
