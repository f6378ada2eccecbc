"""Transforms before and after HERTransform: an order that would give wrong rewards or goals is refused."""

import gc
from functools import partial

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    Compose,
    DTypeCastTransform,
    MultiStepTransform,
    ObservationNorm,
    Reward2GoTransform,
    RewardScaling,
    SelectTransform,
    StepCounter,
)

from support.factories import check_refused
from support.refused import NEXT_ACHIEVED, REWARD, make_small_buffer, transitions
from support.rewards import nearness
from torchrl_her import HERTransform

make_hindsight = partial(HERTransform, nearness, capacity=100)
n_steps = partial(MultiStepTransform, 3, 0.9)
scale_rewards = partial(RewardScaling, loc=0.0, scale=2.0, in_keys=[REWARD])
scale_goals = partial(RewardScaling, loc=0.0, scale=2.0, in_keys=["desired_goal"])


def normalize_when_written(key, result):
    return lambda: ObservationNorm(0.0, 2.0, in_keys=[], out_keys=[], in_keys_inv=[key], out_keys_inv=[result])


SCALED_REWARDS = "RewardScaling comes before HERTransform.*reward.*Place it after"
SCALED_GOALS = "RewardScaling comes before HERTransform.*desired_goal.*Place it after"
REFUSED = {
    "rewards scaled before": ({"before": [scale_rewards]}, SCALED_REWARDS),
    "goals scaled before": ({"before": [scale_goals]}, SCALED_GOALS),
    "rewards scaled before, in a Compose": (
        {"before": [StepCounter, lambda: Compose(StepCounter(), scale_rewards())]}, SCALED_REWARDS
    ),
    "goals normalized when written": (
        {"before": [normalize_when_written("desired_goal", "raw")]},
        "ObservationNorm comes before HERTransform and writes.*desired_goal.*Place it after",
    ),
    "goals computed when written": (
        {"before": [normalize_when_written("scaled", "desired_goal")]},
        "ObservationNorm comes before HERTransform and reads.*desired_goal.*Place it after",
    ),
    "two transforms with hindsight": ({"after": [make_hindsight]}, "Two transforms .* would relabel.*keep one"),
    "n steps over padding": (
        {"before": [n_steps], "mask_key": "mask"}, "padding that mask_key='mask' marks.*split_trajs=False"
    ),
}  # fmt: skip


def written(count):
    return transitions(count=count).set("mask", torch.ones(count, dtype=torch.bool))


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_would_undo_relabelling_or_be_undone_by_it_are_refused(name, count):
    options, message = REFUSED[name]
    rb = make_small_buffer(**options)
    check_refused(rb, lambda: rb.extend(written(count)), ValueError, message)


@pytest.mark.parametrize("where", ["before", "after"])
def test_rewards_that_are_summed_when_written_are_refused(where):
    rb = make_small_buffer(**{where: [partial(Reward2GoTransform, out_keys=["reward_to_go"])]})
    chunk = transitions(count=25)  # a whole episode, since otherwise Reward2GoTransform itself raises an error
    check_refused(rb, lambda: rb.extend(chunk), ValueError, "Reward2GoTransform sums.*Remove Reward2GoTransform")


@pytest.mark.parametrize("count", [1, 10])  # with 1, MultiStepTransform does not return a transition yet
def test_a_multi_step_transform_after_hindsight_is_refused(count):
    rb = make_small_buffer(after=[n_steps])
    with pytest.raises(ValueError, match=r"comes after HERTransform.*Place it before"):
        rb.extend(transitions(count=count))
    assert len(rb) == 0


@pytest.mark.parametrize(("scale", "message"), [(scale_rewards, SCALED_REWARDS), (scale_goals, SCALED_GOALS)])
def test_a_wrong_order_is_refused_for_nested_and_for_inserted_transforms(scale, message):
    nested = Compose(scale(), Compose(StepCounter(), make_hindsight()))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=nested)
    check_refused(rb, lambda: rb.extend(transitions()), ValueError, message)
    rb = make_small_buffer()
    rb.extend(transitions())
    rb.insert_transform(0, scale())
    check_refused(rb, lambda: rb.extend(transitions(10)), ValueError, message)


def test_a_transform_that_replaces_another_is_checked():
    rb = make_small_buffer(before=[StepCounter])
    rb.extend(transitions())
    rb.transform.pop(0)
    rb.transform.insert(0, scale_rewards())
    with pytest.raises(ValueError, match=SCALED_REWARDS):
        rb.sample(5)
    check_refused(rb, lambda: rb.extend(transitions(10)), ValueError, SCALED_REWARDS)


@pytest.mark.parametrize("key", ["desired_goal", REWARD])
def test_a_sample_without_an_entry_that_relabelling_replaces_is_refused(key):
    kept = [each for each in transitions().keys(True, True) if each != key]
    rb = make_small_buffer(before=[partial(SelectTransform, *kept, "hindsight_stamp", keep_rewards=False)])
    rb.extend(transitions(count=25))
    with pytest.raises(
        KeyError, match=r"The sample has no entry .* although it was written\. Place the transform that drops it"
    ):
        rb.sample(5)


def test_transforms_that_relabelling_does_not_undo_are_not_refused():
    select_all = partial(SelectTransform, "achieved_goal", "desired_goal", "next", "hindsight_stamp", "index")
    cast_rewards = partial(DTypeCastTransform, torch.float32, torch.float64, in_keys=[REWARD])
    rb = make_small_buffer(before=[cast_rewards, select_all], after=[scale_rewards, scale_goals], her_ratio=1.0)
    rb.extend(transitions(count=25))
    batch = rb.sample(50)
    assert batch["hindsight", "relabelled"].all()
    expected = 2 * nearness(batch[NEXT_ACHIEVED], batch["desired_goal"] / 2)[:, None]
    torch.testing.assert_close(batch[REWARD], expected, check_dtype=False)


def test_a_deleted_container_is_ignored():
    transform = make_hindsight()
    container = Compose(transform)
    del container
    gc.collect()
    assert transform.inv(transitions()).batch_size == (10,)
