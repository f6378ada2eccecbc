"""The checks and the report of one transform."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_her.diagnosis.async_copy import is_capturing
from torchrl_her.diagnosis.continuity import ContinuityCheck
from torchrl_her.diagnosis.goal_copies import GoalCopies, warn_if_goal_is_copied
from torchrl_her.diagnosis.replaced_flags import ReplacedFlagsCheck
from torchrl_her.diagnosis.report import Report
from torchrl_her.diagnosis.reward_check import RewardCheck
from torchrl_her.diagnosis.sample_counts import Sample, SampleCounts
from torchrl_her.episodes.lanes import Lanes, Tracked
from torchrl_her.episodes.transitions import WrittenTransitions
from torchrl_her.goals.draw import Draw
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import HERKeys


class Diagnosis:
    """Warns when hindsight does not work, and creates the report.

    Args:
        reward: the reward module.
        keys: the keys of the entries.
        compares_rewards: whether computed and stored rewards should agree.
        goal_fn: maps achieved entries ``[n, *state]`` to goals ``[n, *goal]``.
        replaced: entries that relabelling replaces besides the goals and rewards.
    """

    def __init__(
        self,
        reward: TensorDictModuleBase,
        keys: HERKeys,
        *,
        compares_rewards: bool = True,
        goal_fn: Callable[[Tensor], Tensor] | None = None,
        replaced: frozenset[NestedKey] = frozenset(),
    ):
        self.keys = keys
        self._replaced = replaced
        self.rewards = RewardCheck(reward, keys, compares=compares_rewards, goal_fn=goal_fn)
        self.continuity = ContinuityCheck()
        self._copies: GoalCopies | None = GoalCopies()  # None when the search is over
        self._unsearched: TensorDictBase | None = None  # rows of adopted data, searched at the first sample
        self._begin_sampling()

    def _begin_sampling(self) -> None:
        self._counts = SampleCounts()
        self._flags = ReplacedFlagsCheck(self.keys.next_terminated)
        self._has_sampled_returns = False  # n-step returns, which do not show whether a goal is reached
        self._compiled_sample: Sample | None = None  # of the last compiled call, counted later

    def restarted(self, *, compares_rewards: bool) -> Diagnosis:
        """Return a new object with the same settings, in which all counts are 0."""
        rewards = self.rewards
        new = Diagnosis(
            rewards.reward,
            self.keys,
            compares_rewards=rewards.compares,
            goal_fn=rewards.goal_fn,
            replaced=self._replaced,
        )
        new.rewards.compares &= compares_rewards
        return new

    def for_copy(self) -> Diagnosis:
        """Return the diagnosis of a copied transform, in which the counts of samples are 0."""
        copied = copy.copy(self)
        copied._unsearched = None  # copies and saved files stay small
        copied._begin_sampling()
        return copied

    def check_write(
        self, tensordict: TensorDictBase, written: WrittenTransitions, later: Iterable[Transform] | None
    ) -> None:
        """Check the rewards of written transitions ``[*batch]``, and search them for copies of the desired goal.

        Copies that one of the ``later`` transforms rewrites in samples are harmless. If ``later`` is None, nothing is
        searched.
        """
        if self._is_dummy(written):
            return
        self.rewards.check(tensordict, written)
        copies = self._copies  # which another thread may set to None
        if copies is not None and later is not None:
            copies = warn_if_goal_is_copied(tensordict, self.keys, later, copies, self._replaced)
            self._copies = None if self._copies is None else copies

    def search_later(self, rows: TensorDictBase) -> None:
        """Keep rows ``[n]`` of adopted data until `search`, which knows the other transforms of the buffer."""
        self._unsearched = rows

    def search(self, later: Iterable[Transform]) -> None:
        """Search the kept rows for copies of the desired goal, and release the rows."""
        rows, self._unsearched = self._unsearched, None
        if rows is not None:
            self._copies = None
            warn_if_goal_is_copied(rows, self.keys, later, GoalCopies(), self._replaced)

    def check_tracked(
        self,
        tensordict: TensorDictBase,
        written: WrittenTransitions,
        tracked: Tracked,
        table: GoalTable | None = None,
    ) -> None:
        """Check that written transitions ``[*batch]`` continue episodes."""
        if not self._is_dummy(written):
            self.continuity.check(tensordict, self.keys, written, tracked)
            if self.continuity.is_broken is not None:
                self.rewards.warn_if_waiting(are_continuous=not self.continuity.is_broken)
        self._count_compiled(table)

    def _count_compiled(self, table: GoalTable | None) -> None:
        sample, self._compiled_sample = self._compiled_sample, None
        if sample is not None:
            self._counts.count(sample, self.rewards.reached_reward, table)

    def _is_dummy(self, written: WrittenTransitions) -> bool:
        return not self.continuity.transitions and written.is_dummy

    def check_sample(
        self,
        data: TensorDictBase,
        relabelled: Tensor,
        draw: Draw | None = None,
        table: GoalTable | None = None,
        of_one_step: bool = True,
    ) -> None:
        """Count sampled transitions ``[*batch]``, and compare the done flags of the previous sample.

        ``relabelled``, ``bool [*batch, 1]``, marks the relabelled transitions. ``draw`` and ``table`` are None if
        transitions are relabelled when they are written.
        """
        if torch.compiler.is_compiling():
            self._compiled_sample = Sample(relabelled, data.get(self.keys.next_reward), draw)
            return
        if is_capturing(relabelled):  # replays of a CUDA graph are not counted
            return
        self._has_sampled_returns |= not of_one_step
        if self._counts.is_due(relabelled.numel()) and (reward := data.get(self.keys.next_reward, None)) is not None:
            self._counts.count(Sample(relabelled, reward, draw), self.rewards.reached_reward, table)
        if draw is not None and table is not None:
            self._counts.check_waiting(draw, table)
            if self.rewards.recomputes_ends:
                self._flags.check(data)

    def report(self, transform: Transform, lanes: Lanes, her_ratio: float, table: GoalTable | None = None) -> Report:
        """Return the report of a transform."""
        self._count_compiled(table)
        lengths, continuity, counts = lanes.lengths, self.continuity, self._counts.totals()
        running = len(lanes)
        sampled = counts.original + counts.relabelled
        knows_reached = self.rewards.reached_reward is not None and not self._has_sampled_returns
        return Report(
            transform=repr(transform),
            her_ratio=her_ratio,
            episodes=lengths.episodes + running,
            running=running,
            mean_length=_ratio(lengths.total, lengths.episodes),
            min_length=lengths.shortest if lengths.episodes else None,
            max_length=lengths.longest if lengths.episodes else None,
            transitions=continuity.transitions,
            discontinuous=_ratio(continuity.breaks, continuity.transitions),
            ambiguous=_ratio(continuity.ambiguous, continuity.transitions),
            table_size=None if table is None else int(table.size),
            capacity=None if table is None else table.capacity,
            sampled=int(sampled),
            relabelled=_ratio(counts.relabelled, sampled),
            episode_running=_ratio(counts.running, counts.to_relabel),
            left=_ratio(counts.left, counts.to_relabel),
            foreign=_ratio(counts.foreign, counts.to_relabel),
            original_reward=_ratio(counts.original_reward, counts.original),
            original_reached=_ratio(counts.original_reached, counts.original_judged) if knows_reached else None,
            relabelled_reward=_ratio(counts.relabelled_reward, counts.relabelled),
            relabelled_reached=_ratio(counts.relabelled_reached, counts.relabelled_judged) if knows_reached else None,
            step_length=self.rewards.reach.step,
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
