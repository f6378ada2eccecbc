"""The keys of the entries that hindsight reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import Transform

from torchrl_her._private import transforms_around

MASK = ("collector", "mask")  # written by collectors with split_trajs=True
# Whether a transition is relabelled, bool [*batch, 1].
RELABELLED = ("hindsight", "relabelled")
# The number of steps from the transition to the step that achieved its goal, int64 [*batch, 1]; -1 if the goal
# comes from an earlier step or another episode, or the transition is not relabelled.
STEPS_TO_GOAL = ("hindsight", "steps_to_goal")
# The index of the mixture's member that selected the goal, int64 [*batch, 1]; -1 if the transition is not relabelled.
MEMBER = ("hindsight", "member")

# The entry of `GoalSelection`, which has the environment's own goal.
SELECTION = "goal_selection"


@dataclass(frozen=True, repr=False)
class HERKeys:
    """The keys of the entries that hindsight reads and replaces.

    All transforms of a buffer have the same keys. A key is a name or, for nested entries, a tuple of names. Pass keys
    without ``"next"``, which is added automatically.

    Args:
        achieved_goal (NestedKey): the achieved goal, read at the root and under ``"next"``. Default:
            ``"achieved_goal"``.
        desired_goal (NestedKey): the desired goal, replaced at the root and under ``"next"``. Default:
            ``"desired_goal"``.
        reward (NestedKey): the reward, ``[*batch, 1]``. Default: ``"reward"``.
        done (NestedKey): the done flag, ``bool [*batch, 1]``; ``terminated`` and ``truncated`` share its parent key.
            Default: ``"done"``.
        trajectory (NestedKey, optional): trajectory ids, integers ``[*batch]``, which separate the transitions of
            several environments. They are used if present. None ignores them. Default: ``("collector", "traj_ids")``.
        mask (NestedKey, optional): a flag, ``bool [*batch]``, that is False for padding. The default entry is used if
            present; any other entry must be present. With None, no transition is padding. Default:
            ``("collector", "mask")``.

    Raises:
        TypeError: if a key is not a name or a tuple of names.
        ValueError: if both goals have the same key, or if the key of a goal, of the reward or of the done flag begins
            with ``"next"``.

    Examples:
        >>> from torchrl_her import HERKeys
        >>> keys = HERKeys(achieved_goal=("robot", "tip"), desired_goal="target")
        >>> keys.next_achieved_goal
        ('next', 'robot', 'tip')
        >>> keys
        HERKeys(achieved_goal=('robot', 'tip'), desired_goal='target')
    """

    achieved_goal: NestedKey = "achieved_goal"
    desired_goal: NestedKey = "desired_goal"
    reward: NestedKey = "reward"
    done: NestedKey = "done"
    trajectory: NestedKey | None = ("collector", "traj_ids")
    mask: NestedKey | None = MASK
    # The other keys follow from those above.
    terminated: NestedKey = field(init=False, compare=False)
    truncated: NestedKey = field(init=False, compare=False)
    next_achieved_goal: NestedKey = field(init=False, compare=False)
    next_desired_goal: NestedKey = field(init=False, compare=False)
    next_reward: NestedKey = field(init=False, compare=False)
    next_done: NestedKey = field(init=False, compare=False)
    next_terminated: NestedKey = field(init=False, compare=False)
    next_truncated: NestedKey = field(init=False, compare=False)

    def __post_init__(self) -> None:
        keys = {each.name: _check_key(each.name, getattr(self, each.name)) for each in fields(self) if each.init}
        if keys["achieved_goal"] == keys["desired_goal"]:
            raise ValueError(
                "HERKeys needs different keys for achieved_goal and desired_goal, got "
                f"{keys['achieved_goal']!r} for both."
            )
        nesting = unravel_key(("next", keys["done"]))[1:-1]  # of the flags
        for name in ("terminated", "truncated"):
            keys[name] = unravel_key((*nesting, name))
        for name in _UNDER_NEXT:
            keys[f"next_{name}"] = unravel_key(("next", keys[name]))
        vars(self).update(keys)  # a frozen dataclass refuses assignments

    @property
    def flags(self) -> tuple[NestedKey, NestedKey, NestedKey]:
        """The keys of the done flags at the root."""
        return self.done, self.terminated, self.truncated

    @property
    def next_flags(self) -> tuple[NestedKey, NestedKey, NestedKey]:
        """The keys of the done flags under ``"next"``."""
        return self.next_done, self.next_terminated, self.next_truncated

    def __repr__(self) -> str:
        """Return the keys that differ from the defaults."""
        pairs = ((each, getattr(self, each.name)) for each in fields(self) if each.init)
        return f"HERKeys({', '.join(f'{each.name}={key!r}' for each, key in pairs if key != each.default)})"


_UNDER_NEXT = ("achieved_goal", "desired_goal", "reward", "done", "terminated", "truncated")


def _check_key(name: str, key: Any) -> Any:
    """Return a key without nested tuples, and check it; ``name`` is its field in `HERKeys`."""
    if key is None and name in ("trajectory", "mask"):
        return None
    if not is_key(key):
        raise TypeError(f"HERKeys({name}=...) must be the name of an entry or a tuple of names, got {key!r}.")
    key = unravel_key(key)
    if name in _UNDER_NEXT and (key == "next" or key[0] == "next"):
        raise ValueError(f"Pass HERKeys({name}=...) without 'next', which is added automatically, got {key!r}.")
    return key


def is_key(key: Any) -> bool:
    """Return whether ``key`` is the name of an entry or a tuple of names."""
    return isinstance(key, str) or (isinstance(key, tuple) and len(key) > 0 and all(map(is_key, key)))


def path_of(key: NestedKey) -> tuple[str, ...]:
    """Return the names of which a key consists."""
    return (key,) if isinstance(key, str) else key


def keys_of_hindsight(transform: Transform) -> HERKeys:
    """Return the keys of the hindsight transform that comes after ``transform``, or the default keys without one."""
    _, after = transforms_around(transform)
    found = [each.keys for each in after if getattr(each, "relabels", False)]
    return found[0] if found else HERKeys()


def check_keys(keys: Any) -> None:
    """Check the argument ``keys`` of a transform."""
    if not isinstance(keys, HERKeys):
        raise TypeError(f"keys must be HERKeys, such as HERKeys(desired_goal='target'), got {keys!r}.")


def get_entry(tensordict: TensorDictBase, key: NestedKey, name: str) -> Tensor:
    """Return the tensor under ``key``.

    Args:
        tensordict (TensorDictBase): transitions ``[*batch]``.
        key (NestedKey): the key of the entry, from the root.
        name (str): the field of `HERKeys` that sets the key, or ``"info_keys"`` or ``"in_keys"``, for the error
            message.

    Raises:
        KeyError: if there is no such entry. The message lists the entries that are present.
        TypeError: if the entry is not a tensor.
    """
    value = tensordict.get(key, None)
    if isinstance(value, Tensor):
        return value
    if value is not None:
        advice = "Store a tensor with one value per transition, such as torch.full([*batch, 1], value)."
        if "goal" in name:
            advice = "Concatenate the parts of the goal with CatTensors in the environment, and pass the new key."
        raise TypeError(f"The entry {key!r} must be a tensor, got a {type(value).__name__}. {advice}")
    found = sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True)))
    argument = f"{name}=[...]" if name in ("info_keys", "in_keys") else f"keys=HERKeys({name}=...)"
    advice = f"Set {argument} to the correct key"
    if ("goal" in name or name == "in_keys") and key[0] == "next" and tensordict.get(key[1:], None) is not None:
        advice = (
            "It exists only at the root: a collector with compact_obs=True leaves it out (use False), and so does "
            "NextObservationDelta (pass it in_keys without the goals)"
        )
    raise KeyError(f"These transitions have no entry {key!r}. {advice}. Present entries: {', '.join(found)}.")
