"""The axes of annotated nodes, and what operations do to axes and positions, by the name of the function, method or
attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

PERMUTES = {
    *("permute", "transpose", "transpose_", "swapaxes", "swapaxes_", "swapdims", "swapdims_", "movedim", "moveaxis"),
    *("t", "t_", "adjoint"),
}
"""Operations that reorder axes."""

PERMUTING_ATTRIBUTES = {"T", "mT", "H", "mH"}

RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
"""Operations that split or merge axes, and keep the order of all elements."""

PRODUCTS = {"matmul", "__matmul__", "bmm"}

JOINS = {"cat", "concat", "concatenate", "hstack", "getitem", "narrow"}
"""Operations that join or cut along an axis. With the same rank, the result has the axes of its inputs."""

MOVES = {"flip", "roll", "split", "split_with_sizes", "tensor_split", "chunk"}
"""Operations that move or cut positions, and keep axes."""

SHUFFLES = {"sort", "gather", "take_along_dim", "index_select", "scatter", "masked_select"}
"""Operations that move positions in ways that depend on values."""

SUMS = {"add", "add_", "iadd", "sub", "sub_", "isub"}
"""Operations by which a residual block changes the values of positions."""

UNCLEAR = {"rot90", "tensordot", "as_strided", "rearrange"}
"""Operations that may reorder axes, in ways that are not followed."""

KEEPS = JOINS | {
    *("linear", "matmul", "bmm", "baddbmm", "conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("max_pool1d", "max_pool3d", "avg_pool1d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "lp_pool1d", "lp_pool2d", "upsample"),
    *("interpolate", "pixel_shuffle", "pixel_unshuffle", "grid_sample", "fold", "pad", "constant_pad_nd", "glu"),
    *("mean", "sum", "amax", "amin", "max", "min", "prod", "std", "var", "norm", "vector_norm", "logsumexp", "all"),
    *("any", "argmax", "argmin", "median", "add", "iadd", "sub", "mul", "imul", "div", "truediv", "floordiv", "pow"),
    *("where", "maximum", "minimum", "lerp", "addcmul", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and_", "or_", "dequantize", "index_select", "gather", "take_along_dim", "slice_scatter"),
    *("expand", "expand_as", "repeat", "repeat_interleave", "tile", "broadcast_to", "diff", "topk"),
}
"""Operations whose result has the axes of their input if it has the same rank. Sizes may change."""


def axes_of(node: Any) -> str | None:
    """Return the axes of a node's tensor, one letter per dimension; None if they are unknown, or it is no such node."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("value"), Tensor):
        return None
    axes: str | None = node.meta.get("axes")
    return axes if axes and len(axes) == node.meta["value"].ndim else None


def map_size(node: fx.Node) -> tuple[int, int] | None:
    """Return height and width of a node's feature map; None if it has none, or one without positions."""
    axes = axes_of(node)
    if axes is None or "H" not in axes or "W" not in axes:
        return None
    height, width = (node.meta["value"].shape[axes.index(axis)] for axis in "HW")
    return (height, width) if height and width else None


def computed(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Call ``node``'s function or method with ``value_of`` each input; return None if that fails."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    try:
        if callable(node.target):
            return node.target(*args, **kwargs)
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None
