"""The targets of losses for n-step returns with the new goal, compared with TorchRL's own transform."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl import objectives
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import MultiStepTransform
from torchrl.modules import OneHotCategorical, ProbabilisticActor, QValueActor, TanhNormal

from support.factories import filled, seeded_sample
from support.losses import STATE_KEYS, ConcatenatingSequential, targets_of
from support.n_step_oracle import WALK, NStepOracle, kind_of, missing
from support.oracle import RELABELLED, expected_of
from support.streams import NEXT_FLAGS

# TorchRL's own transform


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_without_hindsight_only_the_flags_differ_from_torchrls_transform(n):
    """This also shows that rewards and windows of the oracle equal TorchRL's."""
    stream = replace(WALK, her_ratio=0.0, n=n, rows=40)
    rb, oracle = filled(NStepOracle, stream)
    plain, _ = filled(NStepOracle, stream, transform=MultiStepTransform(stream.n, stream.gamma))
    ours, theirs = rb[:], plain[:]
    for key in theirs.keys(include_nested=True, leaves_only=True):
        if key not in NEXT_FLAGS:
            assert (ours[key] == theirs[key]).all(), key
    assert oracle.check(ours)["relabelled"] == 0
    wrong = [key for key in NEXT_FLAGS if (ours[key] != theirs[key]).any()]
    assert wrong == ([] if n == 1 else NEXT_FLAGS)


# Targets of losses

LOSS_GAMMA = 0.95


def value_of(observation: Any, goal: Any) -> Any:
    """Return the value of a state. The target only depends on the value of the next state."""
    return 0.7 * observation - 0.3 * goal[0] + 20 * goal[1]


class Value(nn.Module):
    """`value_of`, minus ``slope`` for each action after the first. It depends on no parameter."""

    def __init__(self, outputs: int = 1, slope: float = 0.0):
        super().__init__()
        self.below = slope * torch.arange(outputs)
        self.parameter = nn.Parameter(torch.zeros(1))  # losses need a parameter

    def forward(self, observation, goal, action=None):
        return value_of(observation, goal.unsqueeze(-2).unbind(-1)) - self.below + 0 * self.parameter


def policy(outputs: int, last: nn.Module, *out_keys: str, distribution: Any = None) -> TensorDictModule:
    """A policy. Values do not depend on its actions."""
    network = ConcatenatingSequential(nn.LayerNorm(3), nn.Linear(3, outputs), last)
    module = TensorDictModule(network, in_keys=STATE_KEYS, out_keys=list(out_keys))
    if distribution is None:
        return module
    return ProbabilisticActor(module, list(out_keys), distribution_class=distribution, return_log_prob=True)


deterministic = functools.partial(policy, 2, nn.Tanh(), "action")
stochastic = functools.partial(policy, 4, NormalParamExtractor(), "loc", "scale", distribution=TanhNormal)
categorical = functools.partial(policy, 2, nn.Identity(), "logits", distribution=OneHotCategorical)


def critic(outputs: int = 1, out_key: str = "state_action_value", action: bool = True) -> TensorDictModule:
    keys = [*STATE_KEYS, "action"] if action else STATE_KEYS
    return TensorDictModule(Value(outputs), in_keys=keys, out_keys=[out_key])


def greedy() -> QValueActor:
    return QValueActor(Value(2, slope=1.0), in_keys=STATE_KEYS, action_space="one-hot")


SOFT = {"alpha_init": 1e-30, "fixed_alpha": True, "target_entropy": -2.0}  # the entropy has no weight
LOSSES = {
    "DQN": lambda: objectives.DQNLoss(greedy(), action_space="one-hot", delay_value=True),
    "double DQN": lambda: objectives.DQNLoss(greedy(), action_space="one-hot", delay_value=True, double_dqn=True),
    "DDPG": lambda: objectives.DDPGLoss(deterministic(), critic(), delay_actor=True, delay_value=True),
    "TD3": lambda: objectives.TD3Loss(deterministic(), critic(), bounds=(-1.0, 1.0)),
    "SAC": lambda: objectives.SACLoss(stochastic(), critic(), **SOFT),
    "discrete SAC": lambda: objectives.DiscreteSACLoss(
        categorical(), critic(2, "action_value", action=False), action_space="one-hot", num_actions=2, **SOFT
    ),
    "TQC": lambda: objectives.TQCLoss(stochastic(), critic(5), **SOFT),
    "CrossQ": lambda: objectives.CrossQLoss(stochastic(), critic(), **SOFT),
    "CQL": lambda: objectives.CQLLoss(stochastic(), critic(), **SOFT),
    "discrete CQL": lambda: objectives.DiscreteCQLLoss(greedy(), action_space="one-hot"),
}
LOSSES_THAT_IGNORE_THE_WINDOW = {
    "REDQ": lambda: objectives.REDQLoss(stochastic(), critic(), min_alpha=1e-30, **SOFT),
    "IQL": lambda: objectives.IQLLoss(stochastic(), critic(), critic(1, "state_value", action=False)),
    "discrete IQL": lambda: objectives.DiscreteIQLLoss(
        categorical(), critic(2, action=False), critic(1, "state_value", action=False), action_space="one-hot"
    ),
}


