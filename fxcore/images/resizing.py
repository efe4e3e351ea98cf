"""Antialiased resizing of uint8 images: bit-identical to torchvision's for tensors, and several times faster.

``torchvision.transforms.functional.resize`` converts uint8 to float32, takes weighted sums of columns and then of rows,
and rounds once at the end. (torch's uint8 kernel rounds after each pass, so that values differ by a level.) Here the
same two sums are computed by embedding bags, whose kernels are vectorised, and only for the pixels that the crop keeps.

- The weights are torch's: torch resizes an image of separate impulses, from which each weight is read.
- Sums of up to four values are equal. In longer sums torch adds the products in a different order, and the last bits of
  a float differ. That matters if a sum is close to a half, which is about one value in a thousand: these values are
  computed by torch's own resizing, on a small image of the pixels they need.
- If the kernels are missing, or sums of four values differ, torch resizes the whole image. It also does so if an image
  is reduced so much that recomputing sums close to a half would take more time.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag, interpolate

Pixels = NDArray[np.uint8]
"""``[H, W, 3]``, or ``[H, W, 4]`` with an unused fourth byte."""

MODES = {"bilinear": 1, "bicubic": 2}
"""Interpolation modes, and the support of each filter on each side, in pixels."""

_EQUAL_TAPS = 4
_ROUNDING = 2.0**-24
_GATHERED = 1 << 15
"""Maximum number of pixels gathered at a time for sums close to a half, and of the image that they are put in."""

_CACHED_SIDES = 256

_MAX_SCALES = {"bilinear": 14.0, "bicubic": 3.5}
"""Largest reduction for which this is faster than torch: the error of a sum grows with its length, and with it the
number of values close to a half, and the time for each of them."""

_MIN_SIDE = 16
"""Minimum side of images and results; torch resizes smaller ones, because it sums few columns in a different order."""

_SCALE_AND_BIAS = np.array((1, 0), np.float32).view(np.uint32)
_PIXEL = np.dtype({"names": ["rgb"], "formats": ["V12"], "itemsize": 16})
"""A pixel of four floats, of which NumPy copies three at once."""

log = logging.getLogger("fxcore.images.resizing")


class _Side(NamedTuple):
    """The weighted sums that compute one side of a resized image from the same side of the image.

    Attributes:
        size, resized: length in pixels, before and after.
        kept: the resized pixels that are computed.
        read: the image's pixels that they are computed from.
        first: for each of ``kept``, the first pixel of its sum.
        weights: float32 ``[len(kept), taps]``.
        indices: the pixels of each sum, relative to ``read``: int64 ``[len(kept) * taps]``.
        offsets: start of each sum in ``indices``, and the end: ``[len(kept) + 1]``.
        period: distance at which the sums of two resized pixels have no pixel in common.
        gain: the largest sum of absolute weights.
    """

    size: int
    resized: int
    kept: range
    read: slice
    first: NDArray[np.int64]
    weights: Tensor
    indices: Tensor
    offsets: Tensor
    period: int
    gain: float

    @property
    def taps(self) -> int:
        return self.weights.shape[1]


def resize(pixels: Pixels, size: tuple[int, int], kept: tuple[range, range], mode: str) -> Pixels:
    """Resize and crop an image.

    Args:
        pixels: the image, at least one pixel; four bytes per pixel are faster than three.
        size: height and width of the resized image.
        kept: rows and columns of the resized image to return.
        mode: a key of :data:`MODES`.

    Returns:
        uint8 ``[len(rows), len(columns), 3]``, contiguous.

    >>> grey = np.full((8, 6, 3), 7, np.uint8)
    >>> resize(grey, (4, 3), (range(4), range(1, 3)), "bilinear").shape
    (4, 2, 3)
    """
    lines, columns = kept
    if pixels.shape[:2] == size:
        return _three(pixels[lines.start : lines.stop, columns.start : columns.stop])
    if is_left_to_torch(pixels.shape[:2], size, mode):
        return _by_torch(pixels, size, kept, mode)
    if pixels.shape[2] == 3:
        pixels = _four(pixels)
    down = _side(pixels.shape[0], size[0], lines.start, lines.stop, mode)
    across = _side(pixels.shape[1], size[1], columns.start, columns.stop, mode)
    sums = _sums(pixels, down, across)
    if max(down.taps, across.taps) > _EQUAL_TAPS:
        # Twice the largest rounding error, since both sums are rounded.
        error = 2 * (down.taps + across.taps) * _ROUNDING * 255 * down.gain * across.gain
        rounded = np.rint(sums)
        np.abs(np.subtract(sums, rounded, out=sums), out=sums)
        _settle(rounded.reshape(-1), np.flatnonzero(sums >= 0.5 - error), pixels, down, across, mode)
        sums = rounded
    if mode == "bicubic":
        np.clip(sums, 0, 255, out=sums)
    made = np.empty((len(lines), len(columns), 3), np.uint8)
    np.rint(sums.reshape(made.shape), out=made, casting="unsafe")
    return made


def held(height: int, width: int, size: tuple[int, int], kept: tuple[int, int], mode: str) -> int:
    """Return the peak bytes of :func:`resize`, not counting the image, which has four bytes per pixel.

    Args:
        height, width: size of the image.
        size: height and width of the resized image.
        kept: height and width of the crop.
        mode: a key of :data:`MODES`.
    """
    if is_left_to_torch((height, width), size, mode):
        return 15 * height * width + 4 * 3 * height * size[1] + 3 * 4 * 3 * math.prod(size)
    turned = 4 * (height + 2) * width
    columns = 2 * 16 * height * kept[1]
    return turned + columns + 3 * 16 * math.prod(kept) + 16 * _GATHERED


def is_left_to_torch(have: tuple[int, ...], size: tuple[int, int], mode: str) -> bool:
    """Return whether :func:`resize` uses torch for an image of the height and width ``have``, at three bytes per
    pixel."""
    scale = max(side / resized for side, resized in zip(have, size, strict=True))
    return scale > _MAX_SCALES[mode] or min(*size, *have) < _MIN_SIDE or not _kernels_agree()


def _sums(pixels: Pixels, down: _Side, across: _Side) -> NDArray[np.float32]:
    """Return the resized pixels before rounding, ``[kept rows, kept columns * 3]``."""
    words = pixels[down.read, across.read].view(np.uint32)[..., 0]
    # Each column of the image is a row of the table, followed by the row's scale, 1, and bias, 0.
    table = np.empty((words.shape[1], words.shape[0] + 2), np.uint32)
    table[:, :-2] = words.T
    table[:, -2:] = _SCALE_AND_BIAS
    bags = (across.indices, across.offsets, False, 0, False, across.weights, None, True)
    columns = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(torch.from_numpy(table.view(np.uint8)), *bags)
    lines = np.ascontiguousarray(columns.numpy().view(_PIXEL)["rgb"].T).view(np.float32)
    summed = embedding_bag(
        down.indices, torch.from_numpy(lines), down.offsets, mode="sum", per_sample_weights=down.weights.view(-1),
        include_last_offset=True,
    )  # fmt: skip
    result: NDArray[np.float32] = summed.numpy()
    return result


def _settle(
    rounded: NDArray[np.float32], close: NDArray[np.int64], pixels: Pixels, down: _Side, across: _Side, mode: str
) -> None:
    """Replace the values of ``rounded`` at the indices ``close`` by torch's own results."""
    step = max(1, _GATHERED // (down.taps * across.taps))
    for begin in range(0, len(close), step):
        places = close[begin : begin + step]
        line, rest = np.divmod(places, 3 * len(across.kept))
        column, channel = np.divmod(rest, 3)
        lines = down.first[line][:, None] + np.arange(down.taps)
        columns = across.first[column][:, None] + np.arange(across.taps)
        values = pixels[lines[:, :, None], columns[:, None, :], channel[:, None, None]]
        sums = _exact(values.reshape(-1, across.taps), np.repeat(column, down.taps), across, mode, False)
        rounded[places] = np.rint(_exact(sums.reshape(-1, down.taps), line, down, mode, True))


def _exact(
    values: NDArray[np.generic], at: NDArray[np.int64], side: _Side, mode: str, upright: bool
) -> NDArray[np.float32]:
    """Sum ``values`` ``[n, taps]`` with the weights of the resized pixels ``at``, using torch's own resizing.

    The values are placed at their positions in an image, as many in a row as fit without overlap.
    """
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    turn = np.empty(len(at), np.int64)
    turn[order] = np.arange(len(at)) - np.searchsorted(ordered, ordered)
    together = max(1, _GATHERED // (side.size * side.period))
    made = np.empty(len(at), np.float32)
    for begin in range(0, int(turn.max()) + 1, together):
        some = np.flatnonzero((turn >= begin) & (turn < begin + together))
        line = (turn[some] - begin) * side.period + at[some] % side.period
        # torch sums few columns in a different order from many.
        image = np.zeros((max(int(line.max()) + 1, _MIN_SIDE), side.size), np.float32)
        image[line[:, None], side.first[at[some]][:, None] + np.arange(side.taps)] = values[some]
        resized = (image.shape[0], side.resized)
        if upright:
            image, resized = np.ascontiguousarray(image.T), resized[::-1]
        sums = interpolate(torch.from_numpy(image)[None, None], resized, mode=mode, antialias=True)[0, 0].numpy()
        made[some] = (sums.T if upright else sums)[line, side.kept.start + at[some]]
    return made


@functools.lru_cache(_CACHED_SIDES)
def _side(size: int, resized: int, start: int, stop: int, mode: str) -> _Side:
    """Return the sums for the pixels from ``start`` to ``stop`` of a side that is resized from ``size`` to
    ``resized``."""
    begin, span = _windows(size, resized, start, stop, mode)
    first, weights = _without_zeros(begin, _weights(size, resized, start, stop, mode, begin, span))
    taps = weights.shape[1]
    columns = first[:, None] + np.arange(taps)
    read = slice(int(first.min()), int(columns.max()) + 1)
    return _Side(
        size,
        resized,
        range(start, stop),
        read,
        first,
        torch.from_numpy(weights),
        torch.from_numpy((columns - read.start).reshape(-1)),
        torch.arange(0, weights.size + 1, taps),
        _period(first, taps),
        float(np.abs(weights).sum(axis=1).max()),
    )


def _windows(size: int, resized: int, start: int, stop: int, mode: str) -> tuple[NDArray[np.int64], int]:
    """Return the pixels that the filter of each resized pixel may read: the first of each, and their common number."""
    scale = size / resized
    reach = MODES[mode] * max(scale, 1.0)
    span = min(math.ceil(2 * reach) + 3, size)
    # Add one pixel on each side of the filter's support, to be independent of torch's rounding.
    first = (np.arange(start, stop) + 0.5) * scale - reach
    return np.clip(np.floor(first).astype(np.int64) - 1, 0, size - span), span


def _weights(
    size: int, resized: int, start: int, stop: int, mode: str, begin: NDArray[np.int64], span: int
) -> NDArray[np.float32]:
    """Return torch's weight of each pixel of the windows, ``[stop - start, span]``."""
    # The impulses are far enough apart that each resized pixel reads only one of them per row.
    places = torch.arange(size)
    comb = torch.zeros(span, size)
    comb[places % span, places] = 1.0
    seen = interpolate(comb[None, None], (span, resized), mode=mode, antialias=True)[0, 0].numpy()
    columns = begin[:, None] + np.arange(span)
    weights: NDArray[np.float32] = seen[columns % span, np.arange(start, stop)[:, None]]
    return weights


def _without_zeros(
    begin: NDArray[np.int64], weights: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Narrow the windows to the number of non-zero weights of the widest filter; return first pixels and weights."""
    span = weights.shape[1]
    counts = weights != 0
    before = counts.argmax(axis=1)
    taps = int((span - counts[:, ::-1].argmax(axis=1) - before).max())
    before = np.minimum(before, span - taps)
    return begin + before, np.take_along_axis(weights, before[:, None] + np.arange(taps), axis=1)


def _period(first: NDArray[np.int64], taps: int) -> int:
    """Return the distance at which the sums of two resized pixels (``taps`` pixels from ``first``) do not overlap."""
    return next((n for n in range(1, len(first)) if (first[n:] - first[:-n]).min() >= taps), len(first))


@functools.cache
def _kernels_agree() -> bool:
    """Return whether the embedding bags' sums of up to four values are bit-identical to torch's."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 4), np.uint8)
    sides = ((33, 44, "bilinear"), (41, 97, "bilinear"), (75, 101, "bicubic"))  # sums of two, three and four values
    try:
        for height, width, mode in sides:
            down, across = _side(60, height, 0, height, mode), _side(80, width, 0, width, mode)
            sums = _sums(noise, down, across).reshape(height, width, 3)
            image = torch.from_numpy(noise[..., :3]).permute(2, 0, 1)[None].float()
            expected = interpolate(image, (height, width), mode=mode, antialias=True)[0].permute(1, 2, 0).numpy()
            if down.taps > _EQUAL_TAPS or across.taps > _EQUAL_TAPS or not np.array_equal(sums, expected):
                log.info("images are resized by torch alone: sums from %s pixels differ", across.taps)
                return False
    except (AttributeError, RuntimeError) as error:
        log.info("images are resized by torch alone: %.300s", error)
        return False
    return True


def _by_torch(pixels: Pixels, size: tuple[int, int], kept: tuple[range, range], mode: str) -> Pixels:
    whole = pixels.shape[2] == 3 and pixels.flags.c_contiguous
    image = torch.from_numpy(pixels if whole else _three(pixels)).permute(2, 0, 1)[None].float()
    resized = interpolate(image, size, mode=mode, antialias=True).round_().clamp_(0, 255).to(torch.uint8)
    lines, columns = kept
    return _three(resized[0].permute(1, 2, 0).numpy()[lines.start : lines.stop, columns.start : columns.stop])


def _three(pixels: Pixels) -> Pixels:
    """Copy the first three bytes of each pixel into contiguous memory."""
    made = np.empty((*pixels.shape[:2], 3), np.uint8)
    for channel in range(3):  # faster than a single copy of three bytes per pixel
        made[..., channel] = pixels[..., channel]
    return made


def _four(pixels: Pixels) -> Pixels:
    made = np.empty((*pixels.shape[:2], 4), np.uint8)
    for channel in range(3):
        made[..., channel] = pixels[..., channel]
    return made
