"""A uniform sample of all goals achieved so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class GoalReservoir:
    """A sample of all goals that were added, each of which is equally likely to be in it.

    Algorithm R (Vitter 1985, doi:10.1145/3147.3165): after n goals, the next one replaces a random goal of the sample
    with the probability size / (n + 1).

    Args:
        size (int): the number of goals that are kept.
    """

    def __init__(self, size: int):
        self.size = size
        self._clear()

    def _clear(self) -> None:
        self.seen = 0
        self.goals: Tensor | None = None  # [size, *goal]
        self.episodes = torch.full((self.size,), -1)  # in which the goals were achieved; -1 for empty places
        self.steps = torch.full((self.size,), -1)

    @property
    def filled(self) -> int:
        """How many goals are kept so far, from the first place on."""
        return min(self.seen, self.size)

    def add(self, goals: Tensor, episodes: Tensor, steps: Tensor) -> None:
        """Add goals ``[n, *goal]`` one after the other, with their episodes and steps ``int64 [n]``."""
        all_goals = self.goals_like(goals)
        number = np.arange(self.seen, self.seen + len(goals))
        drawn = (torch.rand(len(goals), dtype=torch.float64, device="cpu").numpy() * (number + 1)).astype(np.int64)
        place = np.where(number < self.size, number, drawn)
        # If several goals get the same place, the last one keeps it.
        place, last = np.unique(place[::-1], return_index=True)
        comes_in = place < self.size
        index = torch.from_numpy(np.stack([place, len(goals) - 1 - last])[:, comes_in]).to(goals.device)
        for values, new in ((all_goals, goals), (self.episodes, episodes), (self.steps, steps)):
            values[index[0]] = new[index[1]]
        self.seen += len(goals)

    def goals_like(self, goals: Tensor) -> Tensor:
        """Return all places ``[size, *goal]``, with the shape, dtype and device of ``goals``."""
        if self.goals is None:
            self.goals = goals.new_zeros(self.size, *goals.shape[1:])
        if self.episodes.device != goals.device:
            self.goals, self.episodes, self.steps = (
                values.to(goals.device) for values in (self.goals, self.episodes, self.steps)
            )
        return self.goals

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the sample."""
        state: dict[str, Any] = {"size": self.size, "seen": self.seen}
        if self.goals is not None:
            for name in ("goals", "episodes", "steps"):
                state[name] = getattr(self, name)[: self.filled].clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: if it has another size: a part of it would not be a uniform sample.
        """
        if state["size"] != self.size:
            raise ValueError(
                f"The saved reservoir keeps {state['size']} goals and this one {self.size}: make the transform with "
                f"reservoir_size={state['size']}, then load."
            )
        self._clear()
        if "goals" in state:
            goals = self.goals_like(state["goals"])
            for values, saved in ((goals, "goals"), (self.episodes, "episodes"), (self.steps, "steps")):
                values[: len(state[saved])] = state[saved]
        self.seen = state["seen"]
