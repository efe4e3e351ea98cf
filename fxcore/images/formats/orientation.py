"""Read the orientation of an image from its EXIF or XMP block."""

from __future__ import annotations

import re
import struct

_ORIENTATION = 0x0112
_SHORT, _LONG = 3, 4
_HEADER_BYTES = 8
_ENTRY_BYTES = 12
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: bytes | None, xmp: bytes | None = None) -> int:
    """Return the orientation, 1 to 8 (EXIF tag 0x0112); from 5 on, height and width are swapped.

    The EXIF block takes precedence over the XMP packet, as in Pillow. If the block is damaged, return 1.

    Args:
        exif: a TIFF header and its first directory, with or without a leading ``Exif\\0\\0``.
        xmp: a packet, or the start of one.

    >>> orientation(b"MM\\0*\\0\\0\\0\\x08\\0\\x01" + b"\\x01\\x12\\0\\x03\\0\\0\\0\\x01\\0\\x06\\0\\0")
    6
    >>> orientation(None, b'<rdf:Description tiff:Orientation="3"/>')
    3
    """
    value = None if exif is None else _in_exif(exif)
    if value is None and xmp is not None:
        match = _IN_XMP.search(xmp)
        value = None if match is None else int(match[1])
    return value if value is not None and 1 <= value <= 8 else 1


def _in_exif(block: bytes) -> int | None:
    """Return the value of the tag in the first directory; 0 if it is invalid, None if it is missing."""
    start = 6 if block.startswith(b"Exif\0\0") else 0
    order = {b"II": "<", b"MM": ">"}.get(block[start : start + 2])
    if order is None or len(block) < start + _HEADER_BYTES:
        return None
    (offset,) = struct.unpack_from(f"{order}I", block, start + 4)
    at = start + offset
    if at + 2 > len(block):
        return None
    (count,) = struct.unpack_from(f"{order}H", block, at)
    entries = block[at + 2 : at + 2 + _ENTRY_BYTES * count]
    entries = entries[: len(entries) // _ENTRY_BYTES * _ENTRY_BYTES]
    for tag, kind, values, value in struct.iter_unpack(f"{order}HHI4s", entries):
        if tag == _ORIENTATION:
            if values != 1 or kind not in (_SHORT, _LONG):
                return 0
            found: int = struct.unpack(f"{order}I" if kind == _LONG else f"{order}Hxx", value)[0]
            return found
    return None
