"""How a request's images are decoded: their sizes are read from their headers, and they are split into parts.

Everything here may run in any thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.images.decoding import decode
from fxcore.images.deep_png import is_deep
from fxcore.images.files import Header, has_plain_header, image_header
from fxcore.images.nvjpeg import JpegBatches
from fxcore.images.placement import Placement
from service.engine.record import ExtractorRecord
from service.engine.requests.jpeg_groups import decoding_bytes, groups
from service.engine.requests.plan import FLOAT_BYTES, Plan, bounded, indexed, scaled, spread

_DEEP_BYTES = 2 * 3 * FLOAT_BYTES
"""Bytes a pixel beside an image of 16 bits a value, which is resized as floats, from floats."""

# Up to these, reading plain headers takes less time than changing threads twice.
_HEADERS_AT_ONCE = 8
_SMALL_BYTES = 256 * 1024

log = logging.getLogger("fxserve.inputs")


def is_quick(images: Sequence[bytes]) -> bool:
    """Whether the headers can be read on the event loop: they are few and plain. PIL reads others, and walks through
    the whole file."""
    few = len(images) <= _HEADERS_AT_ONCE and sum(map(len, images)) <= _SMALL_BYTES
    return few and all(map(has_plain_header, images))


def check_takes_images(record: ExtractorRecord, images: Sequence[bytes]) -> None:
    """Check that there are images and that the model takes images.

    Raises:
        BadTensor: with what would be right.
    """
    if not images:
        raise BadTensor("the request holds no image; send at least one")
    if not record.preprocessing.takes_images or len(record.inputs) != 1:
        wanted = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in record.inputs)
        raise BadTensor(f"{record.spec.model} does not take single images; send tensors: {wanted}")


def header_steps(count: int) -> list[range]:
    """Image indices in groups: headers of a group are read before it is another request's turn."""
    return spread(count, _HEADERS_AT_ONCE)


def read_headers(images: Sequence[bytes], indices: range, max_pixels: int) -> list[Header]:
    """The headers of ``images`` at ``indices``.

    Raises:
        BadImage, ImageTooLarge: see :func:`plan`.
    """
    headers = []
    for index in indices:
        with indexed(index):
            headers.append(image_header(images[index], max_pixels))
    return headers


def plan_images(
    record: ExtractorRecord, images: Sequence[bytes], preprocess: str, max_pixels: int, headers: Sequence[Header]
) -> Plan:
    """The plan of encoded images; see :func:`service.engine.requests.planning.plan`."""
    preparation: _Preparation = (
        _AsSent(max_pixels) if preprocess == "none" else _Preprocessed(record, preprocess, max_pixels)
    )
    sizes, costs, pixels = [], [], []
    for index, (data, header) in enumerate(zip(images, headers, strict=True)):
        height, width, _ = header
        with indexed(index):
            largest = preparation.largest_size(height, width)
        pixels.append(max(height * width, math.prod(largest)))
        deep = _DEEP_BYTES * height * width if is_deep(data) else 0
        costs.append(len(data) + deep + preparation.decoding_bytes(header))
        sizes.append(preparation.row_size(height, width))
    pad = preparation.pad if len(set(sizes)) > 1 else None
    if pad is not None:
        sizes = [(max(height for height, _ in sizes), max(width for _, width in sizes))] * len(sizes)
    value_bytes = FLOAT_BYTES if any(map(is_deep, images)) else preparation.value_bytes
    rows = sum(preparation.channels * height * width * value_bytes for height, width in sizes)
    if pad is not None:
        rows *= 2  # the rows, and the batch of them

    def placements() -> list[Placement]:
        return [preparation.placement(height, width) for height, width, _ in headers]

    def row(index: int) -> tuple[Tensor]:
        with indexed(index):
            return (preparation.row(images[index])[None],)

    parts: list[tuple[range, Callable[[], tuple[Tensor]]]] = []
    costs_of_parts: list[int] = []
    batches = record.jpeg_batches if preprocess == "fast" else None
    for group in _groups(batches, images, sizes, pixels):
        if batches is None or len(group) == 1:
            parts.append((group, partial(row, group.start)))
            costs_of_parts.append(costs[group.start])
        else:
            parts.append((group, partial(_rows_together, batches, images, group, row)))
            costs_of_parts.append(decoding_bytes([pixels[index] for index in group]))
    return Plan([((preparation.channels, *size),) for size in sizes], rows, costs_of_parts, parts, pad, placements)


