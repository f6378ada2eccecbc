"""TorchRL's groups of Hydra, for some tests alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore

_REGISTERED: dict[str, Any] = {}  # the groups of Hydra with those of TorchRL


def torchrl_groups() -> Iterator[None]:
    """A fixture that registers TorchRL's configs: in other scripts, settings have the names of these groups."""
    repo = ConfigStore.instance().repo
    before = {*repo, "hydra"}
    import torchrl.trainers.algorithms.configs  # noqa: F401

    repo.update(_REGISTERED)
    _REGISTERED.update(repo)
    yield
    for group in {*repo} - before:
        del repo[group]
