"""The axes of a value's row, inferred from the nodes that write and read it where its layout is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, fx

from fxcore.graph.attention_weights import is_attention, last_is_channels, operation_or_class, own_module
from fxcore.graph.axes.layout import CHANNELS_FIRST, FUNCTIONS_CHANNELS_FIRST, layout_name
from fxcore.graph.operations import axes_of
from fxcore.layer_types import DROPOUTS

UNKNOWN = "?"

# Elementwise operations (and softmax) by lower-case name of the function, method or class.
_ELEMENTWISE = {
    *("add", "iadd", "sub", "isub", "mul", "imul", "truediv", "div", "neg", "clamp", "where"),
    *("relu", "relu_", "relu6", "gelu", "gelutanh", "quickgelu", "silu", "swish", "mish", "hardmish", "elu", "prelu"),
    *("hardswish", "hardsigmoid", "sigmoid", "tanh", "leakyrelu", "leaky_relu", "softplus"),
    *("softmax", "identity", "dropout", "droppath", "drop_path", "stochasticdepth", "stochastic_depth", "layerscale"),
    *("contiguous", "clone", "to", "float", "type_as", "_squeeze"),  # MViT's own squeezes only where it unsqueezed
}


def row_axes(node: fx.Node) -> str:
    """Return the axes of an annotated ``node`` whose value is a tensor, one letter per dimension.

    Letters are those of :mod:`fxcore.graph.axes.layout`; ``K`` for windows, which get a separate dimension since an
    image has several; ``Q`` and ``S`` for the queries and keys of attention weights, whose heads are the channels
    ``C``; and ``?`` for unknown axes.

    >>> from fxcore import model_graph
    >>> graph = model_graph("vit_b_16")
    >>> [row_axes(graph.by_name[name]) for name in ("conv_proj", "encoder.ln", "heads.head")]
    ['NCHW', 'NLC', 'NC']
    """
    letters = _letters(node)
    return f"{letters[:1]}K{letters[1:]}" if node.meta["rows"] > 1 else letters


def output_layout(node: fx.Node) -> str | None:
    """Return the public name of the layout of an annotated ``node``; None if it is unknown.

    If only the channels are known, and are not where :func:`fxcore.pooling.channel_dim` assumes them, as in the windows
    of an attention layer, the other axes are ``?``; the channels of attention weights are the heads.

    >>> from fxcore import model_graph
    >>> output_layout(model_graph("maxvit_t").by_name["blocks.0.layers.0.layers.window_attention.add_1"])
    'N??C'
    """
    known: str | None = node.meta.get("axes")
    if known is not None:
        return layout_name(known)
    axes = row_axes(node)
    return re.sub("[KQS]", UNKNOWN, _letters(node)) if len(axes) > 3 and axes.find("C") > 1 else None


def _letters(node: fx.Node) -> str:
    """Return the axes of the value itself."""
    ndim: int = node.meta["value"].ndim
    if ndim < 3:
        return axes_of(node) or "NC"[:ndim]
    alike = list(_alike(node))
    for axes in map(axes_of, alike):
        if axes is not None:
            return axes
    if ndim > 3 and any(map(is_attention, alike)):
        return "N" + "K" * (ndim - 4) + "CQS"
    beside = [one for same in alike for one in (same, *_readers(same))]
    if any(map(last_is_channels, beside)):
        return "N" + UNKNOWN * (ndim - 2) + "C"
    if any(
        isinstance(own_module(one), CHANNELS_FIRST) or operation_or_class(one) in FUNCTIONS_CHANNELS_FIRST
        for one in beside
    ):
        return "NC" + UNKNOWN * (ndim - 2)
    return "N" + UNKNOWN * (ndim - 1)


def _alike(node: fx.Node) -> Iterator[fx.Node]:
    """Yield ``node`` and nodes with the same axes, nearest first: those of its shape that are connected to it by
    elementwise operations."""
    waiting = [node]
    for found in waiting:
        yield found
        above = found.all_input_nodes if _is_elementwise(found) else []
        for one in (*above, *filter(_is_elementwise, found.users)):
            value = one.meta.get("value")
            if isinstance(value, Tensor) and value.shape == node.meta["value"].shape and one not in waiting:
                waiting.append(one)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the users of ``node`` that read it as their input rather than as a weight."""
    return [user for user in node.users if user.all_input_nodes[0] is node]


def _is_elementwise(node: fx.Node) -> bool:
    return operation_or_class(node).lower() in _ELEMENTWISE or isinstance(own_module(node), DROPOUTS)
