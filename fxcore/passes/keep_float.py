"""Mark nodes that quantization leaves in float32, in the module's ``meta``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxcore.passes.base import CannotTransform, transform
from fxcore.tracing.graph_module import called_module
from fxcore.tracing.names import is_under, public_name

#: key in ``GraphModule.meta`` of the names of nodes that :func:`fxcore.int8.quantize.quantize` leaves in float
KEPT = "keep_float"


@transform
def keep_float(module: fx.GraphModule, *, nodes: Sequence[str]) -> int:
    """Mark nodes for :func:`fxcore.int8.quantize.quantize` to leave in float32; the graph does not change.

    Args:
        nodes: names, or a single one; a path means all nodes under it. A module inside a leaf, such as the convolution
            of a Conv2dNormActivation, may be named too.

    Raises:
        CannotTransform: one of the names matches no node.

    >>> from torch import fx, nn
    >>> marked = keep_float(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()), nodes=["_0"])
    >>> marked.meta["keep_float"]
    ('_0',)
    """
    names = [nodes] if isinstance(nodes, str) else nodes
    for name in names:
        if not any(named(node, name) or _holds(module, node, name) for node in module.graph.nodes):
            raise CannotTransform(f"keep_float: the graph has no node {name!r}; see the list of nodes", node=name)
    module.meta[KEPT] = (*module.meta.get(KEPT, ()), *names)
    return len(names)


def named(node: fx.Node, name: str) -> bool:
    """Return whether ``name`` is the node's name or a path above it."""
    return is_under(public_name(node), name)


def _holds(module: fx.GraphModule, node: fx.Node, name: str) -> bool:
    """Return whether ``name`` is the path of a module inside the one that the node calls."""
    called = called_module(module, node)
    return called is not None and any(name == f"{public_name(node)}.{inner}" for inner, _ in called.named_modules())
