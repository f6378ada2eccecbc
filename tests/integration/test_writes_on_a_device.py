"""A write to a buffer on a GPU waits for the device once: it fetches all entries that it reads in one copy."""

import pytest
import torch

from support.device import DEVICE, Device
from support.factories import make_transform
from support.tape import check, collected
from support.world import Goals, World, whole_episodes

CASES = {
    "trajectory ids": ({}, 1),
    "goals of two dtypes": ({"dtype": torch.float64}, 2),  # the conversion
    "padding": ({"mask": True}, 1),
    "goal_fn": ({"goal_fn": torch.Tensor.clone}, 2),  # NaN in mapped goals
}


def on_device(data, mask=False, dtype=None):
    if mask:
        flags = torch.arange(data.shape[0]) < data.shape[0] - 2
        data = data.copy().set(("collector", "mask"), flags)
    if dtype is not None:
        data = data.copy().set("desired_goal", data["desired_goal"].to(dtype))
        data.set(("next", "desired_goal"), data["next", "desired_goal"].to(dtype))
    return data.apply(lambda entry: entry.to(DEVICE))


@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES)
def test_a_write_waits_once_for_the_device(options, expected):
    options = dict(options)
    hindsight = make_transform(capacity=1000, goal_fn=options.pop("goal_fn", None))
    world, waits = World(1, Goals()), []
    with Device() as device:
        for _ in range(60):
            data = on_device(world.written(whole_episodes(5, 5)), **options)
            before = device.waits.total()
            hindsight.inv(data)
            waits.append(device.waits.total() - before)
        assert hindsight.report().table_size == 60 * (8 if "mask" in options else 10)
    # Sometimes, the rewards of a write are compared with those of the reward module, which waits more often.
    assert sorted(waits)[30] == expected


@pytest.mark.parametrize("rows", [60, 1])
def test_goals_on_the_device_are_those_that_were_written(rows):
    hindsight = make_transform(capacity=1000, her_ratio=1.0)
    with Device():
        stored = torch.cat([hindsight.inv(on_device(data)) for data in collected(60).split(rows)])
        sample = hindsight(stored).apply(lambda entry: entry.cpu())
    assert check(sample) == 1.0
