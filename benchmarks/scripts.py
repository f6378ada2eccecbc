"""Imports the training scripts in ``examples/`` and their settings."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra import compose, initialize_config_dir

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))  # the scripts import their modules by name


def load(name: str, overrides: list[str]) -> tuple[ModuleType, Any]:
    """Import a script, and return it with its settings."""
    script = importlib.import_module(name)  # registers its configuration
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        return script, importlib.import_module("training.command").check(compose(name, overrides))
