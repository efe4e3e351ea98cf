"""What the client sends for images and tensors."""

from __future__ import annotations

import io

import httpx
import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
import skimage.data
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxcore import open_image
from fxcore.images.formats import deep_png
from service.client.images import Encoded, split_call

MB = 1024**2


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "chelsea.png"
    PIL.Image.fromarray(skimage.data.chelsea()).save(path)
    return path


def only(images):
    [part] = split_call(images, 16, 16 * MB)
    return part


def test_files_are_sent_as_they_are(photo):
    for image in (photo, str(photo), photo.read_bytes(), bytearray(photo.read_bytes()), [photo]):
        assert only(image).body() == (photo.read_bytes(), "image/*")


def test_several_files_are_one_form(photo):
    body, kind = only([photo, photo.read_bytes()]).body()
    request = httpx.Request("POST", "http://x", headers={"content-type": kind}, content=body)
    assert kind.startswith("multipart/form-data; boundary=")
    assert request.read().count(photo.read_bytes()) == 2


def test_pixels_have_their_channels_last():
    pixels = skimage.data.chelsea()
    first = pixels.transpose(2, 0, 1)
    given = [pixels, PIL.Image.fromarray(pixels), torch.from_numpy(pixels), torch.from_numpy(first.copy()), first]
    for image in [*given, pixels[None], [pixels]]:
        body, kind = only(image).body()
        assert kind == "application/x-npy"
        assert np.array_equal(np.load(io.BytesIO(body)), pixels[None])


def test_a_pil_image_is_turned_as_its_file_would_be(tmp_path):
    path = tmp_path / "turned.jpg"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(skimage.data.chelsea()).save(path, exif=exif)
    body, _ = only(PIL.Image.open(path)).body()
    assert np.load(io.BytesIO(body)).shape == (1, 451, 300, 3)


def test_other_modes_are_left_to_the_server():
    for mode in ("L", "LA", "RGBA", "P", "1", "I;16"):
        image = PIL.Image.new(mode, (20, 10))
        [item] = only(image).content
        assert isinstance(item, Encoded)
        assert PIL.Image.open(io.BytesIO(item.read())).size == (20, 10)
    assert np.load(io.BytesIO(only(PIL.Image.new("CMYK", (20, 10))).body()[0])).shape == (1, 10, 20, 3)


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B"])
@pytest.mark.parametrize("turn", [1, 6])
def test_grey_levels_of_16_bits_arrive(mode, turn):
    levels = (np.arange(40 * 30, dtype=np.uint16).reshape(30, 40) * 54) + 7
    order = {"I": np.int32, "I;16": "<u2", "I;16B": ">u2"}[mode]
    image = PIL.Image.frombytes(mode, (40, 30), levels.astype(order).tobytes())
    image.getexif()[0x0112] = turn
    [item] = only(image).content
    right = levels if turn == 1 else np.rot90(levels, -1)
    assert np.array_equal(deep_png.decode(item.read()), np.repeat(right[:, :, None], 3, axis=2))
    assert np.array_equal(np.asarray(open_image(item.read()))[:, :, 0], right >> 8)


def test_other_integers_are_clipped_to_16_bits():
    image = PIL.Image.fromarray(np.array([[-5, 0, 65535, 70000]], np.int32))
    assert deep_png.decode(only(image).content[0].read())[0, :, 0].tolist() == [0, 0, 65535, 65535]


@pytest.mark.parametrize("given_as", ["numpy", "float64", "torch", "bfloat16", "list"])
def test_preprocessed_values_are_float32(given_as):
    values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    images = {
        "numpy": values,
        "float64": values.astype(np.float64),
        "torch": torch.from_numpy(values),
        "bfloat16": torch.from_numpy(values).bfloat16(),
        "list": list(values),
    }[given_as]
    array = np.load(io.BytesIO(only(images).body()[0]))
    assert array.dtype == np.float32
    assert np.array_equal(array, values)


def test_tensors_by_name():
    flow = {"image1": np.zeros((5, 3, 8, 8), np.float32), "image2": torch.ones(5, 3, 8, 8)}
    made = split_call(flow, 2, 16 * MB)
    assert [(part.start, part.rows) for part in made] == [(0, 2), (2, 2), (4, 1)]
    body, kind = made[-1].body()
    assert kind == "application/x-safetensors"
    loaded = safetensors.numpy.load(body)
    assert {name: value.shape for name, value in loaded.items()} == {"image1": (1, 3, 8, 8), "image2": (1, 3, 8, 8)}
    assert (loaded["image2"] == 1).all()


@pytest.mark.parametrize("value", [5, np.float32(3), torch.tensor(1.0), "cat.jpg", ["cat.jpg"], None])
def test_tensors_by_name_are_arrays(value):
    with pytest.raises(TypeError, match="tensor 'b' must be an array with one row per image, not"):
        split_call({"a": np.zeros((1, 3, 2, 2)), "b": value}, 16, MB)


@pytest.mark.parametrize(
    ("images", "error"),
    [
        ([], ValueError),
        (3, TypeError),
        ([object()], TypeError),
        (np.zeros((4, 4), np.uint8), ValueError),
        ("/nowhere/at/all.jpg", FileNotFoundError),
        ({"a": np.zeros((1, 3, 2, 2)), "b": np.zeros((2, 3, 2, 2))}, ValueError),
        (np.zeros((0, 3, 4, 4), np.float32), ValueError),
    ],
)
def test_what_is_no_image(images, error):
    with pytest.raises(error):
        split_call(images, 16, MB)


@given(
    st.lists(st.one_of(st.integers(1, 50).map(bytes), st.integers(2, 4).map(lambda s: np.zeros((s, s, 3), np.uint8)))),
    st.integers(1, 5),
    st.integers(1, 100),
    st.integers(1, 3),
)
def test_parts_hold_every_image_once_and_in_order(images, max_rows, max_bytes, smaller):
    if not images:
        return
    made = split_call(images, max_rows, max_bytes)
    for some in (made, [piece for part in made for piece in part.split(smaller)]):
        position = 0
        for part in some:
            assert part.start == position
            assert part.rows == len(part.content) <= max_rows
            assert part.rows == 1 or sum(item.nbytes for item in part.content) <= max_bytes
            for item, image in zip(part.content, images[position:], strict=False):
                assert item.data == image if isinstance(item, Encoded) else item.shape == (1, *image.shape)
            position += part.rows
        assert position == len(images)
