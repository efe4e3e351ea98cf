"""What is left of files that were made to cost much, and that nothing is lost which decides pixels."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np
import PIL.Image
import PIL.PngImagePlugin
import PIL.TiffImagePlugin
import pytest

from fxcore import open_image
from fxcore.errors import BadImage
from fxcore.images.files import image_header
from fxcore.images.formats.containers import MAX_PIECES, MAX_SEGMENTS, stripped
from fxcore.images.formats.opening import opened
from tests import hostile_images
from tests.hostile_images import photo, png, saved

PIXEL = (b"IDAT", zlib.compress(b"\0\0"))


def packed(size: int) -> bytes:
    return zlib.compress(bytes(size), 9)


def jpeg(*segments: tuple[int, bytes]) -> bytes:
    data = saved(photo(), "JPEG")
    more = (b"\xff" + bytes([kind]) + struct.pack(">H", len(body) + 2) + body for kind, body in segments)
    return data[:2] + b"".join(more) + data[2:]


def directory(tags: int, size: int) -> bytes:
    """EXIF whose every tag has all of the same ``size`` bytes as its value."""
    at = 8 + 2 + 12 * tags + 4
    entries = b"".join(struct.pack("<HHII", 1000 + tag, 7, size, at) for tag in range(tags))
    return b"II*\0" + struct.pack("<IH", 8, tags) + entries + bytes(4 + size)


def gif(before: bytes) -> bytes:
    data = saved(photo("P", (16, 16)), "GIF")
    at = 13 + 3 * (2 << (data[10] & 7)) * (data[10] >> 7)
    return data[:at] + before + data[at:]


def tiff(tags: int, size: int) -> bytes:
    """A deflated TIFF with tags that libtiff does not know, each with the same ``size`` bytes as its value."""
    data = saved(photo(), "TIFF", compression="tiff_adobe_deflate")
    (at,) = struct.unpack_from("<I", data, 4)
    (own,) = struct.unpack_from("<H", data, at)
    entries = b"".join(struct.pack("<HHII", 40_000 + tag, 7, size, len(data)) for tag in range(tags))
    entries = data[at + 2 : at + 2 + 12 * own] + entries
    head = data[:4] + struct.pack("<I", len(data) + size) + data[8:]
    return head + bytes(size) + struct.pack("<H", own + tags) + entries + bytes(4)


def tiff_of(width: int, height: int, tile: int) -> bytes:
    """A deflated TIFF of one square tile of ``tile`` pixels a side."""
    pixels = packed(tile * tile)
    tags = [(256, width), (257, height), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile)]
    tags += [(324, 8), (325, len(pixels))]
    return hostile_images.tiff(pixels, *((tag, 4, 1, value) for tag, value in tags))


def bmp(width: int, height: int, compression: int, runs: bytes) -> bytes:
    bits = 8 if compression == 1 else 4
    colors = np.random.default_rng(0).integers(0, 256, (2**bits, 4), dtype=np.uint8).tobytes()
    start = 54 + len(colors)
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(runs), 0, 0, 2**bits, 0)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + header + colors + runs


COSTLY: dict[str, Callable[[], bytes]] = {
    "png texts": lambda: png(1, 1, *[(b"zTXt", b"a\0\0" + packed(10**6))] * 64, PIXEL),
    "png unicode texts": lambda: png(1, 1, *[(b"iTXt", b"a\0\1\0\0\0" + packed(10**6))] * 64, PIXEL),
    "png texts after its pixels": lambda: png(1, 1, PIXEL, *[(b"zTXt", b"a\0\0" + packed(10**6))] * 64),
    "png profiles": lambda: png(1, 1, *[(b"iCCP", b"a\0\0" + packed(10**6))] * 64, PIXEL),
    "png exif": lambda: png(1, 1, (b"eXIf", directory(5000, 60_000)), PIXEL),
    "png exif as text": lambda: png(1, 1, *[(b"zTXt", b"Raw profile type exif\0\0" + packed(10**7))] * 8, PIXEL),
    "jpeg exif": lambda: jpeg((0xE1, b"Exif\0\0" + directory(2700, 30_000))),
    "jpeg exif in parts": lambda: jpeg(*[(0xE1, b"Exif\0\0" + directory(5400, 0))] * 20),
    "jpeg pictures": lambda: jpeg((0xE2, b"MPF\0" + directory(2700, 30_000))),
    "jpeg photoshop": lambda: jpeg(*[(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000)] * 20),
    "jpeg fill": lambda: saved(photo(), "JPEG")[:2] + b"\xff" * 10**6 + saved(photo(), "JPEG")[2:],
    "webp exif": lambda: saved(photo(), "WEBP", exif=b"Exif\0\0" + directory(30_000, 10**5)),
    "gif comments": lambda: gif((b"\x21\xfe" + b"\x01x" * 1000 + b"\0") * 15),
    "tiff tags": lambda: tiff(4000, 10**5),
    "ppm with 254 levels": hostile_images.HOSTILE["ppm with 254 levels"][0],
    "bmp lines": lambda: bmp(1000, 1000, 1, b"\1\0\0\0" * 1000),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_decides_no_pixel_costs_next_to_nothing(name: str) -> None:
    data = COSTLY[name]()
    began = time.thread_time()  # what other tests' threads do does not count
    size, image = image_header(data)[:2], open_image(data)
    assert time.thread_time() - began < 2
    assert (image.height, image.width) == size
    if not name.startswith(("bmp", "ppm", "webp")):
        assert len(stripped(data)[0]) < len(data) / 2 or name == "tiff tags"


@pytest.mark.parametrize(
    "name",
    [
        "html comments",
        "jpeg fill without a marker",
        "jpeg fill before zeros",
        "jpeg fill after its end",
        "ppm of comments in its header",
    ],
)
def test_what_is_no_image_is_refused_at_once(name: str) -> None:
    data = hostile_images.HOSTILE[name][0]()
    began = time.thread_time()
    with pytest.raises(BadImage, match="are not an image"):
        image_header(data)
    assert time.thread_time() - began < 2  # each took minutes or more, and takes some 20 ms


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: png(1, 1, *[(b"teSt", b"")] * MAX_PIECES, PIXEL), "16,384 chunks"),
        (lambda: png(1, 1, PIXEL, *[(b"IDAT", b"")] * MAX_PIECES), "16,384 chunks"),
        (lambda: jpeg(*[(0xE5, b"")] * MAX_SEGMENTS), "4,096 segments"),
        (lambda: jpeg(*[(0xDB, b"")] * MAX_SEGMENTS), "4,096 segments"),
        (lambda: gif(b"\x21\xfe" + b"\x01x" * MAX_PIECES + b"\0"), "16,384 blocks"),
        (lambda: gif(b"\x21\xfe\0" * 2 * MAX_PIECES), "16,384 blocks"),
        (lambda: tiff(4097, 0), "4,096 tags"),
        (lambda: tiff_of(100, 100, 3000), "tiles of 9,000,000 pixels"),
        (hostile_images.HOSTILE["ppm of comments"][0], "values as text .* save it as binary PPM"),
    ],
)
@pytest.mark.parametrize("read", [image_header, open_image])
def test_files_of_too_many_pieces_are_refused(
    make: Callable[[], bytes], message: str, read: Callable[[bytes], object]
) -> None:
    with pytest.raises(BadImage, match=message):
        read(make())


def text() -> PIL.PngImagePlugin.PngInfo:
    info = PIL.PngImagePlugin.PngInfo()
    info.add_text("Comment", "of a cat", zip=True)
    info.add_itxt("Title", "cat", zip=True)
    return info


@pytest.mark.parametrize(
    ("format", "mode", "options"),
    [
        ("PNG", "RGB", {"pnginfo": text(), "icc_profile": bytes(5000), "dpi": (72, 72)}),
        ("PNG", "P", {"pnginfo": text(), "transparency": 3}),
        ("PNG", "I;16", {"pnginfo": text()}),
        ("JPEG", "RGB", {"icc_profile": bytes(100_000), "comment": b"of a cat", "dpi": (72, 72)}),
        ("JPEG", "CMYK", {"icc_profile": bytes(100_000), "progressive": True}),
        ("JPEG", "L", {"comment": b"of a cat"}),
        ("WEBP", "RGBA", {"icc_profile": bytes(5000), "lossless": True}),
        ("GIF", "P", {"comment": b"of a cat" * 100, "transparency": 3, "loop": 3}),
        ("TIFF", "RGB", {"icc_profile": bytes(5000), "description": "of a cat"}),
        ("TIFF", "RGB", {"compression": "jpeg", "description": "of a cat"}),
        ("TIFF", "P", {"compression": "tiff_lzw", "description": "of a cat"}),
        ("TIFF", "1", {"compression": "group4", "description": "of a cat"}),
        ("TIFF", "YCbCr", {"description": "of a cat"}),
        ("TIFF", "RGBA", {"big_tiff": True, "description": "of a cat"}),
        ("TIFF", "F", {"compression": "tiff_adobe_deflate", "description": "of a cat"}),
    ],
)  # fmt: skip
def test_pixels_are_what_pil_reads_of_the_whole_file(format: str, mode: str, options: dict[str, object]) -> None:
    image = hostile_images.grey16() if mode == "I;16" else photo(mode)
    data = saved(image, format, **options)
    assert stripped(data)[0] != data or format == "WEBP"
    whole, rest = PIL.Image.open(io.BytesIO(data)), PIL.Image.open(io.BytesIO(stripped(data)[0]))
    assert (rest.mode, rest.size) == (whole.mode, whole.size)
    assert np.array_equal(rest.convert("RGBA"), whole.convert("RGBA"))


@pytest.mark.parametrize("cut", [1, 10, 100])
@pytest.mark.parametrize("compression", [None, "tiff_lzw", "jpeg"])
def test_a_truncated_tiff_is_refused_where_pil_refuses_it(compression: str | None, cut: int) -> None:
    data = saved(photo(), "TIFF", compression=compression)[:-cut]
    try:
        expected = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    except OSError:
        with pytest.raises(BadImage):
            open_image(data)
    else:
        assert np.array_equal(open_image(data), expected)


@pytest.mark.parametrize("offset", [2**63, 2**64 - 1, 2**62])
def test_a_directory_past_the_end_is_left_to_the_decoder(offset: int) -> None:
    data = b"II+\0\x08\0\0\0" + struct.pack("<Q", offset)
    assert stripped(data) == (data, 1)
    with pytest.raises(BadImage, match="not an image"):
        image_header(data)


def test_an_animation_shows_its_first_frame() -> None:
    for format in ("GIF", "PNG", "WEBP"):
        data = hostile_images.animated(format)
        assert np.array_equal(open_image(data), PIL.Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("compression", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_runs_of_a_bmp_are_read_as_pil_reads_them(compression: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, height = (int(side) for side in rng.integers(1, 30, 2))
    pieces = [
        lambda: bytes([rng.integers(1, 12), rng.integers(256)]),
        lambda: b"\0\0",
        lambda: b"\0\2" + bytes(rng.integers(0, 3, 2, dtype=np.uint8)),
        lambda: literal(int(rng.integers(3, 9))),
    ]

    def literal(count: int) -> bytes:
        size = count if compression == 1 else (count + 1) // 2
        return bytes([0, count]) + rng.integers(0, 256, size, dtype=np.uint8).tobytes() + bytes(size % 2)

    runs = b"".join(pieces[rng.integers(4)]() for _ in range(400)) + b"\0\1"
    data = bmp(width, height, compression, runs)
    assert np.array_equal(open_image(data), PIL.Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("kind", [b"P5", b"P6"])
@pytest.mark.parametrize("most", [1, 7, 254, 256, 1023, 65_534, 65_535])
def test_levels_of_a_ppm_are_read_as_pil_reads_them(kind: bytes, most: int) -> None:
    levels = np.arange(60_000) if most > 255 else np.arange(60_000) % 256
    data = kind + b"\n# of a cat\n200 100\n%d\n" % most + levels.astype("u1" if most < 256 else ">u2").tobytes()
    image = np.asarray(opened(data, ["PPM"]))
    with pytest.raises(BadImage, match="damaged or cut short"):
        open_image(data[:15_000])
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)))
    assert image.dtype == expected.dtype
    assert np.array_equal(image, expected)
