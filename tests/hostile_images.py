"""Images that were made to do harm, or that are only odd; as generators, because files of them do not belong here.

Each is ``name: (make, right)``: what makes the bytes, and the status that a service with ``MAX_PIXELS`` answers.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import PIL.Image
import PIL.ImageCms
import PIL.TiffImagePlugin

MAX_PIXELS = 1_000_000


def photo(mode: str = "RGB", size: tuple[int, int] = (120, 80)) -> PIL.Image.Image:
    """A gradient with noise: nothing that compresses to nothing."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 64, (size[1], size[0], 3)) + np.linspace(0, 190, size[0])[None, :, None]
    return PIL.Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def saved(image: PIL.Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def grey16() -> PIL.Image.Image:
    return PIL.Image.fromarray(np.arange(0, 65536, 7, dtype=np.uint16)[:9216].reshape(96, 96))


def png(width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8, color: int = 0) -> bytes:
    """A PNG of any header and chunks, with right checksums."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, data in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        parts.append(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return b"".join(parts)


def bomb(width: int, height: int) -> bytes:
    """A few kilobytes that say they are ``width`` x ``height`` pixels, and are."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(width + 1)) for _ in range(height)) + packer.flush()
    return png(width, height, (b"IDAT", rows))


def text_bomb() -> bytes:
    """A PNG of one pixel whose comment unpacks to 50 MB."""
    packer = zlib.compressobj(9)
    text = b"".join(packer.compress(bytes(10**6)) for _ in range(50)) + packer.flush()
    return png(1, 1, (b"zTXt", b"Comment\0\0" + text), (b"IDAT", zlib.compress(b"\0\0")))


def profile_bomb() -> bytes:
    """A PNG of one pixel whose colour profile unpacks to 50 MB."""
    packer = zlib.compressobj(9)
    profile = b"".join(packer.compress(bytes(10**6)) for _ in range(50)) + packer.flush()
    return png(1, 1, (b"iCCP", b"profile\0\0" + profile), (b"IDAT", zlib.compress(b"\0\0")))


def exif(block: bytes) -> bytes:
    data = saved(photo(), "JPEG")
    segment = b"Exif\0\0" + block
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


def exif_loop() -> bytes:
    """A directory of tags whose successor is itself."""
    return exif(b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", 0) + struct.pack(">I", 8))


def exif_of_gigabytes() -> bytes:
    """One tag that says it has four thousand million values."""
    entry = struct.pack(">HHII", 0x0112, 3, 0xFFFFFFFF, 0x10)
    return exif(b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", 1) + entry + struct.pack(">I", 0))


def tiff_of_gigabytes() -> bytes:
    """A header of a TIFF whose one strip is four gigabytes."""
    entries = [(256, 4, 1, 1000), (257, 4, 1, 1000), (258, 3, 1, 8 << 16), (259, 3, 1, 1 << 16), (262, 3, 1, 1 << 16)]
    entries += [(273, 4, 1, 8), (277, 3, 1, 1 << 16), (278, 4, 1, 1000), (279, 4, 1, 0xFFFFFFFF)]
    packed = b"".join(struct.pack(">HHII", *entry) for entry in entries)
    return b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", len(entries)) + packed + struct.pack(">I", 0)


def animated(format: str) -> bytes:
    frames = [photo(size=(64, 64)).rotate(10 * i) for i in range(8)]
    return saved(frames[0], format, save_all=True, append_images=frames[1:])


def many_frames() -> bytes:
    """A GIF of 3,000 frames, of which one is wanted."""
    first = PIL.Image.new("P", (16, 16))
    return saved(
        first, "GIF", save_all=True, append_images=[PIL.Image.new("P", (16, 16), i % 255) for i in range(3000)]
    )


def with_profile() -> bytes:
    profile = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("LAB"))
    return saved(photo(), "JPEG", icc_profile=profile.tobytes())


def scans(count: int = 2000) -> bytes:
    """A progressive JPEG with one scan over and over, each of which costs a pass over the image for a few bytes."""
    data = saved(PIL.Image.new("L", (400, 400), 128), "JPEG", progressive=True)
    starts = [at for at in range(len(data)) if data.startswith(b"\xff\xda", at)]
    first, second = starts[3:5]
    return data[:second] + data[first:second] * count + data[second:]


HOSTILE: dict[str, tuple[Callable[[], bytes], int]] = {
    "one pixel": (lambda: saved(photo(size=(1, 1)), "PNG"), 200),
    "one pixel jpeg": (lambda: saved(photo(size=(1, 1)), "JPEG"), 200),
    "65,535 wide": (lambda: saved(PIL.Image.new("L", (65535, 1)), "PNG"), 413),  # 224 high, it is too large
    "65,535 high": (lambda: saved(PIL.Image.new("L", (1, 65535)), "PNG"), 413),
    "16,383 wide webp": (lambda: saved(PIL.Image.new("RGB", (16383, 1)), "WEBP"), 413),
    "16-bit grey": (lambda: saved(grey16(), "PNG"), 200),
    "16-bit tiff": (lambda: saved(grey16(), "TIFF"), 200),
    "one bit": (lambda: saved(photo("1"), "PNG"), 200),
    "cmyk": (lambda: saved(photo("CMYK"), "JPEG"), 200),
    "cmyk tiff": (lambda: saved(photo("CMYK"), "TIFF"), 200),
    "lab tiff": (lambda: saved(photo("LAB"), "TIFF"), 200),
    "float tiff": (lambda: saved(photo("F"), "TIFF"), 200),
    "palette": (lambda: saved(photo("P"), "PNG"), 200),
    "palette with transparency": (lambda: saved(photo("P"), "PNG", transparency=bytes(range(256))), 200),
    "grey with alpha": (lambda: saved(photo("LA"), "PNG"), 200),
    "animated gif": (lambda: animated("GIF"), 200),
    "animated png": (lambda: animated("PNG"), 200),
    "animated webp": (lambda: animated("WEBP"), 200),
    "3,000 frames": (many_frames, 200),
    "lab profile": (with_profile, 200),
    "exif that loops": (exif_loop, 200),
    "exif of gigabytes": (exif_of_gigabytes, 200),
    "exif of nothing": (lambda: exif(b""), 200),
    "tiff of gigabytes": (tiff_of_gigabytes, 422),
    "truncated jpeg": (lambda: saved(photo(), "JPEG")[:-200], 422),
    "truncated png": (lambda: saved(photo(), "PNG")[:-200], 422),
    "truncated webp": (lambda: saved(photo(), "WEBP")[:-200], 422),
    "header only": (lambda: saved(photo(), "JPEG")[:30], 422),
    "zero by zero": (lambda: png(0, 0, (b"IDAT", zlib.compress(b""))), 422),
    "no data": (lambda: png(10, 10), 422),
    "bomb": (lambda: bomb(6000, 6000), 413),
    "bomb within the limit": (lambda: bomb(1000, 1000), 200),
    "comment bomb": (text_bomb, 200),
    "profile bomb": (profile_bomb, 200),
    "gif says it is large": (
        lambda: b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\0\0\0\0\xff\xff\xff\xff\0\x02\x02\x4c\x01\0;",
        413,
    ),
    "bmp says it is large": (
        lambda: (
            b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 2**30, 2**30, 1, 24, *[0] * 6)
        ),
        413,
    ),
    "some progressive scans": (lambda: scans(40), 200),
    "progressive scans": (scans, 422),
    "svg named jpg": (
        lambda: b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        422,
    ),
    "pdf named jpg": (lambda: saved(photo(), "PDF"), 422),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", 422),
    "html": (lambda: b"<!doctype html><script>alert(1)</script>", 422),
    "zeros": (lambda: bytes(100_000), 422),
    "jpeg markers": (lambda: b"\xff\xd8" + b"\xff\xe0\x00\x02" * 20_000, 422),
}
