"""All checks of a transform, and its report."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_her.checks.continuity import ContinuityCheck
from torchrl_her.checks.entries import EntriesCheck
from torchrl_her.checks.goal_copies import GoalCopiesCheck
from torchrl_her.checks.missing_ends import MissingEndsCheck
from torchrl_her.checks.replaced_flags import ReplacedFlagsCheck
from torchrl_her.checks.report import Report, ratio
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.checks.sample import Sample
from torchrl_her.checks.sample_counts import SampleCounts
from torchrl_her.checks.time_limit import TimeLimitCheck
from torchrl_her.episodes.lanes import Lanes, Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import HERKeys
from torchrl_her.rewards.returns import OneStepReward


class Checks:
    """Warns if hindsight does not work, and counts what the report shows.

    Each check has those of these methods that it needs, with the arguments of the methods of this class: ``on_write``
    and ``on_tracked``, which return True when they have seen enough, and are then no longer called; ``on_sample``;
    ``report()``, which returns fields of the `Report`; and ``for_copy()``, which returns the check of a copied
    transform, in which the counts of samples are 0.

    Args:
        rewards (OneStepReward): recomputes rewards.
        keys (HERKeys): the keys of the entries.
        goal_fn (Callable[[Tensor], Tensor] or None): as in `HERTransform`.
        extra (Sequence[NestedKey]): the names of extra goals.
        extra_keys (frozenset[NestedKey]): their entries.

    Keyword Args:
        compares (bool): whether stored and computed rewards should agree.
    """

    def __init__(
        self,
        rewards: OneStepReward,
        keys: HERKeys,
        goal_fn: Callable[[Tensor], Tensor] | None,
        extra: Sequence[NestedKey],
        extra_keys: frozenset[NestedKey],
        *,
        compares: bool,
    ):
        continuity = ContinuityCheck(keys)
        reward_check = RewardCheck(rewards.reward, keys, continuity, compares=compares, goal_fn=goal_fn)
        self._has_written = False  # a collector's dummy does not count
        self._entries = EntriesCheck(keys, rewards.replaced_keys, extra)
        self._set(
            [  # in the order in which they run
                continuity,
                reward_check,
                MissingEndsCheck(keys, continuity),
                TimeLimitCheck(keys, reward_check),
                GoalCopiesCheck(keys, extra_keys),
                SampleCounts(keys, reward_check),
                ReplacedFlagsCheck(keys.next_terminated, is_recomputed=reward_check.recomputes_ends),
            ]
        )

    def _set(self, checks: list[Any]) -> None:
        self._checks = checks
        self._on_write = _hooks(checks, "on_write")
        self._on_tracked = _hooks(checks, "on_tracked")
        self._on_sample = _hooks(checks, "on_sample")

    def for_copy(self) -> Checks:
        """Return the checks of a copied transform, in which nothing was sampled."""
        copied = copy.copy(self)
        copied._set([check.for_copy() if hasattr(check, "for_copy") else check for check in self._checks])
        return copied

    def on_write(self, tensordict: TensorDictBase, written: Write, later: Iterable[Transform] | None) -> None:
        """Check transitions ``[*batch]`` before they change anything.

        Copies of goals that one of the ``later`` transforms rewrites in samples are harmless; None means that the write
        is not searched for copies.
        """
        self._entries.check(tensordict, written)
        if len(written.done) and (self._has_written or not written.is_dummy):
            self._on_write = [check for check in self._on_write if not check(tensordict, written, later)]

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        """Check transitions ``[*batch]`` whose episodes are known."""
        if len(written.done) and (self._has_written or not written.is_dummy):
            self._has_written = True
            self._on_tracked = [check for check in self._on_tracked if not check(tensordict, written, tracked)]

    def on_sample(self, sample: Sample) -> None:
        """Check a sampled batch. This is also called while sampling is compiled."""
        for check in self._on_sample:
            check(sample)

    def report(self, transform: Transform, her_ratio: float, lanes: Lanes, table: GoalTable | None = None) -> Report:
        """Return the report of a transform on its running and ended episodes and its goal table."""
        counts = {name: value for report in _hooks(self._checks, "report") for name, value in report().items()}
        lengths, running = lanes.lengths, len(lanes)
        table_size = 0 if table is None else int(table.size)
        # The dummy of a collector can be in the table, but is not counted.
        more = table_size > counts["transitions"] + 1 or (counts["sampled"] and not counts["transitions"])
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


def _hooks(checks: list[Any], name: str) -> list[Callable[..., Any]]:
    return [getattr(check, name) for check in checks if hasattr(check, name)]
