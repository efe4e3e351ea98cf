"""How a request's images are decoded: their sizes are read from their headers, and they are split into parts.

Everything here may run in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.images.decoding import decode
from fxcore.images.files import Header, has_plain_header, image_header
from fxcore.images.formats.deep_png import is_deep
from fxcore.images.placement import Placement
from service.engine.description import Description
from service.engine.requests.plan.plan import FLOAT_BYTES, Plan, bounded, indexed, scaled, spread

_DEEP_BYTES = 2 * 3 * FLOAT_BYTES
"""Bytes a pixel beside an image of 16 bits a value, which is resized as floats, from floats."""

# Up to these, reading plain headers takes less time than changing threads twice.
_HEADERS_AT_ONCE = 8
_SMALL_BYTES = 256 * 1024


def is_quick(images: Sequence[bytes]) -> bool:
    """Return whether the headers can be read on the event loop: they are few, one of :func:`header_steps`, and plain.
    PIL reads others, and walks through the whole file."""
    few = len(images) <= _HEADERS_AT_ONCE and sum(map(len, images)) <= _SMALL_BYTES
    return few and all(map(has_plain_header, images))


def check_takes_images(description: Description, images: Sequence[bytes]) -> None:
    """Check that there are images and that the model takes images.

    Raises:
        BadTensor: with what would be right.
    """
    if not images:
        raise BadTensor("the request holds no image; send at least one")
    if not description.takes_images:
        wanted = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in description.inputs)
        raise BadTensor(f"{description.of} does not take single images; send tensors: {wanted}")


def header_steps(count: int) -> list[range]:
    """Image indices in groups: headers of a group are read before it is another request's turn."""
    return spread(count, _HEADERS_AT_ONCE)


def read_headers(images: Sequence[bytes], indices: range, max_pixels: int) -> list[Header]:
    """Return the headers of ``images`` at ``indices``.

    Raises:
        BadImage, ImageTooLarge: by the header of an image; ``index`` in ``extra`` says which.
    """
    headers = []
    for index in indices:
        with indexed(index):
            headers.append(image_header(images[index], max_pixels))
    return headers


def plan_images(
    description: Description, images: Sequence[bytes], headers: Sequence[Header], preprocess: str, max_pixels: int
) -> Plan:
    """Plan a request of encoded images without decoding them.

    Args:
        description: of the extractor, which :func:`check_takes_images` found to take them.
        images: of the request.
        headers: of these, by :func:`read_headers`.
        preprocess: ``default``, ``pil``, ``fast`` or ``none``; see :class:`~service.engine.options.FeatureOptions`.
        max_pixels: maximum pixels of an image.

    Raises:
        ImageTooLarge: resizing makes it so; ``index`` in ``extra`` says which image.
    """
    preparation = _AsSent(max_pixels) if preprocess == "none" else _Preprocessed(description, preprocess, max_pixels)
    sizes, costs = [], []
    for index, (data, header) in enumerate(zip(images, headers, strict=True)):
        height, width, _ = header
        with indexed(index):
            preparation.check_size(height, width)
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

    parts = [(range(index, index + 1), partial(row, index)) for index in range(len(images))]
    boxes = [box for height, width, _ in headers if (box := preparation.valid_box(height, width)) is not None]
    return Plan([((preparation.channels, *size),) for size in sizes], rows, costs, parts, pad, placements, boxes)


class _AsSent:
    """How images become rows with ``preprocess=none``: each is its row.

    Attributes:
        channels: of a row.
        value_bytes: bytes of a value of a row, for images with 8 bits a value.
        pad: makes one batch of rows of different sizes, where the model's own preprocessing does so.
    """

    channels = 3
    value_bytes = FLOAT_BYTES
    pad: Callable[[Sequence[Tensor]], Tensor] | None = None

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels

    def check_size(self, height: int, width: int) -> None:
        """Check the largest size that an image has until it is a row, beyond that in its header.

        Raises:
            ImageTooLarge: that has more pixels than are allowed.
        """

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of its row."""
        return height, width

    def placement(self, height: int, width: int) -> Placement:
        """Return where the image is in its row."""
        return Placement((height, width), 1.0, 1.0, 0, 0, (height, width))

    def valid_box(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        """Return its box in its row; see :meth:`fxcore.images.preprocessing.Preprocessing.valid_box`."""
        return None

    def decoding_bytes(self, header: Header) -> int:
        """Return peak bytes until the image is a row, beside its file."""
        return _decoded_bytes(header)

    def row(self, data: bytes) -> Tensor:
        """Return its row, ``[channels, H, W]``, or as uint8 pixels ``[H, W, 3]``."""
        return scaled(decode(data, self._max_pixels).permute(2, 0, 1))


class _Preprocessed(_AsSent):
    """How images become rows by the model's preprocessing, in the mode ``preprocess``."""

    def __init__(self, description: Description, preprocess: str, max_pixels: int) -> None:
        super().__init__(max_pixels)
        self._decoder = description.decoder
        self._preprocessing = description.preprocessing
        self._preprocess = preprocess
        self.channels = description.entry.channels
        self.value_bytes = description.decoder.dtype.itemsize
        self.pad = description.preprocessing.stack if description.preprocessing.pads else None

    def check_size(self, height: int, width: int) -> None:
        bounded(self._preprocessing, height, width, self._max_pixels)

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
    """Peak bytes while an image is decoded: PIL's own buffers, and its pixels as PIL has them."""
    return header.held + 4 * header.height * header.width
