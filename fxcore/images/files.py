"""Open image files with PIL, and read their headers."""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import PIL.Image
import PIL.TiffImagePlugin
from PIL import features

from fxcore.errors import BadArgument, BadImage, ImageTooLarge
from fxcore.images.formats import avif, jpeg2000, png, webp
from fxcore.images.formats.containers import stripped
from fxcore.images.formats.kinds import described
from fxcore.images.formats.opening import opened, over_limit, recognized
from fxcore.images.formats.orientation import orientation
from fxcore.quiet import quiet

_HAS_AVIF = "avif" in features.modules and features.check("avif")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", *(["AVIF"] if _HAS_AVIF else []))

_OPENED = (*FORMATS, "DIB")
"""Formats to try: a DIB is a BMP without the file header."""

_VARIANTS = ("MPO", "DIB")
"""Pillow's names for files of several JPEG images, and for BMP files."""

HEAD_BYTES = 4096
"""Number of leading bytes that are enough to tell whether a file is an image."""

# Segments of a JPEG file that affect neither its size nor its orientation (ITU-T T.81, table B.1): tables, comments,
# and application segments except APP1, which may be EXIF.
_JPEG_SKIPPED = frozenset((0xDB, 0xC4, 0xDD, 0xFE, 0xE0, *range(0xE2, 0xF0)))
_JPEG_START = b"\xff\xd8"
_JPEG_PROGRESSIVE = 0xC2
_JPEG_FRAMES = frozenset((0xC0, 0xC1, _JPEG_PROGRESSIVE))
_JPEG_SCAN = 0xDA
_JPEG_SEGMENT = struct.Struct(">BBHBHHB")
"""Marker and length; then, in a frame header, bits per sample, height, width and components. In a scan header the
components come first."""
_MAX_JPEG_SEGMENTS = 64
"""Maximum number of segments before the first scan for the fast header reader; cameras and programs write fewer."""

MAX_SCANS = 100
"""Maximum number of scans of a JPEG file, as in libtiff; progressive files have about ten. Each scan costs a pass over
all pixels, however few bytes it has."""

_MAX_MARKERS = 1000
"""Maximum number of markers of a JPEG file, not counting restarts: each scan has a few tables before it."""

_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_JPEG_END = 0xD9

# The transpose that applies each orientation.
_TURNS = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}

_RGB_BYTES = 4
"""Bytes of a pixel in PIL's memory, for all modes except those in :data:`_MODE_BYTES`."""
_MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I": 8}  # of grey levels, two copies are held while they are reduced
_BESIDE_BYTES = {"WEBP": 12, "TIFF": 8, "PPM": 4, "JPEG2000": 36, "AVIF": 18}
"""Bytes per pixel that decoders hold in addition to PIL's image: libwebp two canvases and its output, libtiff a strip,
which may be the whole image, OpenJPEG two 32-bit values per component and a tile, libavif 16-bit planes and its
output."""

_BITS = 16
"""Bits of grey levels in PIL's modes I and I;16, for all formats except TIFF."""
_TIFF_BITS = 258
_JPEG_COEFFICIENT_BYTES = 2
"""Bytes per component of a pixel that libjpeg holds for files with more than one scan."""


class Opened(NamedTuple):
    """An image that is opened but not decoded.

    Attributes:
        image: the PIL image.
        turn: the EXIF orientation to apply to it, 1 to 8.
        data: the file without metadata.
    """

    image: PIL.Image.Image
    turn: int
    data: bytes


class Header(NamedTuple):
    """The header of an image.

    Attributes:
        height, width: size in pixels, with the EXIF orientation applied.
        held: peak bytes of :func:`open_image`, not counting the file.
    """

    height: int
    width: int
    held: int


