"""The order of a transformer's tokens: which position of a map each of them stands for.

Operations that join, cut, reorder or reshape tokens are applied to the numbers of their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.graph.attention_weights import own_module
from fxcore.graph.operations import JOINS, MOVES, PERMUTES, RESHAPES, SHUFFLES, SUMS, axes_of, computed, map_size
from fxcore.graph.tokens.patches import MAX_PREFIX
from fxcore.tracing.names import operation_name

ELSEWHERE = -1
"""For tokens that stand for no position, or an unknown one."""

ORDERS = "token_orders"
"""Key in the ``meta`` of a node with a map: the orders of the nodes that depend on it, by its number of positions."""

_MAX_PLACES = 1 << 24
"""Maximum number of elements of a value whose positions are followed through views."""

# Orders by node: an index for each token, a tuple of such orders for a tuple of tensors, or None if unknown.
_Orders = Mapping[fx.Node, Any]


def token_order(node: fx.Node, source: fx.Node, area: int) -> Tensor | None:
    """Return the position, or :data:`ELSEWHERE`, of each token of an annotated ``node``; None if unknown.

    Args:
        source: its ancestor whose map of ``area`` positions, row by row, is flattened into tokens.
    """
    known = source.meta.setdefault(ORDERS, {})
    if area not in known:
        known[area] = _orders(source, area)
    order: Tensor | None = known[area].get(node.name)
    return order


def _orders(source: fx.Node, area: int) -> dict[str, Tensor]:
    """Return the known orders of ``source`` and of the nodes that depend on it, by the nodes' names in torch.fx."""
    orders: dict[fx.Node, Any] = {}
    reshaped: dict[fx.Node, Tensor] = {}
    for node in source.graph.nodes:
        if node.op == "output" or (node is not source and orders.keys().isdisjoint(node.all_input_nodes)):
            continue
        places = _reshaped(node, orders, reshaped, area)
        if places is not None:
            reshaped[node] = places
        orders[node] = _order(node, orders, area) if places is None else _order_in(places, node, orders)
    return {node.name: order for node, order in orders.items() if isinstance(order, Tensor)}


def _reshaped(node: fx.Node, orders: _Orders, reshaped: Mapping[fx.Node, Tensor], area: int) -> Tensor | None:
    """Return the position that each element of ``node``'s value stands for; None if it is no reshaped map or tokens."""
    above, value = node.args[0] if node.args else None, node.meta.get("value")
    if operation_name(node) not in RESHAPES | PERMUTES or not isinstance(above, fx.Node) or above not in orders:
        return None
    if not isinstance(value, Tensor) or value.numel() > _MAX_PLACES:
        return None
    places = reshaped.get(above)
    if places is None:
        places = _places(above, orders, area)
    made = None if places is None else computed(node, lambda n: places if n is above else n.meta["value"])
    return made if isinstance(made, Tensor) and made.shape == value.shape else None


def _places(node: fx.Node, orders: _Orders, area: int) -> Tensor | None:
    """Return the position that each element of a map or of tokens in a known order stands for; None for others."""
    value, axes = node.meta["value"], axes_of(node)
    if _orders_tokens(node, orders) and isinstance(value, Tensor):
        places: Tensor = _spread(value, orders[node], _dim(node))
        return places
    size = map_size(node) if axes in ("NCHW", "NHWC") and orders[node] is None else None
    if size is None or size[0] * size[1] != area:
        return None
    positions = torch.arange(area).view(size)
    return (positions[..., None] if axes == "NHWC" else positions).expand(value.shape)


def _order_in(places: Tensor, node: fx.Node, orders: _Orders) -> Tensor | None:
    """Return the order of the tokens of reshaped ``places``; that of its input if they are no tokens."""
    if _length(node) is None:
        above: Tensor | None = orders[node.args[0]]  # type: ignore[index]
        return above
    order: Tensor = _read(places, _dim(node))
    return order if torch.equal(places, _spread(places, order, _dim(node))) else _lost(places, node)


