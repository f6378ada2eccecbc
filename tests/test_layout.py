"""The layout of the package: which module imports which, and where private attributes of other libraries are used."""

import ast
import functools
import re
import runpy
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import tensordict
import torchrl

import torchrl_her
from torchrl_her import _torchrl

ROOT = Path(torchrl_her.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}
# A module imports only modules of earlier tiers and of its own tier, including imports for type checking.
TIERS = [
    {"keys", "_torchrl"},
    {"storage"},
    {"episodes", "goals", "rewards"},
    {"diagnosis"},
    {"relabel"},
    {"n_step", "neighbours", "compact"},
    {"offline"},
    {"stamping"},
    {"transform", "augmentation", "__main__", "envs"},
]
APART = {"episodes", "goals", "rewards"}  # folders that never import each other, except for goals.table
ALONE = {"envs": {"envs"}, "storage": {"storage", "_torchrl"}}  # the only folders that these import
# Names with an underscore that are public API: methods of NamedTuple and extension points of transforms.
PUBLIC = {"_replace", "_asdict", "_fields", "_inv_call"}


@functools.cache
def imports_of(module: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchrl_her"):
            found.add(node.module.removeprefix("torchrl_her").removeprefix("."))
        if isinstance(node, ast.Import):
            found.update(a.name.removeprefix("torchrl_her.") for a in node.names if a.name.startswith("torchrl_her."))
    return found


def test_a_module_imports_only_modules_of_earlier_tiers():
    tier_of = {folder: number for number, tier in enumerate(TIERS) for folder in tier}
    for module in MODULES:
        folder = module.split(".")[0]
        for imported in imports_of(module):
            other = imported.split(".")[0]
            is_apart = folder != other and {folder, other} <= APART and imported != "goals.table"
            allowed = other in ALONE.get(folder, tier_of) and not is_apart
            allowed &= tier_of[other] <= tier_of[folder]
            assert allowed, f"{module} imports {imported}"


def test_no_module_imports_itself_in_a_circle():
    graph = TopologicalSorter({module: imports_of(module) for module in MODULES})
    graph.prepare()  # raises a CycleError


def test_private_attributes_of_other_libraries_are_used_in_one_module():
    """A private attribute belongs to the package if the package assigns, annotates or defines it."""
    own, used = set(PUBLIC), {}
    for name, tree in MODULES.items():
        for node in ast.walk(tree) if name != "_torchrl" else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            own |= {t.id for t in targets if isinstance(t, ast.Name)}
            own |= {t.attr for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name)}
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                used.setdefault(node.attr, name)
            assert getattr(node, "attr", "") not in ("_getframe", "__dict__")
            assert not isinstance(node, ast.Attribute) or ast.unparse(node) != "object.__setattr__"
    assert not {name: module for name, module in used.items() if name not in own}


@pytest.mark.parametrize("package", [torchrl, tensordict])
def test_old_versions_are_refused_on_import_and_newer_ones_are_not(package, monkeypatch):
    for version in ("0.9.2", "0.13.3", "0.13.0+g1234567"):
        monkeypatch.setattr(package, "__version__", version)
        with pytest.raises(ImportError, match=rf"needs {package.__name__} 0\.14 or newer, but {re.escape(version)} is"):
            runpy.run_path(_torchrl.__file__)
    for version in ("0.14.0", "0.14.0a0+g1234567", "0.15.3", "1.0.0", "2026.10.27", None):
        monkeypatch.setattr(package, "__version__", version)
        runpy.run_path(_torchrl.__file__)
