"""Finds loaded episodes that no write continues."""

from __future__ import annotations

from tensordict import TensorDictBase

from torchrl_her._private import warn_user
from torchrl_her.checks.check import Check
from torchrl_her.episodes.lanes import Tracked
from torchrl_her.episodes.write import Write


class LoadedEpisodesCheck(Check):
    """Warns if the first write after loading continues none of the loaded running episodes."""

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:  # noqa: D102
        if tracked.loaded and not tracked.continued:
            warn_user(
                f"The loaded buffer has {tracked.loaded} running episode(s), and the first write after loading "
                "continues none of them. If the environments were reset, call flush() after loading: it ends these "
                "episodes, so that their transitions are relabelled."
            )
