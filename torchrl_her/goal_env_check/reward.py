"""Checks of the reward of a goal environment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchrl_her.goal_env_check.finding import Finding
from torchrl_her.goal_env_check.functions import (
    COMPARED_ROWS,
    FEWEST,
    check_batch,
    check_calls,
    check_is_function,
    example,
    scale_of,
)
from torchrl_her.goal_env_check.goals import LAGS
from torchrl_her.goal_env_check.probe import TRIED_EVERY, WIDEST, PlayedEpisodes, Probe, distance, distances
from torchrl_her.rewards.comparisons import agree

FEWEST_LATE = 5  # at least this many rewards must match the next achieved goal
PAIRS = 300  # pairs of achieved and desired goals, few of which should be reached
SHARE_REACHED = 0.9
LINES, BISECTIONS = 10, 40  # lines on which the threshold is searched, and halvings of each
LONG_STEP = 20.0  # a threshold is small if the median step is longer by this factor
SUCCESS_KEYS = ("is_success", "success")


def check_reward(probe: Probe, episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check the reward function. A fault hides the faults that it explains."""
    what = "compute_reward" if probe.is_of_env else "The reward function"
    yield from check_calls(probe, "reward", what)
    if probe.failure or probe.modified:
        return
    faults = [*check_is_function(probe, "reward", what)] or [*_check_values(probe, episodes, what)]
    yield from faults
    if any(fault.name in ("reward-random", "reward-depends-on-state") for fault in faults):
        return
    yield from check_batch(probe, episodes, "reward", what)
    if not faults:
        yield from _check_reached(probe, episodes, what)


def reached(probe: Probe, steps: int) -> np.ndarray:
    """Return which steps reach the goal, ``bool [steps]``: their reward equals the reward for the achieved goal."""
    if probe.failure:
        return np.zeros(steps, dtype=bool)
    return probe.values().actual == probe.values().own


def _check_values(probe: Probe, episodes: PlayedEpisodes, what: str) -> Iterator[Finding]:
    values = probe.values()
    every = np.concatenate(probe.values(TRIED_EVERY))
    if len(values.own) >= FEWEST and (every == every[0]).all():
        yield Finding(
            "reward-constant",
            f"{what} returned {every[0] + 0:.6g} for all {len(every):,} pairs of goals, with the goal just achieved, "
            "with the desired goal, and with goals far away.",
            "It must be higher for a reached goal: compare its arguments (not self.goal), with a threshold above 0 "
            "that is smaller than the distances between goals.",
        )
        return
    scale = scale_of(values.actual)
    better = values.swapped.copy()
    better[:: 2 * TRIED_EVERY] = np.nan  # goals far away need not be valid
    missed = (better > values.own) & ~agree(better, values.own, scale).numpy()
    if missed.any():
        row = int(missed.argmax())
        tried = (~np.isnan(better)).sum()
        yield Finding(
            "reward-misses-achieved-goal",
            f"{what} returns {values.own[row] + 0:.6g} where the achieved goal is the desired one, and "
            f"{better[row] + 0:.6g} where another goal was achieved ({missed.sum():,} of {tried:,} pairs; the first "
            f"with the goal of step {episodes.step[row]} of episode {episodes.episode[row]}).",
            "A reached goal must have the highest reward: check the sign, the threshold (<= instead of <), and the "
            "unit and frame of both goals.",
        )
    differs = ~agree(episodes.reward, values.actual, scale).numpy()
    if differs.any() and _agrees_one_step_later(probe, episodes, differs):
        yield Finding(
            "achieved-goal-lags",
            f"In all {differs.sum():,} steps in which the reward of step differs from the reward of its achieved goal, "
            "it equals the reward of the next achieved goal.",
            LAGS,
        )
    elif differs.any():
        yield _difference(episodes, values.actual, differs, what)


def _agrees_one_step_later(probe: Probe, episodes: PlayedEpisodes, differs: np.ndarray) -> bool:
    """Return whether the rewards of step equal the rewards of the achieved goals one step later."""
    same_episode = np.append(episodes.episode[1:] == episodes.episode[:-1], False)
    steps = np.concatenate([np.flatnonzero(rows & same_episode)[:PAIRS] for rows in (differs, ~differs)])
    goals, desired, infos = episodes.next_achieved, episodes.desired, episodes.infos
    shifted = [probe.call(goals[step + 1], desired[step], infos[step]) for step in steps]
    return (differs & same_episode).sum() >= FEWEST_LATE and bool(agree(shifted, episodes.reward[steps]).all())


