"""Add nodes for attention weights.

The weights of ViT's and Swin's attention, and of fused attention such as timm's, exist only inside a single call. The
pass adds a node after each such call that computes the same weights. The call itself stays, so every other node keeps
its exact value; an extractor prunes weights that are not extracted.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torchvision.models.swin_transformer import shifted_window_attention
from torchvision.models.video.swin_transformer import shifted_window_attention_3d

from fxcore.passes.base import transform
from fxcore.tracing.graph_module import called_module
from fxcore.tracing.leaves import one_node
from fxcore.tracing.names import MODULE, PATH, operation_name

#: key in ``node.meta`` of nodes that return attention weights
ATTENTION = "attention"

# Positional arguments of nn.MultiheadAttention after query, key, value and key_padding_mask.
_OPTIONS = ("need_weights", "attn_mask", "average_attn_weights", "is_causal")
_SOFTMAX = {F.softmax, torch.softmax, "softmax"}
_MIXES = {"matmul", "einsum", "bmm"}


class _Softmax(TorchFunctionMode):
    """A mode that captures the result of the softmax that a function calls, its attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = function(*args, **(kwargs or {}))
        if function is F.softmax:
            self.weights = value
        return value


@one_node
def window_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Return Swin's attention weights ``[N, windows, heads, L, L]`` for the arguments of ``shifted_window_attention``.

    torchvision's own function computes them. Windows are those of the padded and rolled map, row by row; pairs of
    positions that the roll brought together from opposite borders are masked out.
    """
    return _captured(shifted_window_attention, *args, **kwargs)


@one_node
def window_attention_3d(*args: Any, **kwargs: Any) -> Tensor:
    """Return Video Swin's attention weights, like :func:`window_attention`."""
    return _captured(shifted_window_attention_3d, *args, **kwargs)


@one_node
def attention_weights(weights: Tensor) -> Tensor:
    """Return ``weights`` unchanged, as a separate node."""
    return weights


@one_node
def scaled_dot_product_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention weights ``[N, …, L queries, S keys]`` for the arguments of ``scaled_dot_product_attention``."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    # Queries that may attend to no key attend to none, as in torch.
    return scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)


# Functions that return the attention weights for the arguments of others.
_WEIGHTS_OF: dict[Any, Any] = {
    shifted_window_attention: window_attention,
    shifted_window_attention_3d: window_attention_3d,
    F.scaled_dot_product_attention: scaled_dot_product_weights,
}


def _captured(function: Any, images: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with _Softmax() as softmax:
        function(images, *args, **kwargs)
    assert softmax.weights is not None
    weights: Tensor = softmax.weights
    return weights.view(images.shape[0], -1, *weights.shape[1:])


@transform
def attention_maps(module: fx.GraphModule) -> int:
    """Add a node ``<module>.attention`` with the weights per image and head for each attention layer.

    ============================  ============================================================
    ``nn.MultiheadAttention``     ``[N, heads, L, L]`` (ViT)
    Swin, Swin v2, video Swin     ``[N, windows, heads, L, L]``
    MaxViT                        ``[N, windows, heads, L, L]``
    MViT                          ``[N, heads, L queries, L keys]``
    fused attention (timm's)      in the shape of query and key: ``[N, heads, L, L]``
    talking heads (CaiT)          ``[N, heads, L, L]``, before the heads are mixed
    XCiT, DaViT                   over channels: ``[N, heads, C, C]``
    timm's Swin                   ``[N * windows, heads, L, L]``, the windows of an image consecutive
    ============================  ============================================================

    ``L`` includes the tokens before the patches (class token, registers); see
    :func:`fxcore.graph.tokens.token_grid.token_grid`. The last dimension sums to one. The outputs of the graph do not
    change.

    >>> import torch
    >>> from fxcore import trace
    >>> from torchvision.models import VisionTransformer
    >>> vit = VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8).eval()
    >>> opened = attention_maps(trace(vit))
    >>> [n.meta["path"] for n in opened.graph.nodes if n.meta.get("path", "").endswith(".attention")]
    ['encoder.layers.encoder_layer_0.self_attention.attention']
    """
    taken = {n.meta.get(PATH) for n in module.graph.nodes}
    count = 0
    for node in list(module.graph.nodes):
        made = _weights_of(module, node)
        if made is None:
            continue
        home = str(node.target if node.op == "call_module" else node.meta.get(MODULE, ""))
        if isinstance(called_module(module, node), nn.Softmax):
            home = home.rpartition(".")[0]
        path = f"{home}.attention".lstrip(".")
        number = 0
        while path in taken:
            number += 1
            path = f"{home}.attention_{number}".lstrip(".")
        taken.add(path)
        made.meta = {PATH: path, MODULE: home, ATTENTION: True}
        count += 1
    return count


def _weights_of(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Add a node for the attention weights that ``node`` computes; return None if it computes none."""
    graph, layer = module.graph, called_module(module, node)
    if isinstance(layer, nn.MultiheadAttention):
        with graph.inserting_after(node):
            options = dict(zip(_OPTIONS, node.args[4:], strict=False)) | node.kwargs
            both = graph.call_module(
                str(node.target), node.args[:4], {**options, "need_weights": True, "average_attn_weights": False}
            )
        both.meta = {MODULE: str(node.target)}
        with graph.inserting_after(both):
            return graph.call_function(operator.getitem, (both, 1))
    if node.op == "call_function" and node.target in _WEIGHTS_OF:
        with graph.inserting_after(node):
            return graph.call_function(_WEIGHTS_OF[node.target], node.args, dict(node.kwargs))
    # Attention whose steps are nodes: MaxViT's and MViT's weights already exist under other names.
    called = node.op in ("call_function", "call_method") and node.target in _SOFTMAX
    if (called or isinstance(layer, nn.Softmax)) and is_over_last(node, layer) and _mixes(module, node):
        with graph.inserting_after(node):
            return graph.call_function(attention_weights, (node,))
    return None


def is_over_last(softmax: fx.Node, layer: nn.Module | None) -> bool:
    """Return whether ``softmax``, which calls ``layer`` or a function, is over the last dimension.

    The value must be annotated if its dimensions are counted from the first.
    """
    given: Any = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    dim, value = getattr(layer, "dim", given), softmax.meta.get("value")
    return bool(dim == -1 or (isinstance(value, Tensor) and dim == value.ndim - 1))


def _mixes(module: fx.GraphModule, weights: fx.Node) -> bool:
    """Return whether ``weights``, the result of a softmax, are multiplied with values.

    Between the two there may be dropout, or a linear layer over the heads after a permute to the last dimension.
    """
    passing = (nn.Dropout, nn.Identity, *([nn.Linear] if _permutes(weights) else []))
    for user in weights.users:
        if _permutes(user) or isinstance(called_module(module, user), passing):
            if _mixes(module, user):
                return True
        elif operation_name(user) in _MIXES:
            return True
    return False


def _permutes(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "permute"
