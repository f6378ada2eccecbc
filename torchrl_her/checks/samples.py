"""Counts sampled transitions, and finds goals and flags that samples lack."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her._private import warn_user
from torchrl_her.checks.report import ratio
from torchrl_her.checks.reward_check import RewardCheck
from torchrl_her.goals.draw import Draw
from torchrl_her.keys import HERKeys

FIRST = 2048  # all samples are counted until this many transitions were sampled
EVERY = 64  # one later sample in this many is counted
ENOUGH_SELECTED = 500  # transitions selected for relabelling, or in sequences, before the shares are judged
SHARE_LEFT = 0.2  # of the goals of transitions whose goals have been in the table
SHARE_FOREIGN = 0.5
SHARE_MIXED = 0.5
COMPARED_SAMPLES = 32  # the number of first samples whose flags are compared


class Sample(NamedTuple):
    """A sampled batch after relabelling."""

    data: TensorDictBase  # [*batch]
    relabelled: Tensor  # bool [*batch, 1]
    draw: Draw | None = None  # None if transitions are relabelled when they are written
    has_returns: bool = False  # whether the rewards are n-step returns, which do not show whether a goal is reached


class AsyncCopy:
    """An asynchronous copy of a tensor ``[n]`` to the host."""

    def __init__(self, values: Tensor):
        self._values = values.to("cpu", non_blocking=True)  # in pinned memory
        self._event = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

    def read(self) -> list[float] | None:
        """Return the values, or None if the copy has not finished."""
        if self._event is not None and not self._event.query():
            return None
        return self._values.numpy().tolist()


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
        self._judged = Counts()  # the totals when they were judged last
        self._warned: set[str] = set()
        self._has_sampled_returns = False
        self._compiled: Sample | None = None  # the sample of the last compiled call, counted later

    def on_sample(self, sample: Sample) -> None:
        """Count a sample, unless it is one of many."""
        self._has_sampled_returns |= sample.has_returns
        transitions, is_early = sample.relabelled.numel(), self._transitions < FIRST
        self._samples += 1
        self._transitions += transitions
        if transitions and (is_early or self._samples % EVERY == 0):
            self._count(sample)

    def keep(self, sample: Sample) -> None:
        """Keep a sample for `count_compiled`. This is called while sampling is compiled."""
        self._compiled = sample._replace(data=sample.data.select(self._keys.next_reward, strict=False))

    def count_compiled(self) -> None:
        """Count the sample of the last compiled call."""
        sample, self._compiled = self._compiled, None
        if sample is not None:
            self._count(sample)

    def _count(self, sample: Sample) -> None:
        """Add a sample to the totals, and warn if many transitions are not relabelled."""
        reward = sample.data.get(self._keys.next_reward, None) if self._recomputes else None
        sums = _sums(sample, reward, self._rewards.reached_reward)
        self._totals = sums if self._totals is None else self._totals.to(sums.device) + sums
        if sample.draw is None:
            return
        copy = self._copy = self._copy or AsyncCopy(self._totals)
        if (values := copy.read()) is not None:
            self._copy = None
            self._judge(Counts(*values), sample.draw.table.capacity)

    def report(self) -> dict[str, Any]:
        """Return fields of the `Report`."""
        self.count_compiled()
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

    def _judge(self, totals: Counts, capacity: int) -> None:
        """Warn about the samples since the totals were judged last, if there were enough of them."""
        counts = Counts(*(now - before for now, before in zip(totals, self._judged, strict=True)))
        if max(counts.to_relabel, counts.in_sequences) < ENOUGH_SELECTED:
            return
        self._judged = totals
        known = counts.to_relabel - counts.foreign
        foreign = ratio(counts.foreign - counts.padding, counts.to_relabel) or 0.0
        lost = ratio(counts.outdated, known) or 0.0  # a strategy can look back to goals that have left
        apart = 1 - counts.relabelled / counts.in_sequences if counts.in_sequences else 0.0
        if foreign >= SHARE_FOREIGN:
            self._warn_once(
                "foreign",
                f"{foreign:.0%} of the transitions selected for relabelling kept their goal, because another "
                "HERTransform wrote them. Save and load a storage together with its transform (rb.dumps and rb.loads), "
                "and pass the same transform to all buffers of one storage.",
            )
        elif lost >= SHARE_LEFT:
            least = capacity + 1 if lost == 1 else math.ceil(capacity / (1 - lost))
            self._warn_once(
                "left",
                f"{lost:.0%} of the transitions selected for relabelling kept their goal, because the achieved goals "
                f"of their episodes are no longer in the goal table: HERTransform(capacity={capacity}) is too small. "
                f"Pass the number of transitions that the storage can hold, and at least {least}.",
            )
        if apart >= SHARE_MIXED:
            self._warn_once(
                "sequences",
                f"{apart:.0%} of the transitions of sequences (sequence_length) belong to another episode than the "
                "last transition of their sequence, so they are not relabelled: sample each sequence from one episode, "
                "with a SliceSampler whose slice_len equals sequence_length.",
            )

    def _warn_once(self, reason: str, message: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warn_user(message)


def _sums(sample: Sample, reward: Tensor | None, reached_reward: float | None) -> Tensor:
    """Return the counts of a sample, ``float64 [counts]``."""
    relabelled = sample.relabelled.reshape(-1)
    ones = torch.ones(len(relabelled), dtype=torch.float64, device=relabelled.device)
    rewards = reached = judged = torch.zeros_like(ones)
    if reward is not None:
        rewards = reward.reshape(len(relabelled), -1).mean(1, dtype=torch.float64)
    if reached_reward is not None:
        reached, judged = ((rewards - reached_reward).abs() < 1e-6).double(), ones
    values = torch.stack([ones, rewards, reached, judged], dim=1)  # [n, 4]
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
    of_draw = torch.stack([draw.to_relabel, left, left & ~holds_own, foreign, foreign & (draw.episode == 0)]).sum(1)
    length = len(relabelled) // max(1, len(draw.step))  # of a sequence
    in_sequences = draw.relabelled.sum() * (length if length > 1 else 0)
    return torch.cat([of_draw, of_groups.flatten(), in_sequences.reshape(1)])


class ReplacedFlagsCheck:
    """Warns if recomputed ``terminated`` is overwritten after the transform has returned a sample.

    TensorDict buffers with a slice sampler overwrite it. Each of the first samples is compared when the next one is
    drawn.

    Args:
        terminated (NestedKey): the key of the flag.
    """

    def __init__(self, terminated: NestedKey):
        self._terminated = terminated
        self._left = COMPARED_SAMPLES
        self._last: tuple[TensorDictBase, Tensor] | None = None  # a sample, and its recomputed flags
        self._lost: AsyncCopy | None = None  # the number of flags that were overwritten

    def on_sample(self, sample: Sample) -> None:
        """Compare the flags of the previous sample, and keep this one for the next call."""
        if not self._left or sample.draw is None:
            return
        self._left -= 1
        pending, last = self._lost, self._last  # other threads may sample at the same time
        if pending is not None and (lost := pending.read()) is not None:
            self._lost = None
            if lost[0]:
                self._left, self._last = 0, None
                warn_user(
                    f"{self._terminated!r} of relabelled transitions was overwritten in an earlier sample, after the "
                    "transform had returned it, so transitions that reach their new goal are not terminated. If the "
                    "sampler is a SliceSampler, it replaces the flags in TensorDict buffers: pass "
                    "truncated_key=None to it."
                )
                return
        if last is not None and pending is None:
            earlier, recomputed = last
            now = earlier.get(self._terminated, None)
            if now is not None and now is not recomputed and now.shape == recomputed.shape:
                self._lost = AsyncCopy((recomputed & ~now.bool()).sum().reshape(1))
        self._last = (sample.data, sample.data.get(self._terminated)) if self._left else None
