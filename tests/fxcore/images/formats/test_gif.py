"""GIF files against torchvision's decoder, where that can be trusted: valid files, whose frame lies in the canvas."""

import struct

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision

from fxcore.errors import BadImage
from fxcore.images.decoding import decode
from fxcore.images.files import image_header
from tests.hostile_images import saved

TRANSPARENT_3 = b"!\xf9\x04\x01\0\0\x03\0"
TRANSPARENT_4 = b"!\xf9\x04\x01\0\0\x04\0"
OPAQUE = b"!\xf9\x04\0\0\0\x03\0"
COMMENT = b"!\xfe\x03cat\0"


def gif(
    canvas=(9, 7),
    frame=(2, 1, 5, 4),
    before=b"",
    colors=8,
    background=5,
    own=False,
    everywhere=True,
    interlaced=False,
    rows=None,
    ends=True,
):
    """One frame ``(left, top, width, height)``; a colour table of it alone (``own``), of all frames, or of both."""
    if rows is None:
        rows = np.random.default_rng(0).integers(0, colors, frame[:1:-1], dtype=np.uint8)
    image = PIL.Image.fromarray(rows, "L")
    image.putpalette(bytes(range(256)) * 3)
    data = saved(image, "GIF", interlace=interlaced, optimize=False)
    start = data.index(b"," + struct.pack("<HHHH", 0, 0, *frame[2:]))
    flags = data[start + 9]
    packed = data[start + 10 + (3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0) :]
    size = colors.bit_length() - 2
    table = np.random.default_rng(1).integers(0, 256, 3 * colors, dtype=np.uint8).tobytes()
    head = struct.pack("<6sHHBBB", b"GIF89a", *canvas, 0x80 * everywhere + size, background, 0)
    place = b"," + struct.pack("<HHHHB", *frame, 0x80 * own + 0x40 * interlaced + size)
    return head + table * everywhere + before + place + table[::-1] * own + packed + b";" * ends


@pytest.mark.parametrize(
    "data",
    [
        gif(),
        gif((5, 4), (0, 0, 5, 4)),
        gif(own=True),
        gif(own=True, everywhere=False),
        gif(before=TRANSPARENT_3),
        gif(before=TRANSPARENT_3, own=True),
        gif(before=OPAQUE),
        gif(before=COMMENT + TRANSPARENT_3),
        gif(before=TRANSPARENT_3 + TRANSPARENT_4),
        gif(before=OPAQUE + TRANSPARENT_4),
        gif((40, 30), (1, 3, 37, 21), interlaced=True, colors=128),
        gif((40, 30), (1, 3, 37, 21), before=TRANSPARENT_3, interlaced=True, colors=4, background=2),
        gif((300, 200), (0, 0, 300, 200), colors=256),
        gif((3, 2), (0, 0, 3, 2), colors=2, background=1),
    ],
)
def test_pixels_are_those_of_torchvision(data):
    expected = torchvision.io.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
    assert torch.equal(decode(data), expected.permute(1, 2, 0))


def test_only_the_first_frame_is_decoded():
    first = gif((5, 4), (0, 0, 5, 4), ends=False)
    assert torch.equal(decode(first + b"," + b"\xff" * 100), decode(first + b";"))


def test_colours_past_the_end_of_the_table_are_black():
    rows = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = decode(gif((16, 17), (0, 0, 16, 16), colors=2, background=255, rows=rows)).reshape(-1, 3)
    assert pixels[:2].any(1).all()
    assert not pixels[2:].any()


@pytest.mark.parametrize(
    ("canvas", "frame", "size"), [((2, 2), (1, 0, 3, 1), (2, 4)), ((1, 1), (0, 0, 140, 140), (140, 140))]
)
def test_a_frame_over_the_edge_widens_the_canvas(canvas, frame, size):
    data = gif(canvas, frame, before=TRANSPARENT_3, rows=np.full(frame[:1:-1], 3, np.uint8))
    assert image_header(data)[:2] == size
    pixels = decode(data)
    assert pixels.shape == (*size, 3)
    assert (pixels == pixels[-1, 0]).all()  # its background; nothing that was in the memory before


@pytest.mark.parametrize("end", [10, 20, 40, 50])
def test_files_that_are_cut_short(end):
    with pytest.raises(BadImage, match=r"not an image|damaged or cut short"):
        decode(gif()[:end])
