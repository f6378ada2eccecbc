"""Kills a training with SIGKILL again and again, at random moments, and checks what it resumes from.

    python tests/faults/kills.py --kills 50

After every kill the last complete checkpoint is loaded and checked here, transition by transition, by an oracle in
plain Python (see `killed_training.py`); then the training is started again, resumes from it and goes on. Fails at the
first thing that is wrong.
"""

from __future__ import annotations

import argparse
import enum
import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from killed_training import Training, check
from tqdm import tqdm

PATIENCE = 120  # seconds that a process may take to get somewhere


class Doing(enum.IntEnum):
    """What a training was doing when it was killed."""

    STARTING = 0
    LOADING = 1
    TRAINING = 2
    SAVING = 3


def quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)


def run_training(directory: Path, with_ids: bool, run: int, doing: Any, saves: Any) -> None:
    """Resume and train, until killed."""
    quiet()
    training = Training(directory, with_ids)
    doing.value = Doing.LOADING
    training.resume()
    doing.value = Doing.TRAINING
    for _ in training.train(run):
        doing.value = Doing.SAVING
        training.save()
        doing.value = Doing.TRAINING
        saves.value += 1
        if not multiprocessing.parent_process().is_alive():
            sys.exit("nobody is left to kill this")


def run_and_kill(context: Any, directory: Path, with_ids: bool, run: int, rng: random.Random) -> Doing:
    """Start the training, kill it at a random moment, and say what it was doing."""
    doing, saves = context.Value("i", Doing.STARTING, lock=False), context.Value("i", 0, lock=False)
    process = context.Process(target=run_training, args=(directory, with_ids, run, doing, saves))
    process.start()
    begin = time.monotonic()

    def wait_for(event: Any) -> None:
        while not event():
            assert process.is_alive(), "the training ended by itself: its error is above"
            assert time.monotonic() - begin < PATIENCE, f"the training got stuck {doing.value!r}"
            time.sleep(0.0005)

    moment = rng.choice(["at the start", "in a save", "any time", "any time"]) if run > 1 else "any time"
    if moment == "at the start":
        stage = rng.choice([Doing.STARTING, Doing.LOADING, Doing.TRAINING])
        wait_for(lambda: doing.value >= stage)
        time.sleep(rng.uniform(0, 0.03))
    else:
        wait_for(lambda: saves.value)  # so that it gets on from kill to kill
        time.sleep(rng.uniform(0, 0.5))
        if moment == "in a save":
            wait_for(lambda: doing.value == Doing.SAVING)
            time.sleep(rng.uniform(0, 0.03))
    process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL, f"the training ended with {process.exitcode}"
    return Doing(doing.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    quiet()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the server to find what it is to import
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_training"])  # PyTorch is imported once and for all

    killed: Counter[Doing] = Counter()
    resumed = checked = halves = 0
    with tempfile.TemporaryDirectory() as temporary, tqdm(total=arguments.kills, unit="kill") as progress:
        # Two trainings in turn: without trajectory ids, a lane is found by its goals alone.
        trainings = [(Path(temporary) / "with ids", True), (Path(temporary) / "without ids", False)]
        for run, (directory, with_ids) in zip(range(arguments.kills), itertools.cycle(trainings), strict=False):
            killed[run_and_kill(context, directory, with_ids, run, rng)] += 1
            halves += len(list(directory.glob(".checkpoint-*.stage-*")))
            again = Training(directory, with_ids, her_ratio=1.0)
            assert again.resume(), "no complete checkpoint was left"
            checked += sum(check(again) for _ in range(3))  # three draws of each transition's goal
            resumed += 1
            progress.set_postfix(checked=f"{checked:,}")
            progress.update()
    print(f"{resumed} of {arguments.kills} kills: the last complete checkpoint was there, and everything in it right")
    print("killed while", ", ".join(f"{doing.name.lower()} {killed[doing]}" for doing in Doing))
    print(f"{checked:,} transitions checked; {halves} half-written checkpoints left by kills, none of them loaded")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"FAILED: {error}")
