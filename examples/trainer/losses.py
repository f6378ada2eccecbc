"""The loss of ``../ddpg.py``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from ddpg import make_loss  # noqa: F401
