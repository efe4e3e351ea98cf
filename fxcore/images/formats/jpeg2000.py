"""Check JPEG 2000 files by their codestream (ISO/IEC 15444-1, annex A).

OpenJPEG allocates structures for each tile, precinct and code-block of each component, and visits each precinct once
per quality layer: a file of 200 bytes could cost gigabytes, minutes, or both.
"""

from __future__ import annotations

import struct

from fxcore.errors import BadImage
from fxcore.images.formats.avif import boxes

CODESTREAM = b"\xff\x4f\xff\x51"
BOXES = b"\0\0\0\x0cjP  \r\n\x87\n"

_CODING, _COMPONENT, _TILE, _DATA = 0xFF52, 0xFF53, 0xFF90, 0xFF93
_TILE_PART = _TILE.to_bytes(2, "big")
_SEGMENTS = frozenset((*range(0xFF50, 0xFF79), _TILE))
"""Markers of segments in headers. After others, OpenJPEG searches for one of these, byte by byte."""

_MAX_HEADER = 2**20
"""Maximum bytes of boxes before the codestream, which Pillow reads one by one: a colour profile and little else."""

_MAX_SEGMENTS = 65_536
_MAX_COMPONENTS = 4
_MAX_LAYERS = 256
_FEW_TILES = 256
_MIN_TILE = 32 * 32
"""Minimum number of pixels per tile of images with more than :data:`_FEW_TILES`. A tile costs 13 KB."""
_MIN_BLOCK = 8
_MIN_PRECINCT = 6
"""Minimum logarithms of the coefficients in a code-block, and of the sides of precincts at full resolution, which are
half as long at the next one, and so on. Each costs half a kilobyte."""

_REMEDY = "save it again with an image editor, or as PNG"


def checked_size(data: bytes) -> tuple[int, int]:
    """Check the codestream of a JPEG 2000 file, and return its width and height.

    Raises:
        BadImage: it has more components, tiles, precincts, code-blocks or quality layers than programs write, or is
            damaged.
    """
    try:
        start = 0 if data.startswith(CODESTREAM) else _codestream(data)
        if not data.startswith(CODESTREAM, start):
            raise _damaged()
        _check_segments(data, start + 2)
        return _checked_grid(data, start + 8)
    except (struct.error, IndexError, ZeroDivisionError) as error:
        raise _damaged() from error


def _codestream(data: bytes) -> int:
    """Return the start of the codestream, which follows the header."""
    header = False
    for kind, at, end in boxes(data, 0, len(data)):
        if kind == b"jp2c" and header:
            return at
        if kind == b"jp2h":
            header = True
            if end - at > _MAX_HEADER:
                raise BadImage(f"the JPEG 2000 has a header of over {_MAX_HEADER:,} bytes; {_REMEDY}")
    raise _damaged()


def _checked_grid(data: bytes, at: int) -> tuple[int, int]:
    right, lower, left, upper, across, down, first_x, first_y, components = struct.unpack_from(">8IH", data, at)
    width, height = right - left, lower - upper
    if components > _MAX_COMPONENTS:
        raise BadImage(f"the JPEG 2000 has {components:,} components, and at most {_MAX_COMPONENTS} are allowed")
    tiles = ((first_x - right) // across) * ((first_y - lower) // down)  # both negative, rounded up
    most = max(_FEW_TILES, width * height // _MIN_TILE)
    if tiles > most:
        raise BadImage(f"the JPEG 2000 has {tiles:,} tiles, and at most {most:,} are allowed for its size; {_REMEDY}")
    return width, height


def _check_segments(data: bytes, at: int) -> None:
    """Check the coding styles in the main header and in those of tile-parts."""
    part = end = at
    for _ in range(_MAX_SEGMENTS):
        if at + 4 > len(data):
            return
        marker, length = struct.unpack_from(">HH", data, at)
        if marker == _DATA:
            after = max(end, at + 2)
            if end == part or not data.startswith(_TILE_PART, after):  # the last; OpenJPEG reads no further either
                return
            at = after
            continue
        if marker not in _SEGMENTS or length < 2:
            raise _damaged()
        body = data[at + 4 : at + 2 + length]
        if marker == _TILE:
            part, end = at, at + int.from_bytes(body[2:6], "big")
        elif marker == _CODING:
            layers = int.from_bytes(body[2:4], "big")
            if layers > _MAX_LAYERS:
                raise BadImage(f"the JPEG 2000 has {layers:,} quality layers, and at most {_MAX_LAYERS} are allowed")
            _check_style(body[0], body[5:])
        elif marker == _COMPONENT:
            _check_style(body[1], body[2:])
        at += 2 + length
    raise BadImage(f"the JPEG 2000 has over {_MAX_SEGMENTS:,} segments; {_REMEDY}")


def _check_style(flags: int, style: bytes) -> None:
    levels, width, height = style[0], style[1] + 2, style[2] + 2  # logarithms
    if width + height < _MIN_BLOCK:
        raise BadImage(
            f"the JPEG 2000 has code-blocks of {2**width} x {2**height}, and at least {2**_MIN_BLOCK} coefficients are "
            f"required; {_REMEDY}"
        )
    if flags & 1:
        for resolution, sides in enumerate(style[5 : 6 + levels]):
            least = max(0, _MIN_PRECINCT - (levels - resolution))
            if min(sides & 15, sides >> 4) < least:
                raise BadImage(
                    f"the JPEG 2000 has precincts of {2 ** (sides & 15)} x {2 ** (sides >> 4)} at resolution "
                    f"{resolution} of {levels}, and at least {2**least} x {2**least} are required; {_REMEDY}"
                )


def _damaged() -> BadImage:
    return BadImage("the JPEG 2000 data is damaged or cut short")
