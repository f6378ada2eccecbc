"""Makes the benchmarks and the example scripts importable by name, as when Python runs one of them."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "examples")]
# Doctests would import a second module `conftest`. The other tests need the extra 'examples'.
collect_ignore_glob = ["conftest.py" if find_spec("hydra") and find_spec("tensorboard") else "*.py"]
