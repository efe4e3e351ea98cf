"""The chunks of PNG files, and a check for rows that are missing, which Pillow leaves black."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_HEADER_AT = 16
_HEADER = struct.Struct(">IIBB2xB")
"""Width, height, bits per sample, colour type and interlacing."""

_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples per pixel by colour type (PNG specification, table 11.1)."""

# First column and row, and steps, of the seven passes of interlaced files (PNG specification, section 8.2).
_WHOLE = ((0, 0, 1, 1),)
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))

_READ, _INFLATED = 1 << 16, 1 << 20
"""Bytes to decompress at a time, and to get at a time."""


def chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each chunk of a file, its start, and its end, which may lie beyond the file."""
    at = len(SIGNATURE)
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at, at + 12 + length
        at += 12 + length


def check_complete(data: bytes, last_row: NDArray[Any]) -> None:
    """Check that the compressed pixels of a file reach its last row.

    They are counted only if they may not: Pillow leaves rows that it misses zero, and interlaced rows at any place.

    Args:
        data: a file that Pillow decoded.
        last_row: its last row as Pillow decoded it, not converted.

    Raises:
        ValueError: the pixels end before the last row.
        zlib.error: they are damaged.
    """
    width, height, bits, color, interlaced = _HEADER.unpack_from(data, _HEADER_AT)
    if last_row.any() and not interlaced:
        return
    missing = 0
    for left, top, across, down in _PASSES if interlaced else _WHOLE:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            missing += rows * (1 + -(-columns * bits * _SAMPLES[color] // 8))  # each row starts with its filter
    inflate = zlib.decompressobj()
    for kind, at, end in chunks(data):
        if kind == b"IDAT":
            for start in range(at + 8, end - 4, _READ):
                rest = data[start : min(start + _READ, end - 4)]
                while rest and missing > 0 and not inflate.eof:  # it would collect what comes after its end
                    missing -= len(inflate.decompress(rest, _INFLATED))
                    rest = inflate.unconsumed_tail
    if missing > 0:
        raise ValueError("the pixels end before the last row")
