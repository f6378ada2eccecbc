"""Hindsight when transitions are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_her._torchrl import ids_around
from torchrl_her.diagnosis.report import Report
from torchrl_her.episodes.stamps import read_stamps
from torchrl_her.goals.draw import Draw, check_her_ratio, draw_for_sequences, draw_from_table
from torchrl_her.goals.strategies import GoalStrategy
from torchrl_her.keys import MASK, MEMBER, STEPS_TO_GOAL, HERKeys
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
from torchrl_her.storage.ownership import owned_entries, set_owned


class HERTransform(StampingTransform):
    """Hindsight Experience Replay (Andrychowicz et al. 2017, arXiv:1707.01495) for any replay buffer.

    Writing stamps each transition with its episode and step, and keeps its achieved goal. Sampling replaces the desired
    goal of a share of the transitions, at the root and under ``"next"``, by an achieved goal of their episode, and
    recomputes their rewards. Sampled batches have an entry ``("hindsight", "relabelled")``, ``bool [*batch, 1]``. Draws
    come from torch's default random generator.

    Args:
        reward (TensorDictModule or Callable): the reward of a relabelled transition: a module that reads the transition
            and writes ``("next", "reward")`` (and ``("next", "terminated")``, if it can), such as `EnvReward`,
            `SparseReward` and `GoalReward`, or a function of achieved and desired goals ``[batch, *goal]``.

    Keyword Args:
        strategy (str or GoalStrategy): which step's achieved goal becomes the desired goal: ``"future"`` (default),
            ``"final"``, ``"episode"``, ``"random"``, or a `GoalStrategy`, such as `Geometric` and `Mixture`.
        extra_goals (Mapping[NestedKey, str | GoalStrategy], optional): further entries and their strategies. Each gets
            a goal of its own, at the root and under ``"next"``, which does not affect the reward. Transitions that
            are not relabelled get their stored desired goal.
        info (bool): whether samples have an entry ``("hindsight", "steps_to_goal")``, ``int64 [*batch, 1]``: 0 if the
            goal is the transition's own outcome (of an n-step window, its first), the number of further steps if it
            lies ahead in the transition's episode, and -1 for other goals and transitions that are not relabelled.
            With a `Mixture` as strategy there is also ``("hindsight", "member")``, ``int64 [*batch, 1]``: the member
            that selected the goal, or -1. Default: False.
        her_ratio (float): the probability that a transition is relabelled; k / (k + 1) for the paper's k. Default: 0.8.
        achieved_goal_key (NestedKey): read at the root and under ``"next"``. Default: ``"achieved_goal"``.
        desired_goal_key (NestedKey): written at the root and under ``"next"``. Default: ``"desired_goal"``.
        reward_key (NestedKey): under ``"next"``. Default: ``"reward"``.
        done_key (NestedKey): under ``"next"``, beside ``terminated`` and ``truncated``. Default: ``"done"``.
        trajectory_key (NestedKey, optional): ids ``[*batch]`` that tell environments apart, used if present; None to
            ignore them. Default: ``("collector", "traj_ids")``.
        goal_fn (Callable, optional): maps achieved entries ``[batch, *state]`` to goals ``[batch, *goal]``.
        capacity (int): how many achieved goals are kept: the ``max_size`` of the storage, or two to three times that
            for episodes of 64 steps and more, which are published as they grow. Default: 1,000,000.
        goal_spec (TensorSpec, optional): the spec of one goal. Required for buffers that processes share.
        max_episode_steps (int, optional): ends an episode after this many steps.
        mask_key (NestedKey, optional): False marks padding; used if present. Default: ``("collector", "mask")``.
        sequence_length (int, optional): samples are sequences of this length, each with one goal, drawn for its end.
        recompute_all_rewards (bool): whether original transitions get a recomputed reward, too: for a learned reward,
            which changes during training. Default: False.

    Raises:
        ValueError, TypeError, KeyError: if an argument is wrong; when writing (nothing is stored then), if an entry is
            missing or has the wrong shape, or an achieved goal is NaN; when sampling, if an entry is missing.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000), transform=HERTransform(EnvReward(env), capacity=1000), batch_size=64
        ... )
        >>> _ = rb.extend(env.rollout(50))
        >>> rb.sample()["hindsight", "relabelled"].shape
        torch.Size([64, 1])
    """

    def __init__(
        self,
        reward: Reward,
        *,
        strategy: str | GoalStrategy = "future",
        extra_goals: Mapping[NestedKey, str | GoalStrategy] | None = None,
        info: bool = False,
        her_ratio: float = 0.8,
        achieved_goal_key: NestedKey = "achieved_goal",
        desired_goal_key: NestedKey = "desired_goal",
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        trajectory_key: NestedKey | None = ("collector", "traj_ids"),
        goal_fn: GoalMap | None = None,
        capacity: int = 1_000_000,
        goal_spec: TensorSpec | None = None,
        max_episode_steps: int | None = None,
        mask_key: NestedKey | None = MASK,
        sequence_length: int | None = None,
        recompute_all_rewards: bool = False,
    ):
        capacity = check_at_least(1, "capacity", capacity)
        if max_episode_steps is not None:
            max_episode_steps = check_at_least(1, "max_episode_steps", max_episode_steps)
        if sequence_length is not None:
            sequence_length = check_at_least(1, "sequence_length", sequence_length)
        keys = HERKeys.make(achieved_goal_key, desired_goal_key, reward_key, done_key, trajectory_key, mask_key)
        super().__init__(reward, strategy, keys, goal_fn, extra_goals, recomputes_all=recompute_all_rewards)
        if recompute_all_rewards and self._reads_steps:
            raise ValueError(
                "recompute_all_rewards=True recomputes rewards of original transitions, whose goals were achieved at "
                "no step: pass a reward of the goals in place of ReachedReward."
            )
        if self._reads_steps and her_ratio == 1:
            self._diagnosis.rewards.compares = False  # no stored reward is returned
        self.info = bool(info)
        self._added_keys = [key for pair in self._extra_keys for key in pair] + [RELABELLED]
        if self.info or self._reads_steps:
            self._added_keys += [STEPS_TO_GOAL, MEMBER]
        self.her_ratio = check_her_ratio(her_ratio)
        self.sequence_length = sequence_length
        self._make_table(capacity, goal_spec, max_episode_steps)

    # Sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabel sampled transitions ``[*batch]``. The input is modified only if it is marked as owning its memory."""
        if isinstance(tensordict, list):  # an ensemble of list storages transforms its samples before it stacks them
            return list(self.forward(torch.stack(tensordict)).unbind(0))
        if not torch.compiler.is_compiling() and ids_around(self) != self._ids_around:
            self._check_neighbours()  # transforms were changed after the last write
        batch, rewards = self._unpack(tensordict)
        draw, relabelled = self._draw(batch, rewards.available(batch))
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
        """Compile sampling with ``torch.compile``, after a check of the other transforms of the buffer."""
        self._check_neighbours()
        super().compile(*args, **kwargs)

    def report(self) -> Report:
        """Return what hindsight did so far, counted in this process. ``print`` it."""
        return self._diagnosis.report(self, self.tracker, self.her_ratio, self.table)

    def _unpack(self, tensordict: TensorDictBase) -> tuple[SampledBatch, OneStepReward | NStepReward]:
        """Return sampled transitions, and what recomputes their rewards.

        They are a shallow copy without the entries to replace, unless they own their memory: a storage can return its
        own tensordict, which must not be written into.
        """
        rewards: OneStepReward | NStepReward = self._one_step
        if tensordict.get(STEPS, None) is not None:
            if self._n_step is None:
                self._check_neighbours()  # another process wrote them
            if self._n_step is None:
                raise ValueError(
                    "The sampled transitions span several steps ('steps_to_next_obs'), and no MultiStepTransform is "
                    "listed before HERTransform: make the buffer as it was when they were written."
                )
            rewards = self._n_step
        episode, step = read_stamps(tensordict)
        replaced = (*self._goal_keys, *rewards.replaced(tensordict))
        stored = {key: tensordict.get(key, None) for key in replaced}
        created = () if self.adopted is None else self._create(tensordict, stored, episode, step)
        for key in (*self._goal_keys, self.keys.reward):
            if stored[key] is None and key not in created:
                raise KeyError(
                    f"The sample has no entry {key!r}, although it was written: list the transform that drops it after "
                    "HERTransform. If CompactGoals does, list it here, too: Compose(CompactGoals(), HERTransform(...))."
                )
        table = self._table_at(stored[self.keys.desired], len(tensordict.batch_size))
        owned = None if torch.compiler.is_compiling() else owned_entries(tensordict)
        data = tensordict.exclude(*replaced, *self._added_keys) if owned is None else set_owned(tensordict, None)
        return SampledBatch(data, stored, owned, table, episode, step, self.longest_window), rewards

    def _draw(self, batch: SampledBatch, available: Tensor | bool) -> tuple[Draw, Tensor]:
        """Draw goals for the transitions, and which of them get these, ``bool [*batch, 1]``.

        Only transitions whose rewards are available get one, and of a sequence all that were drawn, or none.
        """
        with_steps, length = self.info or self._reads_steps, self.sequence_length

        def draw_goals(episode: Tensor, step: Tensor) -> Draw:
            return draw_from_table(self.strategies, batch.table, self.her_ratio, episode, step, with_steps)

        if length is None:
            draw = batch.draw = draw_goals(batch.episode, batch.step)
            relabelled = draw.relabelled if available is True else draw.relabelled & available
        else:
            batch.draw, draw = draw_for_sequences(draw_goals, length, batch.episode, batch.step)
            whole = (~draw.relabelled | available).view(-1, length).all(1).repeat_interleave(length)
            relabelled = draw.relabelled & whole
        return draw, relabelled.view(*batch.data.batch_size, 1)

    def _set_info(self, batch: SampledBatch, draw: Draw, relabelled: Tensor) -> None:
        """Set how far ahead the goals are, and which member of a mixture selected them."""
        if draw.goal_step is not None:
            ahead = (draw.goal_step - batch.step).view_as(relabelled)
            ahead = torch.where(relabelled & (ahead >= 0), ahead, -1)
            # Created goals are the transitions' own outcomes.
            batch.data.set(STEPS_TO_GOAL, torch.where(relabelled, ahead, 0) if self._creates_goals else ahead)
        if self.info and draw.member is not None:
            batch.data.set(MEMBER, torch.where(relabelled, draw.member.view_as(relabelled), -1))

    def __repr__(self) -> str:
        extra = {key: self.strategies[key] for key, _ in self._extra_keys}
        return (
            f"{type(self).__name__}({type(self.reward).__name__}, strategy={self.strategy!r}, "
            f"{f'extra_goals={extra}, ' if extra else ''}her_ratio={self.her_ratio}, capacity={self.capacity})"
        )
