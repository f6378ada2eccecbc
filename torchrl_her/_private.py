"""All uses of private attributes of TorchRL, tensordict and torch, each with the reason why no public one exists."""

from __future__ import annotations

import io
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import tensordict
import torch
import torchrl
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import reduce_tensor
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble, TensorStorage
from torchrl.data.replay_buffers import TensorStorageCheckpointer
from torchrl.envs import Compose, EnvBase, MultiStepTransform, Transform

StorageClass = TypeVar("StorageClass", bound=type[TensorStorage])

for package in (torchrl, tensordict):  # in older versions, private methods that this module uses are missing
    version = re.match(r"(\d+)\.(\d+)", package.__version__ or "")
    if version is not None and tuple(map(int, version.groups())) < (0, 14):
        raise ImportError(
            f"torchrl_her needs {package.__name__} 0.14 or newer, but {package.__version__} is installed: "
            "pip install --upgrade torchrl"
        )


def transforms_around(transform: Transform) -> tuple[list[Transform], list[Transform]]:
    """Return the transforms that come before and after ``transform`` in the containers of its buffer or environment.

    A nested ``Compose`` is replaced with its transforms. The public ``Transform.container`` raises an error if the
    transform does not belong to an environment.
    """
    before: list[Transform] = []
    after: list[Transform] = []
    while (reference := transform._container) is not None and isinstance(container := reference(), Compose):
        listed = list(container)
        before[:0] = listed[: listed.index(transform)]
        after += listed[listed.index(transform) + 1 :]
        transform = container
    return [*_flatten(before)], [*_flatten(after)]


def _flatten(transforms: Iterable[Transform]) -> Iterator[Transform]:
    """Yield the transforms, replacing each ``Compose`` with its transforms."""
    for transform in transforms:
        if isinstance(transform, Compose):
            yield from _flatten(transform)
        else:
            yield transform


def ids_around(transform: Transform) -> list[int]:
    """Return the ids of all transforms in the containers of ``transform``, a cheap way to detect a change."""
    ids: list[int] = []
    while (reference := transform._container) is not None and (container := reference()) is not None:
        ids += map(id, container)
        transform = container
    return ids


def set_container_of_buffer(transform: Transform, container: Transform | EnvBase) -> None:
    """Set the container of a transform of replay buffers. An environment raises a ValueError."""
    Transform.set_container(transform, container)
    if transform.parent is not None:
        transform.reset_parent()
        name = type(transform).__name__
        raise ValueError(
            f"{name} is a transform of replay buffers and cannot be a transform of an environment: pass it to the "
            f"buffer, ReplayBuffer(transform={name}(...))."
        )


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks before or after ``forward``; torch has no public function for this."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def warn_user(message: str) -> None:
    """Issue a ``UserWarning`` at the line of the user's program that led to this call.

    A fixed ``stacklevel`` does not reach it: the number of frames of this package, TorchRL and PyTorch in between
    varies.
    """
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or here  # in a thread or process of a library, no frame belongs to the user
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    )


_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(file)), "")
    for file in (__file__, torch.__file__, torchrl.__file__, tensordict.__file__)
)
_STANDARD_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")


def _is_library(filename: str) -> bool:
    is_standard = filename.startswith((_STANDARD_LIBRARY, "<frozen")) and "site-packages" not in filename
    return is_standard or filename.startswith(_LIBRARIES)


def drop_waiting_steps(multi_step: MultiStepTransform) -> None:
    """Drop the steps whose windows are incomplete; ``MultiStepTransform`` has no public method for this."""
    multi_step._buffer = None


