"""Image positions of the tokens ``[N, L, C]`` of a transformer.

A transformer flattens a map of patches, row by row, and prepends tokens that have no position: a class token,
registers. Their number can be read from the graph: the map is an ancestor of the tokens, and the tokens in excess of
its positions come first, unless the graph shows another order. Their kind is declared by the model or inferred from
parameter names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxcore.graph.operations import axes_of, map_size
from fxcore.graph.tokens.patches import MAX_PREFIX, is_class_token
from fxcore.graph.tokens.prefix_tokens import ADDS_PREFIX, DECLARED, NO_PREFIX, UNKNOWN_PREFIX, PrefixTokens
from fxcore.graph.tokens.token_order import ELSEWHERE, token_order
from fxcore.passes.attention import ATTENTION
from fxcore.tracing.names import MODULE, PATH
from fxcore.tracing.reachable import with_ancestors

_REORDERING = ("unroll",)
"""Names of modules that reorder tokens: Hiera's ``unroll`` orders them by attention window."""


@dataclass(frozen=True)
class TokenGrid:
    """The grid of image positions that tokens stand for.

    Attributes:
        node: name of the node whose map was flattened.
        height, width: size of that map at the input size that the graph is annotated for.
        prefix: number of tokens before those of the grid.
        class_token: whether the first prefix token is a class token.

    >>> from fxcore import model_graph
    >>> graph = model_graph("vit_b_16")
    >>> token_grid(graph.by_name["encoder.ln"])
    TokenGrid(node='conv_proj', height=14, width=14, prefix=1, class_token=True)
    """

    node: str
    height: int
    width: int
    prefix: int
    class_token: bool

    def at(self, size: tuple[int, int], usual: tuple[int, int], length: int) -> tuple[int, int] | None:
        """Return height and width of the grid for another input size; None if ``length`` does not match that grid.

        Args:
            size: height and width of the other input.
            usual: height and width of the input that this grid belongs to.
            length: number of tokens, including the prefix.
        """
        height, width = size[0] * self.height // usual[0], size[1] * self.width // usual[1]
        return (height, width) if self.prefix + height * width == length else None


def token_grid(node: fx.Node) -> TokenGrid | None:
    """Return the grid of an annotated ``node``'s tokens; None if its value is not tokens of an image.

    For self-attention weights ``[N, heads, L, L]``, return the grid of queries and keys. Tokens that do not end with
    those of the grid, row by row, have none.
    """
    grid, order = _found(node)
    return grid if grid is not None and (order is None or _is_usual(order, grid.prefix)) else None


def prefix_tokens(node: fx.Node) -> PrefixTokens:
    """Return the tokens of an annotated ``node`` that do not stand for a position; none for values not ``[N, L, C]``.

    Without an image grid, the count follows from the positions of a clip, or from the model's declaration. Values with
    three dimensions and unknown layout are assumed to be tokens.
    """
    if not _are_tokens(node, (None, "NLC")):
        return NO_PREFIX
    grid, order = _found(node)
    if grid is not None and order is not None and not _is_usual(order, grid.prefix):
        if ELSEWHERE not in order:
            return NO_PREFIX
        comes_first = torch.equal(order == ELSEWHERE, torch.arange(len(order)) < grid.prefix)
        return PrefixTokens(grid.prefix, grid.class_token) if comes_first else UNKNOWN_PREFIX
    if grid is not None:
        return PrefixTokens(grid.prefix, grid.class_token)
    ancestors = list(with_ancestors([node]))
    if not any(n.meta.get(ADDS_PREFIX) for n in ancestors):
        return NO_PREFIX
    length = node.meta["value"].shape[1]
    volume = _positions(length, {volume for n in ancestors for volume in _volumes(n)}, node)
    declared = node.meta.get(DECLARED)
    if volume is None and declared is None and node.meta.get("axes") is None:
        return UNKNOWN_PREFIX
    count = length - volume if volume is not None else declared.count if declared is not None else 0
    return PrefixTokens(count if count < length else 0, _with_class_token(node, ancestors))