def n_step_targets_of(loss: nn.Module, batch: TensorDictBase) -> list[float]:
    loss.make_value_estimator(gamma=LOSS_GAMMA)
    targets = targets_of(loss, batch).reshape(len(batch), -1)
    assert (targets == targets[:, :1]).all()  # the quantiles of TQC are equal
    return targets[:, 0].tolist()


def count_targets(oracle: NStepOracle, loss: nn.Module, batch: TensorDictBase) -> tuple[Counter, Counter]:
    """Count by kind the targets of a loss that equal the oracle's, and the others."""
    relabelled = batch.get(RELABELLED, torch.zeros(len(batch), 1, dtype=torch.bool)).flatten().tolist()
    goals = [tuple(goal) for goal in batch["desired_goal"].tolist()]
    right, wrong = Counter(), Counter()
    for index, target in enumerate(n_step_targets_of(loss, batch)):
        goal = goals[index] if relabelled[index] else None
        row = expected_of(oracle.windows[int(batch["uid"][index])], goal, oracle.stream.gamma)
        bootstrap = 0 if row["next", "terminated"] else LOSS_GAMMA ** row["steps_to_next_obs"]
        due = row["next", "reward"] + bootstrap * value_of(row["next", "observation"], row["desired_goal"])
        (right if target == pytest.approx(due, rel=1e-4, abs=1e-2) else wrong)[kind_of(goal, row)] += 1
    return right, wrong


@functools.cache
def batch_for_losses(hindsight: bool) -> tuple[NStepOracle, TensorDictBase]:
    transform = None if hindsight else MultiStepTransform(WALK.n, WALK.gamma)
    rb, oracle = filled(NStepOracle, WALK, transform=transform, kind=TensorDictReplayBuffer)
    return oracle, seeded_sample(rb, 1_000)


@pytest.mark.parametrize("name", LOSSES)
def test_the_target_of_a_loss_is_the_n_step_target_of_the_returned_goal(name):
    oracle, batch = batch_for_losses(hindsight=True)
    right, wrong = count_targets(oracle, LOSSES[name](), batch)
    assert not wrong
    assert not missing(right)


def test_with_torchrls_transform_alone_the_loss_bootstraps_through_terminations_inside_the_window():
    """Therefore the flags of original transitions are corrected, too."""
    oracle, batch = batch_for_losses(hindsight=False)
    right, wrong = count_targets(oracle, LOSSES["DQN"](), batch)
    assert set(wrong) == {"original: terminated on the way", "original: terminated and truncated"}
    assert not set(wrong) & set(right)
    assert not missing(right + wrong, ("original",))


@pytest.mark.parametrize("name", LOSSES_THAT_IGNORE_THE_WINDOW)
def test_losses_that_ignore_the_window_discount_the_next_value_as_if_it_were_one_step_away(name):
    """A limit of TorchRL, also without hindsight. If this test fails, these losses can be used."""
    oracle, batch = batch_for_losses(hindsight=False)
    next_value = value_of(batch["next", "observation"], batch["next", "desired_goal"].unsqueeze(-2).unbind(-1))
    one_step = batch["next", "reward"] + LOSS_GAMMA * next_value * ~batch["next", "terminated"]
    assert (batch["steps_to_next_obs"] > 1).any()
    targets = n_step_targets_of(LOSSES_THAT_IGNORE_THE_WINDOW[name](), batch)
    torch.testing.assert_close(torch.tensor(targets), one_step.squeeze(-1), rtol=1e-4, atol=1e-2)
    _, wrong = count_targets(oracle, LOSSES_THAT_IGNORE_THE_WINDOW[name](), batch)
    assert wrong["original: continues"] > 0
