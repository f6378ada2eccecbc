"""Checks of the ends of episodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchrl_her.goal_env_check.finding import Finding
from torchrl_her.goal_env_check.functions import ROWS, check_batch, check_calls, check_is_function, example
from torchrl_her.goal_env_check.play import WIDEST, Episodes, distances
from torchrl_her.goal_env_check.probe import Probe

FEWEST = 3  # fewer ends near the goal can be a coincidence
SHARE_NEAREST = 0.7  # the share that chance gives is 1 / the length of an episode
LONG = 100  # an episode of more steps is long


def check_termination(
    probe: Probe | None, episodes: Episodes, is_reached: np.ndarray, time_limit: int | None
) -> Iterator[Finding]:
    """Check the function that ends episodes, or find out whether one is missing; ``is_reached`` is ``bool [n]``."""
    steps = int(episodes.step.max()) + 1
    if time_limit is None and steps > LONG and not (episodes.terminated | episodes.truncated).any():
        yield Finding(
            "endless",
            f"No episode ended within {steps:,} steps.",
            "Pass max_episode_steps to gymnasium.make or to HERTransform. This is optional: running episodes are "
            "relabelled, too.",
        )
    if probe is None:
        yield from _check_ends_on_success(episodes, is_reached)
        yield from _check_time_limit(episodes, is_reached)
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
            f"Let step return {what} for the goals that it returns, and a time limit as truncated. An end that does "
            "not depend on the goal (a fall) must be in both.",
        )
    yield from _check_time_limit(episodes, is_reached | computed)
    yield from check_batch(probe, episodes, "terminated", what)


def _check_time_limit(episodes: Episodes, is_explained: np.ndarray) -> Iterator[Finding]:
    """Find out whether all ends of episodes, except for explained ones, ``bool [n]``, come from a time limit.

    They do if they follow the same number of steps, and if the observations do not show them.
    """
    ended = (episodes.terminated | episodes.truncated) & ~is_explained
    last = episodes.step == episodes.step.max()
    is_limit = ended.sum() >= FEWEST and (episodes.terminated & last)[ended].all() and not last.all()
    if not is_limit or _are_distinct(last, episodes):
        return
    yield Finding(
        "time-limit-terminates",
        f"{ended.sum():,} episodes were terminated after exactly {episodes.step.max() + 1:,} steps, and none ended "
        "earlier without reaching its goal. The observations do not show these ends.",
        "Return a time limit as truncated=True, or pass it to gymnasium.make as max_episode_steps: critics do not "
        "bootstrap from a terminated step. If the task itself ends then, add the number of remaining steps to the "
        "observation.",
    )


def _are_distinct(last: np.ndarray, episodes: Episodes) -> bool:
    """Return whether the observations of ``last``, ``bool [n]``, differ from all others.

    They do if one feature is lower or higher there, or if most are nearest to those of other episodes.
    """
    achieved = episodes.next_achieved.reshape(len(last), -1)
    achieved = achieved[:, :: 1 + achieved.shape[1] // WIDEST]
    features = np.hstack([episodes.next_observation, achieved]).astype(np.float64)
    features = np.where(np.isfinite(features).all(0), features, 0.0)
    features /= np.maximum(np.ptp(features, axis=0), 1e-30)
    ours, others = features[last], features[~last]
    if (ours.min(0) > others.max(0)).any() or (ours.max(0) < others.min(0)).any():
        return True
    some = np.flatnonzero(last)[:ROWS]
    away = np.square(features).sum(1) - 2 * features[some] @ features.T  # [rows, n], up to a constant in each row
    away[episodes.episode[some, None] == episodes.episode] = np.inf
    return bool(last[away.argmin(1)].mean() > SHARE_NEAREST)


def _check_ends_on_success(episodes: Episodes, is_reached: np.ndarray) -> Iterator[Finding]:
    """Find out whether success ends episodes.

    It does if every success is an end and most ends are successes, or if all ends are nearer than all other steps.
    """
    ended, away = episodes.terminated, distances(episodes.next_achieved, episodes.desired)
    both = is_reached & ended
    if ended.all() or not ended.any():
        return
    always = both.any() and not (is_reached & ~ended).any() and 2 * both.sum() >= ended.sum()
    nearest = ended.sum() >= FEWEST and away[ended].max() < away[~ended].min()
    if always or nearest:
        where = example(both if always else ended, episodes)[1]
        yield Finding(
            "ends-on-success",
            f"Episodes are terminated when the goal is reached or near, and there is no compute_terminated ({where}).",
            "Add compute_terminated(self, achieved_goal, desired_goal, info) to the environment, or pass "
            "EnvReward(env, terminated_fn=...): otherwise relabelled transitions that reach their goal are not "
            "terminated.",
        )
