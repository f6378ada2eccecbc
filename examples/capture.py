"""Records an update, or a policy, once, as a list of tensor operations, and plays it back.

With networks of a few hundred units most of the time goes into the Python between the operations. Played back, the
same operations run with nothing in between, and their results are the same bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torchrl.envs.utils import exploration_type

Update = Callable[..., TensorDictBase]
VIEWS = {torch.ops.aten.t.default, torch.ops.aten.unbind.int, operator.getitem}


class Captured:
    """An update ``update(batch, *flags)``, or what acts, that is played back from its third call on.

    The first call runs it as it is, because optimizers make their state there; the second notes the operations. There
    is one recording for all batches with the same flags. As with CUDA graphs, tensors are read and written where they
    were, and all else stays what it was when it was recorded: shapes, branches, learning rates.
    """

    def __init__(self, update: Update):
        self.update = update
        self.recordings: dict[tuple[Any, ...], Recording | None] = {}

    def __call__(self, batch: TensorDictBase, *flags: Any) -> TensorDictBase:
        """Return what the update returns; what it writes into the batch stands there, too."""
        if flags not in self.recordings:
            self.recordings[flags] = None
            return self.update(batch, *flags)
        recording = self.recordings[flags]
        if recording is None:
            recording = self.recordings[flags] = Recording()
            return recording.record(self.update, batch, *flags)
        return recording.play(batch)


class CapturedPolicy(TensorDictModuleBase):
    """A policy that is played back, and gives the action alone; one recording for each type of exploration."""

    def __init__(self, policy: TensorDictModuleBase):
        super().__init__()
        self.in_keys, self.out_keys = list(policy.in_keys), ["action"]
        self._act = Captured(lambda data, _: policy(data.copy()).select("action"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the action."""
        acted = self._act(tensordict.select(*self.in_keys), exploration_type())  # for which the policy asks, too
        return tensordict.set("action", acted["action"])


class Recording:
    """The operations of one update."""

    def record(self, update: Update, batch: TensorDictBase, *flags: Any) -> TensorDictBase:
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
            raise RuntimeError(f"This cannot be recorded; capture=false runs it as it is. {error}") from error
        self.given, self.operations = list(given), slimmed(recorded)
        return losses

    @torch.no_grad()
    def play(self, batch: TensorDictBase) -> TensorDictBase:
        """Run the operations on another batch."""
        results = self.operations(*[batch[key] for key in self.given])
        batch.update(dict(zip(self.written, results[len(self.keys) :], strict=True)))
        return TensorDict(dict(zip(self.keys, results, strict=False)))


def slimmed(recorded: GraphModule) -> GraphModule:
    """Leave out what has no effect where no gradients are tracked, and what gives the same in every call."""
    graph, ops = recorded.graph, torch.ops
    for target in (ops.aten.detach.default, ops.aten.alias.default):
        for node in graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
    for target in (ops.profiler._record_function_exit._RecordFunction, ops.profiler._record_function_enter_new.default):
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)
    make_views_once(recorded)
    graph.eliminate_dead_code()
    recorded.recompile()
    return recorded


@torch.no_grad()
def make_views_once(recorded: GraphModule) -> None:
    """Make attributes of the views of weights: these are changed where they are."""
    views: dict[Node, Any] = {}
    for node in recorded.graph.nodes:
        if node.op == "get_attr":
            views[node] = getattr(recorded, node.target)
        elif node.target in VIEWS and node.args[0] in views:
            views[node] = node.target(views[node.args[0]], *node.args[1:])
    for node, view in views.items():
        if isinstance(view, Tensor):
            vars(recorded)[node.name] = view  # as a parameter or a buffer it would be found more slowly
            with recorded.graph.inserting_before(node):
                node.replace_all_uses_with(recorded.graph.create_node("get_attr", node.name))
