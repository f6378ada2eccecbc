"""Updates that are recorded, or compiled, do the same as they are."""

from unittest.mock import Mock

import pytest
import torch
from capture import Captured
from script_runs import differences, state_of, train
from tensordict import TensorDict
from torch import nn
from training import make_adam


@pytest.mark.parametrize("run", ["sac", "sac loss=tqc", "td3 buffer.prioritized=error", "ddpg action_penalty=1", "dqn"])
def test_a_recorded_update_is_bit_for_bit_the_update(run, tmp_path):
    expected = state_of(train(f"{run} total_steps=100 capture=false", tmp_path / "as it is"))
    found = state_of(train(f"{run} total_steps=100", tmp_path / "played"))
    for part in ("policy", "loss", "history", "rng"):
        assert any(path.startswith(f"['{part}']") for path in expected)
    # Stamps differ between buffers.
    assert [path for path in differences(expected, found) if not path.startswith("['buffer']")] == []


@pytest.mark.slow  # compiling takes longer than 20 s
def test_a_compiled_update_learns_the_same(tmp_path, monkeypatch):
    command = "dqn total_steps=50 collector.random_steps=0"
    run_as_it_is = train(f"{command} capture=false", tmp_path / "as it is")
    compile_update = Mock(side_effect=torch.compile)
    monkeypatch.setattr(torch, "compile", compile_update)
    compiled = train(f"{command} compile=true", tmp_path / "compiled")
    assert [call.args[0].__name__ for call in compile_update.call_args_list] == ["update"]
    assert compiled.counters["updates"] == run_as_it_is.counters["updates"] == 50
    for one, other in zip(compiled.policy.parameters(), run_as_it_is.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_recording_does_what_the_update_does():
    """With what is given, drawn, made of numbers, kept, viewed and written."""

    class Update:
        def __init__(self):
            self.weight = nn.Parameter(torch.eye(2))
            self.network = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2, bias=False))
            nn.init.eye_(self.network[1].weight)
            self.optimizer = make_adam([self.weight, *self.network.parameters()], 0.1)
            self.enabled = torch.tensor(True)
            self.calls = 0

        def __call__(self, batch):
            self.calls += 1
            total = torch.tensor(0.5)
            total += batch["a"].sum()
            if self.enabled and torch.tensor(3.0) > 2:
                batch["b"] = batch["a"] + torch.rand(2)
            smallest, place = (self.weight.t()[:, torch.tensor([1, 0])] * batch["b"]).square().min(0)
            (smallest.sum() + self.network(batch["a"]).sum()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return TensorDict(smallest=smallest.detach(), place=place, sums=TensorDict(total=total))

    one, other = Update(), Update()
    recorded = Captured(other)
    for seed in range(6):
        expected, found = ({"batch": TensorDict(a=torch.tensor([seed, 1.0]))} for _ in range(2))
        for update, outcome in ((one, expected), (recorded, found)):
            torch.manual_seed(seed)
            outcome["losses"] = update(outcome["batch"])
        assert set(found["batch"].keys()) == {"a", "b"}
        assert all((found[name] == expected[name]).all() for name in expected)
        assert torch.equal(other.weight, one.weight)
        assert torch.equal(other.network[1].weight, one.network[1].weight)
    assert other.calls == 2


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
        lambda batch: torch.bernoulli(torch.tensor(1.0)),
    ],
    ids=["given", "written to", "written to in part", "drawn"],
)
def test_an_update_that_asks_for_a_value_is_not_recorded(value):
    update = Captured(lambda batch: batch if value(batch) > 0 else -batch)
    batch = TensorDict(a=torch.ones(3), batch_size=3)
    assert update(batch) is batch  # the first runs as it is
    with pytest.raises(RuntimeError, match="capture=false"):
        update(batch)
