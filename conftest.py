import numpy as np
import pytest
import torch
from torchrl import torchrl_logger

torchrl_logger.setLevel("WARNING")  # it logs every storage that TorchRL allocates
WITH_WARNINGS = ("torchrl_her.offline.load.load_minari",)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, because two workers run tests at a time. Tests that start processes can change the number."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_same_draws():
    """Seed the generators, so that a test does not depend on earlier tests of its worker."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (prioritized sampling draws from it)


@pytest.fixture(autouse=True)
def time_to_play(monkeypatch):
    """Give check_goal_env enough time, so that its findings do not depend on the load of the machine."""
    monkeypatch.setattr("torchrl_her.goal_env_check.probe.SECONDS", 600.0)


def pytest_collection_modifyitems(items):
    """Hide the names of a module from its doctests, so that examples also run where users paste them.

    Skip tests that need a CUDA device if there is none. Ignore a warning that some versions of Python issue when locks
    of earlier tests are garbage collected, and the warnings that examples show or that another library gives for their
    data.
    """
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:ResourceTracker called reentrantly"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        if isinstance(item, pytest.DoctestItem):
            item.dtest.globs = {"__name__": "__main__"}
            if item.name in WITH_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))


def pytest_terminal_summary(terminalreporter, config):
    """Mention the tests that a default run leaves out."""
    if config.option.markexpr.startswith("not slow"):
        terminalreporter.write_line(
            "Slow tests were skipped (training, killed processes, Ray): run them with make test-slow"
        )
