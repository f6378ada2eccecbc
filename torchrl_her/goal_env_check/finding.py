"""The findings in a goal environment, and the report that lists them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

# The advice by severity and finding. "*" is "reward" or "terminated".
ADVICE = {
    "error": {
        "*-fails": "It must take one pair of goals or a batch, and read only entries of info that step returns.",
        "*-modifies-arguments": "Work on a copy: achieved_goal - desired_goal, not achieved_goal -= desired_goal.",
        "*-random": "Compute it from the arguments alone, and move noise into step.",
        "*-depends-on-state": "Put inputs other than the goals (a step count, the last action) into info.",
        "*-ignores-desired-goal": "Read the argument, not the goal of the running episode (desired_goal instead of "
        "self.goal).",
        "*-ignores-achieved-goal": "Read the argument, not the state of the environment (achieved_goal instead of "
        "self.position).",
        "not-a-goal-env": "Return a dictionary with 'observation', 'achieved_goal' and 'desired_goal', each goal one "
        "array of numbers, or name the entries with keys=HERKeys(achieved_goal=..., desired_goal=...).",
        "step-fails": "To see where, call env.reset() and env.step(env.action_space.sample()) until it fails. The "
        "signature is reset(self, *, seed=None, options=None), and it returns (observation, info).",
        "goal-shapes-differ": "Return goals of one shape, or pass a goal_fn that maps the achieved state to a goal.",
        "goal-nan": "Return a finite number for each component of a goal. Put unknown quantities into the observation.",
        "modified-in-place": "Return a copy (self.position.copy()): otherwise stored observations change.",
        "achieved-goal-constant": "Compute it from the state after each step.",
        "achieved-goal-stale-at-reset": "Compute it in reset, after the new state is set.",
        "desired-goal-changes": "Draw it only in reset, and end the episode (truncated=True) before the goal changes.",
        "desired-goal-stale-at-reset": "Draw the new goal in reset before you build the observation.",
        "reward-missing": "Define compute_reward(self, achieved_goal, desired_goal, info), or pass your own reward.",
        "reward-differs": "Let step return self.compute_reward(achieved_goal, desired_goal, info) for the goals that "
        "it returns. Any other bonus or penalty must come from info.",
        "terminated-differs": "Let step return the same for the goals that it returns, and a time limit as truncated. "
        "An end that does not depend on the goal (a fall) must be in both.",
        "reward-constant": "It must be higher for a reached goal: compare its arguments (not self.goal), with a "
        "threshold above 0 that is smaller than the distances between goals, in the unit of the goals.",
        "reward-misses-achieved-goal": "A reached goal must have the highest reward: check the sign, the threshold (<= "
        "instead of <), and the unit and frame of both goals.",
        "ends-on-success": "Add compute_terminated(self, achieved_goal, desired_goal, info), or pass EnvReward(env, "
        "terminated_fn=...): otherwise relabelled transitions that reach their goal are not terminated.",
    },
    "warning": {
        "*-needs-info": "Store it with env.set_info_dict_reader(default_info_dict_reader([{names}])), and pass "
        "EnvReward(env, info_keys=[{keys}]). An entry that was computed with the original goal (a distance, "
        "is_success) is wrong after relabelling: compute it from the goals.",
        "goal-dtypes-differ": "Return both with the same dtype: relabelling converts one to the other.",
        "achieved-goal-unmoved": "If it should change, compute it from the state after each step, not only in reset. "
        "If random actions cannot change it, hindsight has nothing to learn from until the policy does.",
        "achieved-goal-lags": "Compute the achieved goal after the simulation has advanced.",
        "achieved-goal-moves-late": "Compute the achieved goal after the simulation has advanced. If the first action "
        "really has no effect yet (an actuator with a delay, explicit Euler steps from rest), ignore this.",
        "desired-goal-far": "Use the same unit and frame of reference for both. If random actions do not get far, this "
        "may be intended.",
        "desired-goal-in-observation": "Leave them out: relabelling does not replace them, and networks would learn "
        "the original goal with the new goal's reward. Let networks read 'desired_goal' besides the observation.",
        "reward-reaches-everything": "Use a threshold that is smaller than the distances between goals, in their unit.",
        "threshold-too-small": "A step seldom ends so near a goal: is the threshold in the unit of the goals? At a "
        "reached goal, the reward of step and the end of the episode were not checked.",
        "success-differs": "Compute both from the same distance and threshold.",
        "terminated-one-verdict": "EnvReward calls it row by row, which is slow: compute it over the last axis "
        "(np.linalg.norm(..., axis=-1)) and return one value per row.",
    },
    "note": {
        "*-not-batched": "EnvReward calls it row by row, which is slow: operate on the last axis (axis=-1), or "
        "pass a batched function, GoalReward(reward_fn) or EnvReward(env, terminated_fn=...).",
        "one-goal": "With hindsight, networks must read it all the same: relabelled goals differ.",
        "no-goal-reached": "At a reached goal, the reward of step and the end of the episode were not checked: play "
        "more steps.",
    },
}
# The severity and the advice of each finding.
FINDINGS = {
    name.replace("*", function): (severity, advice)
    for function in ("reward", "terminated")
    for severity, group in ADVICE.items()
    for name, advice in group.items()
}

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
        not-a-goal-env: There is no achieved goal under 'achieved_goal': the observation is a ndarray with
            entries [].
            -> Return a dictionary with 'observation', 'achieved_goal' and 'desired_goal', each goal one
               array of numbers, or name the entries with keys=HERKeys(achieved_goal=..., desired_goal=...).
    """

    name: str
    message: str
    advice: str

    @classmethod
    def of(cls, name: str, message: str, **details: str) -> Finding:
        """Make a finding with its advice, whose placeholders are replaced by ``details``."""
        _, advice = FINDINGS[name]
        return cls(name, message, advice.format(**details))

    def __str__(self) -> str:
        found = textwrap.fill(f"{self.name}: {self.message}", WIDTH, subsequent_indent="    ")
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
        note no-goal-reached: No goal was reached in 500 steps. When the achieved goal moves, it moves by 0.05
            per step (median), and by at most 0.07071.
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
                severity, _ = FINDINGS[finding.name]
                getattr(self, f"{severity}s").append(finding)

    def __str__(self) -> str:
        lists = {"error": self.errors, "warning": self.warnings, "note": self.notes}
        counts = ", ".join(_count(len(found), severity) for severity, found in lists.items())
        steps, episodes = _count(self.steps, "step"), _count(self.episodes, "episode")
        lines = [f"{self.env}: {counts} ({steps}, {episodes})"]
        lines += [f"{severity} {finding}" for severity, found in lists.items() for finding in found]
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
