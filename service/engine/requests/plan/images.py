"""Planning of encoded images: sizes are read from the headers, and the images are split into parts.

All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.images.channels import luma
from fxcore.images.decoding import decode_floats
from fxcore.images.files import Header, image_header, plain_header
from fxcore.images.formats.deep_png import is_deep
from fxcore.images.placement import Placement
from service.engine.description import Description
from service.engine.requests.plan.plan import FLOAT_BYTES, Part, Plan, indexed, spread
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
    if not images:
        raise BadTensor("the request holds no image; send at least one")
    if not description.takes_images:
        wanted = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in description.inputs)
        raise BadTensor(f"{description.of} does not take single images; send tensors: {wanted}")
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


def _read_headers(images: Sequence[bytes], indices: range, max_pixels: int) -> list[Header]:
    headers = []
    for index in indices:
        with indexed(index):
            headers.append(image_header(images[index], max_pixels))
    return headers


def _planned(
    description: Description, images: Sequence[bytes], headers: Sequence[Header], preprocess: str, max_pixels: int
) -> Plan:
    preprocessing, channels = description.preprocessing, description.entry.channels
    preprocessed = () if preprocess == "none" else headers
    sizes = [preprocessing.output_size(h, w) if preprocessed else (h, w) for h, w, _ in headers]
    costs = []
    for data, header in zip(images, headers, strict=True):
        deep = _DEEP_BYTES * header.height * header.width if is_deep(data) else 0
        costs.append(len(data) + deep + _decoding_bytes(description, header, preprocess))
    pad = preprocessing.batch if preprocessed and preprocessing.pads and len(set(sizes)) > 1 else None
    if pad is not None:
        sizes = [(max(height for height, _ in sizes), max(width for _, width in sizes))] * len(sizes)
    floats = not preprocessed or any(map(is_deep, images))
    value_bytes = FLOAT_BYTES if floats else description.decoder.dtype.itemsize
    decoded = sum(channels * height * width * value_bytes for height, width in sizes)
    if pad is not None:
        decoded *= 2  # the rows, plus the padded batch

    def placements() -> list[Placement]:
        if preprocessed:
            return [preprocessing.placement(height, width) for height, width, _ in headers]
        return [Placement(size, 1.0, 1.0, 0, 0, size) for size in sizes]

    def row(index: int) -> tuple[Tensor]:
        with indexed(index):
            return (_row(description, images[index], preprocess, max_pixels)[None],)

    shapes = [((channels, *size),) for size in sizes]
    parts = [Part(range(index, index + 1), shape, partial(row, index)) for index, shape in enumerate(shapes)]
    sent: dict[tuple[int, int], int] = {}
    for index, (height, width, _) in enumerate(preprocessed):
        sent.setdefault((height, width), index)
    boxes = [box for height, width, _ in preprocessed if (box := preprocessing.valid_box(height, width)) is not None]
    valid_boxes = torch.tensor(boxes, dtype=torch.float32) if boxes else None
    return Plan(parts, decoded, costs, pad, placements, sent, valid_boxes)


def _decoding_bytes(description: Description, header: Header, preprocess: str) -> int:
    """Return the peak bytes while an image is decoded, without its file."""
    pixels = header.height * header.width
    decoded = header.held + 4 * pixels  # PIL's buffers and its decoded pixels
    if preprocess == "none":
        return decoded + (_LUMA_BYTES * pixels if description.entry.channels == 1 else 0)
    return max(decoded, description.decoder.held(header.height, header.width, preprocess))


def _row(description: Description, data: bytes, preprocess: str, max_pixels: int) -> Tensor:
    """Return the row of an image: ``[channels, H, W]``, or uint8 pixels ``[H, W, 3]``.

    With ``preprocess=none`` it is the image as it is, or its luma for models of one channel.
    """
    if preprocess != "none":
        return description.decoder.image(data, max_pixels, preprocess)
    pixels = decode_floats(data, max_pixels)
    return luma(pixels) if description.entry.channels == 1 else pixels
