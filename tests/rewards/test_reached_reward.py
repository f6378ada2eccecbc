"""ReachedReward: a goal is reached at the step that achieved it, not where a goal is equal."""

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform

from support.factories import make_augmentation, make_transform
from support.goals import reward_of
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import Goals, World
from torchrl_her import CompactGoals, ReachedReward, Subgoal

pytestmark = pytest.mark.filterwarnings("ignore:ReachedReward gives 0 and -1, and a stored reward is")
RELABELLED, STEPS_TO_GOAL = ("hindsight", "relabelled"), ("hindsight", "steps_to_goal")
REWARD, TERMINATED = ("next", "reward"), ("next", "terminated")
MOVES = [*["go"] * 8, "truncated", "go", "go", "terminated", "truncated", *["go"] * 5, "terminated"]


def recorded_with(*before, n_steps=1, **options):
    """Return a buffer ``[lanes, time]`` with the same moves of two environments."""
    hindsight = make_transform(reward=ReachedReward(), capacity=1000, **{"her_ratio": 0.7} | options)
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, ndim=2), transform=Compose(*before, hindsight), batch_size=3000)
    recorded = Recorded(rb, Oracle({}, 1000, n_steps=n_steps), World(2, Goals()))
    for _ in range(2):
        recorded.play([MOVES] * 2, "lanes")
    return recorded


@pytest.mark.parametrize("info", [False, True])
@pytest.mark.parametrize("compact", [[], [CompactGoals]])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_returns_end_where_the_goal_is_reached(n_steps, compact, info):
    n_step = [MultiStepTransform(3, 0.9)] if n_steps == 3 else []
    before = [*(each() for each in compact), *n_step]
    options = {"strategy": {"desired_goal": "random", "low": Subgoal(2)}, "info": info}
    recorded = recorded_with(*before, n_steps=n_steps, **options)
    batch, kinds = recorded.rb.sample().reshape(-1), set()
    assert (STEPS_TO_GOAL in batch.keys(True)) == info
    columns = ["uid", RELABELLED, "desired_goal", REWARD, TERMINATED, ("next", "done"), ("next", "truncated")]
    columns += ["steps_to_next_obs"] if n_step else []
    for uid, (new,), goal, (reward,), (terminated,), (done,), (truncated,), *steps in zip(
        *(batch[key].tolist() for key in columns), strict=True
    ):
        window = recorded.oracle.windows[uid]
        here = [new and list(step.outcome) == goal for step in window]
        count = here.index(True) + 1 if any(here) else len(window)
        stored = [reward_of(step.outcome, step.desired) for step in window]
        rewards = [float(each) - 1 for each in here] if new else stored
        assert reward == pytest.approx(sum(0.9**k * each for k, each in enumerate(rewards[:count])), rel=1e-5)
        assert terminated == (any(here) if new else window[-1].terminated)
        assert truncated == (window[-1].truncated and count == len(window))
        assert done == (terminated or truncated)
        assert steps in ([], [[count]], [count])
        kinds.add((new, any(here), count))
    assert {(True, True, count) for count in range(1, n_steps + 1)} | {(True, False, n_steps)} <= kinds


def test_an_equal_goal_of_another_step_is_not_reached():
    world = World(1, Goals())
    transform = make_transform(reward=ReachedReward(), strategy=Subgoal(2, limit=None), her_ratio=1.0, capacity=100)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    data = world.tensordict(world.play(0, [*["stay"] * 7, "truncated"]))
    data["next", "achieved_goal"] = data["achieved_goal"].clone()
    rb.extend(data)
    assert rb[:][REWARD].flatten().tolist() == [-1.0] * 7 + [0.0]
    assert rb[:][TERMINATED].flatten().tolist() == [False] * 7 + [True]


def test_a_copy_that_an_augmentation_writes_reaches_the_goal_of_its_own_step():
    world = World(1, Goals())
    transform = make_augmentation(reward=ReachedReward(), strategy="future")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)
    rb.extend(world.tensordict(world.play(0, [*["go"] * 59, "truncated"])))
    stored = rb.storage[:]
    copies = stored[stored[RELABELLED][:, 0]]
    assert STEPS_TO_GOAL not in copies.keys(True)
    reached = (copies["desired_goal"] == copies["next", "achieved_goal"]).all(1, keepdim=True)  # all goals differ
    assert torch.equal(copies[TERMINATED], reached)
    assert torch.equal(copies[REWARD], reached.float() - 1)
    assert 4 <= reached.sum() < 60
