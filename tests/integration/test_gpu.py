"""Moving state between a CUDA device and the host, and CUDA graphs of samples.

Sampling on a device is tested in `test_compile.py`.
"""

import itertools
import warnings

import pytest
import torch
from test_compile import no_synchronization_on_cuda
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.factories import make_augmentation, make_transform
from support.pages import run_block
from support.tape import check, collected
from torchrl_her import LowestDensity, PackedStorage

pytestmark = pytest.mark.gpu


def buffer(transform, storage=LazyTensorStorage, size=1000):
    return TensorDictReplayBuffer(storage=storage(size, device="cuda"), transform=transform)


@pytest.mark.parametrize("make", [make_transform, make_augmentation])
def test_a_state_loaded_onto_the_device_is_continued(make, tmp_path):
    rb, twin = buffer(make()), buffer(make())
    data = collected(30)
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
    rb, on_host = buffer(make_transform(capacity=1000)), make_transform(capacity=1000)
    rb.extend(collected(100).to("cuda"))
    on_host.load_state_dict(rb.transform[0].state_dict())
    assert check(on_host(rb.storage[:64].cpu())) > 0.6


def test_data_of_the_host_are_relabelled_on_the_device_without_synchronization_after_the_first_sample():
    rb = buffer(make_transform(capacity=1000))
    rb.extend(collected(100))
    rows = rb.storage[:64]
    rb.transform(rows)  # moves the goal table to the device of the storage
    with no_synchronization_on_cuda():
        batch = rb.transform(rows)
    assert check(batch.cpu()) > 0.6


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_compiled_kernels_relabel_correctly(strategy):
    rb = buffer(make_transform(strategy=strategy, capacity=1000))
    rb.extend(collected(400).to("cuda"))
    batch = torch.compile(rb.transform, fullgraph=True)(rb.storage[torch.arange(256)])
    assert check(batch.cpu(), strategy) > 0.6


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


@pytest.mark.parametrize("storage", [LazyTensorStorage, PackedStorage])
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_replays_of_a_captured_sample_draw_new_goals_and_see_later_writes(storage, strategy):
    rb = buffer(make_transform(strategy=strategy, her_ratio=0.8, capacity=200), storage, size=200)
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
    assert rb.transform[0].report().sampled == 256  # the warm-up sample; replays are not counted


def test_the_code_of_the_page_captures_the_update():
    names = {}
    run_block("how-to/gpu", 0, names, {'"total_frames": 5000': '"total_frames": 600'})
    run_block("how-to/gpu", 2, names)
    before = [parameter.detach().clone() for parameter in names["loss"].parameters()]
    names["graph"].replay()
    torch.cuda.synchronize()
    assert any((one != other).any() for one, other in zip(before, names["loss"].parameters(), strict=True))


def test_goals_are_selected_for_environments_on_the_host():
    selector = LowestDensity()
    selector.fit(torch.tensor([[0.0], [0.1], [0.2], [3.0]], device="cuda"), box=torch.tensor([3.0], device="cuda"))
    assert selector.select(torch.tensor([[[0.1], [3.0]]]), None).tolist() == [[3.0]]
