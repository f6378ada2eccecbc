"""What is checked at the door, so that bad input is named before anything is stored."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, is_leaf_nontensor, is_non_tensor, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec

from torchrl_her.rewards import GoalReward

if TYPE_CHECKING:
    from torchrl_her.goal_table import GoalTable
    from torchrl_her.keys import Keys
    from torchrl_her.returns import NStepReturn


def check_her_ratio(her_ratio: float) -> float:
    """Check that the ratio is a probability."""
    if not isinstance(her_ratio, Real) or not 0.0 <= her_ratio <= 1.0:
        raise ValueError(
            f"her_ratio is the probability that a sampled transition is relabelled and must be in [0, 1], "
            f"got {her_ratio!r}. For k relabelled transitions to each original one it is k / (k + 1)."
        )
    return her_ratio


def check_at_least_one(name: str, value: int) -> int:
    """Check that a number of things is a whole number and at least one, and return it as Python's own."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return int(value)


def check_goal_spec(spec: TensorSpec) -> None:
    """Check that the spec is that of one tensor."""
    if not isinstance(spec, TensorSpec) or isinstance(spec, Composite):
        raise TypeError(
            f"goal_spec must be the spec of one goal, got a {type(spec).__name__}: pass "
            'env.observation_spec["achieved_goal"], of one environment.'
        )


def check_goal_fn(goal_fn: object) -> None:
    """Check that goals can be mapped with it."""
    if goal_fn is not None and not callable(goal_fn):
        raise TypeError(f"goal_fn must be a function of achieved goals [batch, *state], got {goal_fn!r}.")


def check_mapped(goals: object, count: int) -> Tensor:
    """Check what the user's function returned for so many achieved goals."""
    if not isinstance(goals, Tensor):
        raise TypeError(f"goal_fn must return a tensor with one goal per row, and returned {type(goals).__name__}.")
    if goals.shape[:1] != (count,):
        raise ValueError(f"goal_fn returned the shape {tuple(goals.shape)} for {count} rows: one goal each is needed.")
    return goals


def check_is_tensordict(written: object) -> None:
    """Check that transitions come as a TensorDict, to which entries can be added."""
    if not isinstance(written, TensorDictBase):
        raise TypeError(
            f"Hindsight adds entries to transitions, and a {type(written).__name__} takes none: write a TensorDict "
            "(of a tensorclass, its to_tensordict())."
        )


def get_entry(tensordict: TensorDictBase, key: NestedKey, argument: str) -> Tensor:
    """Get an entry that is written, or say what there is instead."""
    value = tensordict.get(key, None)
    if isinstance(value, Tensor):
        return value
    if value is not None:
        raise TypeError(
            f"The entry {key!r} is a {type(value).__name__}, and one tensor is needed. Of a goal in several parts make "
            "one, with CatTensors in the environment, and name it."
        )
    found = sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True)))
    advice = f"Name the right one with {argument}=..."
    if isinstance(key, tuple) and key[:2] == ("next", "next"):
        advice = f"Give {argument} without 'next', which is added"
    elif "goal" in argument and key[0] == "next" and tensordict.get(key[1:], None) is not None:
        advice = (
            "It stands at the root alone: a collector with compact_obs=True leaves it out (use False), and so does "
            "NextObservationDelta (give it in_keys without the goals)"
        )
    raise KeyError(f"There is no entry {key!r} in what is written. {advice}; there are {', '.join(found)}.")


def check_same_kind(name: str, at_root: Tensor, under_next: Tensor) -> None:
    """Check that a goal has one shape and dtype at the root and under ``"next"``."""
    if at_root.shape != under_next.shape:
        raise ValueError(
            f"The {name} has the shape {tuple(at_root.shape)} at the root and {tuple(under_next.shape)} under "
            "'next': both must be the same."
        )
    if at_root.dtype != under_next.dtype:
        raise ValueError(
            f"The {name} is {at_root.dtype} at the root and {under_next.dtype} under 'next': both must be the same, so "
            "that one step is found to follow another."
        )


def check_goals(achieved: Tensor, desired: Tensor, table: Tensor | None) -> None:
    """Check that an achieved goal can stand in for a desired one, and that goals are as they were before."""
    if achieved.shape != desired.shape:
        raise ValueError(
            f"One achieved goal has the shape {tuple(achieved.shape)} and one desired goal {tuple(desired.shape)}: an "
            "achieved goal takes the place of a desired one, so they must agree. goal_fn maps one to the other."
        )
    if table is not None and desired.shape != table.shape:
        raise ValueError(
            f"One goal has the shape {tuple(desired.shape)}, and goal_spec, or the first write, {tuple(table.shape)}. "
            "goal_spec is that of one goal, without the batch of environments."
        )
    if table is not None and desired.dtype != table.dtype:
        raise ValueError(f"Goals are {desired.dtype}, and {table.dtype} in goal_spec, or the first write.")


