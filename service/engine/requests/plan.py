"""What a request carries, and how it is decoded: its size is read from the headers, then it is decoded in parts.

Everything here runs in pool threads and touches no shared state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest

import torch
from torch import Tensor

from fxcore.errors import BadBox, BadTensor, FxError, ImageTooLarge
from fxcore.images.decoding import Decoder, decode, is_deep
from fxcore.images.files import Header, has_plain_header, image_header
from fxcore.images.nvjpeg import JpegBatches
from fxcore.images.placement import Placement
from fxcore.images.preprocessing import Preprocessing
from fxcore.pooling import pooled_regions_shape
from fxcore.tensors import TensorSpec, dtype_name
from service.engine.backends.fallback import OneSize
from service.engine.record import ExtractorRecord
from service.engine.regions import Boxes, Regions
from service.engine.requests.jpeg_groups import decoding_bytes, groups
from service.engine.requests.sizes import row_size
from service.engine.rows import RowShape

Inputs = Sequence[bytes] | Mapping[str, Tensor]
_FLOAT_BYTES = 4
_DEEP_BYTES = 2 * 3 * 4
"""Beside an image of 16 bits a value, for each pixel: it is resized as floats, from floats."""

# Up to these, reading plain headers takes less time than going to another thread and back.
_HEADERS_AT_ONCE = 8
_SMALL_BYTES = 256 * 1024

_PARTS = 16
"""Parts that the images of a request are split into: enough for threads to share fairly, few enough to cost little."""

_DECODING_SHARE = 1 / 4
"""Share of the bytes of all requests that one may take to decode several images at a time."""

_MOST_SAMPLES = 2**31
"""Values of maps that the boxes of a request may take: they hold up the device, two cores for four seconds."""

_MAX_UPSCALE = 8
"""Times as many pixels as the model's own input has, which every image may be resized to: about 6 : 1 where a model
takes 224 of 256 pixels."""

log = logging.getLogger("fxserve.inputs")


@dataclass
class Plan:
    """What decoding a request will take and give.

    Attributes:
        shapes: the shape of every row, in the order sent.
        rows: bytes of all decoded rows.
        costs: for each part, the most bytes that decoding it holds beside its rows, by the headers.
        parts: rows of one shape, and what decodes them: a function to call in a decoder, in any order and at the same
            time. It gives one tensor ``[n, ...]`` for each input of the model, on the CPU or on the model's device;
            uint8 pixels ``[n, H, W, 3]`` are for :meth:`fxcore.images.decoding.Decoder.batch`.
        placements: says where each image is in its row; of tensors nothing is known.
        pad: makes one batch of rows of different sizes, where the model's own preprocessing does so; each part is one
            row then.
    """

    shapes: list[RowShape]
    rows: int
    costs: Sequence[int]
    parts: Sequence[tuple[range, Callable[[], tuple[Tensor, ...]]]]
    pad: Callable[[Sequence[Tensor]], Tensor] | None = None
    placements: Callable[[], Sequence[Placement]] = tuple

    def held(self, at_once: int) -> int:
        """Most bytes that are held while ``at_once`` parts at a time are decoded."""
        return self.rows + sum(nlargest(at_once, self.costs))

    def at_once(self, most: int, limit: int) -> int:
        """How many parts are decoded at a time: up to ``most``, where a request's share of ``limit`` bytes, which are
        those of all requests, holds so many; one at least."""
        most = max(1, min(most, len(self.parts)))
        return next((count for count in range(most, 1, -1) if self.held(count) <= _DECODING_SHARE * limit), 1)


def is_quick(images: Sequence[bytes]) -> bool:
    """Whether reading headers takes less than going to another thread and back: they are few and plain, while others
    are read by PIL, and walked through as long as they are."""
    few = len(images) <= _HEADERS_AT_ONCE and sum(map(len, images)) <= _SMALL_BYTES
    return few and all(map(has_plain_header, images))


def regions(record: ExtractorRecord, planned: Plan, boxes: Boxes, size: int) -> Regions:
    """The regions that ``boxes``, in pixels of the images as sent, are in the model's input and on its maps. The sizes
    of the plan's rows must be known.

    Args:
        size: positions a side of what each box becomes.

    Raises:
        BadBox: one is wrong; ``index`` and ``box`` in ``extra`` say which. Or all together they take too long.
    """
    placements = planned.placements()
    if len(boxes) != len(placements):
        raise BadBox(
            f"boxes has {len(boxes)} lists and the request has {len(placements)} images: give one list for each, "
            "empty where there is no box"
        )
    carried: list[Tensor] = []
    for index, (placement, given) in enumerate(zip(placements, boxes, strict=True)):
        with _indexed(index):
            carried.append(placement.carry(given))
    rows = [row_size(record, shape) for shape in planned.shapes]
    samples = 0
    for row, of_image in zip(rows, carried, strict=True):
        for info in record.outputs:
            if (grid := row.grids.get(info.key)) is not None:
                channels = pooled_regions_shape(row.outputs[info.key][0], info.layout, 1)[1]
                samples += channels * grid.samples(of_image, size)
    if samples > _MOST_SAMPLES:
        raise BadBox(
            f"pooling these boxes takes {samples:,} values of the maps, and at most {_MOST_SAMPLES:,} are taken in one "
            "request: send fewer or smaller boxes, or ask for a coarser level"
        )
    return Regions(carried, [row.grids for row in rows])


def check_takes_images(record: ExtractorRecord, images: Sequence[bytes]) -> None:
    """Refuse images where there are none, or the model takes something else.

    Raises:
        BadTensor: what would be right.
    """
    if not images:
        raise BadTensor("the request holds no image; send at least one")
    if record.preprocessing.layout != "NCHW" or len(record.inputs) != 1:
        wanted = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in record.inputs)
        raise BadTensor(f"{record.spec.model} does not take single images; send tensors: {wanted}")


def header_steps(count: int) -> list[range]:
    """The images whose headers are read one after another, before it is another request's turn."""
    return _spread(count, _HEADERS_AT_ONCE)


