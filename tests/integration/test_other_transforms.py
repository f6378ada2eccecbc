"""Transforms before and after HERTransform.

Those after it see the relabelled transition, those before it may not change what it replaces. All goals are normalized
with the same statistics, and entries that contain a copy of the goal are refused.
"""

import functools
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.envs import (
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    ToTensorImage,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import TD3Loss

from support import tape
from support.factories import make_transform
from torchrl_her import HERTransform

NEXT_GOAL, NEXT_OBSERVATION, NEXT_REWARD = ("next", "desired_goal"), ("next", "observation"), ("next", "reward")
OUTCOME = ("next", "achieved_goal")
GOALS = ["desired_goal", NEXT_GOAL]
READ_BY_NETWORKS = ["observation", "desired_goal", NEXT_OBSERVATION, NEXT_GOAL]
FRAMES = 60


hindsight = functools.partial(make_transform, capacity=1000)


def collect(env):
    torch.manual_seed(0)
    return next(iter(Collector(env, None, frames_per_batch=FRAMES, total_frames=FRAMES)))


@functools.cache
def collected():
    return collect(tape.make_tape())


def in_double_precision():
    return collected().apply(lambda value: value.double() if value.is_floating_point() else value)


def with_images():
    """The same transitions with goals that are images: each number fills a channel."""
    data = collected().clone()
    for key in ("achieved_goal", "desired_goal"):
        for place in (data, data["next"]):
            place[key] = place[key].to(torch.uint8)[:, None, None, :].expand(-1, 4, 5, 3).clone()
    return data


def buffer(transform, *data, storage=LazyTensorStorage):
    rb = TensorDictReplayBuffer(storage=storage(1000), transform=transform, batch_size=200)
    for written in data:
        rb.extend(written)
    return rb


def sample(transform, *data):
    rb = buffer(transform, *data)
    torch.manual_seed(1)
    return rb.sample()


def relabelled_sample(transform, *data):
    """A sample that the tape's oracle accepts, most of it relabelled."""
    batch = sample(transform, *data)
    assert tape.check(batch).share > 0.6
    return batch


def refuses(transform, data, match, error=ValueError):
    rb = buffer(transform)
    with pytest.raises(error, match=match):
        rb.extend(data)
    assert len(rb) == 0


# After it


@functools.cache
def statistics():
    """The mean and the deviation of observations, from a VecNormV2 of an environment."""
    norm = VecNormV2(in_keys=["observation"], out_keys=["normalized"], decay=1.0)
    TransformedEnv(tape.make_tape(), norm).rollout(FRAMES, break_when_any_done=False)
    return norm.loc["observation"], norm.scale["observation"]


def as_floats(image):
    return image.permute(0, 3, 1, 2).float() / 255


def goal_distance(td):
    return td.set("distance", (td[OUTCOME] - td["desired_goal"]).norm(dim=-1))


def both(place):
    """The concatenation of the goal and the observation at the root or under "next"."""
    return torch.cat([place["desired_goal"], place["observation"]], dim=-1)


def standardized(batch, keys, loc, scale):
    return {key: (batch[key] - loc) / scale for key in keys}


OBSERVATIONS = ["observation", NEXT_OBSERVATION]
# By name: what makes the transforms, and the entries by key that they make of a relabelled batch, computed by hand;
# None for entries that are removed.
AFTER = {
    "ObservationNorm": (
        lambda: [ObservationNorm(3.0, 2.0, in_keys=READ_BY_NETWORKS, standard_normal=True)],
        lambda batch: standardized(batch, READ_BY_NETWORKS, 3.0, 2.0),
    ),
    "VecNormV2": (
        lambda: [ObservationNorm(*statistics(), in_keys=OBSERVATIONS, standard_normal=True)],
        lambda batch: standardized(batch, OBSERVATIONS, *statistics()),
    ),
    "CatTensors": (
        lambda: [
            CatTensors(in_keys=["observation", "desired_goal"], out_key="both"),
            CatTensors(in_keys=[NEXT_OBSERVATION, NEXT_GOAL], out_key=("next", "both"), del_keys=False),
        ],
        lambda batch: {
            "both": both(batch),
            ("next", "both"): both(batch["next"]),
            **dict.fromkeys(["observation", "desired_goal"]),
        },
    ),
    "RewardScaling": (
        lambda: [RewardScaling(loc=1.0, scale=0.5, in_keys=[NEXT_REWARD])],
        lambda batch: {NEXT_REWARD: batch[NEXT_REWARD] * 0.5 + 1.0},
    ),
    "ToTensorImage": (
        lambda: [ToTensorImage(in_keys=GOALS)],
        lambda batch: {key: as_floats(batch[key]) for key in GOALS},
    ),
    "DoubleToFloat": (
        lambda: [DoubleToFloat()],
        lambda batch: {key: value.float() for key, value in batch.items(True, True) if value.dtype == torch.float64},
    ),
    "RenameTransform": (
        lambda: [RenameTransform(in_keys=GOALS, out_keys=["goal", ("next", "goal")])],
        lambda batch: {"goal": batch["desired_goal"], ("next", "goal"): batch[NEXT_GOAL], **dict.fromkeys(GOALS)},
    ),
    "ExcludeTransform": (
        lambda: [ExcludeTransform("achieved_goal", OUTCOME)],
        lambda batch: {"achieved_goal": None, OUTCOME: None},
    ),
    "a function": (lambda: [goal_distance], lambda batch: {"distance": goal_distance(batch.copy())["distance"]}),
}


def image_reward(achieved, desired):
    return -(achieved != desired).flatten(1).any(dim=1).float()


@pytest.mark.parametrize("appended", [False, True], ids=["in a Compose", "appended"])
@pytest.mark.parametrize("name", AFTER)
def test_a_transform_after_it_sees_the_relabelled_transition(name, appended):
    transforms, by_hand = AFTER[name]
    make, draw, data = hindsight, relabelled_sample, collected()
    if name == "ToTensorImage":
        make, draw, data = functools.partial(HERTransform, image_reward), sample, with_images()
    elif name == "DoubleToFloat":
        data = in_double_precision()
    raw = draw(make(), data)
    rb = buffer(make() if appended else Compose(make(), *transforms()), data)
    for transform in transforms() if appended else []:
        rb.append_transform(transform)
    torch.manual_seed(1)
    got = rb.sample()
    expected = {key: raw[key] for key in raw.keys(True, True)} | by_hand(raw)
    expected = {key: value for key, value in expected.items() if value is not None}
    assert set(got.keys(True, True)) == set(expected)
    del expected["hindsight_stamp"]  # each transform's own
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=0)


