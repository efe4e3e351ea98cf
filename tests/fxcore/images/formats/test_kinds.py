"""What is said of files that no decoder takes."""

import io
import struct

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from fxcore import open_image
from fxcore.errors import BadImage
from tests import hostile_images
from tests.hostile_images import photo, saved, turned


def tiff(values):
    """An uncompressed TIFF of ``[H, W]`` or ``[H, W, 3]`` in any dtype."""
    height, width, channels = np.atleast_3d(values).shape
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    form = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    bits = 8 * values.dtype.itemsize
    more = struct.pack(f"<{2 * channels}H", *[bits] * channels, *[form] * channels)  # a single value is in its entry
    at = 8 + len(data)
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, channels, bits if channels == 1 else at)]
    entries += [(259, 4, 1, 1), (262, 4, 1, 1 if channels == 1 else 2), (273, 4, 1, 8), (277, 4, 1, channels)]
    entries += [(278, 4, 1, height), (279, 4, 1, len(data))]
    entries += [(339, 3, channels, form if channels == 1 else at + 2 * channels)]
    return hostile_images.tiff(data + more, *entries)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\x0a" + bytes(40), "a JPEG XL image, .*; convert it to JPEG, PNG or WebP"),
        (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(40), "a JPEG XL image"),
        (b"\0\0\0\x18ftypheic" + bytes(40), "a HEIF image"),
        (b"\0\0\0\x18ftypmp42" + bytes(40), "a video"),
        (b'<?xml version="1.0"?>\n<!-- a cat -->\n<svg width="9"/>', "an SVG drawing, .*; render it to PNG"),
        (b"\xff\xd8\xff\xc1\0\x11\x0c\0\x10\0\x10\x03" + bytes(40), "a JPEG of 12 bits per sample"),
        (tiff(np.ones((4, 5, 3), np.float32)), "a TIFF of 3 x 32-bit floats .*; send its pixels as a tensor"),
        (tiff(np.ones((4, 5), np.float64)), "a TIFF of 1 x 64-bit floats"),
        (tiff(np.ones((4, 5, 3), np.int16)), "a TIFF of 3 x 16-bit signed integers"),
    ],
)
def test_sound_files_of_other_kinds_are_named(data, said):
    with pytest.raises(BadImage, match=said):
        open_image(data)


@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_values_of_32_bits_are_clipped_as_by_pil(dtype):
    values = np.array([[0, 7, 255, 256, 70_000]], dtype)
    data = tiff(values)
    assert np.asarray(open_image(data))[0, :, 0].tolist() == [0, 7, 255, 255, 255]
    assert np.array_equal(open_image(data), PIL.Image.open(io.BytesIO(data)).convert("RGB"))


def test_grey_levels_of_12_and_16_bits_keep_the_upper_eight():
    levels = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    bits = "".join(f"{level:012b}" for level in levels.ravel().tolist())
    data = int(bits, 2).to_bytes(len(bits) // 8, "big")
    tags = [(256, 64), (257, 64), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 64), (279, len(data))]
    twelve = hostile_images.tiff(data, *((tag, 4, 1, value) for tag, value in tags))
    assert np.array_equal(np.asarray(open_image(twelve))[:, :, 0], levels >> 4)
    assert np.array_equal(np.asarray(open_image(tiff(levels * 16)))[:, :, 0], levels >> 4)


@pytest.mark.parametrize("turn", range(1, 9))
def test_an_avif_is_turned_as_by_pil(turn):
    data = saved(photo(), "AVIF", exif=turned(turn).tobytes())
    expected = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data)))
    assert np.array_equal(open_image(data), expected)


def test_an_avif_whose_frame_is_larger_than_it_says_is_refused():
    data = bytearray(saved(PIL.Image.new("RGB", (2000, 1000)), "AVIF"))
    at = data.index(b"ispe") + 8
    data[at : at + 8] = struct.pack(">II", 1, 1)
    with pytest.raises(BadImage, match="a frame of 2000 x 1000 in an image of 1 pixels"):
        open_image(bytes(data))


def test_an_animated_avif_is_refused():
    frames = [photo() for _ in range(3)]
    with pytest.raises(BadImage, match="animated AVIF"):
        open_image(saved(frames[0], "AVIF", save_all=True, append_images=frames[1:]))