def _found(node: fx.Node) -> tuple[TokenGrid | None, Tensor | None]:
    """Return the grid that ``node``'s tokens would have in the usual order, and their order if it is known."""
    value = node.meta.get("value")
    if not isinstance(value, Tensor):
        return None, None
    weights = node.meta.get(ATTENTION) and value.ndim == 4 and value.shape[2] == value.shape[3]
    if not weights and not _are_tokens(node):
        return None, None
    length = value.shape[-1] if weights else value.shape[1]
    ancestors = list(with_ancestors([node]))
    if any(str(n.meta.get(MODULE)).rpartition(".")[2] in _REORDERING for n in ancestors):
        return None, None
    grids = {height * width: (height, width, n) for n in reversed(ancestors) for height, width in _sizes(n)}
    area = _positions(length, grids, node)
    if area is None:
        return None, None
    height, width, source = grids[area]
    prefix = length - area
    order = token_order(node, source, area)
    class_token = prefix > 0 and _with_class_token(node, ancestors)
    known = order if order is not None and len(order) == length else None
    if prefix and known is None and not _may_add(node, prefix, ancestors):
        return None, None
    return TokenGrid(source.meta[PATH], height, width, prefix, class_token), known


def _may_add(node: fx.Node, prefix: int, ancestors: Sequence[fx.Node]) -> bool:
    """Return whether the model or one of ``ancestors`` may add ``prefix`` tokens. Others are no prefix, such as the
    queries of a detector."""
    declared = node.meta.get(DECLARED)
    if declared is not None and declared.count == prefix:
        return True
    return any(n.meta.get(ADDS_PREFIX) or n.meta.get("patches") for n in ancestors)


def _is_usual(order: Tensor, prefix: int) -> bool:
    """Return whether ``order`` is ``prefix`` tokens without a position, then those of all positions, row by row."""
    positions = torch.arange(len(order) - prefix)
    return torch.equal(order[prefix:], positions) and bool((order[:prefix] == ELSEWHERE).all())


def _are_tokens(node: fx.Node, axes: Collection[str | None] = ("NLC",)) -> bool:
    value = node.meta.get("value")
    return isinstance(value, Tensor) and value.ndim == 3 and node.meta.get("axes") in axes


def _positions(length: int, areas: Collection[int], node: fx.Node) -> int | None:
    """Return how many of ``length`` tokens stand for positions; ``areas`` are the possible numbers."""
    # Do not just use the nearest map: in some attention, keys come from a smaller one.
    fitting = [area for area in areas if length - MAX_PREFIX <= area <= length]
    declared = node.meta.get(DECLARED)
    if declared is not None and length - declared.count in fitting:
        return int(length - declared.count)
    return max(fitting, default=None)


def _with_class_token(node: fx.Node, ancestors: Sequence[fx.Node]) -> bool:
    """Return whether the prefix tokens of ``node`` begin with a class token, as declared or by parameter names.

    A single prefix token need not be a class token: some models have a single register.
    """
    declared = node.meta.get(DECLARED)
    return declared.class_token if declared is not None else any(map(_has_class_token, ancestors))


def _sizes(node: fx.Node) -> list[tuple[int, int]]:
    """Return height and width of the node's feature map or grid of patches, in a list; empty if it has neither, or only
    a single position."""
    if patches := node.meta.get("patches"):
        return [(patches.height, patches.width)]
    size = map_size(node) if PATH in node.meta and axes_of(node) in ("NCHW", "NHWC") else None
    return [] if size in (None, (1, 1)) else [size]


def _volumes(node: fx.Node) -> list[int]:
    """Return the number of positions of the node's clip, in a list; empty if the value is not a clip."""
    if axes_of(node) not in ("NCTHW", "NTHWC"):
        return []
    shape = node.meta["value"].shape
    return [shape[1:].numel() // shape[node.meta["axes"].index("C")]]


def _has_class_token(node: fx.Node) -> bool:
    patches = node.meta.get("patches")
    return patches.class_token if patches else node.op == "get_attr" and is_class_token(str(node.target))
