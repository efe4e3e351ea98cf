"""Encoded bytes to rows, against torchvision's ``decode_image`` and the weights' own transform, and against PIL."""

from __future__ import annotations

import functools
import io
import zlib
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
from fxcore.images.detector_preprocessing import DetectorPreprocessing
from fxcore.images.files import open_image
from fxcore.images.preprocessing import ImagePreprocessing, Preprocessing
from fxcore.images.presets import ImageClassification
from fxcore.images.timm_preprocessing import TimmPreprocessing
from tests import hostile_images
from tests.decoding import decoded
from tests.fxcore.model_list import SWEPT
from tests.hostile_images import png, saved, turned


def encoded(
    image: PIL.Image.Image | np.ndarray, format: str = "JPEG", orientation: int = 1, **options: object
) -> bytes:
    image = image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image)
    return saved(image, format, exif=turned(orientation), **options)


def exact(preprocessing: Preprocessing, data: bytes) -> Tensor:
    """What torchvision documents, of a preprocessing that has a preset; PIL decodes what torchvision does not."""
    assert isinstance(preprocessing, ImagePreprocessing)
    return preprocessing.preset(decoded(data))


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
    larger = ImagePreprocessing(ImageClassification(crop_size=4, resize_size=4))
    assert torch.equal(made(larger, data), exact(larger, data))


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
    data = saved(coffee.crop((0, 0, 301, 260)).convert(mode), format)
    assert np.array_equal(decode(data, exactly=False).numpy(), np.asarray(open_image(data)))
    assert torch.equal(made(plain, data), exact(plain, data))


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(
    st.integers(30, 900),
    st.integers(30, 900),
    st.sampled_from(["mobilenet_v3_small", "resnet50", "fcn_resnet50", "efficientnet_b0", "inception_v3", "swin_t"]),
    st.integers(1, 8),
    st.sampled_from([None, 96, 301]),
    st.booleans(),
)
def test_every_bit_is_torchvisions(
    width: int, height: int, model: str, orientation: int, image_size: int | None, noise: bool
):
    preprocessing = get_model(model).preprocessing(image_size=image_size)
    if noise:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    else:
        pixels = np.asarray(PIL.Image.fromarray(skimage.data.coffee()).resize((width, height)))
    data = encoded(pixels, orientation=orientation, quality=95)
    expected = exact(preprocessing, data)
    assert torch.equal(made(preprocessing, data), expected)
    assert torch.equal(normalized(preprocessing, Decoder(preprocessing).pixels(decode(data))), expected)
    assert isinstance(preprocessing, ImagePreprocessing)
    assert torch.equal(made(preprocessing, data, "pil"), preprocessing.preset(open_image(data)))


def made(preprocessing: Preprocessing, data: bytes, preprocess: str = "default") -> Tensor:
    return normalized(preprocessing, Decoder(preprocessing).image(data, preprocess=preprocess))


def normalized(preprocessing: Preprocessing, row: Tensor) -> Tensor:
    return Decoder(preprocessing).batch(row[None])[0]


def deep_png(pixels: np.ndarray) -> bytes:
    """A PNG file of ``[H, W, C]`` uint16, which PIL does not write in colour (ISO/IEC 15948)."""
    height, width, channels = pixels.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    return png(width, height, (b"IDAT", zlib.compress(lines)), depth=16, color={1: 0, 2: 4, 3: 2, 4: 6}[channels])


@functools.cache
def odd_files() -> dict[str, bytes]:
    """Four photographs, each in other kinds of files."""
    coffee, astronaut, rocket, chelsea = (
        PIL.Image.fromarray(getattr(skimage.data, name)()) for name in ("coffee", "astronaut", "rocket", "chelsea")
    )
    clear = chelsea.copy()
    clear.putalpha(chelsea.convert("L"))
    grey = coffee.convert("L")
    grey.putalpha(coffee.convert("L"))
    deep = np.asarray(rocket).astype(np.uint16) * 257 + 3
    return {
        "photo": encoded(coffee),
        "another": encoded(astronaut, quality=60, subsampling=0),
        "progressive": encoded(rocket, progressive=True),
        "turned": encoded(chelsea, orientation=6),
        "turned png": encoded(chelsea, "PNG", orientation=8),
        "grey": encoded(astronaut.convert("L")),
        "cmyk": encoded(coffee.convert("CMYK")),
        "alpha": encoded(clear, "PNG"),
        "grey alpha": encoded(grey, "PNG"),
        "palette": encoded(rocket.quantize(50), "PNG"),
        "palette alpha": encoded(rocket.quantize(50), "PNG", transparency=3),
        "one bit": encoded(coffee.convert("1"), "PNG"),
        "16 bit grey": deep_png(deep[:, :, :1]),
        "16 bit": deep_png(deep),
        "16 bit alpha": deep_png(np.concatenate([deep, deep[:, :, :1]], axis=2)),
        "webp": encoded(chelsea, "WEBP"),
        "webp alpha": encoded(clear, "WEBP"),
        "gif": encoded(coffee, "GIF"),
        "gif alpha": encoded(coffee.quantize(50), "GIF", transparency=3),
    }


