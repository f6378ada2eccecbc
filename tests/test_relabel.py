"""Rewards and flags of relabelled transitions, recomputed by any reward module."""

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage

from support.factories import make_augmentation, make_buffer, make_transform
from support.rewards import check_relabelled, distance, distance_of_row, nearness, point_reach, sample_of
from torchrl_her import EnvReward, GoalReward, PackedStorage, SparseReward
from torchrl_her.envs import PointReach

GOALS = [("next", "achieved_goal"), "desired_goal"]
pytestmark = pytest.mark.filterwarnings("ignore:The reward module gives")  # another reward than that of the data
REWARD, TERMINATED = ("next", "reward"), ("next", "terminated")


@pytest.mark.parametrize("storage", [LazyTensorStorage, PackedStorage])
def test_a_module_may_read_the_action_and_any_other_entry_also_those_that_it_replaces(storage):
    written = point_reach()
    written["next", "wind"] = torch.rand(len(written), 1)
    written[REWARD], written[TERMINATED] = torch.rand(len(written), 1), torch.rand(len(written), 1) < 0.5
    written["paid"], written["ended"] = written[REWARD].clone(), written[TERMINATED].clone()

    def function(achieved, desired, action, wind, reward, terminated):
        return reward - distance(achieved, desired)[:, None] - action[:, :1] * wind, ~terminated

    def reward(row):
        return row["paid"] - distance_of_row(row) - row["action"][0] * row["next", "wind"][0]

    module = TensorDictModule(function, [*GOALS, "action", ("next", "wind"), REWARD, TERMINATED], [REWARD, TERMINATED])
    check_relabelled(module, reward, lambda row: not row["ended"], written=written, storage=storage)


@pytest.mark.parametrize("terminates", [True, False])
@pytest.mark.parametrize("others", [[], [("next", "success"), "observation", "new"]])
def test_a_module_may_end_episodes_and_its_other_outputs_change_no_entry(others, terminates):
    written = point_reach()
    written["next", "success"] = torch.rand(len(written), 1)
    written["observation"] = torch.rand(len(written), 4)

    def reward_fn(achieved, desired):
        far = distance(achieved, desired)[:, None]
        return (-far, *[far < 0.3][:terminates], *(far, far.expand(-1, 4), far)[: len(others)])

    module = TensorDictModule(reward_fn, GOALS, [REWARD, *[TERMINATED][:terminates], *others])
    terminated = (lambda row: distance_of_row(row) < 0.3) if terminates else None
    batch = check_relabelled(module, lambda row: -distance_of_row(row), terminated, written=written)
    assert "new" not in batch


class Tenfold(GoalReward):
    def forward(self, tensordict):
        tensordict = super().forward(tensordict)
        return tensordict.set(REWARD, 10 * tensordict[REWARD])


def test_a_subclass_of_goal_reward_may_override_forward():
    written = point_reach()
    written[REWARD] = 10 * -distance(written["next", "achieved_goal"], written["desired_goal"])[:, None]
    check_relabelled(Tenfold(lambda *goals: -distance(*goals)), lambda row: -10 * distance_of_row(row), written=written)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_a_reward_are_called(register):
    called, hindsight = [], make_transform(reward=SparseReward(0.05), capacity=1000)
    rb = make_buffer(hindsight, point_reach())
    getattr(hindsight.reward, register)(lambda *_: called.append(1))
    rb.sample(5)
    assert called


def test_a_reward_keeps_the_stored_dtype():
    written = point_reach()
    written[REWARD] = written[REWARD].half()
    reward = lambda achieved, desired: (achieved == desired).all(dim=-1).double()  # noqa: E731
    check_relabelled(reward, lambda row: float(distance_of_row(row) == 0), written=written)


def test_a_reward_with_parameters_passes_no_gradient_to_the_sample():
    weights = torch.nn.Linear(4, 1)
    module = TensorDictModule(lambda *goals: weights(torch.cat(goals, dim=-1)), GOALS, [REWARD])
    assert not sample_of(point_reach(), module)[REWARD].requires_grad


def attribute_of_a_module():
    module = TensorDictModule(lambda *goals: nearness(*goals)[:, None], GOALS, [REWARD])
    module.recompute_all = True
    return module


ALL_RECOMPUTED = {
    "a function": lambda: GoalReward(nearness, terminated_fn=lambda *goals: nearness(*goals) < 1, recompute_all=True),
    "a distance": lambda: SparseReward(0.05, recompute_all=True),
    "an environment": lambda: EnvReward(PointReach(), recompute_all=True),
    "a module": attribute_of_a_module,
}


@pytest.mark.parametrize("make", [make_transform, make_augmentation])
@pytest.mark.parametrize("name", ALL_RECOMPUTED)
def test_rewards_of_original_goals_are_recomputed_if_the_reward_asks_for_it(name, make):
    written, reward = point_reach(), ALL_RECOMPUTED[name]()
    rb = make_buffer(make(reward=reward), written.clone().set(REWARD, torch.full_like(written[REWARD], 7.0)))
    batch = rb.sample(500)
    originals = batch[~batch["hindsight", "relabelled"][:, 0]]
    assert 0 < len(originals) < 500
    assert torch.equal(batch[REWARD], reward(batch.exclude(REWARD))[REWARD])
    assert not originals["next", "terminated"].any()  # flags stay as stored


def test_flags_that_are_not_recomputed_may_be_missing():
    written = point_reach().exclude(TERMINATED, ("next", "truncated"))
    check_relabelled(lambda *goals: -distance(*goals), lambda row: -distance_of_row(row), written=written)
