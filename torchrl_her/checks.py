"""What is checked at the door, so that bad input is named before anything is stored."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import Compose, DTypeCastTransform, MultiStepTransform, Transform


def check_her_ratio(her_ratio: float) -> float:
    """Check that the ratio is a probability."""
    if not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio}. For k relabelled transitions to each original one it is k / (k + 1)."
        )
    return her_ratio


def check_at_least_one(name: str, value: int) -> None:
    """Check that a number of things is a whole number and at least one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def get_entry(tensordict: TensorDictBase, key: NestedKey, argument: str) -> Tensor:
    """Get an entry that is written, or say what there is instead."""
    value = tensordict.get(key, None)
    if value is not None:
        return value
    found = sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True)))
    advice = f"Name the right one with {argument}=..."
    if isinstance(key, tuple) and key[0] == "next" and tensordict.get(key[1:], None) is not None:
        advice = "It stands at the root alone: a collector with compact_obs=True leaves it out, so use False"
    raise KeyError(f"HERTransform found no entry {key!r} in what is written. {advice}; there are {', '.join(found)}.")


def check_same_shape(name: str, at_root: Tensor, under_next: Tensor) -> None:
    """Check that a goal has one shape at the root and under ``"next"``."""
    if at_root.shape != under_next.shape:
        raise ValueError(
            f"The {name} has the shape {tuple(at_root.shape)} at the root and {tuple(under_next.shape)} under "
            "'next': both must be the same."
        )


def check_goals(achieved: Tensor, desired: Tensor, table: Tensor | None) -> None:
    """Check that an achieved goal can stand in for a desired one, and that the goal table was made for such goals."""
    if achieved.shape != desired.shape:
        raise ValueError(
            f"One achieved goal has the shape {tuple(achieved.shape)} and one desired goal {tuple(desired.shape)}: an "
            "achieved goal takes the place of a desired one, so they must agree. goal_fn maps one to the other."
        )
    origin = "(from goal_spec, or the first write). goal_spec is that of one goal, without the batch of environments."
    if table is not None and desired.shape != table.shape:
        raise ValueError(
            f"One goal has the shape {tuple(desired.shape)}, the goal table was made for {tuple(table.shape)} {origin}"
        )
    if table is not None and desired.dtype != table.dtype:
        raise ValueError(f"Goals are {desired.dtype}, the goal table was made for {table.dtype} {origin}")


def check_finite(goals: Tensor) -> None:
    """Check that no achieved goal is NaN: relabelled with it, a transition would spoil the training."""
    if goals.is_floating_point() and bool(goals.isnan().any()):
        row = int(goals.reshape(len(goals), -1).isnan().any(dim=1).nonzero()[0])
        raise ValueError(
            f"The achieved goal of transition {row} of this write is NaN. Nothing was stored: look at what the "
            "environment (or goal_fn) returned."
        )


def check_one_per_transition(key: NestedKey, value: Tensor, count: int) -> None:
    """Check that a flag or an id has one value for each transition."""
    if value.numel() != count:
        raise ValueError(
            f"The entry {key!r} has the shape {tuple(value.shape)} for {count} transitions: one value each is needed."
        )


def check_out_keys(reward: TensorDictModuleBase, reward_key: NestedKey) -> None:
    """Check that the reward module writes the reward."""
    if reward_key not in reward.out_keys:
        raise ValueError(
            f"The reward module writes {list(reward.out_keys)} and not {reward_key!r}: give it that out_key, or name "
            "the one it has with reward_key=... (without 'next')."
        )


def check_reward(computed: TensorDictBase, stored: TensorDictBase, reward_key: NestedKey) -> None:
    """Check that the reward module gives rewards of the shape that is stored."""
    reward, expected = computed.get(reward_key, None), get_entry(stored, reward_key, "reward_key")
    if reward is None or reward.shape != expected.shape:
        got = "nothing" if reward is None else f"the shape {tuple(reward.shape)}"
        raise ValueError(
            f"The reward module wrote {got} under {reward_key!r} where rewards of the shape {tuple(expected.shape)} "
            "are stored: it must write one of the same shape."
        )


def check_order(before: Sequence[Transform], after: Sequence[Transform], keys: set[NestedKey]) -> None:
    """Check the transforms that are listed before HERTransform and after it."""
    for transform in (*before, *after):
        if isinstance(transform, MultiStepTransform):
            raise ValueError(
                "MultiStepTransform sums rewards of the original goal, and HERTransform does not compute n-step "
                "returns under the new goal yet: leave MultiStepTransform out."
            )
        if isinstance(transform, Compose):
            inside = list(transform)
            check_order(inside if transform in before else [], inside if transform in after else [], keys)
    for transform in before:
        overwritten = keys.intersection(transform.out_keys)
        if overwritten and not isinstance(transform, DTypeCastTransform):
            raise ValueError(
                f"{type(transform).__name__} is listed before HERTransform and writes {sorted(map(str, overwritten))}, "
                "which relabelling then replaces by raw values: list it after HERTransform."
            )


def check_single_steps(tensordict: TensorDictBase) -> None:
    """Check that transitions are single steps, whose reward depends on one outcome."""
    if tensordict.get("steps_to_next_obs", None) is not None:
        raise ValueError(
            "These are n-step transitions ('steps_to_next_obs' is among their entries), whose rewards were summed "
            "under the original goal: leave MultiStepTransform (or MultiStep) out where HERTransform relabels."
        )


def get_stamp(tensordict: TensorDictBase, key: str) -> Tensor:
    """Get the stamps of sampled transitions, which those written through HERTransform have."""
    stamp = tensordict.get(key, None)
    if not isinstance(stamp, Tensor):
        raise KeyError(
            f"The sampled transitions carry no stamp under {key!r}: they were written before HERTransform was part "
            "of the buffer. Make the buffer with transform=HERTransform(...), then extend it."
        )
    return stamp


def check_rows(rows: Tensor, steps: Tensor, strategy: object) -> None:
    """Check that a strategy chose one row per transition."""
    if rows.shape != steps.shape or rows.dtype != steps.dtype:
        raise ValueError(
            f"{strategy!r} must select one row of the goal table per transition, {steps.dtype} {tuple(steps.shape)}, "
            f"and returned {rows.dtype} {tuple(rows.shape)}."
        )


def check_sequences(count: int, length: int) -> None:
    """Check that a sampled batch is made of whole sequences."""
    if count % length:
        raise ValueError(
            f"sequence_length={length} and the sampled batch has {count} transitions: it must be a multiple. "
            "Set it to the slice length of the sampler."
        )
