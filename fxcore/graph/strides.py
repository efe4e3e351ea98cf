"""Strides of feature maps: input pixels per position."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from fxcore.graph.operations import axes_of, map_size
from fxcore.graph.tokens.patches import MAX_PREFIX
from fxcore.tracing.names import PATH

_MARGIN = 3.0
"""Positions by which a map may differ from the input's size divided by the stride, for want of padding or because of
it."""


class Strides:
    """The strides of a graph's feature maps: powers of two, except where only another number fits, as patches of 14.

    Maps larger than the input have none.

    Args:
        size: height and width of the input.
        nodes: the graph's annotated nodes by name.
        usual: the strides at the model's usual input size, which are kept where they fit: maps of small inputs have too
            few positions to tell.
    """

    def __init__(self, size: tuple[int, int], nodes: Mapping[str, fx.Node], usual: Strides | None = None) -> None:
        self._size = size
        self._maps = {name: map for name, node in nodes.items() if (map := map_size(node)) is not None}
        self._strides = {name: self._stride(name, map, usual) for name, map in self._maps.items()}
        of_size = {map: self._strides[name] for name, map in self._maps.items()}
        for name, (height, width) in self._maps.items():
            halved, stride = of_size.get((2 * height, 2 * width)), self._strides[name]
            if halved and stride and stride & (stride - 1):  # with padding, 200 pixels may make 8 positions of 32
                self._strides[name] = 2 * halved

    def of(self, name: str) -> int | None:
        """Return input pixels per position of the map of the node ``name``; None if it has no map."""
        return self._strides.get(name)

    def may_be(self, node: fx.Node, stride: int) -> bool:
        """Return whether the value of ``node`` may be a map or tokens of that stride, as far as its shape shows it."""
        known, axes = self.of(node.meta.get(PATH, "")), axes_of(node)
        if known is not None:
            return known == stride
        if axes is None or "L" not in axes:
            return True
        height, width = (-(-side // stride) for side in self._size)
        length: int = node.meta["value"].shape[axes.index("L")]
        return height * width <= length <= height * width + MAX_PREFIX

    def _stride(self, name: str, map: tuple[int, int], usual: Strides | None) -> int | None:
        sides = tuple(zip(self._size, map, strict=True))
        if any(part > full + _MARGIN for full, part in sides):
            return None  # enlarged, so that its stride is no whole number
        kept = None if usual is None or usual._is_fixed(name, map, self._size) else usual.of(name)
        if kept is not None and usual is not None:
            # A model may pad its input to a multiple of its deepest stride.
            padded = max(filter(None, usual._strides.values())) / kept
            if all(-_MARGIN <= part - full / kept <= max(padded, _MARGIN) for full, part in sides):
                return kept
        if max(map) < 2:
            return None  # pooled away
        # Without padding, maps of other sizes may happen to divide their input.
        vertical, horizontal = (_fitting(full, part, exactly=usual is None) for full, part in sides)
        return vertical if vertical == horizontal else None

    def _is_fixed(self, name: str, map: tuple[int, int], size: tuple[int, int]) -> bool:
        """Return whether inputs of two sizes make a map of one size, as adaptive pooling does."""
        return size != self._size and self._maps.get(name) == map


def _fitting(full: int, part: int, exactly: bool) -> int:
    """Return the stride that makes ``part`` positions of ``full`` pixels, a power of two.

    Args:
        exactly: return another number if no power fits and it divides ``full``.
    """
    nearest: int = 2 ** round(math.log2(max(1.0, full / part)))
    # A map of a few positions may be mostly padding: 65 pixels at stride 32 make 3 positions, which is nearer to 16.
    for power in (nearest, 2 * nearest):
        if -(-full // power) == part:
            return power
    return full // part if exactly and full % part == 0 else nearest
