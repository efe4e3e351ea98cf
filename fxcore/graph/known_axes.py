"""The axes that an annotated node's value has according to its ``meta``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx


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
