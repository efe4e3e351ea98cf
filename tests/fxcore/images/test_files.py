"""Files to RGB images, against PIL."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import skimage.data
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcore import open_image
from fxcore.errors import BadImage, ImageTooLarge
from fxcore.images.decoding import decode
from fxcore.images.files import FORMATS, MAX_SCANS, image_header, is_image, plain_header
from tests.hostile_images import saved, scans, turned

# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [*FORMATS, "DIB"])
def test_formats(format: str, cat: PIL.Image.Image) -> None:
    data = saved(cat, format)
    image = open_image(data)
    assert image.mode == "RGB"
    assert np.array_equal(image, PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    if format in ("PNG", "BMP", "DIB", "TIFF"):
        assert np.array_equal(image, cat)
    assert image_header(data)[:2] == (300, 451)


def test_a_file_that_begins_as_a_bitmap_by_chance_is_no_image() -> None:
    """A FlatBuffer may begin with the offset 12, as long as the header of a bitmap can be; its planes are not one."""
    other = bytes.fromhex("0c000000 0800 0c00 0800 0400") + bytes(200)
    with PIL.Image.open(io.BytesIO(other)) as image:
        assert image.format == "DIB"
    assert not is_image(other)
    with pytest.raises(BadImage, match="not an image"):
        open_image(other)


@pytest.mark.parametrize("format", ["ICO", "TGA", "PCX", "QOI"])
def test_other_formats_are_refused(format: str, cat: PIL.Image.Image) -> None:
    """Each decoder is a way in for whoever sends files; only those that people use stay open."""
    with pytest.raises(BadImage, match="JPEG, PNG"):
        open_image(saved(cat, format))


@pytest.mark.parametrize(
    ("mode", "format", "options"),
    [
        ("RGB", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True, "comment": b"of a cat"}),
        ("RGB", "JPEG", {"subsampling": 0, "dpi": (300, 300), "icc_profile": b"\0" * 200_000}),
        ("L", "JPEG", {"restart_marker_blocks": 4}),
        ("RGB", "WEBP", {}),
        ("RGB", "WEBP", {"lossless": True}),
        ("RGBA", "WEBP", {"lossless": True}),
    ],
)
def test_the_size_of_plain_files_needs_no_decoder(
    mode: str, format: str, options: dict[str, object], cat: PIL.Image.Image
) -> None:
    data = saved(cat.convert(mode), format, **options)
    with PIL.Image.open(io.BytesIO(data)) as image:
        assert (plain_header(data) or ())[:2] == (image.height, image.width)
    with pytest.raises(ImageTooLarge):
        plain_header(data, 300)


def test_jpeg_files_that_are_not_plain_are_left_to_pil(cat: PIL.Image.Image) -> None:
    plain = saved(cat, "JPEG")
    scan = plain.index(b"\xff\xda")
    block = turned(6).tobytes()
    late = plain[:scan] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + plain[scan:]
    assert image_header(late)[:2] == (cat.width, cat.height)  # PIL heeds the block here too
    with_exif, cmyk = saved(cat, "JPEG", exif=block), saved(cat.convert("CMYK"), "JPEG")
    for data in (late, with_exif, cmyk, plain[:scan], plain[:2] * 100, b"\xff\xd8"):
        assert plain_header(data) is None
    assert plain_header(plain[:2] + b"\xff\xfe\0\2" * 1000 + plain[2:]) is None


def test_webp_files_that_are_not_plain_are_left_to_pil(cat: PIL.Image.Image) -> None:
    block = turned(6).tobytes()
    with_exif, clear = saved(cat, "WEBP", exif=block), cat.convert("RGBA")
    clear.putalpha(100)
    several = saved(cat, "WEBP", save_all=True, append_images=[cat.rotate(90)])
    plain, lossless = saved(cat, "WEBP"), saved(cat, "WEBP", lossless=True)
    key_frame, signature = plain[:20] + b"\1" + plain[21:], lossless[:20] + b"\x2e" + lossless[21:]
    sound = saved(cat, "BMP").replace(b"BM", b"RIFF", 1)
    after = plain + b"EXIF" + struct.pack("<I", len(block)) + block + b"\0" * (len(block) % 2)
    after = after[:4] + struct.pack("<I", len(after) - 8) + after[8:]
    for data in (with_exif, after, saved(clear, "WEBP"), several, plain[:-2], key_frame, signature, sound, b"RIFF"):
        assert plain_header(data) is None
    for data in (with_exif, after):
        assert image_header(data)[:2] == decode(data).shape[:2] == (cat.width, cat.height)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_plain_webp_files_are_decoded_to_what_was_saved(mode: str, cat: PIL.Image.Image) -> None:
    image = cat.convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    data = saved(image, "WEBP", lossless=True)
    assert plain_header(data) is not None
    np.testing.assert_array_equal(decode(data), cat)


@pytest.mark.parametrize("lossless", [False, True])
def test_plain_webp_files_cut_short_are_refused(lossless: bool, cat: PIL.Image.Image) -> None:
    data = saved(cat, "WEBP", lossless=lossless)
    for size in (len(data) // 2, len(data) - 3, 40):
        with pytest.raises(BadImage):
            decode(data[:size])


@pytest.mark.parametrize(
    ("mode", "format"),
    [("L", "JPEG"), ("LA", "PNG"), ("P", "GIF"), ("RGBA", "WEBP"), ("CMYK", "TIFF"), ("YCbCr", "TIFF"), ("1", "BMP"),
     ("L", "PPM"), ("L", "JPEG2000"), ("RGBA", "JPEG2000"), ("L", "AVIF"), ("RGBA", "AVIF")],
)  # fmt: skip
def test_modes_become_rgb(mode: str, format: str, cat: PIL.Image.Image) -> None:
    data = saved(cat.convert(mode), format)
    image = open_image(data)
    assert image.mode == "RGB"
    assert np.array_equal(image, PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    assert abs(np.mean(image) - np.mean(cat)) < 12


@pytest.mark.parametrize("transparency", [3, bytes(range(256))])
def test_palettes_with_transparency(transparency: int | bytes, cat: PIL.Image.Image) -> None:
    """One transparent colour, or an alpha for each: the colours count, the alpha does not."""
    palette = cat.convert("P")
    image = open_image(saved(palette, "PNG", transparency=transparency))
    assert np.array_equal(image, palette.convert("RGB"))


def test_alpha_is_dropped(cat: PIL.Image.Image) -> None:
    transparent = cat.copy()
    transparent.putalpha(PIL.Image.linear_gradient("L").resize(cat.size))
    assert np.array_equal(open_image(saved(transparent, "PNG")), cat)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_upper_bits(format: str) -> None:
    """PIL's own conversion clips everything above 255 to white."""
    grey = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    image = open_image(saved(PIL.Image.fromarray(grey), format))
    assert np.array_equal(image, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=-1))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("part", [0.01, 0.6])
