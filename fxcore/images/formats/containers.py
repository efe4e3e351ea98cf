"""Strip metadata from image files.

Pillow reads all metadata of an image that it opens: it decompresses text and colour profiles, joins comments, and reads
every tag, of which there may be hundreds of thousands; libtiff reads the values of unknown tags. A small file can cost
a minute and gigabytes that way. This module walks the structure of a file once, with a limit on the number of parts,
and passes only header, tables and pixels to Pillow. Only the orientation is read from the rest.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator

from fxcore.errors import BadImage
from fxcore.images.formats import jpeg2000, png
from fxcore.images.formats.opening import opened
from fxcore.images.formats.orientation import orientation

MAX_PIECES = 16_384
"""Maximum number of chunks of a PNG or WebP, and of blocks before a GIF's first image; enough for 64 MiB in 4 KiB
chunks."""

MAX_SEGMENTS = 4_096
"""Maximum number of segments before a JPEG's first scan; each holds up to 64 KiB."""

MAX_STRIPS = 32_768
"""Maximum number of strips or tiles of a TIFF, and of values of any other tag; Pillow's time is linear in them."""

MAX_TAGS = 4_096
"""Maximum number of tags of a TIFF, as in libtiff."""

_MAX_HEADER = 64 * 1024
"""Maximum bytes of the header of a PPM."""

_MAX_TILE = 2048 * 2048
"""Maximum number of pixels in a tile of a small image; a tile is decompressed as a whole."""

_PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))

# Frame headers, tables, the first scan, JFIF and Adobe, which defines the colour space (ITU-T T.81, table B.1).
_JPEG_KEPT = frozenset((*range(0xC0, 0xD0), 0xDA, 0xDB, 0xDC, 0xDD, 0xE0, 0xEE)) - {0xC8}
_JPEG_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_JPEG_MARKER = re.compile(rb"\xff([^\xff\x00])")  # the last of a run of fill bytes is the marker's own
_JPEG_SCAN, _JPEG_END, _JPEG_APP1 = 0xDA, 0xD9, 0xE1

_GIF_IMAGE, _GIF_EXTENSION, _GIF_CONTROL = 0x2C, 0x21, 0xF9

# The tags that a TIFF decoder reads (TIFF 6.0, sections 3 to 22; 50674 is LERC's).
_TIFF_KEPT = frozenset(
    (254, *range(256, 260), 262, 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, 320, *range(322, 326), 332, 338, 339)
) | frozenset((347, *range(512, 522), *range(529, 533), 50674))
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_TILE_WIDTH, _TIFF_TILE_HEIGHT = 256, 257, 322, 323
_TIFF_SHORT, _TIFF_LONG = 3, 4


def stripped(data: bytes) -> tuple[bytes, int]:
    """Strip the file's metadata, and return the file and its EXIF orientation, 1 to 8.

    A file without metadata or of another format is returned unchanged; so is a damaged file, which the decoder will
    reject. The orientation of a TIFF is reported as 1, since its decoder applies it.

    Raises:
        BadImage: the file has more chunks, segments, blocks, tags or values than any program writes.
    """
    for start, strip in _FORMATS.items():
        if data.startswith(start):
            try:
                return strip(data)
            except BadImage:
                raise
            except Exception:  # structures are damaged in as many ways as there are formats
                return data, 1
    return data, 1


# -- PNG ---------------------------------------------------------------------------------------------------------------


def _png(data: bytes) -> tuple[bytes, int]:
    kept: list[bytes] = [png.SIGNATURE]
    start = len(png.SIGNATURE)  # kept chunks are copied in runs
    exif: bytes | None = None
    pixels = False
    for pieces, (kind, at, end) in enumerate(png.chunks(data), start=1):
        if pieces > MAX_PIECES:
            raise _too_many("PNG", "chunks", MAX_PIECES)
        pixels = pixels or kind == b"IDAT"
        if kind not in _PNG_KEPT:
            kept.append(data[start:at])
            start = end
            # libpng takes the first valid one before the pixels.
            if kind == b"eXIf" and exif is None and not pixels and _is_valid_exif(data[at + 4 : end]):
                exif = data[at + 8 : end - 4]
        if kind == b"IEND":
            break
    whole = len(kept) == 1
    return data if whole else b"".join((*kept, data[start:])), orientation(exif or b"")


