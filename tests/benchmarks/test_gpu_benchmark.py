"""The GPU benchmark: its small version on a CPU, its message without a CUDA device, and its parsing of test results."""

import contextlib
import csv
import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_tests
import pytest
import torch
from gpu import ON_CPU, PARTS, main
from gpu_device import Captured, seconds_per_call
from gpu_learner import Learner
from gpu_sampling import STORAGES, STRATEGIES, fill, make_buffer, make_transitions
from gpu_training import TrainingPlan, Updates

from support.dispatch import NoWaits, Waits

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "gpu.py")]
CPU = torch.device("cpu")


def run(*arguments):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=600)


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def check_numbers(rows, *columns):
    """Check that all numbers of these columns are positive and finite."""
    numbers = [float(row[column]) for row in rows for column in columns]
    assert numbers
    assert all(0 < number < math.inf for number in numbers)


def test_the_small_version_runs_on_a_cpu(tmp_path):
    result = run("--device", "cpu", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    for skipped in ("Skipped on a CPU: the tests marked gpu.", "Skipped on a CPU: whether sampling synchronizes"):
        assert skipped in result.stdout

    sampling = read(tmp_path / "sampling.csv")
    measured = {tuple(row[key] for key in ("stored", "storage", "hindsight", "batch_size", "operation", "mode"))
                for row in sampling}  # fmt: skip
    expected = {
        (str(size), storage, hindsight, str(batch_size), operation, mode)
        for size in ON_CPU.stored
        for storage in STORAGES
        for hindsight in ("True", "False")
        for batch_size in ON_CPU.batch_sizes
        for operation in ("sample", "sample and update")
        for mode in ("eager", "graph")
    }
    assert expected <= measured
    check_numbers(sampling, "milliseconds_per_batch", "samples_per_second")
    for row in sampling:
        per_second = 1e3 * int(row["batch_size"]) / float(row["milliseconds_per_batch"])
        assert float(row["samples_per_second"]) == pytest.approx(per_second, rel=0.01)
        assert row["captured"] == "False"

    *_, last = training = read(tmp_path / "training.csv")
    check_numbers(training, "environment_steps", "updates", "seconds")
    assert (int(last["environment_steps"]), int(last["updates"])) == (ON_CPU.steps, ON_CPU.steps // 16)
    assert all(0 <= float(row["success_rate"]) <= 1 for row in training)
    synchronization = read(tmp_path / "synchronization.csv")
    assert {(row["storage"], row["strategy"]) for row in synchronization} == {
        (storage, strategy) for storage in STORAGES for strategy in STRATEGIES
    }
    assert {row["quantity"] for row in read(tmp_path / "summary.csv")} >= {"device", "training time", "success rate"}
    picture = tmp_path / "sampling.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < picture.stat().st_size < 200_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_one_line(tmp_path):
    result = run("--out", tmp_path / "out")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "There is no CUDA device. Run the small version with --device cpu.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sampling_and_updating_read_no_value(storage, strategy):
    """`NoWaits` finds reads of values, which PyTorch's debug mode and CUDA graphs reject on a GPU."""
    buffer = make_buffer(storage, 500, CPU, strategy=STRATEGIES[strategy], info=True)
    fill(buffer, 500, CPU)
    learner = Learner(buffer.sample(2))
    learner.update(buffer.sample(32))  # creates the state of the optimizer
    with NoWaits():
        batch = buffer.sample(32)
        learner.update(batch)
    assert batch["hindsight", "relabelled"].any()
    with pytest.raises(Waits), NoWaits():
        batch["next", "reward"].sum().item()


def test_transitions_networks_and_updates_have_no_tensor_on_the_default_device():
    """This finds mistakes on a CPU that only a GPU would show."""
    with torch.device("meta"):
        batch = make_transitions(4, CPU)
        learner = Learner(batch)
        learner.update(batch.copy())
        acted = learner.explorer(batch.copy())
    assert acted["action"].device == CPU
    assert all(parameter.device == CPU for parameter in learner._loss.parameters())


def test_synthetic_transitions_are_whole_episodes():
    buffer = make_buffer("LazyTensorStorage", 500, CPU, strategy="future")
    fill(buffer, 500, CPU)
    report = buffer.transform[0].report()
    assert (report.episodes, report.running, report.min_length, report.max_length) == (10, 0, 50, 50)
    assert report.discontinuous == 0
    share = buffer.sample(2000)["hindsight", "relabelled"].float().mean()
    assert abs(share - 0.8) < 0.05
    assert buffer[:]["next", "done"].sum() == 10


def test_an_update_changes_the_networks_and_follows_with_the_targets():
    torch.manual_seed(0)
    batch = make_transitions(4, CPU)
    learner = Learner(batch)
    before = {name: value.clone() for name, value in learner._loss.state_dict().items()}
    learner.update(batch.copy())
    changed = {name for name, value in learner._loss.state_dict().items() if not torch.equal(value, before[name])}
    for part in ("actor_network_params", "value_network_params"):
        assert any(name.startswith(part) for name in changed)
        assert any(name.startswith(f"target_{part}") for name in changed)


def test_a_round_has_one_update_per_16_steps_and_a_graph_is_captured_again_when_the_buffer_has_grown(monkeypatch):
    made = []

    class Counted(Captured):
        """Also warms up on a CPU."""

        def __init__(self, function, device, warm_up):
            super().__init__(function, device, warm_up)
            made.append(warm_up)
            self.calls = warm_up
            for _ in range(warm_up):
                function()

    monkeypatch.setattr("gpu_training.Captured", Counted)
    buffer = make_buffer("PackedStorage", 1000, CPU, strategy="future")
    fill(buffer, 500, CPU)
    updated = []
    learner = Learner(buffer.sample(2))
    monkeypatch.setattr(learner, "update", lambda batch: updated.append(len(batch)))
    updates = Updates(buffer, learner, CPU)
    updates.run(100)
    assert updated == [256] * 100  # updates of the warm-up count
    updates.run(25)
    assert made == [3]
    for _ in range(3):
        fill(buffer, 500, CPU)
        updates.run(25)
    assert made == [3, 0]  # the buffer is full after one of the writes
    assert TrainingPlan(10_000_000, 2000, 1_000_000, 240.0).updates_per_round == 100_000 // 16
    with pytest.raises(ValueError, match="multiple of 400"):
        _ = TrainingPlan(1000, 7, 1000, 1.0).updates_per_round


def test_a_function_is_warmed_up_captured_once_and_replayed(monkeypatch):
    """Stubs of CUDA record the order of the calls."""
    seen = []

    class Graph:
        def replay(self):
            seen.append("replay")

    @contextlib.contextmanager
    def within(name):
        seen.append(f"begin {name}")
        yield
        seen.append(f"end {name}")

    stream = SimpleNamespace(wait_stream=lambda other: seen.append("wait"))
    stubs = {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": Graph}
    stubs |= {"stream": lambda _: within("stream"), "graph": lambda _: within("capture")}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    captured = Captured(lambda: seen.append("call"), torch.device("cuda"), warm_up=2)
    captured()
    captured()
    assert seen[:6] == ["wait", "begin stream", "call", "call", "end stream", "wait"]
    assert seen[6:] == ["begin capture", "call", "end capture", "replay", "replay"]
    assert captured.calls == 2
    seen.clear()
    assert Captured(lambda: seen.append("call"), torch.device("cuda"), warm_up=0).calls == 0
    assert seen == ["begin capture", "call", "end capture"]


def test_the_time_per_call_is_the_median_over_groups_of_calls(monkeypatch):
    clock = SimpleNamespace(now=0.0, calls=0)
    monkeypatch.setattr("gpu_device.time", SimpleNamespace(perf_counter=lambda: clock.now))

    def call():
        clock.calls += 1
        clock.now += 0.5 if clock.calls == 5 else 0.002  # one group has an outlier

    assert seconds_per_call(call, CPU, budget=0.1) == pytest.approx(0.002)
    assert clock.calls == 2 + 5 * 10


MARKED = "@pytest.mark." + "gpu"  # in two parts, so that the command does not run this file
TESTS = {
    "tests/conftest.py": "import sys\nsys.path.insert(0, '.')\n",
    "tests/test_passing.py": f"import pytest\n\n{MARKED}\ndef test_it(): ...\n\ndef test_other():\n    assert 0\n",
    "tests/deeper/test_missing.py": f"import no_such_module\nimport pytest\n\n{MARKED}\ndef test_it(): ...\n",
    "tests/test_unmarked.py": "import no_such_module_either\n",
    "pytest.ini": "[pytest]\nmarkers = gpu: needs a CUDA device\n",
}


def write_tests(folder, **more):
    for name, text in {**TESTS, **more}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_tests_run_even_if_some_files_import_missing_modules(tmp_path):
    write_tests(tmp_path)
    outcome = gpu_tests.run_tests(tmp_path, 600)
    assert outcome.counts == {"passed": 1, "error": 1}
    (missing,) = outcome.not_collected
    assert missing.startswith("tests/deeper/test_missing.py")
    assert "no_such_module" in missing


def test_tests_that_take_too_long_are_stopped(tmp_path):
    write_tests(tmp_path, **{"tests/test_passing.py": f"import time\n# {MARKED}\ntime.sleep(60)\n"})
    outcome = gpu_tests.run_tests(tmp_path, 3)
    assert outcome.counts == {"stopped": 1}
    assert outcome.summary == "stopped after 3 s"


@pytest.mark.parametrize(
    ("last_line", "counts"),
    [
        ("==== 57 passed, 3 skipped in 41.20s ====", {"passed": 57, "skipped": 3}),
        ("1 failed, 2 passed, 1 error in 3.1s", {"failed": 1, "passed": 2, "error": 1}),
        ("60 skipped, 2 errors in 42.34s", {"skipped": 60, "error": 2}),
        ("no tests ran in 0.1s", {}),
    ],
)
def test_the_result_of_tests_is_read(last_line, counts):
    assert gpu_tests.read_outcome(f"...\n{last_line}\n").counts == counts


def test_a_file_without_a_reason_does_not_get_the_reason_of_the_next():
    output = """
____ ERROR collecting tests/test_one.py ____
import file mismatch
____ ERROR collecting tests/test_two.py ____
tests/test_two.py:1: in <module>
E   ModuleNotFoundError: No module named 'ray'
=== 2 errors in 1.0s ==="""
    assert gpu_tests.read_outcome(output).not_collected == [
        "tests/test_two.py: ModuleNotFoundError: No module named 'ray'"
    ]


def test_an_error_in_one_part_keeps_the_results_of_the_others(monkeypatch, tmp_path, capsys):
    def fail(*_):
        yield {"environment_steps": 10}
        raise RuntimeError("out of luck")

    monkeypatch.setattr("gpu_training.train", fail)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path)])
    monkeypatch.setattr(sys.modules["gpu"], "ON_CPU", dataclasses.replace(ON_CPU, stored=(1000,), batch_sizes=(64,)))
    with pytest.raises(SystemExit, match="training failed: RuntimeError: out of luck"):
        main()
    assert "Sample, batch of 64" in capsys.readouterr().out
    assert read(tmp_path / "training.csv") == [{"environment_steps": "10"}]
    assert len(read(tmp_path / "sampling.csv")) > 8


def test_all_parts_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "gpu.md").read_text()
    assert all(f"`{part}`" in page for part in PARTS)
