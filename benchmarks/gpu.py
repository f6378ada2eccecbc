"""Measures sampling and training on a GPU, and runs the tests that need one, in about 8 minutes.

Needs a CUDA device and PyTorch 2.11 or newer:

    python benchmarks/gpu.py --out outputs/gpu
    python benchmarks/gpu.py --out outputs/gpu --device cpu    # a small version, in less than a minute

1. ``synchronization``: checks that sampling with hindsight never waits for the device.
2. ``sampling``: measures samples per second, for storages of 1 and 10 million transitions and batches of 256 to 65,536,
   with and without hindsight, call by call and captured in one CUDA graph together with an update of DDPG.
3. ``training``: trains on PointReach with everything on the device, for 10 million steps, with an update of batch 256
   every 16 steps.
4. ``tests``: runs the tests marked ``gpu`` in the remaining time.

Writes ``synchronization.csv``, ``tests.txt``, ``sampling.csv``, ``sampling.png``, ``training.csv`` and ``summary.csv``.
Fails if a test fails, or if sampling waits for the device. ``docs/how-to/gpu.md`` describes the columns.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensordict
import torch
import torchrl

sys.path.insert(0, str(Path(__file__).parents[1]))  # torchrl_her need not be installed

import gpu_sampling
import gpu_training
from gpu_device import write_csv
from gpu_picture import draw
from gpu_tests import run_tests

ROOT = Path(__file__).parents[1]
PARTS = "synchronization", "sampling", "training", "tests"
JAXGCRL = 600  # seconds for 10 million steps, as published
WHOLE = 465.0  # seconds for all parts
FOR_TRAINING, FOR_TESTS = 240.0, 100.0  # maximum and minimum seconds; tests get all remaining time


@dataclass(frozen=True)
class Plan:
    """The sizes of all measurements."""

    samples: int  # per storage and strategy; none of them may synchronize
    stored: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    budget: float  # seconds of one measurement
    sampling_limit: float  # seconds of all measurements of sampling
    steps: int
    num_envs: int
    buffer_size: int


ON_GPU = Plan(
    samples=200,
    stored=(1_000_000, 10_000_000),
    batch_sizes=(256, 1024, 4096, 16_384, 65_536),
    budget=0.1,
    sampling_limit=110.0,
    steps=10_000_000,
    num_envs=2000,
    buffer_size=1_000_000,
)
ON_CPU = Plan(
    samples=3,
    stored=(1000, 10_000),
    batch_sizes=(64, 256),
    budget=0.01,
    sampling_limit=60.0,
    steps=4000,
    num_envs=40,
    buffer_size=3000,
)


class Report:
    """The lines printed at the end, and the rows of ``summary.csv``."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.failures: list[str] = []

    def add(self, quantity: str, value: object, unit: str = "") -> None:
        """Add a row to the file."""
        self.rows.append({"quantity": quantity, "value": value, "unit": unit})


def check_synchronization(plan: Plan, device: torch.device, out: Path, report: Report) -> None:
    try:
        rows = gpu_sampling.check_synchronization(device, plan.samples)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        report.failures.append(f"Sampling waits for the device: {error}")
        return
    write_csv(rows, out / "synchronization.csv")
    if device.type == "cuda":
        line = f"{len(rows)} pairs of storage and strategy, {plan.samples} samples each: none waits for the device."
    else:
        line = "Skipped on a CPU: whether sampling synchronizes, and CUDA graphs (functions are called instead)."
    report.lines.append(line)
    report.add("samples that did not synchronize", sum(row["samples"] for row in rows if row["checked"]), "samples")


def run_gpu_tests(device: torch.device, out: Path, report: Report, left: float) -> None:
    if device.type == "cpu":
        report.lines.append("Skipped on a CPU: the tests marked gpu.")
        return
    outcome = run_tests(ROOT, max(left, FOR_TESTS))
    (out / "tests.txt").write_text(outcome.output)
    report.lines.append(f"Tests marked gpu: {outcome.summary}")
    report.lines += [f"  not collected: {each}" for each in outcome.not_collected]
    for name, count in outcome.counts.items():
        report.add(f"tests {name}", count, "tests")
    report.add("test files not collected", len(outcome.not_collected), "files")
    errors = outcome.counts.get("error", 0) - len(outcome.not_collected)
    if not outcome.counts or errors or outcome.counts.keys() & {"failed", "stopped"}:
        report.failures.append(f"The tests marked gpu did not pass, see {out / 'tests.txt'}: {outcome.summary}")


