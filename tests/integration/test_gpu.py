"""State that moves between a CUDA device and the host. Sampling on a device is tested in `test_compile.py`."""

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.factories import make_augmentation, make_transform
from support.tape import make_tape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def buffer(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device="cuda"), transform=transform)


@pytest.mark.parametrize("make", [make_transform, make_augmentation])
def test_a_state_loaded_onto_the_device_is_continued(make, tmp_path):
    rb, twin = buffer(make()), buffer(make())
    data = make_tape().rollout(30, break_when_any_done=False)
    rb.extend(data[:15])
    before = len(rb)
    torch.save(rb.transform[0].state_dict(), tmp_path / "state")
    twin.transform[0].load_state_dict(torch.load(tmp_path / "state", map_location="cuda"))
    rows = []
    for each, first in ((rb, before), (twin, 0)):
        torch.manual_seed(0)
        each.extend(data[15:])
        each.transform[0].flush()
        rows.append(each[first:].exclude("index"))
    assert len(rb) > before
    assert (rows[0] == rows[1]).all()


def test_a_state_of_the_device_loads_into_a_transform_on_the_host():
    rb = buffer(make_transform(her_ratio=1.0, capacity=1000))
    rb.extend(make_tape().rollout(100, break_when_any_done=False).to("cuda"))
    on_host = make_transform(her_ratio=1.0, capacity=1000)
    on_host.load_state_dict(rb.transform[0].state_dict())
    batch = on_host(rb.storage[:64].cpu())
    assert batch["hindsight", "relabelled"].any()
    assert on_host.table.goals.device.type == "cpu"
