"""Map coordinates of an image to those of the model's input, after resizing and cropping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxcore.errors import BadBox

_TOLERANCE = 1.0
"""Pixels that a box may extend beyond its image: annotations and detectors round."""


@dataclass(frozen=True)
class Placement:
    """An image in the model's input. Pixel ``(x, y)`` of the image is at ``(x * scale_x - left, y * scale_y - top)``.

    Attributes:
        image: height and width of the image.
        scale_y, scale_x: resized size over original size.
        top, left: pixels of the resized image that were cropped there; negative for padding.
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
        """Boxes in pixels of the image → float32 ``[n, 4]`` in pixels of the input.

        A box that extends beyond the input is not clipped: :func:`torchvision.ops.roi_align` pools zeros there.

        Args:
            boxes: ``x1, y1, x2, y2`` each.

        Raises:
            BadBox: a box is not four finite numbers, is empty or inverted, or lies outside of the image or of the part
                of it that the model sees; ``box`` in ``extra`` is its index.

        >>> Placement((480, 640), 0.5, 0.5, 8, 48, (224, 224)).carry([[100, 50, 300, 250]])
        tensor([[  2.,  17., 102., 117.]])
        """
        if not boxes:
            return torch.empty(0, 4)
        for index, box in enumerate(boxes):
            if len(box) != 4:
                raise BadBox(f"box {index} has {len(box)} values: write [x1, y1, x2, y2]", box=index)
        given = torch.tensor(boxes, dtype=torch.float64)
        carried = given * torch.tensor([self.scale_x, self.scale_y] * 2, dtype=torch.float64)
        carried -= torch.tensor([self.left, self.top] * 2, dtype=torch.float64)
        height, width = self.image
        seen = torch.tensor([self.seen[1], self.seen[0]])
        low, high = given[:, :2], given[:, 2:]
        faults = {
            "is not four finite numbers": ~given.isfinite().all(dim=1),
            "is empty or inverted: write [x1, y1, x2, y2] with x1 < x2 and y1 < y2": (low >= high).any(dim=1),
            f"reaches out of its image, which is {width} x {height} pixels": (low < -_TOLERANCE).any(dim=1)
            | (high > torch.tensor([width, height]) + _TOLERANCE).any(dim=1),
            "lies outside of the part of its image that the model sees: leave it out": (carried[:, 2:] <= 0).any(dim=1)
            | (carried[:, :2] >= seen).any(dim=1),
        }
        for fault, found in faults.items():
            if found.any():
                index = int(found.nonzero()[0])
                shown = ", ".join(f"{value:g}" for value in boxes[index])
                raise BadBox(f"box {index}, [{shown}], {fault}", box=index)
        return carried.float()


def cropped(image: tuple[int, int], resized: tuple[int, int], crop: tuple[int, int]) -> Placement:
    """Return the placement of an image that is resized and then centre-cropped or padded, as by torchvision's
    ``center_crop``.

    Args:
        image, resized, crop: height and width of the image, of the resized image, and of the crop.
    """
    (height, width), (resized_height, resized_width) = image, resized
    top, left = (_before(have, want) for have, want in zip(resized, crop, strict=True))
    return Placement(image, resized_height / height, resized_width / width, top, left, crop)


def _before(have: int, want: int) -> int:
    return round((have - want) / 2.0) if have >= want else -((want - have) // 2)
