"""The pictures of the documentation: `docs/figures.py` draws those of results, and no page loads a large one."""

import importlib.util
import re

import pytest

from support.pages import DOCS

TEXTS = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "examples" / "README.md"]
PICTURES = sorted(path.name for path in (DOCS / "images").iterdir())

spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
spec.loader.exec_module(figures := importlib.util.module_from_spec(spec))
OTHERS = {"data_flow.svg", "goal_names.png", "running_episodes.png", "goal_distributions.png", "tutorials"}


@pytest.mark.parametrize("name", sorted(figures.FIGURES.keys() - OTHERS))
def test_a_figure_of_results_is_drawn_from_their_files(name, tmp_path):
    figures.FIGURES[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_used_and_small(name):
    assert any(re.search(rf"images/{re.escape(name)}\b", path.read_text()) for path in TEXTS)
    assert (DOCS / "images" / name).stat().st_size <= 200_000
