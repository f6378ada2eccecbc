"""The layout of the package: imports, base classes, and private attributes of other libraries."""

import ast
import contextlib
import functools
import importlib
import inspect
import re
import runpy
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import tensordict
import torchrl
from torchrl.envs import Transform

import torchrl_her
from torchrl_her import HERTransform, _private

ROOT = Path(torchrl_her.__file__).parent
PATHS = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]
MODULES = {  # a folder has the name of its __init__.py
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
    for path in PATHS
}
CLASSES = {
    getattr(importlib.import_module(f"torchrl_her.{module}"), node.name): node
    for module, tree in MODULES.items()
    for node in tree.body
    if isinstance(node, ast.ClassDef)
}
# A module imports only modules of earlier tiers and of its own tier, including imports for type checking.
TIERS = [
    {"keys", "_private"},
    {"packed_storage"},
    {"goals"},
    {"episodes"},
    {"rewards"},
    {"checks"},
    {"relabel", "order", "compact", "movement", "normalize"},
    {"offline"},
    {"transform", "augmentation"},
    {"goal_selectors", "goal_selection"},
    {"goal_env_check", "envs", "checkpoints", "__main__"},
    {"configs"},
]
ALONE = {  # the only modules and folders that these import
    "envs": {"envs"},
    "packed_storage": {"packed_storage", "_private"},
    "goal_env_check": {"goal_env_check", "rewards", "keys", "_private"},  # HERKeys is an argument of check_goal_env
}
# Names with an underscore that are public API: methods of NamedTuple and extension points of transforms.
PUBLIC = {"_replace", "_asdict", "_fields", "_call", "_inv_call", "_reset", "_step"}
PRIVATE = re.compile(r"_[a-z]")


def names_imported_by(module: str) -> set[str]:
    """Return the full names of the modules and objects that a module imports."""
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            found.update(f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
    return found


@functools.cache
def imports_of(module: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    names = (name for name in names_imported_by(module) if name.split(".")[0] == "torchrl_her")
    paths = (name.removeprefix("torchrl_her").removeprefix(".") for name in names)
    return {path if path in MODULES else path.rpartition(".")[0] for path in paths}


def test_a_module_imports_only_modules_of_earlier_tiers():
    tier_of = {folder: number for number, tier in enumerate(TIERS) for folder in tier}
    for module in MODULES:
        folder = module.split(".")[0]
        for imported in imports_of(module):
            other = imported.split(".")[0]
            allowed = other in tier_of and other in ALONE.get(folder, tier_of)
            assert allowed, f"{module} imports {imported or 'the package itself'}"
            assert tier_of[other] <= tier_of[folder], f"{module} imports {imported}"


def test_only_the_configs_import_hydra():
    importers = {
        module
        for module in MODULES
        for name in names_imported_by(module)
        if name.split(".")[0] in ("hydra", "omegaconf")
    }
    assert importers == {"configs"}


def test_no_module_imports_itself_in_a_circle():
    graph = TopologicalSorter({module: imports_of(module) for module in MODULES})
    graph.prepare()  # raises a CycleError


def test_no_class_has_exactly_one_subclass_in_the_package():
    subclasses = Counter(base for each in CLASSES for base in each.__bases__ if base in CLASSES)
    assert not [base.__name__ for base, number in subclasses.items() if number == 1]


def test_the_only_base_class_of_hertransform_is_transform():
    assert HERTransform.__bases__ == (Transform,)


def test_private_attributes_of_other_libraries_are_used_in_one_module():
    """A private attribute belongs to the package if the package assigns, annotates or defines it."""
    own, used = set(PUBLIC), {}
    for name, tree in MODULES.items():
        for node in ast.walk(tree) if name != "_private" else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            own |= {t.id for t in targets if isinstance(t, ast.Name)}
            own |= {t.attr for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name)}
            if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
                used.setdefault(node.attr, name)
            assert getattr(node, "attr", "") not in ("_getframe", "__dict__")
            assert not isinstance(node, ast.Attribute) or ast.unparse(node) != "object.__setattr__"
    assert not {name: module for name, module in used.items() if name not in own}


def test_private_names_of_other_libraries_are_imported_in_one_module():
    for module in MODULES:
        parts = {part for name in names_imported_by(module) for part in name.split(".")}
        assert module == "_private" or not {part for part in parts if PRIVATE.match(part)} - {"_private"}, module


def test_no_class_overrides_a_private_method_or_attribute_of_another_library():
    for each, node in CLASSES.items():
        own = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
        for inner in ast.walk(node):
            if isinstance(getattr(inner, "ctx", None), ast.Store):  # in the body of the class, or on self
                own.add(inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", ""))
        assert not own & (private_names_of_other_bases(each) - PUBLIC), each


def private_names_of_other_bases(cls: type) -> set[str]:
    """Return the private methods and attributes of the base classes that other libraries define."""
    names = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "torchrl_her":
            names |= {name for name in vars(base) if PRIVATE.match(name)}
            with contextlib.suppress(OSError, TypeError):  # a class without source code, such as object
                names |= set(re.findall(r"\bself\.(_[a-z]\w*)", inspect.getsource(base)))
    return names


@pytest.mark.parametrize("package", [torchrl, tensordict])
def test_old_versions_are_refused_on_import_and_newer_ones_are_not(package, monkeypatch):
    for version in ("0.9.2", "0.13.3", "0.13.0+g1234567"):
        monkeypatch.setattr(package, "__version__", version)
        with pytest.raises(ImportError, match=rf"needs {package.__name__} 0\.14 or newer, but {re.escape(version)} is"):
            runpy.run_path(_private.__file__)
    for version in ("0.14.0", "0.14.0a0+g1234567", "0.15.3", "1.0.0", "2026.10.27", None):
        monkeypatch.setattr(package, "__version__", version)
        runpy.run_path(_private.__file__)
