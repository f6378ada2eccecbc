"""Normalized inputs for networks: observations and goals, concatenated, with running statistics."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs import EnvBase, Transform

from torchrl_her._private import pickled_for_process, warn_user
from torchrl_her.episodes.memory import WriteLock
from torchrl_her.episodes.write import map_goals
from torchrl_her.keys import MASK, HERKeys, check_keys, get_entry, is_key

SMALLEST_SCALE = 0.01  # as in OpenAI Baselines, so that constant features do not explode
LARGEST = torch.finfo(torch.float32).max
SAMPLED_WITHOUT_UPDATE = 10_000  # transitions
CHECKED_WRITE = 30  # the number of the write that is checked; in earlier ones, inputs can be raw
UPDATES_WITHOUT_WRITE = 10
IN_DOUBLE = (torch.float64, torch.int64, torch.int32)  # dtypes whose values need more than single precision


class NormalizedInputs(Transform):
    """Concatenate, normalize and clip the inputs of networks.

    One object is used in two places: as a transform of the environments, and as a transform of the buffer, after
    `HERTransform` or `HindsightAugmentation`. It sets ``out_key``, which actor and critic read, at the root and under
    ``"next"``: ``(entries - mean) / scale``, between ``-clip`` and ``clip``, ``[*batch, features]``.

    Each write to the buffer updates the statistics. The buffer stores the raw entries, from which rewards are computed,
    and leaves ``out_key`` out: each sample is normalized with the statistics of the moment. Achieved goals count as
    desired goals, because relabelling makes them desired goals. The method is described by
    [Plappert et al. (2018)](https://arxiv.org/abs/1802.09464).

    The object can also be the first layer of a policy: ``TensorDictSequential(inputs, actor)`` reads raw observations
    and goals, for example on a robot. Pass a loss actor and critic without it: some losses copy statistics.

    Its first use sets the sizes of the entries. Processes that collect share the statistics if the object was used
    before they start: create an environment with it, or call ``inputs(env.fake_tensordict())``.

    Keyword Args:
        in_keys (list of NestedKey, optional): the entries to concatenate, without ``"next"``. They must include the
            desired goal. Default: ``["observation", keys.desired_goal]``.
        out_key (NestedKey): the key of the result. Default: ``"inputs"``.
        keys (HERKeys): the keys of the goals and of the mask for padding. Default: ``HERKeys()``.
        goal_fn (Callable[[Tensor], Tensor], optional): as in `HERTransform`.
        clip (float): the largest absolute value of the result. ``math.inf`` disables clipping. Default: 5.0.
        normalize (bool): if ``False``, inputs are only concatenated and clipped, and `update` has no effect. Default:
            ``True``.

    Attributes:
        mean (Tensor): the mean of each feature, ``[features]``; 0 before the first update.
        scale (Tensor): the standard deviation of each feature, ``[features]``, at least 0.01; 1 before the first
            update, so until then, inputs are only concatenated and clipped.

    Raises:
        ValueError: if an argument is out of range, if the sizes of entries differ from those of the first use, if
            entries of an update are NaN, infinite or beyond the range of ``float32`` (the statistics do not change, and
            nothing is written), if statistics are loaded with ``normalize=False`` or for other entries, or if it comes
            before the hindsight transform in a buffer (raised by the first write).
        TypeError: if an argument has the wrong type.
        KeyError: if an entry is missing.
        RuntimeError: if processes share the buffer, or the object is sent to a new process, before its first use.

    Warns:
        UserWarning: if 10,000 transitions were sampled without an update, if environments use a copy or another
            object, which receives no updates, or if only the environments, but not the buffer, use the object.

    Examples:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.envs import Compose, GymEnv, TransformedEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform, NormalizedInputs
        >>> inputs = NormalizedInputs()
        >>> env = TransformedEnv(GymEnv("torchrl_her/PointReach-v0"), inputs)
        >>> env.observation_spec["inputs"].shape
        torch.Size([6])
        >>> actor = TensorDictModule(torch.nn.Linear(6, 2), in_keys=["inputs"], out_keys=["action"])
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000),
        ...     transform=Compose(HERTransform(EnvReward(env), capacity=1000), inputs),
        ...     batch_size=32,
        ... )
        >>> _ = rb.extend(env.rollout(50, actor))
        >>> batch = rb.sample()
        >>> batch["inputs"].shape, batch["next", "inputs"].shape
        (torch.Size([32, 6]), torch.Size([32, 6]))
    """

    writes_next = True  # it sets its entry under "next", too
    counts_writes = True  # the hindsight transform calls count_write
    requires_shared_write_state = True  # TorchRL then calls share_memory_ for buffers that processes share

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey = "inputs",
        *,
        keys: HERKeys = HERKeys(),
        goal_fn: Callable[[Tensor], Tensor] | None = None,
        clip: float = 5.0,
        normalize: bool = True,
    ):
        check_keys(keys)
        in_keys = ["observation", keys.desired_goal] if in_keys is None else in_keys
        if isinstance(in_keys, str) or not all(map(is_key, (*in_keys, out_key))):
            raise TypeError(f"in_keys must be a list of keys and out_key a key, got {in_keys!r} and {out_key!r}.")
        in_keys, out_key = [unravel_key(key) for key in in_keys], unravel_key(out_key)
        if len({*in_keys, out_key}) <= len(in_keys):
            raise ValueError(f"in_keys and out_key must differ from each other, got {in_keys} and {out_key!r}.")
        if keys.desired_goal not in in_keys:
            raise ValueError(
                f"in_keys must include the desired goal, {keys.desired_goal!r}, got {in_keys}. If it has another key, "
                "pass keys=HERKeys(desired_goal=...)."
            )
        if not (goal_fn is None or callable(goal_fn)) or not isinstance(normalize, bool):
            raise TypeError(f"goal_fn must be a function and normalize a bool, got {goal_fn!r} and {normalize!r}.")
        if isinstance(clip, str) or not clip > 0:
            raise ValueError(f"clip must be positive, got {clip!r}.")
        super().__init__(in_keys=in_keys, out_keys=[out_key])
        self.keys, self.goal_fn, self.clip, self.normalize = keys, goal_fn, float(clip), normalize
        self.register_buffer("mean", None, persistent=False)
        self.register_buffer("_mean_error", None, persistent=False)  # the mean in float64, minus `mean`
        self.register_buffer("scale", None, persistent=False)
        # Not a buffer, so that casts of the policy do not change its dtype.
        self._moments = torch.zeros(3, 0, dtype=torch.float64)  # see moments_of
        self._sizes: list[int] = []  # of the entries; empty before the first use
        self._sampled = 0  # transitions, until the check for a missing update
        self._writes = self._own_updates = 0  # calls of `count_write` and of `update`
        self._is_in_env = False
        self._process = os.getpid()  # the process that created it
        self._lock = WriteLock()

    def set_container(self, container: Transform | EnvBase) -> None:
        """Do not remember the container: there are several, and a copy of the object does not copy the buffer."""

    def clone(self) -> NormalizedInputs:
        """Return the same object, which belongs to no container."""
        return self

    # In environments

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Add the spec of the inputs."""
        self._is_in_env = True
        batch = observation_spec.shape
        shapes = [observation_spec[key].shape[len(batch) :] for key in self.in_keys]
        self._set_sizes([shape.numel() for shape in shapes], observation_spec.device)
        spec = Unbounded((*batch, len(self.mean)), device=observation_spec.device, dtype=self.mean.dtype)
        observation_spec[self.out_keys[0]] = spec
        return observation_spec

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self._process != os.getpid() and not self._lock.is_shared and self.normalize:
            self._process = os.getpid()
            warn_user(
                "The environments of this process use a copy of NormalizedInputs that receives no updates of the "
                "statistics. Start the process with the method 'spawn'; with Ray, leave NormalizedInputs out of the "
                "environment, and make it the first layer of the policy."
            )
        return self.forward(tensordict_reset)

    # In policies and buffers

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the inputs at the root and, in transitions ``[*batch]``, under ``"next"``; return the same object."""
        batch = tensordict.batch_size
        for place in ((), ("next",)):
            if place and tensordict.get("next", None) is None:
                continue  # a policy acts before there is a next state
            values = [get_entry(tensordict, unravel_key((*place, key)), "in_keys") for key in self.in_keys]
            values = [value.reshape(*batch, value.shape[len(batch) :].numel()) for value in values]
            self._set_sizes([value.shape[-1] for value in values], values[0].device)
            mean, scale = self.mean.to(values[0].device), self.scale.to(values[0].device)
            dtype = torch.float64 if any(value.dtype in IN_DOUBLE for value in values) else mean.dtype
            inputs = torch.cat([value.to(dtype) for value in values], -1) - mean
            inputs = inputs.sub_(self._mean_error.to(inputs.device)).to(scale.dtype)
            inputs = inputs.div_(scale).clamp(-self.clip, self.clip)
            tensordict.set(unravel_key((*place, *self.out_keys)), inputs)
            if place and not torch.compiler.is_compiling() and self._sampled < SAMPLED_WITHOUT_UPDATE:
                self._count_sampled(batch.numel())
        return tensordict

    def _count_sampled(self, count: int) -> None:
        """Count sampled transitions, and warn once if there was no update. It reads memory of the host only."""
        self._sampled += count
        if self._sampled >= SAMPLED_WITHOUT_UPDATE and self.normalize and not self._moments[0].any():
            warn_user(
                f"{self._sampled:,} transitions were sampled from NormalizedInputs without an update, so its inputs "
                "are not normalized. Write through a buffer in which NormalizedInputs comes after HERTransform, or "
                "call update(data) once for a data set. NormalizedInputs(normalize=False) only concatenates and clips."
            )

    def count_write(self, tensordict: TensorDictBase, is_dummy: bool) -> TensorDictBase:
        """Update the statistics with transitions ``[*batch]`` of a write, and return them without the inputs.

        The hindsight transform of the buffer calls this method. The dummy with which collectors set up a shared buffer
        does not count.
        """
        if not is_dummy:
            self._writes += 1
            if self._writes == CHECKED_WRITE and self.normalize:
                self._check_environments(tensordict.reshape(-1))
            self._update(tensordict)
        key = self.out_keys[0]
        return tensordict.exclude(key, unravel_key(("next", key)))

    def _check_environments(self, rows: TensorDictBase) -> None:
        """Warn if the inputs of all written transitions ``[n]`` are raw, although there are statistics."""
        given = rows.get(self.out_keys[0], None)
        if given is None:
            return
        raw = torch.cat([rows.get(key).reshape(len(rows), -1) for key in self.in_keys], 1).clamp(-self.clip, self.clip)
        normalized = self.forward(rows.select(*self.in_keys)).get(self.out_keys[0])
        if torch.equal(given, raw.to(given.dtype)) and not torch.equal(given, normalized):
            warn_user(
                f"The environments write {self.out_keys[0]!r} with a NormalizedInputs that receives no updates, while "
                "the buffer has another one: the policy reads raw inputs, and the loss normalized ones. Create one "
                "object, and pass it to all environments and to the buffer (in YAML: torchrl_her.configs.shared)."
            )

    def update(self, data: TensorDictBase) -> None:
        """Update the statistics with transitions ``[*batch]``; without effect if ``normalize=False``.

        Call it only for transitions that are not written to a buffer with this object, such as an adopted data set.
        The entries under ``"next"`` are counted, without padding. The statistics of the desired goal also count the
        achieved goals.
        """
        self._own_updates += 1
        is_in_buffer = self._writes or self._sampled
        if self._own_updates == UPDATES_WITHOUT_WRITE and self._is_in_env and not is_in_buffer:
            warn_user(
                "NormalizedInputs is a transform of environments and receives updates, but no buffer writes through "
                f"it, so samples keep {self.out_keys[0]!r} with the goals from before relabelling. Add it to the "
                "buffer, Compose(HERTransform(...), inputs), and leave out update."
            )
        self._update(data)

    @torch.no_grad()
    def _update(self, data: TensorDictBase) -> None:
        keys, count = self.keys, data.batch_size.numel()
        if not count or not self.normalize:
            return

        def rows(key: NestedKey, name: str) -> Tensor:
            value = get_entry(data, key, name)
            return value.reshape(count, *value.shape[data.ndim :])

        values = [rows(unravel_key(("next", key)), "in_keys").reshape(count, -1) for key in self.in_keys]
        goals = map_goals(rows(keys.next_achieved_goal, "achieved_goal"), self.goal_fn).reshape(count, -1)
        self._set_sizes([each.shape[1] for each in values], values[0].device)
        goal = self.in_keys.index(keys.desired_goal)
        if goals.shape[1] != self._sizes[goal]:
            raise ValueError(
                f"The achieved goals have {goals.shape[1]} features and the desired goals {self._sizes[goal]}: pass "
                "goal_fn, which maps the achieved entry to a goal."
            )
        if keys.mask is not None and (keys.mask != MASK or data.get(MASK, None) is not None):
            kept = rows(keys.mask, "mask").reshape(count).bool()
            values, goals = [each[kept] for each in values], goals[kept]
        entries = [*zip((*self.in_keys, keys.achieved_goal), (*values, goals), strict=True)]
        values[goal] = torch.cat([values[goal], goals])
        moments = torch.cat([moments_of(each) for each in values], 1)
        if not moments[1:].abs().max() <= LARGEST:  # or NaN
            refuse_extremes(entries)
        with self._lock:
            self._moments.copy_(merged(self._moments, moments))
            self._compute()

    def _set_sizes(self, sizes: list[int], device: torch.device | None = None) -> None:
        """Set the sizes of the entries in the first use, and check them in later ones."""
        if not self._sizes:
            self._sizes, features = sizes, sum(sizes)
            with torch.inference_mode(False):  # an evaluation may come first, and later updates are in place
                self._moments = torch.zeros(3, features, dtype=torch.float64)
                self.mean, self.scale = torch.zeros(features, device=device), torch.ones(features, device=device)
                self._mean_error = torch.zeros(features, device=device)
        elif sizes != self._sizes:
            raise ValueError(
                f"The entries {self.in_keys} have {sizes} features, but {self._sizes} in the first use of this "
                "NormalizedInputs. Create one object for each kind of environment."
            )

    def _compute(self) -> None:
        """Compute mean and scale in place, because processes and recorded functions share them."""
        count, mean, squares = self._moments
        self.mean.copy_(mean)
        self._mean_error.copy_(mean - mean.to(self.mean.dtype))
        scale = (squares / count.clamp_min(1)).sqrt().clamp_min(SMALLEST_SCALE)
        self.scale.copy_(torch.where(count > 0, scale, 1.0))

    def __getstate__(self) -> dict[str, Any] | bytes:
        state: dict[str, Any] = super().__getstate__()
        # Collectors send the weights of a policy on their own, and its modules on the device "meta".
        is_without_weights = self.mean is not None and self.mean.is_meta
        if get_spawning_popen() is None or not self.normalize or is_without_weights:
            return state | {"_lock": WriteLock()}  # only processes that start can share a lock
        self.share_memory_()
        return pickled_for_process(state)

    def __setstate__(self, state: dict[str, Any] | bytes) -> None:
        super().__setstate__(pickle.loads(state) if isinstance(state, bytes) else state)

    def share_memory_(self) -> NormalizedInputs:
        """Move the statistics into shared memory. TorchRL calls this method for buffers shared between processes."""
        if not self._sizes:
            raise RuntimeError(
                "Processes can share NormalizedInputs only after its first use, which sets the number of features: "
                "call inputs(env.fake_tensordict()) before you create the collector or a buffer with shared=True."
            )
        if not self._lock.is_shared:
            for tensor in (self._moments, self.mean, self._mean_error, self.scale):
                tensor.share_memory_()
            self._lock.share_memory_()
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return the statistics for ``state_dict``."""
        with self._lock:
            entries = [str(key) for key in self.in_keys]
            return {"entries": entries, "sizes": list(self._sizes), "moments": self._moments.clone()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state`."""
        if not self.normalize and state["moments"][0].any():
            raise ValueError(
                "The loaded statistics belong to NormalizedInputs that normalize, but this object was created with "
                "normalize=False. Create it with the same argument."
            )
        if state["entries"] != (entries := [str(key) for key in self.in_keys]):
            raise ValueError(
                f"The loaded statistics belong to the entries {state['entries']}, but in_keys are {entries}. Create "
                "the object with the same entries in the same order."
            )
        if state["sizes"]:
            self._set_sizes(list(state["sizes"]))
            with self._lock:
                self._moments.copy_(state["moments"])
                self._compute()
        elif self._sizes:  # it was saved before its first use
            self._moments.zero_()
            self._compute()


def moments_of(values: Tensor) -> Tensor:
    """Return the moments of the values ``[n, features]`` of an entry, on the CPU.

    Moments ``[3, features]`` are the count, the mean and the sum of squared deviations from the mean. A sum of squares
    would lose the variance of features that are far from 0.
    """
    count = len(values)
    if not count:  # all rows are padding
        return torch.zeros(3, values.shape[1], dtype=torch.float64)
    variance, mean = torch.var_mean(values.to(torch.float64), 0, correction=0)
    return torch.stack([torch.full_like(mean, count), mean, variance * count]).cpu()


def merged(first: Tensor, second: Tensor) -> Tensor:
    """Return the moments of two sets of values together, by the formula of Chan et al. (1979)."""
    count = first[0] + second[0]
    share = second[0] / count.clamp_min(1)
    difference = second[1] - first[1]
    squares = first[2] + second[2] + difference.square() * first[0] * share
    return torch.stack([count, first[1] + difference * share, squares])


def refuse_extremes(entries: list[tuple[NestedKey, Tensor]]) -> None:
    """Raise an error that names the first entry with NaN, infinite or too large values."""
    for key, values in entries:
        if not (values.abs() <= LARGEST).all():
            wrong = "values beyond the range of float32" if values.isfinite().all() else "NaN or infinite values"
            raise ValueError(
                f"The entry {unravel_key(('next', key))!r} has {wrong}, and all later inputs would be wrong. The "
                "statistics were left unchanged. Correct the environment."
            )
