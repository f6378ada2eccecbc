"""Records an update, or a policy, once, as a list of tensor operations, and plays it back.

With networks of a few hundred units most of the time goes into the Python between the operations. Played back, the
same operations run with nothing in between, and their results are the same bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping
from numbers import Number
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from torchrl.envs.utils import exploration_type

Update = Callable[..., TensorDictBase]
aten = torch.ops.aten
NOTHING = {aten.detach.default, aten.alias.default}  # is what these do where no gradients are tracked
# Frequent operations, which PyTorch also has as functions: the same, and called in two thirds of the time.
NAMES = (
    "_foreach_add_ _foreach_lerp_ _fused_adam_ add addmm cat clamp div exp log mean min mm mul neg pow relu select "
    "squeeze stack sub sum t tanh unbind unsqueeze"
)
FUNCTIONS = {getattr(aten, name): getattr(torch, name) for name in NAMES.split()}
FUNCTIONS |= {aten.expand: Tensor.expand, aten.view: Tensor.view}


class Captured:
    """An update ``update(batch, *flags)``, or what acts, that is played back from its third call on.

    The first call runs it as it is, because optimizers make their state there; the second notes the operations. There
    is one recording for all batches with the same flags. As with CUDA graphs, tensors are read and written where they
    were, and all that Python does stays as it was recorded: shapes, branches, counters, learning rates, what became of
    gradients that an earlier call had left, or of what left PyTorch (``tolist``, ``numpy``).
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
        if recording is not None:
            return recording.play(batch)
        recording = Recording()
        losses = recording.record(self.update, batch, *flags)
        self.recordings[flags] = recording
        return losses


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
        given = {key: value.view_as(value) for key, value in batch.items(True, True)}  # each one a tensor of its own
        updated = TensorDict(given, batch.batch_size)
        with Recorder(given) as recorder:
            losses = update(updated, *flags)
        returned = dict(losses.items(True, True))
        written = {key: value for key, value in updated.items(True, True) if value is not given.get(key)}
        batch.update(written)
        self.operations = recorder.function(*returned.values(), *written.values())
        self.given, self.kept = list(recorder.given), list(recorder.kept.values())
        self.returned, self.written = list(returned), list(written)
        return losses

    @torch.no_grad()
    def play(self, batch: TensorDictBase) -> TensorDictBase:
        """Run the operations on another batch."""
        results = self.operations.forward(*map(batch.get, self.given), *self.kept)
        batch.update(dict(zip(self.written, results[len(self.returned) :], strict=True)))
        return TensorDict(dict(zip(self.returned, results, strict=False)))


class Recorder(TorchDispatchMode):
    """Notes each operation that PyTorch runs, also for gradients and in optimizers, as a node of a graph.

    Tensors that are neither given nor computed are kept, and read and written where they are: weights, for instance.
    Views of them are made here, once.
    """

    def __init__(self, given: dict[Any, Tensor]):
        super().__init__()
        self.graph = Graph()
        self.given: dict[Any, Node] = {}
        self.kept: dict[Node, Tensor] = {}
        self._nodes: MutableMapping[Tensor, Node] = WeakTensorKeyDictionary()
        self._literals: set[Node] = set()  # computed of numbers in the code: what a branch may depend on
        for key, tensor in given.items():
            self.given[key] = self._nodes[tensor] = self._argument()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation, and note it."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        literal = bool(tensors) and all(map(self._is_literal, tensors))
        if op is aten.lift_fresh.default:  # makes a tensor of a number
            op, literal = aten.clone.default, True  # at each call, because it may be written to
        results = op(*args, **kwargs)
        if isinstance(results, Number):
            if not literal:
                raise RuntimeError(f"{op} asks for a value, which no recording can: capture=false runs this as it is.")
        elif op in NOTHING:
            self._add(results, self._node(args[0]), literal)
        elif op.namespace != "profiler" and not (op.is_view and self._is_kept(args[0])):
            node = self.graph.call_function(op, *tree_map_only(Tensor, self._node, (args, kwargs)))
            if node.is_impure():  # it writes somewhere, or draws
                self._literals.clear()
                literal = False
            if isinstance(results, Tensor):
                self._add(results, node, literal)
            else:
                for i, result in enumerate(results or ()):
                    if isinstance(result, Tensor):
                        self._add(result, self.graph.call_function(operator.getitem, (node, i)), literal)
        return results

    def function(self, *results: Tensor) -> GraphModule:
        """Return what computes the results, as a function of what is given, as far as it is read, and what is kept."""
        self.graph.output(tuple(map(self._node, results)))
        self.graph.eliminate_dead_code()
        for key, node in list(self.given.items()):
            if not node.users:
                self.graph.erase_node(self.given.pop(key))
        for node in self.graph.nodes:
            operation = getattr(node.target, "overloadpacket", None)
            node.target = FUNCTIONS.get(operation, node.target)
        return GraphModule({}, self.graph)

    def _is_kept(self, tensor: Tensor) -> bool:
        return tensor not in self._nodes or self._nodes[tensor] in self.kept

    def _is_literal(self, tensor: Tensor) -> bool:
        if self._is_kept(tensor):
            return tensor.dtype == torch.bool  # which counts as a setting
        return self._nodes[tensor] in self._literals

    def _node(self, tensor: Tensor) -> Node:
        if tensor not in self._nodes:
            self._nodes[tensor] = node = self._argument()
            self.kept[node] = tensor.detach()
        return self._nodes[tensor]

    def _argument(self) -> Node:
        return self.graph.placeholder(f"tensor_{len(self.graph.nodes)}")

    def _add(self, tensor: Tensor, node: Node, literal: bool) -> None:
        node = self._nodes.setdefault(tensor, node)  # what is changed in place is there already
        if literal:
            self._literals.add(node)
