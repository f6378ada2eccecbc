"""Reads Minari's data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from minari import MinariDataset


def load_minari(dataset: MinariDataset) -> TensorDict:
    """Read a data set of Minari as transitions.

    In place of TorchRL's ``MinariExperienceReplay``, which returns zeros in version 0.14.1. The entries have the same
    keys, and infos are left out.

    Args:
        dataset (minari.MinariDataset): what ``minari.load_dataset(...)`` returns.

    Returns:
        TensorDict: transitions ``[N]``, one episode after the other, in the dtypes of the data set: ``"observation"``
        and ``("next", "observation")``, nested if observations are dictionaries, ``"action"``, ``"episode"``, ``int64
        [N]``, ``("next", "reward")``, ``[N, 1]``, and ``("next", "done")``, ``("next", "terminated")`` and ``("next",
        "truncated")``, ``bool [N, 1]``.

    Raises:
        TypeError: if it is given something else, such as a name.
        ValueError: if the data set has no transitions.
    """
    if not hasattr(dataset, "iterate_episodes"):
        raise TypeError(f"load_minari takes a data set, minari.load_dataset(name), and got {dataset!r}.")
    episodes = [_transitions_of(episode) for episode in dataset.iterate_episodes() if len(episode)]
    if not episodes:
        raise ValueError("The Minari data set has no transitions.")
    return torch.cat(episodes)


def _transitions_of(episode: Any) -> TensorDict:
    """Return the transitions ``[steps]`` of a ``minari.EpisodeData``."""
    steps = len(episode)
    terminated, truncated = (
        torch.from_numpy(np.array(flags, bool)).unsqueeze(1) for flags in (episode.terminations, episode.truncations)
    )
    entries = {
        "observation": _cut(episode.observations, slice(0, steps)),
        "action": _cut(episode.actions, slice(0, steps)),
        "episode": torch.full((steps,), episode.id),
        "next": {
            "observation": _cut(episode.observations, slice(1, steps + 1)),
            "reward": torch.from_numpy(np.array(episode.rewards)).unsqueeze(1),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        },
    }
    return TensorDict(entries, batch_size=steps)


def _cut(values: Any, rows: slice) -> Any:
    """Return rows of an array, or of each array in nested dictionaries, as tensors."""
    if isinstance(values, Mapping):
        return {key: _cut(value, rows) for key, value in values.items()}
    return torch.from_numpy(np.ascontiguousarray(values[rows]))
