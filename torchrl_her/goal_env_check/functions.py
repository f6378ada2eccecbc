"""Checks that apply to both compute_reward and compute_terminated."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from torchrl_her.goal_env_check.finding import Finding
from torchrl_her.goal_env_check.probe import TRIED_EVERY, PlayedEpisodes, Probe, distance
from torchrl_her.rewards.comparisons import agree, agrees_with_rows, call_rows

COMPARED_ROWS = 256  # rows of the batch that is compared with single calls
FEWEST = 20  # constant values are reported only if there are at least this many steps


def check_calls(probe: Probe, name: str, what: str) -> Iterator[Finding]:
    """Find functions that fail, modify their arguments, or read entries that are not stored.

    ``name`` is the prefix of the findings' names, and ``what`` the name of the function in messages.
    """
    unknown = sorted(probe.read - probe.info_keys)
    if probe.failure:
        advice = "It is called with (achieved_goal, desired_goal), one pair of goals or a batch."
        if probe.is_of_env:
            advice = f"It is called as {what}(achieved_goal, desired_goal, info), with one pair of goals or a batch."
        if unknown and probe.failure.startswith("KeyError"):
            advice = (
                f"It reads info[{unknown[-1]!r}], which step does not return: return it, or compute it from the goals."
            )
        yield Finding(f"{name}-fails", f"{what} failed: {probe.failure}.", advice)
    elif unknown:
        names = ", ".join(map(repr, unknown))
        keys = ", ".join(f"('next', {key!r})" for key in unknown)
        yield Finding(
            f"{name}-needs-info",
            f"{what} reads {names} from info, which a replay buffer does not store by default.",
            f"Store it with env.set_info_dict_reader(default_info_dict_reader([{names}])), and pass EnvReward(env, "
            f"info_keys=[{keys}]). An entry that was computed with the original goal (a distance, is_success) is wrong "
            "after relabelling: compute it from the goals.",
        )
    if probe.modified:
        names = " and ".join(f"{key} (in {count:,} of {probe.calls:,} calls)" for key, count in probe.modified.items())
        yield Finding(
            f"{name}-modifies-arguments",
            f"{what} modifies its argument {names}.",
            "Work on a copy: for example, replace achieved_goal -= desired_goal with achieved_goal - desired_goal.",
        )


def check_is_function(probe: Probe, name: str, what: str) -> Iterator[Finding]:
    """Find functions that depend on more than their arguments, or ignore one of them."""
    faults = [*_check_repeats(probe, name, what)]
    yield from faults
    actual, own, other, swapped, *_ = probe.values(TRIED_EVERY)
    if faults or len(actual) < FEWEST:
        return
    now, later = probe.values().actual[[*probe.later]], np.array([*probe.later.values()])
    changes = ~agree(now, later, scale_of(now)).numpy()
    # An end that depends on the achieved goal alone, such as a fall, is correct.
    varies = changes.any() or (name == "reward" and len(np.unique([actual, swapped])) > 1)
    if varies and np.array_equal(actual, own) and np.array_equal(actual, other):
        row = int(np.abs(actual - np.median(actual)).argmax())
        yield Finding(
            f"{name}-ignores-desired-goal",
            f"{what} does not use its argument desired_goal: it returns {actual[row] + 0:.6g} for the desired goal of "
            f"the episode, for the achieved goal, and for another goal ({len(actual):,} steps).",
            "Read the argument, not the goal of the running episode (desired_goal instead of self.goal).",
        )
    elif np.array_equal(swapped, own) and not np.array_equal(own, other):
        yield Finding(
            f"{name}-ignores-achieved-goal",
            f"{what} does not use its argument achieved_goal: it returns {own[0] + 0:.6g} for the goal just achieved, "
            f"and for another goal in its place ({len(own):,} steps).",
            "Read the argument, not the state of the environment (achieved_goal instead of self.position).",
        )
    elif changes.any():
        row = int(changes.argmax())
        yield _depends_on_state(
            name,
            f"{what} depends on more than its arguments: for the same arguments, it returned {now[row] + 0:.6g} right "
            f"after the step and {later[row] + 0:.6g} after the last episode ({changes.sum():,} of {len(now):,} steps "
            "differ).",
        )


def _check_repeats(probe: Probe, name: str, what: str) -> Iterator[Finding]:
    """Compare repeated calls with the same arguments in the same state."""
    actual, _, _, _, *repeats = probe.values(TRIED_EVERY)
    differs = np.any([~agree(actual, each, scale_of(actual)).numpy() for each in repeats], axis=0)
    if not differs.any():
        return
    row = int(differs.argmax())
    repeated = ", ".join(f"{each[row] + 0:.6g}" for each in (actual, *repeats))
    where = f"calls with the same arguments differ in {differs.sum():,} of {len(differs):,} steps, such as {repeated}"
    if np.array_equal(repeats[1], repeats[2]):
        yield _depends_on_state(name, f"{what} remembers earlier calls: {where}.")
        return
    yield Finding(
        f"{name}-random",
        f"{what} is random: {where}.",
        "A recomputed value must equal the value that step returns: move the noise into step.",
    )


def scale_of(values: np.ndarray) -> float:
    """Return the scale at which rewards ``[n]`` are compared: their largest magnitude, and at most 1."""
    return min(1.0, float(np.abs(values).max(initial=0.0)))


def _depends_on_state(name: str, message: str) -> Finding:
    advice = (
        "Compute it from achieved_goal, desired_goal and info alone. Put other inputs (a step count, the last action) "
        "into info."
    )
    return Finding(f"{name}-depends-on-state", message, advice)


def check_batch(probe: Probe, episodes: PlayedEpisodes, name: str, what: str) -> Iterator[Finding]:
    """Find functions of the environment that cannot be called with a batch of goals."""
    if not probe.is_of_env:
        return
    rows, achieved, desired = _pairs(episodes)
    infos = [episodes.infos[row] for row in rows]
    read = [key for key in sorted(probe.read) if all(key in info for info in infos)]
    info = {key: np.stack([np.asarray(each[key]) for each in infos]) for key in read}
    begin = time.perf_counter()
    expected = call_rows(probe.function, achieved.copy(), desired.copy(), info)
    cost = (time.perf_counter() - begin) / len(rows)
    try:
        values = np.asarray(probe.function(achieved.copy(), desired.copy(), info))
        problem = f"returned the shape {values.shape} for {len(rows)} pairs of goals"
        if values.size == len(rows):
            problem = f"returned other values for {len(rows)} pairs of goals than for each pair alone"
    except Exception as error:
        values, problem = np.empty(0), f"failed with {len(rows)} pairs of goals ({type(error).__name__}: {error})"
    if agrees_with_rows(values, expected):
        return
    if name == "terminated" and values.size == 1 and values.dtype != object:
        yield Finding(
            "terminated-one-verdict",
            f"{what} returns a single value, {bool(values.item())}, for a batch in which {int(expected.sum())} of "
            f"{len(rows)} pairs of goals end the episode.",
            "Compute it over the last axis (np.linalg.norm(..., axis=-1)) and return one value per row. EnvReward "
            f"calls it row by row: {cost * 1e6:.0f} us per transition.",
        )
        return
    batched = "GoalReward(reward_fn)" if name == "reward" else "EnvReward(env, terminated_fn=...)"
    yield Finding(
        f"{name}-not-batched",
        f"{what} {problem}. EnvReward calls it row by row: {cost * 1e6:.0f} us per transition, {cost * 256e3:.1f} ms "
        "for a batch of 256.",
        f"Use operations over the last axis (axis=-1), or pass a batched function: {batched}.",
    )


def _pairs(episodes: PlayedEpisodes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, ``int64 [rows]``, with achieved goals and goals as hindsight draws them, ``[rows, *goal]``.

    A quarter of the drawn goals equal the achieved goal, a quarter the desired goal, and half are achieved at later
    steps of the episode.
    """
    rows = np.linspace(0, len(episodes.reward) - 1, min(COMPARED_ROWS, len(episodes.reward))).astype(int)
    last = np.searchsorted(episodes.episode, episodes.episode[rows], side="right") - 1
    later = np.random.default_rng(0).integers(rows, last, endpoint=True)
    later[::2] = np.minimum(rows[::2] + 1, last[::2])  # the next outcome: close to the threshold
    achieved = episodes.next_achieved[rows]
    desired = episodes.next_achieved[later]
    desired[::4] = achieved[::4]
    desired[1::4] = episodes.desired[rows][1::4]
    return rows, achieved, desired


def example(rows: np.ndarray, episodes: PlayedEpisodes) -> tuple[int, str]:
    """Return the first step that ``rows``, ``bool [n]``, selects, and a phrase that locates it."""
    row = int(rows.argmax())
    away = distance(episodes.next_achieved[row], episodes.desired[row])
    first = f"step {episodes.step[row]} of episode {episodes.episode[row]}, {away:.4g} from the goal"
    return row, f"{rows.sum():,} of {len(rows):,} steps; the first is {first}"
