"""HERTransform(None) relabels goals, and leaves rewards and done flags as they are stored."""

from functools import partial

import pytest
import torch
from torchrl.data import SliceSampler, TensorDictReplayBuffer, TensorStorage
from torchrl.envs import Compose, MultiStepTransform

from support.factories import make_buffer, same, seeded_sample
from support.goals import reward_of
from support.world import Goals, World
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
ADDED = ["hindsight", "index", "hindsight_stamp"]
EPISODES = [["go"] * 9 + [end] for end in ("terminated", "truncated")]


def episodes(*without):
    world = World(1, Goals())
    return world.tensordict([row for plan in EPISODES for row in world.play(0, plan)]).exclude(*without)


@pytest.mark.parametrize("without", [[], [REWARD]], ids=["rewards", "no rewards"])
@pytest.mark.parametrize("kind", [HERTransform, HindsightAugmentation])
def test_only_goals_change(kind, without):
    hindsight = kind(None, strategy=Geometric(0.9), capacity=100)
    data = episodes(*without)
    rb = make_buffer(hindsight, data, batch_size=500)
    batch = rb.sample()
    relabelled = batch["hindsight", "relabelled"].squeeze(-1)
    assert 0.7 < relabelled.double().mean() < 0.9
    by_uid = {int(uid): row for uid, row in zip(data["uid"], data, strict=True)}
    stored = torch.stack([by_uid[int(uid)] for uid in batch["uid"]])
    assert same(batch.exclude(*ADDED, *GOALS), stored.exclude(*GOALS))
    assert same(batch[~relabelled].exclude(*ADDED), stored[~relabelled])
    assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])
    assert set(batch["desired_goal"][relabelled].flatten().tolist()) <= set(
        data["next", "achieved_goal"].flatten().tolist()
    )
    report = hindsight.report()
    assert report.sampled == 500
    assert report.relabelled == pytest.approx(relabelled.double().mean().item())
    assert (report.original_reward, report.relabelled_reward, report.relabelled_reached) == (None, None, None)
    assert repr(hindsight).startswith(f"{kind.__name__}(None, strategy=Geometric(0.9)")


SLICES = {"slice_len": 4, "traj_key": ("collector", "traj_ids"), "strict_length": True}
WITH = {  # transforms before, options of HERTransform and of the buffer
    "infos of a mixture": ([], {"strategy": Mixture({"future": 0.5, "final": 0.5}), "info": True}, {}),
    "all relabelled": ([], {"her_ratio": 1.0}, {}),
    "other goals": ([], {"strategy": {"desired_goal": "future", "other_goal": "final"}}, {}),
    "sequences": ([], {"sequence_length": 4}, {"sampler": partial(SliceSampler, **SLICES)}),
    "movement": ([partial(MovementPriority, far=6.0)], {}, {}),
    "compact goals": ([CompactGoals], {}, {}),
}


@pytest.mark.parametrize("name", WITH)
@pytest.mark.parametrize("without", [[], [REWARD]], ids=["rewards", "no rewards"])
def test_the_goals_are_those_with_a_reward(name, without):
    before, options, others = WITH[name]
    batches = []
    for reward in (None, GoalReward(reward_of)):
        transform = Compose(*(make() for make in before), HERTransform(reward, capacity=100, **options))
        data = episodes(*([] if reward else without))
        rb = make_buffer(transform, data, batch_size=200, **{key: make() for key, make in others.items()})
        batches.append(seeded_sample(rb).exclude("hindsight_stamp", REWARD))
    assert same(*batches)
    assert batches[0]["hindsight", "relabelled"].any()


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
