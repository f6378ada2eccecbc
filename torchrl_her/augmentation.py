"""Hindsight when transitions are written: each is stored as it was, and again with new goals."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from torchrl_her import checks
from torchrl_her.drawing import draw_goals
from torchrl_her.episodes import EndedEpisodes, Publication, Written
from torchrl_her.held import HeldRows, gather
from torchrl_her.hindsight import RELABELLED, Hindsight
from torchrl_her.keys import Keys
from torchrl_her.order import Order
from torchrl_her.reading import map_goals
from torchrl_her.reservoir import GoalReservoir
from torchrl_her.strategies import GoalStrategy

# The step whose achieved goal a copy was given, int64 [batch, 1]; -1 for transitions as they were.
GOAL_STEP = ("hindsight", "goal_step")
# So many transitions are written to others before a lane that nothing continues is taken for ended.
PATIENCE = 10_000


class HindsightAugmentation(Hindsight):
    """Hindsight Experience Replay that relabels when transitions are written, as the original experiments did.

    It holds each episode back until it ends. Then the buffer gets its transitions as they were, and ``n_sampled_goal``
    copies of each with other goals, at the root and under ``"next"``, and the rewards that they earn for these.
    Sampling changes nothing: it costs what it costs without hindsight, and each copy has a priority of its own in
    prioritized replay. `HERTransform` relabels when sampling: it needs a fifth of the memory for ``n_sampled_goal=4``,
    draws new goals each time, and works with every storage.

    Args:
        reward (TensorDictModule or Callable): the reward of a relabelled transition, as for `HERTransform`. It is
            called once per write.

    Keyword Args:
        strategy (str or GoalStrategy): which step's achieved goal is taken: ``"future"`` (default),
            ``"final"``, ``"episode"``, ``"random"``, or an object with a method ``select``. With ``"final"`` all copies
            of a transition are the same: pass ``n_sampled_goal=1``.
        n_sampled_goal (int): how many copies of each transition are stored besides it, the paper's k. Default: 4.
        achieved_goal_key (NestedKey): read at the root and under ``"next"``. Default: ``"achieved_goal"``.
        desired_goal_key (NestedKey): written at the root and under ``"next"``. Default: ``"desired_goal"``.
        reward_key (NestedKey): under ``"next"``. Default: ``"reward"``.
        done_key (NestedKey): under ``"next"``; its neighbours ``terminated`` and ``truncated`` belong to it.
            Default: ``"done"``.
        trajectory_key (NestedKey, optional): ids ``[batch]`` that tell the environments apart, used where they
            are present; None for none. Default: ``("collector", "traj_ids")``.
        goal_fn (Callable[[Tensor], Tensor], optional): maps what stands under ``achieved_goal_key``,
            ``[batch, *state]``, to goals ``[batch, *goal]``.
        max_episode_steps (int): ends an episode after so many steps, which bounds what is held back.
            Default: 1,000.
        mask_key (NestedKey, optional): transitions that are False here are padding, and not stored.
        reservoir_size (int): how many achieved goals of past episodes ``"random"`` draws from; each that was ever
            achieved is equally likely to be among them. Default: 10,000.

    What is stored has ``("hindsight", "relabelled")``, ``bool [batch, 1]``, and ``("hindsight", "goal_step")``,
    ``int64 [batch, 1]``: the step of its episode that achieved the new goal, -1 where there is none (for
    ``"random"``, the step of the other episode). Draws come from torch's default random generator.

    Raises:
        ValueError, TypeError: if an argument is wrong; when writing (nothing is stored or held back then), if goals,
            rewards or flags have the wrong shape, an achieved goal is NaN, or transitions are not written with
            ``extend`` in one dimension.
        KeyError: when writing, if an entry is missing.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HindsightAugmentation
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.6, beta=0.4, storage=LazyTensorStorage(1000), transform=HindsightAugmentation(EnvReward(env))
        ... )
        >>> episode = env.rollout(50)  # that many steps, and it is over
        >>> len(rb.extend(episode[:30])), len(rb.extend(episode[30:])), len(rb)
        (0, 250, 250)
        >>> rb.sample(64)["hindsight", "relabelled"].shape
        torch.Size([64, 1])
    """

    def __init__(
        self,
        reward: TensorDictModuleBase | Callable[[Tensor, Tensor], Tensor],
        *,
        strategy: str | GoalStrategy = "future",
        n_sampled_goal: int = 4,
        achieved_goal_key: NestedKey = "achieved_goal",
        desired_goal_key: NestedKey = "desired_goal",
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        trajectory_key: NestedKey | None = ("collector", "traj_ids"),
        goal_fn: Callable[[Tensor], Tensor] | None = None,
        max_episode_steps: int = 1_000,
        mask_key: NestedKey | None = None,
        reservoir_size: int = 10_000,
    ):
        n_sampled_goal = checks.check_at_least_one("n_sampled_goal", n_sampled_goal)
        max_episode_steps = checks.check_at_least_one("max_episode_steps", max_episode_steps)
        reservoir_size = checks.check_at_least_one("reservoir_size", reservoir_size)
        keys = Keys.make(achieved_goal_key, desired_goal_key, reward_key, done_key, trajectory_key, mask_key)
        super().__init__(reward, strategy, keys, goal_fn, EndedEpisodes(PATIENCE, max_episode_steps))
        self.n_sampled_goal = n_sampled_goal
        self.reservoir = None if self.strategy.same_episode else GoalReservoir(reservoir_size)
        self._held = HeldRows()
        self._episodes = 0  # how many began
        self._flushed: list[Publication] = []  # episodes that ended between two writes
        self._goal: Tensor | None = None  # one of those that were written
        self._is_shared = False

    # Writing

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Hold transitions ``[n]`` back, and return those of episodes that are over, with their copies, if any are."""
        self._look_around()
        if isinstance(tensordict, list):
            tensordict = torch.stack(tensordict)
        checks.check_extend(tensordict.batch_size, _is_added())
        rows, written = None, None
        if tensordict.batch_size.numel():
            rows, written = self._read_rows(tensordict)
        with self._lock:
            self._leave_lanes_of_parent()
            if rows is not None:
                self._held.admit(rows)
                if self._goal is None:
                    self._goal = rows.get(self.keys.desired)[0].clone()
            ended, self._flushed = self._flushed, []
            arriving = np.empty(0, dtype=np.int64)
            if written is not None:
                arriving = self._held.assign(len(written.done))
                tracked = self.tracker.track(written._replace(goals=torch.from_numpy(arriving)), self._episodes + 1)
                self._episodes += tracked.opened
                ended += tracked.publications
            leaving = [publication.goals.numpy() for publication in ended]
            rows, places = self._held.exchange(rows, arriving, np.concatenate([arriving[:0], *leaving]))
            return self._augment(rows, places, ended) if ended else None

    def _look_around(self) -> None:
        order = Order.around(self)
        if order != self._order:
            order.check_augmentation(Hindsight)
            self._order = order

    def _read_rows(self, tensordict: TensorDictBase) -> tuple[TensorDictBase | None, Written | None]:
        """Return the transitions that count, if any do, and what the tracker needs of them."""
        if isinstance(tensordict, LazyStackedTensorDict):
            tensordict = tensordict.contiguous()
        everywhere = Order([], [*self._order.before, *self._order.after])
        written, kept = self._read(tensordict, self._goal, everywhere.written_after())
        goals = [*self._goal_keys, self.keys.achieved, self.keys.next_achieved]
        if self._goal is None and _is_dummy(tensordict, goals):
            written = written._replace(done=np.ones(1, dtype=bool))
        if kept is not None:
            tensordict = tensordict[torch.from_numpy(kept).to(written.goals.device)]
        return (tensordict, written) if len(tensordict) else (None, None)

    def _augment(self, rows: TensorDictBase, places: np.ndarray, ended: list[Publication]) -> TensorDictBase:
        """Return the transitions at ``places [n]``, episode after episode, each followed by its copies.

        So a storage that is full loses a transition and its copies together.
        """
        copies, desired = self.n_sampled_goal, rows.get(self.keys.desired)
        originals = torch.from_numpy(places).to(desired.device)
        outcomes = rows.get(self.keys.next_achieved).index_select(0, originals)  # [n, *state]
        outcomes = map_goals(outcomes, self.goal_fn).detach().to(desired.dtype)  # [n, *goal]
        episodes, lengths = zip(*((publication.episode, len(publication.goals)) for publication in ended), strict=True)
        drawn = draw_goals(self.strategy, outcomes, episodes, lengths, copies, self.reservoir)
        chosen = originals.unsqueeze(1).expand(-1, copies + 1)  # [n, 1 + k]
        goals = torch.cat([outcomes.unsqueeze(1), drawn.goals], dim=1)  # [n, 1 + k, *goal], the first are not used
        steps = torch.cat([torch.full_like(chosen[:, :1], -1), drawn.steps], dim=1)
        if drawn.left_out is None:
            chosen, goals, steps = chosen.flatten(), goals.flatten(0, 1), steps.flatten()
        else:
            kept = torch.cat([steps[:, :1] < 0, ~drawn.left_out], dim=1)
            chosen, goals, steps = chosen[kept], goals[kept], steps[kept]
        goal_step = steps.unsqueeze(-1)
        relabelled = goal_step >= 0

        rows = gather(rows, chosen)
        stored = {key: rows.get(key) for key in self._replaced}
        self._set_goals(rows, relabelled, goals, stored)
        with torch.no_grad():
            self._step_reward.recompute(rows, relabelled, stored)
        return rows.set(RELABELLED, relabelled).set(GOAL_STEP, goal_step)

    def flush(self) -> TensorDict:
        """End the running episodes: what is written next begins new ones.

        Their transitions and copies are written with the next write. To write them at once, extend the buffer with
        what is returned, which is an empty batch: ``rb.extend(hindsight.flush())``.
        """
        with self._lock:
            self._leave_lanes_of_parent()
            self._flushed += self.tracker.flush()
            return self._held.none()

    @property
    def held_back(self) -> int:
        """How many transitions wait for the end of their episode, or for the next write after `flush`."""
        return len(self._held)

    # Sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what was sampled as it is."""
        return tensordict

    # Between processes, on disk

    def share_memory_(self) -> HindsightAugmentation:
        """Take note that processes share the buffer; TorchRL calls it. Each holds back what it writes."""
        self._is_shared = True
        return self

    def _leave_lanes_of_parent(self) -> None:
        """In a forked process, leave what is held back to the process that wrote it."""
        if self._process != os.getpid():
            self._process = os.getpid()
            if self._is_shared:
                self.__dict__.update(self._without_lanes())

    def _without_lanes(self) -> dict[str, Any]:
        return {"tracker": self.tracker.without_lanes(), "_held": HeldRows(), "_flushed": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> HindsightAugmentation:
        copied = super().__deepcopy__(memo)
        copied._is_shared = False
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self._state_of_a_copy() | (self._without_lanes() if self._is_shared else {})

    def get_extra_state(self) -> dict[str, Any]:
        """Return what is held back, and the reservoir, for ``state_dict``."""
        with self._lock:
            self._leave_lanes_of_parent()
            lanes = self.tracker.state_dict()
            flushed = [(publication.episode, publication.goals) for publication in self._flushed]
            slots = [lane["goals"] for lane in lanes["lanes"]] + [goals for _, goals in flushed]
            return {
                "rows": self._held.state_dict(torch.cat([torch.empty(0, dtype=torch.int64), *slots]).numpy()),
                "lanes": lanes,
                "flushed": flushed,
                "episodes": self._episodes,
                "reservoir": None if self.reservoir is None else self.reservoir.state_dict(),
            }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` returned."""
        with self._lock:
            self._leave_lanes_of_parent()
            if self.reservoir is not None and state["reservoir"] is not None:
                self.reservoir.load_state_dict(state["reservoir"])
            saved, flushed = state["lanes"]["lanes"], state["flushed"]
            counts = [len(goals) for goals in (*(lane["goals"] for lane in saved), *(goals for _, goals in flushed))]
            slots = iter(torch.arange(sum(counts)).split(counts))
            lanes = [lane | {"goals": next(slots)} for lane in saved]
            self._flushed = [Publication(episode, next(slots), 0) for episode, _ in flushed]
            self._held.load_state_dict(state["rows"], sum(counts))
            self.tracker.load_state_dict(state["lanes"] | {"lanes": lanes})
            self._episodes = state["episodes"]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.reward).__name__}, strategy={self.strategy!r}, "
            f"n_sampled_goal={self.n_sampled_goal})"
        )


def _is_added() -> bool:
    """Whether a buffer's ``add`` or ``rb[i] = ...`` writes: nothing but the callers tells that from one of a batch."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_CALLS_BETWEEN):
        if frame is None:
            break
        if frame.f_code in _NOT_EXTEND:
            return True
        frame = frame.f_back
    return False


_CALLS_BETWEEN = 20  # at most; TorchRL 0.14 has four, and one for each Compose in another
_NOT_EXTEND = {
    inspect.unwrap(function).__code__
    for buffer in (ReplayBuffer, TensorDictReplayBuffer)
    for function in (buffer.add, buffer.__setitem__)
}


def _is_dummy(tensordict: TensorDictBase, goals: list[NestedKey]) -> bool:
    """Whether this is the transition of zeros with which collectors set a buffer up that processes share.

    The storage needs it at once. One that an environment gave would make an episode of one step, and do no harm.
    """
    return len(tensordict) == 1 and not any(bool(tensordict.get(key).any()) for key in goals)
