"""A warning names entries that contain a copy of the desired goal, which relabelling does not replace."""

import functools
import math

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ListStorage
from torchrl.envs import (
    CatTensors,
    ClipTransform,
    Compose,
    ExcludeTransform,
    GymEnv,
    GymWrapper,
    RenameTransform,
    TransformedEnv,
)

from support import tape
from support.factories import make_augmentation, make_buffer, make_transform, seeded_sample
from support.goals import reward_of
from support.tape import collected, in_double_precision, make_tape
from torchrl_her import GoalReward, GoalSelection, HERTransform, NormalizedInputs, SparseReward, Uniform

FRAMES = 60
POINT = "torchrl_her.envs:torchrl_her/PointReach-v0"
hindsight = functools.partial(make_transform, capacity=1000)
buffer = functools.partial(make_buffer, batch_size=200)


def goal(place):
    return place["desired_goal"]


def both(place):
    """Return the concatenation of goal and observation at the root or under "next"."""
    return torch.cat([goal(place), place["observation"]], dim=-1)


def concatenated():
    """Return transitions of an environment that concatenates the goal with other entries."""
    cat = CatTensors(["observation", "achieved_goal", "desired_goal"], "both", del_keys=False)
    return tape.collect(TransformedEnv(make_tape(), cat), FRAMES)[0]


def with_entry(key, function, data=None):
    """Return transitions with an entry that is computed from them, at the root and under "next"."""
    data = collected(FRAMES).clone() if data is None else data.clone()
    for place in (data, data["next"]):
        place[key] = function(place)
    return data


def with_images(data):
    """Return the transitions with images ``[4, 5, 3]`` as goals, each number in a channel, and their rewards."""
    data = data.clone()
    for key in ("achieved_goal", "desired_goal"):
        for place in (data, data["next"]):
            place[key] = place[key].to(torch.uint8)[:, None, None, :].expand(-1, 4, 5, 3).clone()
    goals = data["next", "achieved_goal"], data["desired_goal"]
    data["next", "reward"] = image_reward(*goals).unsqueeze(-1).to(data["next", "reward"].dtype)
    return data


def image_reward(achieved, desired):
    return -(achieved != desired).flatten(1).any(dim=1).float()


COPIES = {
    "between other entries": concatenated,
    "in a nested entry": lambda: with_entry(("agent", "both"), lambda place: goal(place).repeat(1, 2)),
    "in lower precision": lambda: with_entry(
        "x", lambda place: both(place).float(), in_double_precision(collected(60))
    ),
    "an image": lambda: with_entry("x", lambda place: goal(place).repeat(1, 2, 1, 1), with_images(collected(FRAMES))),
}
cat_at_root = functools.partial(CatTensors, ["observation", "desired_goal"], "both", del_keys=False)
cat_under_next = functools.partial(
    CatTensors, [("next", "observation"), ("next", "desired_goal")], ("next", "both"), del_keys=False
)
# Transforms after HERTransform that leave a copy of the original goal in "both" or in ("next", "both").
INSUFFICIENT = {
    "CatTensors for the root alone": cat_at_root,
    'CatTensors for "next" alone': cat_under_next,
    "ClipTransform in place": lambda: ClipTransform(["both", ("next", "both")], low=-9.0, high=9.0),
}


@pytest.mark.parametrize("make", [hindsight, make_augmentation])
@pytest.mark.parametrize("name", [*COPIES, *INSUFFICIENT])
def test_a_warning_names_an_entry_that_contains_the_desired_goal(make, name):
    transform = make(reward=image_reward if "image" in name else None)
    if name in INSUFFICIENT:
        transform = Compose(transform, INSUFFICIENT[name]())
    data = COPIES.get(name, concatenated)()
    message = r"copy of the desired goal is in .*keep the original goal.*CatTensors"
    rb = buffer(transform)
    with pytest.warns(UserWarning, match=message) as found:  # noqa: PT031
        rb.extend(data)
        rb.extend(data)
    assert [each.filename for each in found] == [__file__]


@pytest.mark.filterwarnings("error")
def test_a_copy_may_be_rewritten_or_renamed_or_removed_or_kept_without_relabelling():
    before, after = Compose(hindsight(), cat_at_root(), cat_under_next()), (cat_at_root(), cat_under_next())
    for transform in (before, Compose(*after, make_augmentation())):
        got = seeded_sample(buffer(transform, concatenated()))
        assert tape.check(got) > 0.6
        assert all(torch.equal(place["both"], both(place)) for place in (got, got["next"]))
    inputs = NormalizedInputs(normalize=False, clip=math.inf)
    got = buffer(Compose(hindsight(), inputs), inputs(collected(FRAMES).clone())).sample()
    assert torch.equal(got["next", "inputs"][:, -3:], got["desired_goal"])
    data = with_entry("target", goal)
    keys, new_keys = ["target", ("next", "target")], ["given_goal", ("next", "given_goal")]
    for later in (ExcludeTransform(*keys), RenameTransform(keys, new_keys)):
        got = buffer(Compose(hindsight(), later), data).sample()
        assert tape.check(got) > 0.6
        assert "target" not in got
    assert torch.equal(got["given_goal"], data["desired_goal"][got["index"]])
    got = buffer(hindsight(her_ratio=0.0), data).sample()
    assert torch.equal(got["target"], got["desired_goal"])


