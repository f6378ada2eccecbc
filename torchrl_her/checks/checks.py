"""All checks of a transform, and its report."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from torchrl_her.checks.continuity import ContinuityCheck
from torchrl_her.checks.ends import MissingEndsCheck, TimeLimitCheck
from torchrl_her.checks.goal_copies import GoalCopiesCheck
from torchrl_her.checks.report import Report, ratio
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.checks.samples import ReplacedFlagsCheck, Sample, SampleCounts
from torchrl_her.episodes.lanes import Lanes, Tracked
from torchrl_her.episodes.write import Write, check_last_dimension
from torchrl_her.goals.strategies import check_not_stored
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import RELABELLED, HERKeys, get_entry
from torchrl_her.rewards.returns import OneStepReward


class Checks:
    """Refuses transitions that cannot be relabelled, warns if hindsight does not work, and counts for the report.

    Args:
        rewards (OneStepReward): recomputes rewards.
        keys (HERKeys): the keys of the entries.
        extra (Sequence[NestedKey]): the names of extra goals.
        extra_keys (frozenset[NestedKey]): their entries.

    Keyword Args:
        compares (bool): whether stored and computed rewards should agree.
    """

    def __init__(
        self,
        rewards: OneStepReward,
        keys: HERKeys,
        extra: Sequence[NestedKey],
        extra_keys: frozenset[NestedKey],
        *,
        compares: bool,
    ):
        self._keys = keys
        self._replaced = rewards.replaced_keys
        self._extra = extra
        self._has_entries = False  # whether a write had all entries
        self._continuity = ContinuityCheck(keys)
        self._rewards = RewardCheck(rewards.reward, keys, compares=compares)
        self._missing_ends = MissingEndsCheck(keys, self._continuity)
        self._time_limit = TimeLimitCheck(keys, self._rewards)
        self._goal_copies = GoalCopiesCheck(keys, extra_keys)
        self._begin_sampling()

    def _begin_sampling(self) -> None:
        self._counts = SampleCounts(self._keys, self._rewards)
        self._flags = ReplacedFlagsCheck(self._keys.next_terminated) if self._rewards.recomputes_ends else None

    def for_copy(self) -> Checks:
        """Return the checks of a copied transform, in which nothing was sampled."""
        copied = copy.copy(self)
        copied._begin_sampling()
        return copied

    def on_write(self, tensordict: TensorDictBase, written: Write, later: Iterable[Transform] | None) -> None:
        """Check transitions ``[*batch]`` before they change anything.

        Copies of goals that one of the ``later`` transforms rewrites in samples are harmless; None means that the write
        is not searched for copies.

        Raises:
            ValueError: if transitions are relabelled, a reward or a flag has no last dimension, or an extra goal would
                replace an entry.
            KeyError: if an entry is missing.
        """
        self._check_entries(tensordict, written)
        if len(written.done):
            self._rewards.on_write(tensordict, written)
            if later is not None and not self._goal_copies.is_over:
                self._goal_copies.search(tensordict, later)

    def _check_entries(self, tensordict: TensorDictBase, written: Write) -> None:
        if (relabelled := tensordict.get(RELABELLED, None)) is not None and bool(relabelled.any()):
            first = written.names.name(int(relabelled.reshape(-1).nonzero()[0]))
            raise ValueError(
                f"Some of these transitions are already relabelled ({first}), so their goals do not belong to the "
                "episode: they were sampled from a buffer or stored by HindsightAugmentation. Write rb.storage[:] "
                "instead of rb[:] or rb.sample(), and leave out transitions of HindsightAugmentation for which "
                f"{RELABELLED!r} is True."
            )
        if self._has_entries:
            return
        for key in self._replaced:
            get_entry(tensordict, key, "reward" if key == self._keys.next_reward else "done")
        for key in (self._keys.next_reward, *self._keys.next_flags):
            check_last_dimension(key, tensordict.get(key, None), tensordict.batch_size)
        check_not_stored(tensordict, self._extra, self._keys)
        self._has_entries = True

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        """Check transitions ``[*batch]`` whose episodes are known."""
        if len(written.done):
            self._continuity.on_tracked(tensordict, written, tracked)
            self._missing_ends.on_tracked(written, tracked)
            self._time_limit.on_tracked(tensordict, written, tracked)
            self._counts.count_compiled()

    def on_sample(self, sample: Sample) -> None:
        """Check a sampled batch. This is also called while sampling is compiled."""
        if torch.compiler.is_compiling():
            self._counts.keep(sample)
            return
        if sample.relabelled.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # replays of a CUDA graph are not counted
        self._counts.on_sample(sample)
        if self._flags is not None:
            self._flags.on_sample(sample)
        if self._continuity.of_first_write is not None:
            self._continuity.on_sample()

    def report(self, transform: Transform, her_ratio: float, lanes: Lanes, table: GoalTable | None = None) -> Report:
        """Return the report of a transform on its running and ended episodes and its goal table."""
        counts = self._continuity.report() | self._counts.report()
        lengths, running = lanes.lengths, len(lanes)
        table_size = 0 if table is None else int(table.size)
        more = table_size > counts["transitions"] or (counts["sampled"] and not counts["transitions"])
        return Report(
            transform=repr(transform),
            her_ratio=her_ratio,
            episodes=lengths.episodes + running,
            running=running,
            mean_length=ratio(lengths.total, lengths.episodes),
            min_length=lengths.shortest if lengths.episodes else None,
            max_length=lengths.longest if lengths.episodes else None,
            table_size=None if table is None else table_size,
            capacity=None if table is None else table.capacity,
            others_wrote=bool(more),
            **counts,
        )
