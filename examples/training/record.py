"""Read this if `speedup=record` fails: it replays the tensor operations of an update without Python in between."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import BuiltinFunctionType, MethodDescriptorType
from unittest.mock import patch

import torch
from tensordict import TensorDict, TensorDictBase
from torch.fx.experimental import proxy_tensor


class Recorded:
    """Records the second call of a function and replays it for later batches, which must have the same shape.

    The first call creates the state of the optimizer. If recording fails, this and all later calls run the function.
    Numbers and branches in Python are recorded with the values that they have in the second call.
    """

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase]):
        self.function, self.replay, self.calls = function, function, 0

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:  # noqa: D102
        self.calls += 1
        if self.calls != 2:
            return self.replay(batch)
        keys, results = list(batch.keys(True, True)), TensorDict()

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results.update(self.function(TensorDict(dict(zip(keys, tensors, strict=True)), batch.batch_size)))
            return list(results.values(True, True))

        no_checks = patch("torch.distributions.Distribution._validate_args", False)  # checks read values
        no_metadata = patch.object(proxy_tensor, "extract_val", lambda *_, **__: None)  # takes most of the time
        try:
            with no_checks, no_metadata, patch("torch.autograd.profiler.record_function", nullcontext):
                graph = proxy_tensor.make_fx(function, _allow_non_fake_inputs=True)(*map(batch.get, keys))
        except Exception as error:
            warnings.warn(f"speedup=record: not recorded, so it runs as with speedup=none: {error}", stacklevel=2)
            return self.function(batch)
        outputs, play = list(results.keys(True, True)), torch.no_grad()(simplify(graph).forward)
        self.replay = lambda data: TensorDict(dict(zip(outputs, play(*map(data.get, keys)), strict=True)))
        return results


def is_equivalent(operator: torch._ops.OpOverload) -> bool:
    """Return whether the function of the same name in `torch` does the same with the same arguments."""
    schema = operator._schema
    # torch.index_put does not accept None as an index. Losses of `torch` have another default reduction.
    return schema.name != "aten::index_put" and all(each.name != "reduction" for each in schema.arguments)


def simplify(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Remove operations without effect, and replace others with faster equivalents."""
    # An operation like `unsqueeze_` changes the shape of one alias, but not of the others.
    reshapes = any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in module.graph.nodes)
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        function = getattr(torch, name, None) or getattr(torch.Tensor, name, None)
        if name in ("alias", "detach") and not reshapes:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif isinstance(function, BuiltinFunctionType | MethodDescriptorType) and is_equivalent(node.target):
            node.target = function
    return torch.fx.GraphModule(module, module.graph)
