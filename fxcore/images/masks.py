"""Decode image masks from PNG files or COCO run lengths, and compute their area in each cell of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxcore.errors import BadImage, BadMask
from fxcore.images.formats.containers import stripped
from fxcore.images.formats.opening import opened
from fxcore.images.formats.png import check_complete

_ONE_CHANNEL = ("1", "L", "P", "I", "I;16")
"""Pillow's modes for PNG files with one value per pixel."""

_MAX_PIXELS = 2**31
"""Maximum number of pixels in a run; images have fewer."""


class Rle(NamedTuple):
    """COCO run lengths, in column-major order.

    Attributes:
        height, width: size of the mask.
        counts: numbers of pixels alternately outside and inside the mask, outside first; or COCO's compressed string.
    """

    height: int
    width: int
    counts: Sequence[int] | str


Mask = bytes | Rle
"""An encoded mask: run lengths, or a PNG file with one channel, whose non-zero pixels are in the mask."""


def read_mask(mask: Mask, image: tuple[int, int]) -> NDArray[np.bool_]:
    """Decode a mask.

    Args:
        mask: a PNG file, or run lengths.
        image: height and width of the image.

    Returns:
        Whether each pixel is in the mask, ``[height, width]``.

    Raises:
        BadMask: the mask is damaged, or does not have the size of the image.

    >>> read_mask(Rle(2, 3, [1, 2, 3]), (2, 3)).astype(int)
    array([[0, 1, 0],
           [1, 0, 0]])
    """
    return _of_runs(mask, image) if isinstance(mask, Rle) else _of_png(mask, image)


def shares(mask: NDArray[np.bool_], ys: NDArray[Any], xs: NDArray[Any]) -> NDArray[np.float64]:
    """Return the area of ``mask`` in each cell of a grid.

    Args:
        mask: bool ``[height, width]``.
        ys, xs: the edges of the grid's rows and columns in pixels, ascending and within the mask.

    Returns:
        float64 ``[len(ys) - 1, len(xs) - 1]``, in pixels.

    >>> shares(np.array([[True, False], [True, True]]), np.array([0.0, 1.5, 2.0]), np.array([0.0, 2.0]))
    array([[2.],
           [1.]])
    """
    return _sums(_sums(mask, ys).T, xs).T


def _sums(values: NDArray[Any], edges: NDArray[Any]) -> NDArray[np.float64]:
    """Integrate rows ``[n, m]`` between ``edges``."""
    whole = np.floor(edges).astype(int)
    parts = [values[: whole[0]], *(values[start:stop] for start, stop in pairwise(whole))]
    dtype = np.int64 if values.dtype == bool else np.float64
    until = np.cumsum([part.sum(axis=0, dtype=dtype) for part in parts], axis=0)
    rest = values[np.minimum(whole, len(values) - 1)] * (edges - whole)[:, None]
    summed: NDArray[np.float64] = np.diff(until + rest, axis=0)
    return summed


def _of_png(data: bytes, image: tuple[int, int]) -> NDArray[np.bool_]:
    try:
        pixels, _ = stripped(data)
        with opened(pixels, ["PNG"]) as file:
            _check_size((file.height, file.width), image)
            if file.mode not in _ONE_CHANNEL:
                raise BadMask(f"is a PNG file of mode {file.mode}: send one channel, zero outside of the mask")
            values = np.asarray(file)
        check_complete(pixels, values[-1])
        found: NDArray[np.bool_] = values != 0
        return found
    except BadMask:
        raise
    except BadImage as error:
        raise BadMask(f"is refused: {error.detail}") from error
    except Exception as error:  # files are damaged in many ways
        raise BadMask(f"is not a PNG file, or is damaged ({len(data)} bytes)") from error


def _of_runs(mask: Rle, image: tuple[int, int]) -> NDArray[np.bool_]:
    _check_size((mask.height, mask.width), image)
    try:
        counts = _decompressed(mask.counts) if isinstance(mask.counts, str) else np.array(mask.counts, np.int64)
    except (OverflowError, UnicodeEncodeError, ValueError):
        counts = np.array([-1])
    if counts.ndim != 1 or (counts < 0).any() or (counts > _MAX_PIXELS).any():
        raise BadMask("has run lengths that are not COCO's: a list of numbers of pixels, or such a list compressed")
    total = int(counts.sum())
    if total != mask.height * mask.width:
        raise BadMask(f"has run lengths of {total} pixels, and its size has {mask.height * mask.width}")
    inside = np.arange(len(counts)) % 2 == 1
    return np.repeat(inside, counts).reshape(mask.width, mask.height).T


def _decompressed(text: str) -> NDArray[np.int64]:
    """Decode run lengths from pycocotools' compressed strings.

    Each number is stored in groups of five bits, lowest first, with a sixth bit set in all groups but the last. From
    the fourth number on, it is the difference from the number two before.

    Raises:
        ValueError: ``text`` is not such a string.
    """
    groups = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - 48
    last = groups & 32 == 0
    if ((groups < 0) | (groups > 63)).any() or not len(groups) or not last[-1]:
        raise ValueError("not run lengths")
    ends = np.flatnonzero(last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    places = np.arange(len(groups)) - np.repeat(starts, ends - starts + 1)
    if places.max() > 6:  # a number with more than 32 bits
        raise ValueError("not run lengths")
    numbers = np.add.reduceat((groups & 31) << (5 * places), starts)
    negative = groups[ends] & 16 != 0
    numbers[negative] -= 1 << (5 * (places[ends][negative] + 1))
    for first in (1, 2):
        numbers[first::2] = np.cumsum(numbers[first::2])
    return numbers


def _check_size(found: tuple[int, int], image: tuple[int, int]) -> None:
    if found != image:
        raise BadMask(
            f"has {found[1]} x {found[0]} pixels and its image, after its EXIF orientation, {image[1]} x {image[0]}"
        )
