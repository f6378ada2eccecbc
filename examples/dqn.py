"""DQN with hindsight, for environments with discrete actions.

Deep Q-learning (Mnih et al. 2015) with hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495). The
default environment, BitFlipping, is the first experiment of that paper::

    python examples/dqn.py
    python examples/dqn.py hindsight.enabled=false
    python examples/dqn.py +task=bit_flipping_50
    python examples/dqn.py resume=outputs/dqn/torchrl_her-BitFlipping-v0/2026-01-31_12-00-00
"""

from training.command import run_command

if __name__ == "__main__":  # before the imports that take seconds
    run_command("dqn")

from pathlib import Path

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import EnvBase
from torchrl.modules import MLP, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate
from training.parts import hidden_layers, make_adam, make_buffer, make_collector, make_hindsight, make_inputs, speed_up
from training.prepare import prepare
from training.run import Run
from training.settings import DQN

from torchrl_her import NormalizedInputs

# Networks


def make_policy(config: DQN, env: EnvBase, inputs: NormalizedInputs) -> TensorDictSequential:
    """Make the greedy policy: action values, then the best action."""
    spec = env.action_spec.to(config.device)
    values = MLP(len(inputs.mean), spec.n, **hidden_layers(config))
    return TensorDictSequential(inputs, TensorDictModule(values, ["inputs"], ["action_value"]), QValueModule(spec=spec))


# Loss


def make_loss(config: DQN, policy: TensorDictSequential, env: EnvBase) -> DQNLoss:
    loss = DQNLoss(
        policy, action_space=env.action_spec, delay_value=True, double_dqn=config.double,
        loss_function=config.loss_function.name,
    )  # fmt: skip
    loss.make_value_estimator(gamma=config.gamma)
    return loss


# Update and loop


def train(config: DQN, folder: Path) -> Run:
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
        for batch in run.batches():  # of the updates that are due
            run.finish_update(batch, fast_update(batch))
    return run
