"""What is unlikely in a data set causes one warning, at the line of the program, which names a row of the data."""

import warnings

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer, TensorStorage
from torchrl.envs import CatTensors, Compose

from support.factories import make_transform
from support.goals import reached
from support.world import Goals, World
from torchrl_her import SparseReward

GOALS = ("achieved_goal", "desired_goal")
REWARD = ("next", "reward")


def episodes(count, success="truncated"):
    """Return 25 transitions of each episode, except for the second one, which alone reaches its goal, after five."""
    world = World(1, Goals())
    plans = [["go"] * 24 + ["truncated"], ["go"] * 4 + [success], *[["go"] * 24 + ["truncated"]] * (count - 2)]
    data = world.tensordict([row for plan in plans for row in world.play(0, plan)], ids=False)
    data["desired_goal"][30:, 1] = data["next", "desired_goal"][30:, 1] = 999
    data[REWARD] = reached(data["next", "achieved_goal"], data["desired_goal"]).float()[:, None] - 1
    return data


def warnings_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def buffer_over(data, *after, **options):
    """Return the messages of adopting a data set, and a buffer over it."""
    defaults = {"reward": SparseReward(0.5, terminated_fn=reached), "capacity": len(data), "her_ratio": 1.0}
    transform, adopted = make_transform(**defaults | options), []
    found = warnings_of(lambda: adopted.append(transform.adopt(data)))
    storage = TensorStorage(adopted[0])
    return found, TensorDictReplayBuffer(storage=storage, transform=Compose(transform, *after), batch_size=10)


def test_good_data_causes_no_warning():
    found, rb = buffer_over(episodes(20, success="terminated"))
    assert found + warnings_of(rb.sample) == []


def test_shuffled_data_is_reported():
    data = episodes(20)
    (message,) = buffer_over(data[torch.randperm(len(data))])[0]
    assert "do not continue an episode (such as row 1" in message
    assert "shuffled" in message


def test_other_rewards_are_reported():
    data = episodes(10)
    data[REWARD][66] = -7
    (message,) = buffer_over(data)[0]
    assert "(row 66 of the data)" in message


def test_ends_on_success_that_are_not_recomputed_are_reported():
    (message,) = buffer_over(episodes(10, success="terminated"), reward=SparseReward(0.5))[0]
    assert "terminated_fn" in message


@pytest.mark.parametrize(("her_ratio", "rewritten"), [(1.0, False), (1.0, True), (0.0, False)])
def test_copies_of_the_goal_are_searched_at_the_first_sample(her_ratio, rewritten):
    """Transforms after HERTransform, which may rewrite the copies, are unknown before."""
    data, cat = episodes(20), []
    for place, keys in ((data, [*GOALS]), (data["next"], [("next", key) for key in GOALS])):
        place["observation"] = torch.cat([place[key] for key in GOALS], 1)
        out = "observation" if place is data else ("next", "observation")
        cat.append(CatTensors(keys, out, del_keys=False))
    found, rb = buffer_over(data, *(cat if rewritten else ()), her_ratio=her_ratio)
    assert found == []
    found = warnings_of(rb.sample)
    assert len(found) == (her_ratio == 1.0 and not rewritten)
    assert all("copy of the desired goal is in 'observation'" in message for message in found)
    assert warnings_of(rb.sample) == []


@pytest.mark.filterwarnings("ignore:The reward module gives")
@pytest.mark.parametrize("still", [True, False], ids=["constant goals", "equal goals at each time"])
def test_time_in_the_last_dimension_is_accepted_if_goals_repeat(still):
    """Episodes of one step, [4, 25], end everywhere, and continue along no dimension or along both."""
    data = episodes(5)[:100]
    for flag in ("truncated", "done"):
        data["next", flag].fill_(True)
    goals = torch.ones(100) if still else (torch.arange(100) % 25 % 2 + 1).float()
    for key in ("achieved_goal", ("next", "achieved_goal")):
        data[key] = goals[:, None].expand(-1, 2)
    assert make_transform(capacity=100).adopt(data.reshape(4, 25)).shape == (4, 25)