def measure_sampling(plan: Plan, device: torch.device, out: Path, report: Report) -> None:
    rows = save(
        gpu_sampling.measure_sampling(device, plan.stored, plan.batch_sizes, plan.budget, plan.sampling_limit),
        out / "sampling.csv",
    )
    draw(rows, f"Sampling on {name_of(device)}", out / "sampling.png")
    for row in rows:
        if row["storage"] == "PackedStorage" and row["hindsight"] and row["batch_size"] == plan.batch_sizes[0]:
            if row["mode"] == "graph" and not row["captured"]:
                continue
            call = "in one CUDA graph" if row["captured"] else "call by call"
            report.lines.append(
                f"{row['operation'].capitalize()}, batch of {row['batch_size']} with hindsight, PackedStorage, "
                f"{row['stored']:,} stored, {call}: {row['samples_per_second']:,} samples per second."
            )
    prioritized, reason = gpu_sampling.measure_prioritized(device, plan.stored[0], plan.batch_sizes, plan.budget)
    write_csv(rows + prioritized, out / "sampling.csv")
    if reason:
        report.lines.append(f"Prioritized samplers are skipped: {reason}")


def train(plan: Plan, device: torch.device, out: Path, report: Report, left: float) -> None:
    training = gpu_training.TrainingPlan(
        plan.steps, plan.num_envs, plan.buffer_size, limit=min(FOR_TRAINING, left - FOR_TESTS)
    )
    rows = save(gpu_training.train(training, device), out / "training.csv")
    last = rows[-1]
    steps, seconds = last["environment_steps"], last["seconds"]
    report.lines.append(
        f"PointReach: {steps:,} steps with {last['updates']:,} updates of batch 256 in {seconds:.0f} s without "
        f"evaluations; success {last['success_rate']:.2f} of 1,000 goals."
    )
    report.add("environment steps", steps, "steps")
    report.add("updates", last["updates"], "updates")
    report.add("training time", seconds, "s")
    report.add("success rate", last["success_rate"], "share of episodes")
    if device.type == "cuda":
        whole = seconds * 10_000_000 / steps
        kind = "measured" if steps >= plan.steps else "extrapolated from the completed steps"
        report.lines.append(f"10 million steps: {whole:.0f} s ({kind}). JaxGCRL: {JAXGCRL} s.")
        report.add("10 million steps, " + kind, round(whole, 1), "s")


def save(rows: Iterator[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Write each row as soon as it is measured, so that an error loses no rows, and return all rows."""
    saved = []
    for row in rows:
        saved.append(row)
        write_csv(saved, path)
    return saved


def name_of(device: torch.device) -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU (sizes of the small version)"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Synchronization, tests, sampling and training on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: run a small version")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    return parser.parse_args()


def main() -> None:
    start = time.monotonic()
    arguments = parse_arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device. Run the small version with --device cpu.", file=sys.stderr)
        sys.exit(2)
    torchrl.torchrl_logger.setLevel("WARNING")
    torch.manual_seed(0)
    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    plan, out, report = (ON_GPU if on_gpu else ON_CPU), arguments.out, Report()
    out.mkdir(parents=True, exist_ok=True)
    versions = f"torch {torch.__version__}, TorchRL {torchrl.__version__}, tensordict {tensordict.__version__}"
    print(f"{name_of(device)}; {versions}")
    report.add("device", name_of(device))
    report.add("versions", versions)
    parts: dict[str, Callable[[float], None]] = {
        "synchronization": lambda left: check_synchronization(plan, device, out, report),
        "sampling": lambda left: measure_sampling(plan, device, out, report),
        "training": lambda left: train(plan, device, out, report, left),
        "tests": lambda left: run_gpu_tests(device, out, report, left),
    }
    for name in arguments.parts:
        try:
            parts[name](start + WHOLE - time.monotonic())
        except Exception as error:  # the other parts still run
            traceback.print_exc()
            report.failures.append(f"{name} failed: {type(error).__name__}: {error}")
    report.add("whole command", round(time.monotonic() - start, 1), "s")
    write_csv(report.rows, out / "summary.csv")
    print("\n".join(["", *report.lines, f"Results are in {out}/. Whole command: {time.monotonic() - start:.0f} s."]))
    if report.failures:
        sys.exit("\n".join(report.failures))


if __name__ == "__main__":
    main()
