"""Checks of the functions that compute rewards and ends of episodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from torchrl_her.goal_env_check.finding import Finding
from torchrl_her.goal_env_check.probe import PlayedEpisodes, Probe, distance, distances
from torchrl_her.rewards.comparisons import agree, agrees_with_rows, are_discrete, call_rows

COMPARED_ROWS = 256  # rows of the batch that is compared with single calls
FEWEST = 20  # constant values are reported only if there are at least this many steps
PAIRS = 300  # pairs of achieved and desired goals, few of which should be reached
SHARE_REACHED = 0.9
NEAR = 20  # a goal at this part of a step should be reached
SUCCESS_KEYS = ("is_success", "success")
FEWEST_ENDS = 3  # fewer ends near the goal can be a coincidence


def check_functions(probes: list[Probe], episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check the reward function, and the function that ends episodes or that one is missing."""
    reward, *others = probes
    yield from _check_reward(reward, episodes)
    if reward.failure or reward.modified:  # step probably modifies its goals, too
        return
    if others:
        yield from _check_termination(others[0], episodes)
    else:
        # The reward of a reached goal equals the reward for the achieved goal.
        yield from _check_ends_on_success(episodes, reward.values.actual == reward.values.own)


def _check_reward(probe: Probe, episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check the reward function. A fault hides the faults that it explains."""
    yield from _check_calls(probe)
    if probe.failure or probe.modified:
        return
    faults = [*_check_is_function(probe)] or [*_check_values(probe, episodes)]
    yield from faults
    if any(fault.name in ("reward-random", "reward-depends-on-state") for fault in faults):
        return
    yield from _check_batch(probe, episodes)
    if not faults:
        yield from _check_reached(probe, episodes)


def _check_termination(probe: Probe, episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check the function that ends episodes."""
    yield from _check_calls(probe)
    if probe.failure:
        return
    faults = [*_check_is_function(probe)]
    yield from faults or _check_step(probe, episodes.terminated, episodes)
    yield from _check_batch(probe, episodes)


# Both functions


def _check_calls(probe: Probe) -> Iterator[Finding]:
    """Find functions that fail, modify their arguments, or read entries that are not stored."""
    name, what, unknown = probe.name, probe.what, sorted(probe.read - probe.info_keys)
    if probe.failure:
        yield Finding.of(f"{name}-fails", f"{what} failed: {probe.failure}.")
    elif unknown:
        names = ", ".join(map(repr, unknown))
        yield Finding.of(
            f"{name}-needs-info",
            f"{what} reads {names} from info, which a replay buffer does not store by default.",
            names=names,
            keys=", ".join(f"('next', {key!r})" for key in unknown),
        )
    if probe.modified:
        names = " and ".join(f"{key} (in {count:,} of {probe.calls:,} calls)" for key, count in probe.modified.items())
        yield Finding.of(f"{name}-modifies-arguments", f"{what} modifies its argument {names}.")


def _check_is_function(probe: Probe) -> Iterator[Finding]:
    """Find functions that depend on more than their arguments, or ignore one of them."""
    actual, own, other, swapped, again = probe.values
    now, later = actual[[*probe.later]], np.array([*probe.later.values()])
    is_random = ~agree(actual, again, _scale_of(actual)).numpy()
    changes = ~agree(now, later, _scale_of(now)).numpy()
    # An end that depends on the achieved goal alone, such as a fall, is correct.
    varies = changes.any() or (probe.name == "reward" and len(np.unique([actual, swapped])) > 1)
    ignores_desired = varies and np.array_equal(actual, own) and np.array_equal(actual, other)
    ignores_achieved = np.array_equal(swapped, own) and not np.array_equal(own, other)
    if is_random.any():
        name, rows, one, two = "random", is_random, actual, again
        problem = "is random, or remembers earlier calls: repeated calls with the same arguments return"
    elif len(actual) < FEWEST:
        return
    elif ignores_desired:
        name, rows, one, two = "ignores-desired-goal", actual == other, actual, other
        problem = "does not use its argument desired_goal: for the desired goal and for another one, it returns"
    elif ignores_achieved:
        name, rows, one, two = "ignores-achieved-goal", own == swapped, own, swapped
        problem = "does not use its argument achieved_goal: for the achieved goal and for another one, it returns"
    elif changes.any():
        name, rows, one, two = "depends-on-state", changes, now, later
        problem = "depends on more than its arguments: right after the step and after the last episode, it returned"
    else:
        return
    row = int(rows.argmax())
    values = f"{one[row] + 0:.6g} and {two[row] + 0:.6g}"
    yield Finding.of(
        f"{probe.name}-{name}", f"{probe.what} {problem} {values} (in {rows.sum():,} of {len(rows):,} steps)."
    )


def _check_batch(probe: Probe, episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Find functions of the environment that cannot be called with a batch of goals."""
    if not probe.is_of_env:
        return
    steps = len(episodes.reward)
    rows = np.linspace(0, steps - 1, min(COMPARED_ROWS, steps)).astype(int)
    achieved = episodes.next_achieved[rows]
    # Goals as hindsight draws them: achieved goals, desired goals, and next outcomes, which are near the threshold.
    desired = episodes.next_achieved[np.minimum(rows + 1, steps - 1)]
    desired[::4] = achieved[::4]
    desired[1::4] = episodes.desired[rows][1::4]
    infos = [episodes.infos[row] for row in rows]
    read = [key for key in sorted(probe.read) if all(key in info for info in infos)]
    info = {key: np.stack([np.asarray(each[key]) for each in infos]) for key in read}
    expected = call_rows(probe.function, achieved.copy(), desired.copy(), info)
    try:
        values = np.asarray(probe.function(achieved.copy(), desired.copy(), info))
        problem = f"returned other values (of the shape {values.shape}) for {len(rows)} pairs than for each pair alone"
    except Exception as error:
        values, problem = np.empty(0), f"failed with {len(rows)} pairs of goals ({type(error).__name__}: {error})"
    if agrees_with_rows(values, expected):
        return
    if probe.name == "terminated" and values.size == 1 and values.dtype != object:
        yield Finding.of(
            "terminated-one-verdict",
            f"{probe.what} returns a single value, {bool(values.item())}, for a batch in which {int(expected.sum())} "
            f"of {len(rows)} pairs of goals end the episode.",
        )
    else:
        yield Finding.of(f"{probe.name}-not-batched", f"{probe.what} {problem}.")


def _scale_of(values: np.ndarray) -> float:
    """Return the scale at which rewards ``[n]`` are compared: their largest magnitude, and at most 1."""
    return min(1.0, float(np.abs(values).max(initial=0.0)))


def _check_step(probe: Probe, returned: np.ndarray, episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Compare the values that ``step`` returned, ``[n]``, with those of the function."""
    computed = probe.values.actual
    differs = ~agree(returned, computed, _scale_of(computed)).numpy()
    if differs.any():
        row, where = _example(differs, episodes)
        values = f"{probe.name}={returned[row] + 0:.6g} and {probe.what} {computed[row] + 0:.6g}"
        yield Finding.of(f"{probe.name}-differs", f"step returned {values} ({where}).")


def _example(rows: np.ndarray, episodes: PlayedEpisodes) -> tuple[int, str]:
    """Return the first step that ``rows``, ``bool [n]``, selects, and a phrase that locates it."""
    row = int(rows.argmax())
    away = distance(episodes.next_achieved[row], episodes.desired[row])
    first = f"step {episodes.step[row]} of episode {episodes.episode[row]}, {away:.4g} from the goal"
    return row, f"{rows.sum():,} of {len(rows):,} steps; the first is {first}"


# Rewards


def _check_values(probe: Probe, episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Compare the rewards of reached and of other goals, and the rewards of ``step`` with those of the function."""
    values = probe.values
    every = np.concatenate(values)
    if len(values.own) >= FEWEST and (every == every[0]).all():
        yield Finding.of(
            "reward-constant", f"{probe.what} returned {every[0] + 0:.6g} for all {len(every):,} pairs of goals."
        )
        return
    missed = (values.swapped > values.own) & ~agree(values.swapped, values.own, _scale_of(values.actual)).numpy()
    if missed.any():
        row = int(missed.argmax())
        yield Finding.of(
            "reward-misses-achieved-goal",
            f"{probe.what} returns {values.own[row] + 0:.6g} where the achieved goal is the desired one, and "
            f"{values.swapped[row] + 0:.6g} where another goal was achieved ({missed.sum():,} of {len(missed):,} "
            f"pairs; the first with the goal of step {episodes.step[row]} of episode {episodes.episode[row]}).",
        )
    yield from _check_step(probe, episodes.reward, episodes)


def _check_reached(probe: Probe, episodes: PlayedEpisodes) -> Iterator[Finding]:
    """Check which goals count as reached, if all reached goals have the same reward."""
    actual, own, *_ = probe.values
    is_reached = actual == own
    # The difference cancels a cost that does not depend on goals.
    is_sparse = len(np.unique(np.round(actual - own, 6))) <= 2
    if is_sparse and not is_reached.any():
        yield _none_reached(probe, episodes)
    if (own == own[0]).all() and len(own) >= FEWEST:
        pairs = np.random.default_rng(0).integers(len(own), size=(2, PAIRS)).T
        goals, desired, infos = episodes.next_achieved, episodes.desired, episodes.infos
        share = np.mean([probe.call(goals[row], desired[other], infos[row]) == own[0] for row, other in pairs])
        if share > SHARE_REACHED:
            yield Finding.of(
                "reward-reaches-everything",
                f"{probe.what} counts {share:.0%} of {PAIRS} pairs of an achieved and a desired goal as reached "
                f"(reward {own[0] + 0:.6g}).",
            )
    if is_sparse:
        yield from _check_success(episodes, actual, own, is_reached)


def _none_reached(probe: Probe, episodes: PlayedEpisodes) -> Finding:
    """Find out whether goals at a twentieth of a step from achieved goals are missed."""
    message = f"No goal was reached in {len(episodes.desired):,} steps."
    moved = distances(episodes.achieved, episodes.next_achieved)
    rows = np.flatnonzero(moved)[:PAIRS]
    if not len(rows):
        return Finding.of("no-goal-reached", message)
    message += (
        f" When the achieved goal moves, it moves by {np.median(moved[moved > 0]):.4g} per step (median), and by at "
        f"most {moved.max():.4g}."
    )
    after, infos, own = episodes.next_achieved[rows], [episodes.infos[row] for row in rows], probe.values.own[rows]
    steps = np.subtract(after, episodes.achieved[rows], dtype=np.float64)
    tensors = (torch.from_numpy(each.reshape(len(rows), -1)) for each in (steps, after.astype(np.float64)))
    if are_discrete(*tensors):
        return Finding.of("no-goal-reached", message)
    near = (after - steps / NEAR).astype(after.dtype)
    calls = zip(after, near, infos, strict=True)
    share = np.mean([probe.call(*arguments) for arguments in calls] != own)
    if share <= 0.5:
        return Finding.of("no-goal-reached", message)
    message += f" Goals at a twentieth of a step from the achieved goal are missed ({share:.0%})."
    return Finding.of("threshold-too-small", message)


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
            row, where = _example(differs, episodes)
            yield Finding.of(
                "success-differs",
                f"info[{key!r}] is {success[row]} where the reward is {actual[row] + 0:.6g}, and a reached goal has "
                f"the reward {own[row] + 0:.6g} ({where}).",
            )


# Ends of episodes


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
        where = _example(both if always else ended, episodes)[1]
        yield Finding.of(
            "ends-on-success",
            f"Episodes are terminated when the goal is reached or near, and there is no compute_terminated ({where}).",
        )