FAMILIES = [
    "resnet50", "efficientnet_v2_s", "swin_v2_t", "fcn_resnet50", "raft_small",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
]  # fmt: skip


def all_weights() -> list[Any]:
    """Every published set of weights with an image as input; by default one for each kind of preprocessing.

    The first set that prepares images in some way is tested with files of every kind, the others with one.
    """
    found = []
    seen = set()
    for name in torchvision.models.list_models():
        entry = get_model(name)
        if "video" in entry.task or entry.preprocessing().layout != "NCHW":
            continue
        for weights in entry.weights:
            usual = name in FAMILIES and weights == entry.default_weights
            way = str(entry.preprocessing(weights).describe()), entry.task
            found.append(pytest.param(name, weights, usual or way not in seen, marks=() if usual else SWEPT))
            seen.add(way)
    return found


@pytest.mark.parametrize(("model", "weights", "every_kind"), all_weights())
def test_all_weights_and_kinds_of_files_are_as_torchvision_documents(model: str, weights: str, every_kind: bool):
    """The documented expression; where the transform is for pairs of frames, the model's own on both."""
    preprocessing = get_model(model).preprocessing(weights)
    preset = torchvision.models.get_model_weights(model)[weights].transforms()
    if isinstance(preprocessing, DetectorPreprocessing):
        detector = torchvision.models.get_model(model, weights=None, weights_backbone=None).eval()
    for kind, data in odd_files().items():
        if not every_kind and kind != "photo":
            continue
        if min(preprocessing.nominal_size()) > 500 and kind not in ("photo", "turned", "16 bit"):
            continue  # they take a second each
        image = decoded(data)
        if isinstance(preprocessing, ImagePreprocessing):
            expected = preset(image)
        elif isinstance(preprocessing, DetectorPreprocessing):
            expected = detector.transform([preset(image)])[0].tensors[0]
        else:
            expected = preset(image, image)[0]
        got = made(preprocessing, data)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= 1e-6, kind
        if kind in ("photo", "turned", "cmyk", "alpha") and isinstance(preprocessing, ImagePreprocessing):
            pil = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))).convert("RGB")
            assert torch.equal(made(preprocessing, data, "pil"), preset(pil)), kind


