"""The pictures of the documentation: `docs/figures.py` draws those of results, and no page loads a large one."""

import importlib.util
import re

import pytest

from support.pages import DOCS

TEXTS = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "examples" / "README.md"]
PICTURES = sorted(path.name for path in (DOCS / "images").iterdir())

RESULTS = (
    "fetch",
    "pick_and_place",
    "strategies",
    "movement",
    "both_ways",
    "bit_flipping_50",
    "offline_results",
    "contrastive",
    "learning",
    "point_maze",
    "sampling",
    "memory",
)


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.parametrize("name", RESULTS)
def test_a_figure_of_results_is_drawn_from_their_files(name, figures, tmp_path):
    figures.FIGURES[f"{name}.png"](tmp_path / f"{name}.png")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_used_and_small(name):
    assert any(re.search(rf"images/{re.escape(name)}\b", path.read_text()) for path in TEXTS)
    assert (DOCS / "images" / name).stat().st_size <= 200_000
