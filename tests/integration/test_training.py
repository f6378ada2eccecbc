"""An agent really learns: BitFlipping with 15 bits, which plain DQN cannot do."""

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, GymEnv, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

import torchrl_her.envs  # noqa: F401  registers the environments
from torchrl_her import EnvReward, HERTransform

BITS, STEPS, EPISODES = 15, 5_000, 200


def make_env(seed):
    env = GymEnv("torchrl_her/BitFlipping-v0", n_bits=BITS, categorical_action_encoding=True)
    env.set_seed(seed)
    return env


def success_after_training(her_ratio, seed=0):
    """Train for 5,000 steps with one update a step, and return how many of 200 greedy episodes succeed."""
    torch.manual_seed(seed)
    env = make_env(seed)
    values = TensorDictModule(
        MLP(in_features=2 * BITS, out_features=BITS, num_cells=[256], activation_class=torch.nn.ReLU),
        in_keys=["observation", "desired_goal"],
        out_keys=["action_value"],
    )
    policy = TensorDictSequential(values, QValueModule(spec=env.action_spec))
    exploration = EGreedyModule(env.action_spec, eps_init=0.2, eps_end=0.2)
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    loss.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss, tau=0.05)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STEPS),
        transform=HERTransform(EnvReward(env), her_ratio=her_ratio, capacity=STEPS),
        batch_size=128,
    )
    collector = Collector(
        env,
        TensorDictSequential(policy, exploration),
        frames_per_batch=25,
        total_frames=STEPS,
        auto_register_policy_transforms=False,
    )
    for data in collector:
        rb.extend(data)
        for _ in range(data.numel()):
            loss(rb.sample())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()
    collector.shutdown()
    return greedy_success(policy)


def greedy_success(policy):
    env = make_env(1_000)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        episodes = [env.rollout(BITS, policy) for _ in range(EPISODES)]
    return sum(bool(episode["next", "terminated"][-1]) for episode in episodes) / EPISODES


@pytest.mark.slow
@pytest.mark.parametrize(("her_ratio", "lowest", "highest"), [(0.8, 0.95, 1.0), (0.0, 0.0, 0.1)])
def test_dqn_flips_15_bits_with_hindsight_and_not_without(her_ratio, lowest, highest):
    assert lowest <= success_after_training(her_ratio) <= highest