def _difference(episodes: PlayedEpisodes, computed: np.ndarray, differs: np.ndarray, what: str) -> Finding:
    """Describe how the reward of step differs from the computed one."""
    row, where = example(differs, episodes)
    message = f"step returned the reward {episodes.reward[row] + 0:.6g} and {what} {computed[row] + 0:.6g} ({where})."
    advice = "Let step return self.compute_reward(achieved_goal, desired_goal, info) for the goals that it returns."
    away = distances(episodes.next_achieved, episodes.desired)
    by_step, by_function = (np.unique(each) for each in (episodes.reward, computed))
    matrix = np.stack([computed, np.ones_like(computed)], axis=1)
    scale, offset = np.linalg.lstsq(matrix, episodes.reward, rcond=None)[0]
    if len(by_function) > 1 and agree(matrix @ [scale, offset], episodes.reward).all():
        message += f" The reward of step is {scale:.4g} times the other"
        message += "." if abs(offset) < 1e-6 else f", plus {offset:.4g}."
    elif len(by_step) == 2 and set(by_function) <= set(by_step) and _has_threshold(away, episodes.reward):
        limits = [away[each == by_step[1]].max(initial=0.0) for each in (episodes.reward, computed)]
        message += f" step calls goals reached up to a distance of {limits[0]:.4g}, {what} up to {limits[1]:.4g}."
    else:
        largest = np.abs(episodes.reward - computed).max()
        message += f" They differ by up to {largest:.4g}."
        advice += " A bonus or penalty that is not a function of the goals must come from info."
    return Finding("reward-differs", message, advice)


def _has_threshold(away: np.ndarray, rewards: np.ndarray) -> bool:
    """Return whether all goals with the higher of two rewards are nearer than all goals with the lower one."""
    is_reached = rewards == rewards.max()
    return bool(away[is_reached].max() <= away[~is_reached].min())


def _check_reached(probe: Probe, episodes: PlayedEpisodes, what: str) -> Iterator[Finding]:
    """Check which goals count as reached, if all reached goals have the same reward."""
    actual, own, *_ = probe.values()
    is_reached = reached(probe, len(own))
    # The difference cancels a cost that does not depend on goals.
    is_sparse = len(np.unique(np.round(actual - own, 6))) <= 2
    if is_sparse and not is_reached.any():
        yield _none_reached(probe, episodes)
    if (own == own[0]).all() and len(own) >= FEWEST:
        pairs = np.random.default_rng(0).integers(len(own), size=(2, PAIRS)).T
        goals, desired, infos = episodes.next_achieved, episodes.desired, episodes.infos
        share = np.mean([probe.call(goals[row], desired[other], infos[row]) == own[0] for row, other in pairs])
        if share > SHARE_REACHED:
            yield Finding(
                "reward-constant" if share == 1 else "reward-reaches-everything",
                f"{what} counts {share:.0%} of {PAIRS} pairs of an achieved and a desired goal as reached (reward "
                f"{own[0] + 0:.6g}).",
                "Use a threshold that is smaller than the distances between goals, in the unit of the goals.",
            )
    if is_sparse:
        yield from _check_success(episodes, actual, own, is_reached)


def _none_reached(probe: Probe, episodes: PlayedEpisodes) -> Finding:
    """Compare the distance within which a goal is reached with the lengths of steps."""
    achieved, desired = episodes.next_achieved, episodes.desired
    message = f"No goal was reached in {len(desired):,} steps."
    unchecked = "At a reached goal, the reward of step and the end of the episode were not checked"
    advice = f"{unchecked}: play more steps."
    moved = distances(episodes.achieved, achieved)
    step = float(np.median(moved[moved > 0])) if moved.any() else 0.0
    if achieved.dtype.kind == desired.dtype.kind == "f" and step and not _share_grid(achieved, desired, 1e-6 * step):
        limit = _threshold(probe, episodes)
        message += (
            f" A goal is reached within about {limit:.4g}. When the achieved goal moves, it moves by {step:.4g} per "
            f"step (median), and by at most {moved.max():.4g}."
        )
        if step > LONG_STEP * limit:
            advice = f"A step seldom ends so near a goal: is the threshold in the unit of the goals? {unchecked}."
            return Finding("threshold-too-small", message, advice)
    return Finding("no-goal-reached", message, advice)


