"""On a CUDA storage the sampling half stays on the device, and the host never waits for it."""

import contextlib
import functools

import pytest
import tape
import torch
from test_compile import HALVES, Graphs, Waiting, check, collected, some
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform

from torchrl_her import GoalReward, HERTransform, HindsightAugmentation, SparseReward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def begin_anew():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@functools.cache
def rewards():
    weights = torch.tensor(tape.WEIGHTS, dtype=torch.float32, device="cuda")

    def reward_of(achieved, desired):
        return (achieved * weights.to(achieved.device)).sum(-1) - 2 * (desired * weights.to(desired.device)).sum(-1)

    return {
        "SparseReward": SparseReward(0.0),
        "SparseReward, terminated_fn": SparseReward(0.0, terminated_fn=tape.reached),
        "GoalReward": GoalReward(reward_of),
        "GoalReward, terminated_fn": GoalReward(reward_of, terminated_fn=tape.reached),
    }


def buffer(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device="cuda"), transform=transform, batch_size=64)


@contextlib.contextmanager
def no_waits():
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_state_that_was_loaded_onto_the_device_is_continued(tmp_path):
    rb, twin = (buffer(HERTransform(rewards()["SparseReward"], capacity=1000)) for _ in range(2))
    data = collected(30).reshape(-1)
    rb.extend(data[:15])
    torch.save(rb.transform[0].state_dict(), tmp_path / "state")
    twin.transform[0].load_state_dict(torch.load(tmp_path / "state", map_location="cuda"))
    for each in (rb, twin):
        each.extend(data[15:])
    assert rb.transform[0].tracker.written == twin.transform[0].tracker.written == 30
    assert torch.equal(rb.transform[0].table.goals, twin.transform[0].table.goals)


def test_episodes_that_are_held_back_and_were_loaded_onto_the_device_are_continued(tmp_path):
    rb, twin = (buffer(HindsightAugmentation(rewards()["SparseReward"])) for _ in range(2))
    data = collected(30).reshape(-1)
    rb.extend(data[:15])
    torch.save(rb.transform[0].state_dict(), tmp_path / "state")
    before = len(rb)
    twin.transform[0].load_state_dict(torch.load(tmp_path / "state", map_location="cuda"))
    for each in (rb, twin):
        torch.manual_seed(0)
        each.extend(data[15:])
        each.transform[0].flush()
    assert len(rb) > before
    assert (rb[before:].exclude("index") == twin[:].exclude("index")).all()


@pytest.mark.parametrize("written_from", ["cuda", "cpu"])
@pytest.mark.parametrize(("strategy", "reward", "sequence_length"), HALVES)
def test_sampling_waits_for_nothing(strategy, reward, sequence_length, written_from):
    her = HERTransform(rewards()[reward], strategy=strategy, sequence_length=sequence_length, capacity=120)
    rb = buffer(her)
    count = tape.Count()
    for written in collected(400).to(written_from).split(50):  # the table wraps round three times
        rb.extend(written)
        rows = some(rb)
        assert rows.device.type == "cuda"
        her(rows)  # the first one moves the table
        with no_waits():
            batch = her(rows)
        assert all(value.is_cuda for value in batch.values(True, True))
        count += check(batch.cpu(), strategy, reward)
    assert her.table.device.type == "cuda"
    assert count.share > 0.2  # most goals have left the table


def test_sampling_n_step_returns_waits_for_nothing():
    her = HERTransform(rewards()["GoalReward, terminated_fn"], capacity=1000)
    rb = buffer(Compose(MultiStepTransform(3, 0.9), her))
    rb.extend(collected().to("cuda"))
    rows = some(rb)
    rb.transform(rows)
    with no_waits():
        batch = rb.transform(rows)
    assert batch["hindsight", "relabelled"].any()


@pytest.mark.parametrize("way", [lambda rows: rows[0].item(), lambda rows: rows[rows > 3]], ids=["item", "mask"])
def test_a_strategy_that_waits_is_found_out(way):
    rb = buffer(HERTransform(rewards()["GoalReward"], strategy=Waiting(way), capacity=1000))
    rb.extend(collected().to("cuda"))
    rows = some(rb)
    rb.transform(rows)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waits():
        rb.transform(rows)


def test_a_table_that_goal_spec_puts_on_the_device_stays_there():
    spec = tape.make_tape().observation_spec["achieved_goal"].to("cuda")
    her = HERTransform(rewards()["GoalReward, terminated_fn"], goal_spec=spec, capacity=1000)
    rb = buffer(her)
    rb.extend(collected())
    assert her.table.device.type == "cuda"
    rows = some(rb)
    with no_waits():
        batch = her(rows)
    assert check(batch.cpu(), "future", "GoalReward, terminated_fn").share > 0.5


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_it_compiles_in_one_piece_and_once(strategy):
    spec = tape.make_tape().observation_spec["achieved_goal"].to("cuda")
    her = HERTransform(SparseReward(0.0, terminated_fn=tape.reached), strategy=strategy, goal_spec=spec, capacity=120)
    first, *rest = collected(400).split(20)
    rb = buffer(her)
    rb.extend(first)
    graphs, count = Graphs(), tape.Count()
    compiled = [torch.compile(her, fullgraph=True), torch.compile(her, fullgraph=True, backend=graphs)]
    for written in rest:
        for relabel in compiled:
            count += check(relabel(some(rb)).cpu(), strategy, "SparseReward, terminated_fn")
        rb.extend(written)
    assert graphs.count == 1
    assert count.share > 0.2  # most goals have left the table


def test_a_state_of_the_device_loads_into_a_transform_of_the_host():
    on_device = HERTransform(rewards()["GoalReward"], her_ratio=1.0, capacity=1000)
    rb = buffer(on_device)
    rb.extend(collected().to("cuda"))
    on_host = HERTransform(GoalReward(lambda achieved, desired: achieved[..., 0]), her_ratio=1.0, capacity=1000)
    on_host.load_state_dict(on_device.state_dict())
    rows = some(rb).cpu()
    goals = on_host(rows)
    assert goals["hindsight", "relabelled"].any()
    assert on_host.table.device.type == "cpu"
