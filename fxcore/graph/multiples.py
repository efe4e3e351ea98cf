"""The number of pixels that each side of a model's input should be a multiple of."""

from __future__ import annotations

import math

from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.tokens.token_grid import token_grid


def multiple_of(graph: ModelGraph) -> int:
    """Return the patch size of a token model, else the deepest stride of the feature maps; 1 without feature maps.

    >>> from fxcore import model_graph
    >>> multiple_of(model_graph("vit_b_16")), multiple_of(model_graph("swin_t")), multiple_of(model_graph("vgg11"))
    (16, 32, 32)
    """
    return _deepest(graph) * graph.entry.multiple


def _deepest(graph: ModelGraph) -> int:
    if graph.levels:
        return max(level.stride for level in graph.levels.values())
    strides = [1]
    for node in graph.graph.nodes:
        grid = token_grid(node)
        if grid is not None:
            # Unlike strides of maps, never rounded to a power of two.
            strides += [math.ceil(graph.input_size[0] / grid.height), math.ceil(graph.input_size[1] / grid.width)]
    if len(strides) == 1:
        strides += [stride for node in graph.graph.nodes if (stride := graph.stride_of(node))]
    return max(strides)