def _threshold(probe: Probe, episodes: PlayedEpisodes) -> float:
    """Return the distance within which a goal is reached: the median of `LINES` from achieved to desired goals."""
    limits = []
    for row in np.linspace(0, len(episodes.reward) - 1, LINES).astype(int):
        achieved, desired, own = episodes.next_achieved[row], episodes.desired[row], probe.values().own[row]
        reached = 0.0  # the part of the line in which goals are reached
        for halving in range(1, BISECTIONS + 1):
            goal = achieved + (reached + 0.5**halving) * (desired - achieved)
            if probe.call(achieved, goal.astype(desired.dtype), episodes.infos[row]) == own:
                reached += 0.5**halving
        limits.append(reached * distance(achieved, desired))
    return float(np.median(limits))


def _share_grid(achieved: np.ndarray, desired: np.ndarray, width: float) -> bool:
    """Return whether goals ``[n, *goal]`` share coordinates in each dimension, up to ``width``."""
    columns = (np.round(each.reshape(len(each), -1).astype(np.float64) / width).T for each in (achieved, desired))
    return all(np.isin(*pair).any() for pair in zip(*columns, strict=True))


def _check_success(
    episodes: PlayedEpisodes, actual: np.ndarray, own: np.ndarray, is_reached: np.ndarray
) -> Iterator[Finding]:
    """Compare the success in ``info`` with the reward. Success may stay True after the goal was reached."""
    first = np.searchsorted(episodes.episode, episodes.episode)  # first step of the episode of each step
    counts = np.append(0, np.cumsum(is_reached))
    was_reached = counts[1:] > counts[first]
    for key in SUCCESS_KEYS:
        if not all(key in info for info in episodes.infos):
            continue
        success = np.array([bool(np.all(info[key])) for info in episodes.infos])
        differs = np.where(success, ~was_reached, is_reached)
        if differs.any():
            row, where = example(differs, episodes)
            yield Finding(
                "success-differs",
                f"info[{key!r}] is {success[row]} where the reward is {actual[row] + 0:.6g}, and a reached goal has "
                f"the reward {own[row] + 0:.6g} ({where}).",
                "Compute both from the same distance and threshold.",
            )


FEWEST_ENDS = 3  # fewer ends near the goal can be a coincidence
SHARE_NEAREST = 0.7  # the share that chance gives is 1 / the length of an episode
LONG = 100  # an episode of more steps is long


def check_termination(
    probe: Probe | None, episodes: PlayedEpisodes, is_reached: np.ndarray, time_limit: int | None
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


def _check_time_limit(episodes: PlayedEpisodes, is_explained: np.ndarray) -> Iterator[Finding]:
    """Find out whether all ends of episodes, except for explained ones, ``bool [n]``, come from a time limit.

    They do if they follow the same number of steps, and if the observations do not show them.
    """
    ended = (episodes.terminated | episodes.truncated) & ~is_explained
    last = episodes.step == episodes.step.max()
    is_limit = ended.sum() >= FEWEST_ENDS and (episodes.terminated & last)[ended].all() and not last.all()
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


def _are_distinct(last: np.ndarray, episodes: PlayedEpisodes) -> bool:
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
    some = np.flatnonzero(last)[:COMPARED_ROWS]
    away = np.square(features).sum(1) - 2 * features[some] @ features.T  # [rows, n], up to a constant in each row
    away[episodes.episode[some, None] == episodes.episode] = np.inf
    return bool(last[away.argmin(1)].mean() > SHARE_NEAREST)


def _check_ends_on_success(episodes: PlayedEpisodes, is_reached: np.ndarray) -> Iterator[Finding]:
    """Find out whether success ends episodes.

    It does if every success is an end and most ends are successes, or if all ends are nearer than all other steps.
    """
    ended, away = episodes.terminated, distances(episodes.next_achieved, episodes.desired)
    both = is_reached & ended
    if ended.all() or not ended.any():
        return
    always = both.any() and not (is_reached & ~ended).any() and 2 * both.sum() >= ended.sum()
    nearest = ended.sum() >= FEWEST_ENDS and away[ended].max() < away[~ended].min()
    if always or nearest:
        where = example(both if always else ended, episodes)[1]
        yield Finding(
            "ends-on-success",
            f"Episodes are terminated when the goal is reached or near, and there is no compute_terminated ({where}).",
            "Add compute_terminated(self, achieved_goal, desired_goal, info) to the environment, or pass "
            "EnvReward(env, terminated_fn=...): otherwise relabelled transitions that reach their goal are not "
            "terminated.",
        )
