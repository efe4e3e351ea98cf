"""In-place operations and aliases: what a node overwrites, and which nodes share memory."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.layer_types import DROPOUTS
from fxcore.tracing.leaves import one_node

IN_PLACE_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.imatmul: operator.matmul,
}

# Methods whose names end with an underscore, but that do not write to the tensor.
_NO_WRITES = ("requires_grad_", "share_memory_")

_VIEWS = {
    "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow", "permute",
    "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t",
    "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
_SAME = (nn.Identity, nn.Flatten, nn.Unflatten, *DROPOUTS)


@one_node
def written(base: Tensor, index: Any, value: Any) -> Tensor:
    """Copy ``base`` and set ``copy[index] = value``."""
    copy = base.clone()
    copy[index] = value
    return copy


def mutated_argument(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The node whose value ``node`` overwrites by its name or arguments (``add_``, ``inplace=True``), or None."""
    first = _first(node)
    if first is None:
        return None
    if node.op == "call_module":
        in_place = getattr(modules.get(str(node.target)), "inplace", False) is True
    elif node.op == "call_method":
        in_place = _is_in_place_name(str(node.target))
    elif node.op == "call_function":
        in_place = (
            node.kwargs.get("inplace") is True
            or node.target in IN_PLACE_OPERATORS
            or node.target is operator.setitem
            or _is_in_place_name(getattr(node.target, "__name__", ""))
        )
    else:
        in_place = False
    return first if in_place else None


def pure_target(node: fx.Node) -> Any:
    """The out-of-place target for an in-place node; None if torch has none.

    A ``call_module`` node keeps its target: being in-place is an attribute of the module.

    >>> graph = fx.symbolic_trace(lambda x: x.add_(1).zero_()).graph
    >>> [pure_target(node) for node in graph.nodes if node.op == "call_method"]
    ['add', None]
    """
    if node.op == "call_method":
        name = str(node.target).removesuffix("_")
        return name if callable(getattr(Tensor, name, None)) else None
    if node.op == "call_function":
        if node.kwargs.get("inplace") is True:
            return node.target
        if node.target is operator.setitem:
            return written
        if node.target in IN_PLACE_OPERATORS:
            return IN_PLACE_OPERATORS[node.target]
        assert callable(node.target)
        # Builtins of torch have no module name.
        home = sys.modules.get(node.target.__module__ or "torch", torch)
        return getattr(home, node.target.__name__.removesuffix("_"), None)
    return node.target


def memory_of(graph: fx.Graph, modules: dict[str, nn.Module]) -> dict[fx.Node, frozenset[int]]:
    """The storages that each node's value lies in, by number.

    For annotated nodes they are known. For others the operation decides; one that may return a view counts as one.
    """
    found: dict[fx.Node, frozenset[int]] = {}
    for number, node in enumerate(graph.nodes, 1):
        first, known = _first(node), node.meta.get("memory")
        if known is None and first is not None and (_is_view(node, modules) or mutated_argument(node, modules)):
            known = found[first]
        found[node] = known or frozenset({-number})
    return found


def _first(node: fx.Node) -> fx.Node | None:
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def _is_view(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), _SAME)
    if node.target is operator.getitem:
        return len(node.all_input_nodes) == 1  # an index that is a tensor makes a copy
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op.startswith("call_") and name in _VIEWS


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name) and name not in _NO_WRITES