def test_vec_norm_works_in_no_buffer():
    """A limit of TorchRL's: it is the same without another transform."""
    for transform in (VecNormV2(in_keys=["observation"]), Compose(hindsight(), VecNormV2(in_keys=["observation"]))):
        rb = buffer(transform, collected())
        with pytest.raises(NotImplementedError, match="VecNormV2"):
            rb.sample()


# Before it


REFUSED_BEFORE = {
    "ObservationNorm": lambda: ObservationNorm(3.0, 2.0, in_keys=GOALS),
    "ObservationNorm under another name": lambda: ObservationNorm(3.0, 2.0, in_keys=GOALS, out_keys=["g", "h"]),
    "CatTensors": lambda: CatTensors(in_keys=["observation", "desired_goal"], out_key="both", del_keys=False),
    "CatTensors that takes the goal away": lambda: CatTensors(in_keys=["observation", "desired_goal"]),
    "RewardScaling": lambda: RewardScaling(1.0, 0.5, in_keys=[NEXT_REWARD]),
    "ToTensorImage": lambda: ToTensorImage(in_keys=GOALS),
    "RenameTransform": lambda: RenameTransform(in_keys=GOALS, out_keys=["goal", ("next", "goal")]),
    "ExcludeTransform": lambda: ExcludeTransform("desired_goal"),
}


