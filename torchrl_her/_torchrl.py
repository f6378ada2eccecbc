"""Every use of a private attribute of TorchRL, tensordict or torch, with the reason why there is no public way."""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from types import FrameType
from typing import Any

import torch
import torchrl
from tensordict import TensorDict, TensorDictBase
from tensordict import __file__ as td_file
from torch import nn
from torchrl.data import TensorStorage
from torchrl.data.replay_buffers import TensorStorageCheckpointer
from torchrl.envs import EnvBase, MultiStepTransform, Transform


def transforms_around(transform: Transform) -> tuple[list[Transform], list[Transform]]:
    """Return the transforms that a buffer lists before a transform, and those that it lists after it.

    The public ``Transform.container`` raises an error where no environment contains the transform.
    """
    before: list[Transform] = []
    after: list[Transform] = []
    while (reference := transform._container) is not None and (container := reference()) is not None:
        listed = list(container)
        before[:0] = listed[: listed.index(transform)]
        after += listed[listed.index(transform) + 1 :]
        transform = container
    return before, after


def ids_around(transform: Transform) -> list[int]:
    """Return the ids of the transforms that the containers of a transform list: a cheap sign that one was changed."""
    ids: list[int] = []
    while (reference := transform._container) is not None and (container := reference()) is not None:
        ids += map(id, container)
        transform = container
    return ids


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks are called before or after the forward of a module. There is no public way to ask."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def warn_user(message: str) -> None:
    """Warn at the line of the user's program that led here, which no fixed ``stacklevel`` reaches.

    Between that line and this one, there are lines of this package, of TorchRL and of PyTorch.
    """
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or here  # a thread or process of a library has no line of the user
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    )


_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(file)), "") for file in (__file__, torch.__file__, torchrl.__file__, td_file)
)
_STANDARD_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")


def _is_library(filename: str) -> bool:
    is_standard = filename.startswith((_STANDARD_LIBRARY, "<frozen")) and "site-packages" not in filename
    return is_standard or filename.startswith(_LIBRARIES)


def drop_waiting_steps(multi_step: MultiStepTransform) -> None:
    """Drop the steps that wait until their windows are complete; ``MultiStepTransform`` has no public reset."""
    multi_step._buffer = None


def without_compiled_call(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a module without the function that ``Module.compile`` made, which is bound to that module.

    ``torch.nn.Module`` drops it when it is pickled, but not from the state that a subclass copies.
    """
    return state | {"_compiled_call_impl": None}


def gymnasium_env_of(env: EnvBase) -> Any:
    """Return the environment in a TorchRL wrapper, with its own wrappers; ``unwrapped`` would leave these out."""
    return env._env


def make_tensordict(entries: dict[str, Any], batch_size: torch.Size, device: torch.device) -> TensorDict:
    """Make a tensordict of entries that are known to have the batch size and the device.

    The public constructor checks every entry, which takes a third of the time of reading a batch.
    """
    return TensorDict._new_unsafe(entries, batch_size=batch_size, device=device)


def hooks_of(checkpointer: TensorStorageCheckpointer) -> tuple[list[Any], list[Any]]:
    """Return the hooks that a checkpointer calls when it saves and when it loads; it has no public list of them."""
    return checkpointer._save_hooks, checkpointer._load_hooks


class CustomTensorStorage(TensorStorage):
    """A ``TensorStorage`` that allocates, checks and counts its transitions under public names.

    TorchRL's buffers, writers and samplers call the private methods that are overridden here and read the private
    attributes; a storage with memory of its own has no other place to join in.
    """

    shared_init = False  # read when a storage that is not allocated is sent to another process
    checkpointer_class: type[TensorStorageCheckpointer]
    max_size: int
    device: torch.device | str

    # Methods for subclasses

    def allocate(self, data: TensorDictBase) -> None:
        """Allocate memory for transitions like ``data``, and set `entries`."""

    def check_write(self, data: Any) -> None:
        """Raise an error if ``data`` cannot be stored. Called before the writer moves its cursor."""

    # Private state under public names

    @property
    def entries(self) -> TensorDictBase:
        """The memory of all transitions, written or not, ``[size, ...]``: what samplers and checkpointers read."""
        return self._storage

    @entries.setter
    def entries(self, entries: TensorDictBase) -> None:
        self._storage = entries
        self.initialized = True

    @property
    def count(self) -> int:
        """How many transitions are stored."""
        return self._len

    @count.setter
    def count(self, count: int) -> None:
        self._len = count
        self._bump_mutation_revision()

    def note_write(self, cursor: Any, data: Any, set_cursor: bool) -> None:
        """Record that ``data`` was written at ``cursor``; with ``set_cursor`` the storage grows by it."""
        if set_cursor:
            self._set_last_cursor(cursor)
            self._get_new_len(data, cursor)
        self._bump_mutation_revision()  # for samplers that cache what they read

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without `entries`: each view would bring the memory of all rows."""
        state = super().__getstate__()
        if self.initialized:
            del state["_storage"]
        return state

    # TorchRL's private methods

    def _default_checkpointer(self) -> TensorStorageCheckpointer:
        return self.checkpointer_class()

    def _init(self, data: TensorDictBase) -> None:
        self.allocate(data)

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        data = batched_data if single_data is None else single_data
        if data is not None:
            self.check_write(data)
        return super()._max_size_along_dim0(single_data=single_data, batched_data=batched_data)
