"""Checks of the ends of episodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchrl_her.diagnosis.goal_env.finding import Finding
from torchrl_her.diagnosis.goal_env.functions import check_batch, check_calls, check_is_function, example
from torchrl_her.diagnosis.goal_env.play import Episodes
from torchrl_her.diagnosis.goal_env.probe import Probe

FEWEST = 3  # fewer ends near the goal can be a coincidence
LONG = 100  # an episode of at least this many steps is long


def check_termination(
    probe: Probe | None, episodes: Episodes, is_reached: np.ndarray, time_limit: int | None
) -> Iterator[Finding]:
    """Check the function that ends episodes, or find out whether one is missing; ``is_reached`` is ``bool [n]``."""
    if time_limit is None:
        yield from _check_ends(episodes)
    if probe is None:
        yield from _check_ends_on_success(episodes, is_reached)
        return
    what = "compute_terminated" if probe.is_of_env else "terminated_fn"
    yield from check_calls(probe, "terminated", what)
    if probe.failure:
        return
    faults = [*check_is_function(probe, "terminated", what)]
    yield from faults
    computed = probe.values().actual.astype(bool)
    differs = computed != episodes.terminated
    if differs.any() and not faults:
        row, where = example(differs, episodes)
        yield Finding(
            "terminated-differs",
            f"step returned terminated={episodes.terminated[row]} and {what} {computed[row]} ({where}).",
            f"Let step return {what} for the goals that it returns. An end that does not depend on the goal (a fall) "
            "must be in both.",
        )
    yield from check_batch(probe, episodes, "terminated", what)


def _check_ends(episodes: Episodes) -> Iterator[Finding]:
    if not (episodes.terminated | episodes.truncated).any() and episodes.step.max() >= LONG:
        yield Finding(
            "endless",
            f"No episode ended within {episodes.step.max() + 1:,} steps.",
            "Pass max_episode_steps to gymnasium.make or to HERTransform. This is optional: running episodes are "
            "relabelled, too.",
        )


def _check_ends_on_success(episodes: Episodes, is_reached: np.ndarray) -> Iterator[Finding]:
    """Find out whether success ends episodes.

    It does if every success is an end and most ends are successes, or if all ends are nearer than all other steps.
    """
    ended, distances = episodes.terminated, episodes.distances()
    both = is_reached & ended
    if ended.all() or not ended.any():
        return
    always = both.any() and not (is_reached & ~ended).any() and 2 * both.sum() >= ended.sum()
    nearest = ended.sum() >= FEWEST and distances[ended].max() < distances[~ended].min()
    if always or nearest:
        where = example(both if always else ended, episodes)[1]
        yield Finding(
            "ends-on-success",
            f"Episodes are terminated when the goal is reached or near, and there is no compute_terminated ({where}).",
            "Add compute_terminated(self, achieved_goal, desired_goal, info) to the environment, or pass "
            "EnvReward(env, terminated_fn=...): otherwise relabelled transitions that reach their goal are not "
            "terminated.",
        )
