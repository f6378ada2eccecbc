"""Wrong versions of HindsightAugmentation that its oracle must find, each with a function replaced."""

import pytest

import torchrl_her
from support import augmentation_oracle
from support.mutants import COMMON, all_of, first_failure, future_from, ones, replaced
from torchrl_her import HindsightAugmentation, augmentation
from torchrl_her.episodes.held_transitions import HeldTransitions
from torchrl_her.episodes.tracker import Lane
from torchrl_her.goals import draw


def augmented_with(**changes):
    """A mutant whose attributes are others while episodes are augmented; each function gets the attribute."""

    def make(augment):
        def mutated(self, ended):
            kept = {name: getattr(self, name) for name in changes}
            for name, change in changes.items():
                setattr(self, name, change(kept[name]))
            rows = augment(self, ended)
            for name, value in kept.items():
                setattr(self, name, value)
            return rows

        return mutated

    return replaced(HindsightAugmentation, "_augment", make)


def drawn_and(change):
    return replaced(
        augmentation, "draw_from_episodes", lambda original: lambda *arguments: change(original(*arguments))
    )


def tracked_with(**changes):
    """A mutant whose tracker has other settings."""

    def make(tracker):
        def mutated(max_episode_steps, patience, **options):
            return tracker(**({"max_episode_steps": max_episode_steps, "patience": patience} | options | changes))

        return mutated

    return replaced(augmentation, "EpisodeTracker", make)


def starts_at_the_first_row(columns_of):
    def mutated(*arguments):
        columns = columns_of(*arguments)
        columns[2] = 0
        return columns

    return mutated


def forgets_what_was_flushed(flush):
    def mutated(self):
        empty = flush(self)
        self._held.ended = []
        return empty

    return mutated


MUTANTS = COMMON | {
    "reads the achieved goal at the root": augmented_with(keys=lambda keys: keys._replace(next_achieved=keys.achieved)),
    "never draws the last step": future_from(
        lambda given: given.step, lambda given: (given.length - 1).maximum(given.step + 1)
    ),
    "takes all episodes to start at the first row": replaced(draw, "_columns_of", starts_at_the_first_row),
    "stores a copy less": augmented_with(n_sampled_goal=lambda copies: copies - 1),
    "relabels the originals": replaced(
        HindsightAugmentation,
        "_set_goals",
        lambda set_goals: lambda self, batch, goals, relabelled: set_goals(self, batch, goals, ones(relabelled)),
    ),
    "gives the copies of one transition to others": drawn_and(
        lambda drawn: drawn._replace(goals=drawn.goals.flip(0), steps=drawn.steps.flip(0))
    ),
    "stores the step after the one that achieved the goal": drawn_and(
        lambda drawn: drawn._replace(steps=drawn.steps + 1)
    ),
    "writes episodes that run": all_of(
        tracked_with(publish_running=True), replaced(Lane, "has_doubled", lambda _: property(lambda lane: True))
    ),
    "never cuts long episodes": tracked_with(max_episode_steps=10**9),
    "forgets what was flushed": replaced(HindsightAugmentation, "flush", forgets_what_was_flushed),
    "stores ended episodes twice": replaced(HeldTransitions, "take_ended", lambda take: lambda self: list(self.ended)),
    "stores what a single transition completes at once": replaced(
        HeldTransitions, "warn_if_episodes_wait", lambda _: lambda self: self.ended.clear()
    ),
}
FAULTS = (AssertionError, KeyError, IndexError, RuntimeError)


def check_augmentation():
    for seed in range(60):
        stream, options = augmentation_oracle.random_stream(seed)
        augmentation_oracle.run(stream, torchrl_her, **options)
    augmentation_oracle.check_draws(torchrl_her)


def test_the_augmentation_oracle_finds_no_fault_in_the_package():
    assert first_failure(check_augmentation, FAULTS) is None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_augmentation_oracle_kills_the_mutant_that(mutant, monkeypatch):
    MUTANTS[mutant](monkeypatch)
    assert first_failure(check_augmentation, FAULTS) is not None
