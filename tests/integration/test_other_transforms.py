"""Transforms before and after HERTransform: those after it see the relabelled transition."""

import functools
import re
from pathlib import Path

import pytest
import torch
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
from support.factories import make_buffer, make_transform, same, seeded_sample
from support.tape import collected, in_double_precision
from support.world import Goals, transitions, whole_episodes
from torchrl_her import NormalizedInputs

NEXT_GOAL, NEXT_OBSERVATION, NEXT_REWARD = ("next", "desired_goal"), ("next", "observation"), ("next", "reward")
OUTCOME, STAMP = ("next", "achieved_goal"), "hindsight_stamp"  # stamps differ between transforms
GOALS = ["desired_goal", NEXT_GOAL]
OBSERVATIONS = ["observation", NEXT_OBSERVATION]
IMAGES = Goals((4, 5, 3), torch.uint8)
hindsight = functools.partial(make_transform, capacity=1000)
buffer = functools.partial(make_buffer, batch_size=200)


@functools.cache
def statistics():
    """Return the statistics of a VecNormV2 that has seen the environment."""
    norm = VecNormV2(in_keys=["observation"], out_keys=["normalized"], decay=1.0)
    TransformedEnv(tape.make_tape(), norm).rollout(60, break_when_any_done=False)
    return norm.loc["observation"], norm.scale["observation"]


def goal_distance(td):
    return td.set("distance", (td[OUTCOME] - td["desired_goal"]).norm(dim=-1))


# Functions that make the transforms, by the name in the table of the docs.
AFTER = {
    "ObservationNorm": lambda: [ObservationNorm(3.0, 2.0, in_keys=OBSERVATIONS + GOALS, standard_normal=True)],
    "VecNormV2": lambda: [ObservationNorm(*statistics(), in_keys=OBSERVATIONS, standard_normal=True)],
    "CatTensors": lambda: [
        CatTensors(in_keys=["observation", "desired_goal"], out_key="both"),
        CatTensors(in_keys=[NEXT_OBSERVATION, NEXT_GOAL], out_key=("next", "both"), del_keys=False),
    ],
    "NormalizedInputs": lambda: [NormalizedInputs(clip=100, normalize=False)],  # statistics: tests/test_normalize.py
    "RewardScaling": lambda: [RewardScaling(loc=1.0, scale=0.5, in_keys=[NEXT_REWARD])],
    "ToTensorImage": lambda: [ToTensorImage(in_keys=GOALS)],
    "DoubleToFloat": lambda: [DoubleToFloat()],
    "RenameTransform": lambda: [RenameTransform(in_keys=GOALS, out_keys=["goal", ("next", "goal")])],
    "ExcludeTransform": lambda: [ExcludeTransform(*GOALS)],
    "a function": lambda: [goal_distance],
}


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "losses-and-transforms.md").read_text()
SECTION = PAGE.split("\n## Transforms\n")[1].split("\n## ")[0]
BEFORE = dict(re.findall(r"^\| `?([\w ]+)`? \|.*\| (.*) \|$", SECTION, flags=re.MULTILINE)[1:])


def test_the_docs_list_the_transforms_that_are_tested():
    assert list(BEFORE) == list(AFTER)


@pytest.mark.filterwarnings("ignore:The reward module gives")  # images cannot contain the cell 999 of desired goals
@pytest.mark.parametrize("name", AFTER)
def test_a_transform_after_it_sees_the_relabelled_transition(name):
    make = functools.partial(hindsight, reward=IMAGES.reward if name == "ToTensorImage" else None)
    data = {
        "ToTensorImage": transitions(whole_episodes(5, 9), IMAGES),
        "DoubleToFloat": in_double_precision(collected()),
    }.get(name, collected())
    relabelled = seeded_sample(buffer(make(), data))
    assert name == "ToTensorImage" or tape.check(relabelled) > 0.6
    expected = Compose(*AFTER[name]())(relabelled.clone()).exclude(STAMP)
    assert not same(expected, relabelled.exclude(STAMP))
    appended = buffer(make(), data)
    for transform in AFTER[name]():
        appended.append_transform(transform)
    for rb in (buffer(Compose(make(), *AFTER[name]()), data), appended):
        assert same(seeded_sample(rb).exclude(STAMP), expected)


@pytest.mark.parametrize("name", [name for name in AFTER if BEFORE[name].startswith("refused")])
def test_a_transform_before_it_that_reads_replaced_entries_is_refused(name):
    rb = buffer(Compose(*AFTER[name](), hindsight()))
    with pytest.raises(ValueError, match=r"comes before HERTransform.*Place it after"):
        rb.extend(collected())
    assert not len(rb)


@pytest.mark.parametrize("keys", [None, [*OBSERVATIONS, *GOALS, NEXT_REWARD]])
def test_a_cast_may_come_before_it(keys):
    got = buffer(Compose(DoubleToFloat(in_keys=keys), hindsight()), in_double_precision(collected())).sample()
    assert tape.check(got) > 0.6
    assert {got[key].dtype for key in [*OBSERVATIONS, *GOALS, NEXT_REWARD]} == {torch.float32}


def test_a_transform_before_it_may_work_on_other_entries():
    before = ObservationNorm(3.0, 2.0, in_keys=["observation", OUTCOME], out_keys=["scaled", "scaled_outcome"])
    got = buffer(Compose(before, hindsight()), collected()).sample()
    assert tape.check(got) > 0.6
    assert torch.equal(got["scaled"], got["observation"] * 2.0 + 3.0)
    assert torch.equal(got["scaled_outcome"], got[OUTCOME] * 2.0 + 3.0)