class _Preparation(Protocol):
    """How images become rows: their sizes and bytes meanwhile, and the decoding itself.

    Attributes:
        channels: of a row.
        value_bytes: bytes of a value of a row, for images with 8 bits a value.
        pad: makes one batch of rows of different sizes, where the model's own preprocessing does so.
    """

    @property
    def channels(self) -> int: ...

    @property
    def value_bytes(self) -> int: ...

    @property
    def pad(self) -> Callable[[Sequence[Tensor]], Tensor] | None: ...

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        """The largest size that the image has until it is a row.

        Raises:
            ImageTooLarge: that has more pixels than are allowed.
        """

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of its row."""

    def placement(self, height: int, width: int) -> Placement:
        """Where the image is in its row."""

    def decoding_bytes(self, header: Header) -> int:
        """Peak bytes until the image is a row, beside its file."""

    def row(self, data: bytes) -> Tensor:
        """Its row, ``[channels, H, W]``, or as uint8 pixels ``[H, W, 3]``."""


class _AsSent:
    """``preprocess=none``: an image is its row."""

    channels = 3
    value_bytes = FLOAT_BYTES
    pad = None

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        return height, width

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        return height, width

    def placement(self, height: int, width: int) -> Placement:
        return Placement((height, width), 1.0, 1.0, 0, 0, (height, width))

    def decoding_bytes(self, header: Header) -> int:
        return _decoded_bytes(header)

    def row(self, data: bytes) -> Tensor:
        return scaled(decode(data, self._max_pixels).permute(2, 0, 1))


class _Preprocessed:
    """An image goes through the model's preprocessing, in the mode ``preprocess``."""

    def __init__(self, record: ExtractorRecord, preprocess: str, max_pixels: int) -> None:
        self._decoder = record.decoder
        self._preprocessing = record.preprocessing
        self._preprocess = preprocess
        self._max_pixels = max_pixels
        self.channels = record.entry.channels
        self.value_bytes = record.decoder.dtype.itemsize
        self.pad = record.preprocessing.stack if record.preprocessing.pads else None

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        return bounded(self._preprocessing, height, width, self._max_pixels)

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        return self._preprocessing.output_size(height, width)

    def placement(self, height: int, width: int) -> Placement:
        return self._preprocessing.placement(height, width)

    def decoding_bytes(self, header: Header) -> int:
        return max(_decoded_bytes(header), self._decoder.held(header.height, header.width, self._preprocess))

    def row(self, data: bytes) -> Tensor:
        return self._decoder.image(data, self._max_pixels, self._preprocess)


def _decoded_bytes(header: Header) -> int:
    """Peak bytes while an image is decoded: PIL's own buffers, and its pixels as PIL has them."""
    return header.held + 4 * header.height * header.width


def _rows_together(
    batches: JpegBatches, images: Sequence[bytes], group: range, row: Callable[[int], tuple[Tensor]]
) -> tuple[Tensor]:
    """The rows of JPEG files that are decoded together on the device, or one by one if that fails."""
    try:
        return (batches.rows([images[index] for index in group]),)
    except Exception as error:  # the fault of one file, or of the device: one by one, each file raises its own error
        log.info("decoding %d JPEG files one by one: %.300r", len(group), error)
    return (torch.cat([row(index)[0] for index in group]),)


def _groups(
    batches: JpegBatches | None, images: Sequence[bytes], sizes: Sequence[tuple[int, int]], pixels: Sequence[int]
) -> list[range]:
    if batches is None:
        return spread(len(images), 1)
    return groups([size if batches.takes(data) else None for data, size in zip(images, sizes, strict=True)], pixels)