def read_headers(images: Sequence[bytes], indices: range, max_pixels: int) -> list[Header]:
    """The headers of ``images`` at ``indices``.

    Raises:
        BadImage, ImageTooLarge: see :func:`plan`.
    """
    headers = []
    for index in indices:
        with _indexed(index):
            headers.append(image_header(images[index], max_pixels))
    return headers


def plan(
    record: ExtractorRecord, inputs: Inputs, preprocess: str, max_pixels: int, headers: Sequence[Header] = ()
) -> Plan:
    """Look at a request without decoding it.

    Args:
        record: the extractor.
        inputs: what the request carries.
        preprocess: ``default``, ``pil``, ``fast`` or ``none``; see :class:`~service.engine.options.FeatureOptions`.
        max_pixels: most pixels of an image.
        headers: of the images, where :func:`check_takes_images` and :func:`read_headers` were called already.

    Raises:
        BadImage, ImageTooLarge: by the header of an image; ``index`` in ``extra`` says which.
        BadTensor: a wrong name, shape or dtype, or a size that the extractor's backend does not take.
    """
    if isinstance(inputs, Mapping):
        made = _plan_tensors(record, inputs, preprocess, max_pixels)
    else:
        if not headers:
            check_takes_images(record, inputs)
            headers = read_headers(inputs, range(len(inputs)), max_pixels)
        made = _plan_images(record, inputs, preprocess, max_pixels, headers)
    if isinstance(record.run, OneSize):
        for shape in dict.fromkeys(made.shapes):
            record.run.check(shape)
    return made


