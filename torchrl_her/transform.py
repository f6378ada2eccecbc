"""Hindsight at sampling time."""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec
from torchrl.envs import Transform

from torchrl_her._private import ids_around, set_container_of_buffer
from torchrl_her.checks.checks import Checks
from torchrl_her.checks.report import Report
from torchrl_her.checks.samples import Sample
from torchrl_her.episodes.memory import Episodes
from torchrl_her.episodes.write import Write
from torchrl_her.goals.draw import Strategies, check_her_ratio, draw_for_sequences, draw_goals, steps_to_goal
from torchrl_her.goals.names import STAMP, read_stamps, split_name
from torchrl_her.goals.strategies import AnyStrategy, check_at_least
from torchrl_her.goals.table import to_device
from torchrl_her.keys import MEMBER, RELABELLED, STEPS_TO_GOAL, HERKeys
from torchrl_her.offline.adopt import AdoptedData, DataSet, MissingEntries, add_goals, check_missing
from torchrl_her.order import Neighbours
from torchrl_her.relabel import GoalMap, Relabelling, Reward, check_saved_by, deep_copy, state_of_copy
from torchrl_her.rewards.returns import WINDOW_STEPS, Batch, NStepReward, OneStepReward, check_n_step_keys


class HERTransform(Transform):
    """Hindsight Experience Replay at sampling time, for any replay buffer.

    Each write stamps the transitions with their episode and step, and keeps their achieved goals. Each sample relabels
    a share of the transitions: an achieved goal, by default of the same episode, replaces the desired goal at the root
    and under ``"next"``, and the reward is recomputed. Stored transitions do not change. The algorithm is described by
    [Andrychowicz et al. (2017)](https://arxiv.org/abs/1707.01495).

    Flatten data ``[B, T]`` for a storage with one dimension: ``rb.extend(data.reshape(-1))``. Otherwise, each row holds
    T transitions, and a sample of 256 rows has the batch size ``[256, T]``.

    Samples have an additional entry ``("hindsight", "relabelled")``, ``bool [*batch, 1]``. Random numbers come from
    torch's default generator, so ``torch.manual_seed`` makes samples reproducible.

    Args:
        reward (TensorDictModule, Callable or None): computes the reward of relabelled transitions. A module, such as
            `EnvReward`, `SparseReward` or `GoalReward`, reads the transitions and writes ``("next", "reward")`` and,
            if it can, ``("next", "terminated")``. If it has a true attribute ``recompute_all``, as with
            ``GoalReward(..., recompute_all=True)``, the reward of transitions that are not relabelled is recomputed
            too. A function maps achieved and desired goals, ``[batch, *goal]`` each, to rewards ``[batch]``. With
            None, only goals are relabelled, as contrastive RL and cloning need: rewards and done flags stay as they
            are stored, and transitions may have no reward.

    Keyword Args:
        strategy (str, GoalStrategy or Mapping): selects the step whose achieved goal becomes the desired goal:
            ``"future"``, ``"final"``, ``"episode"``, ``"random"``, ``"current"``, ``"past_desired"`` or a
            `GoalStrategy` such as `Geometric` or `Mixture`. For additional goals, pass several strategies by key:
            ``{"desired_goal": "future", "actor_goal": "final"}``. The name ``"desired_goal"`` is required and means the
            desired goal, whatever its key is. Each other key gets its own goal, at the root and under ``"next"``, which
            does not affect the reward. If a transition is not relabelled, its additional goals equal its desired goal.
            Default: ``"future"``.
        her_ratio (float): the probability that a transition is relabelled, from 0 to 1. The paper's k goals per
            transition correspond to k / (k + 1). Default: 0.8.
        capacity (int): the number of achieved goals to keep. Pass the number of transitions that the storage can hold.
            Default: 1,000,000.
        keys (HERKeys): the keys of the entries. Default: ``HERKeys()``.
        goal_fn (Callable[[Tensor], Tensor], optional): maps the entry of the achieved goal, ``[batch, *state]``, to
            goals ``[batch, *goal]``. By default, the entry is the goal.
        goal_spec (TensorSpec, optional): the spec of a single goal, ``env.observation_spec["achieved_goal"]`` of one
            environment. Required for buffers with ``shared=True`` and storages with ``shared_init=True``. By default,
            the first write determines it.
        max_episode_steps (int, optional): the number of steps after which an episode ends even without a done flag.
            Default: no limit.
        sequence_length (int, optional): the number of transitions in each sampled sequence, the ``slice_len`` of a
            ``SliceSampler``. All transitions of a sequence get the same goal, which is drawn for the last one.
            Transitions that belong to another episode than the last one keep their goal.
        info (bool): whether samples have an entry ``("hindsight", "steps_to_goal")``, ``int64 [*batch, 1]``: the number
            of steps from a transition to the one that achieved its goal. It is 0 if the transition achieved the goal
            itself (with n-step returns, if the first step of the window did), and -1 if the goal comes from an earlier
            step or another episode, or if the transition is not relabelled. (In an adopted data set without desired
            goals, a transition that is not relabelled gets the goal that it achieved itself, so the number is 0.) If
            the strategy is a `Mixture`, samples also have ``("hindsight", "member")``, ``int64 [*batch, 1]``: the index
            of the member that selected the goal, or -1 if the transition is not relabelled. Default: False.

    Raises:
        ValueError: if an argument is out of range, if the transform is added to an environment, if another transform of
            the buffer would undo the relabelling, if written goals have the wrong shape, the wrong dtype or a NaN, or
            if a reward or a flag has no last dimension. A refused write stores nothing. When sampling, if the size of
            the batch is not a multiple of ``sequence_length``.
        TypeError: if an argument or a written entry has the wrong type.
        KeyError: if written or sampled transitions lack an entry.
        RuntimeError: if the goal table does not fit into memory, if processes share the buffer but ``goal_spec`` is
            missing, if transitions are written after `adopt`, if a writer waits for another one for more than a minute,
            or if samples are on another device than a shared goal table.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> hindsight = HERTransform(EnvReward(env), capacity=1000)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=hindsight, batch_size=64)
        >>> _ = rb.extend(env.rollout(50))
        >>> rb.sample()["hindsight", "relabelled"].shape
        torch.Size([64, 1])
    """

    relabels = True  # other transforms use the keys of a transform that does
    identifies_episodes = True  # MovementPriority needs the stamps of a transform that does
    requires_shared_write_state = True  # TorchRL then calls share_memory_ for buffers that processes share
    set_container = set_container_of_buffer

    def __init__(
        self,
        reward: Reward,
        *,
        strategy: AnyStrategy = "future",
        her_ratio: float = 0.8,
        capacity: int = 1_000_000,
        keys: HERKeys = HERKeys(),
        goal_fn: GoalMap | None = None,
        goal_spec: TensorSpec | None = None,
        max_episode_steps: int | None = None,
        sequence_length: int | None = None,
        info: bool = False,
    ):
        capacity = check_at_least(1, "capacity", capacity)
        if max_episode_steps is not None:
            max_episode_steps = check_at_least(1, "max_episode_steps", max_episode_steps)
        if sequence_length is not None:
            sequence_length = check_at_least(1, "sequence_length", sequence_length)
        super().__init__()
        relabelling = self._relabelling = Relabelling(reward, strategy, keys, goal_fn)
        self.reward, self.keys, self.goal_fn = relabelling.reward, relabelling.keys, relabelling.goal_fn
        self.info = bool(info)
        self.her_ratio = check_her_ratio(her_ratio)
        self.capacity, self.sequence_length = capacity, sequence_length
        self._kind_of_goal_spec = None if goal_spec is None else type(goal_spec)
        self._episodes = Episodes(capacity, relabelling.apart, goal_spec=goal_spec, max_episode_steps=max_episode_steps)
        self._checks = self._make_checks()
        self._was_pickled = False
        self._adopted: AdoptedData | None = None
        self._n_step: NStepReward | None = None  # set if a MultiStepTransform comes before
        self._longest_window = 1  # the largest number of steps that a stored transition spans
        self._neighbours: Neighbours | None = None  # the other transforms of the buffer; None before they are checked
        # The entries that only samples have.
        self._added_keys = [*relabelling.extra_replaced, RELABELLED]
        if self.info or relabelling.reads_steps:
            self._added_keys += [STEPS_TO_GOAL, MEMBER]

    @property
    def strategies(self) -> Strategies:
        """The strategy of each goal, by its key. The key of the desired goal is ``"desired_goal"``."""
        return self._relabelling.strategies

    # Writing

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stamp transitions ``[*batch]`` with their episode and step, and keep their achieved goals."""
        self._check_no_data_set("a write would overwrite it (its files, if it is memory-mapped)")
        neighbours = self._check_neighbours()
        if isinstance(tensordict, list):
            tensordict = torch.stack(tensordict)
        batch, written, is_dummy = tensordict.batch_size, None, False
        if batch.numel():
            later = neighbours.after if self.her_ratio else None
            written = Write.read(tensordict, self.keys, self.goal_fn, self._episodes.goals)
            is_dummy = written.is_dummy and not self.table_size
            if is_dummy:
                self._episodes.table_like(written.goals)
            else:
                self._checks.on_write(tensordict, written, later)
            for transform in neighbours.checking:
                transform.check_write(tensordict)
        for transform in neighbours.counting:
            tensordict = transform.count_write(tensordict, is_dummy)
        n_step = None if neighbours.multi_step is None else self._n_step
        if n_step is not None:
            n_step.keep_flags(tensordict)
        if written is None or is_dummy:
            return tensordict.set(STAMP, torch.zeros(batch, dtype=torch.int64, device=tensordict.device))
        stamps = to_device(self._append(tensordict, written, n_step), written.goals.device)
        return tensordict.set(STAMP, stamps.view(batch))

    def _append(self, tensordict: TensorDictBase, written: Write, n_step: NStepReward | None) -> np.ndarray:
        """Add transitions ``[*batch]`` to the episodes; return their stamps, ``int64 [rows]``."""
        with self._writing():
            if n_step is not None:
                n_step = copy.copy(n_step)  # an interrupted write changes nothing
                n_step.check_write(written, tensordict.batch_size)
                self._longest_window = max(self._longest_window, n_step.multi_step.n_steps)
            tracked, table = self._episodes.append(written), self._episodes.table
            assert table is not None
            if self._relabelling.apart:
                self._relabelling.keep_apart(table, tensordict, written, tracked.steps)
            self._checks.on_tracked(tensordict, written, tracked)
            if n_step is not None:
                self._n_step = n_step
        return written.with_padding(tracked.steps.name)

    def _writing(self) -> AbstractContextManager[None]:
        """Exclude other writers. An error or an interrupt restores the running episodes."""
        return self._episodes.writing(self._forget_waiting_steps)

    def _check_neighbours(self) -> Neighbours:
        """Return the other transforms of the buffer, and check them if they changed."""
        neighbours = self._neighbours
        if neighbours is not None and neighbours.ids == ids_around(self):
            return neighbours
        neighbours, one_step = Neighbours.of(self), self._relabelling.one_step
        if self._adopted is not None:
            self._adopted.check_neighbours(neighbours)
        replaced = {*self._relabelling.goal_keys, *one_step.replaced_keys, *self._added_keys}
        neighbours.check_hindsight(replaced, self.keys)
        multi_step = neighbours.multi_step
        if multi_step is not None:
            if self._relabelling.relabels_only_goals:
                raise ValueError(
                    "MultiStepTransform sums the rewards of the original goals, and HERTransform(None) does not "
                    "recompute them: pass a reward to HERTransform, or remove MultiStepTransform."
                )
            check_n_step_keys(multi_step, self.keys)
            if self._n_step is None:
                self._n_step = NStepReward(one_step, self.goal_fn is not None, multi_step)
            self._n_step.multi_step = multi_step  # a copy of the buffer has its own MultiStepTransform
        self._neighbours = neighbours
        return neighbours

    def _make_checks(self, *, compares: bool = True) -> Checks:
        relabels_all = self._relabelling.reads_steps and self.her_ratio == 1
        return self._relabelling.make_checks(compares=compares and not relabels_all)

    def clear(self) -> None:
        """Drop the running episodes and all goals. Call it together with ``rb.empty()``.

        Raises:
            RuntimeError: if the transform has adopted a data set.

        Examples:
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> her = HERTransform(EnvReward(env), capacity=1000)
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her)
            >>> _ = rb.extend(env.rollout(50))
            >>> rb.empty()
            >>> her.clear()
            >>> her.report().table_size
            0
        """
        self._check_no_data_set("its goals would be lost")
        with self._writing():
            self._forget_waiting_steps()
            self._episodes.clear()

    def flush(self) -> None:
        """End the running episodes. The next write begins new episodes.

        Call it if environments are reset without a done flag, for example after loading. Steps that wait in a
        ``MultiStepTransform`` because their windows are incomplete are dropped.

        Examples:
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> her = HERTransform(EnvReward(env), capacity=1000)
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her)
            >>> _ = rb.extend(env.rollout(30))  # the episode would end after 50 steps
            >>> her.report().running
            1
            >>> her.flush()
            >>> her.report().running
            0
        """
        with self._writing():
            self._forget_waiting_steps()
            self._episodes.flush()

    def _forget_waiting_steps(self) -> None:
        if self._n_step is not None:
            self._n_step.flush()

    def adopt(self, data: TensorDictBase) -> TensorDictBase:
        """Prepare the transitions of a data set for sampling with hindsight, without copying them.

        The data set is read in pieces: its goals fill the goal table, and its transitions are checked as in a write. An
        episode ends at a done flag, at the last transition of its trajectory id, at the end of its row ``[..., T]``, or
        at the end of the data set. Transitions of several trajectory ids may alternate.

        If the data set has no desired goals, ``her_ratio=1`` is required. Sampling then creates desired goals and
        rewards, and also ``terminated`` if the reward module writes it. A transition that cannot be relabelled,
        such as padding, gets its own outcome as its goal. If only the rewards are missing, the reward module computes
        all of them.

        Afterwards, writing to the transform is an error. Put new transitions into a second buffer, and combine both
        buffers with ``ReplayBufferEnsemble``.

        Args:
            data (TensorDictBase): transitions ``[N]`` in the order of collection, or ``[..., T]`` with time as the last
                dimension; in memory or memory-mapped, on any device. The data set is not modified.

        Returns:
            TensorDictBase: a shallow copy of ``data``, ``[*batch]``, that shares all entries and adds
                ``"hindsight_stamp"``, ``int64 [*batch]``. Pass it to ``TensorStorage``, flattened with
                ``.reshape(-1)`` if it has several dimensions. Otherwise, each row holds T transitions, and a sample of
                256 rows has the batch size ``[256, T]``.

        Raises:
            ValueError: if ``capacity`` is smaller than the data set; if the transform has adopted, written, loaded or
                shared transitions before; if desired goals are missing and ``her_ratio < 1``; or if a write would
                refuse the transitions. The transform is then unchanged.
            KeyError: if an entry is missing.
            TypeError: if ``data`` is not a TensorDict, or an entry is not a tensor.

        Examples:
            >>> import torch
            >>> from torchrl.data import TensorDictReplayBuffer, TensorStorage
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> data = torch.cat([env.rollout(50) for _ in range(10)])
            >>> her = HERTransform(EnvReward(env), capacity=len(data))
            >>> rb = TensorDictReplayBuffer(storage=TensorStorage(her.adopt(data)), transform=her, batch_size=64)
            >>> rb.sample()["hindsight", "relabelled"].any()
            tensor(True)
        """
        self._check_untouched()
        data_set = DataSet(data, self.keys, self.goal_fn)
        missing = data_set.missing
        check_missing(missing, self._relabelling, self.her_ratio)
        checks = self._make_checks(compares=not any(missing))
        episodes = self._episodes.empty_like(data_set.count)
        adopted = data_set.with_stamps(add_goals(data_set, episodes, self._relabelling, checks))
        to_search = data_set.rows_to_search() if self.her_ratio and not missing.goals else None
        self._episodes, self._checks = episodes, checks
        self._adopted = AdoptedData(missing, self._relabelling, to_search)
        self._neighbours = None  # the next sample checks the other transforms
        return adopted

    def _check_untouched(self) -> None:
        if self._adopted is not None:
            raise ValueError("This HERTransform has already adopted a data set: create another one for each data set.")
        episodes = self._episodes
        table = episodes.table
        if table is not None and table.is_shared:
            raise ValueError("Processes already share the goal table: call adopt() before you create the buffer.")
        if episodes.lanes.running is not None or (table is not None and table.rows_used):
            raise ValueError(
                "adopt() needs an empty goal table, but transitions were written or loaded through this HERTransform: "
                "create another one for the data set, and combine both buffers with ReplayBufferEnsemble."
            )

    def _check_no_data_set(self, action: str) -> None:
        """Raise an error if a data set was adopted; ``action`` says how it would be lost."""
        if self._adopted is not None:
            raise RuntimeError(
                f"This HERTransform has adopted a data set, and {action}. Write new transitions to a second buffer "
                "with its own HERTransform, and sample from ReplayBufferEnsemble(data_buffer, new_buffer)."
            )

    # Sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled transitions ``[*batch]``, a share of them relabelled. The input is not modified."""
        if isinstance(tensordict, list):  # an ensemble of list storages transforms its samples before stacking them
            return list(self.forward(torch.stack(tensordict)).unbind(0))
        if not torch.compiler.is_compiling():
            self._check_neighbours()
        relabelling, her_ratio = self._relabelling, self.her_ratio
        rewards = self._rewards_of(tensordict)
        episode, step = split_name(read_stamps(tensordict))
        batch = self._unpack(tensordict, rewards, episode, step)
        table = self._episodes.table_for(batch.stored[self.keys.desired_goal], len(tensordict.batch_size))
        if isinstance(rewards, NStepReward):
            rewards.read_goals(batch, table, episode, step, self._longest_window)
        available = batch.available
        given = relabelling.strategies, table, her_ratio, episode, step
        if self.sequence_length is None:
            counted = draw = draw_goals(*given)
            is_relabelled = draw.relabelled if available is True else draw.relabelled & available
        else:  # the report counts sequences
            counted, draw = draw_for_sequences(*given, self.sequence_length)
            whole = (~draw.relabelled | available).view(-1, self.sequence_length).all(1)
            is_relabelled = draw.relabelled & whole.repeat_interleave(self.sequence_length)
        relabelled = is_relabelled.view(*tensordict.batch_size, 1)
        relabelling.relabel(
            batch,
            draw.goals,
            relabelled,
            rewards,
            ahead=steps_to_goal(draw, episode, step) if self.info or relabelling.reads_steps else None,
            keeps_ahead=self.info,
            creates_goals=self._adopted is not None and self._adopted.missing.goals,
        )
        if self.info and draw.member is not None:
            batch.data.set(MEMBER, torch.where(relabelled, draw.member.view_as(relabelled), -1))
        has_returns = rewards is not relabelling.one_step
        self._checks.on_sample(Sample(batch.data, relabelled, counted if her_ratio else None, has_returns))
        return batch.data.set(RELABELLED, relabelled)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Check the other transforms of the buffer, then compile sampling with ``torch.compile``.

        On a CPU, this saves 19% to 27% of the time of ``sample(256)``, after some seconds of compilation.

        Args:
            *args: passed to ``torch.compile``.
            **kwargs: passed to ``torch.compile``.

        Raises:
            ValueError: if another transform of the buffer would undo the relabelling.

        Examples:
            >>> from torchrl_her import HERTransform, SparseReward
            >>> her = HERTransform(SparseReward(0.05), capacity=1000)
            >>> her.compile(dynamic=True)
        """
        self._check_neighbours()
        super().compile(*args, **kwargs)

    def random_goals(self, count: int) -> Tensor | None:
        """Return goals that were achieved at random steps, uniformly over the goal table.

        Args:
            count (int): the number of goals.

        Returns:
            Tensor | None: the goals, ``[count, *goal]``; the same goal can occur several times. None if there are none
                yet.

        Examples:
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> her = HERTransform(EnvReward(env), capacity=1000)
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her)
            >>> _ = rb.extend(env.rollout(50))
            >>> her.random_goals(8).shape
            torch.Size([8, 2])
        """
        return self._episodes.random_goals(count)

    @property
    def table_size(self) -> int:
        """The number (int) of goals in the goal table."""
        return self._episodes.table_size

    @property
    def is_up_to_date(self) -> bool:
        """Whether goals that are written now reach this object: not in a forked process or a copy without a buffer."""
        is_alone = self._was_pickled and not ids_around(self)
        return self._episodes.lock.is_shared or (self._episodes.is_in_its_process and not is_alone)

    def report(self) -> Report:
        """Summarize the transitions that were written and sampled so far.

        Each process counts its own writes and samples. ``print(report)`` shows all numbers.

        Returns:
            Report: numbers of episodes and transitions, shares of relabelled transitions, and rewards.

        Examples:
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> from torchrl.envs import GymEnv
            >>> import torchrl_her.envs
            >>> from torchrl_her import EnvReward, HERTransform
            >>> env = GymEnv("torchrl_her/PointReach-v0")
            >>> her = HERTransform(EnvReward(env), capacity=1000)
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her)
            >>> _ = rb.extend(env.rollout(50))
            >>> report = her.report()
            >>> report.episodes, report.transitions, report.mean_length
            (1, 50, 50.0)
        """
        return self._checks.report(self, self.her_ratio, self._episodes.lanes, self._episodes.table)

    def _rewards_of(self, tensordict: TensorDictBase) -> OneStepReward | NStepReward:
        """Return the object that recomputes the rewards of sampled transitions."""
        if tensordict.get(WINDOW_STEPS, None) is None:
            return self._relabelling.one_step
        if self._n_step is None:
            self._check_neighbours()  # another process wrote the transitions
        if self._n_step is None:
            raise ValueError(
                "The sampled transitions span several steps (they have an entry 'steps_to_next_obs'), but no "
                "MultiStepTransform comes before HERTransform. Create the buffer with the transforms with which "
                "the transitions were written."
            )
        return self._n_step

    def _unpack(
        self, tensordict: TensorDictBase, rewards: OneStepReward | NStepReward, episode: Tensor, step: Tensor
    ) -> Batch:
        """Return a shallow copy of sampled transitions without the entries to replace, and these entries.

        A storage can return its own tensordict, which must not be modified.
        """
        replaced = (*self._relabelling.goal_keys, *rewards.replaced(tensordict))
        stored = {key: tensordict.get(key, None) for key in replaced}
        created: Collection[NestedKey] = ()
        if self._adopted is not None:
            created = self._adopted.create(tensordict, stored, episode, step, self._episodes.table, self.her_ratio)
        for key in (*self._relabelling.goal_keys, self.keys.next_reward):
            if key in stored and stored[key] is None and key not in created:
                raise KeyError(
                    f"The sample has no entry {key!r}, although it was written. Place the transform that drops it "
                    "after HERTransform. If the transitions were written with CompactGoals, sample with it too: "
                    "Compose(CompactGoals(), HERTransform(...))."
                )
        return Batch(tensordict.exclude(*replaced, *self._added_keys), stored)

    # Processes, saving

    def share_memory_(self) -> HERTransform:
        """Move the goal table into shared memory. TorchRL calls this method for buffers shared between processes.

        Raises:
            RuntimeError: if there is no goal table yet: pass ``goal_spec``.
        """
        self._episodes.share_memory_()
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return the goal table and the running episodes for ``state_dict``."""
        with self._writing():
            adopted = None if self._adopted is None else self._adopted.missing._asdict()
            return self._episodes.state_dict() | {"longest_window": self._longest_window, "adopted": adopted}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state` of a transform with the same goals and capacity.

        Raises:
            ValueError: if goals, capacity or strategies differ from the saved ones, or if another transform saved it.
        """
        check_saved_by("HERTransform", state)
        with self._writing():
            adopted = None
            if state["adopted"] is not None:
                adopted = AdoptedData(MissingEntries(**state["adopted"]), self._relabelling)
                check_missing(adopted.missing, self._relabelling, self.her_ratio)
            elif self._adopted is not None:
                raise ValueError(
                    "This HERTransform has adopted a data set, but the saved one had not: load into a new buffer."
                )
            self._episodes.load_state_dict(state)
            self._adopted = adopted
            self._longest_window = state["longest_window"]
            if self._n_step is not None:
                self._n_step.may_restart = True

    def clone(self) -> HERTransform:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> HERTransform:
        with self._writing():
            return deep_copy(self, state_of_copy(super().__getstate__()), memo)  # with the running episodes

    def __getstate__(self) -> dict[str, Any]:
        state = state_of_copy(super().__getstate__()) | {"_was_pickled": True}
        if self._episodes.lock.is_shared:
            state |= {"_episodes": self._episodes.for_copy(), "_n_step": None}
        return state

    def __repr__(self) -> str:
        """Return the arguments that differ from the defaults."""
        others = {"goal_spec": self._kind_of_goal_spec, "max_episode_steps": self._episodes.max_episode_steps}
        return self._relabelling.describe(HERTransform, vars(self) | others)
