"""Checkpoints of a training that can be killed at any moment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from tensordict import is_tensor_collection
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.data import PrioritizedSampler, RayReplayBuffer, ReplayBuffer, TensorStorage

from torchrl_her._private import call_with_buffer, warn_user, with_members
from torchrl_her.goals.strategies import check_at_least
from torchrl_her.packed_storage.checkpointer import check_space, sync
from torchrl_her.packed_storage.packed_storage import PackedStorage

SIZES = "sizes.json"  # the bytes of each file of a checkpoint, written last
SMALL_FILES = 2**20  # bytes
PRIORITY = 16  # bytes of a transition in the files of a PrioritizedSampler


class Checkpoints:
    """Saves and loads the last checkpoints of a training, which can be killed at any moment.

    A checkpoint is a folder of TorchRL's ``Checkpoint``. It gets its name, ``checkpoint-`` and twelve digits of the
    step, when all of its files are on the disk, and only then older checkpoints are deleted. So a killed process or a
    power failure leaves the previous checkpoint. Only one process at a time may use a folder.

    Args:
        folder (str or Path): the folder of the checkpoints. `save` creates it.

    Keyword Args:
        keep (int): the number of checkpoints to keep. Default: 2, so that there is another one if the newest is
            damaged.
        **components: what to save, by name, as for TorchRL's ``Checkpoint``: objects with ``state_dict`` and
            ``load_state_dict`` or ``dump`` and ``load``, such as buffers, losses and optimizers, and dictionaries
            and lists of values that JSON supports, which are loaded in place.

    Raises:
        ValueError: if ``keep`` is not a positive integer.
        TypeError: if a component is of another kind.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import Checkpoints, EnvReward, HERTransform
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> her = HERTransform(EnvReward(env), capacity=1000)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), transform=her)
        >>> folder = tempfile.TemporaryDirectory()
        >>> checkpoints = Checkpoints(folder.name, buffer=rb, policy=torch.nn.Linear(4, 2))
        >>> step = checkpoints.load() or 0
        >>> _ = rb.extend(env.rollout(30))  # the episode would end after 50 steps
        >>> checkpoints.save(step + 30).name
        'checkpoint-000000000030'
        >>> rb.empty()
        >>> checkpoints.load(), len(rb), her.report().running
        (30, 30, 0)
        >>> folder.cleanup()
    """

    def __init__(self, folder: str | Path, /, *, keep: int = 2, **components: Any):
        self._checkpoint = Checkpoint()
        for name, component in components.items():
            check_component(name, component)
            self._checkpoint.register(name, component)
        self._rotation = CheckpointRotation(folder, keep_last=check_at_least(1, "keep", keep))

    def save(self, step: int) -> Path:
        """Save a checkpoint, then delete the oldest ones.

        Args:
            step (int): the number of the checkpoint, larger than that of the newest one.

        Returns:
            Path: the folder of the checkpoint.

        Raises:
            ValueError: if ``step`` is negative or not larger than that of the newest checkpoint.
            OSError: if the disk has too little space. Nothing is written then.
            RuntimeError: if nothing was written into a buffer.
        """
        folder, step = self._rotation.directory, check_at_least(0, "step", step)
        for newest in self._newest_first()[:1]:
            if step <= step_of(newest):
                raise ValueError(
                    f"The step of a checkpoint must be larger than that of the newest one, {step_of(newest):,} in "
                    f"{folder}/, got {step:,}: load() the newest one before the first save(), or use an empty folder."
                )
        folder.mkdir(parents=True, exist_ok=True)
        check_space(folder, "The checkpoint takes", self._needed_bytes())
        path, unfinished = (folder / f"{dot}checkpoint-{step:012d}" for dot in ("", "."))
        self._checkpoint.save(unfinished)
        files = [file for file in unfinished.rglob("*") if file.is_file()]
        sizes = {str(file.relative_to(unfinished)): file.stat().st_size for file in files}
        (unfinished / SIZES).write_text(json.dumps(sizes))
        for each in (*unfinished.rglob("*"), unfinished):
            sync(each)
        unfinished.rename(path)
        sync(folder)
        self._rotation.prune()
        return path

    def load(self) -> int | None:
        """Load the newest checkpoint that is not damaged, and end the running episodes of the buffers.

        Checkpoints contain no environments, so these start new episodes. Incomplete checkpoints of killed processes are
        deleted. Damaged ones are renamed to ``damaged-checkpoint-...``, with a warning that names the damaged files.

        Returns:
            int | None: the step of the checkpoint, or None if there is no checkpoint.

        Raises:
            OSError: if all checkpoints are damaged. Nothing is changed then.
            CheckpointError: if a component cannot be loaded.
        """
        paths = self._newest_first()
        damages = {path: damage for path in paths if (damage := damage_of(path))}
        whole = [path for path in paths if path not in damages]
        if damages and not whole:
            names = " ".join(f"{path.name} is damaged ({damage})." for path, damage in damages.items())
            raise OSError(f"{names} There is no other checkpoint in {self._rotation.directory}/.")
        for unfinished in self._rotation.directory.glob(".*checkpoint-*"):
            shutil.rmtree(unfinished)
        if not whole:
            return None
        for path, damage in damages.items():
            set_aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(set_aside, ignore_errors=True)  # an earlier one of the same step
            path.rename(set_aside)
            warn_user(
                f"{path} is damaged: {damage} missing or of another size. The run continues from {whole[0].name}. The "
                f"damaged checkpoint is now {set_aside.name}, which you can delete."
            )
        self._checkpoint.load(whole[0])
        for component in self._checkpoint.components.values():
            if isinstance(component, ReplayBuffer):
                call_with_buffer(flush_transforms, component)
        return step_of(whole[0])

    def _newest_first(self) -> list[Path]:
        found = self._rotation.directory.glob("checkpoint-*")
        names = (path for path in found if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit())
        return sorted(names, key=step_of, reverse=True)

    def _needed_bytes(self) -> int:
        """Return about how many bytes a checkpoint takes. A full disk would end the process with SIGBUS."""
        needed = SMALL_FILES
        for component in self._checkpoint.components.values():
            if isinstance(component, ReplayBuffer) and not isinstance(component, RayReplayBuffer):
                needed += sum(map(bytes_of_buffer, with_members(component)))
            elif hasattr(component, "state_dict"):
                needed += bytes_of(component.state_dict())
        return needed


def check_component(name: str, component: Any) -> None:
    """Check that a component can be loaded in place. TorchRL also saves components that cannot."""
    for methods in (("state_dict", "load_state_dict"), ("dump", "load")):
        if all(callable(getattr(component, each, None)) for each in methods):
            return
    if not isinstance(component, (MutableMapping, list)):
        raise TypeError(
            f"The component {name!r} is a {type(component).__name__}, which cannot be loaded in place. Pass an object "
            "with state_dict and load_state_dict, or put numbers and strings into a dictionary or a list."
        )


def step_of(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def damage_of(checkpoint: Path) -> str:
    """Return which files of a checkpoint are missing or have lost data, or an empty string."""
    try:
        sizes = json.loads((checkpoint / SIZES).read_text())
    except FileNotFoundError:  # saved by a CheckpointRotation
        sizes = {}
    except ValueError:
        return SIZES
    found = {name: file.stat().st_size for name in sizes if (file := checkpoint / name).is_file()}
    damaged = [name for name, size in sizes.items() if found.get(name) != size]
    return ", ".join(damaged) if damaged or Checkpoint.is_checkpoint(checkpoint) else "manifest.json"


def flush_transforms(replay_buffer: ReplayBuffer) -> None:
    """End the running episodes of a buffer."""
    for each in with_members(replay_buffer):
        for transform in each.transform.modules():
            if getattr(transform, "relabels", False):
                transform.flush()


def bytes_of_buffer(replay_buffer: ReplayBuffer) -> int:
    """Return the bytes of the transitions, priorities and transforms of a buffer on the disk."""
    storage, needed = replay_buffer.storage, bytes_of(replay_buffer.transform.state_dict())
    if isinstance(replay_buffer.sampler, PrioritizedSampler):
        needed += PRIORITY * storage.max_size
    if isinstance(storage, TensorStorage) and len(storage):
        stored = bytes_of(storage[:])
        needed += stored if isinstance(storage, PackedStorage) else stored * storage.max_size // len(storage)
    return needed


def bytes_of(state: Any) -> int:
    """Return the bytes of all tensors in nested mappings, lists and tuples."""
    if is_tensor_collection(state):
        return int(state.bytes())
    if isinstance(state, Mapping):
        state = list(state.values())
    return sum(map(bytes_of, state)) if isinstance(state, (list, tuple)) else int(getattr(state, "nbytes", 0))
