"""Checks a goal environment before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.envs import GymWrapper

from torchrl_her._private import gymnasium_env_of
from torchrl_her.goal_env_check.finding import FINDINGS, Finding, GoalEnvReport
from torchrl_her.goal_env_check.functions import check_functions
from torchrl_her.goal_env_check.goals import check_goals, check_numbers, check_shapes
from torchrl_her.goal_env_check.probe import Goals, PlayedEpisodes, Probe, Unplayable, Watcher, play, reset
from torchrl_her.keys import HERKeys, check_keys
from torchrl_her.rewards.env_reward import EnvReward, open_env
from torchrl_her.rewards.goal_reward import GoalReward


def check_goal_env(
    env: Any,
    reward: GoalReward | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    *,
    keys: HERKeys = HERKeys(),
    goal_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    steps: int | None = None,
    seed: int = 0,
    ignore: Iterable[str] = (),
) -> GoalEnvReport:
    """Play random episodes of a goal environment, and find mistakes that make hindsight fail.

    After each step, the reward is computed for the goals of the step and compared with the reward that ``step``
    returned. It is also computed for other goals. In every second episode, an action is repeated as long as it
    approaches the goal, so that goals are reached.

    Args:
        env (gymnasium.Env | EnvBase | Callable | str): a Gymnasium environment, a TorchRL wrapper of one (its
            transforms are ignored), a function that creates either, or the id of a Gymnasium environment. An
            environment that is created here is also closed.
        reward (GoalReward | Callable, optional): the reward that you pass to `HERTransform`, if it is a function of
            the goals. Default: ``EnvReward(env)``.

    Keyword Args:
        keys (HERKeys): the keys of both goals in the observation, as in `HERTransform`. Default: ``HERKeys()``.
        goal_fn (Callable, optional): maps achieved entries ``[batch, *state]`` to goals ``[batch, *goal]``.
        steps (int, optional): the number of steps to play. Default: 2,000, or as many as fit into six seconds.
        seed (int): the seed of the environment and of the actions. Default: 0.
        ignore (str | Iterable[str]): names of findings to leave out. Default: none.

    Returns:
        GoalEnvReport: the findings in three lists, ``errors``, ``warnings`` and ``notes``. Each finding has a name, a
            message and advice. ``print(report)`` shows all of them.

    Raises:
        ValueError: if ``ignore`` contains an unknown name, or if ``steps`` is less than 1.
        TypeError: if ``env`` is not an environment, if ``keys`` are not `HERKeys`, or if ``reward`` cannot be called
            with two goals.

    Examples:
        >>> import torchrl_her.envs
        >>> from torchrl_her import check_goal_env
        >>> print(check_goal_env("torchrl_her/PointReach-v0"))
        PointReach: 0 errors, 0 warnings, 0 notes (2,000 steps, 40 episodes)
    """
    check_keys(keys)
    ignored = {ignore} if isinstance(ignore, str) else set(ignore)
    if unknown := ignored - FINDINGS.keys():
        raise ValueError(f"There is no finding {sorted(unknown)} to ignore: choose from {sorted(FINDINGS)}.")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps must be an integer of at least 1, got {steps!r}.")
    if reward is not None and not isinstance(reward, GoalReward):
        reward = GoalReward(reward)
    env, is_made = open_env(env)
    if isinstance(env, GymWrapper):
        env = gymnasium_env_of(env)
    if not isinstance(env, gymnasium.Env):
        raise TypeError(
            "check_goal_env needs one Gymnasium environment, a TorchRL wrapper of one, a function that creates it, or "
            f"its id, got a {type(env).__name__}."
        )
    report = GoalEnvReport(type(env.unwrapped).__name__)
    try:
        goals = Goals(keys, goal_fn)
        report.add(_check(env, reward, goals, steps, seed, report), ignored)
    finally:
        if is_made:
            env.close()
    return report


# A finding is left out if one of the findings that explain it was found.
EXPLAINED_BY = {
    "achieved-goal-moves-late": {"achieved-goal-lags"},
    "reward-differs": {
        "achieved-goal-lags",
        "desired-goal-changes",
        "desired-goal-stale-at-reset",
        "modified-in-place",
        "terminated-modifies-arguments",
    },
}


def _check(
    env: Any, reward: GoalReward | None, goals: Goals, steps: int | None, seed: int, report: GoalEnvReport
) -> Iterator[Finding]:
    """Yield all findings, and set the numbers of steps and episodes in the report."""
    try:
        achieved, desired = goals.read(reset(env, seed))
    except Unplayable as error:
        yield Finding.of(*error.args)
        return
    yield from check_shapes(achieved, desired)
    if achieved.shape != desired.shape:  # nothing else can be compared
        return
    try:
        reward = EnvReward(env) if reward is None else reward
    except TypeError as error:
        yield Finding.of("reward-missing", str(error))
    probes = []
    if reward is not None:
        functions = zip(("reward", "terminated"), reward.functions, strict=False)
        probes = [Probe(name, function, reward.info_keys) for name, function in functions]
    watcher = Watcher()
    played: list[tuple[Any, ...]] = []
    try:
        for step in play(env, goals, probes, watcher, steps, seed):
            played.append(step)
        reset(env, seed + 1)  # probes need a current goal that is not one of the episodes'
    except Unplayable as error:
        name, message = error.args
        yield Finding.of(name, f"After {len(played):,} steps: {message}")
    if played:
        infos, *columns = zip(*played, strict=True)
        episodes = PlayedEpisodes(list(infos), *map(np.stack, columns))
        report.steps, report.episodes = len(played), int(episodes.episode[-1]) + 1
        found = [*_check_episodes(episodes, probes, watcher)]
        names = {finding.name for finding in found}
        yield from (finding for finding in found if not names & EXPLAINED_BY.get(finding.name, set()))


def _check_episodes(episodes: PlayedEpisodes, probes: list[Probe], watcher: Watcher) -> Iterator[Finding]:
    """Yield the findings in the episodes, as long as the values can be trusted."""
    for probe in probes:
        probe.observe_later(episodes.next_achieved, episodes.desired, episodes.infos)
    not_numbers = [*check_numbers(episodes)]
    yield from not_numbers
    if not_numbers:
        return
    if not (probes and probes[0].modified):  # step probably modifies them, too, and its goals are wrong
        yield from check_goals(episodes, watcher)
    if probes:
        yield from check_functions(probes, episodes)
