"""Goals for the next episode that the agent has achieved before."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import Transform

from torchrl_her._private import transforms_around
from torchrl_her.episodes.write import map_goals
from torchrl_her.goal_selectors import FITTED, Feasible, GoalSelector
from torchrl_her.keys import SELECTION, STEPS_TO_GOAL, get_entry
from torchrl_her.normalize import NormalizedInputs
from torchrl_her.relabel import deep_copy
from torchrl_her.rewards.comparisons import agree
from torchrl_her.rewards.returns import where
from torchrl_her.transform import HERTransform

MOST_CANDIDATES = 20_000  # for all environments that reset together
FIT_EVERY = 10  # resets
OF_EPISODE = 0.05  # the weight of an episode in the moving average of the success
MARGIN = 0.05  # of the bounding box, as a share of its largest side
FLAT = 1e-3  # the box has no extent in components whose side is smaller, as a share of the largest side


@dataclass(frozen=True)
class SelectionReport:
    """Counts of episodes, as returned by ``report()`` of `GoalSelection`. ``print(report)`` shows all numbers.

    Attributes:
        episodes (int): the number of episodes that have begun.
        selected (int): the number of ended episodes with a selected goal.
        reached (int): the number of these episodes in which the goal was reached.
        success (float): the share of episodes that reach the environment's own goal, over about the last 20 of these.
        cutoff (float | None): the present cutoff of `Feasible`, or None without it.
    """

    episodes: int
    selected: int
    reached: int
    success: float
    cutoff: float | None

    def __str__(self) -> str:
        reached = f"{self.reached:,} of {self.selected:,} selected goals"
        if self.selected:
            reached += f", {self.reached / self.selected:.1%}"
        rows = [f"  episodes        {self.episodes:,}", f"  goal reached    {reached}"]
        rows.append(f"                  {self.success:.0%} of about the last 20 goals of the environment")
        if self.cutoff is not None:
            rows.append(f"  cutoff          {self.cutoff:.4g}, below which no goal is feasible")
        return "\n".join(["GoalSelection", *rows])


class GoalSelection(Transform):
    """Let the agent choose its goals: at a reset, an achieved goal can replace the environment's desired goal.

    Environments can ask for goals that are far beyond what an agent can do. Goals at the frontier of what it has
    achieved teach it more, and hindsight has collected them already. The idea is that of MEGA
    ([Pitis et al., 2020](https://arxiv.org/abs/2007.02832)). The more often the agent reaches the environment's own
    goals, the fewer goals are selected.

    This is a transform of environments. Append it to the environments that collect, single or batched, before
    transforms that copy the desired goal (``CatTensors``) or read the reward (``RewardSum``), and pass it the
    `HERTransform` of the buffer. Environments for evaluation do not need it.

    A selected goal replaces the desired goal at the root and under ``"next"``, and the rewards are recomputed. If the
    reward module writes ``terminated``, so do the done flags: an episode that the environment itself terminates before
    the selected goal is reached is truncated. These entries are added, at the root and under ``"next"``:

    - ``("goal_selection", "desired_goal")``: the environment's own goal.
    - ``("goal_selection", "selected")``, ``bool [*batch, 1]``: whether it was replaced.
    - ``("goal_selection", "steps_at_goal")``, ``int64 [*batch, 1]``: the number of steps so far at the selected goal.

    Args:
        hindsight (HERTransform): the transform of the buffer that stores the transitions. Its keys and its reward are
            used. In a collector of another process, its goal table must be shared: create the buffer with
            ``shared=True`` first.
        selector (GoalSelector): selects one of the candidates: `LowestDensity`, `Uniform`, or your own.

    Keyword Args:
        share (float): the probability that a goal is selected at a reset, as long as no goal of the environment is
            reached. It is multiplied with the share of episodes that fail to reach such a goal, over about the last 20
            episodes that pursue one. Default: 0.5.
        candidates (int): the number of candidates for each environment, drawn from the goal table; fewer if more than
            40 environments reset at the same time. Default: 500.
        bounded (bool): whether candidates outside the bounding box around the environment's goals and the achieved
            goals at resets so far are left out. The box is enlarged by 5% of its largest side, on each side. Without
            this, the goals of `LowestDensity` include objects that fell off a table. Default: False.
        feasible (Feasible, optional): leaves out candidates that the agent is not expected to reach.
        start (int): no goal is selected before the goal table has this many goals. Default: 500.

    Raises:
        TypeError: if ``hindsight`` is not a `HERTransform`, or ``selector`` not a `GoalSelector`.
        ValueError: if an argument is out of range, if ``start`` exceeds the capacity of the goal table, if the done
            flags are nested, if the reward is not a function of the goals, if a selector returns goals of the wrong
            shape, or if the desired goal changes within an episode.
        RuntimeError: in another process, if the goal table is not shared, or if it was unpickled without the buffer.
        KeyError: if the environment has no goals, or a step lacks the entries of the previous one.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> from torchrl.envs import GymEnv, TransformedEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, GoalSelection, HERTransform, LowestDensity
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> her = HERTransform(EnvReward(env), capacity=10_000)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10_000), transform=her)
        >>> env = TransformedEnv(env, GoalSelection(her, LowestDensity(), start=50))
        >>> for _ in range(20):
        ...     _ = rb.extend(env.rollout(50))
        >>> env.transform.report().episodes
        20
    """

    def __init__(
        self,
        hindsight: HERTransform,
        selector: GoalSelector,
        *,
        share: float = 0.5,
        candidates: int = 500,
        bounded: bool = False,
        feasible: Feasible | None = None,
        start: int = 500,
    ):
        if not isinstance(hindsight, HERTransform):
            raise TypeError(f"hindsight must be the HERTransform of the buffer, got a {type(hindsight).__name__}.")
        if not isinstance(selector, GoalSelector):
            raise TypeError(f"selector must be a GoalSelector, such as LowestDensity(), got {selector!r}.")
        if not 0 <= share <= 1:
            raise ValueError(f"share is a probability and must be in [0, 1], got {share!r}.")
        for name, value in (("candidates", candidates), ("start", start)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}.")
        if not hindsight.reward.out_keys or STEPS_TO_GOAL in hindsight.reward.in_keys:
            raise ValueError(
                "GoalSelection computes rewards from the goals: pass HERTransform a GoalReward(reward_fn), "
                "SparseReward or EnvReward instead of None or ReachedReward."
            )
        if not isinstance(hindsight.keys.done, str):
            raise ValueError(
                f"GoalSelection needs the done flags at the root, got {hindsight.keys.done!r}, because TorchRL resets "
                "only the entries next to them. Move the flags of the environment to the root."
            )
        if start > hindsight.capacity:
            raise ValueError(
                f"No goal would be selected before the goal table has start={start} goals, but it holds at most "
                f"{hindsight.capacity}: pass a smaller start, or HERTransform a larger capacity."
            )
        super().__init__()
        self._hindsight = (hindsight,)  # a tuple: the transform of the buffer is not a part of this module
        self.selector, self.feasible = selector, feasible
        self.share, self.candidates, self.start = share, candidates, start
        self.bounded = bounded
        self._success = 0.0  # at the environment's own goals, a moving average over episodes
        self._resets_to_fit = 0  # the number of resets before the selector learns again
        # The corners of the box around goals and starts of the environment, [*goal] each after the first reset
        self._box = torch.tensor(math.inf), torch.tensor(-math.inf)
        none = torch.zeros(0, dtype=torch.bool)
        self._selected = none  # bool [n], whether the goal of each environment is selected
        self._reached = none  # bool [n], whether its goal was reached, selected or not
        self._has_begun = none  # bool [n], whether the environment was reset before
        self._counts = {"episodes": 0, "selected": 0, "reached": 0}

    @property
    def hindsight(self) -> HERTransform:
        """The transform of the buffer."""
        return self._hindsight[0]

    def report(self) -> SelectionReport:
        """Count the episodes and selected goals so far.

        Returns:
            SelectionReport: the numbers of episodes, of selected goals and of reached ones.
        """
        cutoff = None if self.feasible is None else self.feasible.cutoff
        return SelectionReport(**self._counts, success=self._success, cutoff=cutoff)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raise an error: this is not a transform of replay buffers."""
        raise ValueError(
            "GoalSelection is a transform of environments, not of replay buffers: pass it to "
            "TransformedEnv(env, GoalSelection(...))."
        )

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Add the entries of this transform to the spec of observations."""
        key = self.hindsight.keys.desired_goal
        spec = observation_spec.get(key, None) if isinstance(observation_spec, Composite) else None
        if spec is None:
            raise KeyError(f"The environment has no desired goal {key!r}: pass its key to the HERTransform.")
        if any(isinstance(each, NormalizedInputs) for each in transforms_around(self)[0]):
            raise ValueError(
                "NormalizedInputs comes before GoalSelection, so networks would not read the selected goals. Place it "
                "after GoalSelection: Compose(GoalSelection(...), inputs)."
            )
        shape, device = observation_spec.shape, observation_spec.device
        goal = Unbounded(spec.shape, dtype=spec.dtype, device=device)
        observation_spec[key] = goal  # an achieved goal can be outside the bounds of desired goals
        observation_spec[SELECTION] = Composite(
            desired_goal=goal.clone(),
            selected=Unbounded((*shape, 1), dtype=torch.bool, device=device),
            steps_at_goal=Unbounded((*shape, 1), dtype=torch.int64, device=device),
            shape=shape,
            device=device,
        )
        return observation_spec

    # Resets

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Select the goals of the environments that reset, in ``tensordict_reset``, ``[*batch]``."""
        self._check_process()
        keys, batch = self.hindsight.keys, tensordict_reset.batch_size
        own = tensordict_reset.get(keys.desired_goal)  # [*batch, *goal]
        flags = tensordict.get("_reset", None)
        resets = torch.ones(batch.numel(), dtype=torch.bool, device=own.device) if flags is None else flags.reshape(-1)
        row = resets.nonzero().flatten()
        goals = own.reshape(batch.numel(), *own.shape[len(batch) :]).clone()  # [n, *goal]
        self._count_ended(resets)
        selected = torch.zeros_like(resets)
        if len(row):
            states = tensordict_reset.reshape(-1)[row]
            self._enlarge_box(goals[row])
            self._enlarge_box(map_goals(get_entry(states, keys.achieved_goal, "achieved_goal"), self.hindsight.goal_fn))
            selected[row], goals[row] = self._select(states, goals[row])
        self._selected = torch.where(resets, selected, self._selected)
        self._reached = self._reached & ~resets
        tensordict_reset.set(keys.desired_goal, goals.view_as(own))
        selection = {
            "desired_goal": own,
            "selected": selected.view(*batch, 1),
            "steps_at_goal": torch.zeros(*batch, 1, dtype=torch.int64, device=own.device),
        }
        return tensordict_reset.set(SELECTION, selection)

    def _check_process(self) -> None:
        if not self.hindsight.is_up_to_date:
            raise RuntimeError(
                "GoalSelection reads a goal table in which no goal that the agent achieves would arrive. If it was "
                "unpickled without its replay buffer, pickle both together, pickle.dumps((env, replay_buffer)). If it "
                "is in another process than the buffer, their goal table must be shared: create the buffer with "
                "shared=True, a shared storage and HERTransform(..., goal_spec=...) before the collector, or append "
                "GoalSelection to the ParallelEnv, in the process of the buffer."
            )

    def _count_ended(self, resets: Tensor) -> None:
        """Count the episodes that end because their environments reset, ``bool [n]``."""
        if len(self._selected) != len(resets):  # the first reset
            self._selected = self._reached = self._has_begun = torch.zeros_like(resets)
        with_own_goal = self._has_begun & ~self._selected & resets
        for is_reached in self._reached[with_own_goal].tolist():
            self._success += OF_EPISODE * (is_reached - self._success)
        self._has_begun = self._has_begun | resets
        ended = self._selected & resets
        attempts, reached = int(ended.sum()), int((ended & self._reached).sum())
        self._counts["episodes"] += int(resets.sum())
        self._counts["selected"] += attempts
        self._counts["reached"] += reached
        if self.feasible is not None:
            self.feasible.update(attempts, reached)

    def _enlarge_box(self, goals: Tensor) -> None:
        """Enlarge the box so that it contains goals ``[n, *goal]``."""
        low, high = self._box
        self._box = torch.minimum(goals.amin(0), low), torch.maximum(goals.amax(0), high)

    def _select(self, states: TensorDictBase, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return which goals are selected, ``bool [n]``, and the goals of environments in ``states [n]``."""
        count, none = len(own), torch.zeros(len(own), dtype=torch.bool, device=own.device)
        if not self.share or self.hindsight.table_size < self.start:
            return none, own
        drawn = self.hindsight.random_goals(count * max(1, min(self.candidates, MOST_CANDIDATES // count)))
        if drawn is None:
            return none, own
        self._fit()
        candidates = drawn.unflatten(0, (count, -1)).to(own.device)  # [n, candidates, *goal]
        allowed = self._allowed(candidates, states)
        has_any = allowed.any(1)
        # Candidates that are left out are replaced with copies of others.
        chosen = torch.where(has_any[:, None], allowed, True).double().multinomial(candidates.shape[1], True)
        row = torch.arange(count, device=own.device)
        goals = self.selector.select(candidates[row[:, None], chosen], states)
        if not isinstance(goals, Tensor) or goals.shape != own.shape:
            got = tuple(goals.shape) if isinstance(goals, Tensor) else type(goals).__name__
            raise ValueError(
                f"{self.selector!r} must select one goal for each environment, {tuple(own.shape)}, but returned {got}."
            )
        selected = has_any & (torch.rand(count, device=own.device) < self.share * (1 - self._success))
        return selected, torch.where(selected.view(-1, *[1] * (own.ndim - 1)), goals.to(own.dtype), own)

    def _fit(self) -> None:
        """Let the selector learn from achieved goals every few resets."""
        self._resets_to_fit -= 1
        if self._resets_to_fit > 0:
            return
        self._resets_to_fit = FIT_EVERY
        goals = self.hindsight.random_goals(min(FITTED, self.hindsight.table_size))
        if goals is None:
            return
        side = self._box[1] - self._box[0]
        side = torch.where(side > FLAT * side.max(), side, side.max())  # an object at rest varies a little in height
        self.selector.fit(goals, side.clamp_min(1e-6))

    def _allowed(self, candidates: Tensor, states: TensorDictBase) -> Tensor:
        """Return which candidates, ``[n, candidates, *goal]``, are allowed, ``bool [n, candidates]``."""
        allowed = torch.ones(candidates.shape[:2], dtype=torch.bool, device=candidates.device)
        if self.bounded:
            allowed &= self._within_box(candidates.flatten(0, 1)).view_as(allowed)
        if self.feasible is not None:
            with_goals = states.unsqueeze(1).expand(*candidates.shape[:2]).reshape(-1).clone()
            with_goals.set(self.hindsight.keys.desired_goal, candidates.flatten(0, 1))
            allowed &= self.feasible(with_goals).view(candidates.shape[:2])
        return allowed

    def _within_box(self, goals: Tensor) -> Tensor:
        """Return which goals, ``[n, *goal]``, are within the enlarged box, ``bool [n]``."""
        low, high = (bound.to(goals.device) for bound in self._box)
        margin = MARGIN * (high - low).max()  # an object at rest varies in height, and the goals on a table do not
        return ((goals >= low - margin) & (goals <= high + margin)).reshape(len(goals), -1).all(-1)

    # Steps

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Set the goal of each environment in ``next_tensordict``, ``[*batch]``, and recompute its rewards."""
        keys = self.hindsight.keys
        selection, goal = tensordict.get(SELECTION, None), tensordict.get(keys.desired_goal, None)
        if selection is None or goal is None:
            raise KeyError(
                f"GoalSelection needs the entries {SELECTION!r} and {keys.desired_goal!r} of the previous step at the "
                "root: pass the tensordict that reset() or step() returned, with the action added."
            )
        own, selected = next_tensordict.get(keys.desired_goal), selection.get("selected")
        kept = selection.get("desired_goal")  # a transform after this one can change the dtype of entries
        if not own.is_cuda and not torch.equal(own.to(kept.dtype), kept):
            raise ValueError(
                "The environment changed its desired goal within an episode, so a selected goal could not be kept. "
                "Draw goals only in reset(); check_goal_env(env) shows what is wrong with the environment."
            )
        goals, steps = where(selected, goal, own), selection.get("steps_at_goal")
        if not own.is_cuda and not torch.equal(goals.to(goal.dtype), goal):
            raise ValueError(
                f"{keys.desired_goal!r} at the root is neither the environment's goal nor a selected one: a transform "
                "after GoalSelection changes it, so goals and rewards would be inconsistent. Remove this transform and "
                "normalize the inputs of networks with NormalizedInputs."
            )
        next_tensordict.set(keys.desired_goal, goals)
        is_at_goal = self._recompute(tensordict, next_tensordict, selected)  # bool [*batch, 1]
        steps = steps + (selected & is_at_goal).long()
        self._reached = self._reached | is_at_goal.reshape(-1)
        # A collector updates its tensors in place, so no two entries may share memory.
        added = {"desired_goal": own.clone(), "selected": selected, "steps_at_goal": steps}
        return next_tensordict.set(SELECTION, added)

    def _recompute(self, tensordict: TensorDictBase, after: TensorDictBase, selected: Tensor) -> Tensor:
        """Recompute the rewards, and the done flags if the reward module writes them, where goals are selected.

        Returns:
            Tensor: whether each transition reaches its goal, ``bool [*batch, 1]``. It does if its reward is that of a
            transition whose goal is its own outcome.
        """
        hindsight = self.hindsight
        keys, reward = hindsight.keys, hindsight.reward
        states = after.get(keys.achieved_goal)
        batch = after.batch_size
        outcomes = map_goals(states.reshape(-1, *states.shape[len(batch) :]), hindsight.goal_fn)
        stored, results = after.get(keys.reward), []
        for goal in (after.get(keys.desired_goal), outcomes.view(*batch, *outcomes.shape[1:])):
            given = tensordict.exclude("next").set(keys.desired_goal, goal)
            given.set("next", after.copy().set(keys.desired_goal, goal))
            with torch.no_grad():
                results.append(reward(given))
        computed, best = (each.get(keys.next_reward) for each in results)
        after.set(keys.reward, where(selected, computed, stored))
        if keys.next_terminated in reward.out_keys:
            own_end = after.get(keys.terminated)
            terminated = where(selected, results[0].get(keys.next_terminated), own_end)
            after.set(keys.terminated, terminated).set(keys.done, after.get(keys.done) | terminated)
            if (truncated := after.get(keys.truncated, None)) is not None:
                after.set(keys.truncated, truncated | (own_end & ~terminated))  # the environment has ended for its goal
        return agree(computed, best).reshape(*batch, -1).all(-1, keepdim=True)

    # Copies, saving

    def __deepcopy__(self, memo: dict[int, Any]) -> GoalSelection:
        memo[id(self.hindsight)] = self.hindsight  # a copy reads the same goal table
        state: Any = super().__getstate__()
        return deep_copy(self, state, memo)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the box of desired goals, the success and the counts so far for ``state_dict``."""
        names = ("_success", "_resets_to_fit", "_box", "_selected", "_reached", "_has_begun", "_counts")
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state`."""
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))
