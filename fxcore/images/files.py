"""Encoded bytes → an RGB image, by PIL."""

from __future__ import annotations

import io
import re
import struct
import warnings
from typing import NamedTuple

import numpy as np
import PIL.Image

from fxcore.bad_argument import BadArgument
from fxcore.errors import BadImage, ImageTooLarge
from fxcore.images.bmp_runs import BmpRuns  # noqa: F401  registers itself with Pillow
from fxcore.images.containers import stripped

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

# Segments of a JPEG file that decide neither its size nor its orientation (ITU-T T.81, table B.1): tables, comments,
# and the applications' own, all but APP1, which is EXIF or XMP.
_JPEG_SKIPPED = frozenset((0xDB, 0xC4, 0xDD, 0xFE, 0xE0, *range(0xE2, 0xF0)))
_JPEG_PROGRESSIVE = 0xC2
_JPEG_FRAMES = frozenset((0xC0, 0xC1, _JPEG_PROGRESSIVE))
_JPEG_SCAN = 0xDA
_JPEG_SEGMENT = struct.Struct(">BBHBHHB")
"""A marker, a length, and what follows in a frame: bits of a value, height, width, components. In a scan the components
come first."""
_MAX_JPEG_SEGMENTS = 64
"""More segments than cameras and programs write before the first scan."""

MAX_SCANS = 100
"""Most scans of a JPEG file, the limit that libtiff has too; progressive files have about ten. Each scan costs a pass
over all pixels, however few bytes it has: a file of 78 KB with 500 took 19 s."""

_MAX_MARKERS = 1000
"""Most markers of a JPEG file, restarts aside: each scan has a few tables before it."""

_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_JPEG_END = 0xD9

# What each orientation asks of a viewer.
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
"""What PIL takes for a pixel of any mode but those of :data:`_MODE_BYTES`."""
_MODE_BYTES = {"1": 1, "L": 1, "P": 1}
_BESIDE_BYTES = {"WEBP": 12, "TIFF": 8}
"""What their decoders hold for a pixel beside PIL's image: libwebp two canvases and its answer, libtiff a strip, which
may be all of the image. Peaks of 16 bytes were measured for WebP, and of 7 to 11.5 for TIFF, by mode."""
_JPEG_COEFFICIENT_BYTES = 2
"""What libjpeg holds for each component of a pixel where there is more than one scan."""

# The caller limits the size, by the header; PIL's own limit would only add a second answer.
PIL.Image.MAX_IMAGE_PIXELS = None

# Palettes with transparency and odd EXIF are converted all the same. Filtered once for the process: ``catch_warnings``
# is made for one thread, and in several its list of filters grew with every image.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


class Header(NamedTuple):
    """What the first bytes of an image say.

    Attributes:
        height, width: in pixels, as they will be once the EXIF orientation is applied.
        held: most bytes that :func:`open_image` holds at a time, the file aside.
    """

    height: int
    width: int
    held: int


def image_header(data: bytes, max_pixels: int | None = None) -> Header:
    """Size and cost of an image, from its header alone. No pixel is decoded, and no metadata but the orientation read.

    Raises:
        BadImage: not an image in one of :data:`FORMATS`, a JPEG of over :data:`MAX_SCANS` scans, or a file of more
            pieces than any program writes; see :mod:`fxcore.images.containers`.
        ImageTooLarge: more than ``max_pixels``.
    """
    plain = plain_jpeg_header(data, max_pixels)
    if plain is not None:
        return plain
    image, turn = open_within_limit(data, max_pixels)
    with image:
        width, height = image.size
        held = _MODE_BYTES.get(image.mode, _RGB_BYTES) + _BESIDE_BYTES.get(image.format or "", 0)
        if image.mode != "RGB":
            held += _RGB_BYTES
        if image.format in ("JPEG", "MPO"):
            held += _JPEG_COEFFICIENT_BYTES * len(image.getbands())  # of one scan it would be none
        if turn > 1:
            held += _RGB_BYTES
        held *= width * height
        return Header(width, height, held) if turn >= 5 else Header(height, width, held)


def image_size(data: bytes, max_pixels: int | None = None) -> tuple[int, int]:
    """Height and width of :func:`image_header`, which see."""
    return image_header(data, max_pixels)[:2]


