"""Planning of encoded images: sizes are read from the headers, and the images are split into parts.

All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor

from fxcore.errors import BadTensor, FxError
from fxcore.images.channels import luma
from fxcore.images.decoding import decode_floats
from fxcore.images.files import Header, image_header, plain_header
from fxcore.images.formats.deep_png import is_deep
from fxcore.images.placement import Placement
from service.engine.description import Description
from service.engine.requests.plan.plan import FLOAT_BYTES, Part, Plan, of_image, spread
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
    try:
        for data in images:
            header = plain_header(data, max_pixels)
            if header is None:
                return None
            headers.append(header)
    except FxError:  # _read_headers raises it again, with the index of the image
        return None
    return headers


def _read_headers(images: Sequence[bytes], indices: range, max_pixels: int) -> list[Header]:
    headers = []
    for index in indices:
        try:
            headers.append(image_header(images[index], max_pixels))
        except FxError as error:
            of_image(index, error)
            raise
    return headers


def _planned(
    description: Description, images: Sequence[bytes], headers: Sequence[Header], preprocess: str, max_pixels: int
) -> Plan:
    preprocessing, decoder, channels = description.preprocessing, description.decoder, description.entry.channels
    preprocessed = preprocess != "none"
    sizes, costs, boxes = [], [], []
    sent: dict[tuple[int, int], int] = {}
    floats = not preprocessed
    for index, (data, (height, width, held)) in enumerate(zip(images, headers, strict=True)):
        pixels = height * width
        cost = held + 4 * pixels  # PIL's buffers and its decoded pixels
        if preprocessed:
            sizes.append(preprocessing.output_size(height, width))
            cost = max(cost, decoder.held(height, width, preprocess))
            sent.setdefault((height, width), index)
            if (box := preprocessing.valid_box(height, width)) is not None:
                boxes.append(box)
        else:
            sizes.append((height, width))
            cost += _LUMA_BYTES * pixels if channels == 1 else 0
        if is_deep(data):
            floats = True
            cost += _DEEP_BYTES * pixels
        costs.append(len(data) + cost)
    pad = preprocessing.batch if preprocessed and preprocessing.pads and len(set(sizes)) > 1 else None
    if pad is not None:
        sizes = [(max(height for height, _ in sizes), max(width for _, width in sizes))] * len(sizes)

    def placements() -> list[Placement]:
        if preprocessed:
            return [preprocessing.placement(height, width) for height, width, _ in headers]
        return [Placement(size, 1.0, 1.0, 0, 0, size) for size in sizes]

    def row(index: int) -> tuple[Tensor]:
        """Return the row of an image: ``[1, channels, H, W]``, or uint8 pixels ``[1, H, W, 3]``.

        With ``preprocess=none`` it is the image as it is, or its luma for models of one channel.
        """
        try:
            if preprocessed:
                return (decoder.image(images[index], max_pixels, preprocess)[None],)
            pixels = decode_floats(images[index], max_pixels)
            return ((luma(pixels) if channels == 1 else pixels)[None],)
        except FxError as error:
            of_image(index, error)
            raise

    decoded, parts = 0, []
    value_bytes = FLOAT_BYTES if floats else decoder.dtype.itemsize
    for index, size in enumerate(sizes):
        decoded += channels * size[0] * size[1] * value_bytes
        parts.append(Part(range(index, index + 1), ((channels, *size),), partial(row, index)))
    if pad is not None:
        decoded *= 2  # the rows, plus the padded batch
    valid_boxes = torch.tensor(boxes, dtype=torch.float32) if boxes else None
    return Plan(parts, decoded, costs, pad, placements, sent, valid_boxes)
