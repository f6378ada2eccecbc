"""Hindsight when transitions are written: each is stored as it was, and again with new goals."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from torchrl_her.episodes.tracker import EndedEpisodes, EpisodeGoals
from torchrl_her.episodes.transitions import WrittenTransitions, map_goals
from torchrl_her.goals.reservoir import GoalReservoir
from torchrl_her.goals.strategies import GoalStrategy, StrategyInput, check_rows
from torchrl_her.keys import HERKeys
from torchrl_her.neighbours import Neighbours
from torchrl_her.relabel import RELABELLED, RelabelTransform, check_at_least_one

# The step whose achieved goal a copy was given, int64 [batch, 1]; -1 for transitions as they were.
GOAL_STEP = ("hindsight", "goal_step")
# So many transitions are written to others before a lane that nothing continues is taken for ended.
PATIENCE = 10_000


class HindsightAugmentation(RelabelTransform):
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
        n_sampled_goal = check_at_least_one("n_sampled_goal", n_sampled_goal)
        max_episode_steps = check_at_least_one("max_episode_steps", max_episode_steps)
        reservoir_size = check_at_least_one("reservoir_size", reservoir_size)
        keys = HERKeys.make(achieved_goal_key, desired_goal_key, reward_key, done_key, trajectory_key, mask_key)
        super().__init__(reward, strategy, keys, goal_fn, EndedEpisodes(PATIENCE, max_episode_steps))
        self.n_sampled_goal = n_sampled_goal
        self.reservoir = None if self.strategy.same_episode else GoalReservoir(reservoir_size)
        self._held = HeldRows()
        self._episodes = 0  # how many began
        self._flushed: list[EpisodeGoals] = []  # episodes that ended between two writes
        self._goal: Tensor | None = None  # one of those that were written
        self._is_shared = False

    # Writing

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Hold transitions ``[n]`` back, and return those of episodes that are over, with their copies, if any are."""
        self._check_neighbours()
        if isinstance(tensordict, list):
            tensordict = torch.stack(tensordict)
        check_extend(tensordict.batch_size, _is_added())
        rows, written = None, None
        if tensordict.batch_size.numel():
            rows, written = self._read_rows(tensordict)
        with self._lock:
            self._reset_after_fork()
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

    def _check_neighbours(self) -> None:
        order = Neighbours.around(self)
        if order != self._order:
            order.check_augmentation(RelabelTransform)
            self._order = order

    def _read_rows(self, tensordict: TensorDictBase) -> tuple[TensorDictBase | None, WrittenTransitions | None]:
        """Return the transitions that count, if any do, and what the tracker needs of them."""
        if isinstance(tensordict, LazyStackedTensorDict):
            tensordict = tensordict.contiguous()
        everywhere = Neighbours([], [*self._order.before, *self._order.after])
        written, kept = self._read(tensordict, self._goal, everywhere.written_after())
        goals = [*self._goal_keys, self.keys.achieved, self.keys.next_achieved]
        if self._goal is None and _is_dummy(tensordict, goals):
            written = written._replace(done=np.ones(1, dtype=bool))
        if kept is not None:
            tensordict = tensordict[torch.from_numpy(kept).to(written.goals.device)]
        return (tensordict, written) if len(tensordict) else (None, None)

    def _augment(self, rows: TensorDictBase, places: np.ndarray, ended: list[EpisodeGoals]) -> TensorDictBase:
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
            self._reset_after_fork()
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

    def _reset_after_fork(self) -> None:
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
            self._reset_after_fork()
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
            self._reset_after_fork()
            if self.reservoir is not None and state["reservoir"] is not None:
                self.reservoir.load_state_dict(state["reservoir"])
            saved, flushed = state["lanes"]["lanes"], state["flushed"]
            counts = [len(goals) for goals in (*(lane["goals"] for lane in saved), *(goals for _, goals in flushed))]
            slots = iter(torch.arange(sum(counts)).split(counts))
            lanes = [lane | {"goals": next(slots)} for lane in saved]
            self._flushed = [EpisodeGoals(episode, next(slots), 0) for episode, _ in flushed]
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


