"""A warning names entries that contain a copy of the desired goal, which relabelling does not replace."""

import functools
import warnings

import pytest
import torch
from tensordict import LazyStackedTensorDict
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.envs import CatTensors, ClipTransform, Compose, ExcludeTransform, RenameTransform, TransformedEnv

from support import tape
from support.factories import make_transform, seeded_sample
from support.tape import collected, image_reward, in_double_precision, make_tape, with_images

FRAMES = 60
hindsight = functools.partial(make_transform, capacity=1000)


def buffer(transform, *data, storage=LazyTensorStorage):
    rb = TensorDictReplayBuffer(storage=storage(1000), transform=transform, batch_size=200)
    for written in data:
        rb.extend(written)
    return rb


def both(place):
    """Return the concatenation of goal and observation at the root or under "next"."""
    return torch.cat([place["desired_goal"], place["observation"]], dim=-1)


def concatenated(in_keys=("observation", "desired_goal"), **options):
    """Return transitions of an environment that concatenates the goal with other entries."""
    cat = CatTensors(list(in_keys), "both", del_keys=False, **options)
    return tape.collect(TransformedEnv(make_tape(), cat), FRAMES)[0]


def with_entry(key, function, data=None):
    """Return transitions with an entry that is computed from them, at the root and under "next"."""
    data = collected(FRAMES).clone() if data is None else data.clone()
    for place in (data, data["next"]):
        place[key] = function(place)
    return data


def images():
    return with_images(collected(FRAMES))


COPIES = {
    "before the observation": concatenated,
    "after the observation": lambda: concatenated(sort=False),
    "between others": lambda: concatenated(["observation", "achieved_goal", "desired_goal"]),
    "alone": lambda: with_entry("target", lambda place: place["desired_goal"]),
    "in a nested entry": lambda: with_entry(("agent", "both"), lambda place: place["desired_goal"].repeat(1, 2)),
    "in lower precision": lambda: with_entry(
        "both", lambda place: both(place).float(), in_double_precision(collected(FRAMES))
    ),
    "in higher precision": lambda: with_entry("both", lambda place: place["desired_goal"].double()),
    "an image among others": lambda: with_entry(
        "frames", lambda place: torch.cat([place["achieved_goal"], place["desired_goal"]], dim=1), images()
    ),
    "a flattened image": lambda: with_entry("both", lambda place: place["desired_goal"].flatten(1), images()),
}
cat_at_root = functools.partial(CatTensors, ["observation", "desired_goal"], "both", del_keys=False)
cat_under_next = functools.partial(
    CatTensors, [("next", "observation"), ("next", "desired_goal")], ("next", "both"), del_keys=False
)
# Transforms after HERTransform that leave a copy of the original goal in "both" or in ("next", "both").
INSUFFICIENT = {
    "CatTensors for the root alone": cat_at_root,
    'CatTensors for "next" alone': cat_under_next,
    "ClipTransform, which works in place": lambda: ClipTransform(["both", ("next", "both")], low=-9.0, high=9.0),
}


@pytest.mark.parametrize("name", [*COPIES, *INSUFFICIENT])
def test_a_warning_names_an_entry_that_contains_the_desired_goal(name):
    transform = hindsight(reward=image_reward if "image" in name else None)
    if name in INSUFFICIENT:
        transform = Compose(transform, INSUFFICIENT[name]())
    data = COPIES.get(name, concatenated)()
    with pytest.warns(UserWarning, match=r"copy of the desired goal is in .*keep the original goal.*CatTensors"):
        buffer(transform, data)


@pytest.mark.parametrize("how", ["add", "lazily stacked", "[lanes, time]"])
def test_every_way_of_writing_warns_once_the_goal_has_changed_often_enough(how):
    data = concatenated()
    writes = {
        "add": list(data),
        "lazily stacked": [LazyStackedTensorDict.lazy_stack(list(rows)) for rows in data.split(20)],
        "[lanes, time]": [data.reshape(4, -1)],
    }[how]
    rb = buffer(hindsight(), storage=functools.partial(LazyTensorStorage, ndim=2 if how == "[lanes, time]" else 1))
    written = 0

    def write():
        nonlocal written
        for rows in writes:
            (rb.add if how == "add" else rb.extend)(rows)
            written += rows.numel()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="copy of the desired goal"):
            write()
    goals = {tuple(goal) for goal in data["desired_goal"][: written + 1].tolist()}
    assert how != "add" or len(goals) == 8
    assert len(rb) == written


