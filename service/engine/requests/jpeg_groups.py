"""Which images of a request are decoded together, on the device."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST = 4
"""Fewest JPEG files that are decoded together: CPU threads decode fewer before a device would begin. Not measured on a
device yet."""

MOST = 32
"""Most files that are decoded together: the rows of a batch on a GPU, by default."""

MOST_PIXELS = 64 * 1024**2
"""Most pixels of the files that are decoded together. A file with over a quarter of these is left to a CPU decoder,
which scales it down while it decodes."""


def groups(rows: Sequence[tuple[int, int] | None], pixels: Sequence[int]) -> list[range]:
    """Split a request's images into groups: ranges, in the order sent, of images that are decoded together, or of one.

    Args:
        rows: height and width of the row that an image becomes, which those decoded together have in common; None of an
            image that has to be decoded alone.
        pixels: of each image.

    >>> groups([(8, 8)] * 5 + [None] + [(8, 8)] * 2, [100] * 8)
    [range(0, 5), range(5, 6), range(6, 7), range(7, 8)]
    """
    found: list[range] = []
    start = 0
    while start < len(rows):
        group = _longest(rows, pixels, start)
        found += [group] if len(group) >= FEWEST else [range(index, index + 1) for index in group]
        start = group.stop
    return found


def decoding_bytes(pixels: Sequence[int]) -> int:
    """Peak bytes of decoding a group: all images as bytes, and the largest as floats before and after it is resized."""
    return 3 * sum(pixels) + 2 * 4 * 3 * max(pixels)


def _longest(rows: Sequence[tuple[int, int] | None], pixels: Sequence[int], start: int) -> range:
    """The longest group from ``start`` on, which may be one image."""
    stop, total = start + 1, pixels[start]
    if rows[start] is None or total > MOST_PIXELS // FEWEST:
        return range(start, stop)
    while stop < len(rows) and stop - start < MOST and rows[stop] == rows[start]:
        total += pixels[stop]
        if total > MOST_PIXELS or pixels[stop] > MOST_PIXELS // FEWEST:
            break
        stop += 1
    return range(start, stop)
