"""Reads OGBench files."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict

REQUIRED = ("observations", "actions", "terminals")


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
    _check(path, arrays, terminal)

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


def _check(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], terminal: np.ndarray) -> None:
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
