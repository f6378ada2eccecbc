"""Hydra configs of the classes of this package, in the form of TorchRL's ``torchrl.trainers.algorithms.configs``.

Importing this module registers them in Hydra's groups: ``transform``, ``storage``, ``reward``, ``strategy``,
``goal_selector``, ``feasible`` and ``her_keys``. The fields of a config are the arguments of its class, with their
types, as far as OmegaConf knows them, and their defaults.

YAML has no tuples, so a list of names is a nested key: ``desired_goal: [robot, target]``.

Raises:
    ImportError: if Hydra is not installed.

Examples:
    >>> from hydra.utils import instantiate
    >>> from torchrl_her.configs import HERTransformConfig, SparseRewardConfig
    >>> instantiate(HERTransformConfig(reward=SparseRewardConfig(threshold=0.05), capacity=1000))
    HERTransform(SparseReward, capacity=1000)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, make_dataclass
from functools import partial
from types import NoneType
from typing import Any, get_args
from weakref import WeakValueDictionary

from torchrl_her.augmentation import HindsightAugmentation
from torchrl_her.compact import CompactGoals
from torchrl_her.goal_selection import GoalSelection
from torchrl_her.goal_selectors import Feasible, LowestDensity, Uniform
from torchrl_her.goals.strategies import (
    Current,
    Episode,
    Final,
    Future,
    Geometric,
    Mixture,
    PastDesired,
    Random,
    Subgoal,
)
from torchrl_her.keys import HERKeys
from torchrl_her.movement import MovementPriority
from torchrl_her.normalize import NormalizedInputs
from torchrl_her.packed_storage.packed_storage import PackedStorage
from torchrl_her.rewards.env_reward import EnvReward
from torchrl_her.rewards.goal_reward import GoalReward, ReachedReward, SparseReward
from torchrl_her.transform import HERTransform

try:
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import MISSING
except ImportError as error:
    raise ImportError(
        "torchrl_her.configs needs Hydra: pip install hydra-core, or install torchrl_her with the extra `trainers`."
    ) from error

CHECKED_TYPES = (bool, int, float, str, NoneType)  # OmegaConf converts values to these types, and to unions of them
CONFIGS: dict[str, dict[str, type]] = {}  # by group and name; `config_of` adds each config


_SHARED: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()  # by run and name


def shared(name: str, value: Any) -> Any:
    """Return one object for all references to a config. Without this target, Hydra creates one at each ``${...}``.

    An object is shared within a run of ``hydra.main``. Elsewhere, such as in a notebook, it is shared as long as
    something refers to it, so give the object of another run another name.

    Args:
        name (str): the name of the object.
        value (Any): the object, which is dropped if another one has the name. A number, a string, a list or a
            dictionary needs no sharing, and is a TypeError.

    Returns:
        Any: the first object with this name that still exists.

    Examples:
        >>> from hydra.utils import instantiate
        >>> inputs = {"_target_": "torchrl_her.NormalizedInputs"}
        >>> inputs = {"_target_": "torchrl_her.configs.shared", "name": "inputs", "value": inputs}
        >>> objects = instantiate({"environment": inputs, "buffer": inputs})
        >>> objects["environment"] is objects["buffer"]
        True
    """
    run = HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else ""
    return _SHARED.setdefault((run, name), value)


# Targets of classes whose arguments YAML cannot write


def her_keys(**keys: Any) -> HERKeys:
    """Return `HERKeys`; a nested key can be a list."""
    return HERKeys(**{name: _nested(key) for name, key in keys.items()})


def normalized_inputs(in_keys: Sequence[Any] | None, out_key: Any, **options: Any) -> NormalizedInputs:
    """Return `NormalizedInputs`; a nested key can be a list."""
    return NormalizedInputs(_all_nested(in_keys), _nested(out_key), **options)


def env_reward(env: Any, info_keys: Sequence[Any], **options: Any) -> EnvReward:
    """Return an `EnvReward`; a nested key can be a list."""
    return EnvReward(env, info_keys=_all_nested(info_keys), **options)


def subgoal(steps: int, limit: Any) -> Subgoal:
    """Return a `Subgoal`; a nested key can be a list."""
    return Subgoal(steps, limit=_nested(limit))


def mixture(members: Mapping[Any, float] | Iterable[tuple[Any, float]]) -> Mixture:
    """Return a `Mixture`, given names and their probabilities, or pairs of a strategy and its probability."""
    return Mixture(dict(members))


def _nested(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _all_nested(keys: Any) -> Any:
    return [_nested(key) for key in keys] if isinstance(keys, list) else keys


# Configs


def config_of(cls: type, group: str, name: str, target: str | None = None) -> type:
    """Register and return a dataclass whose fields are the arguments of a class.

    Args:
        cls (type): the class, which ``torchrl_her`` exports.
        group (str): Hydra's group of the config.
        name (str): the name of the config in its group.
        target (str, optional): the function of this module that Hydra calls. By default, it calls the class.

    Returns:
        type: the dataclass, named after the class: ``HERTransformConfig``.
    """
    path = f"torchrl_her.configs.{target}" if target else f"torchrl_her.{cls.__name__}"
    # With "all", Hydra passes dicts and lists instead of OmegaConf's containers.
    fields: list[Any] = [("_target_", str, path), ("_partial_", bool, False), ("_convert_", str, "all")]
    for argument, parameter in inspect.signature(cls, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            fields.append((argument, _type_of(parameter.annotation), _default_of(parameter)))
    doc = f"Hydra config of `{cls.__name__}`."
    config = make_dataclass(f"{cls.__name__}Config", fields, namespace={"__module__": __name__, "__doc__": doc})
    CONFIGS.setdefault(group, {})[name] = config
    ConfigStore.instance().store(group=group, name=name, node=config, provider="torchrl_her")
    return config


def _type_of(annotation: Any) -> Any:
    """Return the type of a field: Any for types that OmegaConf cannot check."""
    types = get_args(annotation) or (annotation,)
    return annotation if all(each in CHECKED_TYPES for each in types) else Any


def _default_of(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty:
        return MISSING
    if parameter.default == HERKeys():
        # A dict, because OmegaConf does not replace a typed default with a reference such as ${keys}.
        return field(default_factory=partial(asdict, HERKeysConfig()))
    return parameter.default


HERKeysConfig = config_of(HERKeys, "her_keys", "base", "her_keys")

HERTransformConfig = config_of(HERTransform, "transform", "her")
HindsightAugmentationConfig = config_of(HindsightAugmentation, "transform", "hindsight_augmentation")
NormalizedInputsConfig = config_of(NormalizedInputs, "transform", "normalized_inputs", "normalized_inputs")
GoalSelectionConfig = config_of(GoalSelection, "transform", "goal_selection")
CompactGoalsConfig = config_of(CompactGoals, "transform", "compact_goals")
MovementPriorityConfig = config_of(MovementPriority, "transform", "movement_priority")

PackedStorageConfig = config_of(PackedStorage, "storage", "packed")

EnvRewardConfig = config_of(EnvReward, "reward", "env", "env_reward")
GoalRewardConfig = config_of(GoalReward, "reward", "goal")
SparseRewardConfig = config_of(SparseReward, "reward", "sparse")
ReachedRewardConfig = config_of(ReachedReward, "reward", "reached")

CurrentConfig = config_of(Current, "strategy", "current")
FutureConfig = config_of(Future, "strategy", "future")
GeometricConfig = config_of(Geometric, "strategy", "geometric")
FinalConfig = config_of(Final, "strategy", "final")
EpisodeConfig = config_of(Episode, "strategy", "episode")
RandomConfig = config_of(Random, "strategy", "random")
PastDesiredConfig = config_of(PastDesired, "strategy", "past_desired")
SubgoalConfig = config_of(Subgoal, "strategy", "subgoal", "subgoal")
MixtureConfig = config_of(Mixture, "strategy", "mixture", "mixture")

LowestDensityConfig = config_of(LowestDensity, "goal_selector", "lowest_density")
UniformConfig = config_of(Uniform, "goal_selector", "uniform")
FeasibleConfig = config_of(Feasible, "feasible", "base")
