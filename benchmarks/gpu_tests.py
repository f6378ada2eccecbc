"""Runs the tests that need a CUDA device, even if packages of the extra 'dev' are missing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

COUNT = r"(\d+) (passed|failed|skipped|errors?)"
NOT_COLLECTED = r"^_+ ERROR collecting (\S+) _+$(?:(?!^_).)*?^E +(\w+: [^\n]+)$"


class Outcome(NamedTuple):
    """The result of the tests."""

    summary: str  # pytest's last line
    counts: dict[str, int]  # of passed, failed, skipped tests and errors
    not_collected: list[str]  # files, with the reason
    output: str


def run_tests(root: Path, limit: float) -> Outcome:
    """Run the tests marked ``gpu`` below ``root / "tests"``; stop them after ``limit`` seconds."""
    files = sorted(path for path in (root / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    workers = min(4, max(1, (os.cpu_count() or 1) // 2))
    options = ["-m", "gpu", "-n", str(workers), "-p", "no:cacheprovider", "-q", "--continue-on-collection-errors"]
    names = [str(path.relative_to(root)) for path in files]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.getenv("PYTHONPATH")])])}
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *names],
        cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = tests.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)  # with its workers
        output, _ = tests.communicate()
        return Outcome(f"stopped after {limit:.0f} s", {"stopped": 1}, [], output)
    return read_outcome(output)


def read_outcome(output: str) -> Outcome:
    """Parse the output of pytest."""
    lines = output.strip().splitlines() or ["pytest printed nothing"]
    summary = lines[-1].strip("= ")
    counts = {name.removesuffix("s"): int(count) for count, name in re.findall(COUNT, summary)}
    not_collected = [f"{name}: {error}" for name, error in re.findall(NOT_COLLECTED, output, re.M | re.S)]
    return Outcome(summary, counts, not_collected, output)
