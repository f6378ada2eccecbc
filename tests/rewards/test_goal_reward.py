"""GoalReward and SparseReward, compared with plain Python loops, alone and in buffers."""

import itertools
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.rewards import check_relabelled, distance, distance_of_row, goals_of, point_reach
from torchrl_her import GoalReward, HERTransform, SparseReward
from torchrl_her.envs import PointReach

# GoalReward


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("batch_size", [(), (1,), (5,), (2, 3), (2, 1, 3)])
def test_reward_and_termination_are_the_functions_of_each_pair_of_goals(batch_size, keepdim):
    torch.manual_seed(0)
    achieved, desired = torch.randn(2, *batch_size, 2)
    seen = []

    def reward_fn(achieved, desired):
        seen.append(achieved.shape)
        return -torch.linalg.vector_norm(achieved - desired, dim=-1, keepdim=keepdim)

    module = GoalReward(reward_fn, terminated_fn=lambda achieved, desired: (achieved > desired).any(-1, keepdim))
    after = module(TensorDict({"desired_goal": desired, "next": {"achieved_goal": achieved}}, batch_size))["next"]
    assert after["reward"].shape == after["terminated"].shape == (*batch_size, 1)
    assert after["terminated"].dtype == torch.bool
    assert seen == [(math.prod(batch_size), 2)]
    for place in itertools.product(*map(range, batch_size)):
        outcome, goal = achieved[place].tolist(), desired[place].tolist()
        assert after["reward"][place].item() == pytest.approx(-math.dist(outcome, goal), rel=1e-6)
        assert after["terminated"][place].item() == any(a > d for a, d in zip(outcome, goal, strict=True))
    assert after["terminated"].unique().numel() == 2 or math.prod(batch_size) == 1


@pytest.mark.parametrize("as_module", [True, False])
def test_a_function_rewards_relabelled_transitions_and_leaves_the_flags_alone(as_module):
    check_relabelled(GoalReward(distance) if as_module else distance, distance_of_row)


def test_a_sample_calls_the_function_once_with_all_rows():
    seen = []

    def reward_fn(achieved, desired):
        seen.append(len(achieved))
        return (achieved - desired)[:, 0]

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=HERTransform(reward_fn, capacity=1000))
    rb.extend(point_reach())
    seen.clear()
    rb.sample(64)
    assert seen == [64]


def test_a_termination_function_ends_relabelled_transitions_and_never_changes_truncated():
    reward = GoalReward(distance, terminated_fn=lambda achieved, desired: distance(achieved, desired) < 0.3)
    batch = check_relabelled(reward, distance_of_row, lambda row: distance_of_row(row) < 0.3)
    ends = batch["hindsight", "relabelled"] & batch["next", "terminated"]
    assert (ends & batch["next", "truncated"]).any()
    assert (ends & ~batch["next", "truncated"]).any()


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, achieved, desired):
        return -self.layer(achieved - desired).abs()


def test_a_learned_reward_moves_and_is_saved_with_the_transform():
    one, other = (
        HERTransform(GoalReward(Learned(), terminated_fn=nn.PairwiseDistance()), capacity=10) for _ in range(2)
    )
    assert len(list(one.parameters())) == 2
    other.load_state_dict(one.state_dict())
    achieved, desired = torch.randn(2, 3, 2)
    rewards = [each.reward(goals_of(achieved, desired))["next", "reward"] for each in (one, other)]
    assert torch.equal(*rewards)
    assert all(parameter.is_meta for parameter in one.to("meta").parameters())


@pytest.mark.parametrize(
    "function", [lambda achieved: achieved, lambda achieved, desired, info: achieved, lambda: 0], ids=["1", "3", "0"]
)
@pytest.mark.parametrize(
    ("make", "called"),
    [
        (HERTransform, "the reward function"),
        (GoalReward, "the reward function"),
        (lambda function: GoalReward(distance, terminated_fn=function), "terminated_fn"),
        (lambda function: SparseReward(0.1, terminated_fn=function), "terminated_fn"),
    ],
    ids=["HERTransform", "GoalReward", "terminated_fn", "SparseReward"],
)
def test_a_function_with_another_number_of_arguments_is_refused(make, called, function):
    message = rf"{called} is called with two arguments, .*, but its signature is \(.*TensorDictModule"
    with pytest.raises(TypeError, match=message):
        make(function)


