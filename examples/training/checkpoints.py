"""Read this to see how a run is saved and resumed, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors import Collector

from torchrl_her import Checkpoints, GoalSelection
from training.parts import anneal
from training.settings import Settings


def saved_text(config: Settings) -> str:
    """Return the text of ``config.yaml``, which has no settings of a single command."""
    return OmegaConf.to_yaml(OmegaConf.structured(replace(config, resume=None, hydra=None)))


class SavedRun:
    """Saves and loads a run.

    Simulators cannot be saved, so environments start new episodes after each checkpoint, with seeds that depend on the
    step. Therefore a resumed run has the same results, bit for bit, as a run that was not interrupted.
    """

    def __init__(self, config: Settings, folder: Path, collector: Collector, hindsight: Any, **components: Any):
        self.config, self.folder, self.collector, self.hindsight = config, folder, collector, hindsight
        self.components = components | {"rng": GlobalRNGState()}
        for transform in collector.env.modules():
            if isinstance(transform, GoalSelection):
                self.components["goals"] = transform
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep, **self.components)

    def resume_or_start(self) -> None:
        """Load the last checkpoint of a resumed run that is not damaged, or reserve the folder for a new run."""
        if self.config.resume is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise SystemExit(
                    f"{self.folder}/ is not empty: continue a run in it with resume={self.folder}, delete it, or name "
                    "another folder (hydra.run.dir=..., hydra.sweep.dir=...)."
                )
            (self.folder / "config.yaml").touch(exist_ok=False)  # fails if another run starts at the same time
        else:
            self._resume()
        (self.folder / "config.yaml").write_text(saved_text(self.config))

    def _resume(self) -> None:
        step, damages = None, ""
        try:
            step = self.checkpoints.load()
        except OSError as error:
            damages = f" {error}"
        if step is None:
            raise SystemExit(f"The run in {self.folder}/ has no checkpoint: delete it and start again.{damages}")
        if step > self.config.total_steps:
            raise SystemExit(f"The run in {self.folder}/ already has {step:,} steps: set a larger total_steps.")
        # Only these numbers: the policy is saved separately, exploration may change, and other state breaks a
        # ParallelEnv.
        self.collector.load_state_dict({"frames": step, "iter": 0}, strict=False)
        anneal(self.collector.policy, step // self.config.collector.steps_per_chunk)
        self._end_episodes(step)

    def save(self, step: int) -> None:
        """Save a checkpoint, and end the episodes."""
        try:
            self.checkpoints.save(step)
        except OSError as error:  # the disk is full
            raise SystemExit(f"{error} Continue from the previous checkpoint with resume={self.folder}.") from None
        self._end_episodes(step)

    def _end_episodes(self, step: int) -> None:
        self.hindsight.flush()
        if step < self.config.total_steps:
            self.collector.set_seed(int(np.random.SeedSequence([self.config.seed, step]).generate_state(1)[0]))
            self.collector.reset()
