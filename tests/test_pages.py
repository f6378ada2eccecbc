"""Every Python block of the pages in docs/ is run by a test."""

from pathlib import Path

from support.pages import DOCS, python_blocks

TESTS = Path(__file__).parent


def test_no_page_has_a_block_that_no_test_runs():
    tests = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    pages = [str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")]
    blocks = [(page, number) for page in pages for number in range(len(python_blocks(page)))]
    assert len(blocks) > 10
    for page, number in blocks:
        if not page.startswith("how-to/from-"):  # test_migration.py runs both blocks of these pages
            ways = (f'run_block("{page}", {number}, ', f'python_blocks("{page}")[{number}]')
            assert any(way in tests for way in ways), f"no test runs block {number} of {page}"