def plain_jpeg_header(data: bytes, max_pixels: int | None = None) -> Header | None:
    """The header of a JPEG file in grey or colour without an EXIF orientation; None of anything else.

    It takes a tenth of the time that PIL does, and never waits for the GIL.

    Raises:
        BadImage: over :data:`MAX_SCANS` scans.
        ImageTooLarge: see :func:`image_header`.
    """
    if data[:2] != b"\xff\xd8":
        return None
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
            if header is not None and (frame == _JPEG_PROGRESSIVE or first != components):  # else there is no other
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


def has_plain_header(data: bytes) -> bool:
    """Whether :func:`plain_jpeg_header` knows the size of ``data``, or its refusal."""
    try:
        return plain_jpeg_header(data, 0) is not None
    except ImageTooLarge:
        return True
    except BadImage:
        return False


def open_image(data: bytes, max_pixels: int | None = None) -> PIL.Image.Image:
    """Decode to RGB with the EXIF orientation applied; of an animation the first frame.

    Alpha is dropped, as PIL does; 16-bit grey keeps its upper eight bits instead of being clipped.

    Raises:
        BadImage: not an image, truncated or damaged.
        BadArgument: not the bytes of a file, but its name or something else.
        ImageTooLarge: the header says more than ``max_pixels``; nothing has been decoded.

    >>> file = io.BytesIO()
    >>> PIL.Image.new("L", (4, 2), 7).save(file, "png")
    >>> image = open_image(file.getvalue())
    >>> image.mode, image.size, image.getpixel((0, 0))
    ('RGB', (4, 2), (7, 7, 7))
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise BadArgument(f"an image is the bytes of its file, as Path(...).read_bytes() gives, not {data!r:.100}")
    image, turn = open_within_limit(data, max_pixels)
    format = image.format or "image"
    try:
        image.load()
        if image.mode.startswith("I"):  # 16-bit grey, which PIL would clip at 255
            image = PIL.Image.fromarray((np.asarray(image).clip(0, 0xFFFF) // 256).astype(np.uint8))
        if image.mode != "RGB":  # else it would be copied
            image = image.convert("RGB")
        return image.transpose(_TURNS[turn]) if turn in _TURNS else image
    except Exception as error:  # decoders fail in as many ways as there are damaged files
        raise BadImage(f"the {format} data is damaged or cut short: {error or type(error).__name__}") from error


def open_within_limit(data: bytes, max_pixels: int | None = None) -> tuple[PIL.Image.Image, int]:
    """The header of an image: its format, mode and size, and the orientation that is yet to be applied, 1 to 8.

    Nothing is decoded.

    Raises:
        BadImage, ImageTooLarge: see :func:`image_header`.
    """
    if not data:
        raise BadImage("the image is empty (0 bytes)")
    pixels, turn = stripped(data)
    try:
        image = PIL.Image.open(io.BytesIO(pixels), formats=FORMATS)
    except Exception as error:
        raise BadImage(f"these {len(data)} bytes are not an image; send one of {', '.join(FORMATS)}") from error
    _check_pixels(image.height, image.width, max_pixels)
    if image.format in ("JPEG", "MPO"):
        _check_scans(pixels)
    return image, turn


def _check_pixels(height: int, width: int, max_pixels: int | None) -> None:
    pixels = height * width
    if max_pixels is not None and pixels > max_pixels:
        raise ImageTooLarge(
            f"the image has {width} x {height} = {pixels} pixels; at most {max_pixels} are taken",
            pixels=pixels,
            limit=max_pixels,
        )


def _check_scans(data: bytes) -> None:
    """Refuse a JPEG of too many scans."""
    scans, place = 0, 2
    for _ in range(_MAX_MARKERS):
        marker = _JPEG_MARKER.search(data, place)
        if marker is None or marker[0][1] == _JPEG_END:
            return
        place = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        scans += marker[0][1] == _JPEG_SCAN
        if scans > MAX_SCANS:
            raise BadImage(f"the JPEG has over {MAX_SCANS} scans; save it anew with an image editor, or as PNG")
    raise BadImage(f"the JPEG has over {_MAX_MARKERS} markers; save it anew with an image editor, or as PNG")
