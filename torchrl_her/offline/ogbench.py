"""Reads the files of OGBench."""

from __future__ import annotations

import os

import numpy as np
import torch
from tensordict import TensorDict

REQUIRED = ("observations", "actions", "terminals")


def load_ogbench(path: str | os.PathLike[str]) -> TensorDict:
    """Read an ``.npz`` file of OGBench (Park et al. 2025, arXiv:2410.20092) as transitions.

    The file has one state more than transitions for each trajectory: ``terminals`` is 1 at the last state, whose action
    leads nowhere and is left out. The transitions have no rewards and no desired goals: see `HERTransform.adopt`, with
    ``achieved_goal_key="observation"`` and ``her_ratio=1``.

    Args:
        path (str or PathLike): the file, such as ``antmaze-medium-navigate-v0.npz``.

    Returns:
        TensorDict: transitions ``[N]`` in the dtypes of the file: ``"observation"``, ``"action"``,
        ``("next", "observation")``, and ``("next", "done")``, ``("next", "terminated")`` and ``("next", "truncated")``,
        ``bool [N, 1]``. The last transition of a trajectory is truncated, and none is terminated. Further arrays of the
        file with one row per state, such as ``qpos`` and ``qvel``, keep their names and have the values of the state in
        which the transition begins.

    Raises:
        KeyError: if an array is missing.
        ValueError: if the file is no ``.npz`` file, arrays differ in length, the last state is not terminal, or there
            is no transition.
    """
    if not str(path).endswith(".npz"):
        raise ValueError(f"OGBench's files are .npz files, got {str(path)!r}.")
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise KeyError(f"{path} has no array {missing[0]!r}, as OGBench's files have; present: {', '.join(arrays)}.")
    terminal = arrays.pop("terminals").astype(bool)
    _check(path, arrays, terminal)

    begins = ~terminal  # the states in which transitions begin
    observations, actions = arrays.pop("observations"), arrays.pop("actions")
    last = torch.from_numpy(terminal[1:][begins[:-1]]).unsqueeze(1)  # [N, 1], the next state is the last one
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


def _check(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], terminal: np.ndarray) -> None:
    """Check the arrays of a file, and its terminals, ``bool [states]``."""
    lengths = {name: len(arrays[name]) if arrays[name].ndim else 0 for name in ("observations", "actions")}
    if terminal.ndim != 1 or set(lengths.values()) != {len(terminal)}:
        raise ValueError(
            f"The arrays of {path} must have one row per state, and they differ: {lengths} rows, and terminals of the "
            f"shape {terminal.shape}."
        )
    if not len(terminal) or not terminal[-1]:
        raise ValueError(
            f"The last state in {path} is not terminal: 'terminals' must be 1 at the last state of each trajectory. "
            "Was the file cut off?"
        )
    if terminal.all():
        raise ValueError(f"Every state in {path} is terminal: there is no transition in it.")
