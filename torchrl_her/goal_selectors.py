"""Selectors: which achieved goal an environment pursues next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

FITTED = 10_000  # goals that `GoalSelection` passes to `fit`
CHUNK = 2**22  # distances that are computed at a time
FEW, MANY = 0.3, 0.7  # shares of reached goals below and above which the cutoff changes
ATTEMPTS = 10  # episodes with a selected goal after which the cutoff can change
HIGHEST = -3.0  # the first and the highest cutoff


def log_density(goals: Tensor, fitted: Tensor, std: Tensor) -> Tensor:
    """Return logarithms of densities at goals ``[n, *goal]``, up to a constant, ``[n]``.

    Args:
        goals (Tensor): the goals, ``[n, *goal]``.
        fitted (Tensor): the goals whose density is estimated, with Gaussian kernels, ``[m, *goal]``.
        std (Tensor): the standard deviations of the kernels, ``[*goal]``.
    """
    centres = _flat(fitted)
    mean = centres.mean(0)
    # Candidates and the goal table can be on different devices.
    rows, scale = _flat(goals).to(mean.device), std.reshape(-1).to(mean)
    centres, rows = ((each - mean) / scale for each in (centres, rows))  # [m, features], [n, features]
    parts = rows.split(max(1, CHUNK // len(centres)))
    return torch.cat([_log_mean_of_kernels(part, centres) for part in parts])


def _log_mean_of_kernels(rows: Tensor, centres: Tensor) -> Tensor:
    # A matrix product is imprecise for goals far from the mean, above all if float32 products are TF32 or bfloat16.
    distances = torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist")
    exponents = distances.square_().div_(-2)
    highest = exponents.amax(1, keepdim=True)
    # Below -87, exp returns denormal numbers, which are slow on a CPU; such terms do not matter.
    return (exponents - highest).clamp_min_(-80).exp_().mean(1).log() + highest.squeeze(1)


class GoalSelector(nn.Module, ABC):
    """Base class of selectors, which select a goal for each environment that resets.

    Examples:
        A selector of the candidate that is farthest from what the environment has achieved at its reset:

        >>> from torchrl_her import GoalSelector
        >>> class Farthest(GoalSelector):
        ...     def select(self, candidates, observation):
        ...         here = observation["achieved_goal"].unsqueeze(1)  # [n, 1, goal]
        ...         best = (candidates - here).norm(dim=-1).argmax(1)
        ...         return candidates[range(len(candidates)), best]
    """

    def fit(self, goals: Tensor, box: Tensor) -> None:
        """Learn from achieved goals. `GoalSelection` calls this every few resets. Default: nothing.

        Args:
            goals (Tensor): achieved goals in random order, ``[m, *goal]``.
            box (Tensor): the sides of the bounding box around the environment's goals and the achieved goals at resets
                so far, ``float [*goal]``. A side without extent is as long as the longest one.
        """

    @abstractmethod
    def select(self, candidates: Tensor, observation: TensorDictBase) -> Tensor:
        """Select one goal for each environment.

        Args:
            candidates (Tensor): achieved goals for each environment, ``[n, candidates, *goal]``. Some can be equal.
            observation (TensorDictBase): what the environments returned at the reset, ``[n]``.

        Returns:
            Tensor: a goal for each environment, ``[n, *goal]``.
        """


class Uniform(GoalSelector):
    """Any achieved goal, uniformly over the steps of the goal table.

    Examples:
        >>> from torchrl_her import Uniform
        >>> Uniform()
        Uniform()
    """

    def select(self, candidates: Tensor, observation: TensorDictBase) -> Tensor:  # noqa: D102
        return candidates[:, 0]


class LowestDensity(GoalSelector):
    """The candidate where achieved goals have the lowest density: the frontier of what the agent can do.

    The selector of MEGA ([Pitis et al., 2020](https://arxiv.org/abs/2007.02832)). The density is a Gaussian kernel
    density estimate of achieved goals.

    Keyword Args:
        bandwidth (float): the standard deviation of the kernels, as a share of the sides of the box in `fit`. Default:
            0.03.
        fitted (int): the number of achieved goals in the estimate. The time of a reset is proportional to this number
            and to the ``candidates`` of `GoalSelection`. Default: 10,000, which is also the maximum.

    Raises:
        ValueError: if ``bandwidth`` is not positive, or ``fitted`` not from 1 to 10,000.
        RuntimeError: if ``select`` is called before ``fit``.

    Examples:
        >>> import torch
        >>> from torchrl_her import LowestDensity
        >>> selector = LowestDensity()
        >>> selector.fit(torch.tensor([[0.0], [0.1], [0.2], [3.0]]), box=torch.tensor([3.0]))
        >>> selector.select(torch.tensor([[[0.1], [3.0]]]), None)
        tensor([[3.]])
    """

    def __init__(self, *, bandwidth: float = 0.03, fitted: int = FITTED):
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, got {bandwidth!r}.")
        if not 1 <= fitted <= FITTED:
            raise ValueError(f"fitted must be from 1 to {FITTED}, got {fitted!r}.")
        super().__init__()
        self.bandwidth, self.fitted = bandwidth, fitted
        self._fitted: tuple[Tensor, Tensor] | None = None  # goals and box; None before the first `fit`

    def fit(self, goals: Tensor, box: Tensor) -> None:  # noqa: D102
        self._fitted = goals[: self.fitted], box

    def select(self, candidates: Tensor, observation: TensorDictBase) -> Tensor:  # noqa: D102
        if self._fitted is None:
            raise RuntimeError("LowestDensity has no density yet: call fit(goals, box) before select().")
        goals, box = self._fitted
        density = log_density(candidates.flatten(0, 1), goals, self.bandwidth * box).view(candidates.shape[:2])
        lowest = density.argmin(1).to(candidates.device)
        return candidates[torch.arange(len(candidates), device=candidates.device), lowest]

    def get_extra_state(self) -> Any:
        """Return the goals and the box of the density estimate."""
        return None if self._fitted is None else {"goals": self._fitted[0], "box": self._fitted[1]}

    def set_extra_state(self, state: Any) -> None:
        """Load the result of `get_extra_state`."""
        self._fitted = None if state is None else (state["goals"], state["box"])

    def extra_repr(self) -> str:  # noqa: D102
        return f"bandwidth={self.bandwidth}, fitted={self.fitted}"


class Feasible(nn.Module):
    """Leaves out candidates that the agent is not expected to reach: their value is below a cutoff.

    The cutoff adapts to the agent ([Pitis et al., 2020](https://arxiv.org/abs/2007.02832)). It starts at -3. After ten
    episodes with a selected goal, it decreases by 1 if the goal was reached in at least 70% of them, and increases by 1
    if it was reached in at most 30%. It is at most -3, and at least the value of reaching the goal after 80% of an
    episode, with a reward of -1 per step.

    Args:
        value_fn (Callable[[TensorDictBase], Tensor]): maps observations ``[n]``, whose desired goals are the
            candidates, to the values of their states, ``[n]`` or ``[n, 1]``, such as
            ``lambda td: critic(actor(td))["state_action_value"]``. It is called without gradients.

    Keyword Args:
        gamma (float): the discount of the values, from 0 to 1.
        episode_steps (int): the number of steps of an episode.

    Raises:
        ValueError: if ``gamma`` or ``episode_steps`` is out of range; when called, if the values have another shape.

    Examples:
        >>> from torchrl_her import Feasible
        >>> feasible = Feasible(lambda td: -td["desired_goal"].norm(dim=-1), gamma=0.98, episode_steps=50)
        >>> feasible.cutoff
        -3.0
        >>> feasible.update(attempts=10, reached=8)
        >>> feasible.cutoff
        -4.0
    """

    def __init__(self, value_fn: Callable[[TensorDictBase], Tensor], *, gamma: float, episode_steps: int):
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma is a discount and must be in [0, 1], got {gamma!r}.")
        if episode_steps < 1:
            raise ValueError(f"episode_steps must be at least 1, got {episode_steps!r}.")
        super().__init__()
        self.value_fn = (value_fn,)  # a tuple: the networks belong to the agent, not to this module
        gamma = min(gamma, 0.99)
        self.lowest = min(HIGHEST, -(1 - gamma ** (0.8 * episode_steps)) / (1 - gamma))
        self.cutoff = HIGHEST
        self._attempts = self._reached = 0  # since the cutoff changed last

    def update(self, attempts: int, reached: int) -> None:
        """Adapt the cutoff after ``attempts`` episodes with a selected goal, of which ``reached`` were successful."""
        self._attempts, self._reached = self._attempts + attempts, self._reached + reached
        if self._attempts < ATTEMPTS:
            return
        share = self._reached / self._attempts
        change = -1.0 if share >= MANY else 1.0 if share <= FEW else 0.0
        self.cutoff = min(HIGHEST, max(self.lowest, self.cutoff + change))
        self._attempts = self._reached = 0

    def forward(self, observation: TensorDictBase) -> Tensor:
        """Return which observations ``[n]`` have a feasible desired goal, ``bool [n]``."""
        count = len(observation)
        with torch.no_grad():
            values = self.value_fn[0](observation)
        if not isinstance(values, Tensor) or values.shape not in ((count,), (count, 1)):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"value_fn must return one value per row, {(count,)} or {(count, 1)}, but returned {got}.")
        return values.reshape(count) >= self.cutoff

    def get_extra_state(self) -> dict[str, Any]:
        """Return the cutoff and the counts since it changed."""
        return {"cutoff": self.cutoff, "attempts": self._attempts, "reached": self._reached}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state`."""
        self.cutoff, self._attempts, self._reached = state["cutoff"], state["attempts"], state["reached"]


def _flat(goals: Tensor) -> Tensor:
    """Return goals ``[n, *goal]`` as ``[n, features]``, in a floating-point dtype."""
    return goals.reshape(len(goals), -1).to(torch.promote_types(goals.dtype, torch.float32))
