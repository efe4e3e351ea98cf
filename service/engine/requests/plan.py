"""What decoding a request takes and gives, known before any of it is decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from torch import Tensor

from fxcore.errors import FxError, ImageTooLarge
from fxcore.images.placement import Placement
from fxcore.images.preprocessing import Preprocessing
from service.engine.rows import RowShape

Inputs = Sequence[bytes] | Mapping[str, Tensor]
"""What a request carries: encoded images, or tensors by the names of the model's inputs."""

FLOAT_BYTES = 4

_PARTS = 16
"""Parts that the images of a request are split into: enough for threads to share fairly, few enough to cost little."""

_DECODING_SHARE = 1 / 4
"""Share of the bytes of all requests that one may take to decode several images at a time."""

_MAX_UPSCALE = 8
"""Times as many pixels as the model's own input has, which every image may be resized to: about 6 : 1 where a model
takes 224 of 256 pixels."""


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


def spread(count: int, size: int | None = None) -> list[range]:
    """``range(count)`` in pieces of ``size``; without it, in at most :data:`_PARTS` pieces."""
    size = size or -(-count // _PARTS)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def bounded(preprocessing: Preprocessing, height: int, width: int, max_pixels: int) -> tuple[int, int]:
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


def scaled(pixels: Tensor) -> Tensor:
    """Values of bytes as floats from 0 to 1."""
    return pixels / 255.0


class indexed:
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
