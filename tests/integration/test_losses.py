"""A sampled batch goes straight into TorchRL's losses, and their targets are those of the new goals."""

import functools
import re
from pathlib import Path

import pytest
import tape
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import (
    CQLLoss,
    CrossQLoss,
    DDPGLoss,
    DiscreteSACLoss,
    DQNLoss,
    IQLLoss,
    REDQLoss,
    SACLoss,
    TD3Loss,
    TQCLoss,
)

from torchrl_her import EnvReward, HERTransform

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

GAMMA = 0.9
VALUE = 10.0
LENGTHS = (5, 3, 2, 4)
GOALS = ["observation", "desired_goal"]


@functools.cache
def relabelled(discrete=False):
    """The buffer's answer, and the stored transitions behind it."""
    torch.manual_seed(0)
    env = tape.make_tape(lengths=LENGTHS, discrete=discrete)
    collector = Collector(env, None, frames_per_batch=50, total_frames=50)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), transform=HERTransform(EnvReward(env), capacity=50), batch_size=256
    )
    for data in collector:
        rb.extend(data)
    batch = rb.sample()
    count = tape.check(batch, lengths=LENGTHS)
    assert count.share > 0.6
    return batch, rb.storage[batch["index"]]


def told_by_the_oracle(batch):
    """The same transitions, written down again from their goals alone, by the rules of the environment."""
    rows = []
    flags = batch["hindsight", "relabelled"].flatten().tolist()
    for state, goal, action, is_new in zip(
        batch["observation"].tolist(), batch["desired_goal"].tolist(), batch["action"].tolist(), flags, strict=True
    ):
        number, episode, step = state
        outcome = [number, episode, step + 1]
        last = step + 1 == tape.length_of(int(number), int(episode), LENGTHS)
        terminated = outcome == goal if is_new else last and episode % 2 == 0
        reward = sum(int(w) * (a - 2 * d) for w, a, d in zip(tape.WEIGHTS, outcome, goal, strict=True))
        rows.append((state, goal, action, outcome, reward, terminated, terminated or (last and episode % 2 == 1)))
    states, goals, actions, outcomes, rewards, terminated, done = zip(*rows, strict=True)
    return TensorDict(
        {
            "observation": torch.tensor(states),
            "desired_goal": torch.tensor(goals),
            "action": torch.tensor(actions, dtype=batch["action"].dtype),
            "next": {
                "observation": torch.tensor(outcomes),
                "desired_goal": torch.tensor(goals),
                "reward": torch.tensor(rewards).unsqueeze(-1),
                "terminated": torch.tensor(terminated).unsqueeze(-1),
                "done": torch.tensor(done).unsqueeze(-1),
            },
        },
        batch_size=[len(rows)],
    )


# Networks that read the observation and the goal: MLP puts its inputs side by side


def network(*in_keys, out=1):
    sizes = {"observation": 3, "desired_goal": 3, "action": 2}
    inputs = sum(sizes[key] for key in in_keys)
    return MLP(in_features=inputs, out_features=out, num_cells=[16], activation_class=nn.ReLU)


class SideBySide(nn.Sequential):
    """A network of several inputs, where more follows than an MLP."""

    def forward(self, *inputs):
        return super().forward(torch.cat(inputs, dim=-1))


def critic(out=1):
    return ValueOperator(network(*GOALS, "action", out=out), in_keys=[*GOALS, "action"])


def deterministic():
    return TensorDictModule(SideBySide(network(*GOALS, out=2), nn.Tanh()), in_keys=GOALS, out_keys=["action"])


def gaussian(spec):
    net = SideBySide(network(*GOALS, out=4), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=GOALS, out_keys=["loc", "scale"]),
        spec=spec,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )


