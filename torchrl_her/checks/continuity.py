"""Counts written transitions that do not continue an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_her._private import warn_user
from torchrl_her.checks.report import ratio
from torchrl_her.episodes.lanes import Tracked
from torchrl_her.episodes.write import Write
from torchrl_her.keys import HERKeys

WARM_UP = 100  # the first transitions are not judged, because each environment starts an episode in them
JUDGED_TRANSITIONS = 100  # after this many transitions, the share is judged and the count restarts
SHARE_BROKEN = 0.3
SHARE_AMBIGUOUS = 0.01
SAMPLES_WITHOUT_WRITE = 10  # after the first write before it is judged

CAUSES = {
    "unmoved": "'next' holds the goals of the root: write the observation after the step under 'next'",
    "root": "the root always holds the first observation of the episode: set obs = next_obs after each step",
    "reversed": "time runs backwards: write the transitions in the order in which they were collected",
    "rounded": "the goals under 'next' and those at the next root differ by a rounding error: convert and normalize "
    "both alike",
    "left out": "transitions are left out: write every step of an episode",
    "shuffled": "the transitions are shuffled, or several environments alternate: write them in order, with "
    "trajectory ids",
}


class ContinuityCheck:
    """Warns if many transitions neither continue an episode nor follow the end of one.

    Episodes then have one or two steps, and relabelling can only offer the transitions' own outcomes as goals. Another
    warning is issued if the first write after loading continues none of the loaded running episodes.

    Attributes:
        transitions (int): the number of written transitions.
        breaks (int): the number of transitions that do not continue an episode.
        ambiguous (int): the number of transitions that could continue several running episodes.
        is_broken (bool | None): whether many transitions do not continue an episode; None before enough were judged.
    """

    def __init__(self, keys: HERKeys):
        self._keys = keys
        self.transitions = self.breaks = self.ambiguous = 0
        self._counted = self._counted_breaks = 0
        self.is_broken: bool | None = None
        self._has_warned_of_ambiguous = False
        # The warning to issue if only samples follow the first write, and the number of samples since then
        self.of_first_write: str | None = None
        self._samples = 0

    def report(self) -> dict[str, Any]:
        """Return fields of the `Report`."""
        return {
            "transitions": self.transitions,
            "discontinuous": ratio(self.breaks, self.transitions),
            "ambiguous": ratio(self.ambiguous, self.transitions),
        }

    def on_tracked(self, tensordict: TensorDictBase, written: Write, tracked: Tracked) -> None:
        """Count the transitions of a write, and warn about them."""
        count, first = len(written.done), max(0, WARM_UP - self.transitions)
        if tracked.loaded and not tracked.continued:
            warn_user(
                f"The loaded buffer has {tracked.loaded} running episode(s), and the first write after loading "
                "continues none of them. If the environments were reset, call flush() after loading: it ends these "
                "episodes, so that their transitions are relabelled."
            )
        is_first, self.of_first_write = not self.transitions, None
        self.transitions += count
        self.breaks += len(tracked.breaks)
        self.ambiguous += tracked.ambiguous
        share = self.ambiguous / self.transitions
        if share > SHARE_AMBIGUOUS and self.transitions >= 1000 and not self._has_warned_of_ambiguous:
            self._has_warned_of_ambiguous = True
            warn_user(
                f"{share:.0%} of the transitions could continue several running episodes, because these have the same "
                "goals. Some may be assigned to the wrong episode: write trajectory ids "
                "(keys=HERKeys(trajectory=...)), or each environment in its own row, [environments, steps]."
            )
        if self.is_broken:
            return
        is_adopted = written.names.numbers is not None
        if is_first and count > WARM_UP and len(tracked.breaks) >= count - 1 and not is_adopted:
            # No transition continued another one, and none was the last of its episode. This may be the first step of
            # many environments, which the next write shows.
            self.of_first_write = self._message(1.0, tensordict, written, tracked.breaks[:0])
            return
        breaks = tracked.breaks[tracked.breaks >= first]
        self._counted += count - min(count, first)
        self._counted_breaks += len(breaks)
        if self._counted >= JUDGED_TRANSITIONS:
            share = self._counted_breaks / self._counted
            self.is_broken = share >= SHARE_BROKEN
            if self.is_broken:
                warn_user(self._message(share, tensordict, written, breaks))
            self._counted = self._counted_breaks = 0

    def on_sample(self) -> None:
        """Judge the first write if only samples follow it."""
        self._samples += 1
        if self._samples >= SAMPLES_WITHOUT_WRITE and self.of_first_write is not None:
            message, self.of_first_write, self.is_broken = self.of_first_write, None, True
            warn_user(message)

    def _message(self, share: float, tensordict: TensorDictBase, written: Write, breaks: np.ndarray) -> str:
        such_as = f" (such as {written.name(int(breaks.min()))})" if len(breaks) else ""
        causes = [CAUSES[each] for each in (*_likely_causes(tensordict, self._keys, written), *CAUSES)]
        return (
            f"{share:.0%} of the transitions do not continue an episode{such_as}: their goals at the root differ from "
            "the goals under 'next' of all earlier transitions, and no episode had ended. Hindsight can then offer "
            "little more than their own outcomes as goals. Possible causes, most likely first: "
            f"{'; '.join(dict.fromkeys(causes))}."
        )


def _likely_causes(tensordict: TensorDictBase, keys: HERKeys, written: Write) -> list[str]:
    """Return the causes that fit the goals of the transitions ``[*batch]`` of a write."""
    start, outcome = written.start, written.outcome
    broken = start[1:] != outcome[:-1]  # transitions that do not follow the previous one
    seen = set(outcome.tolist())
    evidence = {
        "unmoved": start == outcome,
        "root": (start[1:] == start[:-1])[broken],
        "reversed": (start[:-1] == outcome[1:])[broken],
        "rounded": _are_close(tensordict, keys, written)[broken],
    }
    found = [cause for cause, shares in evidence.items() if shares.size and shares.mean() > 0.5]
    # A shuffled chunk contains few predecessors of its own transitions.
    if not found and sum(each in seen for each in start[1:][broken].tolist()) > 0.02 * broken.sum():
        found = ["shuffled"]
    return [*found, "left out"]


def _are_close(tensordict: TensorDictBase, keys: HERKeys, written: Write) -> np.ndarray:
    """Return which achieved goals nearly equal the previous ones under ``"next"``, ``bool [n - 1]``."""
    rows = written.rows_of(tensordict.select(keys.achieved_goal, keys.next_achieved_goal))
    goals = rows.get(keys.achieved_goal)[1:], rows.get(keys.next_achieved_goal)[:-1]
    root, earlier = (each.reshape(len(each), each.shape[1:].numel()).float() for each in goals)
    return torch.isclose(root, earlier, rtol=1e-3, atol=1e-5).all(1).numpy(force=True)