@pytest.mark.parametrize("name", REFUSED_BEFORE)
def test_a_transform_before_it_that_reads_replaced_entries_is_refused(name):
    transform = Compose(REFUSED_BEFORE[name](), hindsight())
    refuses(transform, collected(), r"is listed before HERTransform.*list it after")


@pytest.mark.parametrize("keys", [None, [*READ_BY_NETWORKS, NEXT_REWARD]], ids=["all entries", "by key"])
def test_a_cast_may_stand_before_it(keys):
    got = relabelled_sample(Compose(DoubleToFloat(in_keys=keys), hindsight()), in_double_precision())
    for key in [*READ_BY_NETWORKS, NEXT_REWARD]:
        assert got[key].dtype == torch.float32, key


def test_a_transform_before_it_may_work_on_other_entries():
    before = ObservationNorm(3.0, 2.0, in_keys=["observation", OUTCOME], out_keys=["scaled", "scaled_outcome"])
    got = relabelled_sample(Compose(before, hindsight()), collected())
    assert torch.equal(got["scaled"], got["observation"] * 2.0 + 3.0)
    assert torch.equal(got["scaled_outcome"], got[OUTCOME] * 2.0 + 3.0)


# Statistics of goals


def normalizing(loc, scale):
    """A policy that acts on normalized goals, and the transform for samples; both read the two tensors."""
    norm = functools.partial(ObservationNorm, loc, scale, standard_normal=True)
    network = TensorDictModule(MLP(in_features=6, out_features=2), in_keys=["observation", "goal"], out_keys=["action"])
    policy = TensorDictSequential(norm(in_keys=["desired_goal"], out_keys=["goal"]), network)
    return policy, norm(in_keys=GOALS, out_keys=["goal", ("next", "goal")])


def test_goals_are_normalized_alike_where_a_policy_acts_and_in_samples():
    loc, scale, mean, mean_square = torch.zeros(3), torch.ones(3), torch.zeros(3), torch.zeros(3)
    policy, training = normalizing(loc, scale)
    rb = buffer(Compose(hindsight(), training))
    seen = []
    for data in Collector(tape.make_tape(), policy, frames_per_batch=30, total_frames=150):
        assert torch.equal(data["goal"], (data["desired_goal"] - loc) / scale)
        rb.extend(data)
        goals = torch.cat([data[OUTCOME], data["desired_goal"]])
        seen.extend(goals.tolist())
        mean.lerp_(goals.mean(dim=0), len(goals) / len(seen))
        mean_square.lerp_(goals.square().mean(dim=0), len(goals) / len(seen))
        loc.copy_(mean)
        scale.copy_((mean_square - mean.square()).clamp_min(1e-4).sqrt())
        all_goals = np.array(seen)
        np.testing.assert_allclose(loc, all_goals.mean(axis=0), rtol=1e-4)
        np.testing.assert_allclose(scale, all_goals.std(axis=0).clip(0.01), rtol=1e-3)

        batch = rb.sample()
        tape.check(batch)
        for key, raw in zip(["goal", ("next", "goal")], GOALS, strict=True):
            np.testing.assert_array_equal(batch[key], (batch[raw].numpy() - loc.numpy()) / scale.numpy())
    stale = rb.storage[batch["index"]]["goal"]  # as the policy wrote it
    assert (batch["goal"] != stale).any(dim=-1).all()
    assert tape.check(batch).share > 0.6


def test_statistics_by_key_make_two_numbers_of_one_goal():
    """This is why VecNormV2 is not for goals in the environment."""
    norm = VecNormV2(in_keys=["achieved_goal", "desired_goal"], out_keys=["a", "d"], decay=1.0)
    TransformedEnv(tape.make_tape(), norm).rollout(FRAMES, break_when_any_done=False)
    goals = norm.denorm(TensorDict({"a": torch.ones(3), "d": torch.ones(3)}))
    assert (goals["achieved_goal"] != goals["desired_goal"]).any()


