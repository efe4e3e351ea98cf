"""The plan of a request: its rows and how to decode them, known before any of it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from torch import Tensor

from fxcore.errors import FxError
from fxcore.images.placement import Placement
from service.engine.rows.shapes import RowShape
from service.problems import Problem

Inputs = Sequence[bytes] | Mapping[str, Tensor]
"""A request's inputs: encoded images, or tensors by model input name."""

FLOAT_BYTES = 4

_PARTS = 16
"""Maximum parts that a request's images are split into: enough to share among threads, few enough for little overhead.
"""

_SMALL_BYTES = 64 * 1024

_DECODING_SHARE = 1 / 4
"""Maximum share of the total bytes that one request may use to decode several images at a time."""


@dataclass
class Plan:
    """The rows of a request, how to decode them, and how much memory that takes.

    Attributes:
        shapes: the shape of every row, in the order sent.
        rows: bytes of all decoded rows.
        costs: for each part, the peak bytes of decoding it, without its rows, according to the headers.
        parts: row indices, all of one shape, and the function that decodes them. The functions may be called in decoder
            threads, concurrently and in any order. Each returns one tensor ``[n, ...]`` per model input, on the CPU;
            uint8 pixels ``[n, H, W, 3]`` are input for :meth:`fxcore.images.decoding.Decoder.batch`.
        placements: returns the placement of each image in its row; empty for tensors.
        pad: combines rows of different sizes into one batch, if the model's own preprocessing does so; then each part
            is one row.
        sent: height and width of each image as sent, if it is preprocessed; those of one input after those of another.
        valid_boxes: x1, y1, x2, y2 of each image in its row, if the rest of the row is padding; empty without padding.
    """

    shapes: list[RowShape]
    rows: int
    costs: Sequence[int]
    parts: Sequence[tuple[range, Callable[[], tuple[Tensor, ...]]]]
    pad: Callable[[Sequence[Tensor]], Tensor] | None = None
    placements: Callable[[], Sequence[Placement]] = tuple
    sent: Sequence[tuple[int, int]] = ()
    valid_boxes: Sequence[tuple[int, int, int, int]] = ()

    def is_small_tensor(self) -> bool:
        """Return whether there is a single part that only needs a quick conversion to float32."""
        return len(self.parts) == 1 and self.rows <= _SMALL_BYTES and not any(self.costs)

    def held(self, at_once: int) -> int:
        """Return the peak bytes while ``at_once`` parts are decoded at a time."""
        return self.rows + sum(nlargest(at_once, self.costs))

    def at_once(self, most: int, limit: int) -> int:
        """Return the number of parts to decode at a time.

        At least one, and up to ``most`` if they fit into a request's share of ``limit``, the maximum bytes of all
        requests.
        """
        most = max(1, min(most, len(self.parts)))
        return next((count for count in range(most, 1, -1) if self.held(count) <= _DECODING_SHARE * limit), 1)


def spread(count: int, size: int | None = None) -> list[range]:
    """Split ``range(count)`` into pieces of ``size``, by default into at most :data:`_PARTS` pieces."""
    size = size or -(-count // _PARTS)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def scaled(pixels: Tensor) -> Tensor:
    """Return uint8 values as floats from 0 to 1."""
    return pixels / 255.0


class indexed:
    """Context manager that adds the index of the image to an error."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FxError | Problem) and "index" not in error.extra:
            error.extra["index"] = self.index
            error.detail = f"image {self.index}: {error.detail}"
            error.args = (error.detail,)
