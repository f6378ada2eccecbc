"""TorchRL's losses accept a sampled batch unchanged, and compute one-step and n-step targets for the new goals."""

import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torchrl.envs import Compose, MultiStepTransform

from support import tape
from support.factories import make_buffer, make_transform
from support.losses import DISCOUNT, DISCRETE, LOSSES, make_loss
from torchrl_her import EnvReward

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "losses-and-transforms.md"
ROWS = re.findall(r"^\| `(\w+Loss)` \|.*\| (yes|no) \|$", PAGE.read_text(), flags=re.MULTILINE)
IGNORE_THE_WINDOW = [name for name, reads_steps in ROWS if reads_steps == "no"]
VALUE = 10.0  # the critics' value of every transition in the test of targets
REWARD, TERMINATED = ("next", "reward"), ("next", "terminated")


def test_the_docs_list_the_losses_that_are_tested():
    assert [name for name, _ in ROWS] == list(LOSSES)


@functools.cache
def sampled(discrete, n):
    """Return a sample of one-step or n-step transitions, whose entries are checked."""
    her = make_transform(reward=EnvReward(tape.make_tape(discrete=discrete)), capacity=200)
    transform = her if n == 1 else Compose(MultiStepTransform(n, 0.5), her)
    batch = make_buffer(transform, tape.collected(200, discrete), size=200, batch_size=256).sample()
    assert tape.check(batch, n=n, gamma=0.5) > 0.6
    assert n == 1 or (batch[TERMINATED] & batch["steps_to_next_obs"].reshape(-1, 1).gt(1)).sum() > 10
    return batch


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_targets_use_the_return_of_the_new_goal_and_end_when_it_is_reached(name, n):
    """Losses that do not read the number of steps discount the next value by one step: a limit of TorchRL."""
    batch = sampled(name in DISCRETE, n)
    steps = batch["steps_to_next_obs"].reshape(-1, 1) if n > 1 and name not in IGNORE_THE_WINDOW else 1
    targets = batch[REWARD] + DISCOUNT**steps * VALUE * ~batch[TERMINATED]
    assert 10 < batch[TERMINATED].sum() < 246
    loss = make_loss(name)
    for key, parameter in [*loss.named_parameters(), *loss.named_buffers()]:
        if "value_network" in key:  # every critic gives the best action VALUE
            parameter.data.fill_(VALUE if key.endswith("2.bias") else 0.0)
            if name == "DQNLoss" and key.endswith("2.bias"):
                parameter.data[1] -= 1.0
    estimate, recorded = loss.value_estimator.value_estimate, []

    def record(*inputs, **options):
        recorded.append(estimate(*inputs, **options))
        return recorded[-1]

    with mock.patch.object(loss.value_estimator, "value_estimate", record):
        loss(batch.clone())
    (estimated,) = recorded
    torch.testing.assert_close(estimated, targets.expand_as(estimated), rtol=1e-5, atol=1e-4)