def test_an_entry_that_is_rewritten_after_relabelling_contains_the_new_goal():
    got = seeded_sample(buffer(Compose(hindsight(), cat_at_root(), cat_under_next()), concatenated()))
    assert tape.check(got).share > 0.6
    for place in (got, got["next"]):
        assert torch.equal(place["both"], both(place))


def test_without_relabelling_a_copy_of_the_goal_is_correct():
    got = buffer(hindsight(her_ratio=0.0), concatenated()).sample()
    assert torch.equal(got["both"], both(got))


def test_a_copy_may_be_renamed_or_removed():
    data = with_entry("target", lambda place: place["desired_goal"])
    keys = ["target", ("next", "target")]
    got = buffer(Compose(hindsight(), ExcludeTransform(*keys)), data).sample()
    assert tape.check(got).share > 0.6
    assert "target" not in got
    renaming = RenameTransform(keys, ["given_goal", ("next", "given_goal")])
    got = buffer(Compose(hindsight(), renaming), data).sample()
    tape.check(got)
    assert torch.equal(got["given_goal"], data["desired_goal"][got["index"]])


def seven_goals_then_observations(place):
    """Return the goal until it has changed seven times, and then the observation."""
    goals = collected(FRAMES)["desired_goal"].tolist()
    numbers = [len({tuple(goal) for goal in goals[: at + 1]}) for at in range(len(goals))]
    return torch.where(torch.tensor(numbers)[:, None] <= 7, place["desired_goal"], place["observation"])


def ragged():
    """Return transitions with an entry "x" whose shape differs in each row."""
    sizes = [{"x": torch.ones(at % 3 + 1), "next": {"x": torch.ones(1)}} for at in range(FRAMES)]
    rows = zip(collected(FRAMES), sizes, strict=True)
    return LazyStackedTensorDict.lazy_stack([row.clone().update(entries) for row, entries in rows])


def filled_with(value, width):
    return lambda place: torch.full((FRAMES, width), float(value))


NO_COPIES = {
    "no other entry": lambda: collected(FRAMES),
    "zero goals and entries that are zero": lambda: with_entry(
        "x", filled_with(0, 7), with_entry("desired_goal", filled_with(0, 3))
    ),
    "a goal that never changes": lambda: with_entry(
        "x", filled_with(1, 7), with_entry("desired_goal", filled_with(1, 3))
    ),
    "an entry that follows seven goals and not the eighth": lambda: with_entry("x", seven_goals_then_observations),
    "an entry at the root alone": lambda: collected(FRAMES).clone().update({"x": collected(FRAMES)["desired_goal"]}),
    "an entry of part of the goal": lambda: with_entry("x", lambda place: place["desired_goal"][:, 1:]),
    "an entry that holds the goal at another place each time": lambda: with_entry(
        "x", lambda place: torch.stack([goal.roll(at) for at, goal in enumerate(place["desired_goal"].repeat(1, 2))])
    ),
    "flags where the goal is not zero": lambda: with_entry(
        "x",
        lambda place: place["desired_goal"] != 0,
        with_entry("desired_goal", lambda place: place["desired_goal"] + 1),
    ),
    "an entry of another shape in each row": ragged,
}


@pytest.mark.parametrize("name", NO_COPIES)
def test_an_entry_that_follows_the_goal_by_chance_or_not_at_all_is_accepted(name):
    data = NO_COPIES[name]()
    rb = buffer(hindsight(), *data.split(20), storage=ListStorage if "shape" in name else LazyTensorStorage)
    assert len(rb) == FRAMES
