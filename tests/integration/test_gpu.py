"""Moving state between a CUDA device and the host, and CUDA graphs of samples.

Sampling on a device is tested in `test_compile.py`.
"""

import itertools
import warnings

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.factories import make_augmentation, make_transform
from support.losses import make_loss
from support.pages import run_block
from support.tape import check, collected, make_tape
from torchrl_her import PackedStorage

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


STORAGES = {"LazyTensorStorage": LazyTensorStorage, "PackedStorage": PackedStorage}


def capture(call):
    """Capture a call in a CUDA graph; return the graph, and the result, which each replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_replays_of_a_captured_sample_draw_new_goals_and_see_later_writes(storage, strategy):
    her = make_transform(strategy=strategy, her_ratio=0.8, capacity=200)
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](200, device="cuda"), transform=her)
    data = collected(600).to("cuda")
    rb.extend(data[:200])
    with warnings.catch_warnings(record=True) as caught:
        graph, batch = capture(lambda: rb.sample(256))
        drawn = []
        for written in (None, data[200:400], data[400:]):  # the buffer is full, and its rows are overwritten
            if written is not None:
                rb.extend(written)
            for _ in range(2):
                graph.replay()
                drawn.append(batch.clone())
                check(drawn[-1].cpu(), strategy)
    assert not [each for each in caught if each.filename == __file__]  # warnings of the package name the user's line
    assert all((one["index"] != other["index"]).any() for one, other in itertools.pairwise(drawn))
    assert 0.3 < torch.stack([each["hindsight", "relabelled"].float().mean() for each in drawn]).mean() < 0.85


def test_the_code_of_the_page_captures_the_update():
    loss = make_loss("DQNLoss").to("cuda")
    names = {"loss": loss, "optimizer": torch.optim.Adam(loss.parameters(), lr=1e-3, capturable=True)}
    run_block("how-to/gpu", 0, names)
    names["rb"].extend(collected(600, discrete=True).to("cuda"))
    run_block("how-to/gpu", 1, names)
    before = [parameter.detach().clone() for parameter in loss.parameters()]
    names["graph"].replay()
    torch.cuda.synchronize()
    assert any((one != other).any() for one, other in zip(before, loss.parameters(), strict=True))


def test_replays_of_a_captured_sample_are_not_counted():
    her = make_transform(her_ratio=0.8, capacity=1000)
    rb = buffer(her)
    rb.extend(collected(400).to("cuda"))
    graph, _ = capture(lambda: rb.sample(256))  # one warm-up sample is not captured
    graph.replay()
    assert her.report().sampled == 256
