"""Exact probabilities of goals in plain Python: OGBench's presets, and mistakes in them.

A transition is ``(episode, step)``. A goal is also ``(episode, step)``: the outcome of that step or, for the step
DESIRED, the desired goal of the episode. ``lengths`` maps episodes to their number of steps. A rule returns the
probability of each possible goal of a transition. This module does not use the package.

OGBench draws its uniform goals by rounding a real number between the next state and the end, so that these two have
half the weight of each state between them. Here all have the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Place = tuple[int, int]
Lengths = Mapping[int, int]
Table = dict[Place, float]
Rule = Callable[[Place, Lengths], Table]

DESIRED = -2  # in place of a step


# Rules


def evenly(goals: Sequence[Place]) -> Table:
    return dict.fromkeys(goals, 1 / len(goals))


def current(place: Place, lengths: Lengths) -> Table:
    return {place: 1.0}


def future(place: Place, lengths: Lengths) -> Table:
    episode, step = place
    return evenly([(episode, j) for j in range(step, lengths[episode])])


def later(place: Place, lengths: Lengths) -> Table:
    episode, step = place
    return evenly([(episode, j) for j in range(step + 1, lengths[episode])] or [place])


def final(place: Place, lengths: Lengths) -> Table:
    return {(place[0], lengths[place[0]] - 1): 1.0}


def episode(place: Place, lengths: Lengths) -> Table:
    return evenly([(place[0], j) for j in range(lengths[place[0]])])


def anywhere(place: Place, lengths: Lengths) -> Table:
    return evenly([(other, j) for other, length in lengths.items() for j in range(length)])


def past_desired(place: Place, lengths: Lengths) -> Table:
    """Return the desired goals of other episodes, with probabilities proportional to the episodes' lengths."""
    others = {(other, DESIRED): length for other, length in lengths.items() if other != place[0]}
    return {goal: length / sum(others.values()) for goal, length in others.items()}


def geometric(discount: float, first: int = 1) -> Rule:
    """Return a rule that draws K = first, first + 1, ... steps ahead, up to the end of the episode."""

    def rule(place: Place, lengths: Lengths) -> Table:
        episode, step = place
        last = lengths[episode] - 1
        table = {(episode, j): (1 - discount) * discount ** (j - step - first) for j in range(step + first, last)}
        return table | {(episode, last): 1 - sum(table.values())}

    return rule


G99 = geometric(0.99)
Members = tuple[tuple[Rule, float], ...]  # of a mixture, with their probabilities


def alone(rule: Rule) -> Members:
    return ((rule, 1.0),)


class Ahead(NamedTuple):
    """A goal that lies ``steps`` ahead, limited by the end of the episode and by the goal under the key ``limit``.

    The limit applies if its goal is ahead in the same episode. With ``behind=True``, a mistake, it also applies if the
    goal is behind.
    """

    steps: int
    limit: str | None = None
    behind: bool = False

    def goal(self, place: Place, lengths: Lengths, limit: Place | None) -> Place:
        episode, step = place
        goal = episode, min(step + self.steps, lengths[episode] - 1)
        if limit is not None and limit[0] == episode and (limit[1] >= step or self.behind):
            return min(goal, limit)
        return goal


class Preset(NamedTuple):
    """How desired goals and extra goals are drawn.

    With ``shared``, a mistake, the desired goal and the first extra goal come from one random number.
    """

    desired: Members
    extra: Mapping[str, Members | Ahead] = {}
    her_ratio: float = 1.0
    shared: bool = False

    @property
    def keys(self) -> list[str]:
        return ["desired_goal", *self.extra]


OGBENCH: Members = ((current, 0.2), (G99, 0.5), (anywhere, 0.3))
STITCH: Members = ((later, 0.5), (anywhere, 0.5))


def presets(steps: int) -> dict[str, Preset]:
    """Return OGBench's presets and others; subgoals are ``steps`` ahead."""
    actor = {"actor_goal": alone(later)}
    return {
        "GCIVL and GCIQL": Preset(OGBENCH, actor),
        "HIQL": Preset(OGBENCH, {"high": alone(later), "target": Ahead(steps, "high"), "low": Ahead(steps)}),
        "CRL": Preset(alone(G99), actor),
        "QRL": Preset(alone(anywhere), actor),
        "stitch": Preset(OGBENCH, {"actor_goal": STITCH}),
        "a subgoal of the desired goal": Preset(OGBENCH, actor | {"subgoal": Ahead(steps, "desired_goal")}),
        "mrl": Preset(((future, 0.5), (past_desired, 0.375), (anywhere, 0.125)), her_ratio=0.9),
    }


# Mistakes


def double_end(rule: Rule) -> Rule:
    """Give the end of the transition's own episode twice its weight."""

    def wrong(place: Place, lengths: Lengths) -> Table:
        last = (place[0], lengths[place[0]] - 1)
        weights = {goal: p * (2 if goal == last else 1) for goal, p in rule(place, lengths).items()}
        return {goal: weight / sum(weights.values()) for goal, weight in weights.items()}

    return wrong


def cut_off(place: Place, lengths: Lengths) -> Table:
    """Spread the probability beyond the end over the episode instead of adding it to its end."""
    weights = {(place[0], j): 0.99**j for j in range(place[1] + 1, lengths[place[0]])} or {place: 1.0}
    return {goal: weight / sum(weights.values()) for goal, weight in weights.items()}


MISTAKES: dict[Rule, dict[str, Rule]] = {
    current: {"the next outcome in place of the own": geometric(0.0)},
    G99: {
        "a discount of 0.985": geometric(0.985),
        "a discount of 0.995": geometric(0.995),
        "geometric from the own outcome on": geometric(0.99, first=0),
        "geometric from the second next outcome on": geometric(0.99, first=2),
        "geometric with double weight on the end": double_end(G99),
        "geometric cut off at the end": cut_off,
    },
    later: {"later from the own outcome on": future, "later with double weight on the end": double_end(later)},
    future: {"future without the own outcome": later, "future with double weight on the end": double_end(future)},
    anywhere: {"random in the own episode": episode, "random with double weight on the own end": double_end(anywhere)},
    past_desired: {"outcomes in place of desired goals": anywhere},
}


def variants(preset: Preset) -> dict[str, Preset]:
    """Return variants with one mistake each: in a rule, in a subgoal, or in the independence of two draws."""
    changed: dict[str, Preset] = {}
    for key, drawn in {"desired_goal": preset.desired, **preset.extra}.items():
        for name, wrong in _mistakes_in(drawn):
            change: dict[str, Any] = (
                {"desired": wrong} if key == "desired_goal" else {"extra": {**preset.extra, key: wrong}}
            )
            changed[f"{key}: {name}"] = preset._replace(**change)
    if preset.extra:
        changed["one draw for the desired goal and the first extra goal"] = preset._replace(shared=True)
    return changed


def _mistakes_in(drawn: Members | Ahead) -> Iterable[tuple[str, Members | Ahead]]:
    if isinstance(drawn, Ahead):
        yield from (
            (f"{steps} steps ahead", drawn._replace(steps=steps)) for steps in (drawn.steps - 1, drawn.steps + 1)
        )
        if drawn.limit:
            yield "without its limit", drawn._replace(limit=None)
        if drawn.limit == "desired_goal":
            yield "limited by goals that are behind", drawn._replace(behind=True)
        return
    for index, (rule, probability) in enumerate(drawn):
        for name, wrong in MISTAKES[rule].items():
            yield name, (*drawn[:index], (wrong, probability), *drawn[index + 1 :])