def image_header(data: bytes, max_pixels: int | None = None) -> Header:
    """Read the header of an image, without decoding it. The only metadata that is read is the orientation.

    Raises:
        BadImage: not an image in one of :data:`FORMATS`, a JPEG with over :data:`MAX_SCANS` scans, or a file over the
            limits of :mod:`fxcore.images.formats.containers`.
        ImageTooLarge: the image has more than ``max_pixels``.
    """
    plain = plain_header(data, max_pixels)
    if plain is not None:
        return plain
    image, turn, _ = open_within_limit(data, max_pixels)
    with image:
        width, height = image.size
        held = _MODE_BYTES.get(image.mode, _RGB_BYTES) + _BESIDE_BYTES.get(image.format or "", 0)
        if image.mode != "RGB":
            held += _RGB_BYTES
        if image.format in ("JPEG", "MPO"):
            held += _JPEG_COEFFICIENT_BYTES * len(image.getbands())  # not needed if it has a single scan
        if turn > 1:
            held += _RGB_BYTES
        held *= width * height
        return Header(width, height, held) if turn >= 5 else Header(height, width, held)


def is_image(head: bytes) -> bool:
    """Return whether a file is in one of :data:`FORMATS`, given its first :data:`HEAD_BYTES`. It may still be damaged.

    >>> is_image(bytes.fromhex("89504e470d0a1a0a")), is_image(b"P2 is a format of images")
    (True, False)
    """
    return recognized(head, _OPENED)


@lru_cache(1)
def suffixes() -> tuple[str, ...]:
    """Return the suffixes, in lower case, of files in :data:`FORMATS`."""
    formats = {*FORMATS, *_VARIANTS}
    return tuple(suffix for suffix, format in PIL.Image.registered_extensions().items() if format in formats)


def plain_header(data: bytes, max_pixels: int | None = None) -> Header | None:
    """Read the header of a grey or colour JPEG file without EXIF, or of a WebP file without metadata.

    Much faster than PIL, and does not release the GIL. Return None for other files.

    Raises:
        BadImage: a JPEG file has over :data:`MAX_SCANS` scans.
        ImageTooLarge: see :func:`image_header`.
    """
    if data[:2] == _JPEG_START:
        return _plain_jpeg_header(data, max_pixels)
    size = webp.plain_size(data)
    if size is None:
        return None
    height, width, alpha = size
    _check_pixels(height, width, max_pixels)
    return Header(height, width, height * width * (_BESIDE_BYTES["WEBP"] + (2 if alpha else 1) * _RGB_BYTES))


def _plain_jpeg_header(data: bytes, max_pixels: int | None) -> Header | None:
    header: Header | None = None
    components = frame = 0
    place = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        if place + _JPEG_SEGMENT.size > len(data):
            return None
        start, kind, length, first, height, width, last = _JPEG_SEGMENT.unpack_from(data, place)
        if start != 0xFF:
            return None
        if kind == _JPEG_SCAN:  # PIL reads every segment before this one
            if header is not None and (frame == _JPEG_PROGRESSIVE or first != components):  # else it is the only scan
                _check_scans(data)
                more = header.height * header.width * _JPEG_COEFFICIENT_BYTES * components
                header = header._replace(held=header.held + more)
            return header
        if kind in _JPEG_FRAMES:
            frame, components = kind, last
            if first != 8 or components not in (1, 3) or 0 in (height, width):
                return None
            _check_pixels(height, width, max_pixels)
            header = Header(height, width, height * width * (_RGB_BYTES if components == 3 else _RGB_BYTES + 1))
        elif kind not in _JPEG_SKIPPED:
            return None
        place += 2 + length
    return None


