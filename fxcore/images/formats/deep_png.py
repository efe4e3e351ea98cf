"""Decode PNG files with 16 bits per sample without losing bits.

torchvision's decoder crashes on damaged files. Pillow decodes them safely, but only the upper eight bits unless the
image is grey; so it is run a second time for the lower eight bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxcore.images.formats.opening import opened
from fxcore.images.formats.png import SIGNATURE, check_complete
from fxcore.quiet import quiet

_DEPTH_AT, _COLOR_AT = 24, 25
_GREY, _GREY_ALPHA, _RGB, _RGBA = 0, 4, 2, 6  # colour types of 16 bits (PNG specification, table 11.1)

# Pillow's raw modes for the bytes that it would drop, which read each pair as little-endian. Grey with alpha has four
# bytes, which are read unchanged.
_LOWER = {_RGB: "RGB;16L", _RGBA: "RGBA;16L"}


def is_deep(data: bytes) -> bool:
    """Return whether ``data`` is a PNG file with 16 bits per sample."""
    return data[: len(SIGNATURE)] == SIGNATURE and data[_DEPTH_AT : _DEPTH_AT + 1] == b"\x10"


def decode(data: bytes) -> NDArray[np.uint16]:
    """Decode a file without metadata to uint16 ``[H, W, 3]``, dropping alpha.

    Raises:
        Exception: the file is damaged or cut short.
    """
    color = data[_COLOR_AT]
    pixels = _pixels(data, "RGBA" if color == _GREY_ALPHA else None)
    check_complete(data, pixels[-1])
    if color == _GREY:
        return np.repeat(pixels.astype(np.uint16)[:, :, None], 3, axis=2)
    if color == _GREY_ALPHA:
        return np.repeat((pixels[:, :, :1].astype(np.uint16) << 8) | pixels[:, :, 1:2], 3, axis=2)
    upper = pixels[:, :, :3].astype(np.uint16)
    upper <<= 8
    upper |= _pixels(data, _LOWER[color])[:, :, :3]
    return upper


def _pixels(data: bytes, raw_mode: str | None = None) -> NDArray[Any]:
    """Decode pixels with Pillow, overriding its raw mode by ``raw_mode``."""
    with opened(data, ["PNG"]) as image, quiet():
        if raw_mode is not None:
            image.tile = [(*tile[:3], raw_mode) for tile in image.tile]  # type: ignore[misc]
        return np.asarray(image)
