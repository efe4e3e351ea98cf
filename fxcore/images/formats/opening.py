"""Open files with Pillow, without its pixel limit and warnings, which are left to the host process.

Our own decoders are registered under names of their own, so that the host's images keep Pillow's.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence

import PIL.Image
from PIL.ImageFile import ImageFile

from fxcore.errors import ImageTooLarge
from fxcore.images.formats.bmp_runs import BmpRuns
from fxcore.images.formats.ppm_levels import PpmLevels
from fxcore.quiet import quiet

_OTHER_FORMAT = (SyntaxError, IndexError, TypeError, struct.error)
"""Exceptions that Pillow's classes raise for a file of another format."""

_PREFIX = 16
"""Number of leading bytes by which Pillow recognises formats."""

_OLDEST_HEADER = 12
"""Header length of OS/2 1.x bitmaps, whose width and height have two bytes each."""

_WEAK = 2
"""Length of signatures that are too short to rule out a coincidence."""

_OWN_DECODERS = {"bmp_rle": "fxcore_bmp_rle", "ppm": "fxcore_ppm"}
"""Our decoders' names by those of Pillow's that they replace."""

PIL.Image.register_decoder("fxcore_bmp_rle", BmpRuns)
PIL.Image.register_decoder("fxcore_ppm", PpmLevels)


def opened(data: bytes, formats: Sequence[str]) -> ImageFile:
    """Open an image like ``PIL.Image.open``, but regardless of ``PIL.Image.MAX_IMAGE_PIXELS``.

    The caller must check the size in the header. Pillow's classes for GIF, TIFF and WebP check Pillow's limit
    themselves, on opening or loading, and raise ``PIL.Image.DecompressionBombError`` above twice the limit; see
    :func:`over_limit`.

    Raises:
        PIL.UnidentifiedImageError: the file has none of ``formats``.
        Exception: the file is damaged.
    """
    with quiet():
        for format in formats:
            if not _accepts(format, data):
                continue
            try:
                image = PIL.Image.OPEN[format][0](io.BytesIO(data), "")
            except _OTHER_FORMAT:
                continue
            if image.tile and image.tile[0][0] in _OWN_DECODERS:
                [(decoder, *rest)] = image.tile
                image.tile = [(_OWN_DECODERS[decoder], *rest)]  # type: ignore[list-item]  # Pillow 10 has plain tuples
            return image
    raise PIL.UnidentifiedImageError(f"not a file of the formats {', '.join(formats)}")


def recognized(head: bytes, formats: Sequence[str]) -> bool:
    """Return whether a file that begins with ``head``, a few KB, has one of ``formats``.

    For formats that Pillow recognises by two bytes or less, which may start any text, the header must be valid too.
    """
    for format in formats:
        if _accepts(format, head):
            if not _accepts(format, head[:_WEAK] + bytes(_PREFIX)):
                return True
            try:
                opened(head, [format]).close()
            except Exception:  # headers are damaged in as many ways as there are formats
                continue
            return True
    return False


def _accepts(format: str, data: bytes) -> bool:
    if format not in PIL.Image.OPEN:
        PIL.Image.init()
    accept = PIL.Image.OPEN[format][1]
    try:
        return (accept is None or accept(data[:_PREFIX]) is True) and (format != "DIB" or _has_one_plane(data))
    except _OTHER_FORMAT:
        return False


def _has_one_plane(bitmap: bytes) -> bool:
    """Return whether a bitmap without a file header has one plane, as all bitmaps have.

    Pillow checks only the header length, a small number with which many files begin.
    """
    (length,) = struct.unpack_from("<I", bitmap)
    (planes,) = struct.unpack_from("<H", bitmap, 8 if length == _OLDEST_HEADER else 12)
    return bool(planes == 1)


def over_limit(error: PIL.Image.DecompressionBombError) -> ImageTooLarge:
    """Return the error for a file that one of Pillow's classes rejects because of its size."""
    limit = 2 * (PIL.Image.MAX_IMAGE_PIXELS or 0)
    return ImageTooLarge(
        f"Pillow opens GIF, TIFF and WebP files of at most {limit} pixels; PIL.Image.MAX_IMAGE_PIXELS = None lifts "
        f"its limit ({error})",
        limit=limit,
    )
