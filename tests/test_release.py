"""The description of the package on an index has no link that works only in the repository."""

import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def describe():
    """The function of the build hook, without its base class, which only the build environment has."""
    names = ["hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"]
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].MetadataHookInterface = object
    with patch.dict(sys.modules, modules), patch.object(sys, "path", [str(ROOT), *sys.path]):
        from hatch_build import describe

        yield describe


def test_relative_links_become_absolute(describe):
    readme = "![A picture](docs/images/a.png) and [a page](docs/a.md#b), [paper](https://arxiv.org/abs/1707.01495)"
    assert describe(readme, "https://example.org/her") == (
        "![A picture](https://example.org/her/raw/main/docs/images/a.png) and "
        "[a page](https://example.org/her/blob/main/docs/a.md#b), [paper](https://arxiv.org/abs/1707.01495)"
    )


def test_without_a_repository_links_become_text_and_pictures_are_left_out(describe):
    readme = "Before.\n\n![A picture](docs/images/a.png)\n\nSee [a page](docs/a.md)."
    assert describe(readme, None) == "Before.\n\nSee a page."


def test_every_file_that_the_readme_links_to_exists():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
