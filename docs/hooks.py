"""A hook of MkDocs: install commands contain the address of the repository that builds the site."""

from typing import Any

ADDRESS = "https://github.com/OWNER/torchrl_her"


def on_page_markdown(markdown: str, config: Any, **kwargs: Any) -> str:
    """Replace the address, if `repo_url` is set."""
    return markdown.replace(ADDRESS, config.repo_url) if config.repo_url else markdown
