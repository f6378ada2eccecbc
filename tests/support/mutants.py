"""Mutants of the package with one replaced function each, which show that an oracle finds the fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tensordict import NestedKey
from torch import Tensor

from torchrl_her import Future, StrategyInput, relabel, uniform
from torchrl_her.episodes.lanes import Lane
from torchrl_her.episodes.ordered_write import TrackedTransitions
from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.episodes.transitions import WrittenTransitions
from torchrl_her.keys import HERKeys
from torchrl_her.relabel import Batch, OneStepReward, RelabelTransform

Mutant = Callable[[pytest.MonkeyPatch], None]


def first_failure(
    check: Callable[[], Any], faults: tuple[type[Exception], ...] = (AssertionError,)
) -> Exception | None:
    """Run a check until it finds a fault, and return the fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a table that is too small is intended here
        try:
            check()
        except faults as fault:
            return fault
    return None


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    """Return a mutant in which a function of a class or module is replaced; ``make`` gets the original one."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return apply


def followed_by(owner: Any, name: str, change: Callable[..., Any]) -> Mutant:
    """Return a mutant in which a function returns ``change(result, *arguments)``."""

    def make(original: Any) -> Any:
        return lambda *arguments: change(original(*arguments), *arguments)

    return replaced(owner, name, make)


def stored_again(owner: Any, name: str, pick: Callable[[HERKeys], NestedKey]) -> Mutant:
    """Return a mutant in which a method restores the stored value of an entry."""

    def change(_: Any, self: Any, batch: Batch, *others: Any) -> None:
        batch.data.set(pick(self.keys), batch.stored[pick(self.keys)])

    return followed_by(owner, name, change)


def all_of(*mutants: Mutant) -> Mutant:
    """Return a combination of several mutants."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        for mutant in mutants:
            mutant(monkeypatch)

    return apply


def future_from(low: Callable[[StrategyInput], Tensor], high: Callable[[StrategyInput], Tensor]) -> Mutant:
    """Return the strategy "future" with other bounds."""
    return replaced(Future, "select", lambda _: lambda self, given: given.start + uniform(low(given), high(given)))


def read_as(change: Callable[[WrittenTransitions], WrittenTransitions]) -> Mutant:
    """Return a mutant that changes written transitions after they are read."""
    return followed_by(relabel, "read_transitions", lambda written, *_: change(written))


def without_seams(written: WrittenTransitions) -> WrittenTransitions:
    """Let each transition of a write start from the outcome of the previous one."""
    return written._replace(start=np.concatenate([written.start[:1], written.outcome[:-1]]))


def _rewards_of_stored_goals(recompute: Any) -> Any:
    def mutated(self: OneStepReward, batch: Batch, relabelled: Tensor) -> None:
        keys = (self.keys.desired, self.keys.next_desired)
        new = {key: batch.data.get(key) for key in keys}
        batch.data.update({key: batch.stored[key] for key in keys})
        recompute(self, batch, relabelled)
        batch.data.update(new)

    return mutated


def _idle_at_once(waiting: Any) -> Any:
    def mutated(self: EpisodeTracker, lanes: dict[int, Lane], patience: int) -> Iterator[Lane]:
        return waiting(self, lanes, 0 if lanes is self._lanes else patience)

    return mutated


def _publishes_running(track: Any) -> Any:
    def mutated(self: EpisodeTracker, *arguments: Any, **options: Any) -> TrackedTransitions:
        tracked = track(self, *arguments, **options)
        episodes = {each.episode: each for each in tracked.episodes}
        for lane in self.open_lanes():
            lane.publish_into(episodes)
        return tracked._replace(episodes=list(episodes.values()))

    return mutated


PUBLISHED_AT_EVERY_WRITE = replaced(EpisodeTracker, "track", _publishes_running)
# Mutants of code that both transforms use.
COMMON: dict[str, Mutant] = {
    "draws the future from t+1 on": future_from(lambda given: given.step + 1, lambda given: given.length),
    "joins episodes across a seam": read_as(without_seams),
    "forgets the goal under next": stored_again(RelabelTransform, "_set_goals", lambda keys: keys.next_desired),
    "forgets the goal at the root": stored_again(RelabelTransform, "_set_goals", lambda keys: keys.desired),
    "computes the reward before the goal is set": replaced(OneStepReward, "recompute", _rewards_of_stored_goals),
    "forgets that a new goal ends the episode": stored_again(OneStepReward, "recompute", lambda keys: keys.done),
    "waits for an end that carries no flag": replaced(EpisodeTracker, "_waiting", lambda _: lambda *_: iter(())),
    "takes every lane that waits for idle": replaced(EpisodeTracker, "_waiting", _idle_at_once),
    "keeps the pieces of an episode in another order": followed_by(
        Lane, "extend", lambda _, lane, kept: lane.kept.reverse()
    ),
    "keeps zeros of the steps of an episode": replaced(
        Lane, "extend", lambda extend: lambda self, kept: extend(self, kept * 0)
    ),
}
