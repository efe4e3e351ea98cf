"""Fill memory with zeros that a model leaves uninitialised, so that nobody reads in it what others left there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

ZEROED = "zeroed"
"""Key in the ``meta`` of a node whose memory the model leaves uninitialised."""

_FUNCTIONS: dict[Any, Any] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}
_METHODS = {"new_empty": "new_zeros"}


def zero_memory(graph: fx.Graph) -> None:
    """Replace ``empty``, ``empty_like`` and ``new_empty`` by their counterparts that fill with zeros, in place.

    Nodes keep their names.

    >>> graph = fx.symbolic_trace(lambda x: torch.empty_like(x)).graph
    >>> zero_memory(graph)
    >>> fx.GraphModule({}, graph)(torch.ones(2))
    tensor([0., 0.])
    """
    for node in graph.nodes:
        known = _FUNCTIONS if node.op == "call_function" else _METHODS if node.op == "call_method" else {}
        if node.target in known:
            node.target = known[node.target]
            places = ("pin_memory",) if node.target is torch.zeros_like else ("pin_memory", "memory_format")
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in places}
            node.meta[ZEROED] = True
