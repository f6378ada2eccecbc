"""DQN with hindsight, for environments with discrete actions.

Deep Q-learning (Mnih et al. 2015) with hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495). The
default environment, BitFlipping, is the first experiment of that paper::

    python examples/dqn.py
    python examples/dqn.py hindsight.enabled=false
    python examples/dqn.py +task=bit_flipping_50
    python examples/dqn.py resume=outputs/dqn/torchrl_her/BitFlipping-v0/2026-01-31_12-00-00
"""

from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from pydantic import PositiveInt
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import EnvBase
from torchrl.modules import MLP, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate
from training.parts import hidden_layers, make_adam, make_buffer, make_collector, make_hindsight, make_inputs, speed_up
from training.run import Run
from training.settings import Collection, Env, Names, Normalizing, Settings, Share
from training.start import prepare, start

from torchrl_her import NormalizedInputs

# Configuration


@dataclass
class Config(Settings):
    algorithm: str = "dqn"
    double: bool = False
    gamma: Share = 0.98
    batch_size: PositiveInt = 128
    hidden: list[PositiveInt] = field(default_factory=lambda: [256])
    inputs: Names = field(default_factory=lambda: ["observation", "desired_goal"])  # observation = achieved goal
    env: Env = field(default_factory=lambda: Env(name="torchrl_her/BitFlipping-v0"))  # 30 bits: +env.kwargs.n_bits=30
    collector: Collection = field(default_factory=lambda: Collection(steps_per_chunk=25, random_steps=0))
    normalization: Normalizing = field(default_factory=lambda: Normalizing(enabled=False))


ConfigStore.instance().store("dqn", Config)


# Networks


def make_policy(config: Config, env: EnvBase, inputs: NormalizedInputs) -> TensorDictSequential:
    """Make the greedy policy: action values, then the best action."""
    spec = env.action_spec.to(config.device)
    values = MLP(len(inputs.mean), spec.n, **hidden_layers(config))
    return TensorDictSequential(inputs, TensorDictModule(values, ["inputs"], ["action_value"]), QValueModule(spec=spec))


# Loss


def make_loss(config: Config, policy: TensorDictSequential, env: EnvBase) -> DQNLoss:
    loss = DQNLoss(
        policy, action_space=env.action_spec, delay_value=True, double_dqn=config.double,
        loss_function=config.loss_function.name,
    )  # fmt: skip
    loss.make_value_estimator(gamma=config.gamma)
    return loss


# Update and loop


def train(config: Config, folder: Path) -> Run:
    """Train an agent, and save the run in a folder."""
    env = prepare(config, discrete=True)
    inputs = make_inputs(config, env)
    policy = make_policy(config, env, inputs)
    loss = make_loss(config, policy[1:], env)  # without `inputs`, which samples already contain
    target_updater = SoftUpdate(loss, tau=config.tau)
    optimizer = make_adam(config, loss.parameters())
    hindsight = make_hindsight(config)
    replay_buffer = make_buffer(config, hindsight, inputs)

    def update(batch: TensorDictBase) -> TensorDictBase:
        losses = loss(batch)
        losses["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        target_updater.step()
        return TensorDict(loss=losses["loss"], td_error=batch["td_error"]).detach()

    fast_update = speed_up(update, config.speedup)
    collector = make_collector(config, policy, hindsight)
    run = Run(config, folder, collector, hindsight, replay_buffer, policy=policy, loss=loss, optimizer=optimizer)
    for data in run.collect():  # between chunks of steps, it logs, evaluates and saves
        replay_buffer.extend(data)
        inputs.update(data)
        for batch in run.batches():  # of the updates that are due
            run.finish_update(batch, fast_update(batch))
    return run


@hydra.main(version_base="1.3", config_path="config", config_name="dqn")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