def _is_valid_exif(chunk: bytes) -> bool:
    """Return whether a chunk, from its name to its CRC, has a TIFF header and the right CRC."""
    return chunk[4:8] in (b"II*\0", b"MM\0*") and zlib.crc32(chunk[:-4]).to_bytes(4, "big") == chunk[-4:]


# -- JPEG --------------------------------------------------------------------------------------------------------------


def _jpeg(data: bytes) -> tuple[bytes, int]:
    kept = [data[:2]]
    at = 2
    exif: bytes | None = None
    for _ in range(MAX_SEGMENTS):
        found = _JPEG_MARKER.search(data, at)
        if found is None:
            return data[:at], 1  # Pillow would read the rest byte by byte
        kind, body = found[1][0], found.end()
        if kind == _JPEG_END:
            return data[:body], 1
        if kind in _JPEG_ALONE:
            at = body
            continue
        at = body + int.from_bytes(data[body : body + 2], "big")
        if kind == _JPEG_SCAN:
            kept.append(data[body - 2 :])
            break
        if kind in _JPEG_KEPT:
            kept.append(data[body - 2 : at])
        elif kind == _JPEG_APP1 and exif is None:  # torchvision reads the first one, whatever its first six bytes say
            exif = data[body + 8 : at]
    else:
        raise _too_many("JPEG", "segments before its first scan", MAX_SEGMENTS)
    whole = sum(map(len, kept)) == len(data)
    return data if whole else b"".join(kept), orientation(exif or b"")


# -- WebP --------------------------------------------------------------------------------------------------------------


