"""Convert the tutorials to notebooks.

    python docs/notebooks.py [FOLDER]    # into site/notebooks/

A ``python`` block becomes a cell. The output that a page shows is left out, because the cell prints it. Links lead to
the repository.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path, PurePosixPath

import jupytext
import nbformat

DOCS = Path(__file__).parent
TUTORIALS = sorted(path for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index")
REPOSITORY = re.search(r'^Repository = "(.*)"', (DOCS.parent / "pyproject.toml").read_text(), flags=re.M)[1]


def without_output(block: re.Match[str]) -> str:
    """Return a block without its ``#>`` comments, and without the text after ``print(...)``."""
    code = re.sub(r"^ *#>.*\n", "", block[0], flags=re.M)
    return re.sub(r'^"""\n.*?^"""\n', "", code, flags=re.M | re.S)


def absolute(link: re.Match[str], page: Path) -> str:
    """Return a link to a file of the repository."""
    path = PurePosixPath((page.parent / link[2]).resolve().relative_to(DOCS.parent))
    return f"{link[1]}({REPOSITORY}/{'raw' if link[1].startswith('!') else 'blob'}/main/{path}{link[3] or ''})"


def convert(page: Path) -> nbformat.NotebookNode:
    """Return the notebook of a page."""
    text = re.sub(r"^```python\n.*?^```", without_output, page.read_text(), flags=re.M | re.S)
    text = re.sub(r"(!?\[[^\]]*\])\((?!https?:|#)([^)#]+)(#[^)]*)?\)", lambda link: absolute(link, page), text)
    notebook = jupytext.reads(text, fmt="md")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.validate(notebook)
    return notebook


def main() -> None:
    """Write all notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("site/notebooks"), help="(default: site/notebooks)"
    )
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for page in TUTORIALS:
        nbformat.write(convert(page), folder / f"{page.stem}.ipynb")
        print(f"Wrote {folder / page.stem}.ipynb.")


if __name__ == "__main__":
    main()
