"""A description of one node of an annotated graph in plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxcore.graph.axes.layout import layout_name
from fxcore.graph.levels import channels_of
from fxcore.graph.tokens.token_grid import TokenGrid, token_grid
from fxcore.tensors import RETURNED, dtype_name, returned_dtype
from fxcore.tracing.graph_module import called_module
from fxcore.tracing.names import public_name


@dataclass(frozen=True)
class NodeInfo:
    """The description of one node of a graph.

    Attributes:
        name: torchvision's name of the node; the fx name of a parameter that the graph reads itself.
        fx_name, op: name and op in torch.fx.
        target: see :func:`target_name`.
        module_type: class of the called module, such as ``torch.nn.modules.conv.Conv2d``; None for other nodes.
        args, users: names of the nodes that it reads, and of those that read it.
        shape: shape of the value, with None for the batch; None if the value is not a tensor.
        dtype: dtype such as ``float32``; None if the value is not a tensor.
        layout: axes such as ``NCHW``; None if unknown.
        channels: size of the channel axis; None if unknown.
        stride: input pixels per position of the feature map; None if the value is not a feature map.
        level: level name such as ``C4``; None if the node is not a level.
        params: number of parameters, each counted at the first node that uses it.
        flops: FLOPs for one image; a multiply-add is two.
        bytes: size of the value for one image; None if the value is not a dense tensor.
        extractable: see :func:`is_extractable`.
        rows_per_image: rows of the first dimension that belong to one image; 1 except for attention windows.
        tokens: the grid of image positions that the tokens stand for.

    >>> from fxcore import model_graph
    >>> node = next(n for n in model_graph("resnet18").nodes if n.name == "conv1")
    >>> node.op, node.args, node.users, node.shape, node.layout, node.stride
    ('call_module', ['x'], ['bn1'], [None, 64, 112, 112], 'NCHW', 2)
    >>> node.params == 64 * 3 * 7 * 7, node.flops == 2 * node.params * 112 * 112, node.bytes == 4 * 64 * 112 * 112
    (True, True, True)
    """

    name: str
    fx_name: str
    op: str
    target: str
    module_type: str | None
    args: list[str]
    users: list[str]
    shape: list[int | None] | None
    dtype: str | None
    layout: str | None
    channels: int | None
    stride: int | None
    level: str | None
    params: int
    flops: int
    bytes: int | None
    extractable: bool
    rows_per_image: int = 1
    tokens: TokenGrid | None = None


def describe(
    node: fx.Node,
    root: nn.Module,
    shape: list[int | None] | None,
    *,
    stride: int | None,
    level: str | None,
    params: int,
    flops: int,
) -> NodeInfo:
    """Describe an annotated node; see :class:`NodeInfo`.

    Args:
        root: the traced model.
        shape, stride, level, params, flops: as in :class:`NodeInfo`.
    """
    value = node.meta.get("value")
    module = called_module(root, node)
    return NodeInfo(
        name=public_name(node),
        fx_name=node.name,
        op=node.op,
        target=target_name(node),
        module_type=None if module is None else f"{type(module).__module__}.{type(module).__qualname__}",
        args=[public_name(n) for n in node.all_input_nodes],
        users=["output" if n.op == "output" else public_name(n) for n in node.users],
        shape=shape,
        dtype=dtype_name(value.dtype) if isinstance(value, Tensor) else None,
        layout=layout_name(node.meta.get("axes")) if isinstance(value, Tensor) else None,
        channels=channels_of(node),
        stride=stride,
        level=level,
        params=params,
        flops=flops,
        bytes=value.nbytes if isinstance(value, Tensor) and value.layout is torch.strided else None,
        extractable=is_extractable(node),
        rows_per_image=node.meta.get("rows") or 1,
        tokens=token_grid(node) if node.meta.get("rows") == 1 else None,
    )


def is_extractable(node: fx.Node) -> bool:
    """Return whether an annotated node's value is a tensor with rows per image and a dtype supported for outputs."""
    value = node.meta.get("value")
    if not isinstance(value, Tensor) or not node.meta.get("rows"):
        return False
    return returned_dtype(value.dtype, torch.float32, torch.float32) in RETURNED


def target_name(node: fx.Node) -> str:
    """Return a node's target as text: a path, a method's name, or a function's qualified name."""
    if isinstance(node.target, str):
        return node.target
    function = node.target
    return f"{getattr(function, '__module__', '') or ''}.{getattr(function, '__name__', function)}".lstrip(".")


def definition(node: fx.Node, root: nn.Module) -> list[str]:
    """Return a node's operation, target and arguments, and the settings of the module it calls, as text.

    The text is the same in every process.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Flatten(2)))
    >>> definition(list(graph.graph.nodes)[1], graph)
    ['call_module', '0', "('input_1',) {}", 'Flatten(start_dim=2, end_dim=-1)']
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), public_name)
    called = called_module(root, node)
    settings = "" if called is None else str(called)
    return [node.op, target_name(node), *(re.sub(r" at 0x\w+", "", text) for text in (f"{args} {kwargs}", settings))]
