"""Dead code elimination."""

from __future__ import annotations

from torch import fx

from fxcore.transforms.base import transform
from fxcore.transforms.effects import is_pure


@transform
def eliminate_dead_code(module: fx.GraphModule) -> int:
    """Remove nodes whose values are not used.

    Unlike ``torch.fx.Graph.eliminate_dead_code`` it keeps in-place calls, random calls and functions with unknown side
    effects, even if their results are not used (pytorch#68301). Inputs stay.

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
