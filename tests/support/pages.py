"""Runs the ``py`` blocks of the pages in docs/. `test_pages.py` runs their ``python`` blocks."""

import re
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: str) -> list[str]:
    """Return the ``py`` blocks of a page, such as ``how-to/ray``."""
    text = (DOCS / f"{page}.md").read_text()
    return [textwrap.dedent(block) for block in re.findall(r"^ *```py\n(.*?)^ *```", text, re.M | re.S)]


def changed(code: str, changes: dict[str, str]) -> str:
    """Return the code after some changes, each of which must apply."""
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    return code


def run_block(page: str, number: int, names: dict[str, Any], changes: dict[str, str] | None = None) -> None:
    """Run a block with the names of the reader's script, to which it adds its own, after some ``changes``."""
    names.setdefault("__name__", "__main__")
    code = changed(python_blocks(page)[number], changes or {})
    exec(compile(code, f"{page}, block {number}", "exec"), names)
