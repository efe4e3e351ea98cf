"""Nodes that compute what another has computed already, merged with it.

``torch.fx.passes.dialect.common.cse_pass.CSEPass`` is not used: it is meant for functional graphs and merges draws at
random and calls in place; it takes 1, 1.0 and True for one number, and it fails on ``x[:, 0]`` where slices have no
hash (Python 3.11).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxcore.transforms.base import transform
from fxcore.transforms.effects import only_computes
from fxcore.transforms.writes import memory_of, mutated_argument


@transform
def eliminate_common_subexpressions(module: fx.GraphModule) -> int:
    """Merge nodes that call the same with the same arguments; the first of them, with its name, stays.

    Calls in place, draws at random and functions whose effects are not known stay apart, and so does what reads memory
    that something writes to: run ``out_of_place`` first. Outputs that were equal may become one tensor.

    >>> import torch
    >>> model = fx.symbolic_trace(lambda x: torch.exp(x + 1) * torch.exp(x + 1) + torch.exp(x + 1.0)).eval()
    >>> [n.name for n in eliminate_common_subexpressions(model).graph.nodes]
    ['x', 'add', 'exp', 'mul', 'add_2', 'exp_2', 'add_3', 'output']
    """
    unsteady = _unsteady(module)
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in list(module.graph.nodes):
        if not only_computes(module, node) or not unsteady.isdisjoint([node, *node.all_input_nodes]):
            continue
        key = (node.op, node.target, _key(node.args), _key(node.kwargs))
        try:
            same = first.setdefault(key, node)
        except TypeError:  # an argument that cannot be compared
            continue
        if same is not node:
            node.replace_all_uses_with(same, propagate_meta=False)
            module.graph.erase_node(node)
            count += 1
    return count


def _key(value: Any) -> Any:
    """Equal for arguments that mean the same: 1, 1.0 and True do not, nor do 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return (isinstance(value, list), *map(_key, value))
    if isinstance(value, dict):
        return (dict, *((_key(key), _key(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, _key(value.start), _key(value.stop), _key(value.step))
    return (type(value), repr(value) if isinstance(value, (float, complex)) else value)


def _unsteady(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose values may change after they were made, since something writes to their memory."""
    nodes = list(module.graph.nodes)
    modules = dict(module.named_modules())
    written: set[fx.Node] = set()
    for node in nodes:
        if node.op not in ("call_module", "call_function", "call_method") or only_computes(module, node):
            continue
        overwritten = mutated_argument(node, modules)
        if "mutates" in node.meta:
            written.update(node.all_input_nodes[i] for i in node.meta["mutates"])
        elif overwritten is None:
            written.update(node.all_input_nodes)
        if overwritten is not None:
            written.add(overwritten)
    if all("memory" in node.meta for node in nodes if node.op != "output"):
        memory = memory_of(module.graph, modules)
        places = {place for node in written for place in memory[node]}
        return {node for node in nodes if node.op != "output" and not places.isdisjoint(memory[node])}
    # Nothing says what is a view of what, but that a copy is none of anything.
    up = _reached(written, lambda node: [] if node.target == "clone" else node.all_input_nodes)
    return _reached(up, lambda node: list(node.users))


def _reached(start: set[fx.Node], onwards: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += onwards(node)
    return found
