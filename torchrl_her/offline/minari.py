"""Reads Minari data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from minari import MinariDataset


def load_minari(dataset: MinariDataset) -> TensorDict:
    """Read a Minari data set as transitions, ready for `HERTransform.adopt`.

    Use it instead of TorchRL's ``MinariExperienceReplay``, which returns zeros in version 0.14.1. The keys are the
    same, and infos are dropped. For a goal environment, pass these keys to `HERTransform`:
    ``keys=HERKeys(("observation", "achieved_goal"), ("observation", "desired_goal"), trajectory="episode")``.

    Args:
        dataset (minari.MinariDataset): the data set, as returned by ``minari.load_dataset(...)``.

    Returns:
        TensorDict: transitions ``[N]``, episode after episode, in the dtypes of the data set: ``"observation"`` and
            ``("next", "observation")``, nested if observations are dictionaries; ``"action"``; ``"episode"``, ``int64
            [N]``; ``("next", "reward")``, ``[N, 1]``; ``("next", "done")``, ``("next", "terminated")`` and ``("next",
            "truncated")``, ``bool [N, 1]``.

    Raises:
        TypeError: if ``dataset`` is not a data set, for example a name.
        ValueError: if the data set has no transitions.

    Examples:
        A data set with one episode of two steps:

        >>> import os
        >>> import tempfile
        >>> os.environ["MINARI_DATASETS_PATH"] = tempfile.mkdtemp()
        >>> import minari
        >>> import numpy as np
        >>> from gymnasium.spaces import Box
        >>> from minari.data_collector import EpisodeBuffer
        >>> from torchrl_her import load_minari
        >>> episode = EpisodeBuffer(
        ...     observations=np.arange(6.0).reshape(3, 2),
        ...     actions=np.zeros((2, 1)),
        ...     rewards=[-1.0, 0.0],
        ...     terminations=[False, False],
        ...     truncations=[False, True],
        ... )
        >>> spaces = {"observation_space": Box(-9, 9, (2,), np.float64), "action_space": Box(-1, 1, (1,), np.float64)}
        >>> dataset = minari.create_dataset_from_buffers("example/walk-v0", buffer=[episode], **spaces)
        >>> data = load_minari(dataset)
        >>> data["next", "observation"].tolist()
        [[2.0, 3.0], [4.0, 5.0]]
        >>> data["next", "truncated"].flatten().tolist()
        [False, True]
    """
    if not hasattr(dataset, "iterate_episodes"):
        raise TypeError(f"load_minari needs a Minari data set, got {dataset!r}: pass minari.load_dataset(name).")
    episodes = [_transitions_of(episode) for episode in dataset.iterate_episodes() if len(episode)]
    if not episodes:
        raise ValueError("The Minari data set has no transitions: all of its episodes are empty, or it has none.")
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