def seven_goals_then_observations(place):
    """Return the goal until it has changed seven times, and then the observation."""
    goals = collected(FRAMES)["desired_goal"].tolist()
    numbers = [len({tuple(goal) for goal in goals[: at + 1]}) for at in range(len(goals))]
    return torch.where(torch.tensor(numbers)[:, None] <= 7, goal(place), place["observation"])


def ragged():
    """Return transitions with an entry "x" whose shape differs in each row."""
    rows = [row.clone().set("x", torch.ones(at % 3 + 1)) for at, row in enumerate(collected(FRAMES))]
    return LazyStackedTensorDict.lazy_stack([row.set(("next", "x"), torch.ones(1)) for row in rows])


def constant(value):
    """Return transitions whose goal never changes, with an entry that contains it."""
    data = with_entry("desired_goal", lambda place: torch.full_like(goal(place), value))
    return with_entry("x", lambda place: torch.full((FRAMES, 7), float(value)), data)


NO_COPIES = {
    "zeros": lambda: constant(0),
    "a goal that never changes": lambda: constant(1),
    "an entry that follows seven goals and not the eighth": lambda: with_entry("x", seven_goals_then_observations),
    "an entry at the root alone": lambda: collected(FRAMES).clone().update({"x": collected(FRAMES)["desired_goal"]}),
    "an entry of part of the goal": lambda: with_entry("x", lambda place: goal(place)[:, 1:]),
    "an entry that holds the goal at another place in each write": lambda: with_entry(
        "x", lambda place: torch.stack([each.roll(at // 20) for at, each in enumerate(goal(place).repeat(1, 2))])
    ),
    "flags where the goal is not zero": lambda: with_entry(
        "x", lambda place: goal(place) != 0, with_entry("desired_goal", lambda place: goal(place) + 1)
    ),
    "an entry of another shape in each row": ragged,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NO_COPIES)
def test_an_entry_that_follows_the_goal_by_chance_or_not_at_all_is_accepted(name):
    storage = ListStorage if "shape" in name else LazyTensorStorage
    reward = GoalReward(reward_of, recompute_all=True)
    rb = buffer(hindsight(reward=reward), *NO_COPIES[name]().split(20), storage=storage)
    assert len(rb) == FRAMES


class WithGoal(gymnasium.ObservationWrapper):
    """PointReach whose observation contains the goal, which is zero in every episode if it is ``constant``."""

    def __init__(self, constant=False):
        super().__init__(gymnasium.make(POINT, max_episode_steps=25))
        self.constant = constant
        spaces = dict(self.observation_space.spaces)
        self.observation_space = gymnasium.spaces.Dict(spaces | {"observation": gymnasium.spaces.Box(-9, 9, (4,))})

    def observation(self, observation):
        goal = observation["desired_goal"]
        goal = np.zeros_like(goal) if self.constant else goal
        both = np.concatenate([observation["observation"][:2], goal], dtype=np.float32)
        return observation | {"observation": both, "desired_goal": goal}


def write_selected(env, *, prefilled=0, later=None, **arguments):
    """Write 1,200 transitions of an environment with `GoalSelection` to a buffer."""
    torch.manual_seed(0)
    transform = HERTransform(SparseReward(0.05), capacity=10_000)
    if prefilled:  # with the goals of an earlier run
        saved = HERTransform(SparseReward(0.05), capacity=10_000)
        buffer(saved, TransformedEnv(GymEnv(POINT)).rollout(prefilled, break_when_any_done=False))
        transform.load_state_dict(saved.state_dict())
    env = TransformedEnv(GymWrapper(env), GoalSelection(transform, Uniform(), **arguments))
    if later is not None:
        env.append_transform(later)
    rb = make_buffer(transform, size=1200)
    collector = Collector(env, None, frames_per_batch=100, total_frames=1200)
    for data in collector:
        rb.extend(data)
    collector.shutdown()
    assert rb[:]["goal_selection", "selected"].any()


AT_ONCE = {"prefilled": 100, "start": 1}


@pytest.mark.parametrize("arguments", [{}, AT_ONCE | {"share": 1.0}], ids=str)
@pytest.mark.parametrize("key", ["observation", "both"], ids=["of the environment's goal", "of selected goals"])
def test_a_copy_of_the_goal_is_found_although_selected_goals_replace_the_environments(key, arguments):
    env = WithGoal() if key == "observation" else gymnasium.make(POINT, max_episode_steps=25)
    with pytest.warns(UserWarning, match=f"A copy of the desired goal is in '{key}'") as found:
        write_selected(env, later=cat_at_root() if key == "both" else None, **arguments)
    assert len(found) == 1


@pytest.mark.filterwarnings("error:A copy of the desired goal")
@pytest.mark.parametrize("constant", [True, False])
def test_an_entry_that_equals_a_goal_that_never_changes_is_accepted_although_selected_goals_do(constant):
    env = WithGoal(constant=True) if constant else gymnasium.make(POINT, max_episode_steps=25)
    write_selected(env, share=1.0, **AT_ONCE)
