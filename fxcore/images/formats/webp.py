"""Read and decode WebP files without Pillow, which copies the file and allocates three canvases to open one.

Decoding is torchvision's call into libwebp, which takes a third of Pillow's time.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch
import torchvision
from numpy.typing import NDArray

_SIZE_BITS = 14
_SIZE = (1 << _SIZE_BITS) - 1

# From the start of a file with one image and no metadata: RIFF, its length, WEBP, then one chunk of one of two kinds.
_CHUNK = struct.Struct("<4s4x4s4sI")
# Lossy: a frame tag, of which the lowest bit is 0 in key frames, a start code, width and height (RFC 6386, 9.1).
_LOSSY = struct.Struct("<B2x3sHH")
_START_CODE = b"\x9d\x01\x2a"
# Lossless: a signature, then width - 1, height - 1, whether there is alpha, and three bits of version (RFC 9649, 3.4).
_LOSSLESS = struct.Struct("<BI")
_SIGNATURE = 0x2F


class Size(NamedTuple):
    """Height and width of an image, and whether it has an alpha channel."""

    height: int
    width: int
    alpha: bool


def plain_size(data: bytes) -> Size | None:
    """Return the size of a file without metadata, extensions or animation; None for other files."""
    if len(data) < _CHUNK.size + _LOSSY.size:
        return None
    riff, webp, kind, length = _CHUNK.unpack_from(data)
    # A chunk has an even length; others that follow could be metadata.
    if (riff, webp) != (b"RIFF", b"WEBP") or _CHUNK.size + length + length % 2 != len(data):
        return None
    found = None
    if kind == b"VP8 ":
        tag, code, width, height = _LOSSY.unpack_from(data, _CHUNK.size)
        if not tag & 1 and code == _START_CODE:
            found = Size(height & _SIZE, width & _SIZE, alpha=False)
    elif kind == b"VP8L":
        signature, bits = _LOSSLESS.unpack_from(data, _CHUNK.size)
        width, height, rest = bits & _SIZE, bits >> _SIZE_BITS & _SIZE, bits >> 2 * _SIZE_BITS
        if signature == _SIGNATURE and rest < 2:
            found = Size(height + 1, width + 1, alpha=bool(rest))
    return found if found is not None and found.height and found.width else None


def decode(data: bytes, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """Decode an image of that height and width to ``[H, W, 3]``, without alpha and without applying the orientation.

    None for files that Pillow must decode or reject, such as animations.
    """
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        # Looked up at call time: torchvision has announced its removal, and this module must load without it.
        pixels: NDArray[np.uint8] = torchvision.io.decode_webp(encoded, mode="RGB").permute(1, 2, 0).numpy()
    except (AttributeError, RuntimeError):
        return None
    return pixels if pixels.shape[:2] == size else None