def _plan_images(
    record: ExtractorRecord, images: Sequence[bytes], preprocess: str, max_pixels: int, headers: Sequence[Header]
) -> Plan:
    preprocessing = record.preprocessing
    raw = preprocess == "none"
    sizes: list[tuple[int, int]] = []
    pixels: list[int] = []
    costs: list[int] = []
    for index, (data, header) in enumerate(zip(images, headers, strict=True)):
        height, width, _ = header
        with _indexed(index):
            resized = (height, width) if raw else _bounded(preprocessing, height, width, max_pixels)
        pixels.append(max(height * width, math.prod(resized)))
        deep = _DEEP_BYTES * height * width if is_deep(data) else 0
        costs.append(len(data) + deep + _decoding_bytes(header, None if raw else record.decoder, preprocess))
        sizes.append((height, width) if raw else preprocessing.output_size(height, width))
    pad = None
    if len(set(sizes)) > 1 and preprocessing.pads and not raw:
        sizes = [(max(h for h, _ in sizes), max(w for _, w in sizes))] * len(sizes)
        pad = preprocessing.stack
    item = _FLOAT_BYTES if raw or any(map(is_deep, images)) else record.decoder.dtype.itemsize
    decoded = sum(3 * height * width * item for height, width in sizes)
    if pad is not None:
        decoded *= 2  # the rows, and the batch that is made of them

    def placements() -> list[Placement]:
        return [
            Placement((height, width), 1.0, 1.0, 0, 0, (height, width))
            if raw
            else preprocessing.placement(height, width)
            for height, width, _ in headers
        ]

    def prepare(index: int) -> tuple[Tensor]:
        with _indexed(index):
            if raw:
                return (_scaled(decode(images[index], max_pixels).permute(2, 0, 1))[None],)
            return (record.decoder.image(images[index], max_pixels, preprocess)[None],)

    def together(indices: range, batches: JpegBatches) -> tuple[Tensor]:
        try:
            return (batches.rows([images[index] for index in indices]),)
        except Exception as error:  # one file's, or the device's: decoded one by one, each file raises its own
            log.info("%d JPEG files are decoded one by one: %.300r", len(indices), error)
        return (torch.cat([prepare(index)[0] for index in indices]),)

    batches = record.jpeg_batches if preprocess == "fast" else None
    parts: list[tuple[range, Callable[[], tuple[Tensor]]]] = []
    costs_of_parts: list[int] = []
    for group in _grouped(batches, images, sizes, pixels):
        if batches is None or len(group) == 1:
            parts.append((group, partial(prepare, group.start)))
            costs_of_parts.append(costs[group.start])
        else:
            parts.append((group, partial(together, group, batches)))
            costs_of_parts.append(decoding_bytes([pixels[index] for index in group]))
    return Plan([((3, *size),) for size in sizes], decoded, costs_of_parts, parts, pad, placements)


def _decoding_bytes(header: Header, decoder: Decoder | None, preprocess: str) -> int:
    """Most bytes that one image takes on its way to its row: as PIL decodes it, or decoded and then preprocessed.

    Without a ``decoder`` it is only decoded, and copied from PIL as bytes.
    """
    height, width, held = header
    decoding = held + 4 * height * width
    return decoding if decoder is None else max(decoding, decoder.held(height, width, preprocess))


def _grouped(
    batches: JpegBatches | None, images: Sequence[bytes], sizes: Sequence[tuple[int, int]], pixels: Sequence[int]
) -> list[range]:
    if batches is None:
        return _spread(len(images), 1)
    return groups([size if batches.takes(data) else None for data, size in zip(images, sizes, strict=True)], pixels)