def _webp(data: bytes) -> tuple[bytes, int]:
    """Read only the orientation: libwebp skips other chunks, and Pillow merely copies them."""
    if data[8:12] != b"WEBP" or b"EXIF" not in data:
        return data, 1
    at = 12
    for _ in range(MAX_PIECES):
        if at + 8 > len(data):
            return data, 1
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            return data, orientation(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"))
        at += 8 + length + length % 2
    raise _too_many("WebP", "chunks", MAX_PIECES)


# -- GIF ---------------------------------------------------------------------------------------------------------------


def _gif(data: bytes) -> tuple[bytes, int]:
    """Drop all blocks before the first image except its own graphic control extension."""
    tables = start = 13 + _gif_table(data[10])
    control: tuple[int, int] | None = None
    at = start
    pieces = 0
    while data[at] != _GIF_IMAGE:
        begin = at
        if data[at] != _GIF_EXTENSION:  # junk, or the end without an image
            return data, 1
        at += 2
        while (size := data[at]) and pieces <= MAX_PIECES:
            at += 1 + size
            pieces += 1
        at += 1
        pieces += 1
        if pieces > MAX_PIECES:
            raise _too_many("GIF", "blocks before its first image", MAX_PIECES)
        if data[begin + 1] == _GIF_CONTROL and control is None:  # the first counts, as in giflib
            control = (begin, at)
    before = b"" if control is None else data[slice(*control)]
    return data if at == start + len(before) else data[:tables] + before + data[at:], 1


def _gif_table(flags: int) -> int:
    """Return the bytes of the colour table that ``flags`` declare."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


# -- TIFF --------------------------------------------------------------------------------------------------------------


def _tiff(data: bytes) -> tuple[bytes, int]:
    """Return the file with its first directory reduced in place: a longer file could hide that it is truncated."""
    order = "<" if data[:2] == b"II" else ">"
    big = 43 in data[2:4]
    place, count, word, entry = (8, "Q", "Q", "HHQ8s") if big else (4, "H", "I", "HHI4s")
    (at,) = struct.unpack_from(order + word, data, place)
    (tags,) = struct.unpack_from(order + count, data, at)
    if tags > MAX_TAGS:
        raise _too_many("TIFF", "tags", MAX_TAGS)
    kept: dict[int, bytes] = {}
    sides: dict[int, int] = {}
    first = at + struct.calcsize(order + count)
    for tag, kind, values, value, packed in _tiff_entries(data, first, tags, order + entry):
        if tag not in _TIFF_KEPT or tag in kept:
            continue
        if values > MAX_STRIPS:
            raise _too_many("TIFF", f"values of tag {tag}", MAX_STRIPS)
        kept[tag] = packed
        if kind in (_TIFF_SHORT, _TIFF_LONG) and values == 1:
            sides[tag] = struct.unpack_from(order + ("H" if kind == _TIFF_SHORT else "I"), value)[0]
    pixels = sides.get(_TIFF_WIDTH, 0) * sides.get(_TIFF_HEIGHT, 0)
    tile = sides.get(_TIFF_TILE_WIDTH, 0) * sides.get(_TIFF_TILE_HEIGHT, 0)
    if tile > max(_MAX_TILE, 4 * pixels):
        raise BadImage(f"the TIFF has tiles of {tile:,} pixels for an image of {pixels:,}; save it again, or as PNG")
    directory = struct.pack(order + count, len(kept)) + b"".join(kept.values()) + struct.pack(order + word, 0)
    return b"".join((data[:at], directory, data[at + len(directory) :])), 1


def tiff_values(data: bytes, tags: Collection[int]) -> dict[int, int]:
    """Return the first value of each of ``tags`` in the first directory of a TIFF that is a short or long integer.

    Raises:
        struct.error, OverflowError: the file is damaged.
    """
    order = "<" if data[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, at)
    found = {}
    for tag, kind, values, value, _ in _tiff_entries(data, at + 2, min(count, MAX_TAGS), order + "HHI4s"):
        if tag in tags and kind in (_TIFF_SHORT, _TIFF_LONG):
            form = order + ("H" if kind == _TIFF_SHORT else "I")
            if values * struct.calcsize(form) > len(value):  # the entry has an offset to the values
                found[tag] = struct.unpack_from(form, data, struct.unpack(order + "I", value)[0])[0]
            else:
                found[tag] = struct.unpack_from(form, value)[0]
    return found


def _tiff_entries(data: bytes, at: int, tags: int, entry: str) -> Iterator[tuple[int, int, int, bytes, bytes]]:
    """Yield tag, type, number of values, value or offset, and the packed entry."""
    size = struct.calcsize(entry)
    for start in range(at, at + tags * size, size):
        yield (*struct.unpack_from(entry, data, start), data[start : start + size])


# -- Others ------------------------------------------------------------------------------------------------------------


def _jpeg2000(data: bytes) -> tuple[bytes, int]:
    """Check the file before Pillow reads its boxes and segments one by one."""
    jpeg2000.checked_size(data)
    return data, 1


def _ppm(data: bytes) -> tuple[bytes, int]:
    """Drop what follows a header that is longer than programs write, because Pillow reads it byte by byte."""
    try:
        with opened(data[:_MAX_HEADER], ["PPM"]) as image:
            decoder = image.tile[0][0]
    except Exception:
        return data[:_MAX_HEADER], 1
    if decoder == "ppm_plain":  # Pillow copies the rest of the file for each comment
        raise BadImage("the PPM has its values as text (P1, P2, P3); save it as binary PPM (P4, P5, P6), or as PNG")
    return data, 1


def _too_many(format: str, what: str, most: int) -> BadImage:
    return BadImage(f"the {format} has over {most:,} {what}; save it again with an image editor")


_FORMATS: dict[bytes, Callable[[bytes], tuple[bytes, int]]] = {
    png.SIGNATURE: _png,
    b"\xff\xd8\xff": _jpeg,
    b"RIFF": _webp,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"II*\0": _tiff,
    b"MM\0*": _tiff,
    b"II\0*": _tiff,
    b"MM*\0": _tiff,
    b"II+\0": _tiff,
    b"MM\0+": _tiff,
    jpeg2000.BOXES: _jpeg2000,
    jpeg2000.CODESTREAM: _jpeg2000,
    b"P": _ppm,
}
