"""Check the size of AVIF files by their AV1 data, not by their container.

libavif allocates the frame that the AV1 data declares, up to 16,384 pixels a side, and scales it to the container's
size: a file of a kilobyte that claims to be a single pixel could cost a gigabyte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from fxcore.errors import BadImage

_SLACK = 256 * 256
"""Number of pixels by which a frame may exceed its image."""

_MAX_BOXES = 4_096
_MAX_OBUS = 4_096
_SEQUENCE_HEADER = 1
_REMEDY = "save it again with an image editor, or as PNG"


def check(data: bytes, pixels: int) -> None:
    """Check that every frame of an AVIF file has about as many pixels as the image, ``pixels``.

    Raises:
        BadImage: a frame has more, or the file is an animation, consists of tiles, or has no frame.
    """
    try:
        frames = [size for item in _items(data) for size in _frames(item)]
    except (struct.error, IndexError) as error:
        raise BadImage(f"the AVIF data is damaged or cut short: {error}") from error
    if not frames:
        raise BadImage("the AVIF data is damaged or cut short: there is no frame in it")
    for width, height in frames:
        if width * height > pixels + _SLACK:
            raise BadImage(f"the AVIF file has a frame of {width} x {height} in an image of {pixels} pixels; {_REMEDY}")


def boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, start and end of each box of ISO/IEC 14496-12 from ``at`` to ``end``."""
    for _ in range(_MAX_BOXES):
        if at + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", data, at)
        head = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
            head = 16
        size = size or end - at
        if size < head:
            return
        yield kind, at + head, min(at + size, end)
        at += size
    raise BadImage(f"the image has over {_MAX_BOXES:,} boxes; {_REMEDY}")


def _items(data: bytes) -> Iterator[bytes]:
    """Yield the contents of each item of the file."""
    outer = list(boxes(data, 0, len(data)))
    if data[8:12] == b"avis" and any(kind == b"moov" for kind, _, _ in outer):
        raise BadImage("this is an animated AVIF, which is not supported; send one frame of it as an image")
    for kind, begin, end in outer:
        if kind != b"meta":
            continue
        inner = {name: (start, stop) for name, start, stop in boxes(data, begin + 4, end)}
        start, stop = inner.get(b"iref", (0, 0))
        if any(name == b"dimg" for name, _, _ in boxes(data, start + 4, stop)):
            raise BadImage(f"this is an AVIF image made of tiles, which is not supported; {_REMEDY}")
        if b"iloc" in inner:
            yield from _located(data, inner[b"iloc"][0], inner.get(b"idat", (0, 0)))


def _located(data: bytes, at: int, own: tuple[int, int]) -> Iterator[bytes]:
    """Yield the contents of each item of an item location box (ISO/IEC 14496-12, 8.11.3).

    ``own`` is the range of the item data box.
    """
    version, sizes, more = data[at], data[at + 4], data[at + 5]
    offset_bytes, length_bytes, base_bytes = sizes >> 4, sizes & 15, more >> 4
    index_bytes = more & 15 if version in (1, 2) else 0
    number_bytes = 4 if version == 2 else 2
    at += 6

    def number(count: int) -> int:
        nonlocal at
        if at + count > len(data):
            raise IndexError("its table of items ends early")
        at += count
        return int.from_bytes(data[at - count : at], "big")

    for _ in range(min(number(number_bytes), _MAX_BOXES)):
        number(number_bytes)
        in_file = version == 0 or number(2) & 15 == 0
        number(2)
        base = number(base_bytes)
        pieces = []
        for _ in range(number(2)):
            number(index_bytes)
            start = base + number(offset_bytes)
            length = number(length_bytes)
            lowest, highest = (0, len(data)) if in_file else own
            stop = lowest + start + length if length else highest
            pieces.append(data[lowest + start : min(stop, highest)])
            if sum(map(len, pieces)) > len(data):
                raise IndexError("an item is larger than the file")
        yield b"".join(pieces)


def _frames(item: bytes) -> Iterator[tuple[int, int]]:
    """Yield the maximum frame width and height of each sequence header in AV1 data; nothing for other data."""
    at = 0
    for _ in range(_MAX_OBUS):
        if at >= len(item):
            return
        head = item[at]
        at += 2 if head & 4 else 1
        size = len(item) - at
        if head & 2:
            size = shift = 0
            while at < len(item) and shift < 56:
                size |= (item[at] & 127) << shift
                shift += 7
                at += 1
                if item[at - 1] < 128:
                    break
        if head >> 3 & 15 == _SEQUENCE_HEADER:
            yield _size(item[at : at + size])
        at += size


def _size(header: bytes) -> tuple[int, int]:
    """Return the maximum frame width and height from a sequence header (AV1 specification, 5.5.1)."""
    digits = iter("".join(f"{byte:08b}" for byte in header[:256]))

    def read(bits: int) -> int:
        return int("0" + "".join(next(digits, "0") for _ in range(bits)), 2)

    read(4)
    if read(1):  # a reduced header of a still picture
        read(5)
    else:
        delay_bits = 0
        if read(1):  # timing
            read(64)
            if read(1):
                zeros = 0
                while zeros < 32 and not read(1):
                    zeros += 1
                read(zeros)
            if read(1):  # a decoder model
                delay_bits = read(5) + 1
                read(42)
        delays = read(1)
        for _ in range(read(5) + 1):  # operating points
            read(12)
            if read(5) > 7:
                read(1)
            if delay_bits and read(1):
                read(2 * delay_bits + 1)
            if delays and read(1):
                read(4)
    width_bits, height_bits = read(4) + 1, read(4) + 1
    return read(width_bits) + 1, read(height_bits) + 1