def _spread(count: int, size: int | None = None) -> list[range]:
    """``range(count)`` in pieces of ``size``; without it, in at most :data:`_PARTS` pieces."""
    size = size or -(-count // _PARTS)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Hold the images of an array to the limit that those in files have.

    Raises:
        ImageTooLarge: they have more than ``max_pixels``.
    """
    pixels = height * width
    if pixels > max_pixels:
        raise ImageTooLarge(
            f"the images have {width} x {height} = {pixels} pixels; at most {max_pixels} are taken",
            pixels=pixels,
            limit=max_pixels,
        )


def _bounded(preprocessing: Preprocessing, height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """The largest size that an image takes while it is preprocessed.

    Raises:
        ImageTooLarge: it is over ``max_pixels``, and over what images of no unusual shape take.
    """
    size = preprocessing.largest_size(height, width)
    pixels = size[0] * size[1]
    # A small image may be resized to more than max_pixels, as the model has it; only its shape can make it too many.
    limit = max(max_pixels, _MAX_UPSCALE * math.prod(preprocessing.nominal_size()))
    if pixels > limit:
        raise ImageTooLarge(
            f"the image has {width} x {height} pixels, which resizing makes {size[1]} x {size[0]} = {pixels}; at most "
            f"{limit} are taken",
            pixels=pixels,
            limit=limit,
        )
    return size


def _plan_tensors(record: ExtractorRecord, tensors: Mapping[str, Tensor], preprocess: str, max_pixels: int) -> Plan:
    specs = record.inputs
    if set(tensors) != {spec.name for spec in specs}:
        raise BadTensor(
            f"{record.spec.model} takes tensors named {', '.join(s.name for s in specs)}; the request has "
            f"{', '.join(sorted(tensors)) or 'none'}"
        )
    counts = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in tensors.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise BadTensor(f"all tensors have the same first dimension, at least 1; the request has {counts}")
    rows = next(iter(counts.values()))
    ordered = [tensors[spec.name] for spec in specs]
    shapes = []
    for spec, tensor in zip(specs, ordered, strict=True):
        _check_tensor(spec, tensor)
        if tensor.dtype == torch.uint8:
            _check_pixels(tensor.shape[-3], tensor.shape[-2], max_pixels)
            if preprocess != "none":
                _bounded(record.preprocessing, tensor.shape[-3], tensor.shape[-2], max_pixels)
        shapes.append(_row_shape(record.preprocessing, tensor, preprocess))
    row_shape: RowShape = tuple(shapes)
    decoded = sum(rows * _FLOAT_BYTES * torch.Size(shape).numel() for shape in shapes)
    cost = 0  # of one image or frame at a time, and of a clip's frames all together
    for tensor in ordered:
        if tensor.dtype == torch.uint8 and preprocess != "none":
            frames = tensor.shape[1] if tensor.ndim == 5 else 1
            cost += frames * record.decoder.held(tensor.shape[-3], tensor.shape[-2], preprocess)

    def prepare(indices: range) -> tuple[Tensor, ...]:
        return tuple(_prepared(record, tensor[indices.start : indices.stop], preprocess) for tensor in ordered)

    # Images are worth several threads, tensors are only widened.
    step = None if any(tensor.dtype == torch.uint8 for tensor in ordered) else rows
    spread = _spread(rows, step)
    # The rows of a part are stacked from single ones.
    costs = [cost and cost + decoded * len(part) // rows for part in spread]
    return Plan([row_shape] * rows, decoded, costs, [(part, partial(prepare, part)) for part in spread])


def _check_tensor(spec: TensorSpec, tensor: Tensor) -> None:
    """Check what a request gives for the input ``spec``.

    Raises:
        BadTensor: its dtype or shape is wrong.
    """
    images = tensor.dtype == torch.uint8
    if not images and not tensor.is_floating_point():
        raise BadTensor(
            f"tensor {spec.name!r} is {dtype_name(tensor.dtype)}; send float32 that is preprocessed, or uint8 images"
        )
    given = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    channels = spec.shape[spec.layout.index("C")]
    if tensor.ndim != len(spec.layout) or tensor.shape[-1 if images else spec.layout.index("C")] != channels:
        wanted = f"uint8 {spec.layout.replace('C', '')}C" if images else f"float32 {spec.layout}"
        raise BadTensor(f"tensor {spec.name!r} is {given}; this model takes {wanted} with {channels} channels")
    if 0 in tensor.shape:
        raise BadTensor(f"tensor {spec.name!r} is {given}; each of its sizes is at least 1")


def _row_shape(preprocessing: Preprocessing, tensor: Tensor, preprocess: str) -> tuple[int, ...]:
    if tensor.dtype != torch.uint8:
        return tuple(tensor.shape[1:])
    *outer, height, width, channels = tensor.shape[1:]
    size = (height, width) if preprocess == "none" else preprocessing.output_size(height, width)
    return (channels, *outer, *size)


def _prepared(record: ExtractorRecord, tensor: Tensor, preprocess: str) -> Tensor:
    if tensor.dtype != torch.uint8:
        return tensor.to(torch.float32).contiguous()
    if preprocess == "none":
        return _scaled(tensor.movedim(-1, 1))
    if record.preprocessing.layout != "NCHW":
        return record.preprocessing.tensor(tensor)
    return torch.stack([record.decoder.pixels(pixels, preprocess) for pixels in tensor])


def _scaled(pixels: Tensor) -> Tensor:
    return pixels / 255.0


class _indexed:
    """Says which image of a request an error is about."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FxError) and "index" not in error.extra:
            error.extra["index"] = self.index
            error.detail = f"image {self.index}: {error.detail}"
            error.args = (error.detail,)
