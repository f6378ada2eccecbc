"""Extra goals: entries besides the desired goal that get their own goal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_her.goals.strategies import make_strategy
from torchrl_her.goals.strategy import DESIRED, GoalStrategy
from torchrl_her.keys import HERKeys

BY_BUFFERS = ("index", "_weight", "priority_weight")  # keys of the entries that buffers add to samples


def make_strategies(
    strategy: str | GoalStrategy, extra_goals: Mapping[NestedKey, str | GoalStrategy] | None, keys: HERKeys
) -> dict[NestedKey, GoalStrategy]:
    """Return the strategy of the desired goal, under the name `DESIRED`, then of the extra goals."""
    if extra_goals is not None and not isinstance(extra_goals, Mapping):
        raise TypeError(
            f"extra_goals must map keys to strategies, such as {{'actor_goal': Future()}}, got {extra_goals!r}."
        )
    strategies: dict[NestedKey, GoalStrategy] = {DESIRED: make_strategy(strategy)}
    for key, extra in (extra_goals or {}).items():
        name = _check_name(unravel_key(key), keys, strategies)
        strategies[name] = make_strategy(extra)
        unknown = [each for each in strategies[name].refers_to if each not in strategies or each == name]
        if unknown:
            raise ValueError(
                f"{strategies[name]!r} of the extra goal {name!r} refers to {unknown[0]!r}, for which no goal is drawn "
                f"earlier. Use one of {[*strategies][:-1]}, or place that extra goal earlier in extra_goals. "
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
                    f"extra_goals would replace the stored entry {key!r}, which is not a copy of the desired goal. "
                    "Choose another key."
                )


def _check_name(name: NestedKey, keys: HERKeys, earlier: Iterable[NestedKey]) -> NestedKey:
    """Return the key of an extra goal, and check that it overlaps with no key of transitions or earlier extra goals."""
    path = _path(name)
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
    others = [_path(key) for key in used if key is not None]
    if path[0] == "next" or path[0].startswith("hindsight") or any(_overlap(path, other) for other in others):
        raise ValueError(
            f"extra_goals has the key {name!r}, which transitions or another extra goal already use, or which begins "
            "with 'next' or 'hindsight'. Choose another key, such as 'actor_goal': the goal is written at the root and "
            "under 'next'."
        )
    return name


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return all(left == right for left, right in zip(one, other, strict=False))
