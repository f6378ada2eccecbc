"""Kills a training with SIGKILL again and again, and checks what it resumes from.

    PYTHONPATH=tests python tests/integration/faults/kills.py --kills 50
    PYTHONPATH=tests python tests/integration/faults/kills.py --every 1

With ``--kills`` at random moments; after every kill the last complete checkpoint is loaded and checked, transition by
transition (see `killed_training.py`), and the training is started again and resumes from it. With ``--every`` in the
middle of a save, at one file operation after the other: a training that saves for the third time, so that its first
checkpoint is removed, is forked, and each copy is killed so many operations later than the one before.
"""

from __future__ import annotations

import argparse
import enum
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from killed_training import Training, check
from tqdm import tqdm

TIMEOUT = 120  # seconds until a process must have made progress
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def keep_quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)


# At random moments


class Stage(enum.IntEnum):
    """What a training was doing when it was killed."""

    STARTING = 0
    LOADING = 1
    TRAINING = 2
    SAVING = 3


def run_training(directory: Path, with_ids: bool, run: int, stage: Any, saves: Any) -> None:
    """Resume and train, until killed."""
    keep_quiet()
    training = Training(directory, with_ids)
    stage.value = Stage.LOADING
    training.resume()
    stage.value = Stage.TRAINING
    for _ in training.train(run):
        stage.value = Stage.SAVING
        training.save()
        stage.value = Stage.TRAINING
        saves.value += 1
        if not multiprocessing.parent_process().is_alive():
            sys.exit("the process that kills this one has ended")


def run_and_kill(context: Any, directory: Path, with_ids: bool, run: int, rng: random.Random) -> Stage:
    """Start the training, kill it at a random moment, and return what it was doing."""
    stage, saves = context.Value("i", Stage.STARTING, lock=False), context.Value("i", 0, lock=False)
    process = context.Process(target=run_training, args=(directory, with_ids, run, stage, saves))
    process.start()
    begin = time.monotonic()

    def wait_for(event: Callable[[], Any]) -> None:
        while not event():
            assert process.is_alive(), "the training ended by itself: its error is above"
            assert time.monotonic() - begin < TIMEOUT, f"the training got stuck {stage.value!r}"
            time.sleep(0.0005)

    moment = rng.choice(["at the start", "in a save", "any time", "any time"]) if run > 1 else "any time"
    if moment == "at the start":
        first = rng.choice([Stage.STARTING, Stage.LOADING, Stage.TRAINING])
        wait_for(lambda: stage.value >= first)
        time.sleep(rng.uniform(0, 0.03))
    else:
        wait_for(lambda: saves.value)  # progress from kill to kill
        time.sleep(rng.uniform(0, 0.5))
        if moment == "in a save":
            wait_for(lambda: stage.value == Stage.SAVING)
            time.sleep(rng.uniform(0, 0.03))
    process.kill()
    process.join(TIMEOUT)
    assert process.exitcode == -signal.SIGKILL, f"the training ended with {process.exitcode}"
    return Stage(stage.value)


def kill_at_random(folder: Path, kills: int, seed: int | None) -> None:
    rng = random.Random(seed)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the fork server's imports
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_training"])  # PyTorch is imported once
    killed: Counter[Stage] = Counter()
    checked = halves = 0
    # Two trainings in turn: without trajectory ids, a lane is found by its goals alone.
    trainings = itertools.cycle([(folder / "with ids", True), (folder / "without ids", False)])
    for run, (directory, with_ids) in zip(tqdm(range(kills), unit="kill"), trainings, strict=False):
        killed[run_and_kill(context, directory, with_ids, run, rng)] += 1
        halves += len(list(directory.glob(".checkpoint-*.stage-*")))
        resumed = Training(directory, with_ids, her_ratio=1.0)
        assert resumed.resume(), "no complete checkpoint was left"
        checked += sum(check(resumed) for _ in range(3))  # three draws of each transition's goal
    print(f"{kills} kills: the last complete checkpoint was there each time, and everything in it right")
    print("killed while", ", ".join(f"{stage.name.lower()} {killed[stage]}" for stage in Stage))
    print(f"{checked:,} transitions checked; {halves} incomplete checkpoints left by kills, none of them loaded")


# At the file operations of a save


def save_and_die(training: Training, operation: int) -> bool:
    """Save in a fork that is killed before the given file operation; return whether it got there."""
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


def kill_at_every(folder: Path, every: int) -> None:
    directory, kept = folder / "checkpoints", folder / "kept"
    training = Training(directory)
    training.resume()
    for _ in training.train(run=0):
        if len(training.rotation.checkpoints()) == 2:
            break
        training.save()
    shutil.copytree(directory, kept)
    left: Counter[str] = Counter()
    while save_and_die(training, left.total() * every):
        resumed = Training(directory, her_ratio=1.0)
        assert resumed.resume(), f"no checkpoint was left by a kill at file operation {left.total() * every}"
        check(resumed)
        is_new = resumed.progress["frames"] == training.progress["frames"]
        left["the new checkpoint" if is_new else "the one before"] += 1
        shutil.rmtree(directory)
        shutil.copytree(kept, directory)
    assert len(left) == 2, left
    print(f"{left.total()} kills:", ", ".join(f"{count} left {checkpoint}" for checkpoint, count in left.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--kills", type=int, metavar="N", help="kill N times at random moments")
    how.add_argument("--every", type=int, metavar="N", help="kill at every N-th file operation of a save")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    keep_quiet()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kills:
            kill_at_random(Path(folder), arguments.kills, arguments.seed)
        else:
            kill_at_every(Path(folder), arguments.every)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"FAILED: {error}")
