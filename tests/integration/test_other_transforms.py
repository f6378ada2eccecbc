"""Transforms before and after HERTransform: those after it see the relabelled transition."""

import functools
import re
from pathlib import Path

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    CatTensors,
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

from support import tape
from support.factories import make_transform, seeded_sample
from support.tape import collected, image_reward, in_double_precision, with_images
from torchrl_her import NormalizedInputs

NEXT_GOAL, NEXT_OBSERVATION, NEXT_REWARD = ("next", "desired_goal"), ("next", "observation"), ("next", "reward")
OUTCOME = ("next", "achieved_goal")
GOALS = ["desired_goal", NEXT_GOAL]
OBSERVATIONS = ["observation", NEXT_OBSERVATION]
hindsight = functools.partial(make_transform, capacity=1000)


def buffer(transform, data=None):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform, batch_size=200)
    if data is not None:
        rb.extend(data)
    return rb


@functools.cache
def statistics():
    """Return the statistics of a VecNormV2 that has seen the environment."""
    norm = VecNormV2(in_keys=["observation"], out_keys=["normalized"], decay=1.0)
    TransformedEnv(tape.make_tape(), norm).rollout(60, break_when_any_done=False)
    return norm.loc["observation"], norm.scale["observation"]


def goal_distance(td):
    return td.set("distance", (td[OUTCOME] - td["desired_goal"]).norm(dim=-1))


def standardized(batch, keys, loc, scale):
    return {key: (batch[key] - loc) / scale for key in keys}


# By name: a function that makes the transforms, and their results for a relabelled batch by key, computed by hand;
# None for removed entries.
AFTER = {
    "ObservationNorm": (
        lambda: [ObservationNorm(3.0, 2.0, in_keys=OBSERVATIONS + GOALS, standard_normal=True)],
        lambda batch: standardized(batch, OBSERVATIONS + GOALS, 3.0, 2.0),
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
            "both": torch.cat([batch["desired_goal"], batch["observation"]], dim=-1),
            ("next", "both"): torch.cat([batch[NEXT_GOAL], batch[NEXT_OBSERVATION]], dim=-1),
            **dict.fromkeys(["observation", "desired_goal"]),
        },
    ),
    "NormalizedInputs": (
        lambda: [NormalizedInputs(clip=100)],  # statistics of later updates: tests/test_normalize.py
        lambda batch: {
            "inputs": torch.cat([batch["observation"], batch["desired_goal"]], dim=-1).clamp(max=100),
            ("next", "inputs"): torch.cat([batch[NEXT_OBSERVATION], batch[NEXT_GOAL]], dim=-1).clamp(max=100),
        },
    ),
    "RewardScaling": (
        lambda: [RewardScaling(loc=1.0, scale=0.5, in_keys=[NEXT_REWARD])],
        lambda batch: {NEXT_REWARD: batch[NEXT_REWARD] * 0.5 + 1.0},
    ),
    "ToTensorImage": (
        lambda: [ToTensorImage(in_keys=GOALS)],
        lambda batch: {key: batch[key].permute(0, 3, 1, 2).float() / 255 for key in GOALS},
    ),
    "DoubleToFloat": (
        lambda: [DoubleToFloat()],
        lambda batch: {key: value.float() for key, value in batch.items(True, True) if value.dtype == torch.float64},
    ),
    "RenameTransform": (
        lambda: [RenameTransform(in_keys=GOALS, out_keys=["goal", ("next", "goal")])],
        lambda batch: {"goal": batch["desired_goal"], ("next", "goal"): batch[NEXT_GOAL], **dict.fromkeys(GOALS)},
    ),
    "ExcludeTransform": (lambda: [ExcludeTransform(*GOALS)], lambda batch: dict.fromkeys(GOALS)),
    "a function": (lambda: [goal_distance], lambda batch: {"distance": goal_distance(batch.copy())["distance"]}),
}


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "losses-and-transforms.md").read_text()
SECTION = PAGE.split("\n## Transforms\n")[1].split("\n## ")[0]
BEFORE = dict(re.findall(r"^\| `?([\w ]+)`? \|.*\| (.*) \|$", SECTION, flags=re.MULTILINE)[1:])


def test_the_docs_list_the_transforms_that_are_tested():
    assert list(BEFORE) == list(AFTER)


@pytest.mark.parametrize("name", AFTER)
def test_a_transform_after_it_sees_the_relabelled_transition(name):
    transforms, by_hand = AFTER[name]
    is_image = name == "ToTensorImage"
    make = functools.partial(hindsight, reward=image_reward if is_image else None)
    prepare = {"ToTensorImage": with_images, "DoubleToFloat": in_double_precision}.get(name, lambda data: data)
    data = prepare(collected())
    raw = seeded_sample(buffer(make(), data))
    assert is_image or tape.check(raw).share > 0.6
    expected = {key: raw[key] for key in raw.keys(True, True)} | by_hand(raw)
    expected = {key: value for key, value in expected.items() if value is not None}
    appended = buffer(make(), data)
    for transform in transforms():
        appended.append_transform(transform)
    for rb in (buffer(Compose(make(), *transforms()), data), appended):
        got = seeded_sample(rb)
        assert set(got.keys(True, True)) == set(expected)
        for key in expected.keys() - {"hindsight_stamp"}:  # differs between transforms
            torch.testing.assert_close(got[key], expected[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in AFTER if BEFORE[name].startswith("refused")])
def test_a_transform_before_it_that_reads_replaced_entries_is_refused(name):
    rb = buffer(Compose(*AFTER[name][0](), hindsight()))
    with pytest.raises(ValueError, match=r"comes before HERTransform.*Place it after"):
        rb.extend(collected())
    assert not len(rb)


@pytest.mark.parametrize("keys", [None, [*OBSERVATIONS, *GOALS, NEXT_REWARD]])
def test_a_cast_may_come_before_it(keys):
    got = buffer(Compose(DoubleToFloat(in_keys=keys), hindsight()), in_double_precision(collected())).sample()
    assert tape.check(got).share > 0.6
    assert {got[key].dtype for key in [*OBSERVATIONS, *GOALS, NEXT_REWARD]} == {torch.float32}


def test_a_transform_before_it_may_work_on_other_entries():
    before = ObservationNorm(3.0, 2.0, in_keys=["observation", OUTCOME], out_keys=["scaled", "scaled_outcome"])
    got = buffer(Compose(before, hindsight()), collected()).sample()
    assert tape.check(got).share > 0.6
    assert torch.equal(got["scaled"], got["observation"] * 2.0 + 3.0)
    assert torch.equal(got["scaled_outcome"], got[OUTCOME] * 2.0 + 3.0)
