import pytest
import torch
from torchrl import torchrl_logger

torchrl_logger.setLevel("WARNING")  # it tells of each storage that TorchRL allocates


@pytest.fixture(autouse=True)
def one_thread():
    """Two workers run tests at a time, on two cores; some that start processes set another number."""
    torch.set_num_threads(1)
