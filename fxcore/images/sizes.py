"""Sizes of images: as given by users, and after resizing."""

from __future__ import annotations

from collections.abc import Sequence

ImageSize = int | tuple[int, int]
"""The side of a square, or height and width, in pixels."""


def sides(image_size: ImageSize) -> tuple[int, int]:
    """Return height and width of ``image_size``.

    >>> sides(224), sides((448, 672))
    ((224, 224), (448, 672))
    """
    return (image_size, image_size) if isinstance(image_size, int) else image_size


def covering_size(box: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Return height and width of the smallest image with the same aspect ratio that covers ``box`` (height, width).

    >>> covering_size((512, 768), 600, 900), covering_size((512, 768), 600, 600)
    ((512, 768), (768, 768))
    """
    if height * box[1] <= width * box[0]:
        return box[0], max(box[1], int(box[0] * width / height))
    return max(box[0], int(box[1] * height / width)), box[1]


def resized_size(size: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """Return height and width after ``torchvision.transforms.functional.resize``; one number is the shorter side."""
    if len(size) == 2:
        return size[0], size[1]
    short, long = sorted((height, width))
    resized = int(size[0] * long / short)
    return (size[0], resized) if height <= width else (resized, size[0])
