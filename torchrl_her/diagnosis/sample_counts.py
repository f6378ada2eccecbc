"""Counts sampled transitions: how many are relabelled, why others are not, and their rewards."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.diagnosis.async_copy import AsyncCopy
from torchrl_her.goals.draw import Draw
from torchrl_her.goals.table import GoalTable

FIRST = 2048  # all samples are counted until this many transitions were sampled
EVERY = 64  # one later sample in this many is counted
ENOUGH = 500  # transitions selected for relabelling before the share of lost goals is judged
SHARE_LEFT = 0.2  # of the goals of transitions whose goals have been in the table
SHARE_LOST = 0.5  # for one of the other reasons
SAMPLES_WITHOUT_WRITE = 50  # samples without a write after which running episodes should have ended
LOOK_EVERY = 10  # one sample in this many checks for new writes
SHARE_WAITING = 0.5
SHARE_MIXED = 0.5


class Sample(NamedTuple):
    """A sampled batch after relabelling."""

    relabelled: Tensor  # bool [*batch, 1]
    reward: Tensor  # [*batch, ...]
    draw: Draw | None = None  # None if transitions are relabelled when they are written


class Counts(NamedTuple):
    """Numbers of transitions, and sums of their rewards. With ``sequence_length``, the first five count sequences."""

    to_relabel: float = 0.0  # selected with the probability her_ratio
    running: float = 0.0  # of these, not relabelled because their goals are not in the table yet
    left: float = 0.0  # of these, not relabelled because their goals are no longer in the table
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


class SampleCounts:
    """Counts sampled transitions on their device, and warns if many are not relabelled.

    All of the first samples are counted, then one in 64. Counts on a GPU are copied asynchronously and read later.
    """

    def __init__(self) -> None:
        self._transitions = self._samples = 0
        self._totals: Tensor | None = None  # float64 [counts]
        self._copy: AsyncCopy | None = None  # of the totals
        # The totals when each reason for lost goals was judged last, and the reasons that were warned of
        self._judged = dict.fromkeys(("left", "running", "foreign"), Counts())
        self._warned: set[str] = set()
        self._full_since: int | None = None  # the number of goals written when running episodes were judged last
        self._has_warned_of_waiting = self._has_warned_of_sequences = False
        self._writes = self._since_write = 0  # the number of writes, and of samples since the last one
        self._waiting: AsyncCopy | None = None  # the share of transitions whose episodes are running

    def is_due(self, transitions: int) -> bool:
        """Return whether to count the next sample."""
        is_early = self._transitions < FIRST
        self._samples += 1
        self._transitions += transitions
        return transitions > 0 and (is_early or self._samples % EVERY == 0)

    def count(self, sample: Sample, reached_reward: float | None, table: GoalTable | None = None) -> None:
        """Add a sample to the totals, and warn if many goals are lost."""
        sums = _sums(sample, reached_reward, table)
        self._totals = sums if self._totals is None else self._totals.to(sums.device) + sums
        if table is None:
            return
        copy = self._copy = self._copy or AsyncCopy(self._totals)
        if (values := copy.read()) is not None:
            self._copy = None
            self._warn_if_left(Counts(*values), table.capacity)
            self._warn_if_running(Counts(*values), table)
            self._warn_if_foreign(Counts(*values))
            self._warn_if_sequences_are_mixed(Counts(*values))

    def totals(self) -> Counts:
        """Return the counts so far."""
        return Counts() if self._totals is None else Counts(*self._totals.tolist())

    def _since(self, reason: str, counts: Counts) -> Counts:
        """Return the counts since a reason for lost goals was judged last."""
        return Counts(*(now - before for now, before in zip(counts, self._judged[reason], strict=True)))

    def _warn_once(self, reason: str, message: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warn_user(message)

    def _warn_if_left(self, counts: Counts, capacity: int) -> None:
        since = self._since("left", counts)
        relevant = since.to_relabel - since.running - since.foreign
        if relevant < ENOUGH:
            return
        self._judged["left"] = counts
        lost = since.left / relevant
        if lost < SHARE_LEFT or since.running >= SHARE_LOST * since.to_relabel:
            return
        least = capacity + 1 if lost == 1 else math.ceil(capacity / (1 - lost))
        self._warn_once(
            "left",
            f"{lost:.0%} of the transitions that were to be relabelled were not, because their goals are no longer in "
            f"the goal table: HERTransform(capacity={capacity}) is too small for the transitions in the storage. Pass "
            f"the number of transitions that the storage can hold, and at least {least}.",
        )

    def _warn_if_running(self, counts: Counts, table: GoalTable) -> None:
        """Judge the samples of a full buffer after as many goals were written as the table holds.

        The share varies, because the goals of all environments can reach the table at the same time.
        """
        if not table.has_wrapped:
            return
        begin, since = self._full_since, self._since("running", counts)
        if begin is not None and (table.rows_used < begin + table.capacity or since.to_relabel < ENOUGH):
            return
        self._full_since, self._judged["running"] = table.rows_used, counts
        if begin is not None and since.running >= SHARE_LOST * since.to_relabel:
            self._warn_once(
                "running",
                f"{since.running / since.to_relabel:.0%} of the transitions that were to be relabelled were not, "
                "because the goals of the last steps of a running episode, up to 63, are not in the goal table yet, "
                "and the storage holds few earlier steps. Use a storage that holds at least 128 transitions of each "
                "environment, and set the capacity of HERTransform to its size, or use fewer environments.",
            )

    def _warn_if_foreign(self, counts: Counts) -> None:
        since = self._since("foreign", counts)
        if since.to_relabel < ENOUGH:
            return
        self._judged["foreign"] = counts
        share = (since.foreign - since.padding) / since.to_relabel
        if share >= SHARE_LOST:
            self._warn_once(
                "foreign",
                f"{share:.0%} of the transitions that were to be relabelled were not, because another HERTransform "
                "wrote them, and this one does not have their goals. Save and load a storage together with its "
                "transform (rb.dumps and rb.loads), and pass the same transform to all buffers of one storage.",
            )

    def _warn_if_sequences_are_mixed(self, counts: Counts) -> None:
        if self._has_warned_of_sequences or counts.in_sequences < ENOUGH:
            return
        share = 1 - counts.relabelled / counts.in_sequences
        if share >= SHARE_MIXED:
            self._has_warned_of_sequences = True
            warn_user(
                f"{share:.0%} of the transitions of sequences (sequence_length) belong to another episode than the "
                "last transition of their sequence, so they are not relabelled: sample each sequence from one episode, "
                "with a SliceSampler whose slice_len equals sequence_length."
            )

    def check_waiting(self, draw: Draw, table: GoalTable) -> None:
        """Warn if at least half of a sample waits for the end of its episodes long after the last write."""
        if self._samples % LOOK_EVERY or self._has_warned_of_waiting:
            return
        writes = table.writes
        self._since_write = self._since_write + LOOK_EVERY if writes == self._writes else 0
        self._writes = writes
        if self._since_write < SAMPLES_WITHOUT_WRITE or not len(draw.step):
            return
        waiting = self._waiting = self._waiting or AsyncCopy(_is_waiting(draw, table).double().mean().reshape(1))
        if (values := waiting.read()) is None:
            return
        self._waiting, self._since_write = None, 0
        if values[0] >= SHARE_WAITING:
            self._has_warned_of_waiting = True
            warn_user(
                f"{values[0]:.0%} of the sampled transitions wait for the end of their episode, and nothing was "
                f"written during the last {SAMPLES_WITHOUT_WRITE} samples. They are relabelled once it has ended. If "
                "no more transitions follow, as with a data set, call flush() of HERTransform."
            )


def _is_waiting(draw: Draw, table: GoalTable) -> Tensor:
    """Return which transitions have goals that are not in the table yet, ``bool [n]``."""
    first, last = table.episode_ids
    known = (draw.episode >= max(first, last - table.capacity + 1)) & (draw.episode <= last)
    return known & (draw.step >= draw.length)


def _sums(sample: Sample, reached_reward: float | None, table: GoalTable | None) -> Tensor:
    """Return the counts of a sample, ``float64 [counts]``."""
    relabelled = sample.relabelled.reshape(-1)
    reward = sample.reward.reshape(len(relabelled), -1).mean(1, dtype=torch.float64)
    reached = judged = torch.zeros_like(reward)
    ones = torch.ones_like(reward)
    if reached_reward is not None:
        reached, judged = ((reward - reached_reward).abs() < 1e-6).double(), ones
    values = torch.stack([ones, reward, reached, judged], dim=1)  # [n, 4]
    of_groups = torch.stack([~relabelled, relabelled]).double() @ values  # [2, 4]
    draw = sample.draw
    if draw is None or table is None:
        return torch.cat([of_groups.new_zeros(5), of_groups.flatten(), of_groups.new_zeros(1)])
    first, last = table.episode_ids
    missing = draw.to_relabel & ~draw.relabelled
    foreign = missing & ((draw.episode < first) | (draw.episode > last))
    running = missing & _is_waiting(draw, table)
    left = missing & ~foreign & ~running & table.has_wrapped
    of_draw = torch.stack([draw.to_relabel, running, left, foreign, foreign & (draw.episode == 0)]).sum(1)
    length = len(relabelled) // max(1, len(draw.step))  # of a sequence
    in_sequences = draw.relabelled.sum() * (length if length > 1 else 0)
    return torch.cat([of_draw, of_groups.flatten(), in_sequences.reshape(1)])
