"""A uniform sample of all past achieved goals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class GoalReservoir:
    """A uniform sample, of fixed size, of all goals that were added.

    It uses Algorithm R ([Vitter, 1985](https://doi.org/10.1145/3147.3165)): after n goals, the next goal replaces a
    random goal of the sample with the probability size / (n + 1).
    """

    _tensors = ("goals", "episodes", "steps")

    def __init__(self, size: int):
        self.size = size
        self._clear()

    def _clear(self) -> None:
        self.seen = 0
        self.goals = torch.empty(0)  # [size, *goal] after the first call of add
        self.episodes = torch.zeros(self.size, dtype=torch.int64)  # the episodes that achieved the goals; 0 if empty
        self.steps = torch.zeros(self.size, dtype=torch.int64)  # the steps that achieved the goals

    @property
    def filled(self) -> int:
        """The number of goals in the sample. They are at the first indices of the tensors."""
        return min(self.seen, self.size)

    def add(self, goals: Tensor, episodes: Tensor, steps: Tensor) -> None:
        """Add goals ``[n, *goal]``, one after the other, with their episode ids and steps, ``int64 [n]`` each."""
        self._allocate(goals)
        number = np.arange(self.seen, self.seen + len(goals))
        drawn = (torch.rand(len(goals), dtype=torch.float64, device="cpu").numpy() * (number + 1)).astype(np.int64)
        place = np.where(number < self.size, number, drawn)
        # If several goals get the same place, the last one keeps it.
        place, last = np.unique(place[::-1], return_index=True)
        comes_in = place < self.size
        index = torch.from_numpy(np.stack([place, len(goals) - 1 - last])[:, comes_in]).to(goals.device)
        for name, new in zip(self._tensors, (goals, episodes, steps), strict=True):
            # A new tensor, because a shallow copy keeps the sample from before an interrupted write.
            setattr(self, name, getattr(self, name).index_copy(0, index[0], new[index[1]]))
        self.seen += len(goals)

    def _allocate(self, goals: Tensor) -> None:
        """Allocate memory for goals like ``[n, *goal]``, or move the sample to their device."""
        if not len(self.goals):
            self.goals = goals.new_zeros(self.size, *goals.shape[1:])
        for name in self._tensors:
            setattr(self, name, getattr(self, name).to(goals.device))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the sample."""
        sample = {name: getattr(self, name)[: self.filled].clone() for name in self._tensors}
        return {"size": self.size, "seen": self.seen} | sample

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        if state["size"] != self.size:  # a sample of another size cannot be continued uniformly
            raise ValueError(
                f"The saved reservoir keeps {state['size']} goals, but this one keeps {self.size}. Create the "
                f"transform with reservoir_size={state['size']}, then load."
            )
        self._clear()
        if state["seen"]:
            self._allocate(state["goals"])
            self.seen = state["seen"]
            for name in self._tensors:
                getattr(self, name)[: self.filled] = state[name]