def test_truncated_files(format: str, part: float, cat: PIL.Image.Image) -> None:
    data = saved(cat, format)
    with pytest.raises(BadImage) as caught:
        open_image(data[: int(len(data) * part)])
    assert caught.value.detail


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"II*\0", bytes(5000)],
)
def test_what_is_no_image(data: bytes) -> None:
    for read in (open_image, image_header):
        with pytest.raises(BadImage) as caught:
            read(data)
        assert "0 bytes" in caught.value.detail if not data else "not an image" in caught.value.detail


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 5), st.data())
def test_damage_is_a_bad_image_or_none(which: int, data: st.DataObject) -> None:
    """Whatever bytes are overwritten: an image, or BadImage, never another error."""
    file = bytearray(saved(PIL.Image.fromarray(skimage.data.chelsea()[:40, :60]), FORMATS[which]))
    for _ in range(data.draw(st.integers(1, 8))):
        position = data.draw(st.integers(0, min(len(file), 700) - 1))
        file[position] = data.draw(st.integers(0, 255))
    for read in (open_image, image_header):
        with contextlib.suppress(BadImage, ImageTooLarge):
            read(bytes(file), 10_000_000)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_a_damaged_exif_block_spoils_no_image(block: bytes) -> None:
    small = PIL.Image.fromarray(skimage.data.chelsea()[:40, :60])
    for header in (b"Exif\0\0", b"Exif\0\0II*\0\x08\0\0\0", b"Exif\0\0MM\0*\0\0\0\x08"):
        data = saved(small, "JPEG", exif=header + block)
        image = open_image(data)
        assert {image.height, image.width} == {40, 60}
        assert image_header(data)[:2] == (image.height, image.width)


# -- size limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [image_header, open_image, decode])
def test_a_jpeg_has_few_scans(read: Callable[[bytes], object]) -> None:
    """Each is a pass over all pixels."""
    some = scans(MAX_SCANS - 10)
    assert some.count(b"\xff\xda") <= MAX_SCANS
    read(some)
    many = scans(MAX_SCANS)
    comment = b"\xff\xfe\x00\x04\xff\xd9"  # looks like the image's end
    for data in (many, many[:2] + comment + many[2:]):
        with pytest.raises(BadImage, match="over 100 scans"):
            read(data)


@pytest.mark.parametrize("read", [image_header, open_image, decode])
def test_only_the_scans_of_a_jpeg_count(read: Callable[[bytes], object], cat: PIL.Image.Image) -> None:
    """Comments, and what phones put behind the image, may hold any bytes."""
    marks = b"\xff\xda" * 500
    data = saved(cat, "JPEG", comment=marks) + marks
    assert data.count(b"\xff\xda") > 1000
    read(data)


def test_the_limit_is_judged_by_the_header(cat: PIL.Image.Image) -> None:
    data = saved(cat, "PNG")
    assert open_image(data, 300 * 451).size == (451, 300)
    for read in (open_image, image_header):
        with pytest.raises(ImageTooLarge) as caught:
            read(data, 300 * 451 - 1)
        assert caught.value.extra == {"pixels": 300 * 451, "limit": 300 * 451 - 1}
        # The header is enough: of these bytes no pixel could be decoded.
        with pytest.raises(ImageTooLarge):
            read(data[:60], 1000)


@pytest.mark.exhaustive
def test_a_decompression_bomb_is_never_decoded() -> None:
    """30,000 x 30,000 pixels in a file of 110 kB."""
    data = saved(PIL.Image.new("1", (30_000, 30_000)), "PNG")
    assert len(data) < 200_000
    with pytest.raises(ImageTooLarge) as caught:
        open_image(data, 50_000_000)
    assert caught.value.extra["pixels"] == 900_000_000
