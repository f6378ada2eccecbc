"""DQN with hindsight, for environments with discrete actions.

Deep Q-learning (Mnih et al. 2015) with hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495, whose
first experiment this is: flipping bits). ``examples/config/dqn.yaml`` has every setting::

    python examples/dqn.py
    python examples/dqn.py hindsight.enabled=false
    python examples/dqn.py +task=bit_flipping_50
    python examples/dqn.py resume=outputs/dqn/torchrl_her/BitFlipping-v0/2026-01-31_12-00-00
"""

from __future__ import annotations

from pathlib import Path

import hydra
import torch
from common import Normalization, check_actions, make_env, make_replay_buffer
from omegaconf import DictConfig
from settings import start
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate
from training import Training, make_adam, make_explorer, make_policy, set_up_process, speed_up

# Networks


def make_networks(config: DictConfig, env: EnvBase, inputs: list[str]) -> tuple[TensorDictSequential]:
    """Return the actor: action values, which read observation and goal side by side, and the choice of the best."""
    spec = env.action_spec.to(config.device)
    width = sum(env.observation_spec[key].shape.numel() for key in config.inputs)
    values = MLP(width, spec.n, num_cells=list(config.hidden), activation_class=nn.ReLU, device=config.device)
    return (TensorDictSequential(TensorDictModule(values, inputs, ["action_value"]), QValueModule(spec=spec)),)


# Training


def train(config: DictConfig, folder: Path) -> Training:
    """Train an agent, and keep what happens in a folder."""
    set_up_process(config)
    env = make_env(config.env)
    check_actions(env, continuous=False)
    normalization = Normalization(config, env)
    (actor,) = make_networks(config, env, normalization.keys)
    loss = DQNLoss(actor, action_space=env.action_spec, delay_value=True, double_dqn=config.double)
    loss.make_value_estimator(gamma=config.gamma)
    target_updater = SoftUpdate(loss, tau=config.tau)
    optimizer = make_adam(loss.parameters(), config.learning_rate)

    policy = make_policy(normalization, actor)
    explorer = make_explorer(config, env.action_spec.to(config.device), policy)

    def update(batch: TensorDictBase) -> TensorDictBase:
        value = loss(batch)["loss"]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        target_updater.step()
        return TensorDict(loss=value.detach())

    update = speed_up(config, update)
    replay_buffer, hindsight = make_replay_buffer(config, normalization)
    training = Training(config, folder, replay_buffer, hindsight, normalization, policy, loss, optimizer=optimizer)
    for data in training.collect(explorer):
        training.write(data)
        normalization.update(data)
        for batch in training.batches():
            training.record(update(batch), batch)
        if training.batch is not None:  # the value of the best action
            with torch.no_grad():
                value = actor(training.batch.select(*normalization.keys))["chosen_action_value"]
            training.losses["q_value"] = value
    return training


@hydra.main(version_base="1.3", config_path="config", config_name="dqn")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