class Drawn(NamedTuple):
    """The goals of copies."""

    goals: Tensor  # [n, copies, *goal]
    steps: Tensor  # int64 [n, copies], the steps that achieved them
    left_out: Tensor | None  # bool [n, copies], which got none, since the strategy left the episode; None for none


def draw_goals(
    strategy: GoalStrategy,
    goals: Tensor,
    episodes: Sequence[int],
    lengths: Sequence[int],
    copies: int,
    reservoir: GoalReservoir | None,
) -> Drawn:
    """Draw goals for the copies of each transition of ended episodes.

    Args:
        strategy: chooses among the goals of the episodes, which it sees as a goal table.
        goals: what the steps achieved, ``[n, *goal]``, episode after episode.
        episodes: the ids of the episodes.
        lengths: how many steps each has.
        copies: how many goals each transition gets.
        reservoir: the goals of past episodes, for a strategy that draws from them; they come first in that table.
    """
    owners, steps, starts, of_length = _lay_out(episodes, lengths, goals.device)
    count, size = len(goals), torch.tensor(len(goals), device=goals.device)
    if reservoir is not None:
        reservoir.add(goals, owners, steps)
        starts, size = starts + reservoir.size, torch.tensor(reservoir.filled, device=goals.device)
        goals = torch.cat([reservoir.goals_like(goals), goals])
        owners = torch.cat([reservoir.episodes, owners])
        steps = torch.cat([reservoir.steps, steps])
    columns = torch.stack([owners[-count:], steps[-count:], starts, of_length])
    episode, step, start, length = columns.repeat_interleave(copies, dim=1)
    choice = StrategyInput(episode, step, start, length, owners, size)
    rows = strategy.select(choice)
    check_rows(rows, step, strategy)
    outside = (rows < start) | (rows >= start + length) if strategy.same_episode else None
    rows = rows % len(goals)
    is_wrong = owners.index_select(0, rows) < 0 if outside is None else outside
    return Drawn(
        goals.index_select(0, rows).unflatten(0, (count, copies)),
        steps.index_select(0, rows).view(count, copies),
        is_wrong.view(count, copies) if is_wrong.any() else None,
    )


def _lay_out(episodes: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the episode, the step, the place of the first step and the length for each step: ``int64 [4, n]``."""
    ends = np.cumsum(lengths)
    columns = np.repeat(np.stack([episodes, ends, ends - lengths, lengths]), lengths, axis=1)
    columns[1] = np.arange(len(columns[1])) - columns[2]
    return torch.from_numpy(columns).to(device)


class HeldRows:
    """Transitions by slot: each gets one when it arrives, and gives it back when it leaves.

    Those that leave in the write in which they arrived are never copied into the store. It grows to what is held at
    most at a time, and by as much at least as it holds, so that growing costs nothing on the average.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self, entries: dict | None = None) -> None:
        self._entries = entries  # the shapes and dtypes of what is written, by key
        self._store: TensorDictBase | None = None  # [slots]
        self._free = np.empty(0, dtype=np.int64)
        # Which of the arriving transitions has the slot, -1 for none.
        self._arrival = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._arrival) - len(self._free)

    def admit(self, rows: TensorDictBase) -> None:
        """Check that transitions can be held together with those that are held.

        Raises:
            ValueError: if they have other entries.
        """
        entries = check_same_entries(rows, self._entries if len(self) else None)
        if entries != self._entries:
            self._clear(entries)
        elif self._store is not None:
            self._store = self._store.to(device_of(rows))  # loaded from another device

    def assign(self, count: int) -> np.ndarray:
        """Return slots ``int64 [count]`` for transitions that arrive."""
        if len(self._free) < count:
            more = max(count - len(self._free), len(self._arrival))
            self._free = np.concatenate([self._free, np.arange(more) + len(self._arrival)])
            self._arrival = np.concatenate([self._arrival, np.full(more, -1)])
        slots, self._free = self._free[:count], self._free[count:]
        return slots

    def exchange(
        self, rows: TensorDictBase | None, arriving: np.ndarray, leaving: np.ndarray
    ) -> tuple[TensorDictBase | None, np.ndarray]:
        """Take in ``rows [n]`` with the slots ``arriving [n]``, and give out those with the slots ``leaving [m]``.

        Returns:
            A tensordict with all that leave, and their places in it, ``int64 [m]``.
        """
        self._arrival[arriving] = np.arange(len(arriving))
        places = self._arrival[leaving]
        self._arrival[arriving] = -1
        stays = np.ones(len(arriving), dtype=bool)
        stays[places[places >= 0]] = False
        was_held = places < 0
        given = rows
        if was_held.any():
            held = gather(self._store, torch.from_numpy(leaving[was_held]))
            places[was_held] = np.arange(len(held)) + len(arriving)
            given = held if rows is None else torch.cat([rows, held])
        if stays.any():
            self._put(arriving[stays], gather(rows, torch.from_numpy(stays.nonzero()[0])))
        self._free = np.concatenate([leaving, self._free])
        return given, places

    def _put(self, slots: np.ndarray, rows: TensorDictBase) -> None:
        store = gather(rows, torch.zeros(0, dtype=torch.int64)) if self._store is None else self._store
        if missing := len(self._arrival) - len(store):
            store = torch.cat([store, gather(rows, torch.zeros(missing, dtype=torch.int64))])
        store[torch.from_numpy(slots)] = rows
        self._store = store

    def none(self) -> TensorDict:
        """Return a tensordict ``[0]`` with the entries of what was held last."""
        if self._store is None:
            return TensorDict(batch_size=[0])
        return gather(self._store, torch.zeros(0, dtype=torch.int64))

    def state_dict(self, slots: np.ndarray) -> dict[str, Any]:
        """Return what is held in slots, entry by entry."""
        if self._store is None:
            return {}
        rows = gather(self._store, torch.from_numpy(slots))
        return dict(rows.items(include_nested=True, leaves_only=True))

    def load_state_dict(self, state: dict[str, Any], count: int) -> None:
        """Hold ``count`` transitions, and nothing else, in the slots from 0 on."""
        self._clear()
        if count:
            rows = TensorDict(batch_size=[count])
            for key, value in state.items():
                rows.set(key, value)
            self.admit(rows)
            self._put(self.assign(count), rows)


