"""Transforms before and after HERTransform.

Transforms after it see the relabelled transition, and transforms before it may not change the entries that it replaces.
All goals are normalized with the same statistics.
"""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
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
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import TD3Loss

from support import tape
from support.factories import check_refused, make_transform, seeded_sample
from support.tape import collected, image_reward, in_double_precision, with_images

NEXT_GOAL, NEXT_OBSERVATION, NEXT_REWARD = ("next", "desired_goal"), ("next", "observation"), ("next", "reward")
OUTCOME = ("next", "achieved_goal")
GOALS = ["desired_goal", NEXT_GOAL]
OBSERVATIONS = ["observation", NEXT_OBSERVATION]
FRAMES = 60
hindsight = functools.partial(make_transform, capacity=1000)


def buffer(transform, data=None):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform, batch_size=200)
    if data is not None:
        rb.extend(data)
    return rb


# Transforms after it


@functools.cache
def observed():
    """A VecNormV2 that has seen the environment."""
    norm = VecNormV2(
        in_keys=["observation", "achieved_goal", "desired_goal"], out_keys=["normalized", "a", "d"], decay=1.0
    )
    TransformedEnv(tape.make_tape(), norm).rollout(FRAMES, break_when_any_done=False)
    return norm


def statistics():
    return observed().loc["observation"], observed().scale["observation"]


def as_floats(image):
    return image.permute(0, 3, 1, 2).float() / 255


def goal_distance(td):
    return td.set("distance", (td[OUTCOME] - td["desired_goal"]).norm(dim=-1))


def both(place):
    """Return the concatenation of goal and observation at the root or under "next"."""
    return torch.cat([place["desired_goal"], place["observation"]], dim=-1)


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


@pytest.mark.parametrize("appended", [False, True], ids=["in a Compose", "appended"])
@pytest.mark.parametrize("name", AFTER)
def test_a_transform_after_it_sees_the_relabelled_transition(name, appended):
    transforms, by_hand = AFTER[name]
    is_image = name == "ToTensorImage"
    make = functools.partial(hindsight, reward=image_reward if is_image else None)
    prepare = {"ToTensorImage": with_images, "DoubleToFloat": in_double_precision}.get(name, lambda data: data)
    data = prepare(collected())
    raw = seeded_sample(buffer(make(), data))
    assert is_image or tape.check(raw).share > 0.6
    rb = buffer(make() if appended else Compose(make(), *transforms()), data)
    for transform in transforms() if appended else []:
        rb.append_transform(transform)
    got = seeded_sample(rb)
    expected = {key: raw[key] for key in raw.keys(True, True)} | by_hand(raw)
    expected = {key: value for key, value in expected.items() if value is not None}
    assert set(got.keys(True, True)) == set(expected)
    del expected["hindsight_stamp"]  # differs between transforms
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("before", [[], [hindsight]], ids=["alone", "with hindsight"])
def test_vec_norm_works_in_no_buffer(before):
    rb = buffer(Compose(*(make() for make in before), VecNormV2(in_keys=["observation"])), collected())
    with pytest.raises(NotImplementedError, match="VecNormV2"):
        rb.sample()


# Transforms before it


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
    rb = buffer(Compose(REFUSED_BEFORE[name](), hindsight()))
    message = r"comes before HERTransform.*Place it after"
    check_refused(rb, lambda: rb.extend(collected()), ValueError, message)


@pytest.mark.parametrize("keys", [None, [*OBSERVATIONS, *GOALS, NEXT_REWARD]], ids=["all entries", "by key"])
def test_a_cast_may_come_before_it(keys):
    got = buffer(Compose(DoubleToFloat(in_keys=keys), hindsight()), in_double_precision(collected())).sample()
    assert tape.check(got).share > 0.6
    for key in [*OBSERVATIONS, *GOALS, NEXT_REWARD]:
        assert got[key].dtype == torch.float32, key


def test_a_transform_before_it_may_work_on_other_entries():
    before = ObservationNorm(3.0, 2.0, in_keys=["observation", OUTCOME], out_keys=["scaled", "scaled_outcome"])
    got = buffer(Compose(before, hindsight()), collected()).sample()
    assert tape.check(got).share > 0.6
    assert torch.equal(got["scaled"], got["observation"] * 2.0 + 3.0)
    assert torch.equal(got["scaled_outcome"], got[OUTCOME] * 2.0 + 3.0)


# Statistics of goals


def normalizing(loc, scale):
    """Return a policy for normalized goals, and the transform for samples. Both read the two tensors."""
    norm = functools.partial(ObservationNorm, loc, scale, standard_normal=True)
    network = TensorDictModule(MLP(in_features=6, out_features=2), in_keys=["observation", "goal"], out_keys=["action"])
    policy = TensorDictSequential(norm(in_keys=["desired_goal"], out_keys=["goal"]), network)
    return policy, norm(in_keys=GOALS, out_keys=["goal", ("next", "goal")])


def test_the_policy_and_samples_normalize_goals_with_the_same_statistics():
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


def test_statistics_by_key_normalize_one_goal_to_two_values():
    """Therefore goals must not be normalized by VecNormV2 in the environment."""
    goals = observed().denorm(TensorDict({"normalized": torch.ones(3), "a": torch.ones(3), "d": torch.ones(3)}))
    assert (goals["achieved_goal"] != goals["desired_goal"]).any()


@pytest.mark.filterwarnings("ignore:No target network updater")
def test_statistics_inside_a_critic_are_not_updated():
    """TorchRL's losses copy the parameters and buffers of their critics."""
    loc, scale = torch.zeros(3), torch.ones(3)
    policy, _ = normalizing(loc, scale)
    network = ValueOperator(MLP(in_features=8, out_features=1), in_keys=["observation", "goal", "action"])
    loss = TD3Loss(policy, TensorDictSequential(policy[0], network), bounds=(-1.0, 1.0))
    loc += 1.0
    assert (loss.qvalue_network_params["module", "0", "loc"] == 0.0).all()


def test_the_docs_list_the_transforms_that_are_tested():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "losses-and-transforms.md").read_text()
    section = page.split("\n## Transforms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `?([\w ]+)`? \|(.*)\|(.*)\|$", section, flags=re.MULTILINE)
    assert [name for name, _, _ in rows if name != "transform"] == list(AFTER)
    refused = {name for name, _, before in rows if before.strip().startswith("refused")}
    assert refused == {name.split()[0] for name in REFUSED_BEFORE}
