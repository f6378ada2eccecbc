"""Each tutorial becomes a notebook with the code of the page, which `test_pages.py` runs."""

import importlib.util
import re

import pytest
from pytest_examples import find_examples

from support.pages import DOCS

spec = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
spec.loader.exec_module(notebooks := importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("page", notebooks.TUTORIALS, ids=lambda page: page.stem)
def test_a_notebook_has_the_code_of_its_page_without_the_output(page):
    notebook = notebooks.convert(page)
    cells = [cell.source.strip() for cell in notebook.cells if cell.cell_type == "code"]
    cells = [cell for cell in cells if not cell.startswith("%%bash")]
    blocks = [example.source for example in find_examples(page) if example.prefix == "python"]
    assert len(cells) == len(blocks) > 5
    for cell, block in zip(cells, blocks, strict=True):
        assert "#>" not in cell
        assert cell == re.sub(r" *#>.*\n", "", block).strip()
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    for link in links:
        _, _, path = link.partition("/main/")
        assert (DOCS.parent / path.partition("#")[0]).exists()
