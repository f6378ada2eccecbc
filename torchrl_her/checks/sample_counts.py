"""Counts sampled transitions: how many are relabelled, why others are not, and their rewards."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.checks.report import ratio
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.checks.sample import AsyncCopy, Sample, is_capturing
from torchrl_her.episodes.lanes import Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.goals.draw import Draw
from torchrl_her.keys import HERKeys

FIRST = 2048  # all samples are counted until this many transitions were sampled
EVERY = 64  # one later sample in this many is counted
ENOUGH_SELECTED = 500  # transitions selected for relabelling before the share of lost goals is judged
SHARE_LEFT = 0.2  # of the goals of transitions whose goals have been in the table
SHARE_FOREIGN = 0.5
SHARE_MIXED = 0.5


class Counts(NamedTuple):
    """Numbers of transitions, and sums of their rewards. With ``sequence_length``, the first five count sequences."""

    to_relabel: float = 0.0  # selected with the probability her_ratio
    left: float = 0.0  # of these, not relabelled because their goals are no longer in the table
    outdated: float = 0.0  # of those, the transitions whose own goal has left the table
    foreign: float = 0.0  # of these, not relabelled because another transform wrote them, or they are padding
    padding: float = 0.0  # of the foreign ones
    original: float = 0.0
    original_reward: float = 0.0
    original_reached: float = 0.0
    original_judged: float = 0.0  # counted while the reward of a reached goal was known
    relabelled: float = 0.0
    relabelled_reward: float = 0.0
    relabelled_reached: float = 0.0
    relabelled_judged: float = 0.0
    in_sequences: float = 0.0  # transitions of sequences whose last transition was relabelled


class Counted(NamedTuple):
    """The parts of a sample that are counted."""

    relabelled: Tensor  # bool [*batch, 1]
    reward: Tensor | None  # [*batch, ...]; None if only goals are relabelled
    draw: Draw | None


class SampleCounts:
    """Counts sampled transitions on their device, and warns if many are not relabelled.

    All of the first samples are counted, then one in 64. Counts on a GPU are copied asynchronously and read later.

    Args:
        keys (HERKeys): the keys of the entries.
        rewards (RewardCheck): knows the reward of a reached goal.
    """

    def __init__(self, keys: HERKeys, rewards: RewardCheck):
        self._keys = keys
        self._rewards = rewards
        self._recomputes = bool(rewards.reward.out_keys)  # otherwise, only goals are relabelled
        self._transitions = self._samples = 0
        self._totals: Tensor | None = None  # float64 [counts]
        self._copy: AsyncCopy | None = None  # of the totals
        # The totals when each reason for lost goals was judged last, and the warnings so far
        self._judged = dict.fromkeys(("left", "foreign"), Counts())
        self._warned: set[str] = set()
        self._has_sampled_returns = False
        self._compiled: Counted | None = None  # the sample of the last compiled call, counted later

    def for_copy(self) -> SampleCounts:  # noqa: D102
        return SampleCounts(self._keys, self._rewards)

    def on_sample(self, sample: Sample) -> None:  # noqa: D102
        if torch.compiler.is_compiling():
            self._compiled = self._counted(sample)
            return
        if is_capturing(sample.relabelled):  # replays of a CUDA graph are not counted
            return
        self._has_sampled_returns |= sample.has_returns
        transitions, is_early = sample.relabelled.numel(), self._transitions < FIRST
        self._samples += 1
        self._transitions += transitions
        if transitions and (is_early or self._samples % EVERY == 0):
            counted = self._counted(sample)
            if counted.reward is not None or not self._recomputes:
                self._count(counted)

    def _counted(self, sample: Sample) -> Counted:
        reward = sample.data.get(self._keys.next_reward, None) if self._recomputes else None
        return Counted(sample.relabelled, reward, sample.draw)

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        """Count the last compiled sample."""
        sample, self._compiled = self._compiled, None
        if sample is not None:
            self._count(sample)

    def _count(self, sample: Counted) -> None:
        """Add a sample to the totals, and warn if many goals are lost."""
        sums = _sums(sample, self._rewards.reached_reward)
        self._totals = sums if self._totals is None else self._totals.to(sums.device) + sums
        if sample.draw is None:
            return
        table = sample.draw.table
        copy = self._copy = self._copy or AsyncCopy(self._totals)
        if (values := copy.read()) is not None:
            self._copy = None
            self._warn_if_left(Counts(*values), table.capacity)
            self._warn_if_foreign(Counts(*values))
            self._warn_if_sequences_are_mixed(Counts(*values))

    def report(self) -> dict[str, Any]:  # noqa: D102
        if self._compiled is not None:
            self._count(self._compiled)
            self._compiled = None
        counts = Counts() if self._totals is None else Counts(*self._totals.tolist())
        sampled = counts.original + counts.relabelled
        knows_reached = self._rewards.reached_reward is not None and not self._has_sampled_returns
        return {
            "sampled": int(sampled),
            "relabelled": ratio(counts.relabelled, sampled),
            "left": ratio(counts.left, counts.to_relabel),
            "foreign": ratio(counts.foreign, counts.to_relabel),
            "original_reward": ratio(counts.original_reward, counts.original) if self._recomputes else None,
            "original_reached": ratio(counts.original_reached, counts.original_judged) if knows_reached else None,
            "relabelled_reward": ratio(counts.relabelled_reward, counts.relabelled) if self._recomputes else None,
            "relabelled_reached": ratio(counts.relabelled_reached, counts.relabelled_judged) if knows_reached else None,
        }

    def _since(self, reason: str, counts: Counts) -> Counts:
        """Return the counts since a reason for lost goals was judged last."""
        return Counts(*(now - before for now, before in zip(counts, self._judged[reason], strict=True)))

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warn_user(message)

    def _warn_if_left(self, counts: Counts, capacity: int) -> None:
        since = self._since("left", counts)
        relevant = since.to_relabel - since.foreign
        if relevant < ENOUGH_SELECTED:
            return
        self._judged["left"] = counts
        lost = since.outdated / relevant  # a strategy can look back to goals that have left
        if lost < SHARE_LEFT:
            return
        least = capacity + 1 if lost == 1 else math.ceil(capacity / (1 - lost))
        self._warn_once(
            "left",
            f"{lost:.0%} of the transitions selected for relabelling kept their goal, because the achieved goals of "
            f"their episodes are no longer in the goal table: HERTransform(capacity={capacity}) is too small for the "
            f"transitions in the storage. Pass the number of transitions that the storage can hold, and at least "
            f"{least}.",
        )

    def _warn_if_foreign(self, counts: Counts) -> None:
        since = self._since("foreign", counts)
        if since.to_relabel < ENOUGH_SELECTED:
            return
        self._judged["foreign"] = counts
        share = (since.foreign - since.padding) / since.to_relabel
        if share >= SHARE_FOREIGN:
            self._warn_once(
                "foreign",
                f"{share:.0%} of the transitions selected for relabelling kept their goal, because another "
                "HERTransform wrote them, and this one does not have their goals. Save and load a storage together "
                "with its transform (rb.dumps and rb.loads), and pass the same transform to all buffers of one "
                "storage.",
            )

    def _warn_if_sequences_are_mixed(self, counts: Counts) -> None:
        if counts.in_sequences < ENOUGH_SELECTED:
            return
        share = 1 - counts.relabelled / counts.in_sequences
        if share >= SHARE_MIXED:
            self._warn_once(
                "sequences",
                f"{share:.0%} of the transitions of sequences (sequence_length) belong to another episode than the "
                "last transition of their sequence, so they are not relabelled: sample each sequence from one episode, "
                "with a SliceSampler whose slice_len equals sequence_length.",
            )


def _sums(sample: Counted, reached_reward: float | None) -> Tensor:
    """Return the counts of a sample, ``float64 [counts]``."""
    relabelled = sample.relabelled.reshape(-1)
    reward = torch.zeros(len(relabelled), dtype=torch.float64, device=relabelled.device)
    if sample.reward is not None:
        reward = sample.reward.reshape(len(relabelled), -1).mean(1, dtype=torch.float64)
    reached = judged = torch.zeros_like(reward)
    ones = torch.ones_like(reward)
    if reached_reward is not None:
        reached, judged = ((reward - reached_reward).abs() < 1e-6).double(), ones
    values = torch.stack([ones, reward, reached, judged], dim=1)  # [n, 4]
    of_groups = torch.stack([~relabelled, relabelled]).double() @ values  # [2, 4]
    draw = sample.draw
    if draw is None:
        return torch.cat([of_groups.new_zeros(5), of_groups.flatten(), of_groups.new_zeros(1)])
    table = draw.table
    first, last = table.episode_ids
    missing = draw.to_relabel & ~draw.relabelled
    foreign = missing & ((draw.episode < first) | (draw.episode > last))
    left = missing & ~foreign & table.has_wrapped
    _, holds_own = table.read(table.find(draw.episode), draw.episode, draw.step)
    outdated = left & ~holds_own
    of_draw = torch.stack([draw.to_relabel, left, outdated, foreign, foreign & (draw.episode == 0)]).sum(1)
    length = len(relabelled) // max(1, len(draw.step))  # of a sequence
    in_sequences = draw.relabelled.sum() * (length if length > 1 else 0)
    return torch.cat([of_draw, of_groups.flatten(), in_sequences.reshape(1)])
