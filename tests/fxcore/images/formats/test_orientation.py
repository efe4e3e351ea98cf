"""Which way up an image is, from its header alone and as it is decoded, against PIL's own operations."""

from __future__ import annotations

import io
import zlib

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import skimage.data

from fxcore import open_image
from fxcore.errors import BadImage
from fxcore.images.files import image_header
from tests.hostile_images import png, saved


@pytest.fixture(scope="module")
def cat() -> PIL.Image.Image:
    """300 x 451 pixels, RGB."""
    return PIL.Image.fromarray(skimage.data.chelsea())


# What a viewer must do to an image stored that way, by PIL's own operations.
TURNS = {
    1: [],
    2: [PIL.Image.Transpose.FLIP_LEFT_RIGHT],
    3: [PIL.Image.Transpose.ROTATE_180],
    4: [PIL.Image.Transpose.FLIP_TOP_BOTTOM],
    5: [PIL.Image.Transpose.FLIP_LEFT_RIGHT, PIL.Image.Transpose.ROTATE_90],
    6: [PIL.Image.Transpose.ROTATE_270],
    7: [PIL.Image.Transpose.FLIP_LEFT_RIGHT, PIL.Image.Transpose.ROTATE_270],
    8: [PIL.Image.Transpose.ROTATE_90],
}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", TURNS)
def test_exif_orientation(orientation: int, format: str, cat: PIL.Image.Image) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = saved(cat, format, exif=exif)
    expected = PIL.Image.open(io.BytesIO(data))
    expected.getexif().clear()
    upright = expected.convert("RGB")
    if format == "TIFF":  # PIL turns these itself while it loads them
        upright = cat
    for turn in TURNS[orientation]:
        upright = upright.transpose(turn)
    image = open_image(data)
    assert np.array_equal(np.asarray(image), np.asarray(upright))
    assert image_header(data)[:2] == (image.height, image.width)
    assert (image.height, image.width) == ((451, 300) if orientation > 4 else (300, 451))


def test_a_jpeg_is_turned_by_its_xmp_block_too() -> None:
    """As PIL does it; the quick look at JPEG headers knows of no blocks."""
    packet = (
        b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description '
        b'tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    )
    plain = saved(PIL.Image.new("RGB", (40, 30), "red"), "JPEG")
    data = plain[:2] + b"\xff\xe1" + (len(packet) + 2).to_bytes(2, "big") + packet + plain[2:]
    turned = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data)))
    assert turned.size == (30, 40)
    assert image_header(data)[:2] == (40, 30)
    assert image_header(plain)[:2] == (30, 40)


@pytest.mark.parametrize("after", [False, True])
def test_a_png_is_turned_by_what_comes_after_its_pixels_too(after: bool) -> None:
    exif = (b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
    pixels = (b"IDAT", zlib.compress((b"\0" + bytes(40)) * 30))
    data = png(40, 30, *((pixels, exif) if after else (exif, pixels)))
    assert PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))).size == (30, 40)
    assert open_image(data).size == (30, 40)
    assert image_header(data)[:2] == (40, 30)


def test_the_size_of_a_png_needs_none_of_its_pixels(cat: PIL.Image.Image) -> None:
    """To see whether something that turns it comes after them, PIL would decode them all."""
    whole = saved(cat, "PNG")
    cut = whole[: len(whole) // 3]
    assert image_header(cut)[:2] == (300, 451)
    with pytest.raises(BadImage, match=r"^the PNG data is damaged or cut short: image file is truncated"):
        open_image(cut)
