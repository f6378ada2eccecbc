"""Runs the Python blocks of the documentation. Blocks with prompts are doctests."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: str) -> list[str]:
    """Return the Python blocks of a page, such as ``how-to/ray``."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


def run_block(page: str, number: int, names: dict[str, Any]) -> None:
    """Run a block with the names of the reader's script, to which it adds its own."""
    names.setdefault("__name__", "__main__")
    exec(compile(python_blocks(page)[number], f"{page}, block {number}", "exec"), names)
