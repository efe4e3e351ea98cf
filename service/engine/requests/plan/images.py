"""Planning of encoded images: sizes are read from the headers, and the images are split into parts.

All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.images.channels import luma
from fxcore.images.decoding import decode
from fxcore.images.files import Header, image_header, plain_header
from fxcore.images.formats.deep_png import is_deep
from fxcore.images.placement import Placement
from service.engine.description import Description
from service.engine.requests.plan.plan import FLOAT_BYTES, Part, Plan, indexed, scaled, spread
from service.engine.threads import in_pool

_DEEP_BYTES = 2 * 3 * FLOAT_BYTES
"""Extra bytes per pixel for images with 16 bits per value, which are converted to floats and resized as floats."""

_LUMA_BYTES = 2 * 3 * FLOAT_BYTES
"""Extra bytes per pixel for images sent as they are to models of one channel: two RGB images of floats."""

# Up to these limits, reading plain headers is faster than switching threads twice.
_HEADERS_AT_ONCE = 8
_SMALL_BYTES = 256 * 1024


async def plan_images(
    description: Description, images: Sequence[bytes], preprocess: str, max_pixels: int, intake: Executor
) -> Plan:
    """Plan a request of encoded images without decoding them.

    Args:
        description: the extractor's description.
        images: the request's images.
        preprocess: ``default``, ``pil``, ``fast`` or ``none``; see :class:`~service.engine.options.FeatureOptions`.
        max_pixels: maximum pixels per image.
        intake: the threads that read headers, unless that is quick.

    Raises:
        BadTensor: there is no image, or the model does not accept images; the message says what to send.
        BadImage, ImageTooLarge: the header of an image is invalid or too large; ``extra["index"]`` is its index.
    """
    _check_takes_images(description, images)
    headers = _plain_headers(images, max_pixels)
    if headers is not None:
        return _planned(description, images, headers, preprocess, max_pixels)
    headers = []
    *steps, last = spread(len(images), _HEADERS_AT_ONCE)
    for indices in steps:  # so that other requests are served in between
        headers += await in_pool(intake, _read_headers, images, indices, max_pixels)

    def planned() -> Plan:
        return _planned(description, images, headers + _read_headers(images, last, max_pixels), preprocess, max_pixels)

    return await in_pool(intake, planned)


def _plain_headers(images: Sequence[bytes], max_pixels: int) -> list[Header] | None:
    """Read the headers if that is quick enough for the event loop: if they are few, small and plain.

    Other headers are read by PIL, which walks through the whole file.
    """
    if len(images) > _HEADERS_AT_ONCE or sum(map(len, images)) > _SMALL_BYTES:
        return None
    headers = []
    for index, data in enumerate(images):
        with indexed(index):
            header = plain_header(data, max_pixels)
        if header is None:
            return None
        headers.append(header)
    return headers


def _check_takes_images(description: Description, images: Sequence[bytes]) -> None:
    if not images:
        raise BadTensor("the request holds no image; send at least one")
    if not description.takes_images:
        wanted = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in description.inputs)
        raise BadTensor(f"{description.of} does not take single images; send tensors: {wanted}")


def _read_headers(images: Sequence[bytes], indices: range, max_pixels: int) -> list[Header]:
    headers = []
    for index in indices:
        with indexed(index):
            headers.append(image_header(images[index], max_pixels))
    return headers


def _planned(
    description: Description, images: Sequence[bytes], headers: Sequence[Header], preprocess: str, max_pixels: int
) -> Plan:
    if preprocess == "none":
        preparation = _AsSent(description, max_pixels)
    else:
        preparation = _Preprocessed(description, preprocess, max_pixels)
    sizes, costs = [], []
    for data, header in zip(images, headers, strict=True):
        height, width, _ = header
        deep = _DEEP_BYTES * height * width if is_deep(data) else 0
        costs.append(len(data) + deep + preparation.decoding_bytes(header))
        sizes.append(preparation.row_size(height, width))
    pad = preparation.pad if len(set(sizes)) > 1 else None
    if pad is not None:
        sizes = [(max(height for height, _ in sizes), max(width for _, width in sizes))] * len(sizes)
    value_bytes = FLOAT_BYTES if any(map(is_deep, images)) else preparation.value_bytes
    rows = sum(preparation.channels * height * width * value_bytes for height, width in sizes)
    if pad is not None:
        rows *= 2  # the rows, plus the padded batch

    def placements() -> list[Placement]:
        return [preparation.placement(height, width) for height, width, _ in headers]

    def row(index: int) -> tuple[Tensor]:
        with indexed(index):
            return (preparation.row(images[index])[None],)

    shapes = [((preparation.channels, *size),) for size in sizes]
    parts = [Part(range(index, index + 1), shape, partial(row, index)) for index, shape in enumerate(shapes)]
    sent: dict[tuple[int, int], int] = {}
    for index, (height, width, _) in enumerate(() if preprocess == "none" else headers):
        sent.setdefault((height, width), index)
    boxes = [box for height, width, _ in headers if (box := preparation.valid_box(height, width)) is not None]
    valid_boxes = torch.tensor(boxes, dtype=torch.float32) if boxes else None
    return Plan(parts, rows, costs, pad, placements, sent, valid_boxes)


class _AsSent:
    """Preparation of images with ``preprocess=none``: each image is a row as it is.

    For models of one channel, the row is its luma.

    Attributes:
        channels: channels of a row.
        value_bytes: bytes per value of a row, for images with 8 bits per value.
        pad: combines rows of different sizes into one batch, if the model's own preprocessing does so.
    """

    value_bytes = FLOAT_BYTES
    pad: Callable[[Sequence[Tensor]], Tensor] | None = None

    def __init__(self, description: Description, max_pixels: int) -> None:
        self.channels = description.entry.channels
        self._max_pixels = max_pixels

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of its row."""
        return height, width

    def placement(self, height: int, width: int) -> Placement:
        """Return the placement of the image in its row."""
        return Placement((height, width), 1.0, 1.0, 0, 0, (height, width))

    def valid_box(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        """Return its box in its row; see :meth:`fxcore.images.preprocessing.Preprocessing.valid_box`."""
        return None

    def decoding_bytes(self, header: Header) -> int:
        """Return the peak bytes while the image is decoded, without its file."""
        luma_bytes = _LUMA_BYTES * header.height * header.width if self.channels == 1 else 0
        return _decoded_bytes(header) + luma_bytes

    def row(self, data: bytes) -> Tensor:
        """Return its row: ``[channels, H, W]``, or uint8 pixels ``[H, W, 3]``."""
        pixels = scaled(decode(data, self._max_pixels).permute(2, 0, 1))
        return luma(pixels) if self.channels == 1 else pixels


class _Preprocessed(_AsSent):
    """Preparation of images with the model's preprocessing, in the mode ``preprocess``."""

    def __init__(self, description: Description, preprocess: str, max_pixels: int) -> None:
        super().__init__(description, max_pixels)
        self._decoder = description.decoder
        self._preprocessing = description.preprocessing
        self._preprocess = preprocess
        self.value_bytes = description.decoder.dtype.itemsize
        self.pad = description.preprocessing.batch if description.preprocessing.pads else None

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        return self._preprocessing.output_size(height, width)

    def placement(self, height: int, width: int) -> Placement:
        return self._preprocessing.placement(height, width)

    def valid_box(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        return self._preprocessing.valid_box(height, width)

    def decoding_bytes(self, header: Header) -> int:
        return max(_decoded_bytes(header), self._decoder.held(header.height, header.width, self._preprocess))

    def row(self, data: bytes) -> Tensor:
        return self._decoder.image(data, self._max_pixels, self._preprocess)


def _decoded_bytes(header: Header) -> int:
    """Return the peak bytes while an image is decoded: PIL's buffers and its decoded pixels."""
    return header.held + 4 * header.height * header.width
