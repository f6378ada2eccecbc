"""The README's examples run as they are written."""

import itertools
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
TRAIN, OWN = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_example_runs_and_relabels(capsys):
    names = {}
    exec(TRAIN, names)
    relabelled = names["batch"]["hindsight", "relabelled"].float().mean()
    assert 0.6 <= relabelled <= 0.95
    # Without hindsight, a random policy reaches its goal in well under 5% of its steps.
    assert (names["batch"]["next", "reward"] == 0).float().mean() > 0.05
    assert "relabelled" in capsys.readouterr().out


def test_the_transform_of_an_own_environment_computes_its_reward():
    names = {}
    exec(OWN, names)
    rewards = names["reward"](torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.03, 0.03], [0.1, 0.0]]))
    assert rewards.tolist() == [0, -1]
    assert names["her"].keys.achieved == "gripper"


@pytest.mark.parametrize("example", [TRAIN, OWN])
def test_an_example_can_be_pasted_into_a_prompt(example):
    """In a prompt, a block ends with an empty line, so no code may follow it directly."""
    for before, line in itertools.pairwise(example.splitlines()):
        ends_block = before.startswith("    ") and line and not line.startswith((" ", ")"))
        assert not ends_block, f"an empty line is missing before {line!r}"
