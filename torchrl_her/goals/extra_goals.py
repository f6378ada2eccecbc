"""Extra goals: entries besides the desired goal that get their own goal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_her.goals.strategies import make_strategy
from torchrl_her.goals.strategy import DESIRED, GoalStrategy
from torchrl_her.keys import HERKeys, is_key, path_of

# The strategy of the desired goal, or the strategies of several goals by their keys.
AnyStrategy: TypeAlias = str | GoalStrategy | Mapping[NestedKey, str | GoalStrategy]
BY_BUFFERS = ("index", "_weight", "priority_weight")  # keys of the entries that buffers add to samples


def make_strategies(strategy: AnyStrategy, keys: HERKeys) -> dict[NestedKey, GoalStrategy]:
    """Return the strategy of the desired goal, under the name `DESIRED`, then of the extra goals."""
    if not isinstance(strategy, Mapping):
        strategy = {DESIRED: make_strategy(strategy)}
    if any(isinstance(each, Real) for each in strategy.values()):
        raise TypeError(
            f"strategy must map the keys of goals to strategies, got {strategy!r}. To draw one of several strategies "
            "with these probabilities, pass strategy=Mixture({...})."
        )
    if DESIRED not in strategy:
        raise ValueError(
            f"strategy needs the name {DESIRED!r}, which means the desired goal, whatever its key is, got "
            f"{strategy!r}. For example, pass {{{DESIRED!r}: 'future', 'actor_goal': 'final'}}."
        )
    strategies: dict[NestedKey, GoalStrategy] = {DESIRED: make_strategy(strategy[DESIRED])}
    for key, extra in strategy.items():
        if key == DESIRED:
            continue
        name = _check_name(key, keys, strategies)
        strategies[name] = make_strategy(extra)
        unknown = [each for each in strategies[name].refers_to if each not in strategies or each == name]
        if unknown:
            raise ValueError(
                f"{strategies[name]!r} of the extra goal {name!r} refers to {unknown[0]!r}, for which no goal is drawn "
                f"earlier. Use one of {[*strategies][:-1]}, or place that extra goal earlier. "
                f"{DESIRED!r} refers to the desired goal, whatever its key is."
            )
    others = [each for each in strategies[DESIRED].refers_to if each != DESIRED]
    if others:
        raise ValueError(
            f"The desired goal is drawn first, but {strategies[DESIRED]!r} refers to {others[0]!r}. Use this strategy "
            "for an extra goal."
        )
    return strategies


def check_not_stored(tensordict: TensorDictBase, names: Iterable[NestedKey], keys: HERKeys) -> None:
    """Check that written transitions have no entries that extra goals would replace, except copies of desired goals."""
    for name in names:
        for key, desired_key in ((name, keys.desired_goal), (unravel_key(("next", name)), keys.next_desired_goal)):
            stored, desired = tensordict.get(key, None), tensordict.get(desired_key, None)
            if stored is not None and not (isinstance(stored, torch.Tensor) and torch.equal(stored, desired)):
                raise ValueError(
                    f"An extra goal would replace the stored entry {key!r}, which is not a copy of the desired goal. "
                    "Choose another key."
                )


def _check_name(key: NestedKey, keys: HERKeys, earlier: Iterable[NestedKey]) -> NestedKey:
    """Return the key of an extra goal, and check that it overlaps with no key of transitions or earlier extra goals."""
    if not is_key(key):
        raise TypeError(f"strategy must map the keys of goals to strategies, but {key!r} is not a key.")
    name = unravel_key(key)
    path = path_of(name)
    used = [
        keys.achieved_goal,
        keys.desired_goal,
        keys.trajectory,
        keys.mask,
        keys.reward,
        *keys.flags,
        *BY_BUFFERS,
        *earlier,
    ]
    others = [path_of(key) for key in used if key is not None]
    overlaps = any(path[: len(other)] == other[: len(path)] for other in others)
    if path[0] == "next" or path[0].startswith("hindsight") or overlaps:
        raise ValueError(
            f"strategy has the key {name!r}, which transitions or another extra goal already use, or which begins "
            "with 'next' or 'hindsight'. Choose another key, such as 'actor_goal': the goal is written at the root and "
            "under 'next'."
        )
    return name