@pytest.mark.parametrize("color", [0, 2, 4, 6])
@pytest.mark.parametrize("damage", [{"wrong_sum": 1}, {"without_sum": True}])
def test_damaged_files_of_16_bits_are_decoded_as_by_pil(color: int, damage: dict[str, int]):
    data = hostile_images.deep_png(color, **damage)
    own = ImagePreprocessing(ImageClassification(crop_size=4, resize_size=4, mean=(0, 0, 0), std=(1, 1, 1)))
    try:
        upper = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGBA" if color else "I"))
    except OSError:
        with pytest.raises(BadImage, match="damaged or cut short"):
            made(own, data)
        return
    upper = upper[:, :, :3] if color else (upper // 256)[:, :, None].repeat(3, axis=2)
    assert np.array_equal((made(own, data) * 65535).round().int().permute(1, 2, 0).numpy() // 256, upper)


@pytest.mark.parametrize("channels", range(1, 5))
def test_pil_is_given_the_upper_bits_of_16(channels: int):
    """timm's transforms take PIL images, which have eight bits."""
    preprocessing = get_model("timm.resnet18").preprocessing()
    assert isinstance(preprocessing, TimmPreprocessing)
    pixels = np.random.default_rng(0).integers(0, 65536, (70, 90, channels), np.uint16)
    upper = (pixels[:, :, :3] if channels > 2 else pixels[:, :, :1].repeat(3, axis=2)) >> 8
    expected = preprocessing.transform(PIL.Image.fromarray(upper.astype(np.uint8)))
    assert torch.equal(Decoder(preprocessing).image(deep_png(pixels)), expected)


@pytest.mark.parametrize("model", ["fasterrcnn_resnet50_fpn", "raft_small"])
def test_pil_of_every_kind_of_preprocessing(coffee: PIL.Image.Image, model: str):
    preprocessing = get_model(model).preprocessing()
    data = encoded(coffee, orientation=6)
    assert torch.equal(made(preprocessing, data, "pil"), preprocessing.image(open_image(data)))


def test_published_presets_take_the_quick_way():
    """Without this, a preset that changes upstream would silently become slow."""
    for model in ("mobilenet_v3_small", "resnet50", "vit_b_16", "swin_t", "efficientnet_b0", "deeplabv3_resnet50"):
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


@pytest.mark.parametrize("side", [1200, 2400])
def test_resizing_leaves_pixels_side_by_side(
    monkeypatch: pytest.MonkeyPatch, coffee: PIL.Image.Image, plain: Preprocessing, side: int
):
    """torch resizes planes at half the speed, and to copy them takes as long."""
    resized: list[Tensor] = []

    def spy(*args: Any, **options: Any) -> Tensor:
        resized.append(interpolate(*args, **options))
        return resized[-1]

    monkeypatch.setattr("fxcore.images.decoding.interpolate", spy)
    Decoder(plain).image(encoded(coffee.resize((side, side))), preprocess="fast")
    assert resized[0].stride()[1:] == (1, 3 * resized[0].shape[3], 3)


@pytest.mark.exhaustive
def test_large_jpegs_are_decoded_smaller_and_features_stay(large_photos: list[PIL.Image.Image], plain: Preprocessing):
    files = [
        encoded(photo, quality=90, orientation=turn) for photo, turn in zip(large_photos, (1, 3, 6, 8), strict=True)
    ]
    expected = torch.stack([exact(plain, data) for data in files])
    got = torch.stack([made(plain, data, "fast") for data in files])
    assert torch.equal(torch.stack([made(plain, data) for data in files]), expected)
    std = torch.tensor(plain.describe()["std"]).view(3, 1, 1)
    difference = ((got - expected) * std * 255).abs()  # in grey levels
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
    assert torch.equal(made(plain, data, "fast"), exact(plain, data))


def test_batches_are_normalised_as_torchvision_does(coffee: PIL.Image.Image, plain: Preprocessing):
    decoder = Decoder(plain)
    rows = torch.stack([decoder.image(encoded(coffee)), decoder.image(encoded(coffee.rotate(90)))])
    assert rows.dtype == decoder.dtype == torch.uint8
    mean, std = plain.describe()["mean"], plain.describe()["std"]
    assert torch.equal(decoder.batch(rows), normalize(rows.permute(0, 3, 1, 2) / 255, mean, std))
    assert decoder.batch(rows).is_contiguous(memory_format=torch.channels_last)
    memory = torch.full((3, 224, 224, 3), 7.0)
    assert decoder.batch(rows, memory[:2]).data_ptr() == memory.data_ptr()
    assert torch.equal(memory[:2].permute(0, 3, 1, 2), decoder.batch(rows))
    assert (memory[2] == 7.0).all()


def test_rows_of_other_preprocessing_are_complete(coffee: PIL.Image.Image):
    own = ImagePreprocessing(ImageClassification(crop_size=224, antialias=False))
    row = Decoder(own).image(encoded(coffee))
    assert row.dtype == Decoder(own).dtype == torch.float32
    assert torch.equal(row, exact(own, encoded(coffee)))
    assert Decoder(own).batch(row[None]).data_ptr() == row.data_ptr()


@pytest.mark.parametrize("damage", ["cut", "end", "header", "body"])
def test_damaged_files_are_refused_as_by_pil(coffee: PIL.Image.Image, plain: Preprocessing, damage: str):
    data = encoded(coffee)
    damaged = {
        "cut": data[: len(data) // 2],
        "end": data[:-2],
        "header": data[:200],
        "body": data[:5000] + b"\x00" * 600 + data[5600:],
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
        pixels = torch.from_numpy(np.array(expected)).permute(2, 0, 1)
        assert torch.equal(made(plain, damaged), plain.pixels(pixels))


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
