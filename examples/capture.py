"""Records an update once, as a list of tensor operations, and plays it back.

With networks of a few hundred units most of an update's time goes into the Python between its operations. Played
back, the same operations run with nothing in between, and their results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

Update = Callable[..., TensorDictBase]


class Captured:
    """An update ``update(batch, *flags)`` that is played back from its third call on.

    The first call runs it as it is, because optimizers make their state there; the second notes the operations. There
    is one recording for all batches with the same flags. As with CUDA graphs, tensors are read and written where they
    were, and all else stays what it was when it was recorded: shapes, branches, learning rates.
    """

    def __init__(self, update: Update):
        self.update = update
        self.recordings: dict[tuple[bool, ...], Recording | None] = {}

    def __call__(self, batch: TensorDictBase, *flags: bool) -> TensorDictBase:
        """Return what the update returns; what it writes into the batch stands there, too."""
        if flags not in self.recordings:
            self.recordings[flags] = None
            return self.update(batch, *flags)
        recording = self.recordings[flags]
        if recording is None:
            recording = self.recordings[flags] = Recording()
            return recording.record(self.update, batch, *flags)
        return recording.play(batch)


class Recording:
    """The operations of one update."""

    def record(self, update: Update, batch: TensorDictBase, *flags: bool) -> TensorDictBase:
        """Run the update, and note its operations."""
        given = dict(batch.items(include_nested=True, leaves_only=True))
        losses = TensorDict()

        def operations(*tensors: Tensor) -> tuple[Tensor, ...]:
            inputs = dict(zip(given, tensors, strict=True))
            traced = TensorDict(inputs, batch.batch_size)
            losses.update(update(traced, *flags))
            written = {key: value for key, value in traced.items(True, True) if value is not inputs.get(key)}
            batch.update(written)
            self.keys, self.written = list(losses.keys()), list(written)
            return *losses.values(), *written.values()

        try:
            recorded = make_fx(operations)(*given.values())
        except RuntimeError as error:
            raise RuntimeError(f"The update cannot be recorded; capture=false runs it as it is. {error}") from error
        self.given, self.operations = list(given), without_detach(recorded)
        return losses

    @torch.no_grad()
    def play(self, batch: TensorDictBase) -> TensorDictBase:
        """Run the operations on another batch."""
        results = self.operations(*[batch[key] for key in self.given])
        batch.update(dict(zip(self.written, results[len(self.keys) :], strict=True)))
        return TensorDict(dict(zip(self.keys, results, strict=False)))


def without_detach(recorded: GraphModule) -> GraphModule:
    """Leave out what has no effect where no gradients are tracked."""
    for node in recorded.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    return recorded
