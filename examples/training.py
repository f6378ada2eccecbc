"""What goes on around the updates of the training scripts: collection, logs, evaluations and checkpoints."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capture import Captured, CapturedPolicy, Update
from common import Evaluation, Normalization, check_success, make_env, make_envs, rewards_of
from omegaconf import DictConfig, OmegaConf
from plots import draw_training
from settings import check_settings
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl import torchrl_logger
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer, TensorSpec
from torchrl.envs import ExplorationType
from torchrl.modules import EGreedyModule
from torchrl.record.loggers import Logger, get_logger
from tqdm import tqdm

from torchrl_her import HERTransform, HindsightAugmentation

BATCHES_AT_ONCE = 16  # sampled in one call: the buffer does not change between the updates of a chunk
TRANSITION = ["observation", "achieved_goal", "desired_goal", "action", "done", "terminated", "next"]


def set_up_process(config: DictConfig) -> None:
    """Check the settings, and set threads, seeds and messages; before networks are made."""
    check_settings(config)
    torchrl_logger.setLevel("WARNING")
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.matmul_precision)
    torch.distributions.Distribution.set_default_validate_args(False)  # it asks for values of tensors
    if importlib.util.find_spec("pandas") is None:
        sys.modules["pandas"] = None  # type: ignore[assignment]  # or tensordict seeks it on disk, at every module call
    torch.manual_seed(config.seed)
    np.random.seed(config.seed)  # noqa: NPY002 (prioritized sampling draws from it)


class Training:
    """A training run, which a script goes through with ``for data in training.collect(explorer)``.

    It consists of segments of ``checkpoint.interval`` steps. Each begins with environments that are seeded with the
    run's seed and the step, and ends with a checkpoint: so a resumed run does what an uninterrupted one does, and
    no simulator has to save its state.
    """

    def __init__(
        self,
        config: DictConfig,
        folder: Path,
        replay_buffer: TensorDictReplayBuffer,
        hindsight: HERTransform | HindsightAugmentation,
        normalization: Normalization,
        policy: TensorDictModuleBase,
        loss: nn.Module,
        **optimizers: Optimizer,
    ):
        self.config, self.folder = config, folder
        self.replay_buffer, self.hindsight, self.policy = replay_buffer, hindsight, policy
        self.chunk = config.collector.steps_per_chunk
        self.prioritized = config.buffer.prioritized
        num_envs = config.env.num_envs
        self.envs = make_envs(config.env, num_envs, config.env.parallel) if num_envs > 1 else make_env(config.env)
        self.envs.set_seed(config.seed)  # starts them
        # Where all is on the CPU, no device is named: the collector would move each step there.
        self.devices = {} if config.device == "cpu" else {"policy_device": config.device, "storing_device": "cpu"}
        env = make_env(config.env)
        check_success(env, config.env.success)
        self.reward_at_goal, _ = rewards_of(env)
        self.evaluation = Evaluation(config)
        self.counters = {"steps": 0, "updates": 0, "training_seconds": 0.0}
        self.history: dict[str, list[list[float]]] = {}  # of everything that is logged: [step, value]
        self.unlogged: dict[str, list[float]] = {"success": []}  # of training episodes since the last log
        self.latest: dict[str, float] = {}  # what was last known of the updates
        self.losses: dict[str, Tensor] = {}  # what updates returned that is not among it yet, and the last one's batch
        self.batch: TensorDictBase | None = None
        components = {"policy": policy, "loss": loss, "normalization": normalization, "buffer": replay_buffer}
        plain = {
            "counters": self.counters, "history": self.history, "unlogged": self.unlogged, "latest": self.latest
        }  # fmt: skip
        self.checkpoint = Checkpoint(**components, **optimizers, **plain, rng=GlobalRNGState())
        self.rotation = CheckpointRotation(folder / "checkpoints", keep_last=config.checkpoint.keep)
        self._open()

    def _open(self) -> None:
        """Resume where there is a checkpoint, and open the logs, with what they had there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.config.resume is None:
            try:
                (self.folder / "config.yaml").touch(exist_ok=False)  # of two that begin at once, one finds it there
            except FileExistsError:
                resume = (
                    f": go on with resume={self.folder}," if self.rotation.checkpoints() else " that has no checkpoint:"
                )
                raise SystemExit(
                    f"{self.folder}/ has a run{resume} delete it, or name another folder (hydra.run.dir=..., "
                    "hydra.sweep.dir=...)."
                ) from None
        if self.config.resume is not None:
            for leftover in self.rotation.directory.glob(".checkpoint-*"):  # what a killed process was writing
                shutil.rmtree(leftover)
            if not self.rotation.checkpoints():
                raise SystemExit(
                    f"The run in {self.folder}/ has no checkpoint to go on from: delete it and start anew."
                )
            self.rotation.load_latest(self.checkpoint)
            if self.steps > self.config.total_steps:
                raise SystemExit(
                    f"The run in {self.folder}/ has {self.steps:,} steps already: give it more total_steps."
                )
            self._end_episodes()
        OmegaConf.save(OmegaConf.merge(self.config, {"resume": None}), self.folder / "config.yaml")
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)  # a killed run logged steps after its last checkpoint, too
        self.loggers = [self._make_logger(kind, logs) for kind in self.config.logger.kinds]
        for name, values in self.history.items():
            for step, value in values:
                self._log_scalar(name, value, int(step))

    def _make_logger(self, kind: str, logs: Path) -> Logger:
        if kind != "wandb":
            return get_logger(kind, str(logs), kind)
        return get_logger(
            kind, str(logs), self.folder.name, wandb_kwargs={"config": OmegaConf.to_container(self.config)}
        )

    def _end_episodes(self) -> None:
        """End the running episodes, after a checkpoint and after it was loaded: the environments start anew."""
        self.hindsight.flush()

    # The loop

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return int(self.counters["steps"])

    def collect(self, explorer: TensorDictModuleBase) -> Iterator[TensorDictBase]:
        """Yield chunks of transitions, in the shape in which they are written, and do all the rest in between."""
        config = self.config
        bar = tqdm(
            desc=f"{config.algorithm} {config.env.name}",
            initial=self.steps,
            total=config.total_steps,
            unit=" steps",
            mininterval=0.2 if sys.stderr.isatty() else 10.0,  # seconds; a log file needs few lines
        )
        if not self.steps:
            self._evaluate()
        while self.steps < config.total_steps:
            interval = config.checkpoint.interval
            stop = min(config.total_steps, (self.steps // interval + 1) * interval)
            collector = self._make_collector(explorer)
            began = time.perf_counter()
            for data in collector:
                yield self._as_written(data)
                self.counters["steps"] += data.numel()
                self._note_episodes(data)
                self.counters["training_seconds"] += time.perf_counter() - began
                over = self.steps >= config.total_steps
                if over or self.steps % config.logger.interval == 0:
                    self._log()
                if over or self.steps % config.evaluation.interval == 0:
                    self._evaluate()
                bar.set_postfix(success=f"{self.history['evaluation/success'][-1][1]:.2f}", refresh=False)
                bar.update(data.numel())
                if self.steps >= stop:
                    break
                began = time.perf_counter()
            collector.shutdown(close_env=False)
            self._note_updates()
            self.rotation.save(self.checkpoint, step=self.steps)
            self._end_episodes()
        bar.close()
        self._close()

    def _make_collector(self, explorer: TensorDictModuleBase) -> Collector:
        seed = np.random.SeedSequence([self.config.seed, self.steps]).generate_state(1)
        self.envs.set_seed(int(seed[0]))
        return Collector(
            self.envs,
            explorer,
            frames_per_batch=self.chunk,
            total_frames=-1,  # at a last frame it would close the environments
            init_random_frames=max(0, self.config.collector.random_steps - self.steps),
            exploration_type=ExplorationType.RANDOM,
            **self.devices,
            auto_register_policy_transforms=False,
        )

    def _as_written(self, data: TensorDictBase) -> TensorDictBase:
        """``[environments, time]`` for windows of several steps, else ``[transitions]``."""
        data = data.select(*TRANSITION, ("collector", "traj_ids"))
        if self.config.buffer.n_steps > 1:
            return data.reshape(self.config.env.num_envs, -1)
        return data.reshape(-1)

    def write(self, data: TensorDictBase) -> None:
        """Write a chunk into the buffer, and its priorities where they are known from the start."""
        index = self.replay_buffer.extend(data)
        if self.prioritized == "movement":
            self.replay_buffer.update_priority(index, movement(data, self.config.buffer.far))

    def batches(self) -> Iterator[TensorDictBase]:
        """Yield as many batches as updates are due: ``updates_per_step`` for every step after the random ones."""
        config, steps = self.config, self.steps + self.chunk  # with the chunk that was just written
        due = int(round(config.updates_per_step * max(0, steps - config.collector.random_steps), 6))
        by_error = self.prioritized == "error"
        at_once = 1 if by_error else BATCHES_AT_ONCE  # priorities change with each update
        while (left := due - self.counters["updates"]) > 0:
            for batch in self.replay_buffer.sample(min(left, at_once) * config.batch_size).split(config.batch_size):
                yield batch
                self.counters["updates"] += 1
                if by_error:
                    self.replay_buffer.update_tensordict_priority(batch)
        if by_error:  # Schaul et al. 2016: the correction is whole at the end
            share = min(1.0, steps / config.total_steps)
            self.replay_buffer.sampler.beta = config.buffer.beta + (1 - config.buffer.beta) * share

    def record(self, losses: TensorDictBase, batch: TensorDictBase) -> None:
        """Keep what an update returned, to be logged when it is time; the loss of an actor is not in every one."""
        self.losses.update(losses.items())
        self.batch = batch

    # Logs

    def _note_episodes(self, data: TensorDictBase) -> None:
        success = data["next", self.config.env.success].reshape(data["next", "done"].shape)
        self.unlogged["success"] += success[data["next", "done"]].tolist()

    def _log(self) -> None:
        metrics = {"time/training_seconds": self.counters["training_seconds"]}
        metrics["time/steps_per_second"] = self.steps / self.counters["training_seconds"]
        if self.unlogged["success"]:
            metrics["train/success"] = float(np.mean(self.unlogged["success"]))
            self.unlogged["success"].clear()
        self._note_updates()
        self._log_all(metrics | self.latest)
        report = self.hindsight.report()  # counts from the start or the resumption of the run: not part of its history
        for name in ("discontinuous", "ambiguous", "relabelled", "episode_running", "evicted", "elsewhere"):
            if (value := getattr(report, name)) is not None:
                self._log_scalar(f"hindsight/{name}", value, self.steps)

    def _note_updates(self) -> None:
        if self.batch is None:
            return
        relabelled = self.batch["hindsight", "relabelled"]
        reward = self.batch.get(("next", "original_reward"), self.batch["next", "reward"])  # of n steps: the first
        self.latest["train/relabelled"] = float(relabelled.float().mean())
        if relabelled.any():
            reached = reward.reshape(relabelled.shape)[relabelled] == self.reward_at_goal
            self.latest["train/relabelled_success"] = float(reached.float().mean())
        self.latest.update({f"train/{name}": float(value.float().mean()) for name, value in self.losses.items()})
        self.losses.clear()
        self.batch = None

    def _evaluate(self) -> None:
        outcomes = self.evaluation(self.policy)
        self._log_all({f"evaluation/{name}": float(values.float().mean()) for name, values in outcomes.items()})

    def _log_all(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.history.setdefault(name, []).append([self.steps, value])
            self._log_scalar(name, value, self.steps)

    def _log_scalar(self, name: str, value: float, step: int) -> None:
        for logger in self.loggers:
            logger.log_scalar(name, value, step)

    def _close(self) -> None:
        draw_training(self.history, self.folder / "training.png", f"{self.config.algorithm}, {self.config.env.name}")
        for closed in (self.envs, self.evaluation, *self.loggers):
            if hasattr(closed, "close"):
                closed.close()
        print(f"{self.steps:,} steps: success {self.history['evaluation/success'][-1][1]:.2f}. See {self.folder}/")


def movement(data: TensorDictBase, far: float) -> Tensor:
    """Return priorities ``[n]`` of transitions: how far the achieved goal moves in their episode, at most ``far``.

    Of an episode that goes on in another chunk, each part counts for itself. Energy-based prioritization (Zhao and
    Tresp 2018, arXiv:1810.01363) without the physics: where nothing moves, hindsight has nothing to tell. Such
    transitions keep a twentieth.
    """
    _, episode = data["collector", "traj_ids"].unique(return_inverse=True)
    steps = (data["next", "achieved_goal"].float() - data["achieved_goal"].float()).flatten(1).norm(dim=-1)
    path = torch.zeros_like(steps).index_add_(0, episode, steps)[episode]
    return 0.05 + (path / far).clamp_max(1.0)


def make_policy(normalization: Normalization, actor: TensorDictModuleBase) -> TensorDictSequential:
    """Return the greedy policy, which reads raw observations and goals."""
    return TensorDictSequential(*normalization.when_acting(), actor)


def make_explorer(
    config: DictConfig, spec: TensorSpec, policy: TensorDictModuleBase, *noise: TensorDictModuleBase
) -> TensorDictSequential:
    """Return what acts: the policy, recorded or as it is, with noise and, at random, uniform actions in its place."""
    share = config.exploration.random_actions
    acts = CapturedPolicy(policy) if config.capture else policy
    uniform = [EGreedyModule(spec, eps_init=share, eps_end=share, device=config.device)] if share else []
    return TensorDictSequential(acts, *noise, *uniform)


def speed_up(config: DictConfig, update: Update) -> Update:
    """Return the update, compiled, recorded or as it is."""
    if config.compile:
        return torch.compile(update)
    return Captured(update) if config.capture else update


def make_adam(parameters: Any, learning_rate: float) -> Optimizer:
    """Return Adam for those of the parameters that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=learning_rate, fused=True)
