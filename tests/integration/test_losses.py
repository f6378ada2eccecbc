"""TorchRL's losses accept a sampled batch unchanged, and compute targets for the new goals."""

import functools
import re
from pathlib import Path

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support import tape
from support.losses import DISCOUNT, DISCRETE, LOSSES, make_loss, targets_of
from support.oracle import RELABELLED, as_dicts
from torchrl_her import EnvReward, HERTransform

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

VALUE = 10.0  # the critics' value of every transition in the test of targets
LENGTHS = (5, 3, 2, 4)
REPLACED = ["desired_goal", ("next", "desired_goal"), ("next", "reward"), ("next", "terminated")]
READ_BY_LOSSES = ["observation", ("next", "observation"), ("next", "done"), *REPLACED]
every_loss = pytest.mark.parametrize("name", LOSSES)


@functools.cache
def relabelled(discrete):
    """Return a sampled batch, and the stored transitions of its rows."""
    env = tape.make_tape(lengths=LENGTHS, discrete=discrete)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), transform=HERTransform(EnvReward(env), capacity=50), batch_size=256
    )
    rb.extend(*tape.collect(env, 50))
    batch = rb.sample()
    assert tape.check(batch, lengths=LENGTHS).share > 0.6
    return batch, rb.storage[batch["index"]]


def written_by_the_oracle(batch):
    """Return the same transitions, computed from states and goals by the rules of the environment."""
    rows = [
        tape.expected_row(row["observation"], row["desired_goal"] if row[RELABELLED] else None, lengths=LENGTHS)
        for row in as_dicts(batch, ["observation", "desired_goal", RELABELLED])
    ]
    data = batch.select("action").clone()
    for key in READ_BY_LOSSES:
        values = torch.tensor([row[key] for row in rows]).reshape(len(rows), -1)
        data[key] = values if values.dtype == torch.bool else values.float()
    return data


def losses_of(name, batch):
    loss = make_loss(name)
    torch.manual_seed(2)
    return loss, {key: value for key, value in loss(batch.copy()).items() if key.startswith("loss")}


@every_loss
def test_a_sample_gives_every_network_a_gradient_from_the_goal(name):
    loss, losses = losses_of(name, relabelled(name in DISCRETE)[0])
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


@every_loss
def test_the_loss_of_a_sample_equals_the_loss_of_the_oracles_transitions(name):
    batch, stored = relabelled(name in DISCRETE)
    written = written_by_the_oracle(batch)
    losses, expected = losses_of(name, batch)[1], losses_of(name, written)[1]
    assert list(losses) == list(expected)
    for key in losses:
        assert torch.equal(losses[key], expected[key]), key
    for key in REPLACED:
        _, stale = losses_of(name, written.copy().set(key, stored[key]))
        assert any(not torch.equal(losses[loss], stale[loss]) for loss in losses), f"the loss does not read {key!r}"


@every_loss
def test_targets_use_the_reward_of_the_new_goal_and_end_when_it_is_reached(name):
    batch, _ = relabelled(name in DISCRETE)
    after = written_by_the_oracle(batch)["next"]
    assert 10 < after["terminated"].sum() < 246
    targets = after["reward"] + DISCOUNT * VALUE * ~after["terminated"]
    loss = make_loss(name)
    for key, parameter in [*loss.named_parameters(), *loss.named_buffers()]:
        if "value_network" in key:  # every critic gives the best action VALUE
            parameter.data.fill_(VALUE if key.endswith("2.bias") else 0.0)
            if name == "DQNLoss" and key.endswith("2.bias"):
                parameter.data[1] -= 1.0
    estimated = targets_of(loss, batch)
    torch.testing.assert_close(estimated, targets.expand_as(estimated), rtol=1e-5, atol=1e-4)


def test_the_docs_list_the_losses_that_are_tested():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "losses-and-transforms.md").read_text()
    assert re.findall(r"^\| `(\w+Loss)` \|", page, flags=re.MULTILINE) == list(LOSSES)
