"""Antialiased resizing of uint8 images: bit-identical to torchvision's for tensors, and several times faster.

``torchvision.transforms.functional.resize`` converts uint8 to float32, takes weighted sums of columns and then of rows,
and rounds once at the end. (torch's uint8 kernel rounds after each pass, so that values differ by a level.) Here the
same two sums are computed by embedding bags, whose kernels are vectorised, and only for the pixels that the crop keeps.

- The weights are torch's: torch resizes an image of separate impulses, from which each weight is read.
- torch rounds some of the products of a longer sum before it adds them, and fuses the others with the addition. An
  embedding bag fuses all of them, so that the last bits of a float differ. That matters if a sum is close to a half,
  which is about one value in a thousand: these values are summed again, as torch does. If there are many, as in regular
  patterns, torch resizes the image in strips.
- If the kernels are missing, or one of the two kinds of sums differs from torch's, torch resizes the whole image.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
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
"""Maximum number of pixels gathered at a time for sums close to a half."""

_ROUNDED_PRODUCTS: dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]] = {
    "in blocks of four": lambda taps: 1 + (taps - 1) // 4 * 4,  # x86-64 with AVX2 or AVX-512
    "the first": np.ones_like,
}
"""How many products of a sum torch rounds, by the number of its values; that depends on how torch was compiled."""

_CACHED_SIDES = 256

_MIN_SIDE = 16
"""Minimum side of images and results; torch resizes smaller ones, because it sums few columns in a different order."""

_SCALE_AND_BIAS = np.array((1, 0), np.float32).view(np.uint32)
_PIXEL = np.dtype({"names": ["rgb"], "formats": ["V12"], "itemsize": 16})
"""A pixel of four floats, of which NumPy copies three at once."""

log = logging.getLogger("fxcore.images.resizing")


class _Side(NamedTuple):
    """The weighted sums that compute one side of a resized image from the same side of the image.

    Attributes:
        kept: the resized pixels that are computed.
        read: the image's pixels that they are computed from.
        pixels: for each of ``kept``, the pixels of its sum: int64 ``[len(kept), taps]``.
        counts: for each of ``kept``, the number of its pixels; the weights of further ones are 0.
        weights: float32 ``[len(kept), taps]``.
        indices: ``pixels`` relative to ``read``: int64 ``[len(kept) * taps]``.
        offsets: start of each sum in ``indices``, and the end: ``[len(kept) + 1]``.
        gain: the largest sum of absolute weights.
    """

    kept: range
    read: slice
    pixels: NDArray[np.int64]
    counts: NDArray[np.int64]
    weights: Tensor
    indices: Tensor
    offsets: Tensor
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
        return _copied(pixels[lines.start : lines.stop, columns.start : columns.stop], 3)
    if is_left_to_torch(pixels.shape[:2], size):
        return _by_torch(pixels, size, kept, mode)
    if pixels.shape[2] == 3:
        pixels = _copied(pixels, 4)
    down = _side(pixels.shape[0], size[0], lines.start, lines.stop, mode)
    across = _side(pixels.shape[1], size[1], columns.start, columns.stop, mode)
    sums = _sums(pixels, down, across)
    if max(down.taps, across.taps) > _EQUAL_TAPS:
        # Twice the largest rounding error, since both sums are rounded.
        error = 2 * (down.taps + across.taps) * _ROUNDING * 255 * down.gain * across.gain
        rounded = np.rint(sums)
        np.abs(np.subtract(sums, rounded, out=sums), out=sums)
        close = np.flatnonzero(sums >= 0.5 - error)
        if 4 * len(close) * down.taps * across.taps > pixels.shape[0] * pixels.shape[1] and len(columns) >= _MIN_SIDE:
            return _in_strips(pixels, size, kept, mode)
        _settle(rounded.reshape(-1), close, pixels, down, across)
        sums = rounded
    if mode == "bicubic":
        np.clip(sums, 0, 255, out=sums)
    made = np.empty((len(lines), len(columns), 3), np.uint8)
    np.rint(sums.reshape(made.shape), out=made, casting="unsafe")
    return made


def held(height: int, width: int, size: tuple[int, int], kept: tuple[int, int]) -> int:
    """Return the peak bytes of :func:`resize`, not counting the image, which has four bytes per pixel.

    Args:
        height, width: size of the image.
        size: height and width of the resized image.
        kept: height and width of the crop.
    """
    if is_left_to_torch((height, width), size):
        return 15 * height * width + 4 * 3 * height * size[1] + 3 * 4 * 3 * math.prod(size)
    turned = 4 * (height + 2) * width
    columns = 2 * 16 * height * kept[1]
    impulses = max(4 * side * (4 * side // resized + 8) for side, resized in zip((height, width), size, strict=True))
    return turned + columns + impulses + 3 * 16 * math.prod(kept) + 16 * _GATHERED


def is_left_to_torch(have: tuple[int, ...], size: tuple[int, int]) -> bool:
    """Return whether :func:`resize` uses torch for an image of the height and width ``have``, at three bytes per
    pixel."""
    return min(*size, *have) < _MIN_SIDE or not _kernels_agree()


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


def _settle(rounded: NDArray[np.float32], close: NDArray[np.int64], pixels: Pixels, down: _Side, across: _Side) -> None:
    """Replace the values of ``rounded`` at the indices ``close`` by torch's own results."""
    rounding = _rounding()
    assert rounding is not None  # otherwise torch resizes the image
    step = max(1, _GATHERED // (down.taps * across.taps))
    for begin in range(0, len(close), step):
        places = close[begin : begin + step]
        line, rest = np.divmod(places, 3 * len(across.kept))
        column, channel = np.divmod(rest, 3)
        lines, columns = down.pixels[line], across.pixels[column]
        values = pixels[lines[:, :, None], columns[:, None, :], channel[:, None, None]].astype(np.float32)
        sums = _as_torch(values.reshape(-1, across.taps), across, np.repeat(column, down.taps), rounding)
        rounded[places] = np.rint(_as_torch(sums.reshape(-1, down.taps), down, line, rounding))


def _as_torch(values: NDArray[np.float32], side: _Side, at: NDArray[np.int64], rounding: str) -> NDArray[np.float32]:
    """Sum ``values`` ``[n, taps]`` with the weights of the resized pixels ``at``, in torch's order and rounding.

    A fused product is computed in float64, where it is exact. Its sum is rounded twice, which almost never differs.

    Args:
        rounding: a key of :data:`_ROUNDED_PRODUCTS`.
    """
    weights = side.weights.numpy()[at]
    products = values * weights
    rounded = _ROUNDED_PRODUCTS[rounding](side.counts[at])
    most, least = int(rounded.max()), int(rounded.min())
    sums: NDArray[np.float32] = products[:, 0]
    for tap in range(1, side.taps):
        added = sums + products[:, tap]
        if tap >= least:
            fused = (values[:, tap].astype(np.float64) * weights[:, tap] + sums).astype(np.float32)
            added = fused if tap >= most else np.where(tap < rounded, added, fused)
        sums = added
    return sums


@functools.lru_cache(_CACHED_SIDES)
def _side(size: int, resized: int, start: int, stop: int, mode: str) -> _Side:
    """Return the sums for the pixels from ``start`` to ``stop`` of a side that is resized from ``size`` to
    ``resized``."""
    first, counts = _windows(size, resized, start, stop, mode)
    taps = int(counts.max())
    # Pixels beyond a window have the weight 0, which changes no sum.
    pixels = np.minimum(first[:, None] + np.arange(taps), size - 1)
    weights = np.where(np.arange(taps) < counts[:, None], _weights(size, resized, start, stop, mode, pixels), 0)
    read = slice(int(first.min()), int(pixels.max()) + 1)
    return _Side(
        range(start, stop),
        read,
        pixels,
        counts,
        torch.from_numpy(weights),
        torch.from_numpy((pixels - read.start).reshape(-1)),
        torch.arange(0, weights.size + 1, taps),
        float(np.abs(weights).sum(axis=1).max()),
    )


def _windows(size: int, resized: int, start: int, stop: int, mode: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first pixel that each resized pixel is summed from, and their number.

    In float32, as torch: ``_compute_indices_min_size_weights_aa`` in ATen/native/cpu/UpSampleKernel.cpp.
    """
    scale = np.float32(size) / np.float32(resized)
    reach = np.float32(MODES[mode]) * max(scale, np.float32(1))
    half = np.float32(0.5)
    centre = scale * (np.arange(start, stop).astype(np.float32) + half)
    first = np.maximum((centre - reach + half).astype(np.int64), 0)
    return first, np.minimum((centre + reach + half).astype(np.int64), size) - first


def _weights(
    size: int, resized: int, start: int, stop: int, mode: str, pixels: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return torch's weight of each of ``pixels`` ``[stop - start, taps]``."""
    # The impulses are far enough apart that each resized pixel reads only one of them per row.
    span = min(pixels.shape[1] + 1, size)
    places = torch.arange(size)
    comb = torch.zeros(span, size)
    comb[places % span, places] = 1.0
    seen = interpolate(comb[None, None], (span, resized), mode=mode, antialias=True)[0, 0].numpy()
    weights: NDArray[np.float32] = seen[pixels % span, np.arange(start, stop)[:, None]]
    return weights


@functools.cache
def _kernels_agree() -> bool:
    """Return whether the embedding bags' sums of up to four values, and ours of more, are bit-identical to torch's."""
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
    if _rounding() is None:
        log.info("images are resized by torch alone: its sums of more than %s pixels differ", _EQUAL_TAPS)
        return False
    return True


@functools.cache
def _rounding() -> str | None:
    """Return which products of a sum torch rounds, a key of :data:`_ROUNDED_PRODUCTS`; None if it is another way."""
    return next(filter(_sums_as_torch, _ROUNDED_PRODUCTS), None)


def _sums_as_torch(rounding: str) -> bool:
    """Return whether :func:`_as_torch` is bit-identical to torch's sums of 4 to 17 values."""
    noise = np.random.default_rng(0).integers(0, 256, (_MIN_SIDE, 400)).astype(np.float32)
    for resized, mode in ((49, "bilinear"), (61, "bilinear"), (97, "bilinear"), (127, "bicubic"), (230, "bicubic")):
        side = _side(noise.shape[1], resized, 0, resized, mode)
        image = torch.from_numpy(noise)[None, None]
        across = interpolate(image, (len(noise), resized), mode=mode, antialias=True)[0, 0].numpy()
        down = interpolate(image.mT.contiguous(), (resized, len(noise)), mode=mode, antialias=True)[0, 0].mT.numpy()
        at = np.tile(np.arange(resized), len(noise))
        sums = _as_torch(noise[:, side.pixels].reshape(-1, side.taps), side, at, rounding).reshape(across.shape)
        if not np.array_equal(sums, across) or not np.array_equal(sums, down):
            return False
    return True


def _by_torch(pixels: Pixels, size: tuple[int, int], kept: tuple[range, range], mode: str) -> Pixels:
    # NumPy ignores the stride of axes of size 1 when it checks contiguity, and torch rejects negative strides.
    whole = pixels.shape[2] == 3 and pixels.flags.c_contiguous and pixels.flags.writeable and min(pixels.strides) > 0
    image = torch.from_numpy(pixels if whole else _copied(pixels, 3)).permute(2, 0, 1)[None].float()
    resized = interpolate(image, size, mode=mode, antialias=True).round_().clamp_(0, 255).to(torch.uint8)
    lines, columns = kept
    return _copied(resized[0].permute(1, 2, 0).numpy()[lines.start : lines.stop, columns.start : columns.stop], 3)


def _in_strips(pixels: Pixels, size: tuple[int, int], kept: tuple[range, range], mode: str) -> Pixels:
    """Resize by torch like :func:`_by_torch`, but with little memory: only few lines, and the kept columns, are floats
    at a time."""
    lines, columns = kept
    height, width = pixels.shape[:2]
    step = max(_MIN_SIDE, _GATHERED // width)
    across = torch.empty(1, 3, height, len(columns))
    for begin in range(0, height, step):
        strip = torch.from_numpy(_copied(pixels[begin : begin + step], 3)).permute(2, 0, 1)[None].float()
        resized = interpolate(strip, (strip.shape[2], size[1]), mode=mode, antialias=True)
        across[:, :, begin : begin + step] = resized[..., columns.start : columns.stop]
    down = interpolate(across, (size[0], len(columns)), mode=mode, antialias=True)[0, :, lines.start : lines.stop]
    return _copied(down.round_().clamp_(0, 255).to(torch.uint8).permute(1, 2, 0).numpy(), 3)


def _copied(pixels: Pixels, values: int) -> Pixels:
    """Copy the first three of each pixel's bytes to contiguous memory, with ``values`` bytes per pixel."""
    made = np.empty((*pixels.shape[:2], values), np.uint8)
    for channel in range(3):  # faster than a single copy of three bytes per pixel
        made[..., channel] = pixels[..., channel]
    return made
