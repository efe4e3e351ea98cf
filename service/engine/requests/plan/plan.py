"""The plan of a request: its rows and how they are decoded, made before any of it is decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from torch import Tensor

from fxcore.errors import FxError, ImageTooLarge
from fxcore.images.placement import Placement
from fxcore.images.preprocessing import Preprocessing
from service.engine.rows.shapes import RowShape
from service.problems import Problem

Inputs = Sequence[bytes] | Mapping[str, Tensor]
"""A request's inputs: encoded images, or tensors by the names of the model's inputs."""

FLOAT_BYTES = 4

_PARTS = 16
"""Maximum parts that a request's images are split into: enough to share among threads, few enough to cost little."""

_SMALL_BYTES = 64 * 1024

_DECODING_SHARE = 1 / 4
"""Share of all requests' bytes that one request may take to decode several images at a time."""

_MAX_UPSCALE = 8
"""Every image may be resized to so many times the pixels of the model's own input: about 6 : 1 where a model takes 224
of 256 pixels."""


@dataclass
class Plan:
    """The rows of a request, how they are decoded, and what that takes.

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
        valid_boxes: x1, y1, x2, y2 of each image in its row, where the rest is padding; empty where there is no rest.
    """

    shapes: list[RowShape]
    rows: int
    costs: Sequence[int]
    parts: Sequence[tuple[range, Callable[[], tuple[Tensor, ...]]]]
    pad: Callable[[Sequence[Tensor]], Tensor] | None = None
    placements: Callable[[], Sequence[Placement]] = tuple
    valid_boxes: Sequence[tuple[int, int, int, int]] = ()

    def is_small_tensor(self) -> bool:
        """Return whether there is one part, which is only converted to float32, and quickly."""
        return len(self.parts) == 1 and self.rows <= _SMALL_BYTES and not any(self.costs)

    def held(self, at_once: int) -> int:
        """Peak bytes while ``at_once`` parts at a time are decoded."""
        return self.rows + sum(nlargest(at_once, self.costs))

    def at_once(self, most: int, limit: int) -> int:
        """Return how many parts to decode at a time: up to ``most``, as many as fit into a request's share of
        ``limit``, the bytes of all requests; at least one."""
        most = max(1, min(most, len(self.parts)))
        return next((count for count in range(most, 1, -1) if self.held(count) <= _DECODING_SHARE * limit), 1)


def spread(count: int, size: int | None = None) -> list[range]:
    """``range(count)`` in pieces of ``size``; without it, in at most :data:`_PARTS` pieces."""
    size = size or -(-count // _PARTS)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def bounded(preprocessing: Preprocessing, height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Return the largest size of an image while it is preprocessed.

    Raises:
        ImageTooLarge: it is over ``max_pixels``, and over what images of common aspect ratios need.
    """
    size = preprocessing.largest_size(height, width)
    pixels = size[0] * size[1]
    # A model may resize small images to more than max_pixels; only an extreme aspect ratio makes it too many.
    limit = max(max_pixels, _MAX_UPSCALE * math.prod(preprocessing.nominal_size()))
    if pixels > limit:
        raise ImageTooLarge(
            f"the image has {width} x {height} pixels, which resizing makes {size[1]} x {size[0]} = {pixels}; at most "
            f"{limit} are taken",
            pixels=pixels,
            limit=limit,
        )
    return size


def scaled(pixels: Tensor) -> Tensor:
    """uint8 values as floats from 0 to 1."""
    return pixels / 255.0


class indexed:
    """Add the index of the image to an error."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FxError | Problem) and "index" not in error.extra:
            error.extra["index"] = self.index
            error.detail = f"image {self.index}: {error.detail}"
            error.args = (error.detail,)
