"""Common subexpression elimination and dead code elimination.

``torch.fx.passes.dialect.common.cse_pass.CSEPass`` is not used: it is for functional graphs, and merges random and
in-place calls; it treats 1, 1.0 and True as equal; and it fails on ``x[:, 0]`` in Python 3.11, where slices have no
hash.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxcore.passes.base import transform
from fxcore.passes.effects import is_pure
from fxcore.tracing.reachable import reachable
from fxcore.tracing.writes import memory_of, mutated_argument


@transform
def eliminate_common_subexpressions(module: fx.GraphModule) -> int:
    """Merge nodes that make the same call with the same arguments into the first one, which keeps its name.

    In-place calls, random calls and functions with unknown side effects are not merged, nor are reads of memory that
    is written to; run ``out_of_place`` first. Equal outputs may become the same tensor.

    >>> import torch
    >>> model = fx.symbolic_trace(lambda x: torch.exp(x + 1) * torch.exp(x + 1) + torch.exp(x + 1.0)).eval()
    >>> [n.name for n in eliminate_common_subexpressions(model).graph.nodes]
    ['x', 'add', 'exp', 'mul', 'add_2', 'exp_2', 'add_3', 'output']
    """
    overwritten = _overwritten(module)
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in list(module.graph.nodes):
        if not is_pure(module, node) or not overwritten.isdisjoint([node, *node.all_input_nodes]):
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


@transform
def eliminate_dead_code(module: fx.GraphModule) -> int:
    """Remove nodes whose values are not used.

    Unlike ``torch.fx.Graph.eliminate_dead_code``, it keeps in-place calls, random calls and functions with unknown side
    effects, even if their results are unused (pytorch#68301). Inputs are kept.

    >>> import torch
    >>> def compute(x):
    ...     unread = torch.exp(torch.neg(x))
    ...     x.add_(1)
    ...     return x * 2
    >>> [n.name for n in eliminate_dead_code(fx.symbolic_trace(compute).eval()).graph.nodes]
    ['x', 'add_', 'mul', 'output']
    """
    before = len(module.graph.nodes)
    module.graph.eliminate_dead_code(lambda node: not is_pure(module, node))
    return before - len(module.graph.nodes)


def _key(value: Any) -> Any:
    """Return a key that is equal only for identical arguments: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return (isinstance(value, list), *map(_key, value))
    if isinstance(value, dict):
        return (dict, *((_key(key), _key(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, _key(value.start), _key(value.stop), _key(value.step))
    return (type(value), repr(value) if isinstance(value, (float, complex)) else value)


def _overwritten(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose values may change after they are computed, because their memory is written to."""
    nodes = list(module.graph.nodes)
    modules = dict(module.named_modules())
    written: set[fx.Node] = set()
    for node in nodes:
        if node.op not in ("call_module", "call_function", "call_method") or is_pure(module, node):
            continue
        base = mutated_argument(node, modules)
        if "mutates" in node.meta:
            written.update(node.all_input_nodes[i] for i in node.meta["mutates"])
        elif base is None:
            written.update(node.all_input_nodes)
        if base is not None:
            written.add(base)
    if all("memory" in node.meta for node in nodes if node.op != "output"):
        memory = memory_of(module.graph, modules)
        places = {place for node in written for place in memory[node]}
        return {node for node in nodes if node.op != "output" and not places.isdisjoint(memory[node])}
    # Without annotations, any node except a clone may be a view of its inputs.
    up = reachable(written, lambda node: [] if node.target == "clone" else node.all_input_nodes)
    return set(reachable(up, lambda node: node.users))
