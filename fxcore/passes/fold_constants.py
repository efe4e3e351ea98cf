"""Constant folding.

Swin's relative position biases and ViT's reshaped parameters are recomputed for every batch; the pass computes them
once.

``torch.fx.experimental.const_fold`` is not used: it folds at the first forward pass (so two threads may do so at once),
stores results as parameters, renames every module, and loses node names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.nesting import storage_ids
from fxcore.passes.base import add, erase_dead, transform
from fxcore.passes.effects import UNINITIALIZED
from fxcore.tracing.dispatch_modes import DispatchMode, written_arguments
from fxcore.tracing.graph_module import attribute, called_module
from fxcore.tracing.interpreter import Interpreter
from fxcore.tracing.names import operation_name
from fxcore.tracing.writes import mutated_argument


@transform
def fold_constants(module: fx.GraphModule) -> int:
    """Compute values that depend only on parameters and buffers once, and store them as buffers.

    These nodes are not folded: nodes that are overwritten in place (run ``out_of_place`` first), random nodes, and
    devices and dtypes, which change when a module is moved or cast.

    >>> import torch
    >>> from torch import fx, nn
    >>> class Scaled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale = nn.Parameter(torch.zeros(4))
    ...     def forward(self, x):
    ...         return x * self.scale.exp().view(1, 4)
    >>> [n.op for n in fold_constants(fx.symbolic_trace(Scaled().eval())).graph.nodes]
    ['placeholder', 'get_attr', 'call_function', 'output']
    """
    values = _constants(module)
    count = 0
    for node in list(module.graph.nodes):
        if node not in values or node.op == "get_attr" or all(user in values for user in node.users):
            continue
        if _fold(module, node, values[node]):
            count += 1
    return count


def _constants(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return the value of each deterministic node that does not depend on an input."""
    tainted = _tainted(module)
    interpreter = Interpreter(module)
    values: dict[fx.Node, Any] = interpreter.env
    for node in module.graph.nodes:
        if node in tainted:
            continue
        if node.op == "get_attr":
            value = attribute(module, str(node.target))
            if isinstance(value, Tensor):
                values[node] = value
        elif (
            node.op.startswith("call_") and all(n in values for n in node.all_input_nodes) and _repeatable(module, node)
        ):
            watch = _Watch([values[n] for n in node.all_input_nodes])
            try:
                with watch:
                    values[node] = interpreter.run_node(node)
            except Exception:
                # The node stays in the graph, and values that it would have written to are not constant.
                for n in [n for n, v in values.items() if not watch.written.isdisjoint(storage_ids(v))]:
                    del values[n]
    return values


class _Watch(DispatchMode):
    """A mode that raises on random operations, and before writes to the memory of given values (maybe parameters).

    Attributes:
        written: ids of the storages that would have been written to.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__()
        self.given = {place for value in given for place in storage_ids(value)}
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written |= self.given.intersection(storage_ids(written_arguments(func, args, kwargs)))
        if self.written or torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} is random or writes to its arguments")
        return func(*args, **(kwargs or {}))


def _tainted(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that are overwritten, and all nodes that may share memory with them."""
    modules = dict(module.named_modules())
    found = set()
    for node in module.graph.nodes:
        hit = mutated_argument(node, modules)
        inputs = node.all_input_nodes
        waiting = [*([hit] if hit is not None else []), *(inputs[i] for i in node.meta.get("mutates", ()))]
        if waiting:
            found.add(node)
        while waiting:
            base = waiting.pop()
            if base not in found:
                found.add(base)
                waiting += base.all_input_nodes
    return found


def _repeatable(module: fx.GraphModule, node: fx.Node) -> bool:
    if (called := called_module(module, node)) is not None:
        return bool(node.all_input_nodes) and not any(m.training for m in called.modules())
    return operation_name(node) not in UNINITIALIZED and not node.is_impure()


def _fold(module: fx.GraphModule, node: fx.Node, value: Any) -> bool:
    """Replace ``node`` by its ``value``; return False if a graph cannot hold such a value."""
    inputs = node.all_input_nodes
    if isinstance(value, Tensor):
        target = add(module, f"folded_{node.name}", value.detach())
        with module.graph.inserting_before(node):
            kept = module.graph.get_attr(target)
        kept.meta = dict(node.meta)
        node.replace_all_uses_with(kept, propagate_meta=False)
    elif isinstance(value, (int, float, bool, torch.Size)):
        plain = tuple(value) if isinstance(value, torch.Size) else value
        for user in list(node.users):
            if user.op == "output":
                return False
            user.args = fx.node.map_arg(user.args, lambda n: plain if n is node else n)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda n: plain if n is node else n)
    else:
        return False
    module.graph.erase_node(node)
    erase_dead(module, *inputs)
    return True
