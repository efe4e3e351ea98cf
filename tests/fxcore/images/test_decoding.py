"""The fast path against the exact one: PIL and the weights' own transform."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import skimage.data
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.transforms.functional import normalize

from fxcore import get_model
from fxcore.errors import BadImage, BadTensor, ImageTooLarge
from fxcore.images.decoding import Decoder, decode
from fxcore.images.files import open_image
from fxcore.images.preprocessing import ImagePreprocessing, Preprocessing
from fxcore.images.presets import ImageClassification

ORIENTATION = 0x0112


def encoded(
    image: PIL.Image.Image | np.ndarray, format: str = "JPEG", orientation: int = 1, **options: object
) -> bytes:
    image = image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image)
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    buffer = io.BytesIO()
    image.save(buffer, format, exif=exif, **options)
    return buffer.getvalue()


def exact(preprocessing: Preprocessing, data: bytes) -> Tensor:
    return preprocessing.image(open_image(data))


def levels(preprocessing: Preprocessing, a: Tensor, b: Tensor) -> Tensor:
    """The absolute difference of two preprocessed images in grey levels."""
    std = torch.tensor(preprocessing.describe()["std"]).view(3, 1, 1)
    return ((a - b) * std * 255).abs()


@pytest.fixture(scope="module")
def coffee() -> PIL.Image.Image:
    return PIL.Image.fromarray(skimage.data.coffee())


@pytest.fixture(scope="module")
def plain() -> Preprocessing:
    return get_model("mobilenet_v3_small").preprocessing()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"quality": 90}),
        ("RGB", {"quality": 30, "subsampling": 0, "progressive": True}),
        ("RGB", {"keep_rgb": True}),
        ("L", {}),
        ("CMYK", {}),
    ],
)
def test_pixels_are_those_of_pil(coffee: PIL.Image.Image, mode: str, options: dict[str, object], orientation: int):
    data = encoded(coffee.crop((0, 0, 333, 201)).convert(mode), orientation=orientation, **options)
    assert np.array_equal(decode(data).numpy(), np.asarray(open_image(data)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(1, 40), (40, 1), (1, 1)])
def test_images_of_one_line_are_turned(size: tuple[int, int], orientation: int):
    data = encoded(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8), orientation=orientation)
    turned = np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))))
    assert np.array_equal(decode(data).numpy(), turned)
    decoder = Decoder(ImagePreprocessing(ImageClassification(crop_size=1, resize_size=1)))
    middle = turned[round((turned.shape[0] - 1) / 2.0), round((turned.shape[1] - 1) / 2.0)]
    assert np.array_equal(decoder.image(data).numpy(), middle[None, None])


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        (f, m)
        for f in ("PNG", "WEBP", "GIF", "BMP", "TIFF")
        for m in ("RGB", "RGBA", "P", "LA")
        if (f, m) != ("BMP", "LA")
    ],
)
def test_other_formats_are_decoded_by_pil(coffee: PIL.Image.Image, plain: Preprocessing, format: str, mode: str):
    image = coffee.crop((0, 0, 301, 260)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, format)
    data = buffer.getvalue()
    assert np.array_equal(decode(data).numpy(), np.asarray(open_image(data)))
    assert levels(plain, made(plain, data), exact(plain, data)).max() < 1.01


@settings(max_examples=60, deadline=None)
@given(
    st.integers(30, 900),
    st.integers(30, 900),
    st.sampled_from(["mobilenet_v3_small", "resnet50", "fcn_resnet50", "efficientnet_b0", "inception_v3", "swin_t"]),
    st.integers(1, 8),
    st.sampled_from([None, 96, 301]),
    st.booleans(),
)
def test_no_pixel_is_off_by_more_than_a_grey_level(
    width: int, height: int, model: str, orientation: int, image_size: int | None, noise: bool
):
    preprocessing = get_model(model).preprocessing(image_size=image_size)
    if noise:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    else:
        pixels = np.asarray(PIL.Image.fromarray(skimage.data.coffee()).resize((width, height)))
    data = encoded(pixels, orientation=orientation, quality=95)
    expected = exact(preprocessing, data)
    got = made(preprocessing, data)
    assert got.shape == expected.shape
    if min(width, height) < 4 * 96:  # else it may be decoded at a half
        check(levels(preprocessing, got, expected))
    check(levels(preprocessing, normalized(preprocessing, Decoder(preprocessing).pixels(decode(data))), expected))


def made(preprocessing: Preprocessing, data: bytes) -> Tensor:
    return normalized(preprocessing, Decoder(preprocessing).image(data))


def normalized(preprocessing: Preprocessing, row: Tensor) -> Tensor:
    return Decoder(preprocessing).batch(row[None])[0]


def check(difference: Tensor) -> None:
    """One level; two only where both passes meet a tie."""
    assert difference.max() < 2.01
    assert (difference > 1.01).float().mean() < 2e-4


@pytest.mark.parametrize("model", ["fasterrcnn_resnet50_fpn", "raft_small", "vit_b_16", "maxvit_t"])
def test_every_kind_of_preprocessing(coffee: PIL.Image.Image, model: str):
    preprocessing = get_model(model).preprocessing()
    data = encoded(coffee, orientation=6)
    assert (made(preprocessing, data) - exact(preprocessing, data)).abs().max() < 1.01 / 255 / 0.22


def test_published_presets_take_the_fast_way(monkeypatch: pytest.MonkeyPatch):
    """Without this, a preset that changes upstream would silently become slow."""
    monkeypatch.setattr(PIL.Image, "fromarray", None)
    for model in ("mobilenet_v3_small", "resnet50", "vit_b_16", "deeplabv3_resnet50"):
        preprocessing = get_model(model).preprocessing()
        assert Decoder(preprocessing).pixels(torch.zeros(300, 400, 3, dtype=torch.uint8)).dtype == torch.uint8


@pytest.fixture(scope="module")
def large_photos() -> list[PIL.Image.Image]:
    """Photographs with detail down to the pixel, from 1,000 pixels on: one of that size, and others side by side."""
    small = [PIL.Image.fromarray(getattr(skimage.data, n)()) for n in ("coffee", "astronaut", "rocket", "chelsea")]
    photos = [PIL.Image.fromarray(skimage.data.retina())]
    for width, height in ((1409, 1025), (1999, 1503), (2049, 3077)):
        photo = PIL.Image.new("RGB", (width, height))
        for i, left in enumerate(range(0, width, 450)):
            for j, top in enumerate(range(0, height, 300)):
                photo.paste(small[(i + j) % 4], (left, top))
        photos.append(photo)
    return photos


@pytest.mark.parametrize("side", [600, 2400])
def test_resizing_leaves_pixels_side_by_side(
    monkeypatch: pytest.MonkeyPatch, coffee: PIL.Image.Image, plain: Preprocessing, side: int
):
    """At full scale and at a smaller one: torch resizes planes at half the speed, and to copy them takes as long."""
    resized: list[Tensor] = []

    def spy(*args: Any, **options: Any) -> Tensor:
        resized.append(interpolate(*args, **options))
        return resized[-1]

    monkeypatch.setattr("fxcore.images.decoding.interpolate", spy)
    Decoder(plain).image(encoded(coffee.resize((side, side))))
    assert resized[0].stride()[1:] == (1, 3 * resized[0].shape[3], 3)


def test_large_jpegs_are_decoded_smaller_and_features_stay(large_photos: list[PIL.Image.Image], plain: Preprocessing):
    files = [
        encoded(photo, quality=90, orientation=turn) for photo, turn in zip(large_photos, (1, 3, 6, 8), strict=True)
    ]
    expected = torch.stack([exact(plain, data) for data in files])
    got = torch.stack([made(plain, data) for data in files])
    difference = levels(plain, got, expected)
    assert not torch.equal(got, expected)
    assert difference.max() < 16
    assert difference.mean() < 0.5
    torch.manual_seed(0)
    for name, nodes in (("resnet18", ["layer1", "layer4"]), ("mobilenet_v3_small", ["features.8", "features.12"])):
        model = create_feature_extractor(torchvision.models.get_model(name, weights=None).eval(), nodes)
        with torch.inference_mode():
            for a, b in zip(model(expected).values(), model(got).values(), strict=True):
                assert torch.cosine_similarity(a.flatten(1), b.flatten(1)).min() > 0.999
                # What all images have in common makes any two alike: without it, too.
                a, b = a - a.mean(0), b - a.mean(0)
                assert torch.cosine_similarity(a.flatten(1), b.flatten(1)).min() > 0.998


def test_what_is_not_twice_as_large_as_needed_is_not_scaled(plain: Preprocessing, large_photos: list[PIL.Image.Image]):
    data = encoded(large_photos[1].crop((0, 0, 1023, 1023)), quality=90)
    assert levels(plain, made(plain, data), exact(plain, data)).max() < 1.01


def test_batches_are_normalised_as_torchvision_does(coffee: PIL.Image.Image, plain: Preprocessing):
    decoder = Decoder(plain)
    rows = torch.stack([decoder.image(encoded(coffee)), decoder.image(encoded(coffee.rotate(90)))])
    assert rows.dtype == decoder.dtype == torch.uint8
    mean, std = plain.describe()["mean"], plain.describe()["std"]
    expected = normalize(rows.permute(0, 3, 1, 2) / 255, mean, std)
    assert (decoder.batch(rows) - expected).abs().max() < 1e-6
    assert decoder.batch(rows).is_contiguous(memory_format=torch.channels_last)
    memory = torch.full((3, 224, 224, 3), 7.0)
    assert decoder.batch(rows, memory[:2]).data_ptr() == memory.data_ptr()
    assert torch.equal(memory[:2].permute(0, 3, 1, 2), decoder.batch(rows))
    assert (memory[2] == 7.0).all()


def test_rows_of_other_preprocessing_are_complete(coffee: PIL.Image.Image):
    swin = get_model("swin_t").preprocessing()
    row = Decoder(swin).image(encoded(coffee))
    assert row.dtype == Decoder(swin).dtype == torch.float32
    assert torch.equal(row, exact(swin, encoded(coffee)))
    assert Decoder(swin).batch(row[None]).data_ptr() == row.data_ptr()


@pytest.mark.parametrize("damage", ["cut", "end", "header", "body", "empty", "text"])
def test_damaged_files_are_refused_as_by_pil(coffee: PIL.Image.Image, plain: Preprocessing, damage: str):
    data = encoded(coffee)
    damaged = {
        "cut": data[: len(data) // 2],
        "end": data[:-2],
        "header": data[:200],
        "body": data[:5000] + b"\x00" * 600 + data[5600:],
        "empty": b"",
        "text": b"no image at all",
    }[damage]
    try:
        expected = open_image(damaged)
    except BadImage:
        with pytest.raises(BadImage):
            decode(damaged)
        with pytest.raises(BadImage):
            Decoder(plain).image(damaged)
    else:
        assert np.array_equal(decode(damaged).numpy(), np.asarray(expected))
        assert levels(plain, made(plain, damaged), plain.image(expected)).max() < 1.01


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_is_judged_as_by_pil(data: st.DataObject):
    file = bytearray(encoded(np.asarray(PIL.Image.fromarray(skimage.data.chelsea()).resize((64, 48))), orientation=6))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        expected = np.asarray(open_image(bytes(file), 100_000))
    except (BadImage, ImageTooLarge) as error:
        with pytest.raises(type(error)):
            decode(bytes(file), 100_000)
    else:
        assert np.array_equal(decode(bytes(file), 100_000).numpy(), expected)


def test_size_is_judged_by_the_header(coffee: PIL.Image.Image, plain: Preprocessing):
    with pytest.raises(ImageTooLarge):
        decode(encoded(coffee), 1000)
    with pytest.raises(ImageTooLarge):
        Decoder(plain).image(encoded(coffee), 1000)


@pytest.mark.parametrize("shape", [(224, 224), (224, 224, 1), (0, 224, 3)])
def test_wrong_pixels(plain: Preprocessing, shape: tuple[int, ...]):
    with pytest.raises(BadTensor):
        Decoder(plain).pixels(torch.zeros(shape, dtype=torch.uint8))


def test_from_several_threads(coffee: PIL.Image.Image, plain: Preprocessing):
    files = [encoded(coffee.crop((0, 0, 300 + 20 * i, 260)), orientation=1 + i) for i in range(8)]
    decoder = Decoder(plain)
    alone = [decoder.image(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(decoder.image, files), alone))
