"""The benchmarks import each other and the example scripts by name, as they do when Python runs one of them."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "examples")]
# Doctests would import a second module `conftest`; without the extra 'examples' there is nothing to test.
collect_ignore_glob = ["conftest.py" if find_spec("hydra") and find_spec("tensorboard") else "*.py"]
