"""Malicious or unusual images, as generators, because such files do not belong in a repository.

Each is ``name: (make, right)``: a function that returns the bytes, and the right status of a service with
``MAX_PIXELS``.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import PIL.ExifTags
import PIL.Image
import PIL.ImageCms
import PIL.TiffImagePlugin

MAX_PIXELS = 1_000_000


def photo(mode: str = "RGB", size: tuple[int, int] = (120, 80)) -> PIL.Image.Image:
    """Make a gradient with noise, which does not compress to nothing."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 64, (size[1], size[0], 3)) + np.linspace(0, 190, size[0])[None, :, None]
    return PIL.Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def saved(image: PIL.Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def turned(orientation: int) -> PIL.Image.Exif:
    """Make EXIF that says which way up an image is."""
    exif = PIL.Image.Exif()
    exif[PIL.ExifTags.Base.Orientation] = orientation
    return exif


def tiff(data: bytes, *entries: tuple[int, int, int, int]) -> bytes:
    """Build a TIFF of ``data``, which begins at 8, and a directory: tag, type, count and value."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries)) + packed + bytes(4)


def grey16() -> PIL.Image.Image:
    return PIL.Image.fromarray(np.arange(0, 65536, 7, dtype=np.uint16)[:9216].reshape(96, 96))


def png(
    width: int,
    height: int,
    *chunks: tuple[bytes, bytes],
    depth: int = 8,
    color: int = 0,
    interlaced: bool = False,
) -> bytes:
    """Build a PNG with any header and chunks and valid checksums."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, data in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        parts.append(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return b"".join(parts)


def bomb(width: int, height: int) -> bytes:
    """Build a file of a few kilobytes that really has ``width`` x ``height`` pixels."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(width + 1)) for _ in range(height)) + packer.flush()
    return png(width, height, (b"IDAT", rows))


def text_bomb() -> bytes:
    """Build a PNG of one pixel whose comment unpacks to 50 MB."""
    packer = zlib.compressobj(9)
    text = b"".join(packer.compress(bytes(10**6)) for _ in range(50)) + packer.flush()
    return png(1, 1, (b"zTXt", b"Comment\0\0" + text), (b"IDAT", zlib.compress(b"\0\0")))


def profile_bomb() -> bytes:
    """Build a PNG of one pixel whose colour profile unpacks to 50 MB."""
    packer = zlib.compressobj(9)
    profile = b"".join(packer.compress(bytes(10**6)) for _ in range(50)) + packer.flush()
    return png(1, 1, (b"iCCP", b"profile\0\0" + profile), (b"IDAT", zlib.compress(b"\0\0")))


def exif(block: bytes) -> bytes:
    data = saved(photo(), "JPEG")
    segment = b"Exif\0\0" + block
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


def exif_loop() -> bytes:
    """Build a directory of tags whose successor is itself."""
    return exif(b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", 0) + struct.pack(">I", 8))


def exif_of_gigabytes() -> bytes:
    """Build a tag that claims to have four billion values."""
    entry = struct.pack(">HHII", 0x0112, 3, 0xFFFFFFFF, 0x10)
    return exif(b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", 1) + entry + struct.pack(">I", 0))


def tiff_of_gigabytes() -> bytes:
    """Build a TIFF header with a single strip of four gigabytes."""
    entries = [(256, 4, 1, 1000), (257, 4, 1, 1000), (258, 3, 1, 8 << 16), (259, 3, 1, 1 << 16), (262, 3, 1, 1 << 16)]
    entries += [(273, 4, 1, 8), (277, 3, 1, 1 << 16), (278, 4, 1, 1000), (279, 4, 1, 0xFFFFFFFF)]
    packed = b"".join(struct.pack(">HHII", *entry) for entry in entries)
    return b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", len(entries)) + packed + struct.pack(">I", 0)


def animated(format: str) -> bytes:
    frames = [photo(size=(64, 64)).rotate(10 * i) for i in range(8)]
    return saved(frames[0], format, save_all=True, append_images=frames[1:])


def many_frames() -> bytes:
    """Build a GIF of 3,000 frames, only the first of which is used."""
    first = PIL.Image.new("P", (16, 16))
    return saved(
        first, "GIF", save_all=True, append_images=[PIL.Image.new("P", (16, 16), i % 255) for i in range(3000)]
    )


def with_profile() -> bytes:
    profile = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("LAB"))
    return saved(photo(), "JPEG", icc_profile=profile.tobytes())


def scans(count: int = 2000) -> bytes:
    """Build a progressive JPEG that repeats one scan; each costs a pass over the image for a few bytes."""
    data = saved(PIL.Image.new("L", (400, 400), 128), "JPEG", progressive=True)
    starts = [at for at in range(len(data)) if data.startswith(b"\xff\xda", at)]
    first, second = starts[3:5]
    return data[:second] + data[first:second] * count + data[second:]


def deep_png(color: int = 2, wrong_sum: int = 0, cut: int = 0, without_sum: bool = False) -> bytes:
    """Build a 4 x 4 PNG with 16 bits per sample. If it is damaged, libpng stops in the middle."""
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[color]
    lines = b"".join(b"\0" + bytes((7 * y + x) % 256 for x in range(8 * samples)) for y in range(4))
    packed = zlib.compress(lines[: len(lines) - cut])
    packed = packed[:-4] if without_sum else packed
    data = png(4, 4, (b"IDAT", packed), depth=16, color=color)
    at = data.index(b"IEND") - 8
    return data[:at] + (int.from_bytes(data[at : at + 4], "big") ^ wrong_sum).to_bytes(4, "big") + data[at + 4 :]


def gif_over_its_canvas() -> bytes:
    """Build a GIF with a frame of 140 x 140 transparent pixels on a canvas of one, so that only background shows."""
    data = saved(PIL.Image.new("P", (140, 140), 3), "GIF", transparency=3)
    return data[:6] + struct.pack("<HH", 1, 1) + data[10:]


def gif_past_its_colours() -> bytes:
    """Build a GIF with colour indices up to 255 and a table of two colours."""
    image = PIL.Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16), "L")
    data = saved(image, "GIF", optimize=False)
    flags = data[10]
    return data[:10] + bytes([flags & 0xF8, 255]) + data[12:19] + data[13 + 3 * 2 ** ((flags & 7) + 1) :]


def frames_on_a_large_canvas(count: int = 100) -> bytes:
    """Build a GIF of 1.5 KB whose frames, each on the whole canvas, would take 300 MB."""
    data = saved(PIL.Image.new("P", (1, 1)), "GIF")
    frame = data[data.index(b",") : -1]
    return data[:6] + struct.pack("<HH", 1000, 1000) + data[10:-1] + frame * count + b";"


def jpeg2000(layers: int = 1, block: int = 4, precincts: bytes = b"", boxes: bool = False) -> bytes:
    """Build a JPEG 2000 with another coding style: layers, logarithm of the sides of code-blocks minus 2, precincts."""
    data = saved(photo(), "JPEG2000", num_resolutions=6, no_jp2=not boxes)
    at = data.index(b"\xff\x52")
    style = bytes([bool(precincts)]) + data[at + 5 : at + 6] + struct.pack(">H", layers) + data[at + 8 : at + 10]
    style += bytes([block, block]) + data[at + 12 : at + 14] + precincts
    return data[: at + 2] + struct.pack(">H", len(style) + 2) + style + data[at + 14 :]


def jpeg2000_of_components(count: int = 16_384) -> bytes:
    data = saved(photo(), "JPEG2000")
    at = data.index(b"\xff\x4f\xff\x51") + 40
    return data[:at] + struct.pack(">H", count) + data[at + 2 :]


def jpeg2000_of_two_sizes() -> bytes:
    """Build a JPEG 2000 with a second size in its header, which is the one that Pillow reads."""
    data = saved(photo(), "JPEG2000")
    header, size = data.index(b"jp2h"), data.index(b"ihdr")
    (length,) = struct.unpack_from(">I", data, header - 4)
    end = header - 4 + length
    second = data[size - 4 : size + 4] + struct.pack(">II", 1, 1) + data[size + 12 : size + 18]
    return data[: header - 4] + struct.pack(">I", length + len(second)) + data[header:end] + second + data[end:]


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
    "frames on a large canvas": (frames_on_a_large_canvas, 200),
    "gif over its canvas": (gif_over_its_canvas, 200),
    "gif past its colours": (gif_past_its_colours, 200),
    "deep png, wrong sum": (lambda: deep_png(wrong_sum=1), 200),
    "deep png, row missing": (lambda: deep_png(cut=25), 422),
    "deep png, no sum": (lambda: deep_png(without_sum=True), 200),
    "deep grey png, row missing": (lambda: deep_png(0, cut=9), 422),
    "deep grey png with alpha, row missing": (lambda: deep_png(4, cut=17), 422),
    "deep png with alpha, row missing": (lambda: deep_png(6, cut=33), 422),
    "bigtiff past its end": (lambda: b"II+\0\x08\0\0\0" + struct.pack("<Q", 2**63), 422),
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
    "html comments": (lambda: b"<!---->" * 100, 422),
    "html": (lambda: b"<!doctype html><script>alert(1)</script>", 422),
    "zeros": (lambda: bytes(100_000), 422),
    "jpeg fill without a marker": (lambda: b"\xff\xd8" + b"\xff" * 10**6, 422),
    "jpeg fill before zeros": (lambda: b"\xff\xd8" + b"\xff" * 10**6 + b"\0", 422),
    "jpeg fill after its end": (lambda: b"\xff\xd8\xff\xd9" + b"\xff" * 10**6, 422),
    "ppm of comments": (lambda: b"P3\n4 4\n255\n" + b"#\n" * 10**6, 422),
    "ppm of comments in its header": (lambda: b"P6\n" + b"#\n" * 10**6 + b"4 4\n255\n" + bytes(48), 422),
    "ppm with 254 levels": (lambda: b"P6\n1000 1000\n254\n" + bytes(3 * 10**6), 200),
    "jpeg 2000 of tiles": (lambda: saved(photo(size=(32, 32)), "JPEG2000", tile_size=(1, 1)), 422),
    "raw jpeg 2000 of tiles": (lambda: saved(photo(size=(32, 32)), "JPEG2000", tile_size=(1, 1), no_jp2=True), 422),
    "jpeg 2000 of components": (jpeg2000_of_components, 422),
    "jpeg 2000 of layers": (lambda: jpeg2000(layers=65_535), 422),
    "jpeg 2000 of code-blocks": (lambda: jpeg2000(block=0), 422),
    "jpeg 2000 of precincts": (lambda: jpeg2000(precincts=bytes(17 * n for n in (0, 1, 2, 3, 4, 5)), boxes=True), 422),
    "jpeg 2000 of two sizes": (jpeg2000_of_two_sizes, 422),
    "jpeg 2000 of segments": (lambda: jpeg2000()[:51] + b"\xff\x64\0\2" * 10**5 + jpeg2000()[51:], 422),
    "jpeg markers": (lambda: b"\xff\xd8" + b"\xff\xe0\x00\x02" * 20_000, 422),
}
