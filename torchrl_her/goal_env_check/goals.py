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
WIDEST_GOAL = 64  # linear relations are searched only for goals with at most this many features
EXACT, CLEAR = 1e-5, 1e-2  # residuals below EXACT are a linear relation, and above CLEAR none

LAGS = "Compute the achieved goal after the simulation has advanced."


def check_shapes(achieved: np.ndarray, desired: np.ndarray) -> Iterator[Finding]:
    """Check the shapes and dtypes of an achieved and a desired goal, ``[*goal]``."""
    if achieved.shape != desired.shape:
        yield Finding(
            "goal-shapes-differ",
            f"The achieved goal has the shape {achieved.shape} and the desired goal {desired.shape}.",
            "Return goals of one shape, or pass a goal_fn that maps the achieved state to a goal.",
        )
    if achieved.dtype != desired.dtype:
        yield Finding(
            "goal-dtypes-differ",
            f"The achieved goal is {achieved.dtype} and the desired goal {desired.dtype}.",
            "Return both with the same dtype: relabelling converts one to the other.",
        )


def check_numbers(episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check that goals are finite numbers."""
    achieved, desired = episodes.next_achieved, episodes.desired
    for name, *goals in (("achieved", episodes.achieved, achieved), ("desired", desired, episodes.next_desired)):
        missing = sum(int((~np.isfinite(each)).reshape(len(each), -1).any(1).sum()) for each in goals)
        if missing:
            yield Finding(
                "goal-nan",
                f"The {name} goal contains NaN or infinity in {missing:,} of {2 * len(desired):,} observations.",
                "Return a finite number for each component of a goal. Put unknown quantities into the observation.",
            )


def check_achieved(episodes: PlayedEpisodes, watcher: Watcher) -> Iterator[Finding]:
    """Check that the achieved goal belongs to its own step."""
    moved = distances(episodes.achieved, episodes.next_achieved)
    if not moved.any() and len(moved) >= FEWEST:
        yield _constant(episodes.next_achieved)
    if not moved.any() or watcher.modified:  # modified values are unreliable
        return
    if _lags(episodes):
        yield Finding(
            "achieved-goal-lags",
            "The achieved goal after a step seems to belong to the state before it: it is an exact linear function of "
            "the observation before the step, and not of the one after it.",
            LAGS,
        )
        return
    yield from _check_first_steps(episodes, moved)


def _constant(achieved: np.ndarray) -> Finding:
    """Return the finding for achieved goals ``[n, *goal]`` that no step changed."""
    if (achieved == achieved[:1]).all():
        return Finding(
            "achieved-goal-constant",
            f"The achieved goal was the same in all {len(achieved):,} steps.",
            "Compute it from the state after each step.",
        )
    return Finding(
        "achieved-goal-unmoved",
        f"No step changed the achieved goal, in {len(achieved):,} steps; it differs between episodes.",
        "If it should change, compute it from the state after each step, not only in reset. If random actions cannot "
        "change it, hindsight has nothing to learn from until the policy does.",
    )


def _lags(episodes: PlayedEpisodes) -> bool:
    """Return whether the observations show that achieved goals are one step late."""
    goals, features = (each.reshape(len(each), -1) for each in (episodes.next_achieved, episodes.observation))
    if goals.shape[1] > WIDEST_GOAL or not features.size or len(goals) < 3 * features.shape[1]:
        return False
    before = _residuals(episodes.observation, goals).max()
    after = _residuals(episodes.next_observation, goals).max()
    return bool(before < EXACT and after > CLEAR)


def _check_first_steps(episodes: PlayedEpisodes, moved: np.ndarray) -> Iterator[Finding]:
    """Compare the distances that the achieved goal ``moved`` in first steps with those in all others."""
    first = np.flatnonzero(episodes.step == 0)
    jumps, others = moved[first], np.delete(moved, first)
    if len(first) < EPISODES or not len(others):
        return
    second = moved[episodes.step == 1] > 0
    is_late = not jumps.any() and second.mean() >= 0.5 and (1 - second.mean()) ** len(first) < CHANCE
    if is_late and not _is_in_observation(episodes, first):
        yield Finding(
            "achieved-goal-moves-late",
            f"The first step moved the achieved goal in none of {len(first):,} episodes, the second in "
            f"{second.sum():,} of {len(second):,}.",
            f"If the first action already changes the state, the achieved goal is one step late. {LAGS} If it does "
            "not (an actuator with a delay, a mass at rest with explicit Euler steps), ignore this.",
        )
    longest = float(others.max())
    repeats = [np.array_equal(episodes.achieved[row], episodes.next_achieved[row - 1]) for row in first[1:]]
    stale = np.array([False, *repeats]) & (jumps > longest)
    if stale.sum() >= 2 or (stale & (jumps > JUMP * longest)).any():
        yield Finding(
            "achieved-goal-stale-at-reset",
            f"In {stale.sum():,} of {len(first):,} episodes, the achieved goal at reset is the last one of the "
            f"previous episode, and the first step changes it by {np.median(jumps[stale]):.4g} (median); other steps "
            f"change it by at most {longest:.4g}.",
            "Compute it in reset, after the new state is set.",
        )
        return
    goals = episodes.next_achieved[first].reshape(len(first), -1).astype(np.float64)
    spread = float(np.linalg.norm(np.ptp(goals, axis=0)))
    jump = float(np.median(jumps))
    if jump > JUMP * longest and jump > spread / 10:
        yield Finding(
            "achieved-goal-jumps",
            f"The achieved goal changes by {jump:.4g} in the first step of an episode (median of {len(first):,}), and "
            f"by at most {longest:.4g} in all other steps.",
            "Reset may return the goal of another state: compute it after the new state is set. If the first step "
            "really moves further than any other (a throw, a fall), ignore this.",
        )


def _is_in_observation(episodes: PlayedEpisodes, first: np.ndarray) -> bool:
    """Return whether the achieved goal is a part of the observation, which changes in the ``first`` steps."""
    before, after = episodes.observation, episodes.next_observation
    goals = episodes.next_achieved.reshape(len(after), -1).astype(np.float64)
    if goals.shape[1] > WIDEST_GOAL or not (before[first] != after[first]).any():
        return False
    return all((np.abs(after.T - goal).max(1) <= EXACT * np.ptp(goal)).any() for goal in goals.T)


def check_desired(episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check that the desired goal is constant within an episode, can be reached, and differs between episodes."""
    changed = distances(episodes.desired, episodes.next_desired) > 0
    first = episodes.step == 0
    if changed.any():
        if not changed[~first].any() and first.sum() >= EPISODES:
            yield Finding(
                "desired-goal-stale-at-reset",
                f"The desired goal changes in the first step of {changed.sum():,} of {first.sum():,} episodes, and in "
                "no other step: reset returns the goal of another episode.",
                "Draw the new goal in reset before you build the observation.",
            )
        else:
            row = int(changed.argmax())
            yield Finding(
                "desired-goal-changes",
                f"The desired goal changes within an episode, in {changed.sum():,} of {len(changed):,} steps; the "
                f"first is step {episodes.step[row]} of episode {episodes.episode[row]}.",
                "Draw it only in reset, and end the episode (truncated=True) before the goal changes.",
            )
        return
    if first.sum() < EPISODES:
        return
    goals = np.unique(episodes.desired.reshape(len(first), -1)[first], axis=0)
    if len(goals) == 1:
        yield Finding(
            "one-goal",
            f"All {first.sum():,} episodes have the same desired goal.",
            "Without hindsight, networks can ignore it. With hindsight, they must read it: relabelled goals differ.",
        )
    yield from _check_far(episodes.next_achieved.reshape(len(first), -1), goals)


def check_seed(one: np.ndarray, other: np.ndarray, seed: int) -> Iterator[Finding]:
    """Compare the desired goals of two resets without a seed, each after a reset with the same seed."""
    if one.shape == other.shape and not np.allclose(one, other, equal_nan=True):
        yield Finding(
            "reset-ignores-seed",
            f"After reset(seed={seed}), reset() returned the desired goal {_text(one)} at first, and {_text(other)} "
            "when both were repeated.",
            "Training with a seed cannot be repeated. Call super().reset(seed=seed) in reset, and draw all random "
            "numbers from self.np_random.",
        )


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
    yield Finding(
        "desired-goal-far",
        f"Desired goals are far outside the range of achieved goals: in dimension {worst}, desired goals are in "
        f"[{desired[:, worst].min():.4g}, {desired[:, worst].max():.4g}], and achieved goals in "
        f"[{low[worst]:.4g}, {high[worst]:.4g}]. The median distance to the nearest achieved goal is {nearest:.4g}.",
        "Use the same unit and frame of reference for both. If random actions do not get far, this may be intended.",
    )


def check_observation(episodes: PlayedEpisodes, watcher: Watcher) -> Iterator[Finding]:
    """Check arrays that are reused, the observation space, and copies of the desired goal in the observation."""
    for path, count in watcher.modified.items():
        yield Finding(
            "modified-in-place",
            f"The environment modified the array {path!r} of an observation after it had returned it ({count:,} "
            "times).",
            "Return a copy (self.position.copy()): otherwise stored observations change.",
        )
    if watcher.outside is not None:
        number, observation = watcher.outside
        yield Finding(
            "observation-outside-space",
            f"Observation {number} is not in observation_space: {_why_outside(watcher.space, observation)}.",
            "Correct the space, or the dtype and the values of the returned observation.",
        )
    if not watcher.modified:
        yield from _check_copies(episodes)


def _check_copies(episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Find features that are a linear function of achieved and desired goals and of their distance."""
    features, width = episodes.next_observation, episodes.desired[0].size
    if width > WIDEST_GOAL or not features.size:
        return
    achieved, desired = (
        each.reshape(len(each), -1).astype(np.float64) for each in (episodes.next_achieved, episodes.desired)
    )
    different = len(np.unique(desired, axis=0))
    if different < 3:
        return
    features = np.where(np.isfinite(features).all(0), features, 0.0)
    varies = np.ptp(desired, axis=0) > 0  # a constant dimension would match any constant feature
    apart = np.linalg.norm(achieved - desired, axis=1, keepdims=True)
    copied: np.ndarray = np.zeros(features.shape[1], dtype=bool)
    if different > 2 * width + 3:  # else a feature that is constant in each episode could fit by chance
        copied = _residuals(np.hstack([achieved, desired, apart]), features) < EXACT
    simple = np.hstack([desired[:, varies], (desired - achieved)[:, varies], (achieved - desired)[:, varies], apart])
    for feature, column in enumerate(features.T):
        largest = np.abs(simple - column[:, None]).max(0)
        copied[feature] |= bool((largest < EXACT * max(np.ptp(column), 1e-30)).any())
    copied &= _residuals(achieved, features) > CLEAR  # the achieved goal alone does not explain it
    if copied.any():
        yield Finding(
            "desired-goal-in-observation",
            f"The features {np.flatnonzero(copied).tolist()} of the observation contain the desired goal, or its "
            f"difference from the achieved goal (in {len(features):,} steps with {different:,} goals).",
            "Leave them out: relabelling does not replace them, and networks would learn the original goal with the "
            "new goal's reward. Let networks read 'desired_goal' besides the observation.",
        )


def _residuals(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the largest residual of the best linear fit to each column, relative to its range, ``[outputs]``.

    Constant columns have the residual 0.
    """
    inputs, outputs = (np.where(np.isfinite(each).all(0), each, 0.0) for each in (inputs, outputs))
    matrix = np.hstack([inputs.reshape(len(inputs), -1), np.ones((len(inputs), 1))]).astype(np.float64)
    outputs = outputs.astype(np.float64)
    scale = np.abs(matrix).max(0)
    matrix = matrix / np.where(scale > 0, scale, 1)
    weights = np.linalg.lstsq(matrix, outputs, rcond=None)[0]
    extent = np.ptp(outputs, axis=0)
    return np.abs(matrix @ weights - outputs).max(0) / np.where(extent > 0, extent, 1)


def _text(goal: np.ndarray) -> str:
    return np.array2string(goal, precision=4, threshold=6, edgeitems=3).replace("\n", "")


def _why_outside(space: object, observation: object, path: str = "") -> str:
    """Describe the part of an observation that is not in its space, with the numbers."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict) and isinstance(observation, dict):
        if set(parts) != set(observation):
            return f"it has the entries {sorted(observation)}, the space {sorted(parts)}"
        for name, part in parts.items():
            if not part.contains(observation[name]):
                return _why_outside(part, observation[name], f"{path}.{name}" if path else name)
    name = repr(path) if path else "it"
    if not isinstance(observation, np.ndarray):
        return f"{name} is {observation!r} of type {type(observation).__name__}, the space {space}"
    shape, dtype = (getattr(space, each, None) for each in ("shape", "dtype"))
    if observation.shape != shape:
        return f"{name} has the shape {observation.shape}, the space {shape}"
    if dtype is not None and not np.can_cast(observation.dtype, dtype):
        return f"{name} has the dtype {observation.dtype}, the space {dtype}"
    return f"{name} has values in [{observation.min():.6g}, {observation.max():.6g}] outside of {space}"
