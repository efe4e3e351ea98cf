"""Encoded bytes → an RGB image, by PIL."""

from __future__ import annotations

import io
import re
import struct
import warnings

import numpy as np
import PIL.ExifTags
import PIL.Image
import PIL.ImageOps

from fxcore.errors import BadImage, ImageTooLarge

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

_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_JPEG_END = 0xD9

# Chunks of a PNG that may hold its orientation. They may come after the pixels.
_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")

_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"

# The caller limits the size, by the header; PIL's own limit would only add a second answer.
PIL.Image.MAX_IMAGE_PIXELS = None

# Palettes with transparency and odd EXIF are converted all the same. Filtered once for the process: ``catch_warnings``
# is made for one thread, and in several its list of filters grew with every image.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def image_size(data: bytes, max_pixels: int | None = None) -> tuple[int, int]:
    """Height and width from the header alone, as they will be once the EXIF orientation is applied.

    Raises:
        BadImage: not an image in one of :data:`FORMATS`, or a JPEG of over :data:`MAX_SCANS` scans.
        ImageTooLarge: more than ``max_pixels``.
    """
    plain = plain_jpeg_size(data, max_pixels)
    if plain is not None:
        return plain
    with opened(data, max_pixels) as image:
        width, height = image.size
        if image.format == "PNG":
            turned = _png_orientation(data) >= 5
        else:  # PIL has changed the places of a TIFF's sides already
            turned = image.format != "TIFF" and orientation(image) >= 5
        return (width, height) if turned else (height, width)


def plain_jpeg_size(data: bytes, max_pixels: int | None = None) -> tuple[int, int] | None:
    """Height and width of a JPEG file in grey or colour without an EXIF orientation; None of anything else.

    It takes a tenth of the time that PIL does, and never waits for the GIL.

    Raises:
        BadImage: over :data:`MAX_SCANS` scans.
        ImageTooLarge: see :func:`image_size`.
    """
    if data[:2] != b"\xff\xd8":
        return None
    size: tuple[int, int] | None = None
    components = frame = 0
    place = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        if place + _JPEG_SEGMENT.size > len(data):
            return None
        start, kind, length, first, height, width, last = _JPEG_SEGMENT.unpack_from(data, place)
        if start != 0xFF:
            return None
        if kind == _JPEG_SCAN:  # PIL reads every segment before this one
            if frame == _JPEG_PROGRESSIVE or first != components:  # else this scan is the only one
                _check_scans(data)
            return size
        if kind in _JPEG_FRAMES:
            frame, size, components = kind, (height, width), last
            if first != 8 or components not in (1, 3) or 0 in size:
                return None
            _check_pixels(height, width, max_pixels)
        elif kind not in _JPEG_SKIPPED:
            return None
        place += 2 + length
    return None


def open_image(data: bytes, max_pixels: int | None = None) -> PIL.Image.Image:
    """Decode to RGB with the EXIF orientation applied; of an animation the first frame.

    Alpha is dropped, as PIL does; 16-bit grey keeps its upper eight bits instead of being clipped.

    Raises:
        BadImage: not an image, truncated or damaged.
        ImageTooLarge: the header says more than ``max_pixels``; nothing has been decoded.

    >>> file = io.BytesIO()
    >>> PIL.Image.new("L", (4, 2), 7).save(file, "png")
    >>> image = open_image(file.getvalue())
    >>> image.mode, image.size, image.getpixel((0, 0))
    ('RGB', (4, 2), (7, 7, 7))
    """
    image = opened(data, max_pixels)
    try:
        image.load()
        image = PIL.ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16-bit grey, which PIL would clip at 255
            image = PIL.Image.fromarray((np.asarray(image).clip(0, 0xFFFF) // 256).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:  # decoders fail in as many ways as there are damaged files
        raise BadImage(
            f"the {image.format or 'image'} data is damaged or cut short: {error or type(error).__name__}"
        ) from error


def orientation(image: PIL.Image.Image) -> int:
    """The EXIF orientation, 1 to 8; from 5 on height and width change places.

    Nothing is decoded, so of a PNG only what comes before its pixels counts.

    Raises:
        BadImage: the EXIF data is damaged.
    """
    try:
        value = PIL.Image.Image.getexif(image).get(PIL.ExifTags.Base.Orientation, 1)
    except Exception as error:  # the parser fails in as many ways as there are damaged files
        raise BadImage(f"the EXIF data is damaged: {error or type(error).__name__}") from error
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def opened(data: bytes, max_pixels: int | None = None) -> PIL.Image.Image:
    """The header of an image: its format, mode and size. Nothing is decoded.

    Raises:
        BadImage, ImageTooLarge: see :func:`image_size`.
    """
    if not data:
        raise BadImage("the image is empty (0 bytes)")
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise BadImage(f"these {len(data)} bytes are not an image; send one of {', '.join(FORMATS)}") from error
    _check_pixels(image.height, image.width, max_pixels)
    if image.format in ("JPEG", "MPO"):
        _check_scans(data)
    return image


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
    while (marker := _JPEG_MARKER.search(data, place)) is not None and marker[0][1] != _JPEG_END:
        place = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        scans += marker[0][1] == _JPEG_SCAN
        if scans > MAX_SCANS:
            raise BadImage(f"the JPEG has over {MAX_SCANS} scans; save it anew with an image editor, or as PNG")


def _png_orientation(data: bytes) -> int:
    """The orientation of a PNG. PIL's own way decodes all of it, to see what comes after the pixels."""
    if not any(kind in data for kind in _PNG_TEXTS):
        return 1
    kept = [data[:8]]
    at = 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        chunk = data[at : at + 12 + length]
        if kind == b"IHDR" or (kind in _PNG_TEXTS and len(chunk) == 12 + length):
            kept.append(chunk)
        at += 12 + length
    with opened(b"".join([*kept, _PNG_END])) as without_pixels:
        return orientation(without_pixels)
