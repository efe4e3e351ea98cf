"""The patches of a leaf module that converts images to tokens, such as the embeddings of some transformers.

Its output ``[N, L, C]`` has tokens without a position first, then a token for each patch, row by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, fx, nn

MAX_PREFIX = 64
"""Maximum number of tokens before those of the patches. Published models have at most 16."""


class Patches(NamedTuple):
    """The grid of patches that tokens stand for, and whether a class token precedes them."""

    height: int
    width: int
    class_token: bool


def patches_of(node: fx.Node, value: Any, module: nn.Module | None) -> Patches | None:
    """Return the patches that ``node``'s tokens stand for; None if ``node`` does not convert images to tokens.

    The patches are those of the module's only convolution.

    Args:
        node: a node whose inputs are annotated.
        value: its value.
        module: the module that it calls; None for other nodes.
    """
    above = node.all_input_nodes[0] if node.all_input_nodes else None
    if module is None or above is None or above.meta.get("axes") != "NCHW":
        return None
    image = above.meta.get("value")
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    if not isinstance(value, Tensor) or value.ndim != 3 or not isinstance(image, Tensor) or len(convolutions) != 1:
        return None
    (conv,) = convolutions
    height, width = (side // stride for side, stride in zip(image.shape[2:], conv.stride, strict=True))
    prefix = value.shape[1] - height * width
    if conv.kernel_size != conv.stride or value.shape[2] != conv.out_channels or not 0 <= prefix <= MAX_PREFIX:
        return None
    named = any(is_class_token(name) for name, _ in module.named_parameters())
    return Patches(height, width, prefix > 0 and named)


def is_class_token(name: str) -> bool:
    """Return whether the parameter with this name or path is a class token.

    >>> is_class_token("embeddings.cls_token"), is_class_token("class_embedding"), is_class_token("classes.weight")
    (True, True, False)
    """
    last = name.rpartition(".")[2]
    return "cls" in last or "class" in last
