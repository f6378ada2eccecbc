"""A uniform sample of all goals that were ever achieved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class GoalReservoir:
    """Goals that stand for all that came in: each of them is equally likely to be among those that are kept.

    Algorithm R (Vitter 1985, doi:10.1145/3147.3165): of n goals that came in, the next takes the place of a random
    one with the probability size / (n + 1).

    Args:
        size (int): how many are kept.
    """

    def __init__(self, size: int):
        self.size = size
        self._clear()

    def _clear(self) -> None:
        self.seen = 0
        self.goals: Tensor | None = None  # [size, *goal]
        self.episodes = torch.full((self.size,), -1)  # that they were achieved in; -1 where there is none yet
        self.steps = torch.full((self.size,), -1)

    @property
    def filled(self) -> int:
        """How many are kept so far, from the first place on."""
        return min(self.seen, self.size)

    def add(self, goals: Tensor, episodes: Tensor, steps: Tensor) -> None:
        """Let goals ``[n, *goal]`` in, one after the other, with their episodes and steps ``int64 [n]``."""
        all_goals = self.goals_like(goals)
        number = np.arange(self.seen, self.seen + len(goals))
        drawn = (torch.rand(len(goals), dtype=torch.float64, device="cpu").numpy() * (number + 1)).astype(np.int64)
        place = np.where(number < self.size, number, drawn)
        # Of several that come to one place the last one stays there.
        place, last = np.unique(place[::-1], return_index=True)
        comes_in = place < self.size
        index = torch.from_numpy(np.stack([place, len(goals) - 1 - last])[:, comes_in]).to(goals.device)
        for values, new in ((all_goals, goals), (self.episodes, episodes), (self.steps, steps)):
            values[index[0]] = new[index[1]]
        self.seen += len(goals)

    def goals_like(self, goals: Tensor) -> Tensor:
        """Return the goals ``[size, *goal]`` that are kept, of that kind and where these are."""
        if self.goals is None:
            self.goals = goals.new_zeros(self.size, *goals.shape[1:])
        if self.episodes.device != goals.device:
            self.goals, self.episodes, self.steps = (
                values.to(goals.device) for values in (self.goals, self.episodes, self.steps)
            )
        return self.goals

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, in tensors that later goals do not change."""
        state: dict[str, Any] = {"size": self.size, "seen": self.seen}
        if self.goals is not None:
            for name in ("goals", "episodes", "steps"):
                state[name] = getattr(self, name)[: self.filled].clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: if the state is that of another size, of which a part would be no uniform sample.
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
