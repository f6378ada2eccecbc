"""The description of the package on an index: the README, with links and pictures that work outside the repository.

``REPOSITORY=https://github.com/OWNER/torchrl_her make dist`` makes links and pictures absolute. Without it, links to
files become plain text and pictures are left out, so that no link is broken.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def describe(readme: str, repository: str | None) -> str:
    """Return the README with absolute links, or without relative ones."""

    def replace(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if repository:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/main/{path})"
        return "" if picture else text

    return re.sub(r"\n{3,}", "\n\n", LINK.sub(replace, readme))


class DescriptionHook(MetadataHookInterface):
    """Sets the description, and the link to the repository."""

    def update(self, metadata: dict[str, Any]) -> None:  # noqa: D102
        repository = os.environ.get("REPOSITORY", "").rstrip("/") or None
        text = describe((Path(self.root) / "README.md").read_text(), repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if repository:
            metadata["urls"] = {"Repository": repository, "Changelog": f"{repository}/blob/main/CHANGELOG.md"}