def check_finite(goals: Tensor) -> None:
    """Check that no achieved goal is NaN: relabelled with it, a transition would spoil the training."""
    if goals.is_floating_point() and bool(goals.isnan().any()):
        row = int(goals.reshape(len(goals), -1).isnan().any(dim=1).nonzero()[0])
        raise ValueError(
            f"The achieved goal of transition {row} of this write is NaN. Nothing was stored: look at what the "
            "environment (or goal_fn) returned."
        )


def check_exact(goals: Tensor, stored: Tensor) -> None:
    """Check that achieved goals ``[n, *goal]`` are the same in the dtype of desired ones, in which they are kept."""
    if goals.is_floating_point() and not stored.is_floating_point() and not torch.equal(stored.to(goals.dtype), goals):
        raise ValueError(
            f"Achieved goals are {goals.dtype} and desired ones {stored.dtype}, in which those of this write would be "
            "others. Nothing was stored: store both in one dtype, or map them with goal_fn."
        )


def check_last_steps(tensordict: TensorDictBase, keys: Keys, ends: np.ndarray) -> None:
    """Check that the last steps of episodes led somewhere.

    Args:
        tensordict: written transitions ``[n]``.
        keys: where their entries stand.
        ends: which are last steps and have zeros for both goals under ``"next"``, ``int64``.
    """
    rows = tensordict[torch.from_numpy(ends)]
    lost = rows.get(keys.desired).reshape(len(ends), -1).any(1)
    of_step = {keys.reward, keys.done, keys.terminated, keys.truncated, keys.next_achieved, keys.next_desired}
    observations = {unravel_key(("next", key)) for key in rows.keys(include_nested=True, leaves_only=True)} - of_step
    observed = [value for key in observations if isinstance(value := rows.get(key, None), Tensor)]
    for value in observed:
        lost &= ~value.reshape(len(ends), -1).any(1)
    if observed and bool(lost.any()):
        raise ValueError(
            "After the last step of an episode, all that was observed is zeros, and the desired goal was another: what "
            "was achieved there is lost. GymEnv(..., num_envs=n) does that: use SerialEnv or ParallelEnv. Nothing was "
            "stored."
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


def tell_of_other_rewards(computed: Tensor, stored: Tensor) -> None:
    """Warn if the reward module gives other rewards for the stored goals than are stored, ``[rows, ...]``."""
    new, old = computed.double().flatten(), stored.double().flatten().to(computed.device)
    differs = ~torch.isclose(new, old, rtol=1e-3, atol=1e-3, equal_nan=True)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        warnings.warn(
            f"The reward module gives {new[row]:.6g} for a transition whose stored reward is {old[row]:.6g}: "
            "relabelled transitions would have rewards of another kind than the others. Use the environment's own, "
            "EnvReward(env), and scale rewards after HERTransform.",
            stacklevel=2,
        )


def check_single_steps(tensordict: TensorDictBase) -> None:
    """Check that transitions are single steps, whose reward depends on one outcome."""
    if tensordict.get("steps_to_next_obs", None) is not None:
        raise ValueError(
            "These are n-step transitions ('steps_to_next_obs' is among their entries), whose rewards were summed "
            "under the original goal. Leave the collector's MultiStep out and let the buffer do it: "
            "Compose(MultiStepTransform(n_steps, gamma), HERTransform(...))."
        )


def check_reads_goals_alone(reward: TensorDictModuleBase, goals: set[NestedKey], has_goal_fn: bool) -> None:
    """Check that a reward module can be asked for the steps inside of a window, of which the goals are kept."""
    others = [key for key in reward.in_keys if key not in goals]
    if others:
        raise ValueError(
            f"With MultiStepTransform, the reward of each step in a window is computed from its goals, which are all "
            f"that is kept of it, and {type(reward).__name__} reads {others} too. Pass a reward of the goals, "
            "GoalReward(reward_fn), or leave MultiStepTransform out."
        )
    if has_goal_fn and not isinstance(reward, GoalReward):
        raise ValueError(
            f"With MultiStepTransform, the reward of each step in a window is computed from goals that goal_fn has "
            f"mapped, and {type(reward).__name__} reads them as they were before: pass GoalReward(reward_fn)."
        )


def check_n_step_entries(summed: list[NestedKey], reward: NestedKey, ends: NestedKey, done: NestedKey) -> None:
    """Check that n-step transform and HERTransform mean the same reward and the same flag."""
    if summed != [reward] or ends != done:
        raise ValueError(
            f"MultiStepTransform sums {summed} up to {ends!r}, HERTransform computes {reward!r} and reads {done!r}: "
            "pass both the same reward key, one alone, and the same done key."
        )


def check_n_step_rows(mask: NestedKey | None, dimensions: int) -> None:
    """Check that written transitions are rows in time, without padding."""
    if mask is not None:
        raise ValueError(
            f"MultiStepTransform would sum over the padding that mask_key={mask!r} marks: collect with "
            "split_trajs=False, or leave MultiStepTransform out."
        )
    if dimensions == 0:
        raise ValueError(
            "MultiStepTransform needs a dimension of time, and a single transition was added without one: use extend."
        )


def check_has_multi_step(n_step_return: NStepReturn | None) -> NStepReturn:
    """Check that n-step transitions are sampled where the returns under a new goal are known."""
    if n_step_return is None:
        raise ValueError(
            "The sampled transitions span several steps ('steps_to_next_obs'), and no MultiStepTransform is listed "
            "before HERTransform: make the buffer as it was when they were written."
        )
    return n_step_return


def check_same_rows(rows: torch.Size, before: torch.Size | None) -> None:
    """Check that a write has the same rows as the one before."""
    if before is not None and rows != before:
        raise ValueError(
            f"This write has {rows.numel()} row(s), {list(rows)}, and the one before had {before.numel()}, "
            f"{list(before)}: MultiStepTransform makes its windows along the rows, so each environment needs its own. "
            "Extend with [environments, steps], always the same."
        )


def check_one_lane_per_row(continues: np.ndarray) -> None:
    """Check that each row goes on with the environment that it held; ``bool [rows, steps]``."""
    if not continues.all():
        row = int(np.argwhere(~continues)[0][0])
        raise ValueError(
            f"Row {row} of this write has transitions that do not follow each other, with no done flag between them: "
            "windows of MultiStepTransform would mix episodes. Extend with [environments, steps] and ndim=2 in the "
            "storage, not flattened, from environments that advance together, and reset them when they are done. Once "
            "they go on elsewhere (a write was refused or lost, say), call flush() of HERTransform first."
        )


def check_are_sampled(stored: dict[NestedKey, Tensor], keys: Keys) -> None:
    """Check that what relabelling replaces is in the sample."""
    for key in (keys.desired, keys.reward):
        if stored[key] is None:
            raise KeyError(
                f"There is no entry {key!r} in what is sampled, and it was written: list the transform that takes it "
                "away after HERTransform."
            )


def get_stamp(tensordict: TensorDictBase, key: str) -> Tensor:
    """Get the stamps of sampled transitions, which those written through HERTransform have."""
    stamp = tensordict.get(key, None)
    if not isinstance(stamp, Tensor):
        raise KeyError(
            f"The sampled transitions carry no stamp under {key!r}: they were written before HERTransform was part "
            "of the buffer, or a transform listed before it takes the stamp away. Make the buffer with "
            "transform=HERTransform(...), then extend it."
        )
    return stamp


def check_rows(rows: Tensor, steps: Tensor, strategy: object) -> None:
    """Check that a strategy chose one row per transition."""
    if rows.shape != steps.shape or rows.dtype != steps.dtype:
        raise ValueError(
            f"{strategy!r} must select one row of the goal table per transition, {steps.dtype} {tuple(steps.shape)}, "
            f"and returned {rows.dtype} {tuple(rows.shape)}."
        )


def check_may_move(table: GoalTable, device: torch.device) -> None:
    """Check that the goal table is where the samples are, or can come there."""
    if table.is_shared and table.device != device:
        raise RuntimeError(
            f"The sampled transitions are on {device}, and the goal table, which processes share, on {table.device}: "
            "give HERTransform the goal_spec on the device of the storage."
        )


def check_sequences(count: int, length: int) -> None:
    """Check that a sampled batch is made of whole sequences."""
    if count % length:
        raise ValueError(
            f"sequence_length={length} and the sampled batch has {count} transitions: it must be a multiple. "
            "Set it to the slice length of the sampler."
        )


def check_same_compact(saved: bool, compact: bool) -> None:
    """Check that what is loaded and what will be written have the same entries."""
    if saved != compact:
        raise ValueError(
            f"The buffer was saved with compact={saved}, and what this one writes, with compact={compact}, has other "
            f"entries: make the transform with compact={saved}, then load."
        )


def check_extend(batch: torch.Size, is_added: bool) -> None:
    """Check that several transitions can take the place of those that are written."""
    if is_added or len(batch) != 1:
        what = "one transition is added or set" if is_added or not batch else f"they come as {list(batch)}"
        raise ValueError(
            f"HindsightAugmentation writes more transitions than it is given, and {what}: use "
            "rb.extend(data.reshape(-1)), with a storage of one dimension. HERTransform works with add, and with "
            "storages of several dimensions."
        )


def check_same_entries(tensordict: TensorDictBase, before: dict | None) -> dict:
    """Check that transitions have the entries of those before, so that they can be held back together."""
    leaves = list(tensordict.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
    if other := [key for key, value in leaves if is_non_tensor(value)]:
        raise TypeError(
            f"HindsightAugmentation holds transitions back and copies them, which takes tensors, and {other} are none: "
            "exclude() them from what is written, or use HERTransform."
        )
    entries = {key: (value.shape[1:], value.dtype) for key, value in leaves}
    if before is not None and entries != before:
        differing = [key for key in {**before, **entries} if before.get(key) != entries.get(key)]
        told = ", ".join(f"{key!r}: {before.get(key)} before, {entries.get(key)} now" for key in differing)
        raise ValueError(
            f"These transitions have other entries than those that were written before ({told}), and episodes of both "
            "are held back: write the same entries each time."
        )
    return entries
