"""The regions of a request that are pooled instead of whole maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from fxcore.extractor import OutputInfo
from fxcore.graph.layout import TOKENS
from fxcore.pooling import MapGrid

Boxes = Sequence[Sequence[Sequence[float]]]
"""For each image its boxes: x1, y1, x2, y2 in pixels of the image."""


@dataclass(frozen=True)
class Regions:
    """The boxes of one request. Its response has a row for each, in the order of the images.

    Attributes:
        boxes: float32 ``[n, 4]`` for each image, in pixels of the model's input.
        grids: for each image the maps that the boxes are on, by the outputs' keys.
    """

    boxes: Sequence[Tensor]
    grids: Sequence[Mapping[str, MapGrid]]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.boxes), initial=0))

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return self._ends[-1]

    @property
    def box_image(self) -> Tensor:
        """The index of each box's image, int64 ``[count]``."""
        counts = torch.tensor([len(boxes) for boxes in self.boxes])
        return torch.repeat_interleave(torch.arange(len(self.boxes)), counts)

    def of(self, images: range) -> range:
        """Return the indices of these images' boxes among all boxes."""
        return range(self._ends[images.start], self._ends[images.stop])


def grid_of(info: OutputInfo, shape: Sequence[int], size: tuple[int, int], usual: tuple[int, int]) -> MapGrid | None:
    """Return the grid of an output's map; None where it is no map.

    The stride is the network's, a power of two, where it rounds to the map's size; else, as with patches of 14 pixels,
    the one that divides the input.

    Args:
        info: the output.
        shape: of its value.
        size: height and width of the model's input.
        usual: those of the input that the extractor is described for.
    """
    if info.rows_per_image != 1:
        return None
    if info.layout == TOKENS:
        if info.tokens is None or len(shape) != 3:
            return None
        stride_y, stride_x = usual[0] / info.tokens.height, usual[1] / info.tokens.width
        height, width = int(size[0] // stride_y), int(size[1] // stride_x)
        prefix = info.tokens.prefix
        return MapGrid(height, width, stride_y, stride_x, prefix) if prefix + height * width == shape[1] else None
    if info.layout not in ("NCHW", "NHWC") or len(shape) != 4 or info.stride is None:
        return None
    height, width = shape[info.layout.index("H")], shape[info.layout.index("W")]
    stride_y, stride_x = (_stride(full, part, info.stride) for full, part in zip(size, (height, width), strict=True))
    return MapGrid(height, width, stride_y, stride_x)


def _stride(full: int, part: int, power: int) -> float:
    return full / part if -(-full // power) != part and full % part == 0 else power
