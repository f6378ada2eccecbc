"""Shared parts of the demo and the example with Ray: evaluation on PointReach, and the networks of DDPG."""

from __future__ import annotations

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from torchrl.modules import MLP, TanhModule, ValueOperator

import torchrl_her.envs  # noqa: F401 (registers PointReach)

ENV = "torchrl_her/PointReach-v0"
EPISODE_STEPS = 50
EVALUATION_EPISODES = 100
EVALUATION_INTERVAL = 500  # environment steps
EVALUATION_SEED = 1_000_000  # of the first episode; training uses smaller seeds


def evaluate(policy: TensorDictModule) -> float:
    """Return the success rate: the share of greedy episodes whose last step is at the goal."""
    envs = gymnasium.make_vec(ENV, num_envs=EVALUATION_EPISODES, vectorization_mode="sync")
    observation, _ = envs.reset(seed=EVALUATION_SEED)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(EPISODE_STEPS):
            tensordict = policy(TensorDict(observation, batch_size=EVALUATION_EPISODES))
            observation, _, _, truncated, info = envs.step(tensordict["action"].numpy())
    assert truncated.all()  # so this was the last step
    return float(info["is_success"].mean())


def make_networks(hidden: int, env: EnvBase) -> tuple[TensorDictModule, TensorDictModule]:
    """Return the policy and the critic, which read observation and desired goal, concatenated."""
    layers = {"num_cells": [hidden, hidden], "activation_class": nn.ReLU}
    inputs = ["observation", "desired_goal"]
    spec = env.action_spec
    policy = TensorDictSequential(
        TensorDictModule(MLP(out_features=spec.shape[-1], **layers), inputs, ["action"]),
        TanhModule(in_keys=["action"], spec=spec),
    )
    critic = ValueOperator(MLP(out_features=1, **layers), in_keys=[*inputs, "action"])
    with torch.no_grad():
        critic(policy(env.fake_tensordict()))  # initializes the lazy layers
    return policy, critic
