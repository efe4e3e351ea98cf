"""The plan of a request: its rows and how to decode them, known before any of it is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from typing import NamedTuple

from torch import Tensor

from fxcore.errors import FxError
from fxcore.images.placement import Placement
from service.engine.rows.shapes import RowShape

Inputs = Sequence[bytes] | Mapping[str, Tensor]
"""A request's inputs: encoded images, or tensors by model input name."""

FLOAT_BYTES = 4

_DECODING_SHARE = 1 / 4
"""Maximum share of the total bytes that one request may use to decode several images at a time."""


class Part(NamedTuple):
    """Consecutive rows that are decoded together.

    Attributes:
        rows: their indices.
        shape: the shape of each.
        decode: decodes them; may be called in a decoder thread, concurrently with other parts and in any order. Returns
            one tensor ``[n, ...]`` per model input, on the CPU; uint8 pixels ``[n, H, W, 3]`` are input for
            :meth:`fxcore.images.decoding.Decoder.batch`.
    """

    rows: range
    shape: RowShape
    decode: Callable[[], tuple[Tensor, ...]]


@dataclass
class Plan:
    """The rows of a request, how to decode them, and how much memory that takes.

    There may be a million rows, but only a few parts per image: do not go through single rows on the event loop.

    Attributes:
        parts: the rows, in the order sent; each image is a part of its own.
        decoded: bytes of all decoded rows.
        costs: for each part, the peak bytes of decoding it, without its rows, according to the headers.
        pad: combines rows of different sizes into one batch, if the model's own preprocessing does so; then each part
            is one row.
        placements: returns the placement of each image in its row; empty for tensors.
        sent: the sizes, height and width, of images as sent, if they are preprocessed, and the first image of each.
        valid_boxes: x1, y1, x2, y2 of each image in its row, if the rest of the row is padding, float32 ``[n, 4]``.
    """

    parts: Sequence[Part]
    decoded: int
    costs: Sequence[int]
    pad: Callable[[Sequence[Tensor]], Tensor] | None = None
    placements: Callable[[], Sequence[Placement]] = tuple
    sent: Mapping[tuple[int, int], int] = field(default_factory=dict)
    valid_boxes: Tensor | None = None

    @cached_property
    def shapes(self) -> Counter[RowShape]:
        """The number of rows of each shape, in the order sent."""
        counts: Counter[RowShape] = Counter()
        for part in self.parts:
            counts[part.shape] += len(part.rows)
        return counts

    def at_once(self, most: int, limit: int) -> tuple[int, int]:
        """Return the number of parts to decode at a time, and the peak bytes meanwhile.

        At least one, and up to ``most`` if they fit into a request's share of ``limit``, the maximum bytes of all
        requests.
        """
        count = min(most, len(self.parts))
        while (held := self.decoded + sum(nlargest(count, self.costs))) > _DECODING_SHARE * limit and count > 1:
            count -= 1
        return count, held


def spread(count: int, size: int) -> list[range]:
    """Split ``range(count)`` into pieces of ``size``."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def of_image(index: int, error: FxError) -> None:
    """Add the index of its image to ``error``, unless it has one."""
    if "index" not in error.extra:
        error.extra["index"] = index
        error.detail = f"image {index}: {error.detail}"
        error.args = (error.detail,)
