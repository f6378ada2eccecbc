"""Tests of the oracle of HindsightAugmentation: it must detect mutants, in each of which one function is replaced."""

import functools
import random
from unittest import mock

import pytest
import torch

from support.augmentation_oracle import check_draws, run
from support.mutants import COMMON, PUBLISHED_AT_EVERY_WRITE, first_failure, followed_by, future_from, replaced
from support.streams import FLAT_LAYOUTS, random_stream
from torchrl_her import HindsightAugmentation, augmentation
from torchrl_her.episodes.held_transitions import HeldTransitions
from torchrl_her.goals import draw as drawing


def augmented_with(name, change):
    """Return a mutant that changes an attribute while episodes are augmented."""

    def make(augment):
        def mutated(self, ended):
            with mock.patch.object(self, name, change(getattr(self, name))):
                return augment(self, ended)

        return mutated

    return replaced(HindsightAugmentation, "_augment", make)


drawn_and = functools.partial(followed_by, augmentation, "draw_from_episodes")


def starts_at_the_first_row(columns, *_):
    columns[2] = 0
    return columns


def forgets_what_was_flushed(empty, self):
    self._held.ended = []
    return empty


MUTANTS = COMMON | {
    "reads the achieved goal at the root": augmented_with(
        "keys", lambda keys: keys._replace(next_achieved=keys.achieved)
    ),
    "assumes that all episodes start at the first row": followed_by(drawing, "_columns_of", starts_at_the_first_row),
    "stores one copy less": augmented_with("n_sampled_goal", lambda copies: copies - 1),
    "relabels the originals": replaced(
        HindsightAugmentation,
        "_set_goals",
        lambda set_goals: (
            lambda self, batch, goals, relabelled: set_goals(self, batch, goals, torch.ones_like(relabelled))
        ),
    ),
    "gives the copies of one transition to others": drawn_and(
        lambda drawn, *_: drawn._replace(goals=drawn.goals.flip(0), steps=drawn.steps.flip(0))
    ),
    "stores the step after the one that achieved the goal": drawn_and(
        lambda drawn, *_: drawn._replace(steps=drawn.steps + 1)
    ),
    "writes running episodes": PUBLISHED_AT_EVERY_WRITE,
    "never cuts long episodes": replaced(
        augmentation,
        "EpisodeTracker",
        lambda tracker: lambda steps, *others, **options: tracker(10**9, *others, **options),
    ),
    "forgets flushed transitions": followed_by(HindsightAugmentation, "flush", forgets_what_was_flushed),
    "stores ended episodes twice": replaced(HeldTransitions, "take_ended", lambda take: lambda self: list(self.ended)),
    "drops episodes that end in a write of one transition": replaced(
        HeldTransitions, "warn_if_episodes_wait", lambda _: lambda self: self.ended.clear()
    ),
}
DRAWS_MUTANTS = {
    "never draws the last step": future_from(
        lambda given: given.step, lambda given: (given.length - 1).maximum(given.step + 1)
    ),
}
FAULTS = (AssertionError, KeyError, IndexError, RuntimeError)


def check_augmentation():
    for seed in range(24):
        draw = random.Random(seed)
        run(
            random_stream(draw, FLAT_LAYOUTS[seed % len(FLAT_LAYOUTS)], least_chunk=1),
            copies=draw.randint(1, 4),
            max_episode_steps=draw.choice([4, 1000]),
            patience=draw.choice([0, 10, 1000]),
            flushes=draw.choice([(), (2, 5)]),
        )


CHECKS = {check_augmentation: MUTANTS, check_draws: DRAWS_MUTANTS}


@pytest.mark.parametrize("check", CHECKS)
def test_the_augmentation_oracle_finds_no_fault_in_the_package(check):
    assert first_failure(check, FAULTS) is None


@pytest.mark.parametrize(
    ("check", "mutant"), [(check, mutant) for check, mutants in CHECKS.items() for mutant in mutants]
)
def test_the_augmentation_oracle_kills_the_mutant_that(check, mutant, monkeypatch):
    CHECKS[check][mutant](monkeypatch)
    assert first_failure(check, FAULTS) is not None
