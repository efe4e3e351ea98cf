"""Which way up an image is, from its header alone and as it is decoded, against PIL's operations and torchvision."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision

from fxcore import open_image
from fxcore.errors import BadImage
from fxcore.images.decoding import decode
from fxcore.images.files import image_header
from tests.hostile_images import png, saved, turned

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
    data = saved(cat, format, exif=turned(orientation))
    expected = PIL.Image.open(io.BytesIO(data))
    expected.getexif().clear()
    upright = expected.convert("RGB")
    if format == "TIFF":  # PIL turns these itself while it loads them
        upright = cat
    for turn in TURNS[orientation]:
        upright = upright.transpose(turn)
    image = open_image(data)
    assert np.array_equal(image, upright)
    assert image_header(data)[:2] == (image.height, image.width)
    assert (image.height, image.width) == ((451, 300) if orientation > 4 else (300, 451))


EXIF = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
XMP = b'<x:xmpmeta><rdf:RDF><rdf:Description tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
PIXELS = (b"IDAT", zlib.compress((b"\0" + bytes(range(40))) * 30))


def app1(*blocks: bytes) -> bytes:
    """Build a JPEG of 30 x 40 pixels with ``blocks``, each in a segment APP1."""
    plain = saved(PIL.Image.linear_gradient("L").resize((40, 30)), "JPEG")
    return plain[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(b) + 2) + b for b in blocks) + plain[2:]


IMAGES = {
    "exif": (app1(b"Exif\0\0" + EXIF), True),
    "exif, xmp": (app1(b"Exif\0\0" + EXIF, b"http://ns.adobe.com/xap/1.0/\0" + XMP), True),
    "xmp": (app1(b"http://ns.adobe.com/xap/1.0/\0" + XMP), False),
    "xmp, exif": (app1(b"http://ns.adobe.com/xap/1.0/\0" + XMP, b"Exif\0\0" + EXIF), False),
    "no tiff": (app1(b"Exif\0\0" + EXIF.replace(b"*", b"+")), False),
    "of another type": (app1(b"Exif\0\0" + EXIF.replace(b"\x12\0\x03", b"\x12\0\x01")), True),
    "png exif": (png(40, 30, (b"eXIf", EXIF), PIXELS), True),
    "png exif twice": (png(40, 30, (b"eXIf", EXIF), (b"eXIf", EXIF.replace(b"\6", b"\1")), PIXELS), True),
    "png exif of no byte order, exif": (png(40, 30, (b"eXIf", b"XX" + EXIF[2:]), (b"eXIf", EXIF), PIXELS), True),
    "png exif with a wrong crc": (png(40, 30, (b"eXIf", EXIF), PIXELS).replace(EXIF, EXIF[:-1] + b"1"), False),
    "png exif after its pixels": (png(40, 30, PIXELS, (b"eXIf", EXIF)), False),
    "png xmp": (png(40, 30, (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP), PIXELS), False),
    "png exif as text": (
        png(40, 30, (b"tEXt", b"Raw profile type exif\0\nexif\n26\n" + EXIF.hex().encode()), PIXELS),
        False,
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_turned_as_torchvision_turns_them(name: str) -> None:
    data, is_turned = IMAGES[name]
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    expected = torchvision.io.decode_image(encoded, mode="RGB", apply_exif_orientation=True).permute(1, 2, 0)
    assert expected.shape == ((40, 30, 3) if is_turned else (30, 40, 3))
    assert torch.equal(decode(data), expected)
    assert np.array_equal(open_image(data), expected)
    assert image_header(data)[:2] == expected.shape[:2]


def test_the_size_of_a_png_needs_none_of_its_pixels(cat: PIL.Image.Image) -> None:
    """To see whether something that turns it comes after them, PIL would decode them all."""
    whole = saved(cat, "PNG")
    cut = whole[: len(whole) // 3]
    assert image_header(cut)[:2] == (300, 451)
    with pytest.raises(BadImage, match=r"^the PNG data is damaged or cut short: image file is truncated"):
        open_image(cut)
