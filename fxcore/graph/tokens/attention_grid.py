"""Image positions of the rows and columns of attention weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import Tensor, fx
from torchvision.models.swin_transformer import shifted_window_attention

from fxcore.graph.tokens.token_grid import token_grid
from fxcore.passes.attention import ATTENTION, window_attention


@dataclass(frozen=True)
class AttentionGrid:
    """The map whose positions attend to each other.

    Attributes:
        height, width: size of that map at the input size that the graph is annotated for.
        prefix: number of tokens before those of the map; they take part in the attention.
        window: height and width of the windows that the map is partitioned into, row by row, after padding at the
            bottom and right to whole windows; None for global attention.
        shift: rows and columns by which the map is rolled, up and to the left, before partitioning.

    >>> from fxcore import model_graph
    >>> graph = model_graph("swin_t").with_nodes_of("attention_maps")
    >>> attention_grid(graph.by_name["features.1.1.attn.attention"])
    AttentionGrid(height=56, width=56, prefix=0, window=(7, 7), shift=(3, 3))
    """

    height: int
    width: int
    prefix: int
    window: tuple[int, int] | None = None
    shift: tuple[int, int] = (0, 0)


def attention_grid(node: fx.Node) -> AttentionGrid | None:
    """Return the grid of an annotated ``node`` with attention weights ``[N, heads, L, L]`` or ``[N, windows, heads, L,
    L]``.

    None if the value is not such weights, or the graph does not show their positions.
    """
    value = node.meta.get("value")
    if ATTENTION not in node.meta or not isinstance(value, Tensor) or value.shape[-1] != value.shape[-2]:
        return None
    if node.target is window_attention:
        return _windows(node, value)
    grid = token_grid(node) if value.ndim == 4 else None
    return None if grid is None else AttentionGrid(grid.height, grid.width, grid.prefix)


def _windows(node: fx.Node, value: Tensor) -> AttentionGrid | None:
    given = inspect.signature(shifted_window_attention).bind(*node.args, **node.kwargs).arguments
    image = given["input"].meta.get("value")
    sizes, shifts = list(given["window_size"]), list(given["shift_size"])
    if not isinstance(image, Tensor) or image.ndim != 4 or len(sizes) != 2:
        return None
    sides = image.shape[1], image.shape[2]
    counts = [-(-side // size) for side, size in zip(sides, sizes, strict=True)]
    if (value.shape[1], value.shape[-1]) != (counts[0] * counts[1], sizes[0] * sizes[1]):
        return None
    # A window as large as the map is not shifted.
    rolled = [shift if count > 1 else 0 for shift, count in zip(shifts, counts, strict=True)]
    return AttentionGrid(*sides, 0, (sizes[0], sizes[1]), (rolled[0], rolled[1]))
