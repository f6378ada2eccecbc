"""Kills a training repeatedly with SIGKILL, and checks its restored state.

    PYTHONPATH=tests python tests/integration/faults/kills.py --kills 50
    PYTHONPATH=tests python tests/integration/faults/kills.py --every 1

``--kills`` kills at random moments. After each kill, the last complete checkpoint is loaded and checked, transition by
transition (see `killed_training.py`), and the training is restarted from it. ``--every N`` kills at every N-th file
operation of a save. A training that is about to save for the third time, which removes its first checkpoint, is forked,
and each copy is killed N operations later than the previous one.
"""

from __future__ import annotations

import argparse
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

TIMEOUT = 120  # seconds within which a process must make progress
STAGES = STARTING, LOADING, TRAINING, SAVING = range(4)  # the stages of a training
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def keep_quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)


def run_training(directory: Path, with_ids: bool, run: int, stage: Any, saves: Any) -> None:
    """Resume and train, until killed."""
    keep_quiet()
    training = Training(directory, with_ids)
    stage.value = LOADING
    training.resume()
    stage.value = TRAINING
    for _ in training.train(run):
        stage.value = SAVING
        training.save()
        stage.value = TRAINING
        saves.value += 1
        if not multiprocessing.parent_process().is_alive():
            sys.exit("the process that kills this one has ended")


def run_and_kill(context: Any, directory: Path, with_ids: bool, run: int, rng: random.Random) -> int:
    """Start the training, kill it at a random moment, and return the stage it was in."""
    stage, saves = context.Value("i", STARTING, lock=False), context.Value("i", 0, lock=False)
    process = context.Process(target=run_training, args=(directory, with_ids, run, stage, saves))
    process.start()
    begin = time.monotonic()

    def wait_for(event: Callable[[], Any]) -> None:
        while not event():
            assert process.is_alive(), "the training ended by itself: its error is above"
            assert time.monotonic() - begin < TIMEOUT, f"the training got stuck in stage {stage.value}"
            time.sleep(0.0005)

    moment = rng.choice(["at the start", "in a save", "any time", "any time"]) if run > 1 else "any time"
    if moment == "at the start":
        first = rng.choice([STARTING, LOADING, TRAINING])
        wait_for(lambda: stage.value >= first)
    else:
        wait_for(lambda: saves.value)  # progress between kills
        time.sleep(rng.uniform(0, 0.5))
    if moment == "in a save":
        wait_for(lambda: stage.value == SAVING)
    if moment != "any time":
        time.sleep(rng.uniform(0, 0.03))
    process.kill()
    process.join(TIMEOUT)
    assert process.exitcode == -signal.SIGKILL, f"the training ended with {process.exitcode}"
    return stage.value


def kill_at_random(folder: Path, kills: int) -> None:
    rng = random.Random()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the imports of the fork server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_training"])  # imports PyTorch only once
    stages: list[int] = []
    checked = 0
    # Two trainings in turn: without trajectory ids, lanes are only identified by their goals.
    trainings = itertools.cycle([(folder / "with ids", True), (folder / "without ids", False)])
    for run, (directory, with_ids) in zip(tqdm(range(kills), unit="kill"), trainings, strict=False):
        stages.append(run_and_kill(context, directory, with_ids, run, rng))
        resumed = Training(directory, with_ids, her_ratio=1.0)
        assert resumed.resume(), "no complete checkpoint was left"
        checked += sum(check(resumed) for _ in range(3))  # three draws of each transition's goal
    starting, loading, training, saving = map(stages.count, STAGES)
    print(f"{kills} kills: {starting} while starting, {loading} loading, {training} training, {saving} saving")
    print(f"{checked:,} transitions checked")


def save_and_die(training: Training, operation: int) -> bool:
    """Save in a fork that is killed before a file operation; return whether it reached this operation."""
    process = os.fork()
    if process == 0:
        operations = itertools.count()

        def kill_at_operation(event: str, arguments: tuple) -> None:
            if event in CHANGES and next(operations) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill_at_operation)
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
    left: Counter[bool] = Counter()  # whether the new checkpoint remains
    while save_and_die(training, left.total() * every):
        resumed = Training(directory, her_ratio=1.0)
        assert resumed.resume(), f"no checkpoint was left by a kill at file operation {left.total() * every}"
        check(resumed)
        left[resumed.progress["frames"] == training.progress["frames"]] += 1
        shutil.rmtree(directory)
        shutil.copytree(kept, directory)
    assert left[True]
    assert left[False]
    print(f"{left.total()} kills: {left[False]} left the checkpoint before, {left[True]} the new one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--kills", type=int, metavar="N", help="kill N times at random moments")
    how.add_argument("--every", type=int, metavar="N", help="kill at every N-th file operation of a save")
    arguments = parser.parse_args()
    keep_quiet()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kills:
            kill_at_random(Path(folder), arguments.kills)
        else:
            kill_at_every(Path(folder), arguments.every)


if __name__ == "__main__":
    main()
