"""Read the orientation of an image from its EXIF block, as ``torchvision.io.decode_image`` does."""

from __future__ import annotations

import struct

_TIFF = 42
_ORIENTATION = 0x0112
_ENTRY_BYTES = 12


def orientation(exif: bytes) -> int:
    """Return the orientation, 1 to 8 (EXIF tag 0x0112); from 5 on, height and width are swapped.

    Return 1 if the block has none or is damaged.

    Args:
        exif: a TIFF header and its first directory, without a leading ``Exif\\0\\0``.

    >>> orientation(b"MM\\0*\\0\\0\\0\\x08\\0\\x01" + b"\\x01\\x12\\0\\x03\\0\\0\\0\\x01\\0\\x06\\0\\0")
    6
    """
    order = "<" if exif.startswith(b"II") else ">"
    try:
        mark, at = struct.unpack_from(f"{order}HI", exif, 2)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        if mark != _TIFF:
            return 1
        for entry in range(at + 2, at + 2 + _ENTRY_BYTES * count, _ENTRY_BYTES):
            tag, value = struct.unpack_from(f"{order}H6xH", exif, entry)
            if tag == _ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:  # the block ends early
        pass
    return 1
