"""The folder of a training run: settings, logs and checkpoints."""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import anneal
from omegaconf import OmegaConf
from plots import draw_training
from settings import LoggerKind, Priority, Settings
from tensordict import TensorDictBase
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
from torchrl.collectors import Collector
from torchrl.record.loggers import get_logger
from tqdm import tqdm

History = dict[str, list[list[float]]]  # of each metric: [step, value]


def set_up(config: Settings) -> None:
    """Set threads, precision and seeds. Call it before you make networks."""
    torchrl_logger.setLevel("WARNING")
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.matmul_precision.name)
    torch.manual_seed(config.seed)
    np.random.seed(config.seed)  # noqa: NPY002 (prioritized sampling draws from it)


def saved_text(config: Settings) -> str:
    """Return the text of ``config.yaml``, which has no settings of a single command."""
    return OmegaConf.to_yaml(OmegaConf.structured(replace(config, resume=None, hydra=None)))


class Progress:
    """Counts steps, updates and seconds of training, and the successes of its episodes."""

    def __init__(self, config: Settings):
        self.config = config
        self.counts: dict[str, Any] = {"steps": 0, "updates": 0, "seconds": 0.0}
        self.bar = tqdm(
            desc=f"{config.algorithm} {config.env.name}", total=config.total_steps, unit=" steps", delay=1e-3
        )
        self.close = self.bar.close
        self._successes: list[Tensor] = []  # since the last log
        self._start = time.perf_counter()

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return int(self.counts["steps"])

    def add(self, data: TensorDictBase) -> None:
        """Count the steps of a chunk, and the successes of the episodes that end in it."""
        self.counts["steps"] += data.numel()
        self.bar.update(self.steps - self.bar.n)
        done = data["next", "done"]
        self._successes.append(data["next", self.config.env.success].view_as(done)[done])

    def updates_due(self) -> Iterator[int]:
        """Yield the sizes of groups of updates that are due, and count them. A group is sampled in one call.

        With TD errors as priorities, a group is one update, because each update changes the priorities.
        """
        config = self.config
        most = 1 if config.buffer.prioritized == Priority.error else 16
        due = round(config.updates_per_step * (self.steps - config.collector.random_steps), 6)
        while (count := int(min(due - self.counts["updates"], most))) > 0:
            yield count
            self.counts["updates"] += count

    def due(self, interval: int) -> bool:
        """Whether a multiple of ``interval`` steps, or the end of the run, is reached."""
        return self.steps % interval == 0 or self.steps >= self.config.total_steps

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock."""
        self.counts["seconds"] += time.perf_counter() - self._start
        yield
        self._start = time.perf_counter()

    def metrics(self) -> dict[str, Any]:
        """Return the seconds of training and, if episodes ended since the last log, their successes."""
        successes, self._successes = torch.cat(self._successes), []
        return {"seconds": self.counts["seconds"]} | ({"success": successes} if len(successes) else {})


class Log:
    """Writes metrics to the loggers, and keeps them for resumed runs and pictures.

    Create it after a resumed run has loaded its checkpoint: it writes the logs of the earlier steps again.
    """

    def __init__(self, config: Settings, folder: Path, history: History):
        self.config, self.folder, self.history = config, folder, history
        shutil.rmtree(folder / "logs", ignore_errors=True)
        run = "/".join(folder.resolve().parts[-2:])
        names = {kind: kind.name for kind in config.logger.kinds} | {LoggerKind.wandb: run}
        self.loggers = [get_logger(kind.name, str(folder / "logs"), names[kind]) for kind in config.logger.kinds]
        for name, values in history.items():  # of a resumed run
            for step, value in values:
                for logger in self.loggers:
                    logger.log_scalar(name, value, int(step))

    def __call__(self, group: str, metrics: Mapping[str, Any], step: int) -> None:
        """Log metrics as ``group/name``, tensors as their means. Losses are from the last update."""
        means = {f"{group}/{name}": float(torch.as_tensor(values).float().mean()) for name, values in metrics.items()}
        for name, value in means.items():
            self.history.setdefault(name, []).append([step, value])
        for logger in self.loggers:
            logger.log_metrics(means, step)

    def close(self) -> None:
        """Draw the curves, and print the final success."""
        draw_training(self.history, self.folder / "training.png", f"{self.config.algorithm}, {self.config.env.name}")
        for logger in self.loggers:
            logger.close()
        step, success = self.history["evaluation/success"][-1]
        print(f"{int(step):,} steps: success {success:.2f}. See {self.folder}/")


class Checkpoints:
    """Saves and loads a run.

    Simulators cannot be saved, so environments start new episodes after each checkpoint, with seeds that depend on the
    step. Therefore a resumed run has the same results, bit for bit, as a run that was not interrupted.
    """

    def __init__(self, config: Settings, folder: Path, collector: Collector, hindsight: Any, **components: Any):
        self.config, self.folder, self.collector, self.hindsight = config, folder, collector, hindsight
        self.components = components | {"rng": GlobalRNGState()}
        self.checkpoint = Checkpoint(**self.components)
        self.rotation = CheckpointRotation(folder / "checkpoints", keep_last=config.checkpoint.keep)

    def resume_or_start(self) -> None:
        """Load the last checkpoint of a resumed run, or reserve the folder for a new run."""
        steps = [int(checkpoint.name[-12:]) for checkpoint in self.rotation.checkpoints()]  # names end in 12 digits
        if self.config.resume is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise SystemExit(
                    f"{self.folder}/ is not empty: continue a run in it with resume={self.folder}, delete it, or name "
                    "another folder (hydra.run.dir=..., hydra.sweep.dir=...)."
                )
            (self.folder / "config.yaml").touch(exist_ok=False)  # fails if another run starts at the same time
        elif not steps:
            raise SystemExit(f"The run in {self.folder}/ has no checkpoint: delete it and start again.")
        elif steps[-1] > self.config.total_steps:
            raise SystemExit(f"The run in {self.folder}/ already has {steps[-1]:,} steps: set a larger total_steps.")
        else:
            for unfinished in self.rotation.directory.glob(".checkpoint-*"):  # of a killed process
                shutil.rmtree(unfinished)
            self.rotation.load_latest(self.checkpoint)
            # Only these numbers: the policy is saved separately, exploration may change, and other state breaks a
            # ParallelEnv.
            self.collector.load_state_dict({"frames": steps[-1], "iter": 0}, strict=False)
            anneal(self.collector.policy, steps[-1] // self.config.collector.steps_per_chunk)
            self._end_episodes(steps[-1])
        (self.folder / "config.yaml").write_text(saved_text(self.config))

    def __call__(self, step: int) -> None:
        """Save a checkpoint."""
        self.rotation.save(self.checkpoint, step=step)
        self._end_episodes(step)

    def _end_episodes(self, step: int) -> None:
        self.hindsight.flush()
        if step < self.config.total_steps:
            self.collector.set_seed(int(np.random.SeedSequence([self.config.seed, step]).generate_state(1)[0]))
            self.collector.reset()
