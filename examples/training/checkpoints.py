"""Read this to see how a run is saved and resumed, bit for bit."""

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
from torchrl.collectors import Collector

from torchrl_her import GoalSelection
from training.parts import anneal
from training.settings import Settings

SIZES = "sizes.json"  # the bytes of each file of a checkpoint, written last


def saved_text(config: Settings) -> str:
    """Return the text of ``config.yaml``, which has no settings of a single command."""
    return OmegaConf.to_yaml(OmegaConf.structured(replace(config, resume=None, hydra=None)))


def damage_of(checkpoint: Path) -> str:
    """Return which files of a checkpoint are missing or have lost data, or an empty string."""
    try:
        sizes = json.loads((checkpoint / SIZES).read_text())
    except FileNotFoundError:
        sizes = {}
    except ValueError:
        return SIZES
    found = {name: file.stat().st_size for name in sizes if (file := checkpoint / name).is_file()}
    damaged = [name for name, size in sizes.items() if found.get(name) != size]
    return ", ".join(damaged) if damaged or Checkpoint.is_checkpoint(checkpoint) else "manifest.json"


def bytes_of(state: Any) -> int:
    """Return the bytes of all tensors in a state dict."""
    if isinstance(state, Mapping):
        state = list(state.values())
    return sum(map(bytes_of, state)) if isinstance(state, (list, tuple)) else getattr(state, "nbytes", 0)


class Checkpoints:
    """Saves and loads a run.

    Simulators cannot be saved, so environments start new episodes after each checkpoint, with seeds that depend on the
    step. Therefore a resumed run has the same results, bit for bit, as a run that was not interrupted.

    A checkpoint gets its name when all of its files are on the disk. If one is damaged later, the previous one is used.
    """

    def __init__(self, config: Settings, folder: Path, collector: Collector, hindsight: Any, **components: Any):
        self.config, self.folder, self.collector, self.hindsight = config, folder, collector, hindsight
        self.components = components | {"rng": GlobalRNGState()}
        for transform in collector.env.modules():
            if isinstance(transform, GoalSelection):
                self.components["goals"] = transform
        self.checkpoint = Checkpoint(**self.components)
        self.rotation = CheckpointRotation(folder / "checkpoints", keep_last=config.checkpoint.keep)

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
        damaged = {}
        for path in sorted(self.rotation.directory.glob("checkpoint-*"), reverse=True):
            if not (damage := damage_of(path)):
                break
            damaged[path] = damage
        else:
            names = "".join(f" {path.name} is damaged ({damage})." for path, damage in damaged.items())
            raise SystemExit(f"The run in {self.folder}/ has no checkpoint: delete it and start again.{names}")
        step = int(path.name[-12:])  # names end in 12 digits
        if step > self.config.total_steps:
            raise SystemExit(f"The run in {self.folder}/ already has {step:,} steps: set a larger total_steps.")
        for unfinished in self.rotation.directory.glob(".*checkpoint-*"):  # of a killed process
            shutil.rmtree(unfinished)
        for other, damage in damaged.items():
            renamed = other.rename(other.with_name(f"damaged-{other.name}"))
            warnings.warn(
                f"{other} is damaged: {damage} missing or of another size. The run continues from {path.name}. The "
                f"damaged checkpoint is now {renamed.name}, which you can delete.",
                stacklevel=3,
            )
        self.checkpoint.load(path)
        # Only these numbers: the policy is saved separately, exploration may change, and other state breaks a
        # ParallelEnv.
        self.collector.load_state_dict({"frames": step, "iter": 0}, strict=False)
        anneal(self.collector.policy, step // self.config.collector.steps_per_chunk)
        self._end_episodes(step)

    def save(self, step: int) -> None:
        """Save a checkpoint."""
        path = self.rotation.directory / f"checkpoint-{step:012d}"
        unfinished = path.with_name(f".{path.name}")
        path.parent.mkdir(exist_ok=True)
        self._check_space(path)
        self.checkpoint.save(unfinished)
        files = [file for file in unfinished.rglob("*") if file.is_file()]
        sizes = {str(file.relative_to(unfinished)): file.stat().st_size for file in files}
        (unfinished / SIZES).write_text(json.dumps(sizes))
        for each in (*unfinished.rglob("*"), unfinished):
            sync(each)
        unfinished.rename(path)
        sync(path.parent)
        self.rotation.prune()
        self._end_episodes(step)

    def _check_space(self, path: Path) -> None:
        """Stop if a checkpoint does not fit on the disk, because writing to a memory-mapped file would end the run."""
        buffer = self.components["buffer"]
        parts = [buffer.transform, *(part for name, part in self.components.items() if name != "buffer")]
        states = [part.state_dict() for part in parts if hasattr(part, "state_dict")]
        trees = 16 * buffer.storage.max_size if self.config.buffer.prioritized else 0  # priorities
        needed = buffer.storage[:].bytes() + trees + bytes_of(states) + 2**20  # and a megabyte for small files
        if needed > (free := shutil.disk_usage(path.parent).free):
            raise SystemExit(
                f"{path} needs {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB free: free "
                f"{(needed - free) / 1e6:,.1f} MB more, and continue from the previous checkpoint with "
                f"resume={self.folder}."
            )

    def _end_episodes(self, step: int) -> None:
        self.hindsight.flush()
        if step < self.config.total_steps:
            self.collector.set_seed(int(np.random.SeedSequence([self.config.seed, step]).generate_state(1)[0]))
            self.collector.reset()


def sync(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    if os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