@pytest.mark.parametrize("function", [lambda *goals: goals[0], lambda achieved, desired, scale=1.0: achieved, max])
def test_a_function_that_can_be_called_with_two_arguments_is_not_refused(function):
    HERTransform(function)


# SparseReward


def distance_in_python(one, other):
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool])
def test_a_sparse_reward_is_that_of_a_plain_loop(dtype, shape):
    torch.manual_seed(0)
    achieved, desired = (4 * torch.randn(2, 40, *shape)).abs().to(dtype)
    achieved[:10] = desired[:10]
    distances = [distance_in_python(*pair) for pair in zip(achieved, desired, strict=True)]
    threshold = sum(sorted(distances)[20:22]) / 2
    reward = SparseReward(threshold)(goals_of(achieved, desired))["next", "reward"]
    assert reward.shape == (40, 1)
    assert reward.flatten().tolist() == [0.0 if distance <= threshold else -1.0 for distance in distances]


def pixels(value):
    return torch.full((1, 3, 8, 8), value, dtype=torch.uint8)


PIXELS = math.sqrt(3 * 8 * 8)  # the distance of two images whose pixels differ by one
CORNERS = torch.tensor([[1, 5], [4, 1], [4, 5], [5, 5]])  # at distances 4, 3, 5 and 5.7 from (1, 1)
DOUBLES = torch.tensor([[0.1], [math.nextafter(0.1, 1)]], dtype=torch.float64)
EXACT = {  # achieved goals, desired goals, threshold, and whether each goal is reached
    **{f"{dtype}, at the threshold": (CORNERS.to(dtype), torch.ones(4, 2, dtype=dtype), 5.0, [True, True, True, False])
       for dtype in (torch.float32, torch.float64, torch.uint8, torch.int64)},
    "double precision": (DOUBLES, torch.zeros_like(DOUBLES), 0.1, [True, False]),
    "achieved goals are rounded to the dtype of desired goals": (
        torch.tensor([[5.1], [5.2]], dtype=torch.float64), torch.tensor([[5.1], [5.1]]), 0, [True, False]),
    "not rounded to an integer": (torch.tensor([[0.4]]), torch.tensor([[0]]), 0.05, [False]),
    "not reduced to a byte": (torch.tensor([[256]]), torch.tensor([[0]], dtype=torch.uint8), 0.05, [False]),
    "not reduced to a bool": (torch.tensor([[2]]), torch.tensor([[True]]), 0.05, [False]),
    **{f"pixels {low} and {high}, {margin}": (
           pixels(low), pixels(high), abs(low - high) * PIXELS + margin, [margin > 0])
       for low, high in ((0, 255), (10, 11), (255, 0)) for margin in (-0.1, 0.1)},
    **{f"integers of {bits} bits": (2**bits + torch.arange(2), torch.tensor([2**bits] * 2), 0, [True, False])
       for bits in (20, 40, 61)},
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_goals_are_compared_without_rounding_or_wrapping_around(case):
    achieved, desired, threshold, expected = EXACT[case]
    reward = SparseReward(threshold)(goals_of(achieved, desired))["next", "reward"]
    assert reward.flatten().tolist() == [each - 1.0 for each in expected]


def test_a_sparse_reward_relabels_like_the_environment_that_it_describes():
    env = PointReach()
    batch = check_relabelled(
        SparseReward(0.05),
        lambda row: env.compute_reward(row["next", "achieved_goal"].numpy(), row["desired_goal"].numpy(), {}),
    )
    assert set(batch["next", "reward"].flatten().tolist()) == {0.0, -1.0}


@pytest.mark.parametrize("threshold", [-0.1, math.nan])
def test_a_threshold_that_is_not_a_distance_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold is a distance and must be at least 0, got {threshold}"):
        SparseReward(threshold)
