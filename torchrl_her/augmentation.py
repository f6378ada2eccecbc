"""Hindsight at writing time: relabelled copies of each transition are stored."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_her._private import ids_around, set_container_of_buffer
from torchrl_her.checks.report import Report
from torchrl_her.checks.samples import Sample
from torchrl_her.episodes.held_transitions import HeldTransitions
from torchrl_her.episodes.lanes import Lanes
from torchrl_her.episodes.memory import WriteLock, exclusive
from torchrl_her.episodes.write import Write, map_goals
from torchrl_her.goals.draw import Strategies, draw_goals, steps_to_goal
from torchrl_her.goals.names import name_of
from torchrl_her.goals.strategies import AnyStrategy, check_at_least
from torchrl_her.goals.table import GoalTable, Steps, load_table, spread
from torchrl_her.keys import RELABELLED, HERKeys
from torchrl_her.order import Neighbours
from torchrl_her.relabel import GoalMap, Relabelling, Reward, check_saved_by, deep_copy, state_of_copy
from torchrl_her.rewards.returns import Batch

# The step that achieved the goal of a copy, int64 [batch, 1]; -1 for transitions with their original goal.
GOAL_STEP = ("hindsight", "goal_step")
# An episode that nothing continues can end after this number of transitions was written meanwhile.
PATIENCE = 10_000


class HindsightAugmentation(Transform):
    """Hindsight Experience Replay at writing time, as in Algorithm 1 of the paper.

    The transform holds the transitions of an episode back until the episode ends. Then it stores each transition and
    ``n_sampled_goal`` copies of it with other goals, at the root and under ``"next"``, and recomputed rewards. Sampling
    takes 13% to 20% longer than without hindsight (from a ``LazyTensorStorage``), and prioritized replay keeps a
    separate priority for each copy. In comparison, `HERTransform` needs about a quarter of the memory (for
    ``n_sampled_goal=4``), draws new goals in each sample and works with every storage.

    Write with ``rb.extend``, at least two transitions at a time, to a storage with one dimension. A write of a single
    transition looks like ``rb.add``, which can store only one: an episode that it completes waits for the next larger
    (or empty) write. ``rb.add`` and ``rb[i] = ...`` are not supported. They raise an error or, if they cannot be
    distinguished from ``rb.extend``, hold their transition back.

    Stored transitions have two additional entries: ``("hindsight", "relabelled")``, ``bool [batch, 1]``, and
    ``("hindsight", "goal_step")``, ``int64 [batch, 1]``, the step that achieved the new goal in its episode, or -1 for
    a desired goal, such as the original one. Random numbers come from torch's default generator.

    Args:
        reward (TensorDictModule or Callable): as in `HERTransform`. It is called once per write.

    Keyword Args:
        strategy (str, GoalStrategy or Mapping): as in `HERTransform`. Additional goals are stored. With ``"final"``,
            all copies of a transition are equal: pass ``n_sampled_goal=1``. Default: ``"future"``.
        n_sampled_goal (int): the number of copies of each transition, the paper's k, at least 0. Default: 4.
        capacity (int): the number of achieved goals from which `Random` and `PastDesired` draw: those of the episodes
            that ended last; at least ``max_episode_steps`` are kept. Default: 10,000.
        keys (HERKeys): as in `HERTransform`. Padding is not stored. Default: ``HERKeys()``.
        goal_fn (Callable[[Tensor], Tensor], optional): as in `HERTransform`.
        max_episode_steps (int): the number of steps after which an episode ends even without a done flag. It limits
            the memory of transitions that are held back. Default: 1,000.

    Raises:
        ValueError: as in `HERTransform`, and if the written batch does not have exactly one dimension. A refused write
            neither stores nor holds back anything.
        TypeError: if an argument or a written entry has the wrong type.
        KeyError: if written transitions lack an entry.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HindsightAugmentation
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> hindsight = HindsightAugmentation(EnvReward(env))
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.6, beta=0.4, storage=LazyTensorStorage(1000), transform=hindsight
        ... )
        >>> episode = env.rollout(50)  # a complete episode
        >>> len(rb.extend(episode[:30]))  # stored rows
        0
        >>> len(rb.extend(episode[30:]))  # 50 transitions and 4 copies of each
        250
        >>> rb.sample(64)["hindsight", "relabelled"].shape
        torch.Size([64, 1])
    """

    relabels = True  # other transforms use the keys of a transform that does
    set_container = set_container_of_buffer

    def __init__(
        self,
        reward: Reward,
        *,
        strategy: AnyStrategy = "future",
        n_sampled_goal: int = 4,
        capacity: int = 10_000,
        keys: HERKeys = HERKeys(),
        goal_fn: GoalMap | None = None,
        max_episode_steps: int = 1_000,
    ):
        n_sampled_goal = check_at_least(0, "n_sampled_goal", n_sampled_goal)
        max_episode_steps = check_at_least(1, "max_episode_steps", max_episode_steps)
        capacity = max(check_at_least(1, "capacity", capacity), max_episode_steps)
        super().__init__()
        relabelling = self._relabelling = Relabelling(reward, strategy, keys, goal_fn)
        self.reward, self.keys, self.goal_fn = relabelling.reward, relabelling.keys, relabelling.goal_fn
        self._checks = relabelling.make_checks()
        self._neighbours: Neighbours | None = None  # the other transforms of the buffer; None before the first write
        self._lock = WriteLock()
        self._process = os.getpid()  # the process that holds transitions back
        self.n_sampled_goal = n_sampled_goal
        self.capacity = capacity
        self.table: GoalTable | None = None  # None before the first write
        self._held = HeldTransitions(Lanes(max_episode_steps, PATIENCE))
        self._is_shared = False

    @property
    def strategies(self) -> Strategies:
        """The strategy of each goal, by its key. The key of the desired goal is ``"desired_goal"``."""
        return self._relabelling.strategies

    # Writing

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other writers. An error or an interrupt restores the transitions that are held back."""
        held = self._held
        of_held = (held.lanes, "running"), (held, "layout"), (held, "log")
        with exclusive(self._lock, self, *of_held, (self, "table"), (self, "_process")):
            if self._process != os.getpid():
                self._process = os.getpid()
                if self._is_shared:
                    held.drop()
                    self.table = None
            yield

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Hold transitions ``[n]`` back; return the transitions of ended episodes with their copies, or None."""
        neighbours = self._check_neighbours()
        if isinstance(tensordict, list):
            tensordict = torch.stack(tensordict)
        if len(tensordict.batch_size) != 1:
            batch = list(tensordict.batch_size)
            raise ValueError(
                "HindsightAugmentation stores copies of transitions and needs a batch of one dimension, got "
                f"{f'the batch size {batch}' if batch else 'a single transition (rb.add or rb[i] = ...)'}. Use "
                "rb.extend(data.reshape(-1)) and a storage of one dimension. HERTransform works with add and with "
                "storages of several dimensions."
            )
        written, is_dummy = None, False
        if len(tensordict):
            if isinstance(tensordict, LazyStackedTensorDict):
                tensordict = tensordict.contiguous()
            # Goals are replaced when writing, so transforms before and after this one can rewrite copies of them.
            written = Write.read(tensordict, self.keys, self.goal_fn, None if self.table is None else self.table.goals)
            is_dummy = self.table is None and written.is_dummy
            if not is_dummy:
                self._checks.on_write(tensordict, written, neighbours.before + neighbours.after)
            for transform in neighbours.checking:
                transform.check_write(tensordict)
            for transform in neighbours.counting:
                tensordict = transform.count_write(tensordict, is_dummy)
            if is_dummy:  # a collector's dummy must be stored immediately
                written = written._replace(done=np.ones_like(written.done))
        with self._writing():
            if written is not None and len(written.done):
                if self.table is None:
                    self.table = GoalTable.like(written.goals, self.capacity, self._relabelling.apart)
                tracked = self._held.add(written.rows_of(tensordict), written)
                if not is_dummy:
                    self._checks.on_tracked(tensordict, written, tracked)
            if len(tensordict) == 1 and not is_dummy:
                self._held.warn_if_episodes_wait()
                return None
            return self._augment() if len(self._held.log.ended) else None

    def _check_neighbours(self) -> Neighbours:
        if self._neighbours is None or self._neighbours.ids != ids_around(self):
            neighbours = Neighbours.of(self)
            neighbours.check_augmentation()
            self._neighbours = neighbours
        return self._neighbours

    def _augment(self) -> TensorDictBase:
        """Return the transitions of ended episodes, each followed by its copies; they leave the storage together."""
        packed, lengths = self._held.take_ended()
        # Groups of episodes that fit into the goal table.
        group = (np.cumsum(lengths) - lengths) // max(1, self.capacity - lengths.max() + 1)
        groups = np.split(lengths, np.flatnonzero(np.diff(group)) + 1)
        if len(groups) == 1:
            return self._with_copies(packed, lengths)
        rows = packed.split([int(each.sum()) for each in groups])
        return torch.cat([self._with_copies(part.clone(), each) for part, each in zip(rows, groups, strict=True)])

    def _with_copies(self, packed: Tensor, lengths: np.ndarray) -> TensorDictBase:
        """Publish packed episodes, and return their transitions with copies, ``[rows]``.

        ``packed`` is ``int64 [sum(lengths), words]``, and ``lengths``, ``int64 [episodes]``, are the numbers of steps.
        """
        copies, device, relabelling = self.n_sampled_goal, packed.device, self._relabelling
        rows = self._held.unpack(packed)
        table, ids = self._publish(rows, lengths)
        ends = np.cumsum(lengths)
        steps = np.arange(len(rows)) - np.repeat(ends - lengths, lengths)
        own = torch.from_numpy(np.stack([np.repeat(ids, lengths), steps])).to(device)  # [2, n]
        episode, step = own.repeat_interleave(copies, dim=1)
        draw = draw_goals(self.strategies, table, 1.0, episode, step)
        is_kept = torch.ones(len(rows), 1 + copies, dtype=torch.bool, device=device)
        is_kept[:, 1:] = draw.relabelled.view(len(rows), copies)
        chosen, copy = is_kept.nonzero(as_tuple=True)  # for each row, its transition and the number of the copy
        relabelled = (copy > 0).unsqueeze(-1)
        drawn = (chosen * copies + copy - 1).clamp_min(0)  # arbitrary for the originals

        def of_rows(values: Tensor) -> Tensor:
            return values[drawn] if len(values) else values.new_zeros(len(drawn), *values.shape[1:])

        rows = self._held.unpack(packed.index_select(0, chosen))
        stored = {key: rows.get(key) for key in (*relabelling.goal_keys, *relabelling.one_step.replaced_keys)}
        batch = Batch(rows, stored)
        ahead = of_rows(steps_to_goal(draw, episode, step)) if relabelling.reads_steps else None
        goals = [of_rows(each) for each in draw.goals]
        with torch.no_grad():
            relabelling.relabel(batch, goals, relabelled, relabelling.one_step, ahead=ahead)
        goal_step = torch.where(relabelled, of_rows(draw.goal_step).unsqueeze(-1), -1)
        return rows.set(RELABELLED, relabelled).set(GOAL_STEP, goal_step)

    def _publish(self, rows: TensorDictBase, lengths: np.ndarray) -> tuple[GoalTable, np.ndarray]:
        """Add the goals of whole episodes, ``[sum(lengths)]``, to the goal table; return it, and their ids there."""
        desired = rows.get(self.keys.desired_goal)
        outcomes = map_goals(rows.get(self.keys.next_achieved_goal), self.goal_fn).detach().to(desired.dtype)
        table = self.table
        assert table is not None
        table.to(desired.device)
        ids = table.new_episodes(len(lengths)) + np.arange(len(lengths))
        begin, (part, step) = np.zeros_like(ids), spread(np.zeros_like(lengths), lengths)
        window, ended = np.zeros((len(ids), 3), np.int64), np.ones(len(ids), np.bool_)
        table.append(Steps(name_of(ids[part], step), part, ids, begin, lengths, ended, window), outcomes)
        if self._relabelling.apart:
            first = torch.from_numpy(np.cumsum(lengths) - lengths).to(desired.device)
            self._relabelling.keep_first_goals(
                table, ids, rows.select(self.keys.achieved_goal, self.keys.desired_goal)[first]
            )
        return table, ids

    def flush(self) -> TensorDict:
        """End the running episodes. The next write begins new episodes.

        The transitions and their copies are stored by the next write of several transitions. To store them immediately,
        extend the buffer with the empty batch that this method returns: ``rb.extend(hindsight.flush())``.

        Returns:
            TensorDict: an empty batch ``[0]`` with the entries of the last write; before the first, without entries.

        Examples:
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HindsightAugmentation
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> hindsight = HindsightAugmentation(EnvReward(env))
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=hindsight)
            >>> _ = rb.extend(env.rollout(30))  # the episode would end after 50 steps
            >>> hindsight.held_back
            30
            >>> len(rb.extend(hindsight.flush()))
            150
        """
        with self._writing():
            self._held.flush()
            return self._held.empty_batch()

    def clear(self) -> None:
        """Drop the running episodes and the goals of past episodes. Call it together with ``rb.empty()``.

        Examples:
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HindsightAugmentation
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> hindsight = HindsightAugmentation(EnvReward(env))
            >>> hindsight.inv(env.rollout(30))  # the buffer calls it in extend
            >>> hindsight.clear()
            >>> hindsight.held_back
            0
        """
        with self._writing():
            self._held.drop()
            if self.table is not None:
                self.table.clear()

    @property
    def held_back(self) -> int:
        """The number (int) of transitions that wait for the end of their episode or for the next write.

        Examples:
            >>> from torchrl_her import HindsightAugmentation, SparseReward
            >>> HindsightAugmentation(SparseReward(0.05)).held_back
            0
        """
        return len(self._held)

    # Sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled transitions unchanged."""
        if isinstance(tensordict, TensorDictBase):
            relabelled = tensordict.get(RELABELLED, None)
            if relabelled is not None:
                self._checks.on_sample(Sample(tensordict, relabelled))
        return tensordict

    def report(self) -> Report:
        """Summarize the transitions that were written and sampled so far, as `HERTransform.report` does.

        Returns:
            Report: numbers of episodes and transitions, shares of relabelled transitions, and rewards.

        Examples:
            >>> from torchrl_her import HindsightAugmentation, SparseReward
            >>> HindsightAugmentation(SparseReward(0.05)).report().transitions
            0
        """
        her_ratio = self.n_sampled_goal / (self.n_sampled_goal + 1)
        return self._checks.report(self, her_ratio, self._held.lanes)

    # Processes, saving

    def share_memory_(self) -> HindsightAugmentation:
        """Record that processes share the buffer. TorchRL calls this.

        Each process holds its own transitions back, and draws goals from its own episodes.
        """
        self._is_shared = True
        return self

    def clone(self) -> HindsightAugmentation:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> HindsightAugmentation:
        return deep_copy(self, state_of_copy(super().__getstate__()) | {"_is_shared": False}, memo)

    def __getstate__(self) -> dict[str, Any]:
        state = state_of_copy(super().__getstate__())
        if self._is_shared:  # pickled for another process, both tables would share memory, and overwrite each other
            state |= {"_held": HeldTransitions(self._held.lanes.without_episodes()), "table": None}
        return state

    def get_extra_state(self) -> dict[str, Any]:
        """Return the transitions that are held back and the goal table for ``state_dict``."""
        with self._writing():
            return {
                "held": self._held.state_dict(),
                "table": None if self.table is None else self.table.state_dict(),
            }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state` of a transform with the same goals and capacity.

        Raises:
            ValueError: if goals, capacity or strategies differ from the saved ones, or if another transform saved it.
        """
        check_saved_by("HindsightAugmentation", state)
        with self._writing():
            self.table = load_table(self.table, state["table"], self.capacity, self._relabelling.apart)
            self._held.load_state_dict(state["held"])

    def __repr__(self) -> str:
        """Return the arguments that differ from the defaults."""
        others = {"max_episode_steps": self._held.lanes.max_episode_steps}
        return self._relabelling.describe(HindsightAugmentation, vars(self) | others)
