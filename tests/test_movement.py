"""MovementPriority: the priority of a transition depends on the path of the achieved goal in its episode."""

import math

import pytest
import torch
from torchrl.data import ReplayBuffer, TensorDictPrioritizedReplayBuffer
from torchrl.envs import Compose, MultiStepTransform

from support.factories import make_buffer, make_transform
from support.world import Goals, World
from torchrl_her import CompactGoals, HERKeys, MovementPriority

MOVES = ["go"] * 7 + ["truncated"] + ["stay"] * 5  # an episode that moves by 8, and another one that does not move


def played(goals=None, time_major=False):
    """Return transitions ``[52]`` of four environments."""
    world = World(4, goals or Goals())
    lanes = [world.play(env, MOVES) for env in range(4)]
    rows = zip(*lanes, strict=True) if time_major else lanes
    return world.tensordict([row for part in rows for row in part])


def expected(data, far, lowest=0.05):
    """Return the priorities, computed by a plain Python loop over the transitions."""
    paths = {}
    for row in data:
        path = math.dist(row["achieved_goal"].flatten().tolist(), row["next", "achieved_goal"].flatten().tolist())
        number = int(row["collector", "traj_ids"])
        paths[number] = paths.get(number, 0.0) + path
    return [lowest + min(paths[int(row["collector", "traj_ids"])] / far, 1.0) for row in data]


def stored(transforms, *writes, kind=TensorDictPrioritizedReplayBuffer, ndim=1, **arguments):
    """Return the stored transitions ``[n]`` of a buffer with these transforms and writes."""
    options = {"alpha": 1.0, "beta": 0.0, "priority_key": "movement"} if kind is not ReplayBuffer else {}
    hindsight = make_transform(reward=lambda achieved, desired: -torch.ones(len(achieved)), capacity=1000, **arguments)
    rb = make_buffer(Compose(*transforms, hindsight), *writes, kind=kind, ndim=ndim, **options)
    return rb.storage[:].reshape(-1)


pytestmark = pytest.mark.filterwarnings("ignore:The reward module gives")  # another reward than that of the data


@pytest.mark.parametrize("goals", [Goals(), Goals(()), Goals((2, 3))], ids=lambda goals: str(goals.shape))
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("far", [6.0, 100.0])
def test_the_priority_is_the_path_of_the_achieved_goal_in_the_episode(goals, time_major, far):
    data = played(goals, time_major)
    priorities = expected(data, far, lowest=0.1)
    movement = stored([MovementPriority(far=far, lowest=0.1)], data)["movement"]
    assert movement.tolist() == pytest.approx(priorities, rel=1e-5)
    assert len({*priorities}) == 2


@pytest.mark.parametrize(
    ("dtype", "first", "step", "far"),
    [
        (torch.float64, 5.4e6, 0.1, 2.0),
        (torch.int64, 2**30, 1, 20.0),
        (torch.uint8, 250, -1, 20.0),
        (torch.bfloat16, 1.0, 0.125, 2.5),
    ],
)
def test_goals_of_any_dtype_keep_their_differences(dtype, first, step, far):
    data = played()[:10]
    states = first + step * (torch.arange(11.0, dtype=torch.float64)[:, None] % 2)  # to and fro
    states = states.to(dtype)
    data["achieved_goal"], data["next", "achieved_goal"] = states[:-1], states[1:]
    data["desired_goal"], data["next", "desired_goal"] = torch.zeros(2, 10, 1, dtype=dtype)
    data["collector", "traj_ids"].zero_()
    data["next", "done"].zero_()
    assert stored([MovementPriority(far=far)], data)["movement"].tolist() == pytest.approx([0.55] * 10, abs=1e-4)


def test_the_default_dtype_does_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        movement = stored([MovementPriority(far=6.0)], played(), kind=ReplayBuffer)["movement"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert movement.dtype == torch.float32  # as PrioritizedSampler needs it


def test_goals_are_mapped_before_they_are_measured():
    data, mapped = played(), MovementPriority(far=1e3, lowest=1.0, goal_fn=lambda achieved: 3 * achieved[..., 1:])
    assert stored([mapped], data)["movement"].tolist() == pytest.approx(expected(data, 1e3 / 3, 1.0))


def test_the_path_is_measured_separately_for_each_write():
    writes = played().split([6, 46])
    priorities = [priority for data in writes for priority in expected(data, 1e3)]
    assert stored([MovementPriority(far=1e3)], *writes)["movement"].tolist() == pytest.approx(priorities)


def test_padding_has_the_lowest_priority():
    data = played()
    data["collector", "mask"] = torch.arange(52) < 6
    data["next", "achieved_goal"][6:] = 1e4
    movement = stored([MovementPriority(far=1e3)], data, kind=ReplayBuffer)["movement"]
    assert movement.tolist() == pytest.approx(expected(data[:6], 1e3) + 46 * [0.05])


@pytest.mark.parametrize(("before", "ndim"), [(MultiStepTransform(3, 0.9), 2), (CompactGoals(), 1)])
def test_other_transforms_can_come_before_it(before, ndim):
    data = played().reshape(4, 13) if ndim == 2 else played()
    rows = stored([before, MovementPriority(far=2.0)], data, ndim=ndim)
    still = rows["collector", "traj_ids"] >= 4  # the second episodes
    assert still.any()
    assert not still.all()
    assert torch.equal(rows["movement"] == 0.05, still)


@pytest.mark.parametrize("given", [None, HERKeys(achieved_goal="still")])
def test_it_takes_the_keys_of_the_hindsight_transform_unless_it_has_its_own(given):
    played_data = played()
    data = played_data.clone()
    for place in (data, data["next"]):
        place.rename_key_("achieved_goal", "tip")
        place["still"] = torch.zeros_like(place["tip"])
    transforms = [CompactGoals(), MovementPriority(far=2.0, keys=given)]
    movement = stored(transforms, data, keys=HERKeys(achieved_goal="tip"))["movement"]
    assert movement.tolist() == pytest.approx([0.05] * len(data) if given else expected(played_data, 2.0))