def gather(rows: TensorDictBase, index: Tensor) -> TensorDict:
    """Return the transitions at ``index``, ``int64 [n]``; faster than ``rows[index]``, and storages store it faster."""
    device = device_of(rows)
    return TensorDict(_gather(rows, index.to(device)), batch_size=index.shape, device=device)


def device_of(rows: TensorDictBase) -> torch.device:
    """Return where the transitions are."""
    return next(iter(rows.values(include_nested=True, leaves_only=True))).device


def _gather(rows: TensorDictBase, index: Tensor) -> dict[str, Any]:
    return {
        key: _gather(value, index)
        if isinstance(value, TensorDictBase) and value.batch_dims == 1
        else value.index_select(0, index)
        if isinstance(value, Tensor) and value.device == index.device
        else value[index]
        for key, value in rows.items()
    }


def check_extend(batch: torch.Size, is_added: bool) -> None:
    """Check that several transitions can take the place of those that are written."""
    if is_added or len(batch) != 1:
        what = "one transition is added or set" if is_added or not batch else f"they come as {list(batch)}"
        raise ValueError(
            f"HindsightAugmentation writes more transitions than it is given, and {what}: use "
            "rb.extend(data.reshape(-1)), with a storage of one dimension. HERTransform works with add, and with "
            "storages of several dimensions."
        )


def check_same_entries(tensordict: TensorDictBase, before: dict | None) -> dict:
    """Check that transitions have the entries of those before, so that they can be held back together."""
    leaves = list(tensordict.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
    if other := [key for key, value in leaves if is_non_tensor(value)]:
        raise TypeError(
            f"HindsightAugmentation holds transitions back and copies them, which takes tensors, and {other} are none: "
            "exclude() them from what is written, or use HERTransform."
        )
    entries = {key: (value.shape[1:], value.dtype) for key, value in leaves}
    if before is not None and entries != before:
        differing = [key for key in {**before, **entries} if before.get(key) != entries.get(key)]
        told = ", ".join(f"{key!r}: {before.get(key)} before, {entries.get(key)} now" for key in differing)
        raise ValueError(
            f"These transitions have other entries than those that were written before ({told}), and episodes of both "
            "are held back: write the same entries each time."
        )
    return entries