def _order(node: fx.Node, orders: _Orders, area: int) -> Any:
    if any(_orders_tokens(n, orders) for n in node.all_input_nodes):
        if operation_name(node) in JOINS | MOVES:
            values = {n: _spread(n.meta["value"], orders.get(n), _dim(n)) for n in node.all_input_nodes}
            result = computed(node, values.__getitem__)
            return _lost(node.meta["value"], node) if result is None else _read(result, _dim(node))
        if operation_name(node) in SHUFFLES:
            return _lost(node.meta["value"], node)
    given = [orders[n] for n in node.all_input_nodes if orders.get(n) is not None]
    length = _length(node)
    if length is None:
        return given[0] if given else None
    fitting = [order for order in given if isinstance(order, Tensor) and len(order) == length]
    if operation_name(node) in SUMS:  # values mixed from all positions change those that they are added to
        fitting = [order for order in fitting if (order != ELSEWHERE).any()] or fitting
    if any(not torch.equal(fitting[0], other) for other in fitting[1:]):
        return _lost(node.meta["value"], node)
    if given and not fitting:
        return _lost(node.meta["value"], node) if _is_torchs(node) else None
    return fitting[0] if fitting else _first(node, length, area)


def _is_torchs(node: fx.Node) -> bool:
    """Return whether ``node`` calls an operation or layer of torch, none of which adds tokens before others; an element
    of a tuple counts as the call that returned it."""
    above = node.all_input_nodes[0]
    if operation_name(node) == "getitem" and not isinstance(above.meta["value"], Tensor):
        return _is_torchs(above)
    called = type(own_module(node)) if node.op == "call_module" else node.target
    origin = getattr(called, "__module__", None) or "torch"  # methods have none
    return origin.partition(".")[0] in ("torch", "_operator")


def _first(node: fx.Node, length: int, area: int) -> Tensor | None:
    """Return the order of a map's positions where they become tokens; a module may have added tokens before them."""
    prefix = length - area
    if prefix and not (node.meta.get("patches") and 0 < prefix <= MAX_PREFIX):
        return None
    return torch.cat([torch.full((prefix,), ELSEWHERE), torch.arange(area)])


def _spread(value: Any, order: Any, dim: int) -> Any:
    """Return a tensor like ``value`` that holds the position of its token at each index; other objects as they are."""
    if isinstance(value, (tuple, list)):
        known = isinstance(order, tuple) and len(order) == len(value)
        return tuple(_spread(one, order[i] if known else None, dim) for i, one in enumerate(value))
    if not isinstance(value, Tensor) or value.ndim != 3:
        return value
    if not isinstance(order, Tensor) or len(order) != value.shape[dim]:
        order = torch.full((value.shape[dim],), ELSEWHERE)
    return (order[:, None] if dim == 1 else order).expand(value.shape)


def _read(result: Any, dim: int) -> Any:
    """Return the order that :func:`_spread` would turn into ``result``."""
    if isinstance(result, (tuple, list)):
        return tuple(_read(one, dim) for one in result)
    if not isinstance(result, Tensor) or result.ndim != 3:
        return None
    return result[0, :, 0] if dim == 1 else result[0, 0]


def _lost(value: Any, node: fx.Node) -> Tensor | None:
    tokens = isinstance(value, Tensor) and value.ndim == 3
    return torch.full((value.shape[_dim(node)],), ELSEWHERE) if tokens else None


def _orders_tokens(node: fx.Node, orders: _Orders) -> bool:
    """Return whether the order of ``node``'s tokens ``[N, L, C]`` or ``[N, C, L]``, or tuple of such, is known."""
    order, value = orders.get(node), node.meta.get("value")
    if isinstance(order, tuple):
        return True
    return order is not None and isinstance(value, Tensor) and value.ndim == 3 and len(order) == value.shape[_dim(node)]


def _length(node: fx.Node) -> int | None:
    """Return the number of ``node``'s tokens; None if its value is not tokens, but may become them again."""
    return node.meta["value"].shape[_dim(node)] if axes_of(node) in ("NLC", "NCL") else None


def _dim(node: fx.Node) -> int:
    return 2 if node.meta.get("axes") == "NCL" else 1
