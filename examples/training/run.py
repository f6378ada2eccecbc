"""Read this to see what happens around the updates: counting, logs, evaluation, and checkpoints that resume exactly."""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.record.loggers import get_logger
from tqdm import tqdm

from torchrl_her import Checkpoints, GoalSelection
from training.environments import Evaluation
from training.parts import anneal
from training.plots import draw_training
from training.settings import LoggerKind, Priority, Settings

AT_ONCE = 16  # batches that are sampled in one call of the buffer, which is faster


def saved_text(config: Settings) -> str:
    """Return the text of ``config.yaml``, which has no settings of a single command."""
    return OmegaConf.to_yaml(OmegaConf.structured(replace(config, resume=None, hydra=None)))


class Run:
    """A training run in a folder.

    TorchRL's ``Trainer`` does not resume exactly: a simulator cannot be saved. Here environments start new episodes
    after each checkpoint, with seeds that depend on the step, so that a resumed run has the same results, bit for bit,
    as a run that was not interrupted.

    Args:
        config: the settings.
        folder: the folder for settings, logs and checkpoints.
        collector: collects the transitions.
        hindsight: the transform of the buffer that relabels transitions.
        buffer: the replay buffer.
        policy: the greedy policy, which is evaluated and saved.
        components: the other parts that checkpoints save, such as the loss and its optimizer.
    """

    def __init__(
        self, config: Settings, folder: Path, collector: Collector, hindsight: Any, buffer: TensorDictReplayBuffer,
        policy: Any, **components: Any,
    ):  # fmt: skip
        self.config, self.folder, self.collector, self.buffer = config, folder, collector, buffer
        self.counts: dict[str, Any] = {"steps": 0, "updates": 0, "seconds": 0.0}
        self.history: dict[str, list[list[float]]] = {}  # of each metric: [step, value]
        self.hindsight, self.policy, self.evaluate = hindsight, policy, Evaluation(config)
        self.components = components | {
            "policy": policy, "buffer": buffer, "log": self.history, "progress": self.counts, "rng": GlobalRNGState()
        }  # fmt: skip
        for transform in collector.env.modules():
            if isinstance(transform, GoalSelection):
                self.components["goals"] = transform
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep, **self.components)
        self._losses: dict[str, Tensor] = {}  # of the last update
        self._successes: list[Tensor] = []  # of the episodes since the last log
        self._start = time.perf_counter()

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return int(self.counts["steps"])

    @property
    def updates(self) -> int:
        """Updates so far."""
        return int(self.counts["updates"])

    def collect(self) -> Iterator[TensorDictBase]:
        """Yield chunks of transitions, from the last checkpoint on. Between chunks, log, evaluate and save."""
        config = self.config
        with self._paused():
            self._resume() if config.resume else self._reserve_folder()
            (self.folder / "config.yaml").write_text(saved_text(config))
            self._start_logs()
            if not self.steps:
                self._evaluate()
        for data in self.collector:
            self.counts["steps"] += data.numel()
            done = data["next", "done"]
            self._successes.append(data["next", config.env.success].view_as(done)[done])
            yield data
            with self._paused():
                self.bar.update(self.steps - self.bar.n)
                if self._due(config.logger.interval):
                    self._log_training()
                if self._due(config.evaluation.interval):
                    self._evaluate()
                if self._due(config.checkpoint.interval):
                    self.checkpoints.save(self.steps)
                    self._end_episodes()
        self._close()

    def batches(self) -> Iterator[TensorDictBase]:
        """Sample a batch for each update that is due.

        Several are sampled in one call. With TD errors as priorities, each update changes the priorities of the next.
        """
        config, size = self.config, self.config.batch_size
        most = 1 if config.buffer.prioritized == Priority.error else AT_ONCE
        due = round(config.updates_per_step * (self.steps - config.collector.random_steps), 6)
        if due > 0 and not len(self.buffer):
            raise SystemExit(
                f"hindsight.when=writing stores whole episodes, and none ended in the first {self.steps:,} steps: "
                "increase collector.random_steps and checkpoint.interval."
            )
        while (count := int(min(due - self.updates, most))) > 0:
            for batch in self.buffer.sample(count * size).split(size):
                yield batch
                self.counts["updates"] += 1

    def finish_update(self, batch: TensorDictBase, losses: TensorDictBase) -> None:
        """Keep the losses for the next log, and set the priorities of the batch if they are TD errors."""
        self._losses.update(losses)
        if self.config.buffer.prioritized == Priority.error:
            self.buffer.update_tensordict_priority(batch.set("td_error", losses["td_error"]))

    def _due(self, interval: int) -> bool:
        return self.steps % interval == 0 or self.steps >= self.config.total_steps

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop the clock."""
        self.counts["seconds"] += time.perf_counter() - self._start
        yield
        self._start = time.perf_counter()

    # Resumption

    def _reserve_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise SystemExit(
                f"{self.folder}/ is not empty: continue a run in it with resume={self.folder}, delete it, or name "
                "another folder (hydra.run.dir=..., hydra.sweep.dir=...)."
            )

    def _resume(self) -> None:
        step, chunk = self.checkpoints.load(), self.config.collector.steps_per_chunk
        if step is None:
            raise SystemExit(f"The run in {self.folder}/ has no checkpoint: delete it and start again.")
        if step > self.config.total_steps:
            raise SystemExit(f"The run in {self.folder}/ already has {step:,} steps: set a larger total_steps.")
        # Only these numbers: the policy is saved separately, exploration may change, and other state breaks a
        # ParallelEnv.
        self.collector.load_state_dict({"frames": step, "iter": 0}, strict=False)
        anneal(self.collector.policy, step // chunk)
        self._end_episodes()

    def _end_episodes(self) -> None:
        self.hindsight.flush()
        if self.steps < self.config.total_steps:
            seed = np.random.SeedSequence([self.config.seed, self.steps]).generate_state(1)[0]
            self.collector.set_seed(int(seed))
            self.collector.reset()

    # Logs

    def _start_logs(self) -> None:
        """Make the loggers and the progress bar. Write the logs of a resumed run's earlier steps again."""
        config, folder = self.config, self.folder / "logs"
        shutil.rmtree(folder, ignore_errors=True)
        names = {kind: kind.name for kind in config.logger.kinds}
        names[LoggerKind.wandb] = "/".join(self.folder.resolve().parts[-2:])
        self.loggers = [get_logger(kind.name, str(folder), names[kind]) for kind in config.logger.kinds]
        for name, values in self.history.items():
            for step, value in values:
                for logger in self.loggers:
                    logger.log_scalar(name, value, int(step))
        interval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; longer for log files
        self.bar = tqdm(
            desc=f"{config.algorithm} {config.env.name}", total=config.total_steps, initial=self.steps, unit=" steps",
            mininterval=interval,
        )  # fmt: skip

    def _evaluate(self) -> None:
        self.bar.set_postfix_str("evaluating")
        self._log("evaluation", self.evaluate(self.policy))

    def _log(self, group: str, metrics: Mapping[str, Any]) -> None:
        """Log metrics as ``group/name``, tensors as their means. Losses are from the last update."""
        means = {f"{group}/{name}": float(torch.as_tensor(values).float().mean()) for name, values in metrics.items()}
        for name, value in means.items():
            self.history.setdefault(name, []).append([self.steps, value])
        for logger in self.loggers:
            logger.log_metrics(means, self.steps)
        shown = {name: values[-1][1] for name, values in self.history.items() if "/success" in name or "/loss" in name}
        self.bar.set_postfix({name: f"{value:.2g}" for name, value in shown.items()}, refresh=False)

    def _log_training(self) -> None:
        successes, self._successes = torch.cat(self._successes), []
        metrics = {"success": successes} if len(successes) else {}
        self._log("train", {"seconds": self.counts["seconds"]} | metrics | self._losses)
        self._losses.clear()

    def _close(self) -> None:
        """Draw the curves, write the report of hindsight, and print the final success."""
        self.bar.close()
        self.evaluate.close()
        draw_training(self.history, self.folder / "training.png", f"{self.config.algorithm}, {self.config.env.name}")
        for logger in self.loggers:
            logger.close()
        report, success = f"{self.hindsight.report()}\n", self.history["evaluation/success"][-1][1]
        (self.folder / "report.txt").write_text(report)
        if not success and self.config.hindsight.enabled:
            print(f"{report}No episode succeeded: docs/how-to/does-not-learn.md lists the causes.")
        print(f"{self.steps:,} steps: success {success:.2f}. See {self.folder}/")
