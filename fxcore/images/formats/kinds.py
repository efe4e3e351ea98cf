"""Identify files that no decoder supports, and suggest what to send instead."""

from __future__ import annotations

import re
import struct

from fxcore.images.formats.containers import tiff_values

_CONVERT = "convert it to JPEG, PNG or WebP"
_TENSOR = "send its pixels as a tensor (application/x-npy), or save it with 8 or 16 bits per sample"

_STARTS: dict[bytes, str] = {
    b"\xff\x0a": "a JPEG XL image",
    b"\0\0\0\x0cJXL \r\n\x87\n": "a JPEG XL image",
    b"8BPS": "a Photoshop document",
    b"%PDF": "a PDF document",
    b"%!PS": "a PostScript document",
    b"qoif": "a QOI image",
    b"v/1\x01": "an OpenEXR image",
    b"#?RADIANCE": "a Radiance image",
    b"II\xbc\x01": "a JPEG XR image",
    b"FUJIFILMCCD-RAW": "a camera's raw file",
    b"\0\0\1\0": "an icon",
    b"\x93NUMPY": "a NumPy array",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"\x1a\x45\xdf\xa3": "a video",
}
"""Kinds of files by their first bytes."""

_BRANDS: dict[bytes, str] = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "a HEIF image"),
    **dict.fromkeys((b"avif", b"avis"), "an AVIF image"),
    b"crx ": "a camera's raw file",
}
"""Major brands of ISO base media files (ISO/IEC 14496-12); files of other brands are videos."""

# The repetition is possessive: comments can be divided in exponentially many ways.
_SVG = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*|<!DOCTYPE\s+svg[^>]*>\s*)*+<svg\b", re.IGNORECASE | re.DOTALL)
_HEAD = 1024

_JPEG_FRAME = re.compile(rb"\xff([\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf])..(.)", re.DOTALL)

_TIFF_BITS, _TIFF_COMPRESSION, _TIFF_SAMPLES, _TIFF_FORMAT = 258, 259, 277, 339
_SAMPLE_FORMATS = {1: "integers", 2: "signed integers", 3: "floats"}


def described(data: bytes) -> tuple[str, str] | None:
    """Return the kind of the file ``data`` and what to do with it; None if unknown.

    >>> described(bytes.fromhex("ff0a") + bytes(20))
    ('a JPEG XL image', 'convert it to JPEG, PNG or WebP')
    """
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "a video"), _CONVERT
    for start, kind in _STARTS.items():
        if data.startswith(start):
            return kind, _CONVERT
    if _SVG.match(data[:_HEAD]):
        return "an SVG drawing", "render it to PNG"
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data[:4] in (b"II*\0", b"MM\0*"):
        return _tiff(data)
    return None


def _jpeg(data: bytes) -> tuple[str, str] | None:
    """Describe a JPEG by its frame header (ITU-T T.81, B.2.2)."""
    frame = _JPEG_FRAME.search(data)
    if frame is None:
        return None
    bits = frame[2][0]
    return (f"a JPEG of {bits} bits per sample", _TENSOR) if 8 < bits <= 16 else None


def _tiff(data: bytes) -> tuple[str, str] | None:
    try:
        values = tiff_values(data, (_TIFF_BITS, _TIFF_COMPRESSION, _TIFF_SAMPLES, _TIFF_FORMAT))
    except (struct.error, IndexError, OverflowError):
        return None
    bits, samples = values.get(_TIFF_BITS, 1), values.get(_TIFF_SAMPLES, 1)
    format = _SAMPLE_FORMATS.get(values.get(_TIFF_FORMAT, 1), "values of an unknown kind")
    return f"a TIFF of {samples} x {bits}-bit {format} in compression {values.get(_TIFF_COMPRESSION, 1)}", _TENSOR
