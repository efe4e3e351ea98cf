"""Nodes whose values nothing reads, taken out."""

from __future__ import annotations

from torch import fx

from fxcore.transforms.base import transform
from fxcore.transforms.effects import only_computes


@transform
def eliminate_dead_code(module: fx.GraphModule) -> int:
    """Take out nodes whose values nothing reads.

    This is ``torch.fx.Graph.eliminate_dead_code`` with another idea of what may be dropped: calls in place, draws at
    random and functions whose effects are not known stay, also where nothing reads what they return (pytorch#68301).
    Inputs stay.

    >>> import torch
    >>> def compute(x):
    ...     unread = torch.exp(torch.neg(x))
    ...     x.add_(1)
    ...     return x * 2
    >>> [n.name for n in eliminate_dead_code(fx.symbolic_trace(compute).eval()).graph.nodes]
    ['x', 'add_', 'mul', 'output']
    """
    before = len(module.graph.nodes)
    module.graph.eliminate_dead_code(lambda node: not only_computes(module, node))
    return before - len(module.graph.nodes)