def without_compiled_call(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a module without the function that ``Module.compile`` made.

    That function is bound to the original module. ``torch.nn.Module`` drops it when pickling, but TorchRL's
    ``Transform`` does not.
    """
    return state | {"_compiled_call_impl": None}


def gymnasium_env_of(env: EnvBase) -> Any:
    """Return the Gymnasium environment in a TorchRL wrapper, with its Gymnasium wrappers, which ``unwrapped`` drops."""
    return env._env


def make_tensordict(entries: dict[str, Any], batch_size: torch.Size, device: torch.device) -> TensorDict:
    """Make a tensordict of entries that already have the given batch size and device.

    The public constructor checks every entry, which takes a third of the time of reading a batch.
    """
    return TensorDict._new_unsafe(entries, batch_size=batch_size, device=device)


def hooks_of(checkpointer: TensorStorageCheckpointer) -> tuple[list[Any], list[Any]]:
    """Return the save hooks and the load hooks of a checkpointer; it has no public access to them."""
    return checkpointer._save_hooks, checkpointer._load_hooks


def call_with_buffer(function: Callable[..., Any], replay_buffer: Any, *args: Any) -> Any:
    """Return ``function(replay_buffer, *args)``, called in the process of the buffer.

    ``RayReplayBuffer`` and its clients give no public access to the actor that holds the buffer.
    """
    actor = vars(replay_buffer).get("_rb") or vars(replay_buffer).get("_actor")
    if actor is not None:
        import ray

        return ray.get(actor.__ray_call__.remote(function, *args))
    if getattr(replay_buffer, "service_backend", None) == "ray":
        raise RuntimeError("The RayReplayBuffer is closed, so its transform no longer exists.")
    return function(replay_buffer, *args)


def with_members(replay_buffer: ReplayBuffer) -> list[ReplayBuffer]:
    """Return a buffer and, if it is a ``ReplayBufferEnsemble``, its members; it has no public list of them."""
    members = replay_buffer._rbs if isinstance(replay_buffer, ReplayBufferEnsemble) else ()
    return [replay_buffer, *members]


def manages_its_memory(checkpointer: type[TensorStorageCheckpointer]) -> Callable[[StorageClass], StorageClass]:
    """Decorate a ``TensorStorage`` that manages its own memory with public methods.

    TorchRL calls private methods for this, and no public ones:

    - ``allocate(data)`` allocates memory for transitions like ``data``.
    - ``check_write(data)`` is called before the writer moves its cursor. An error in ``set`` would come too late.

    ``checkpointer`` is the class that saves the storage, unless the buffer has another checkpointer.
    """

    def decorate(storage: StorageClass) -> StorageClass:
        max_size = storage._max_size_along_dim0

        def init(self: Any, data: TensorDictBase) -> None:
            self.allocate(data)

        def checked_max_size(self: Any, *, single_data: Any = None, batched_data: Any = None) -> int:
            data = batched_data if single_data is None else single_data
            if data is not None:
                self.check_write(data)
            return max_size(self, single_data=single_data, batched_data=batched_data)

        storage._init = init
        storage._max_size_along_dim0 = checked_max_size
        storage._default_checkpointer = checkpointer
        return storage

    return decorate


def entries_of(storage: TensorStorage) -> Any:
    """Return the memory of all transitions, written or not, ``[size, ...]``.

    Samplers and checkpointers read it. The public ``storage[:]`` contains written transitions only.
    """
    return storage._storage


def set_entries(storage: TensorStorage, entries: TensorDictBase) -> None:
    """Set the memory of all transitions; the constructor of ``TensorStorage`` would count them as written."""
    storage._storage = entries
    storage.initialized = True


def without_entries(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a ``TensorStorage`` without its entries.

    If the entries are views of the same rows, pickling each view would copy the memory of all rows.
    """
    return {name: value for name, value in state.items() if name != "_storage"}


def count_of(storage: TensorStorage) -> int:
    """Return the number of stored transitions; the public ``len(storage)`` cannot be compiled with ``fullgraph``."""
    return storage._len


def set_count(storage: TensorStorage, count: int) -> None:
    """Set the number of stored transitions, which has no public setter."""
    storage._len = count
    storage._bump_mutation_revision()  # for samplers with a cache


def note_write(storage: TensorStorage, cursor: Any, data: Any, set_cursor: bool) -> None:
    """Record that ``data`` was written at ``cursor``; with ``set_cursor``, the number of transitions grows.

    The public ``set`` of ``TensorStorage`` does this, but also writes the data.
    """
    if set_cursor:
        storage._set_last_cursor(cursor)
        storage._get_new_len(data, cursor)
    storage._bump_mutation_revision()  # for samplers with a cache


_KEPT: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()  # for each process that starts


class _SharingPickler(ForkingPickler):
    """Pickles tensors in shared memory with file descriptors of their own, which exist until the process has started.

    Opening shared memory duplicates its descriptor, and torch has no public function for this.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_cpu or get_sharing_strategy() != "file_descriptor":
            return NotImplemented
        storage = value.untyped_storage()
        descriptor, size = storage._share_fd_cpu_()
        again = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)  # type: ignore[attr-defined]
        tensor = value.new_empty(0).set_(again, value.storage_offset(), value.shape, value.stride())
        _KEPT.setdefault(get_spawning_popen(), []).append(tensor)
        return reduce_tensor(tensor)


def pickled_for_process(state: dict[str, Any]) -> bytes:
    """Return the pickled state of an object whose tensors are in shared memory, for the process that is starting.

    Collectors pickle environments with cloudpickle, which would copy shared tensors. A process cannot be spawned with
    the same file descriptor twice, but its environments and its buffer can contain the same object.
    """
    file = io.BytesIO()
    _SharingPickler(file).dump(state)
    return file.getvalue()
