import torch
from torchrl import torchrl_logger

torchrl_logger.setLevel("WARNING")  # it tells of each storage that TorchRL allocates
torch.set_num_threads(1)
