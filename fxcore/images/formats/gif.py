"""Decode the first frame of GIF files, on their background.

torchvision's decoder decodes all frames, and returns uninitialised memory for damaged files. Here Pillow decodes the
colour indices of the first frame, and its colours and position are applied in the same way as torchvision does.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from fxcore.images.formats.opening import opened
from fxcore.quiet import quiet

_HEADER = struct.Struct("<6sHHBBB")
_IMAGE = struct.Struct("<BHHHHB")
_IMAGE_START, _EXTENSION_START, _CONTROL = 0x2C, 0x21, 0xF9
_TRANSPARENT = 1
_INTERLACED = 0x40
_COLORS = 256
_NUMBERS = np.arange(_COLORS, dtype=np.uint8)[:, None].repeat(3, axis=1)


def decode(data: bytes, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Decode the first frame to ``[H, W, 3]``. Indices past the end of the colour table are black.

    Args:
        data: a file without metadata (:func:`fxcore.images.formats.containers.stripped`).
        size: height and width of the canvas, which must contain the frame at its position.

    Raises:
        Exception: the file is damaged or cut short.
    """
    _, _, _, flags, background, _ = _HEADER.unpack_from(data)
    at = _HEADER.size
    table, at = _table(data, at, flags)
    canvas = np.empty((*size, 3), np.uint8)
    canvas[:] = 0 if table is None else table[background]
    transparent: int | None = None
    while data[at] == _EXTENSION_START:
        if data[at + 1] == _CONTROL and data[at + 3] & _TRANSPARENT:
            transparent = data[at + 6]
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    start, left, top, width, height, flags = _IMAGE.unpack_from(data, at)
    if start != _IMAGE_START:
        raise ValueError("there is no image in it")
    own, at = _table(data, at + _IMAGE.size, flags)
    if own is not None:
        table = own
    numbers = _numbers(data[at:], width, height, flags & _INTERLACED)
    frame = (_NUMBERS if table is None else table)[numbers]
    place = canvas[top : top + height, left : left + width]
    if transparent is None:
        place[:] = frame
    else:
        np.copyto(place, frame, where=(numbers != transparent)[:, :, None])
    return canvas


def _table(data: bytes, at: int, flags: int) -> tuple[NDArray[np.uint8] | None, int]:
    """Return the colour table that ``flags`` declare at ``at``, ``[256, 3]``, and its end."""
    if not flags & 0x80:
        return None, at
    colors = 2 ** ((flags & 7) + 1)
    table = np.zeros((_COLORS, 3), np.uint8)
    table[:colors] = np.frombuffer(data, np.uint8, 3 * colors, at).reshape(colors, 3)
    return table, at + 3 * colors


def _numbers(packed: bytes, width: int, height: int, interlaced: int) -> NDArray[np.uint8]:
    """Decode colour indices, ``[height, width]``, as grey levels of a file whose colour table is a ramp."""
    ramp = _HEADER.pack(b"GIF89a", width, height, 0xF7, 0, 0) + _NUMBERS.tobytes()
    file = ramp + _IMAGE.pack(_IMAGE_START, 0, 0, width, height, interlaced) + packed
    with opened(file, ["GIF"]) as image, quiet():
        return np.asarray(image.convert("L"))
