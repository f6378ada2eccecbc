"""Normalized inputs for networks: observations and goals, concatenated, with running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import EnvBase, Transform

from torchrl_her._private import refuse_environment
from torchrl_her.episodes.write import map_goals
from torchrl_her.goals.write_lock import WriteLock
from torchrl_her.keys import MASK, HERKeys, check_keys, get_entry, is_key

SMALLEST_SCALE = 0.01  # as in OpenAI Baselines, so that constant features do not explode


class NormalizedInputs(Transform):
    """Concatenate, normalize and clip the inputs of networks.

    One object is used in two places: as the first layer of the policy, which reads raw observations and goals, and as a
    transform of the buffer, after `HERTransform`. It sets ``out_key`` at the root and, in sampled transitions, also
    under ``"next"``: ``(entries - mean) / scale``, between ``-clip`` and ``clip``, ``[*batch, features]``. Actor and
    critic read ``out_key``. Pass a loss the actor alone, without this layer: a loss copies statistics that it contains.

    Call `update` with each write. Environment and buffer keep the raw entries, from which rewards are computed, so each
    sample is normalized with the statistics of the moment. Achieved goals count as desired goals, because relabelling
    makes them desired goals. The method is described by
    [Plappert et al. (2018)](https://arxiv.org/abs/1802.09464).

    The first call sets the sizes of the entries. Call the object once before processes share it, and before you read
    ``len(inputs.mean)``, the number of features: ``inputs(env.fake_tensordict())``.

    Keyword Args:
        in_keys (list of NestedKey, optional): the entries to concatenate, without ``"next"``. They must include the
            desired goal. Default: ``["observation", keys.desired_goal]``.
        out_key (NestedKey): the key of the result. Default: ``"inputs"``.
        keys (HERKeys): the keys of the goals and of the mask for padding. Default: ``HERKeys()``.
        goal_fn (Callable[[Tensor], Tensor], optional): as in `HERTransform`.
        clip (float): the largest absolute value of the result. ``math.inf`` disables clipping. Default: 5.0.

    Attributes:
        mean (Tensor): the mean of each feature, ``[features]``; 0 before the first update.
        scale (Tensor): the standard deviation of each feature, ``[features]``, at least 0.01; 1 before the first
            update, so until then, inputs are only concatenated and clipped.

    Raises:
        ValueError: if an argument is out of range, if the sizes of entries differ from those of the first call, if
            entries of an update are NaN or infinite (the statistics do not change), if the object is added to an
            environment, or if it comes before `HERTransform` in a buffer (raised by the first write).
        TypeError: if an argument has the wrong type.
        KeyError: if an entry is missing.
        RuntimeError: if processes share the buffer before the first call.

    Examples:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.envs import Compose, GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform, NormalizedInputs
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> inputs = NormalizedInputs()
        >>> actor = TensorDictModule(torch.nn.Linear(4 + 2, 2), in_keys=["inputs"], out_keys=["action"])
        >>> policy = TensorDictSequential(inputs, actor)  # for the collector; the loss gets the actor
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000),
        ...     transform=Compose(HERTransform(EnvReward(env), capacity=1000), inputs),
        ...     batch_size=32,
        ... )
        >>> data = env.rollout(50, policy)
        >>> _ = rb.extend(data)
        >>> inputs.update(data)
        >>> batch = rb.sample()
        >>> batch["inputs"].shape, batch["next", "inputs"].shape
        (torch.Size([32, 6]), torch.Size([32, 6]))
    """

    requires_shared_write_state = True  # TorchRL then calls share_memory_ for buffers that processes share

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey = "inputs",
        *,
        keys: HERKeys = HERKeys(),
        goal_fn: Callable[[Tensor], Tensor] | None = None,
        clip: float = 5.0,
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
        if not clip > 0:
            raise ValueError(f"clip must be positive, got {clip}.")
        super().__init__(in_keys=in_keys, out_keys=[out_key])
        self.keys, self.goal_fn, self.clip = keys, goal_fn, float(clip)
        self.register_buffer("mean", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)
        # Not a buffer, so that casts of the policy do not change its dtype.
        self._sums = torch.zeros(3, 0, dtype=torch.float64)  # count, sum and sum of squares of each feature
        self._sizes: list[int] = []  # of the entries; empty before the first call
        self._lock = WriteLock()

    def set_container(self, container: Transform | EnvBase) -> None:
        """Check that the container is no environment, and forget it: a copy of a policy does not copy the buffer."""
        super().set_container(container)
        refuse_environment(self)
        self.reset_parent()

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
            inputs = (torch.cat([value.to(mean.dtype) for value in values], -1) - mean) / scale
            tensordict.set(unravel_key((*place, *self.out_keys)), inputs.clamp(-self.clip, self.clip))
        return tensordict

    @torch.no_grad()
    def update(self, data: TensorDictBase) -> None:
        """Update the statistics with collected transitions ``[*batch]``.

        The entries under ``"next"`` are counted, without padding. The statistics of the desired goal also count the
        achieved goals.
        """
        keys, count = self.keys, data.batch_size.numel()
        if not count:
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
        sums = [sums_of(each, key) for each, key in zip(values, self.in_keys, strict=True)]
        sums[goal] += sums_of(goals, keys.achieved_goal)
        with self._lock:
            self._sums += torch.cat(sums, 1)
            self._compute()

    def _set_sizes(self, sizes: list[int], device: torch.device | None = None) -> None:
        """Set the sizes of the entries in the first call, and check them in later ones."""
        if not self._sizes:
            self._sizes, features = sizes, sum(sizes)
            with torch.inference_mode(False):  # an evaluation may come first, and later updates are in place
                self._sums = torch.zeros(3, features, dtype=torch.float64)
                self.mean, self.scale = torch.zeros(features, device=device), torch.ones(features, device=device)
        elif sizes != self._sizes:
            raise ValueError(
                f"The entries {self.in_keys} have {sizes} features, but {self._sizes} in the first call of this "
                "NormalizedInputs. Create one object for each kind of environment."
            )

    def _compute(self) -> None:
        """Compute mean and scale from the sums, in place, because processes and recorded functions share them."""
        count = self._sums[0]
        mean, mean_square = self._sums[1:] / count.clamp_min(1)
        scale = (mean_square - mean.square()).clamp_min(SMALLEST_SCALE**2).sqrt()
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(count > 0, scale, 1.0))

    def share_memory_(self) -> NormalizedInputs:
        """Move the statistics into shared memory. TorchRL calls this method for buffers shared between processes."""
        if not self._sizes:
            raise RuntimeError(
                "Processes can share NormalizedInputs only after its first call, which sets the number of features: "
                "call inputs(env.fake_tensordict()) before you create the buffer."
            )
        if not self._lock.is_shared:
            for tensor in (self._sums, self.mean, self.scale):
                tensor.share_memory_()
            self._lock.share_memory_()
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return the statistics for ``state_dict``."""
        with self._lock:
            return {"sizes": list(self._sizes), "sums": self._sums.clone()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state`."""
        if state["sizes"]:
            self._set_sizes(list(state["sizes"]))
            with self._lock:
                self._sums.copy_(state["sums"])
                self._compute()
        elif self._sizes:  # it was saved before its first call
            self._sums.zero_()
            self._compute()


def sums_of(values: Tensor, key: NestedKey) -> Tensor:
    """Return count, sum and sum of squares, ``[3, features]``, of the values ``[n, features]`` of an entry."""
    values = values.to(torch.float64)
    sums = torch.stack([torch.ones_like(values), values, values.square()]).sum(1).cpu()
    if not sums.isfinite().all():
        raise ValueError(
            f"The entry {unravel_key(('next', key))!r} has NaN or infinite values, and so would all later inputs. The "
            "statistics were left unchanged. Correct the environment."
        )
    return sums