def categorical(spec):
    return ProbabilisticActor(
        TensorDictModule(network(*GOALS, out=2), in_keys=GOALS, out_keys=["logits"]),
        spec=spec,
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


def discrete_sac(spec):
    values = TensorDictModule(network(*GOALS, out=2), in_keys=GOALS, out_keys=["action_value"])
    return DiscreteSACLoss(categorical(spec), values, action_space=spec, num_actions=2, alpha_init=LITTLE)


LITTLE = 1e-7  # what the entropy counts for
LOSSES = {
    "DQNLoss": lambda spec: DQNLoss(QValueActor(network(*GOALS, out=2), in_keys=GOALS, spec=spec)),
    "DDPGLoss": lambda spec: DDPGLoss(deterministic(), critic()),
    "TD3Loss": lambda spec: TD3Loss(deterministic(), critic(), action_spec=spec),
    "SACLoss": lambda spec: SACLoss(gaussian(spec), critic(), alpha_init=LITTLE),
    "DiscreteSACLoss": discrete_sac,
    "TQCLoss": lambda spec: TQCLoss(gaussian(spec), critic(out=5), alpha_init=LITTLE),
    "CrossQLoss": lambda spec: CrossQLoss(gaussian(spec), critic(), alpha_init=LITTLE),
    "REDQLoss": lambda spec: REDQLoss(gaussian(spec), critic(), alpha_init=LITTLE, min_alpha=LITTLE / 10),
    "IQLLoss": lambda spec: IQLLoss(gaussian(spec), critic(), ValueOperator(network(*GOALS), in_keys=GOALS)),
    "CQLLoss": lambda spec: CQLLoss(gaussian(spec), critic(), alpha_init=LITTLE),
}
DISCRETE = ("DQNLoss", "DiscreteSACLoss")


def make(name):
    torch.manual_seed(1)
    loss = LOSSES[name](tape.make_tape(discrete=name in DISCRETE).action_spec)
    loss.make_value_estimator(gamma=GAMMA)
    return loss


def losses_of(name, batch):
    torch.manual_seed(2)
    return {key: value for key, value in make(name)(batch.copy()).items() if key.startswith("loss")}


@pytest.mark.parametrize("name", LOSSES)
def test_a_sample_trains_every_network_to_look_at_the_goal(name):
    batch, _ = relabelled(name in DISCRETE)
    loss = make(name)
    losses = {key: value for key, value in loss(batch.copy()).items() if key.startswith("loss")}
    for key, value in losses.items():
        assert value.isfinite(), key
    sum(losses.values()).backward()
    first_layers = set()
    for key, parameter in loss.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        if key.endswith("0.weight"):
            first_layers.add(key.split("_network")[0])
            assert (parameter.grad[..., 3:6] != 0).any(), f"{key} learns nothing from the goal"
    assert len(first_layers) == {"DQNLoss": 1, "IQLLoss": 3}.get(name, 2)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_sample_is_that_of_the_transitions_that_the_oracle_tells(name):
    batch, stored = relabelled(name in DISCRETE)
    told = told_by_the_oracle(batch)
    losses, expected = losses_of(name, batch), losses_of(name, told)
    assert list(losses) == list(expected)
    for key in losses:
        assert torch.equal(losses[key], expected[key]), key
    for key in ("desired_goal", ("next", "desired_goal"), ("next", "reward"), ("next", "terminated")):
        stale = losses_of(name, told.copy().set(key, stored[key]))
        assert any(not torch.equal(losses[loss], stale[loss]) for loss in losses), f"the loss does not read {key!r}"


@pytest.mark.parametrize("name", LOSSES)
def test_the_target_is_the_reward_of_the_new_goal_and_ends_where_it_is_reached(name):
    batch, _ = relabelled(name in DISCRETE)
    told = told_by_the_oracle(batch)
    ended = told["next", "terminated"].flatten().tolist()
    assert 10 < sum(ended) < 246
    targets = [
        reward + (0.0 if end else GAMMA * VALUE)
        for reward, end in zip(told["next", "reward"].flatten().tolist(), ended, strict=True)
    ]
    loss = make(name)
    for key, parameter in [*loss.named_parameters(), *loss.named_buffers()]:
        if "value_network" in key:  # all critics say VALUE, of the best action
            parameter.data.fill_(VALUE if key.endswith("2.bias") else 0.0)
            if name == "DQNLoss" and key.endswith("2.bias"):
                parameter.data[1] -= 1.0
    estimates = []
    estimate = loss.value_estimator.value_estimate

    def spy(*args, **kwargs):
        estimates.append(estimate(*args, **kwargs))
        return estimates[0]

    loss.value_estimator.value_estimate = spy
    loss(batch.copy())
    [estimated] = estimates
    torch.testing.assert_close(
        estimated, torch.tensor(targets).unsqueeze(-1).expand_as(estimated), rtol=1e-5, atol=1e-4
    )


def test_the_docs_list_the_losses_that_are_tested():
    page = (Path(__file__).parents[1] / "docs" / "losses-and-transforms.md").read_text()
    assert re.findall(r"^\| `(\w+Loss)` \|", page, flags=re.MULTILINE) == list(LOSSES)
