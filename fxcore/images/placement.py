"""Map boxes, points and masks from an image to the model's input, after resizing and cropping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxcore.errors import BadBox, BadMask, BadPoint
from fxcore.images.masks import Mask, read_mask, shares

_TOLERANCE = 1.0
"""Pixels by which a box or a point may exceed its image, since annotations and detectors round."""

_UNSEEN = "lies outside of the part of its image that the model sees: leave it out"


class Grid(Protocol):
    """The positions of a map over the model's input, such as :class:`fxcore.pooling.MapGrid`."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def stride_y(self) -> float: ...

    @property
    def stride_x(self) -> float: ...


@dataclass(frozen=True)
class Placement:
    """The location of an image in the model's input: pixel ``(x, y)`` is at ``x * scale_x - left, y * scale_y - top``.

    Attributes:
        image: height and width of the image.
        scale_y, scale_x: resized size over original size.
        top, left: pixels of the resized image that are cropped at that side; negative for padding.
        seen: height and width of the part of the input that the image can cover: the crop, or the input without
            padding at the bottom and right.
    """

    image: tuple[int, int]
    scale_y: float
    scale_x: float
    top: int
    left: int
    seen: tuple[int, int]

    def carry(self, boxes: Sequence[Sequence[float]]) -> Tensor:
        """Convert boxes from pixels of the image to pixels of the input, float32 ``[n, 4]``.

        A box that extends beyond the input is not clipped; :func:`torchvision.ops.roi_align` pools zeros there.

        Args:
            boxes: ``x1, y1, x2, y2`` each.

        Raises:
            BadBox: a box is not four finite numbers, is empty or inverted, or lies outside the image or the part of it
                that the model sees; ``extra["box"]`` is its index.

        >>> Placement((480, 640), 0.5, 0.5, 8, 48, (224, 224)).carry([[100, 50, 300, 250]])
        tensor([[  2.,  17., 102., 117.]])
        """
        if not boxes:
            return torch.empty(0, 4)
        for index, box in enumerate(boxes):
            if len(box) != 4:
                raise BadBox(f"box {index} has {len(box)} values: write [x1, y1, x2, y2]", box=index)
        given = torch.tensor(boxes, dtype=torch.float64)
        low, high = given[:, :2], given[:, 2:]
        top_left, bottom_right = self._moved(low), self._moved(high)
        height, width = self.image
        faults = {
            "is not four finite numbers": ~given.isfinite().all(dim=1),
            "is empty or inverted: write [x1, y1, x2, y2] with x1 < x2 and y1 < y2": (low >= high).any(dim=1),
            f"reaches out of its image, which is {width} x {height} pixels": (low < -_TOLERANCE).any(dim=1)
            | (high > torch.tensor([width, height]) + _TOLERANCE).any(dim=1),
            _UNSEEN: (bottom_right <= 0).any(dim=1) | (top_left >= torch.tensor(self.seen[::-1])).any(dim=1),
        }
        if fault := _first(faults, boxes):
            raise BadBox(f"box {fault[1]}", box=fault[0])
        return torch.cat([top_left, bottom_right], dim=1).float()

    def carry_points(self, points: Sequence[Sequence[float]]) -> Tensor:
        """Convert points from pixels of the image to pixels of the input, float32 ``[n, 2]``.

        Args:
            points: ``x, y`` each.

        Raises:
            BadPoint: a point is not two finite numbers, or lies outside the image or the part of it that the model
                sees; ``extra["point"]`` is its index.

        >>> Placement((480, 640), 0.5, 0.5, 8, 48, (224, 224)).carry_points([[100, 50]])
        tensor([[ 2., 17.]])
        """
        if not points:
            return torch.empty(0, 2)
        for index, point in enumerate(points):
            if len(point) != 2:
                raise BadPoint(f"point {index} has {len(point)} values: write [x, y]", point=index)
        given = torch.tensor(points, dtype=torch.float64)
        carried = self._moved(given)
        height, width = self.image
        faults = {
            "is not two finite numbers": ~given.isfinite().all(dim=1),
            f"lies outside of its image, which is {width} x {height} pixels": _exceeds(given, self.image),
            _UNSEEN: _exceeds(carried, self.seen),
        }
        if fault := _first(faults, points):
            raise BadPoint(f"point {fault[1]}", point=fault[0])
        return carried.float()

    def carry_masks(self, masks: Sequence[Mask], grids: Sequence[Grid], first: int = 0) -> list[Tensor]:
        """Convert masks of the image to weights of the positions of each grid, float32 ``[n, height * width]``.

        A position's weight is the mask's area in it divided by the mask's whole area in the grid.

        Args:
            masks: some masks of the image.
            grids: the positions of each map.
            first: index of the first of ``masks`` among all masks of the image.

        Raises:
            BadMask: a mask is damaged, does not have the size of the image, or has no area in the part of the image
                that the model sees; ``extra["mask"]`` is its index among all.
        """
        carried = [torch.empty(len(masks), grid.height * grid.width) for grid in grids]
        edges = [
            (self._edges(0, grid.height, grid.stride_y), self._edges(1, grid.width, grid.stride_x)) for grid in grids
        ]
        for index, mask in enumerate(masks):
            try:
                pixels = read_mask(mask, self.image)
                if not pixels.any():
                    raise BadMask("is empty: leave it out")
                for shared, (ys, xs) in zip(carried, edges, strict=True):
                    areas = shares(pixels, ys, xs)
                    if not (whole := areas.sum()):
                        raise BadMask(_UNSEEN)
                    shared[index] = torch.from_numpy(areas / whole).flatten()
            except BadMask as error:
                raise BadMask(f"mask {first + index} {error.detail}", mask=first + index) from None
        return carried

    def _moved(self, points: Tensor) -> Tensor:
        """Convert points ``[n, 2]``, x first, from pixels of the image to pixels of the input."""
        scale = torch.tensor([self.scale_x, self.scale_y], dtype=torch.float64)
        return points * scale - torch.tensor([self.left, self.top], dtype=torch.float64)

    def _edges(self, axis: int, count: int, stride: float) -> NDArray[np.float64]:
        """Return the edges of ``count`` positions in pixels of the image, clipped to the part that the model sees."""
        scale, start = ((self.scale_y, self.top), (self.scale_x, self.left))[axis]
        edges = np.clip(np.arange(count + 1) * stride, 0, self.seen[axis])
        clipped: NDArray[np.float64] = np.clip((edges + start) / scale, 0, self.image[axis])
        return clipped


