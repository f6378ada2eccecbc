import logging

import torch

# TorchRL tells of each storage that it allocates.
logging.getLogger("torchrl").setLevel(logging.WARNING)
torch.set_num_threads(1)
