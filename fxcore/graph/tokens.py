"""Image positions of the tokens ``[N, L, C]`` of a transformer.

A transformer flattens a map of patches, row by row, and prepends tokens that have no position: a class token,
registers. Both show in the graph: the map is an ancestor of the tokens, and tokens in excess of its positions come
first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from fxcore.graph.patches import MAX_PREFIX, is_class_token
from fxcore.tracing.tracer import MODULE, PATH
from fxcore.transforms.attention import ATTENTION

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


def token_grid(node: fx.Node) -> TokenGrid | None:
    """The grid of an annotated ``node``'s tokens; None if its value is no tokens of an image.

    For self-attention weights ``[N, heads, L, L]`` it is the grid of queries and keys.
    """
    value = node.meta.get("value")
    if not isinstance(value, Tensor):
        return None
    weights = node.meta.get(ATTENTION) and value.ndim == 4 and value.shape[2] == value.shape[3]
    if not weights and (node.meta.get("axes") != "NLC" or value.ndim != 3):
        return None
    length = value.shape[-1] if weights else value.shape[1]
    ancestors = _ancestors(node)
    if any(str(n.meta.get(MODULE)).rpartition(".")[2] in _REORDERING for n in ancestors):
        return None
    # Not the nearest map: the keys of some attention come from a smaller one.
    grids = [(height * width, height, width, n) for n in ancestors for height, width in _sizes(n)]
    fitting = [grid for grid in grids if length - MAX_PREFIX <= grid[0] <= length]
    if not fitting:
        return None
    area, height, width, source = max(fitting, key=lambda grid: grid[0])
    prefix = length - area
    named = any(map(_has_class_token, ancestors))
    return TokenGrid(source.meta[PATH], height, width, prefix, prefix == 1 or (prefix > 1 and named))


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


def _has_class_token(node: fx.Node) -> bool:
    patches = node.meta.get("patches")
    return patches.class_token if patches else node.op == "get_attr" and is_class_token(str(node.target))
