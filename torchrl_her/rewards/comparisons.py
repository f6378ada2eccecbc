"""Comparisons of rewards and goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

REPEATED = 3  # goals are discrete if their values occur this many times on average


def agree(one: Any, other: Any, scale: float = 1.0) -> Tensor:
    """Return whether two rewards agree, elementwise.

    The tolerance is 0.001 times the sum of ``|other|`` and ``scale``. NaN agrees with NaN.
    """
    one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (one, other))
    return torch.isclose(one, other, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def call_rows(
    function: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray, info: dict[str, np.ndarray]
) -> np.ndarray:
    """Call ``function(achieved, desired, info)`` for each row of goals ``[n, *goal]`` and return the values ``[n]``."""
    rows = range(len(achieved))
    infos = [{name: values[row] for name, values in info.items()} for row in rows]
    return np.array([np.asarray(function(achieved[row], desired[row], infos[row])).item() for row in rows])


def agrees_with_rows(values: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether the result of a call with a batch equals the values ``[n]`` of calls row by row."""
    count = len(expected)
    has_values = values.shape in ((), (count,), (count, 1)) and values.dtype != object
    return has_values and np.allclose(values.reshape(-1), expected)


def are_discrete(steps: Tensor, goals: Tensor) -> bool:
    """Return whether goals ``[n, features]`` are on a grid or repeat, given the steps that lead to them."""
    sizes = steps.abs()
    units = sizes.where(sizes > 0, torch.inf).amin(0)  # of the grid, [features]
    parts = sizes / units
    moved = goals[sizes > 0]
    return bool(((parts - parts.round()).abs() < 0.05).all()) or REPEATED * moved.unique().numel() <= moved.numel()
