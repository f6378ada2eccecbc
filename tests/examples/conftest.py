"""The scripts import each other by name, as they do when Python runs one of them."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
# Doctests would import a second module `conftest`; without the extra 'examples' only the environment can be tested.
collect_ignore_glob = ["conftest.py"]
if not (find_spec("hydra") and find_spec("tensorboard")):
    collect_ignore_glob += ["script_runs.py", "test_[!b]*.py"]


@pytest.fixture
def run_script(monkeypatch, capsys, tmp_path):
    """Runs a script in ``tmp_path`` and returns what it prints; in this process, where all is imported already."""
    monkeypatch.chdir(tmp_path)

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        try:
            runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        except SystemExit as error:
            if error.code:
                raise
        return capsys.readouterr().out

    return run
