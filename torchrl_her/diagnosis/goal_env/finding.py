"""What is found in a goal environment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

# The names of all findings, by how much harm they do.
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
    ],
    "note": [
        "endless",
        "no-goal-reached",
        "one-goal",
        "reward-not-batched",
        "terminated-not-batched",
    ],
}
NAMES = {name for names in SEVERITIES.values() for name in names}

WIDTH = 100  # of what is printed


class Finding(NamedTuple):
    """Something that is wrong with an environment, or worth knowing.

    Attributes:
        name (str): the stable name, which `check_goal_env` takes in ``ignore``.
        message (str): the numbers that show it.
        advice (str): what to change.
    """

    name: str
    message: str
    advice: str

    def __str__(self) -> str:
        return self.text()

    def text(self, severity: str = "") -> str:
        """Return the finding as lines, after its severity if that is given."""
        found = textwrap.fill(f"{severity} {self.name}: {self.message}".strip(), WIDTH, subsequent_indent="    ")
        advice = textwrap.fill(f"-> {self.advice}", WIDTH, initial_indent="    ", subsequent_indent="       ")
        return f"{found}\n{advice}"


@dataclass
class GoalEnvReport:
    """What `check_goal_env` found. ``print(report)`` shows it.

    Attributes:
        env (str): the name of the environment.
        steps (int): how many steps were played.
        episodes (int): how many episodes were begun.
        errors (list[Finding]): hindsight cannot work, or learns something else than intended.
        warnings (list[Finding]): hindsight is likely to suffer.
        notes (list[Finding]): true, and harmless.
    """

    env: str
    steps: int = 0
    episodes: int = 0
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    def add(self, findings: Iterable[Finding], ignore: set[str]) -> None:
        """Sort findings into the three lists, without those whose names are ignored."""
        lists = {"error": self.errors, "warning": self.warnings, "note": self.notes}
        for finding in findings:
            if finding.name not in ignore:
                severity = next(severity for severity, names in SEVERITIES.items() if finding.name in names)
                lists[severity].append(finding)

    def __str__(self) -> str:
        lists = {"error": self.errors, "warning": self.warnings, "note": self.notes}
        counts = ", ".join(_count(len(found), severity) for severity, found in lists.items())
        steps, episodes = _count(self.steps, "step"), _count(self.episodes, "episode")
        lines = [f"{self.env}: {counts} ({steps}, {episodes})"]
        lines += [finding.text(severity) for severity, found in lists.items() for finding in found]
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