def cropped(image: tuple[int, int], resized: tuple[int, int], crop: tuple[int, int]) -> Placement:
    """Return the placement of an image that is resized and then cropped or padded by torchvision's ``center_crop``.

    Args:
        image, resized, crop: height and width of the image, of the resized image, and of the crop.
    """
    (height, width), (resized_height, resized_width) = image, resized
    top, left = (_before(have, want) for have, want in zip(resized, crop, strict=True))
    return Placement(image, resized_height / height, resized_width / width, top, left, crop)


def _exceeds(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Return whether each of ``points`` ``[n, 2]``, x first, lies outside of ``size`` (height, width), bool ``[n]``."""
    return ((points < -_TOLERANCE) | (points > torch.tensor(size[::-1]) + _TOLERANCE)).any(dim=1)


def _first(faults: Mapping[str, Tensor], given: Sequence[Sequence[float]]) -> tuple[int, str] | None:
    """Return the index of the first of ``given`` with a fault, and a description; None if none has a fault.

    Args:
        faults: by description, whether each of ``given`` has the fault, bool ``[n]``; the first fault found counts.
    """
    for fault, found in faults.items():
        if found.any():
            index = int(found.nonzero()[0])
            return index, f"{index}, [{', '.join(f'{value:g}' for value in given[index])}], {fault}"
    return None


def _before(have: int, want: int) -> int:
    return round((have - want) / 2.0) if have >= want else -((want - have) // 2)
