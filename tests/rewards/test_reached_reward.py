"""ReachedReward: a goal is reached at the step that achieved it, not where a goal is equal."""

import pytest
import torch
from torchrl.data import ReplayBuffer

from support.factories import make_augmentation, make_buffer, make_transform
from support.recorded import recorded_in
from support.world import transitions
from torchrl_her import ReachedReward, Subgoal

pytestmark = pytest.mark.filterwarnings("ignore:ReachedReward gives 0 and -1, and a stored reward is")
RELABELLED, STEPS_TO_GOAL = ("hindsight", "relabelled"), ("hindsight", "steps_to_goal")
REWARD, TERMINATED = ("next", "reward"), ("next", "terminated")
MOVES = [*["go"] * 8, "truncated", "go", "go", "terminated", "truncated", *["go"] * 5, "terminated"]


@pytest.mark.parametrize("info", [False, True])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_returns_end_where_the_goal_is_reached(n_steps, compact, info):
    """No two steps have the same goal here, so a goal is reached where it is equal."""
    strategy = {"desired_goal": "random", "low": Subgoal(2)}
    options = {"info": info, "compact": compact, "n_steps": n_steps}
    hindsight = make_transform(ReachedReward(), strategy=strategy, her_ratio=0.7, capacity=1000, **options)
    rb = make_buffer(hindsight, kind=ReplayBuffer, ndim=2, batch_size=3000)
    reward = lambda outcome, goal: float(outcome == goal) - 1  # noqa: E731
    recorded = recorded_in(rb, 2, "random", n_steps=n_steps, reward=reward)
    for _ in range(2):
        recorded.play([MOVES] * 2, "lanes")
    batch = rb.sample().reshape(-1)
    recorded.check(batch)
    assert (STEPS_TO_GOAL in batch.keys(True)) == info
    new = batch[batch[RELABELLED][:, 0]]
    counts = new["steps_to_next_obs"].flatten() if n_steps > 1 else torch.ones(len(new))
    assert set(counts[new[TERMINATED][:, 0]].tolist()) == set(range(1, n_steps + 1))
    assert (~new[TERMINATED][:, 0] & (counts == n_steps)).any()


def test_an_equal_goal_of_another_step_is_not_reached():
    transform = make_transform(reward=ReachedReward(), strategy=Subgoal(2, limit=None), her_ratio=1.0, capacity=100)
    data = transitions([*["stay"] * 7, "truncated"])
    data["next", "achieved_goal"] = data["achieved_goal"].clone()
    rb = make_buffer(transform, data)
    assert rb[:][REWARD].flatten().tolist() == [-1.0] * 7 + [0.0]
    assert rb[:][TERMINATED].flatten().tolist() == [False] * 7 + [True]


def test_a_copy_that_an_augmentation_writes_reaches_the_goal_of_its_own_step():
    transform = make_augmentation(reward=ReachedReward(), strategy="future")
    rb = make_buffer(transform, transitions([*["go"] * 59, "truncated"]))
    stored = rb.storage[:]
    copies = stored[stored[RELABELLED][:, 0]]
    assert STEPS_TO_GOAL not in copies.keys(True)
    reached = (copies["desired_goal"] == copies["next", "achieved_goal"]).all(1, keepdim=True)  # all goals differ
    assert torch.equal(copies[TERMINATED], reached)
    assert torch.equal(copies[REWARD], reached.float() - 1)
    assert 4 <= reached.sum() < 60
