"""HERTransform(None) relabels goals, and leaves rewards and done flags as they are stored."""

from functools import partial

import pytest
import torch
from torchrl.data import SliceSampler, TensorDictReplayBuffer, TensorStorage
from torchrl.envs import Compose, MultiStepTransform

from support.factories import make_buffer, same, seeded_sample
from support.goals import reward_of
from support.world import transitions
from torchrl_her import (
    CompactGoals,
    Geometric,
    GoalReward,
    HERTransform,
    HindsightAugmentation,
    Mixture,
    MovementPriority,
)

REWARD = ("next", "reward")
GOALS = ["desired_goal", ("next", "desired_goal")]


def episodes(*without):
    return transitions([*["go"] * 9, "terminated", *["go"] * 9, "truncated"]).exclude(*without)


@pytest.mark.parametrize("kind", [HERTransform, HindsightAugmentation])
def test_its_report_has_no_rewards(kind):
    hindsight = kind(None, strategy=Geometric(0.9), capacity=100)
    batch, report = make_buffer(hindsight, episodes(), batch_size=500).sample(), hindsight.report()
    assert report.sampled == 500
    assert report.relabelled == pytest.approx(batch["hindsight", "relabelled"].double().mean().item())
    assert (report.original_reward, report.relabelled_reward, report.relabelled_reached) == (None, None, None)
    assert repr(hindsight).startswith(f"{kind.__name__}(None, strategy=Geometric(0.9)")


SLICES = {"slice_len": 4, "traj_key": ("collector", "traj_ids"), "strict_length": True}
MIXTURE = Mixture({"future": 0.5, "final": 0.5})
WITH = {  # transforms before, the hindsight transform, and options of the buffer
    "copies": ([], HindsightAugmentation, {}),
    "infos of a mixture": ([], partial(HERTransform, strategy=MIXTURE, info=True), {}),
    "all relabelled": ([], partial(HERTransform, her_ratio=1.0), {}),
    "other goals": ([], partial(HERTransform, strategy={"desired_goal": "future", "other_goal": "final"}), {}),
    "sequences": ([], partial(HERTransform, sequence_length=4), {"sampler": partial(SliceSampler, **SLICES)}),
    "movement": ([partial(MovementPriority, far=6.0)], HERTransform, {}),
    "compact goals": ([CompactGoals], HERTransform, {}),
}


@pytest.mark.parametrize("name", WITH)
@pytest.mark.parametrize("without", [[], [REWARD]], ids=["rewards", "no rewards"])
def test_the_goals_are_those_with_a_reward_and_rewards_are_as_stored(name, without):
    before, make_hindsight, others = WITH[name]
    batches = []
    for reward in (GoalReward(reward_of), None):
        transform = Compose(*(make() for make in before), make_hindsight(reward, capacity=100))
        data = episodes(*([] if reward else without))
        torch.manual_seed(0)  # copies are made when transitions are written
        rb = make_buffer(transform, data, batch_size=200, **{key: make() for key, make in others.items()})
        batches.append(seeded_sample(rb))
    assert same(*(batch.exclude("hindsight_stamp", REWARD) for batch in batches))
    assert batches[1]["hindsight", "relabelled"].any()
    if not without:
        assert torch.equal(batches[1][REWARD], data[batches[1]["uid"]][REWARD])


def test_a_data_set_without_goals_and_rewards_is_adopted():
    hindsight = HERTransform(None, her_ratio=1.0, capacity=20)
    data = hindsight.adopt(episodes(REWARD, *GOALS))
    rb = TensorDictReplayBuffer(storage=TensorStorage(data), transform=hindsight, batch_size=64)
    batch = rb.sample()
    assert batch["hindsight", "relabelled"].all()
    assert REWARD not in batch.keys(True)
    assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])


def test_n_step_returns_are_refused():
    transform = Compose(MultiStepTransform(3, 0.9), HERTransform(None, capacity=100))
    rb = make_buffer(transform)
    with pytest.raises(ValueError, match=r"HERTransform\(None\) does not recompute them: pass a reward"):
        rb.extend(episodes())
    assert not len(rb)
