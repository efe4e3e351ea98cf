"""The number of pixels that each side of a model's input should be a multiple of."""

from __future__ import annotations

import math
from fractions import Fraction

from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.tokens.token_grid import token_grid


def multiple_of(graph: ModelGraph) -> int:
    """Return the least common multiple of the patch sizes of a token model, else the deepest stride of the feature
    maps; 1 without feature maps.

    >>> from fxcore import model_graph
    >>> multiple_of(model_graph("vit_b_16")), multiple_of(model_graph("swin_t")), multiple_of(model_graph("vgg11"))
    (16, 32, 32)
    """
    return _deepest(graph) * graph.entry.multiple


def _deepest(graph: ModelGraph) -> int:
    if graph.levels:
        return max(level.stride for level in graph.levels.values())
    # Unlike strides of maps, sides of patches are never rounded to a power of two.
    grids = [grid for node in graph.graph.nodes if (grid := token_grid(node)) is not None]
    patches = [Fraction(side, n) for g in grids for side, n in zip(graph.input_size, (g.height, g.width), strict=True)]
    if not patches:
        return max([1, *(stride for node in graph.graph.nodes if (stride := graph.stride_of(node)))])
    # CrossViT resizes the image for its second branch, whose patches are 120/7 of its pixels: 7 of them are whole.
    # Of patches that overlap, as PiT's, only the number at the usual size is known.
    whole = math.lcm(*(patch.numerator for patch in patches))
    return whole if whole < min(graph.input_size) else max(map(math.ceil, patches))
