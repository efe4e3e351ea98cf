"""Regions of images, from the forms that callers have to JSON."""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from service.client.tensors import is_instance, to_array


@dataclass(frozen=True)
class Regions:
    """The regions that a call pools instead of whole maps.

    Attributes:
        field: ``boxes``, ``points`` or ``masks``.
        of_images: for each image, a list of its regions in JSON form.
    """

    field: str
    of_images: list[list[Any]]

    @cached_property
    def first(self) -> list[int]:
        """Index of each image's first region; at last the number of all."""
        return list(accumulate(map(len, self.of_images), initial=0))


def lists(field: str, given: Any) -> list[list[Any]]:
    """Convert the regions of each image to lists for JSON.

    Raises:
        ValueError: they are nested differently, or hold something else.
    """
    try:
        if field == "masks":
            return [[_mask(mask) for mask in of_image] for of_image in given]
        numbers = [[[float(value) for value in one] for one in of_image] for of_image in given]
    except (TypeError, ValueError) as error:
        shown = {
            "boxes": "boxes [x1, y1, x2, y2]",
            "points": "points [x, y]",
            "masks": "masks (arrays [height, width], PIL images, PNG files, or COCO's run lengths)",
        }
        raise ValueError(
            f"{field} must be a list of {shown[field]} for each image of a list, or one such list for a single image"
        ) from error
    for image, of_image in enumerate(numbers):
        for index, one in enumerate(of_image):
            if not all(map(math.isfinite, one)):  # JSON lacks such numbers
                raise ValueError(f"image {image}: {field} must be finite, but number {index} is {one}")
    return numbers


def _mask(mask: Any) -> Any:
    """Convert a mask to base64, or to run lengths.

    Raises:
        ValueError, TypeError: it is not a mask.
    """
    if isinstance(mask, Mapping):  # pycocotools has bytes for strings, and other sequences for lists
        size, counts = mask.get("size", ()), mask.get("counts", ())
        counts = counts.decode("ascii") if isinstance(counts, bytes) else counts
        counts = counts if isinstance(counts, str) else [int(count) for count in counts]
        return {"size": [int(side) for side in size], "counts": counts}
    if is_instance("PIL.Image", "Image", mask) and mask.mode in ("I", "F"):  # not in PNG files
        mask = np.asarray(mask)
    if isinstance(mask, np.ndarray) or is_instance("torch", "Tensor", mask):
        from PIL import Image

        pixels = to_array(mask)
        if pixels.ndim != 2:
            raise ValueError("a mask has two dimensions")
        mask = Image.fromarray((pixels != 0).astype(np.uint8) * 255)
    if is_instance("PIL.Image", "Image", mask):
        buffer = io.BytesIO()
        mask.save(buffer, "PNG", compress_level=1)
        mask = buffer.getvalue()
    if isinstance(mask, str | os.PathLike):
        mask = Path(mask).read_bytes()
    return base64.b64encode(mask).decode()


def bytes_of(of_image: list[Any]) -> int:
    """Return the approximate bytes of an image's regions as JSON, if they are large."""
    counts = [one["counts"] if isinstance(one, dict) else one for one in of_image]
    return sum(len(one) if isinstance(one, str) else 8 * len(one) for one in counts)
