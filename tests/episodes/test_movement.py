"""MovementPriority: the priority of a transition depends on the path of the achieved goal in its episode."""

import math
import random

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorStorage
from torchrl.envs import Compose, MultiStepTransform, TransformedEnv

from support.factories import check_refused
from support.refused import transitions
from support.tape import make_tape
from torchrl_her import CompactGoals, HERTransform, HindsightAugmentation, MovementPriority, SparseReward


def episodes(lengths, moves, goal=(2,), seed=0):
    """Return transitions ``[n]`` of episodes whose achieved goals move at random or stay, with trajectory ids."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for number, (length, move) in enumerate(zip(lengths, moves, strict=True)):
        states = torch.randn(length + 1, *goal, generator=generator)
        states = states.cumsum(0) if move else states[:1].expand_as(states)
        desired = torch.full((length, *goal), 1000.0 + number)
        done = torch.arange(length)[:, None] == length - 1
        flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done}
        following = {"achieved_goal": states[1:], "desired_goal": desired, "reward": -torch.ones(length, 1), **flags}
        parts.append(
            TensorDict(
                {
                    "achieved_goal": states[:-1],
                    "desired_goal": desired,
                    "collector": {"traj_ids": torch.full((length,), number)},
                    "next": following,
                },
                [length],
            )
        )
    return torch.cat(parts)


def expected(data, far, lowest):
    """Return the priorities, computed by a plain Python loop over the transitions."""
    paths = {}
    for row in data:
        path = math.dist(row["achieved_goal"].flatten().tolist(), row["next", "achieved_goal"].flatten().tolist())
        number = int(row["collector", "traj_ids"])
        paths[number] = paths.get(number, 0.0) + path
    return [lowest + min(paths[int(row["collector", "traj_ids"])] / far, 1.0) for row in data]


def buffer(*transforms, kind=TensorDictPrioritizedReplayBuffer, ndim=1):
    options = {"alpha": 1.0, "beta": 0.0, "priority_key": "movement"} if kind is not ReplayBuffer else {}
    return kind(storage=LazyTensorStorage(1000, ndim=ndim), transform=Compose(*transforms), **options)


def hindsight(goal_fn=None):
    return HERTransform(lambda achieved, desired: -torch.ones(len(achieved)), capacity=1000, goal_fn=goal_fn)


@pytest.mark.parametrize("goal", [(2,), (), (2, 3)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_priority_is_the_path_of_the_achieved_goal_in_the_episode(goal, shuffled):
    data = episodes([7, 3, 12, 1, 5], [True, False, True, True, False], goal)
    if shuffled:  # the environments alternate, as in flattened batches of environments
        order = sorted(range(len(data)), key=lambda i: random.Random(i).random())
        order = sorted(order, key=lambda i: sum(data["collector", "traj_ids"][:i] == data["collector", "traj_ids"][i]))
        data = data[torch.tensor(order)]
    rb = buffer(MovementPriority(far=6.0, lowest=0.1), hindsight())
    rb.extend(data)
    priorities = expected(data, far=6.0, lowest=0.1)
    assert rb.storage[:]["movement"].tolist() == pytest.approx(priorities, rel=1e-5)
    assert {0.1, 1.1} < {round(priority, 6) for priority in priorities}, "some goals stay, some move farther than far"


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
    data = episodes([10], [False], goal=(1,))
    states = first + step * (torch.arange(11.0, dtype=torch.float64)[:, None] % 2)  # to and fro
    states = states.to(dtype)
    data["achieved_goal"], data["next", "achieved_goal"] = states[:-1], states[1:]
    data["desired_goal"], data["next", "desired_goal"] = torch.zeros(2, 10, 1, dtype=dtype)
    rb = buffer(MovementPriority(far=far), hindsight())
    rb.extend(data)
    assert rb.storage[:]["movement"].tolist() == pytest.approx([0.55] * 10, abs=1e-4)


def test_the_default_dtype_does_not_matter():
    rb = buffer(MovementPriority(far=6.0), hindsight(), kind=ReplayBuffer)  # PrioritizedSampler needs float32
    torch.set_default_dtype(torch.float64)
    try:
        rb.extend(episodes([7, 3], [True, False]).float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert rb.storage[:]["movement"].dtype == torch.float32


def test_the_buffer_samples_in_proportion_to_the_priority():
    data = episodes([20] * 6, [True, False, False, False, False, False])
    rb = buffer(MovementPriority(far=1.0, lowest=0.05), hindsight())
    rb.extend(data)
    torch.manual_seed(0)
    moved = rb.sample(20_000)["collector", "traj_ids"] == 0
    assert float(moved.float().mean()) == pytest.approx(1.05 / (1.05 + 5 * 0.05), abs=0.01)


def test_goals_are_mapped_before_they_are_measured():
    data = episodes([10], [True])
    rb = buffer(MovementPriority(far=1e6, lowest=1.0, goal_fn=lambda achieved: achieved[..., :1]), hindsight())
    rb.extend(data)
    data["achieved_goal"][:, 1] = data["next", "achieved_goal"][:, 1] = 0.0
    assert rb.storage[:]["movement"].tolist() == pytest.approx(expected(data, 1e6, 1.0), abs=1e-7)


def test_the_path_is_measured_separately_for_each_write():
    data = episodes([10], [True])
    rb = buffer(MovementPriority(far=1e3), hindsight())
    rb.extend(data[:6])
    rb.extend(data[6:])
    priorities = expected(data[:6], 1e3, 0.05) + expected(data[6:], 1e3, 0.05)
    assert rb.storage[:]["movement"].tolist() == pytest.approx(priorities)


def test_padding_has_the_lowest_priority():
    data = episodes([10], [True])
    data["collector", "mask"] = torch.arange(10) < 6
    data["next", "achieved_goal"][6:] = 1e4
    rb = buffer(MovementPriority(far=1e3), hindsight(), kind=ReplayBuffer)
    rb.extend(data)
    assert rb.storage[:]["movement"].tolist() == pytest.approx(expected(data[:6], 1e3, 0.05) + 4 * [0.05])


@pytest.mark.parametrize(("before", "ndim"), [(MultiStepTransform(3, 0.9), 2), (CompactGoals(), 1)])
def test_other_transforms_can_come_before_it(before, ndim):
    data = episodes([10, 10], [True, False])
    rb = buffer(before, MovementPriority(far=2.0), hindsight(), ndim=ndim)
    rb.extend(data.reshape(2, 10) if ndim == 2 else data)
    stored = rb.storage[:].reshape(-1)
    still = (stored["achieved_goal"] == data[10]["achieved_goal"]).all(-1)
    assert still.any()
    assert not still.all()
    assert torch.equal(stored["movement"] == 0.05, still)


def test_samples_have_the_priorities_and_are_relabelled():
    rb = buffer(MovementPriority(far=2.0), hindsight())
    rb.extend(episodes([10, 10], [True, False]))
    batch = rb.sample(64)
    assert batch["hindsight", "relabelled"].any()
    assert batch["movement"].shape == (64,)


def test_without_stamps_the_error_says_where_to_place_it():
    movement, augmentation = MovementPriority(far=1.0), HindsightAugmentation(SparseReward(0.1))
    stamped = hindsight().inv(transitions())
    for order in ([hindsight(), movement], [movement], [movement, augmentation], [augmentation, movement]):
        for data in (transitions(), stamped):
            rb = buffer(*order)
            augmentation.clear()
            with pytest.raises(KeyError, match=r"Compose\(MovementPriority\(\.\.\.\), HERTransform\(\.\.\.\)\)"):
                rb.extend(data)


def test_a_refused_write_changes_nothing():
    rb = buffer(MovementPriority(far=1.0, achieved_goal_key="position"), hindsight(), kind=ReplayBuffer)
    check_refused(rb, lambda: rb.extend(transitions()), KeyError, "no entry 'position'")


def test_a_nested_hindsight_transform_is_found():
    rb = buffer(MovementPriority(far=1.0), Compose(hindsight()))
    rb.extend(transitions())
    assert len(rb) == 10


def test_adopted_data_is_refused_because_it_has_no_priorities():
    her = hindsight()
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=0.0,
        priority_key="movement",
        storage=TensorStorage(her.adopt(transitions())),
        transform=Compose(MovementPriority(far=1.0), her),
    )
    with pytest.raises(ValueError, match=r"MovementPriority sets priorities when.*rb\.extend instead of adopting"):
        rb.sample(4)


@pytest.mark.parametrize(
    "arguments", [{"far": 0.0}, {"far": -1.0}, {"far": math.nan}, {"far": math.inf}, {"far": 1.0, "lowest": 0.0}]
)
def test_distances_and_priorities_must_be_positive(arguments):
    with pytest.raises(ValueError, match="must be positive and finite, got far="):
        MovementPriority(**arguments)


def test_it_is_refused_as_a_transform_of_an_environment():
    with pytest.raises(ValueError, match="MovementPriority is a transform of replay buffers"):
        TransformedEnv(make_tape(), MovementPriority(far=1.0))
