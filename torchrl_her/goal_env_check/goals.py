"""Checks of the goals and of the rest of the observation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchrl_her.goal_env_check.finding import Finding
from torchrl_her.goal_env_check.probe import PlayedEpisodes, Watcher, distances

FEWEST = 100  # a constant achieved goal is reported only if there are at least this many steps
CHANCE = 1e-3  # a first step that never moves the achieved goal is reported if chance explains it less often
JUMP = 1.5  # a first step that is longer than all others by this factor is a jump
EPISODES = 3  # resets are judged only if there are at least this many episodes
# The limits of distances to achieved goals beyond which desired goals are reported:
FAR = 10.0  # in extents of all achieved goals
FAR_IN_FRAME = 1.5  # in one dimension, in extents of achieved and desired goals
FEWEST_GOALS = 5  # with fewer different goals, a feature could follow them by chance
WIDEST_GOAL = 64  # copies of wider goals are not searched
EXACT = 1e-5  # a copy differs by at most this share of its extent


def check_shapes(achieved: np.ndarray, desired: np.ndarray) -> Iterator[Finding]:
    """Check the shapes and dtypes of an achieved and a desired goal, ``[*goal]``."""
    for name in ("shape", "dtype"):
        one, other = getattr(achieved, name), getattr(desired, name)
        if one != other:
            message = f"The achieved goal has the {name} {one} and the desired goal {other}."
            yield Finding.of(f"goal-{name}s-differ", message)


def check_numbers(episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check that goals are finite numbers."""
    achieved, desired = (episodes.achieved, episodes.next_achieved), (episodes.desired, episodes.next_desired)
    for name, pair in (("achieved", achieved), ("desired", desired)):
        goals = np.concatenate(pair)
        is_wrong = ~np.isfinite(goals.reshape(len(goals), -1)).all(1)
        if is_wrong.any():
            yield Finding.of(
                "goal-nan",
                f"The {name} goal contains NaN or infinity in {is_wrong.sum():,} of {len(goals):,} observations.",
            )


def check_goals(episodes: PlayedEpisodes, watcher: Watcher) -> Iterator[Finding]:
    """Check both goals and the rest of the observation."""
    for path, count in watcher.modified.items():
        yield Finding.of(
            "modified-in-place",
            f"The environment modified the array {path!r} of an observation after returning it ({count:,} times).",
        )
    if not watcher.modified:  # modified values are unreliable
        yield from _check_copies(episodes)
        yield from _check_achieved(episodes)
    yield from _check_desired(episodes)


