"""Copies of the package with lines changed, to show that an oracle finds the fault."""

from __future__ import annotations

import importlib
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import torchrl_her

SOURCE = Path(torchrl_her.__file__).parent
Changes = Sequence[tuple[str, str, str]]  # file, what it has once, what it gets instead


def load(changes: Changes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Import a copy of the package with changes made in it, under a name of its own."""
    name = "".join(character if character.isalnum() else "_" for character in name)
    shutil.copytree(SOURCE, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "envs"))
    for file, old, new in changes:
        path = tmp_path / name / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times: renew the mutant"
        path.write_text(text.replace(old, new))
    for path in (tmp_path / name).rglob("*.py"):
        path.write_text(path.read_text().replace("torchrl_her", name))
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module(name)
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    return package


def first_failure(
    check: Callable[[Any], Any], package: Any, faults: tuple[type[Exception], ...] = (AssertionError,)
) -> Exception | None:
    """Run a check of a package until it finds a fault, and return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a table too small for the storage is meant here
        try:
            check(package)
        except faults as fault:
            return fault
    return None
