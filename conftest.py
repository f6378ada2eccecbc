import numpy as np
import pytest
import torch
from torchrl import torchrl_logger

torchrl_logger.setLevel("WARNING")  # it tells of each storage that TorchRL allocates


@pytest.fixture(autouse=True)
def one_thread():
    """Two workers run tests at a time, on two cores; some that start processes set another number."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_same_draws():
    """A test draws the same whichever ran before it in its worker."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (prioritized sampling draws from it)


@pytest.fixture(autouse=True)
def time_to_play(monkeypatch):
    """What check_goal_env finds must not depend on how busy the machine is."""
    monkeypatch.setattr("torchrl_her.diagnosis.goal_env.play.SECONDS", 600.0)


def pytest_collection_modifyitems(items):
    """An example has what it imports, and no name of the module that it stands in: so it runs where it is pasted."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.dtest.globs = {"__name__": "__main__"}


def pytest_terminal_summary(terminalreporter, config):
    """Mention the tests that a default run leaves out."""
    if config.option.markexpr == "not slow":
        terminalreporter.write_line("Slow tests are left out (trainings, killed processes, Ray): make test-slow")