def _check_achieved(episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check that the achieved goal belongs to its own step."""
    achieved = episodes.next_achieved
    moved = distances(episodes.achieved, achieved)
    if not moved.any():
        if len(moved) >= FEWEST:
            is_constant = (achieved == achieved[:1]).all()
            yield Finding.of(
                "achieved-goal-constant" if is_constant else "achieved-goal-unmoved",
                f"No step changed the achieved goal, in {len(moved):,} steps.",
            )
        return
    before, after = (_contains(each, achieved) for each in (episodes.observation, episodes.next_observation))
    if before and not after:
        yield Finding.of(
            "achieved-goal-lags",
            "The achieved goal after a step seems to belong to the state before it: it equals a part of the "
            "observation before the step, and not of the one after it.",
        )
        return
    first = episodes.step == 0
    jumps, others = moved[first], moved[~first]
    if len(jumps) < EPISODES or not len(others):
        return
    second = moved[episodes.step == 1] > 0
    shows_change = after and (episodes.observation != episodes.next_observation)[first].any()
    is_late = not jumps.any() and second.mean() >= 0.5 and (1 - second.mean()) ** len(jumps) < CHANCE
    if is_late and not shows_change:
        yield Finding.of(
            "achieved-goal-moves-late",
            f"The first step moved the achieved goal in none of {len(jumps):,} episodes, the second in "
            f"{second.sum():,} of {len(second):,}.",
        )
    yield from _check_resets(episodes, jumps, float(others.max()))


def _contains(features: np.ndarray, goals: np.ndarray) -> bool:
    """Return whether observations ``[n, features]`` contain all features of goals ``[n, *goal]`` that vary."""
    goals = goals.reshape(len(goals), -1)
    if goals.shape[1] > WIDEST_GOAL or not features.size:
        return False
    return bool(_copies(features, goals[:, np.ptp(goals, axis=0) > 0]).any(0).all())


def _copies(features: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return which features ``[n, features]`` equal which columns ``[n, columns]``, ``bool [features, columns]``.

    They may differ in sign, unit and origin. Constant features equal no column.
    """
    features, columns = (_in_unit_range(each) for each in (features, columns))
    pairs = [(np.abs(columns - each).max(0), np.abs(columns + each).max(0)) for each in features.T[:, :, None]]
    return np.array([np.fmin(*pair) < EXACT for pair in pairs])


def _in_unit_range(values: np.ndarray) -> np.ndarray:
    """Return columns ``[n, columns]`` in [-1, 1], and NaN for those that are constant or not finite."""
    values = np.where(np.isfinite(values).all(0), values, 0.0).astype(np.float64)
    extent = np.ptp(values, axis=0)
    return (2 * (values - values.min(0)) / np.where(extent > 0, extent, np.nan)) - 1


def _check_resets(episodes: PlayedEpisodes, jumps: np.ndarray, longest: float) -> Iterator[Finding]:
    """Compare the distances that the achieved goal moved in first steps with the longest one in all others."""
    first = np.flatnonzero(episodes.step == 0)
    repeats = [np.array_equal(episodes.achieved[row], episodes.next_achieved[row - 1]) for row in first[1:]]
    stale = np.array([False, *repeats]) & (jumps > longest)
    if stale.sum() >= 2 or (stale & (jumps > JUMP * longest)).any():
        yield Finding.of(
            "achieved-goal-stale-at-reset",
            f"In {stale.sum():,} of {len(first):,} episodes, the achieved goal at reset is the last one of the "
            f"previous episode, and the first step changes it by {np.median(jumps[stale]):.4g} (median); other steps "
            f"change it by at most {longest:.4g}.",
        )


def _check_desired(episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check that the desired goal is constant within an episode, can be reached, and differs between episodes."""
    changed = distances(episodes.desired, episodes.next_desired) > 0
    first = episodes.step == 0
    if changed.any() and not changed[~first].any() and first.sum() >= EPISODES:
        yield Finding.of(
            "desired-goal-stale-at-reset",
            f"The desired goal changes in the first step of {changed.sum():,} of {first.sum():,} episodes, and in no "
            "other step: reset returns the goal of another episode.",
        )
    elif changed.any():
        row = int(changed.argmax())
        yield Finding.of(
            "desired-goal-changes",
            f"The desired goal changes within an episode, in {changed.sum():,} of {len(changed):,} steps; the first is "
            f"step {episodes.step[row]} of episode {episodes.episode[row]}.",
        )
    elif first.sum() >= EPISODES:
        goals = np.unique(episodes.desired.reshape(len(first), -1)[first], axis=0)
        if len(goals) == 1:
            yield Finding.of("one-goal", f"All {first.sum():,} episodes have the same desired goal.")
        yield from _check_far(episodes.next_achieved.reshape(len(first), -1), goals)


def _check_far(achieved: np.ndarray, desired: np.ndarray) -> Iterator[Finding]:
    """Compare desired goals with the extent of achieved ones, ``[n, goal]`` each: units and frames of reference."""
    achieved, desired = (each[:: max(1, len(each) // 500)].astype(np.float64) for each in (achieved, desired))
    low, high = achieved.min(0), achieved.max(0)
    extent = np.linalg.norm(high - low)
    nearest = float(np.median([np.linalg.norm(achieved - goal, axis=1).min() for goal in desired]))
    centre = np.median(desired, axis=0)
    outside = np.maximum(0, np.maximum(low - centre, centre - high))  # [goal]
    extents = np.maximum(high - low + np.ptp(desired, axis=0), extent / 2)
    worst = int((outside / np.maximum(extents, 1e-30)).argmax())
    if not extent or (nearest <= FAR * extent and outside[worst] <= FAR_IN_FRAME * extents[worst]):
        return
    yield Finding.of(
        "desired-goal-far",
        f"Desired goals are far outside the range of achieved goals: in dimension {worst}, desired goals are in "
        f"[{desired[:, worst].min():.4g}, {desired[:, worst].max():.4g}], and achieved goals in "
        f"[{low[worst]:.4g}, {high[worst]:.4g}]. The median distance to the nearest achieved goal is {nearest:.4g}.",
    )


def _check_copies(episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Find features that contain the desired goal, or its difference or distance from the achieved goal."""
    features = episodes.next_observation
    achieved, desired = (
        each.reshape(len(each), -1).astype(np.float64) for each in (episodes.next_achieved, episodes.desired)
    )
    different = len(np.unique(desired, axis=0))
    if desired.shape[1] > WIDEST_GOAL or not features.size or different < FEWEST_GOALS:
        return
    varies = np.ptp(desired, axis=0) > 0
    apart = np.linalg.norm(achieved - desired, axis=1, keepdims=True)
    copied = _copies(features, np.hstack([desired[:, varies], (achieved - desired)[:, varies], apart])).any(1)
    copied &= ~_copies(features, achieved).any(1)  # the achieved goal alone does not explain it
    if copied.any():
        yield Finding.of(
            "desired-goal-in-observation",
            f"The features {np.flatnonzero(copied).tolist()} of the observation contain the desired goal, or its "
            f"difference from the achieved goal (in {len(features):,} steps with {different:,} goals).",
        )
