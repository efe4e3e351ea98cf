"""Image positions of the tokens ``[N, L, C]`` of a transformer.

A transformer flattens a map of patches, row by row, and prepends tokens that have no position: a class token,
registers. How many there are shows in the graph: the map is an ancestor of the tokens, and tokens in excess of its
positions come first. What they are the model declares, or the names of its parameters say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from fxcore.graph.tokens.patches import MAX_PREFIX, is_class_token
from fxcore.graph.tokens.prefix_tokens import ADDS_PREFIX, DECLARED, NO_PREFIX, PrefixTokens
from fxcore.passes.attention import ATTENTION
from fxcore.tracing.names import MODULE, PATH

_REORDERING = ("unroll",)
"""Names of modules that do not keep tokens row by row: Hiera's orders them by the windows of its attention."""


@dataclass(frozen=True)
class TokenGrid:
    """The grid of image positions that tokens stand for.

    Attributes:
        node: name of the node whose map was flattened.
        height, width: of that map, at the input size that the graph is annotated for.
        prefix: number of tokens before those of the grid.
        class_token: whether the first of them is a class token.

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
        """Return height and width of the grid of ``length`` tokens for another input.

        Args:
            size: height and width of that input.
            usual: those of the input that this grid is of.
            length: how many tokens there are, with the prefix; None is returned where they are no such grid.
        """
        height, width = size[0] * self.height // usual[0], size[1] * self.width // usual[1]
        return (height, width) if self.prefix + height * width == length else None


def token_grid(node: fx.Node) -> TokenGrid | None:
    """Return the grid of an annotated ``node``'s tokens; None if its value is no tokens of an image.

    For self-attention weights ``[N, heads, L, L]`` it is the grid of queries and keys.
    """
    value = node.meta.get("value")
    if not isinstance(value, Tensor):
        return None
    weights = node.meta.get(ATTENTION) and value.ndim == 4 and value.shape[2] == value.shape[3]
    if not weights and not _are_tokens(node):
        return None
    length = value.shape[-1] if weights else value.shape[1]
    ancestors = _ancestors(node)
    if any(str(n.meta.get(MODULE)).rpartition(".")[2] in _REORDERING for n in ancestors):
        return None
    grids = {height * width: (height, width, n) for n in reversed(ancestors) for height, width in _sizes(n)}
    area = _positions(length, grids, node)
    if area is None:
        return None
    height, width, source = grids[area]
    prefix = length - area
    return TokenGrid(source.meta[PATH], height, width, prefix, prefix > 0 and _with_class_token(node, ancestors))


def prefix_tokens(node: fx.Node) -> PrefixTokens:
    """Return the tokens of an annotated ``node`` that stand for no position: none of values that are not ``[N, L, C]``.

    Without a grid of an image they are counted by the positions of a clip, or as the model declares them. Values of
    three dimensions and unknown layout are taken to be tokens.
    """
    if not _are_tokens(node, (None, "NLC")):
        return NO_PREFIX
    grid = token_grid(node)
    if grid is not None:
        return PrefixTokens(grid.prefix, grid.class_token)
    ancestors = _ancestors(node)
    if not any(n.meta.get(ADDS_PREFIX) for n in ancestors):
        return NO_PREFIX
    length = node.meta["value"].shape[1]
    volume = _positions(length, {volume for n in ancestors for volume in _volumes(n)}, node)
    declared = node.meta.get(DECLARED)
    count = length - volume if volume is not None else declared.count if declared is not None else 0
    return PrefixTokens(count if count < length else 0, _with_class_token(node, ancestors))


def _are_tokens(node: fx.Node, axes: Collection[str | None] = ("NLC",)) -> bool:
    value = node.meta.get("value")
    return isinstance(value, Tensor) and value.ndim == 3 and node.meta.get("axes") in axes


def _positions(length: int, areas: Collection[int], node: fx.Node) -> int | None:
    """Return how many of ``length`` tokens stand for positions, of which there may be as many as any of ``areas``."""
    # Not those of the nearest map: the keys of some attention come from a smaller one.
    fitting = [area for area in areas if length - MAX_PREFIX <= area <= length]
    declared = node.meta.get(DECLARED)
    if declared is not None and length - declared.count in fitting:
        return int(length - declared.count)
    return max(fitting, default=None)


def _with_class_token(node: fx.Node, ancestors: Sequence[fx.Node]) -> bool:
    """Return whether the prefix tokens of ``node`` begin with a class token: as the model declares, or by the names of
    its parameters. A single token need not be one: some models have a single register."""
    declared = node.meta.get(DECLARED)
    return declared.class_token if declared is not None else any(map(_has_class_token, ancestors))


def _ancestors(node: fx.Node) -> list[fx.Node]:
    seen = {node}
    waiting = [node]
    for found in waiting:
        for above in found.all_input_nodes:
            if above not in seen:
                seen.add(above)
                waiting.append(above)
    return waiting


def _sizes(node: fx.Node) -> list[tuple[int, int]]:
    """Height and width of the node's feature map, or grid of patches, in a list; empty if it has none, or a map of a
    single position."""
    if patches := node.meta.get("patches"):
        return [(patches.height, patches.width)]
    value, axes = node.meta.get("value"), node.meta.get("axes") or ""
    if PATH not in node.meta or not isinstance(value, Tensor) or axes not in ("NCHW", "NHWC") or value.ndim != 4:
        return []
    height, width = value.shape[axes.index("H")], value.shape[axes.index("W")]
    return [(height, width)] if height * width > 1 else []


def _volumes(node: fx.Node) -> list[int]:
    """Return the number of positions of the node's clip, in a list; empty if it has none."""
    value = node.meta.get("value")
    if not isinstance(value, Tensor) or node.meta.get("axes") not in ("NCTHW", "NTHWC") or value.ndim != 5:
        return []
    channels = node.meta["axes"].index("C")
    return [value.shape[1:].numel() // value.shape[channels]]


def _has_class_token(node: fx.Node) -> bool:
    patches = node.meta.get("patches")
    return patches.class_token if patches else node.op == "get_attr" and is_class_token(str(node.target))
