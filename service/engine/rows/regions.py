"""The regions of a request that are pooled instead of whole maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from fxcore.extractor import OutputInfo
from fxcore.graph.axes.layout import TOKENS
from fxcore.pooling import MapGrid


@dataclass(frozen=True)
class Regions:
    """The regions of one request. Its response has one row per region, in the order of the images.

    Attributes:
        counts: number of regions of each image.
        placed: for each image, its regions on the maps, by output key: boxes float32 ``[n, 4]`` and points ``[n, 2]``
            in pixels of the model's input, masks as weights ``[n, positions]``.
        grids: for each image, the grids of its maps, by output key.
    """

    counts: Sequence[int]
    placed: Sequence[Mapping[str, Tensor]]
    grids: Sequence[Mapping[str, MapGrid]]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.counts, initial=0))

    @property
    def count(self) -> int:
        """The total number of regions."""
        return self._ends[-1]

    @cached_property
    def image(self) -> Tensor:
        """The index of each region's image, int64 ``[count]``."""
        return torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))

    def of(self, images: range) -> range:
        """Return the indices of these images' regions among all regions."""
        return range(self._ends[images.start], self._ends[images.stop])


def grid_of(info: OutputInfo, shape: Sequence[int], size: tuple[int, int], usual: tuple[int, int]) -> MapGrid | None:
    """Return the grid of an output's map; None if it is not a map.

    The stride is the network's, except for maps that it does not make: larger ones, as of MobileViT v2, which enlarges
    maps to whole patches, and others that divide the input, as after adaptive pooling. Theirs is the input size divided
    by the map size.

    Args:
        info: the output.
        shape: shape of its value.
        size: height and width of the model's input.
        usual: height and width of the input that the extractor's description assumes.
    """
    if info.rows_per_image != 1:
        return None
    if info.layout == TOKENS:
        if info.tokens is None or len(shape) != 3:
            return None
        sides = info.tokens.at(size, usual, shape[1])
        strides = usual[0] / info.tokens.height, usual[1] / info.tokens.width
        return None if sides is None else MapGrid(*sides, *strides, info.tokens.prefix)
    if info.layout not in ("NCHW", "NHWC") or len(shape) != 4 or info.stride is None:
        return None
    height, width = shape[info.layout.index("H")], shape[info.layout.index("W")]
    stride_y, stride_x = (_stride(full, part, info.stride) for full, part in zip(size, (height, width), strict=True))
    return MapGrid(height, width, stride_y, stride_x)


def _stride(full: int, part: int, usual: int) -> float:
    made = -(-full // usual)
    return full / part if part > made or (part < made and full % part == 0) else usual
