"""Reads Minari data sets and OGBench files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from minari import MinariDataset

REQUIRED = ("observations", "actions", "terminals")  # the arrays of an OGBench file


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


def load_ogbench(path: str | os.PathLike[str]) -> TensorDict:
    """Read an ``.npz`` file of OGBench ([Park et al. 2024](https://arxiv.org/abs/2410.20092)) as transitions.

    For each trajectory, the file has one more state than transitions. ``terminals`` is 1 at the last state, and the
    action of that state is dropped. The transitions have neither rewards nor desired goals. To sample them with
    hindsight, pass them to `HERTransform.adopt` of a transform with ``keys=HERKeys(achieved_goal="observation")`` and
    ``her_ratio=1``.

    Args:
        path (str | PathLike): the file, such as ``antmaze-medium-navigate-v0.npz``.

    Returns:
        TensorDict: transitions ``[N]`` in the dtypes of the file: ``"observation"``, ``"action"``,
            ``("next", "observation")``, and ``("next", "done")``, ``("next", "terminated")`` and
            ``("next", "truncated")``, ``bool [N, 1]``. The last transition of each trajectory is truncated, and none is
            terminated. Other arrays with one row per state, such as ``qpos`` and ``qvel``, keep their names and contain
            the values of the state in which the transition starts.

    Raises:
        KeyError: if an array is missing.
        TypeError: if an array with one row per state contains no numbers.
        ValueError: if the file is not an ``.npz`` file, an array cannot be read, arrays differ in length, the last
            state is not terminal, or the file contains no transition.

    Examples:
        A file with two trajectories of three and two states:

        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from torchrl_her import load_ogbench
        >>> path = Path(tempfile.mkdtemp()) / "maze-v0.npz"
        >>> states, actions = np.arange(10.0).reshape(5, 2), np.zeros((5, 1))
        >>> np.savez(path, observations=states, actions=actions, terminals=np.array([0, 0, 1, 0, 1]))
        >>> data = load_ogbench(path)
        >>> data["next", "observation"].tolist()
        [[2.0, 3.0], [4.0, 5.0], [8.0, 9.0]]
        >>> data["next", "truncated"].flatten().tolist()
        [False, True, True]
    """
    if not str(path).endswith(".npz"):
        raise ValueError(f"load_ogbench reads .npz files, got {str(path)!r}: pass the path of an OGBench data set.")
    with np.load(path) as file:
        arrays = {name: _read(path, file, name) for name in file.files}
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise KeyError(
            f"{path} has no array {missing[0]!r}, which OGBench files contain; present: {', '.join(arrays)}. Pass an "
            "OGBench file, or name its arrays accordingly."
        )
    for name, array in arrays.items():
        if array.shape[:1] == arrays["terminals"].shape and array.dtype.kind not in "biufc":
            raise TypeError(
                f"The array {name!r} of {path} has the dtype {array.dtype}, which tensors cannot have: convert it to "
                "numbers, or leave it out of the file."
            )
    terminal = arrays.pop("terminals").astype(bool)
    _check_states(path, arrays, terminal)

    begins = ~terminal  # the states in which transitions start
    observations, actions = arrays.pop("observations"), arrays.pop("actions")
    last = torch.from_numpy(terminal[1:][begins[:-1]]).unsqueeze(1)  # [N, 1], whether the next state is the last one
    entries = {
        "observation": torch.from_numpy(observations[begins]),
        "action": torch.from_numpy(actions[begins]),
        "next": {
            "observation": torch.from_numpy(observations[1:][begins[:-1]]),
            "done": last,
            "terminated": torch.zeros_like(last),
            "truncated": last.clone(),
        },
    }
    others = {name: each for name, each in arrays.items() if each.shape[:1] == terminal.shape and name not in entries}
    entries |= {name: torch.from_numpy(each[begins]) for name, each in others.items()}
    return TensorDict(entries, batch_size=len(last))


def _read(path: str | os.PathLike[str], file: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        return file[name]
    except ValueError as error:  # Python objects, or a damaged file
        raise ValueError(
            f"The array {name!r} of {path} cannot be read ({error}): download the file again, or leave the array out."
        ) from error


def _check_states(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], terminal: np.ndarray) -> None:
    """Check the arrays of a file, and its terminals, ``bool [states]``."""
    lengths = {name: len(arrays[name]) if arrays[name].ndim else 0 for name in ("observations", "actions")}
    if terminal.ndim != 1 or set(lengths.values()) != {len(terminal)}:
        raise ValueError(
            f"The arrays of {path} must have one row per state, but their lengths differ: {lengths}, and 'terminals' "
            f"has shape {terminal.shape}. Download or convert the file again."
        )
    if not len(terminal) or not terminal[-1]:
        raise ValueError(
            f"The last state in {path} is not terminal: 'terminals' must be 1 at the last state of each trajectory. "
            "The file may be incomplete."
        )
    if terminal.all():
        raise ValueError(f"Every state in {path} is terminal, so it has no transitions: check the array 'terminals'.")
