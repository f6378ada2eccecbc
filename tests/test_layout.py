"""The layout of the package: which module imports which, and where private attributes of other libraries are used."""

import ast
import re
from pathlib import Path

import pytest

import torchrl_her

ROOT = Path(torchrl_her.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
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
APART = {"episodes", "goals", "rewards"}  # folders that never import each other
# Names with an underscore that are public API: methods of NamedTuple and extension points of transforms.
PUBLIC = {"_replace", "_asdict", "_fields", "_inv_call"}


def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchrl_her"):
            found.add(node.module.removeprefix("torchrl_her").removeprefix("."))
        if isinstance(node, ast.Import):
            found.update(a.name.removeprefix("torchrl_her.") for a in node.names if a.name.startswith("torchrl_her."))
    return found


def tier_of(module: str) -> int:
    folder = module.split(".")[0]
    return next(number for number, tier in enumerate(TIERS) if folder in tier)


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("envs.")])
def test_a_module_imports_only_modules_of_earlier_tiers(module):
    folder = module.split(".")[0]
    for imported in imports_of(MODULES[module]):
        other = imported.split(".")[0]
        assert tier_of(imported) <= tier_of(module), f"{module} imports {imported}"
        assert not (folder in APART and other in APART and folder != other), f"{module} imports {imported}"
    if folder == "storage":
        assert {name.split(".")[0] for name in imports_of(MODULES[module])} <= {"storage", "_torchrl"}


def test_environments_import_nothing_of_the_package():
    for name, path in MODULES.items():
        if name.startswith("envs."):
            assert all(imported.startswith("envs") for imported in imports_of(path))


def test_no_module_imports_itself_in_a_circle():
    graph = {name: imports_of(path) for name, path in MODULES.items()}

    def check(module, above):
        assert module not in above, " imports ".join([*above, module])
        for imported in graph.get(module, ()):
            check(imported, (*above, module))

    for module in graph:
        check(module, ())


def test_private_attributes_of_other_libraries_are_used_in_one_module():
    """A private attribute belongs to the package if the package assigns, annotates or defines it."""
    own, used = set(PUBLIC), {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name != "_torchrl":
                own.add(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            names |= {t.attr for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name)}
            if name != "_torchrl":
                own |= names
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and name != "_torchrl":
                used.setdefault(node.attr, name)
    assert not {name: module for name, module in used.items() if name not in own}
    text = "".join(path.read_text() for name, path in MODULES.items() if name != "_torchrl")
    assert not re.search(r"_getframe|__dict__|object\.__setattr__", text)
