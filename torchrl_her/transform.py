"""Hindsight at sampling time."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_her._torchrl import ids_around
from torchrl_her.diagnosis.report import Report
from torchrl_her.episodes.stamps import read_stamps
from torchrl_her.goals.draw import Draw, check_her_ratio, draw_for_sequences, draw_goals
from torchrl_her.goals.extra_goals import AnyStrategy
from torchrl_her.keys import MEMBER, STEPS_TO_GOAL, HERKeys
from torchrl_her.n_step import STEPS, NStepReward
from torchrl_her.relabel import (
    RELABELLED,
    GoalMap,
    OneStepReward,
    Reward,
    SampledBatch,
    check_at_least,
)
from torchrl_her.stamping import StampingTransform


class HERTransform(StampingTransform):
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
        reward (TensorDictModule or Callable): computes the reward of relabelled transitions. A module, such as
            `EnvReward`, `SparseReward` or `GoalReward`, reads the transitions and writes ``("next", "reward")`` and,
            if it can, ``("next", "terminated")``. If it has a true attribute ``recompute_all``, as with
            ``GoalReward(..., recompute_all=True)``, the reward of transitions that are not relabelled is recomputed
            too. A function maps achieved and desired goals, ``[batch, *goal]`` each,
            to rewards ``[batch]``.

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
            A longer episode than ``capacity`` is split, and a warning says so. Default: 1,000,000.
        keys (HERKeys): the keys of the entries. Default: ``HERKeys()``.
        goal_fn (Callable[[Tensor], Tensor], optional): maps the entry of the achieved goal, ``[batch, *state]``, to
            goals ``[batch, *goal]``. By default, the entry is the goal.
        goal_spec (TensorSpec, optional): the spec of a single goal, ``env.observation_spec["achieved_goal"]`` of one
            environment. Required for buffers with ``shared=True`` and storages with ``shared_init=True``. By default,
            the first write determines it.
        max_episode_steps (int, optional): the number of steps after which an episode ends even without a done flag. In
            a buffer shared between processes, the default is 8,192.
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
            the buffer would undo the relabelling, or if written goals have the wrong shape, the wrong dtype or a NaN. A
            refused write stores nothing. When sampling, if the size of the batch is not a multiple of
            ``sequence_length``.
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
        super().__init__(reward, strategy, keys, goal_fn)
        if self._reads_steps and her_ratio == 1:
            self._diagnosis.rewards.compares = False  # samples contain no stored rewards
        self.info = bool(info)
        self._added_keys = [key for pair in self._extra_keys for key in pair] + [RELABELLED]
        if self.info or self._reads_steps:
            self._added_keys += [STEPS_TO_GOAL, MEMBER]
        self.her_ratio = check_her_ratio(her_ratio)
        self.sequence_length = sequence_length
        self._kind_of_goal_spec = None if goal_spec is None else type(goal_spec)
        self._make_table(capacity, goal_spec, max_episode_steps)

    # Sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled transitions ``[*batch]``, a share of them relabelled. The input is not modified."""
        if isinstance(tensordict, list):  # an ensemble of list storages transforms its samples before stacking them
            return list(self.forward(torch.stack(tensordict)).unbind(0))
        if not torch.compiler.is_compiling() and ids_around(self) != self._ids_around:
            self._check_neighbours()  # the transforms of the buffer changed after the last write
        batch, rewards = self._unpack(tensordict)
        draw, relabelled = self._draw(batch, rewards.read_goals(batch))
        self._set_goals(batch, draw.goals, relabelled)
        self._set_info(batch, draw, relabelled)
        rewards.recompute(batch, torch.ones_like(relabelled) if self._creates_goals else relabelled)
        if self._reads_steps and not self.info:
            batch.data.del_(STEPS_TO_GOAL)
        self._diagnosis.check_sample(
            batch.data, relabelled, batch.draw if self.her_ratio else None, batch.table, rewards is self._one_step
        )
        return batch.data.set(RELABELLED, relabelled)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Check the other transforms of the buffer, then compile sampling with ``torch.compile``.

        On a CPU, this saves 15% to 23% of the time of ``sample(256)``, after some seconds of compilation.

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
        return self._diagnosis.report(self, self.lanes, self.her_ratio, self.table)

    def _unpack(self, tensordict: TensorDictBase) -> tuple[SampledBatch, OneStepReward | NStepReward]:
        """Return the sampled transitions and the object that recomputes their rewards.

        The transitions are a shallow copy without the entries to replace: a storage can return its own tensordict,
        which must not be modified.
        """
        rewards: OneStepReward | NStepReward = self._one_step
        if tensordict.get(STEPS, None) is not None:
            if self._n_step is None:
                self._check_neighbours()  # another process wrote the transitions
            if self._n_step is None:
                raise ValueError(
                    "The sampled transitions span several steps (they have an entry 'steps_to_next_obs'), but no "
                    "MultiStepTransform comes before HERTransform. Create the buffer with the transforms with which "
                    "the transitions were written."
                )
            rewards = self._n_step
        episode, step = read_stamps(tensordict)
        replaced = (*self._goal_keys, *rewards.replaced(tensordict))
        stored = {key: tensordict.get(key, None) for key in replaced}
        created = () if self.adopted is None else self._create(tensordict, stored, episode, step)
        for key in (*self._goal_keys, self.keys.next_reward):
            if stored[key] is None and key not in created:
                raise KeyError(
                    f"The sample has no entry {key!r}, although it was written. Place the transform that drops it "
                    "after HERTransform. If the transitions were written with CompactGoals, sample with it too: "
                    "Compose(CompactGoals(), HERTransform(...))."
                )
        table = self._table_at(stored[self.keys.desired_goal], len(tensordict.batch_size))
        data = tensordict.exclude(*replaced, *self._added_keys)
        return SampledBatch(data, stored, table, episode, step, self.longest_window), rewards

    def _draw(self, batch: SampledBatch, available: Tensor | bool) -> tuple[Draw, Tensor]:
        """Draw goals, and return which transitions get them, ``bool [*batch, 1]``.

        A transition is relabelled only if its reward can be recomputed. A sequence is relabelled only if the rewards of
        all of its transitions that get the goal can be recomputed.
        """
        given, length = (self.strategies, batch.table, self.her_ratio, batch.episode, batch.step), self.sequence_length
        if length is None:
            draw = batch.draw = draw_goals(*given)
            relabelled = draw.relabelled if available is True else draw.relabelled & available
        else:
            # batch.draw, which is counted for the report, has one row per sequence, and draw one row per transition.
            batch.draw, draw = draw_for_sequences(*given, length)
            whole = (~draw.relabelled | available).view(-1, length).all(1).repeat_interleave(length)
            relabelled = draw.relabelled & whole
        return draw, relabelled.view(*batch.data.batch_size, 1)

    def _set_info(self, batch: SampledBatch, draw: Draw, relabelled: Tensor) -> None:
        """Set the entries with the number of steps to the goal and the index of the mixture's member."""
        if self.info or self._reads_steps:
            ahead = torch.where(draw.goal_episode == batch.episode, draw.goal_step - batch.step, -1)
            ahead = torch.where(relabelled & (ahead >= 0).view_as(relabelled), ahead.view_as(relabelled), -1)
            # A created goal is the transition's own outcome, zero steps ahead.
            batch.data.set(STEPS_TO_GOAL, torch.where(relabelled, ahead, 0) if self._creates_goals else ahead)
        if self.info and draw.member is not None:
            batch.data.set(MEMBER, torch.where(relabelled, draw.member.view_as(relabelled), -1))

    def __repr__(self) -> str:
        """Return the arguments that differ from the defaults."""
        return self._describe(
            HERTransform,
            her_ratio=self.her_ratio,
            capacity=self.capacity,
            goal_spec=self._kind_of_goal_spec,
            max_episode_steps=self._max_episode_steps,
            sequence_length=self.sequence_length,
            info=self.info,
        )
