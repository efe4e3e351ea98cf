"""Find nodes that return attention weights ``[…, queries, keys]``, over tokens or over channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.graph.operations import PERMUTES, axes_of, computed
from fxcore.passes.attention import ATTENTION, attention_weights, is_over_last, scaled_dot_product_weights
from fxcore.tracing.graph_module import called_module
from fxcore.tracing.names import operation_name

_KEEPS_LAST = {"linear", "Linear", "NonDynamicallyQuantizableLinear", "layer_norm", "LayerNorm"}
_MULTIPLIES = {"matmul", "bmm", "einsum"}
_MAX_MOVES = 40
_PASSED_ON = {"Dropout", "Identity", "dropout", "permute", "transpose", "contiguous", "to"}


def operation_or_class(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls, or of the class of its module."""
    return type(own_module(node)).__name__ if node.op == "call_module" else operation_name(node)


def own_module(node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls; None for other nodes, and if no GraphModule has its graph."""
    owner = node.graph.owning_module
    return None if owner is None else called_module(owner, node)


def is_attention(node: fx.Node) -> bool:
    """Return whether an annotated ``node`` returns attention weights ``[…, queries, keys]`` over tokens or channels."""
    return _makes_other_weights(node) or _of_softmax(node) is not None


def is_attention_of_tokens(node: fx.Node) -> bool:
    """Return whether an annotated ``node`` returns attention weights ``[…, queries, keys]`` over tokens.

    False for attention over channels (XCiT, DaViT), and if the graph does not show which it is.

    >>> from fxcore import model_graph
    >>> graph = model_graph("timm.davit_tiny")
    >>> is_attention_of_tokens(graph.by_name["stages.0.blocks.0.1.attn.softmax"])
    False
    """
    if node.target is scaled_dot_product_weights:
        weighed = _weighed(node.args[2] if len(node.args) > 2 else node.kwargs.get("value"), -1)
    elif _makes_other_weights(node):
        return True  # Swin's windows and nn.MultiheadAttention
    else:
        weighed = _of_softmax(node)
    if weighed is None:
        return False
    values, dim = weighed
    return _channels_lie_along(values, dim)


def last_is_channels(node: fx.Node) -> bool:
    """Return whether ``node`` is a linear layer or a normalization over the last axis."""
    return operation_or_class(node) in _KEEPS_LAST


def _makes_other_weights(node: fx.Node) -> bool:
    """Return whether ``node`` has weights that a single call computes: it was added by ``attention_maps``, or they are
    returned by the call."""
    added = bool(node.meta.get(ATTENTION)) and node.target is not attention_weights
    return added or is_returned_attention(node)


def is_returned_attention(node: fx.Node) -> bool:
    """Return whether ``node`` is the second result of multi-head attention, its weights ``[N, queries, keys]``, or
    ``[N, heads, queries, keys]``."""
    if operation_name(node) != "getitem" or node.args[1] != 1 or not isinstance(called := node.args[0], fx.Node):
        return False
    return isinstance(own_module(called), nn.MultiheadAttention) or called.target is F.multi_head_attention_forward


def _of_softmax(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the values that are multiplied by ``node``, a softmax over the last dimension; see :func:`_weighed`.

    None if ``node`` is not such a softmax.
    """
    if node.target is attention_weights:
        made = node.args[0]
        return _of_softmax(made) if isinstance(made, fx.Node) else None
    value = node.meta.get("value")
    if not isinstance(value, Tensor) or operation_or_class(node) not in ("softmax", "Softmax"):
        return None
    return _multiplied(node) if is_over_last(node, own_module(node)) else None


def _multiplied(weights: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the values multiplied by ``weights``, directly or after dropout or a linear layer over the heads."""
    for user in weights.users:
        name = operation_or_class(user)
        if name in _MULTIPLIES:
            equation, *factors = user.args if name == "einsum" else ("", *user.args)
            if len(factors) != 2 or weights not in factors:
                continue
            place = factors.index(weights)
            dim: int | None = -1 if place == 0 else -2
            if name == "einsum":
                dim = _free_dim(str(equation), place)
            if (found := _weighed(factors[1 - place], dim)) is not None:
                return found
        passed = name in _PASSED_ON or (name == "Linear" and operation_or_class(weights) == "permute")
        if passed and (found := _multiplied(user)) is not None:
            return found
    return None


def _free_dim(equation: str, place: int) -> int | None:
    """Return the dimension of the other factor of a two-factor einsum that the factor at ``place`` does not have."""
    factors = equation.replace(" ", "").partition("->")[0].split(",")
    if len(factors) != 2 or "." in equation:
        return None
    own = [dim for dim, letter in enumerate(factors[1 - place]) if letter not in factors[place]]
    return own[0] - len(factors[1 - place]) if len(own) == 1 else None


def _weighed(values: object, dim: int | None) -> tuple[fx.Node, int] | None:
    """Return the values that attention weights are applied to, and their dimension that is not summed over."""
    return (values, dim) if isinstance(values, fx.Node) and dim is not None else None


def _channels_lie_along(node: fx.Node, dim: int) -> bool:
    """Return whether the channels of the nearest ancestor with known channels lie along dimension ``dim`` of ``node``.

    The channels of that ancestor are numbered, and the numbers are passed through the operations down to ``node``.
    """
    numbers = _numbered(node)
    if not isinstance(numbers, Tensor) or numbers.ndim < 2:
        return False
    return bool((numbers.amax(dim) != numbers.amin(dim)).any())


def _numbered(node: fx.Node) -> Any:
    """Return the channel number of each element of the value of ``node``; None if unknown."""
    way = [node]
    while (start := _start(way[-1])) is None:
        above = next((one for one in way[-1].all_input_nodes if one.meta.get("carries")), None)
        if above is None or len(way) > _MAX_MOVES:
            return None
        way.append(above)
    numbers: Any = start
    for above, one in zip(way[:0:-1], way[-2::-1], strict=True):
        numbers = _moved(one, above, numbers)
        if numbers is None:
            return None
    return numbers


def _start(node: fx.Node) -> Tensor | None:
    """Return the numbers of the channels of a value whose axes are known."""
    value, axes = node.meta.get("value"), axes_of(node)
    if not isinstance(value, Tensor):
        return None
    if last_is_channels(node):  # takes precedence over the inferred axes
        dim = value.ndim - 1
    elif axes is not None and "C" in axes:
        dim = axes.index("C")
    else:
        return None
    along = [1] * value.ndim
    along[dim] = value.shape[dim]
    return torch.arange(value.shape[dim], dtype=torch.int32).reshape(along).expand(value.shape)


def _moved(node: fx.Node, above: fx.Node, numbers: Any) -> Any:
    """Apply ``node`` to the channel numbers of the node ``above``; return None if unknown."""
    value, before = node.meta.get("value"), above.meta.get("value")
    alike = isinstance(value, Tensor) and isinstance(before, Tensor) and value.shape == before.shape
    if alike and operation_or_class(node) not in (*PERMUTES, "getattr"):
        return numbers  # scaled, normalized, …
    if node.op not in ("call_function", "call_method"):
        return None

    return computed(node, lambda one: numbers if one is above else one.meta.get("value"))