def open_image(data: bytes, max_pixels: int | None = None) -> PIL.Image.Image:
    """Decode an image, or the first frame of an animation, to RGB, with the EXIF orientation applied.

    Alpha is dropped, as in PIL. Grey levels of 9 to 16 bits keep their upper eight bits, where PIL would clip them at
    255; 32-bit grey levels, integers or floats, are clipped to 0…255, as in PIL.

    Raises:
        BadImage: not an image, truncated or damaged.
        BadArgument: ``data`` is not bytes.
        ImageTooLarge: according to its header, the image has more than ``max_pixels``; nothing was decoded.

    >>> import io
    >>> file = io.BytesIO()
    >>> PIL.Image.new("L", (4, 2), 7).save(file, "png")
    >>> image = open_image(file.getvalue())
    >>> image.mode, image.size, image.getpixel((0, 0))
    ('RGB', (4, 2), (7, 7, 7))
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise BadArgument(f"an image is the bytes of its file, from Path(...).read_bytes(), not {data!r:.100}")
    return to_rgb(open_within_limit(data, max_pixels))


def to_rgb(opened: Opened) -> PIL.Image.Image:
    """Decode an opened image; see :func:`open_image`.

    Raises:
        BadImage, ImageTooLarge: see :func:`open_image`.
    """
    image, turn, data = opened
    format = image.format or "image"
    try:
        with quiet():  # palettes with transparency, and damage that Pillow tolerates
            image.load()
            if format == "PNG":
                png.check_complete(data, np.asarray(image.crop((0, image.height - 1, *image.size))))
            return _rgb(image, turn)
    except PIL.Image.DecompressionBombError as error:
        raise over_limit(error) from error
    except Exception as error:  # decoders fail in as many ways as there are damaged files
        raise damaged(format, error) from error


def _rgb(image: PIL.Image.Image, turn: int) -> PIL.Image.Image:
    if image.mode.startswith("I") and (bits := _bits(image)) <= _BITS:  # PIL would clip grey levels at 255
        image = PIL.Image.fromarray((np.asarray(image).clip(0, 2**bits - 1) >> (bits - 8)).astype(np.uint8))
    if image.mode != "RGB":  # convert() copies even RGB images
        image = image.convert("RGB")
    return image.transpose(_TURNS[turn]) if turn in _TURNS else image


def damaged(format: str, error: Exception) -> BadImage:
    """Return the error for a file of ``format`` whose decoder raised ``error``."""
    return BadImage(f"the {format} data is damaged or cut short: {error or type(error).__name__}")


def open_within_limit(data: bytes, max_pixels: int | None = None) -> Opened:
    """Open an image without decoding it.

    Raises:
        BadImage, ImageTooLarge: see :func:`image_header`.
    """
    if not data:
        raise BadImage("the image is empty (0 bytes)")
    pixels, turn = stripped(data)
    try:
        image = opened(pixels, _OPENED)
    except PIL.Image.DecompressionBombError as error:
        raise over_limit(error) from error
    except Exception as error:
        raise _unknown(data) from error
    _check_pixels(image.height, image.width, max_pixels)
    if image.format in ("JPEG", "MPO"):
        _check_scans(pixels)
    elif image.format == "AVIF":
        avif.check(data, image.height * image.width)
        turn = orientation(image.info.get("exif", b"").removeprefix(b"Exif\0\0"))
    elif image.format == "JPEG2000" and jpeg2000.checked_size(pixels) != image.size:  # limits apply to the header's
        raise BadImage("the JPEG 2000 file has two sizes; save it again with an image editor, or as PNG")
    return Opened(image, turn, pixels)


def _unknown(data: bytes) -> BadImage:
    known = described(data)
    if known is None:
        return BadImage(f"these {len(data)} bytes are not an image; send one of {', '.join(FORMATS)}")
    kind, remedy = known
    return BadImage(f"this is {kind}, which cannot be decoded here; {remedy}")


def _bits(image: PIL.Image.Image) -> int:
    """Return the number of bits of the grey levels of an image in an integer mode."""
    if not isinstance(image, PIL.TiffImagePlugin.TiffImageFile):
        return _BITS
    bits = image.tag_v2.get(_TIFF_BITS, _BITS)
    return int(bits[0] if isinstance(bits, tuple) else bits)


def _check_pixels(height: int, width: int, max_pixels: int | None) -> None:
    pixels = height * width
    if max_pixels is not None and pixels > max_pixels:
        raise ImageTooLarge(
            f"the image has {width} x {height} = {pixels} pixels; at most {max_pixels} are allowed",
            pixels=pixels,
            limit=max_pixels,
        )


def _check_scans(data: bytes) -> None:
    """Check the number of scans of a JPEG.

    Raises:
        BadImage: there are too many scans or markers.
    """
    scans, place = 0, 2
    for _ in range(_MAX_MARKERS):
        marker = _JPEG_MARKER.search(data, place)
        if marker is None or marker[0][1] == _JPEG_END:
            return
        place = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        scans += marker[0][1] == _JPEG_SCAN
        if scans > MAX_SCANS:
            raise BadImage(f"the JPEG has over {MAX_SCANS} scans; save it again with an image editor, or as PNG")
    raise BadImage(f"the JPEG has over {_MAX_MARKERS} markers; save it again with an image editor, or as PNG")
