"""A recorded or compiled update does the same as the eager one."""

import warnings
from unittest.mock import Mock

import pytest
import torch
from common import make_adam
from record import Recorded, simplify
from script_runs import configure, differences, state_of, train
from tensordict import TensorDict
from torch import nn


@pytest.mark.parametrize(
    "run", ["sac", "sac loss=tqc", "td3 buffer.prioritized=error", "ddpg action_penalty=1 average=0.9", "dqn"]
)
def test_a_recorded_update_is_bit_for_bit_the_eager_one(run, tmp_path):
    steps = "total_steps=100 buffer.size=100"
    expected = state_of(train(f"{run} {steps} speedup=none", tmp_path / "eager"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="speedup=record")
        found = state_of(train(f"{run} {steps}", tmp_path / "recorded"))
    for part in ("policy", "loss", "log", "rng"):
        assert any(path.startswith(f"['{part}']") for path in expected)
    # Stamps begin with a random number for each buffer.
    assert [path for path in differences(expected, found) if "['table']" not in path] == []


@pytest.mark.slow  # compiling takes longer than 20 s
def test_a_compiled_update_learns_the_same(tmp_path, monkeypatch):
    command = "dqn total_steps=50 collector.random_steps=0"
    eager = train(f"{command} speedup=none", tmp_path / "eager")
    compile_update = Mock(side_effect=torch.compile)
    monkeypatch.setattr("common.torch.compile", compile_update)
    compiled = train(f"{command} speedup=compile", tmp_path / "compiled")
    assert [call.args[0].__name__ for call in compile_update.call_args_list] == ["update"]
    assert compiled.components["progress"]["updates"] == eager.components["progress"]["updates"] == 50
    policies = [run.components["policy"].parameters() for run in (compiled, eager)]
    for one, other in zip(*policies, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


class Update:
    """An update with constants, views, writes in place, random numbers, weights, a buffer and an optimizer."""

    def __init__(self):
        self.weight = nn.Parameter(torch.eye(2))
        self.network = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2, bias=False))
        nn.init.eye_(self.network[1].weight)
        self.target = self.weight.detach().clone()
        self.optimizer = make_adam(configure("dqn", "learning_rate=0.1"), [self.weight, *self.network.parameters()])
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        total = torch.tensor(0.5)
        total += batch["a"].sum()
        pair = torch.zeros(2)
        pair[0] = batch["nested", "b"].sum()
        noisy = batch["a"] + torch.rand(2) + torch.randn_like(batch["a"]).clamp(-1, 1)
        smallest, place = (self.weight.t()[:, torch.tensor([1, 0])] * noisy).square().min(0)
        (smallest.sum() + self.network(batch["a"]).sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.target.lerp_(self.weight.detach(), 0.1)
        return TensorDict(smallest=smallest, place=place, pair=pair, sums=TensorDict(total=total)).detach()


def test_a_recording_does_what_the_update_does():
    one, other = Update(), Update()
    recorded = Recorded(other)
    for seed in range(6):
        results = []
        for update in (one, recorded):
            torch.manual_seed(seed)
            batch = TensorDict(a=torch.tensor([seed, 1.0]), nested=TensorDict(b=torch.tensor([2.0, seed])))
            results.append((update(batch), torch.rand(3)))
        (expected, drawn), (found, drawn_after_recording) = results
        assert (found == expected).all()
        assert torch.equal(drawn, drawn_after_recording)
        assert torch.equal(other.weight, one.weight)
        assert torch.equal(other.target, one.target)
        assert torch.equal(other.network[1].weight, one.network[1].weight)
    assert (one.calls, other.calls) == (6, 2)


def test_a_recording_has_only_operations_that_have_an_effect(monkeypatch):
    graphs, weights = [], nn.Parameter(torch.rand(3, 3))
    monkeypatch.setattr("record.simplify", lambda module: graphs.append(simplify(module)) or graphs[-1])

    def function(batch):
        with torch.autograd.profiler.record_function("named"):
            batch["a"] + 1  # not used
            return TensorDict(product=torch.ops.aten.alias(batch["a"]) @ weights).detach()

    recorded = Recorded(function)
    for _ in range(2):
        recorded(TensorDict(a=torch.rand(4, 3)))
    assert [node.target for node in graphs[0].graph.nodes if node.op == "call_function"] == [torch.mm]


def test_an_alias_keeps_its_shape_if_another_changes_in_place():
    weights = nn.Parameter(torch.rand(2, 3))

    def function(batch):
        row, alias = weights.detach().unbind()[0], batch["a"].detach()
        row.unsqueeze_(0)
        alias.unsqueeze_(0)
        return TensorDict(row=row + 0, alias=alias + 0, original=batch["a"] + 0)

    recorded = Recorded(function)
    for _ in range(5):
        found = recorded(TensorDict(a=torch.rand(4)))
        assert [found[key].shape for key in ("row", "alias", "original")] == [(1, 3), (1, 4), (4,)]


def test_results_of_a_recording_are_not_overwritten_by_its_next_call():
    recorded = Recorded(lambda batch: TensorDict(double=2 * batch["a"]))
    results = [recorded(TensorDict(a=torch.tensor([float(number)])))["double"] for number in range(5)]
    assert torch.cat(results).tolist() == [0, 2, 4, 6, 8]


def written_to_in_part(batch):
    pair = torch.tensor([0.0, 0.0])
    pair[0] = batch["a"].sum()
    return pair.sum()


@pytest.mark.parametrize(
    "value",
    [
        lambda batch: batch["a"].sum(),
        lambda batch: torch.tensor(0.0).add_(batch["a"].sum()),
        written_to_in_part,
        lambda batch: batch["a"].sum() + torch.rand(()) / 10,
    ],
    ids=["given", "written to", "written to in part", "with a random number"],
)
def test_a_function_that_reads_a_value_of_its_batch_runs_eagerly_with_a_warning(value):
    def function(batch):
        return batch if value(batch) > 0 else -batch

    recorded, sign = Recorded(function), [1, 1, -1, 1, -1]
    for number, expected in enumerate(sign):
        batch = TensorDict(a=expected * torch.ones(3), batch_size=3)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert (recorded(batch)["a"] == 1).all()  # the absolute value
        messages = [str(warning.message) for warning in found]
        assert len(messages) == (number == 1), messages
        assert all("speedup=record: not recorded" in message for message in messages)
