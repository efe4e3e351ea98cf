"""In-place operations → out-of-place ones, so that no node's value depends on what runs after it.

An in-place ReLU after a batch norm overwrites the batch norm's output: a client that asks for both would get the same
tensor twice (and a client that asks for one alone would get another value). The rewritten graph computes what the
original computes, and every node keeps its own value.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.transforms.base import add, bare_copy, transform

_IN_PLACE_OPERATORS: dict[Any, Any] = {
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


def written(base: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of ``base`` with ``base[index] = value`` done to it."""
    copy = base.clone()
    copy[index] = value
    return copy


def mutated_argument(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The node whose value ``node`` overwrites, or None."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_module":
        in_place = getattr(modules.get(str(node.target)), "inplace", False) is True
    elif node.op == "call_method":
        in_place = _is_in_place_method(str(node.target))
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        in_place = (
            node.kwargs.get("inplace") is True
            or node.target in _IN_PLACE_OPERATORS
            or node.target is operator.setitem
            or _is_in_place_method(name)
        )
    else:
        in_place = False
    return first if in_place else None


@transform
def out_of_place(module: fx.GraphModule) -> int:
    """Turn in-place operations, in the graph and in the modules it calls, into ones that leave their input as it is.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True)).eval())
    >>> out_of_place(model).get_submodule("1")
    ReLU()
    """
    count = purify(module.graph, dict(module.named_modules()))
    made: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        called = module.get_submodule(str(node.target))
        pure = _pure_module(called)
        if pure is not called:
            if id(called) not in made:
                made[id(called)] = add(module, str(node.target), pure)
            node.target = made[id(called)]
    return count


def _pure_module(module: nn.Module) -> nn.Module:
    """``module`` itself, or a copy with the same parameters if it or a part of it works in place."""
    if isinstance(module, fx.GraphModule):
        return module  # its graph would have to be rewritten too; no model has one inside
    children = {name: child and _pure_module(child) for name, child in module._modules.items()}
    in_place = getattr(module, "inplace", None) is True
    if not in_place and all(child is module._modules[name] for name, child in children.items()):
        return module
    made = bare_copy(module)
    made.__dict__["_modules"] = children
    if in_place:
        made.inplace = False  # type: ignore[assignment]
    return made


def purify(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    """Rewrite ``graph`` itself; give a copy.

    Args:
        graph: any traced graph. Where it has been annotated, writes hidden in functions that fx does not look into
            are seen too.
        modules: the traced model's modules by path, to see which are in-place. A ``call_module`` node is left as it is:
            the caller sets ``inplace = False`` on the modules that will run, since other graphs share them.

    Returns:
        Number of operations that were in-place.
    """
    count = 0
    for node in list(graph.nodes):
        base = mutated_argument(node, modules)
        if base is not None:
            _make_pure(node)
            _redirect_later_uses(graph, base, node)
            count += 1
        else:
            inputs = node.all_input_nodes
            for overwritten in [inputs[index] for index in node.meta.get("mutates", ())]:
                _run_on_copy(graph, node, overwritten)
                count += 1
    graph.lint()
    return count


def _make_pure(node: fx.Node) -> None:
    if node.op == "call_method":
        node.target = str(node.target).removesuffix("_")
    elif node.op == "call_function":
        if node.target is operator.setitem:
            node.target = written
        elif node.target in _IN_PLACE_OPERATORS:
            node.target = _IN_PLACE_OPERATORS[node.target]
        elif node.kwargs.get("inplace") is True:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        else:
            node.target = _pure_function(node.target)


def _run_on_copy(graph: fx.Graph, node: fx.Node, overwritten: fx.Node) -> fx.Node:
    """Let a function that writes to its argument write to a copy, which later readers get."""
    with graph.inserting_before(node):
        copy = graph.call_method("clone", (overwritten,))
    node.replace_input_with(overwritten, copy)
    with graph.inserting_after(node):
        # Takes the function's result along only so that no reader of the copy can lose the call itself.
        filled = graph.call_function(operator.getitem, ((copy, node), 0))
    _redirect_later_uses(graph, overwritten, filled)
    return filled


def _redirect_later_uses(graph: fx.Graph, base: fx.Node, successor: fx.Node) -> None:
    """Whoever read the overwritten tensor afterwards saw the new value; so it goes on."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    at = order[successor]
    base.replace_all_uses_with(successor, delete_user_cb=lambda user: order[user] > at)


def _is_in_place_method(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name.removesuffix("_"))


def _pure_function(function: Any) -> Any:
    """``torch.relu_`` → ``torch.relu``. Builtins of torch carry no module name."""
    home = sys.modules.get(function.__module__ or "torch", torch)
    return getattr(home, function.__name__.removesuffix("_"))
