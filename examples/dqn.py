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
from common import (
    Evaluation,
    make_adam,
    make_collector,
    make_hindsight,
    make_inputs,
    make_replay_buffer,
    speed_up,
)
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from pydantic import PositiveInt
from run import Checkpoints, History, Log, Progress, set_up
from settings import Collection, Env, Names, Normalizing, Priority, Settings, Share
from start import check_env, start
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import MLP, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

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
    values = MLP(len(inputs.mean), spec.n, num_cells=config.hidden, activation_class=nn.ReLU, device=config.device)
    return TensorDictSequential(inputs, TensorDictModule(values, ["inputs"], ["action_value"]), QValueModule(spec=spec))


# Training


def train(config: Config, folder: Path) -> Checkpoints:
    """Train an agent, and save the run in a folder."""
    env = check_env(config, discrete=True)

    set_up(config)
    inputs = make_inputs(config, env)
    policy = make_policy(config, env, inputs)

    loss = DQNLoss(
        policy[1:], action_space=env.action_spec, delay_value=True, double_dqn=config.double,
        loss_function=config.loss_function.name,
    )  # fmt: skip
    loss.make_value_estimator(gamma=config.gamma)
    target_updater = SoftUpdate(loss, tau=config.tau)
    optimizer = make_adam(config, loss.parameters())

    hindsight = make_hindsight(config)
    replay_buffer = make_replay_buffer(config, hindsight, inputs)

    def update(batch: TensorDictBase) -> TensorDictBase:
        losses = loss(batch)
        losses["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        target_updater.step()
        return TensorDict(loss=losses["loss"], td_error=batch["td_error"]).detach()

    fast_update = speed_up(update, config.speedup)
    collector = make_collector(config, policy)
    evaluate, progress = Evaluation(config), Progress(config)
    history: History = {}
    save = Checkpoints(
        config, folder, collector, hindsight, policy=policy, loss=loss, buffer=replay_buffer, log=history,
        progress=progress.counts, optimizer=optimizer,
    )  # fmt: skip
    with progress.paused():
        save.resume_or_start()
        log = Log(config, folder, history)
        if not progress.steps:
            log("evaluation", evaluate(policy), 0)
    losses: dict[str, Tensor] = {}
    for data in collector:
        replay_buffer.extend(data)
        if config.normalization.enabled:
            inputs.update(data)
        progress.add(data)
        for count in progress.updates_due():  # several batches in one call of the buffer
            for batch in replay_buffer.sample(count * config.batch_size).split(config.batch_size):
                losses.update(fast_update(batch))
                if config.buffer.prioritized == Priority.error:
                    replay_buffer.update_tensordict_priority(batch.set("td_error", losses["td_error"]))
        with progress.paused():
            if progress.due(config.logger.interval):
                log("train", progress.metrics() | losses, progress.steps)
                losses.clear()
            if progress.due(config.evaluation.interval):
                log("evaluation", evaluate(policy), progress.steps)
            if progress.due(config.checkpoint.interval):
                save(progress.steps)
    for tool in (evaluate, progress, log):
        tool.close()
    return save


@hydra.main(version_base="1.3", config_path="config", config_name="dqn")
def main(config: DictConfig) -> None:
    train(*start(config))


if __name__ == "__main__":
    main()