@pytest.mark.filterwarnings("ignore:No target network updater")
def test_statistics_inside_a_critic_are_not_updated():
    """A property of TorchRL's: a loss copies its critics' parameters and buffers."""
    loc, scale = torch.zeros(3), torch.ones(3)
    policy, _ = normalizing(loc, scale)
    norm = ObservationNorm(loc, scale, in_keys=["desired_goal"], out_keys=["goal"], standard_normal=True)
    network = ValueOperator(MLP(in_features=8, out_features=1), in_keys=["observation", "goal", "action"])
    loss = TD3Loss(policy, TensorDictSequential(norm, network), bounds=(-1.0, 1.0))
    loc += 1.0
    assert (loss.qvalue_network_params["module", "0", "loc"] == 0.0).all()


# Goals concatenated in the environment


def concatenating(in_keys=("observation", "desired_goal"), out_key="both", **kwargs):
    return TransformedEnv(tape.make_tape(), CatTensors(list(in_keys), out_key, del_keys=False, **kwargs))


def with_copy(key, function, data=None):
    """Transitions with an entry made of them, at the root and under "next"."""
    data = (collected() if data is None else data).clone()
    for place in (data, data["next"]):
        place[key] = function(place)
    return data


COPIES = {
    "before the observation": lambda: collect(concatenating()),
    "after the observation": lambda: collect(concatenating(sort=False)),
    "between others": lambda: collect(concatenating(["observation", "achieved_goal", "desired_goal"])),
    "alone": lambda: with_copy("target", lambda place: place["desired_goal"]),
    "in a nested entry": lambda: with_copy(("agent", "both"), lambda place: place["desired_goal"].repeat(1, 2)),
    "in lower precision": lambda: with_copy("both", lambda place: both(place).float(), in_double_precision()),
    "in higher precision": lambda: with_copy("both", lambda place: place["desired_goal"].double()),
    "an image among others": lambda: with_copy(
        "frames", lambda place: torch.cat([place["achieved_goal"], place["desired_goal"]], dim=1), with_images()
    ),
    "flattened": lambda: with_copy("both", lambda place: place["desired_goal"].flatten(1), with_images()),
}


def cat_again():
    """By key, the transforms that write the concatenation again after relabelling."""
    cat = functools.partial(CatTensors, del_keys=False)
    return {
        "both": cat(["observation", "desired_goal"], "both"),
        ("next", "both"): cat([NEXT_OBSERVATION, NEXT_GOAL], ("next", "both")),
    }


# Transforms after HERTransform that leave a copy of the original goal in "both" or in ("next", "both").
INSUFFICIENT = {
    "CatTensors for the root alone": lambda: cat_again()["both"],
    'CatTensors for "next" alone': lambda: cat_again()["next", "both"],
    "ClipTransform, which works in place": lambda: ClipTransform(["both", ("next", "both")], low=-9.0, high=9.0),
}


@pytest.mark.parametrize("name", [*COPIES, *INSUFFICIENT])
def test_a_warning_names_an_entry_that_contains_the_desired_goal(name):
    has_images = name in ("an image among others", "flattened")
    transform = HERTransform(image_reward) if has_images else hindsight()
    if name in INSUFFICIENT:
        transform = Compose(transform, INSUFFICIENT[name]())
    data = COPIES.get(name, COPIES["before the observation"])()
    with pytest.warns(UserWarning, match=r"contains the desired goal .*keep the original one.*CatTensors"):
        buffer(transform, data)


@pytest.mark.parametrize("how", ["add", "lazily stacked", "[lanes, time]"])
def test_it_warns_however_data_is_written_once_the_goal_has_changed_often_enough(how):
    data = collect(concatenating())
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
        with pytest.raises(UserWarning, match="contains the desired goal"):
            write()
    goals = {tuple(goal) for goal in data["desired_goal"][: written + 1].tolist()}
    assert how != "add" or len(goals) == 8
    assert len(rb) == written


def test_a_goal_that_is_stored_in_a_concatenation_alone_is_refused():
    env = TransformedEnv(tape.make_tape(), CatTensors(["observation", "desired_goal"], "both"))
    refuses(hindsight(), collect(env), "no entry 'desired_goal'", KeyError)


