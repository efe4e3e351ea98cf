"""Detect views between a convolution and a batch norm, and whether they keep the channels in dimension 1."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from fxcore.passes.base import hooked
from fxcore.tracing.graph_module import called_module
from fxcore.tracing.names import operation_name
from fxcore.tracing.writes import first_input, reads_shape


def may_pass_channels(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether ``node`` reshapes its input in a way that may keep channels separate, or returns it unchanged."""
    if (called := called_module(module, node)) is not None:
        return type(called) in (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten) and not hooked(called)
    return operation_name(node) in ("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous")


def views_keep_channels(module: fx.GraphModule, path: list[fx.Node], channels: int) -> bool:
    """Return whether the views between a convolution and a batch norm keep dimensions 0 and 1."""
    *views, convolution = path
    return all(_keeps_channels(module, node, convolution, channels) for node in views)


def _keeps_channels(module: fx.GraphModule, node: fx.Node, convolution: fx.Node, channels: int) -> bool:
    if (called := called_module(module, node)) is not None:
        if isinstance(called, nn.Flatten):
            return called.start_dim >= 2
        return not isinstance(called, nn.Unflatten) or (isinstance(called.dim, int) and called.dim >= 2)
    name = operation_name(node)
    rest = list(node.args[1:])
    if name == "contiguous":
        return True
    if name in ("squeeze", "unsqueeze", "flatten"):
        first = rest[0] if rest else node.kwargs.get("dim", node.kwargs.get("start_dim"))
        return isinstance(first, int) and (first >= 2 or (name == "unsqueeze" and first == -1))
    sizes = list(rest[0]) if rest and isinstance(rest[0], (list, tuple)) else rest  # of view or reshape
    if len(sizes) < 2:
        return False
    return _is_size(sizes[0], 0, convolution) and bool(sizes[1] == channels or _is_size(sizes[1], 1, convolution))


def _is_size(size: Any, dim: int, convolution: fx.Node) -> bool:
    """Return whether ``size`` is a node for the convolution's output size in ``dim``.

    For the batch dimension, the size of the convolution's input counts too.
    """
    if not isinstance(size, fx.Node):
        return False
    sources = {convolution, first_input(convolution)} if dim == 0 else {convolution}
    if size.op == "call_method" and size.target == "size":
        return size.args[0] in sources and bool(list(size.args[1:]) == [dim])
    if operation_name(size) == "getitem":
        whole, index = size.args
        if not isinstance(whole, fx.Node) or index != dim or not reads_shape(whole):
            return False
        return whole.args[0] in sources and (whole.target == "size" or str(whole.args[1]) == "shape")
    return False
