"""Makes the benchmarks and the example scripts importable by name, as when Python runs one of them."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from torchrl_her import HERTransform

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "examples")]
# Doctests would import a second module `conftest`. The other tests need the extra 'examples'.
collect_ignore_glob = ["conftest.py" if find_spec("hydra") and find_spec("tensorboard") else "*.py"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process, also what it would run in new processes, and returns what it prints."""

    def run(command, *arguments):
        for name in {"memory", "strategies"} & sys.modules.keys():
            monkeypatch.setattr(sys.modules[name], "in_new_process", lambda function, *arguments: function(*arguments))
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(HERTransform, "compile", lambda her: None)  # takes a minute
        monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
        command.main()
        return capsys.readouterr().out

    return run
