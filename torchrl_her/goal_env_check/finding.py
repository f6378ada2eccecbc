"""The findings in a goal environment, and the report that lists them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

# The names of all findings, by severity.
SEVERITIES = {
    "error": [
        "not-a-goal-env",
        "step-fails",
        "goal-shapes-differ",
        "goal-nan",
        "modified-in-place",
        "achieved-goal-constant",
        "achieved-goal-stale-at-reset",
        "desired-goal-changes",
        "desired-goal-stale-at-reset",
        "reward-missing",
        "reward-fails",
        "reward-modifies-arguments",
        "reward-random",
        "reward-depends-on-state",
        "reward-ignores-desired-goal",
        "reward-ignores-achieved-goal",
        "reward-constant",
        "reward-misses-achieved-goal",
        "reward-differs",
        "terminated-fails",
        "terminated-modifies-arguments",
        "terminated-random",
        "terminated-depends-on-state",
        "terminated-ignores-desired-goal",
        "terminated-ignores-achieved-goal",
        "terminated-differs",
        "ends-on-success",
    ],
    "warning": [
        "achieved-goal-jumps",
        "achieved-goal-lags",
        "achieved-goal-moves-late",
        "achieved-goal-unmoved",
        "goal-dtypes-differ",
        "desired-goal-far",
        "desired-goal-in-observation",
        "observation-outside-space",
        "reward-needs-info",
        "reward-reaches-everything",
        "success-differs",
        "terminated-needs-info",
        "terminated-one-verdict",
        "threshold-too-small",
        "time-limit-terminates",
    ],
    "note": [
        "endless",
        "no-goal-reached",
        "one-goal",
        "reset-ignores-seed",
        "reward-not-batched",
        "terminated-not-batched",
    ],
}
NAMES = {name for names in SEVERITIES.values() for name in names}

WIDTH = 100  # characters of a printed line


class Finding(NamedTuple):
    """A mistake in a goal environment, or a property worth knowing.

    ``print(finding)`` shows all three attributes.

    Attributes:
        name (str): the stable name of the finding, which ``ignore`` of `check_goal_env` accepts.
        message (str): a description, with the numbers that show the problem.
        advice (str): the change to make.

    Examples:
        >>> from torchrl_her import check_goal_env
        >>> finding = check_goal_env("CartPole-v1").errors[0]
        >>> finding.name
        'not-a-goal-env'
        >>> print(finding)
        not-a-goal-env: There is no achieved goal under 'achieved_goal': the observation has the type
            ndarray.
            -> Return a dictionary with 'observation', 'achieved_goal' and 'desired_goal', each goal one
               array of numbers, or name the entries with keys=HERKeys(achieved_goal=..., desired_goal=...).
    """

    name: str
    message: str
    advice: str

    def __str__(self) -> str:
        return self.text()

    def text(self, severity: str = "") -> str:
        """Return the finding as wrapped lines, which start with ``severity`` if it is given."""
        found = textwrap.fill(f"{severity} {self.name}: {self.message}".strip(), WIDTH, subsequent_indent="    ")
        advice = textwrap.fill(f"-> {self.advice}", WIDTH, initial_indent="    ", subsequent_indent="       ")
        return f"{found}\n{advice}"


@dataclass
class GoalEnvReport:
    """The findings of `check_goal_env`. ``print(report)`` shows all of them.

    Attributes:
        env (str): the class name of the environment.
        steps (int): the number of steps that were played.
        episodes (int): the number of episodes that were started.
        errors (list[Finding]): mistakes that make hindsight fail, or make the agent learn a different task.
        warnings (list[Finding]): properties with which hindsight is likely to work less well.
        notes (list[Finding]): harmless properties that are worth knowing.

    Examples:
        >>> from torchrl_her import check_goal_env
        >>> report = check_goal_env("torchrl_her.envs:torchrl_her/PointReach-v0", steps=500)
        >>> print(report)
        PointReach: 0 errors, 0 warnings, 1 note (500 steps, 10 episodes)
        note no-goal-reached: No goal was reached in 500 steps. A goal is reached within about 0.05. When
            the achieved goal moves, it moves by 0.05 per step (median), and by at most 0.07071.
            -> At a reached goal, the reward of step and the end of the episode were not checked: play more
               steps.
        >>> [finding.name for finding in report.notes]
        ['no-goal-reached']
    """

    env: str
    steps: int = 0
    episodes: int = 0
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    def add(self, findings: Iterable[Finding], ignore: set[str]) -> None:
        """Sort findings into the three lists, except for ignored names."""
        for finding in findings:
            if finding.name not in ignore:
                severity = next(severity for severity, names in SEVERITIES.items() if finding.name in names)
                getattr(self, f"{severity}s").append(finding)

    def __str__(self) -> str:
        lists = {"error": self.errors, "warning": self.warnings, "note": self.notes}
        counts = ", ".join(_count(len(found), severity) for severity, found in lists.items())
        steps, episodes = _count(self.steps, "step"), _count(self.episodes, "episode")
        lines = [f"{self.env}: {counts} ({steps}, {episodes})"]
        lines += [finding.text(severity) for severity, found in lists.items() for finding in found]
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