def test_an_entry_that_is_written_again_after_relabelling_holds_the_new_goal():
    got = relabelled_sample(Compose(hindsight(), *cat_again().values()), collect(concatenating()))
    for place in (got, got["next"]):
        assert torch.equal(place["both"], both(place))


def test_without_relabelling_a_copy_of_the_goal_is_as_right_as_the_goal():
    got = sample(hindsight(her_ratio=0.0), collect(concatenating()))
    assert torch.equal(got["both"], both(got))


def test_a_copy_may_be_renamed_or_left_out():
    data = with_copy("target", lambda place: place["desired_goal"])
    keys = ["target", ("next", "target")]
    assert "target" not in relabelled_sample(Compose(hindsight(), ExcludeTransform(*keys)), data)
    got = sample(Compose(hindsight(), RenameTransform(keys, ["given_goal", ("next", "given_goal")])), data)
    tape.check(got)
    assert torch.equal(got["given_goal"], data["desired_goal"][got["index"]])


def alike_for(count):
    """The goal until it has changed so often, and then the observation."""
    goals = collected()["desired_goal"].tolist()
    numbers = [len({tuple(goal) for goal in goals[: at + 1]}) for at in range(len(goals))]
    is_goal = torch.tensor(numbers) <= count
    return with_copy("x", lambda place: torch.where(is_goal[:, None], place["desired_goal"], place["observation"]))


def with_goals(function):
    data = collected().clone()
    for place in (data, data["next"]):
        place["desired_goal"] = function(place)
    return data


def ragged():
    """Transitions with an entry "x" of another shape in each row."""
    sizes = [{"x": torch.ones(at % 3 + 1), "next": {"x": torch.ones(1)}} for at in range(FRAMES)]
    rows = zip(collected(), sizes, strict=True)
    return LazyStackedTensorDict.lazy_stack([row.clone().update(entries) for row, entries in rows])


NO_COPIES = {
    "no other entry": collected,
    "zero goals and entries that are zero": lambda: with_copy(
        "x", lambda place: torch.zeros(len(place), 7), with_goals(lambda place: torch.zeros(len(place), 3))
    ),
    "a goal that never changes": lambda: with_copy(
        "x", lambda place: torch.ones(len(place), 7), with_goals(lambda place: torch.ones(len(place), 3))
    ),
    "an entry that follows seven goals and not the eighth": lambda: alike_for(7),
    "an entry at the root alone": lambda: collected().clone().update({"x": collected()["desired_goal"]}),
    "an entry of part of the goal": lambda: with_copy("x", lambda place: place["desired_goal"][:, 1:]),
    "an entry that holds the goal at another place each time": lambda: with_copy(
        "x", lambda place: torch.stack([goal.roll(at) for at, goal in enumerate(place["desired_goal"].repeat(1, 2))])
    ),
    "flags where the goal is not zero": lambda: with_copy(
        "x", lambda place: place["desired_goal"] != 0, with_goals(lambda place: place["desired_goal"] + 1)
    ),
    "an entry of another shape in each row": ragged,
}


@pytest.mark.parametrize("name", NO_COPIES)
def test_an_entry_that_follows_the_goal_by_chance_or_not_at_all_is_accepted(name):
    data = NO_COPIES[name]()
    rb = buffer(hindsight(), storage=ListStorage if "shape" in name else LazyTensorStorage)
    for rows in data.split(20):
        rb.extend(rows)
    assert len(rb) == FRAMES


def test_the_docs_list_the_transforms_that_are_tested():
    page = (Path(__file__).parents[2] / "docs" / "losses-and-transforms.md").read_text()
    section = page.split("\n## Transforms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `?([\w ]+)`? \|(.*)\|(.*)\|$", section, flags=re.MULTILINE)
    assert [name for name, _, _ in rows if name != "transform"] == list(AFTER)
    refused = {name for name, _, before in rows if before.strip().startswith("refused")}
    assert refused == {name.split()[0] for name in REFUSED_BEFORE}
