"""Kills a process in the middle of saving a checkpoint, at one file operation after the other.

    python tests/faults/kill_points.py

A training gets to where it saves for the third time (so that its first checkpoint is removed). From there it is
copied, and each copy is killed one operation later than the one before. After each, what the directory holds is
loaded and checked as in `kills.py`: it is the checkpoint before or the new one, and nothing between.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from killed_training import Training, check
from kills import quiet
from tqdm import tqdm

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def save_and_die(training: Training, operation: int) -> bool:
    """Save in a copy of this process that is killed before the given file operation; return whether it got there."""
    process = os.fork()
    if process == 0:
        left = operation

        def count(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in CHANGES:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            training.save()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


def kill_at_every(training: Training, every: int) -> Counter[str]:
    """Kill at every such operation, and count which checkpoint was there afterwards."""
    directory, kept = training.directory, training.directory.with_name("kept")
    shutil.copytree(directory, kept)
    frames, found = training.progress["frames"], Counter()
    operations = 0
    with tqdm(unit="kill") as progress:
        while save_and_die(training, operations):
            again = Training(directory, her_ratio=1.0)
            assert again.resume(), f"no checkpoint was left by a kill at file operation {operations}"
            check(again)
            found["the new one" if again.progress["frames"] == frames else "the one before"] += 1
            shutil.rmtree(directory)
            shutil.copytree(kept, directory)
            operations += every
            progress.update()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, metavar="N", default=1, help="kill at every n-th operation only")
    arguments = parser.parse_args()
    quiet()
    tqdm.monitor_interval = 0  # no thread: this process is copied
    with tempfile.TemporaryDirectory() as temporary:
        training = Training(Path(temporary) / "checkpoints")
        training.resume()
        for _ in training.train(run=0):
            if len(training.rotation.checkpoints()) == 2:
                break
            training.save()
        found = kill_at_every(training, arguments.every)
    assert len(found) == 2, found
    print(f"{found.total()} kills:", ", ".join(f"{count} left {name}" for name, count in found.items()))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"FAILED: {error}")
