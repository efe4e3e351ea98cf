"""Zero memory that a model leaves uninitialised, so that no request reads another's data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

ZEROED = "zeroed"
"""Key in the ``meta`` of a node whose memory the model leaves uninitialised."""


def zeros_in_format(*args: Any, **kwargs: Any) -> Tensor:
    """Call ``torch.empty``, and fill the result with zeros; ``torch.zeros`` has no memory format."""
    return torch.empty(*args, **kwargs).zero_()


def zeros_strided(*args: Any, **kwargs: Any) -> Tensor:
    """Call ``torch.empty_strided``, and fill the result with zeros."""
    return torch.empty_strided(*args, **kwargs).zero_()


def zeros_permuted(*args: Any, **kwargs: Any) -> Tensor:
    """Call ``torch.empty_permuted``, and fill the result with zeros."""
    return torch.empty_permuted(*args, **kwargs).zero_()


def new_zeros_strided(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call ``tensor.new_empty_strided``, and fill the result with zeros."""
    return tensor.new_empty_strided(*args, **kwargs).zero_()


_FUNCTIONS: dict[Any, Any] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.empty_strided: zeros_strided,
    torch.empty_permuted: zeros_permuted,
}


def zero_memory(graph: fx.Graph) -> None:
    """Replace ``empty``, ``empty_like``, ``new_empty``, ``new`` and variants with functions that fill with zeros.

    The graph is changed in place. Nodes keep their names.

    >>> graph = fx.symbolic_trace(lambda x: torch.empty_like(x)).graph
    >>> zero_memory(graph)
    >>> fx.GraphModule({}, graph)(torch.ones(2))
    tensor([0., 0.])
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _FUNCTIONS:
            in_format = node.target is torch.empty and "memory_format" in node.kwargs
            node.target = zeros_in_format if in_format else _FUNCTIONS[node.target]
        elif node.op == "call_method" and (node.target == "new_empty" or _is_new(node)):
            node.target = "new_zeros"
        elif node.op == "call_method" and node.target == "new_empty_strided":
            node.op, node.target = "call_function", new_zeros_strided
        else:
            continue
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
        node.meta[ZEROED] = True


def _is_new(node: fx.Node) -> bool:
    """Return whether ``node`` is ``tensor.new(sizes)``; ``new`` also takes values."""
    sizes = node.args[1:]
    return node.target == "new" and bool(sizes) and all(isinstance(size, (int, fx.Node)) for size in sizes)
