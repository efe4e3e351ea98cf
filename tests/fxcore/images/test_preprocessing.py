"""Images, clips and frames to the tensor that the weights want, against torchvision's own presets."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
import skimage.data
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.models.detection.image_list import ImageList
from torchvision.transforms.functional import normalize

from fxcore import get_model
from fxcore.errors import BadTensor
from fxcore.images.decoding import Decoder
from fxcore.images.detector_preprocessing import DetectorPreprocessing
from fxcore.images.fitting import Fit, fitted
from fxcore.images.preprocessing import ImagePreprocessing
from fxcore.images.presets import preset_factory
from fxcore.images.sizes import ImageSize

SIZES = [(300, 451), (451, 300), (37, 41), (500, 500), (640, 33)]


def photo(height: int, width: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(skimage.data.chelsea()).resize((width, height))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("resnet50", "IMAGENET1K_V1"),
        ("resnet50", "IMAGENET1K_V2"),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1"),
        ("efficientnet_v2_s", "IMAGENET1K_V1"),
        pytest.param("fcn_resnet50", "COCO_WITH_VOC_LABELS_V1", marks=pytest.mark.exhaustive),
    ],
)
def test_images_become_what_the_preset_makes(name: str, weights: str) -> None:
    ours = get_model(name).preprocessing(weights)
    preset = torchvision.models.get_model_weights(name)[weights].transforms()
    for height, width in SIZES:
        image = photo(height, width)
        expected = preset(image)
        value = ours.image(image)
        assert value.dtype == torch.float32
        assert torch.equal(value, expected)
        assert ours.output_size(height, width) == tuple(expected.shape[-2:])
        array = torch.from_numpy(np.array(image))[None]
        assert torch.equal(ours.from_array(array)[0], preset(array[0].permute(2, 0, 1)))
    described = ours.describe()
    assert described["mean"] == preset.mean
    assert described["std"] == preset.std
    assert described["resize_size"] == preset.resize_size
    assert described["crop_size"] == getattr(preset, "crop_size", None)
    assert described["interpolation"] == preset.interpolation.value
    assert described["antialias"] == preset.antialias


@pytest.mark.parametrize("interpolation", ["box", "hamming", "lanczos"])
@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_what_torchvision_does_not_resize_as_a_tensor_is_resized_by_pil(interpolation: str, fit: Fit) -> None:
    own = ImagePreprocessing(preset_factory("image", {"interpolation": interpolation, "crop_size": 60})())
    preprocessing = own if fit == "crop" else fitted(own, fit, (60, 60))
    image = photo(90, 90)
    resized = torch.from_numpy(np.array(image.resize((60, 60), PIL.Image.Resampling[interpolation.upper()])))
    expected = normalize(resized.permute(2, 0, 1) / 255, own.describe()["mean"], own.describe()["std"])
    made = preprocessing.pixels(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("weights", ["random", "file:own.pth", "DEFAULT"])
def test_what_says_nothing_of_its_preprocessing_gets_the_defaults(weights: str) -> None:
    """`random` and files have no preset of their own; resnet50's two published ones differ."""
    preset = torchvision.models.ResNet50_Weights.DEFAULT.transforms()
    image = photo(300, 451)
    assert torch.equal(get_model("resnet50").preprocessing(weights).image(image), preset(image))


@pytest.mark.parametrize(
    "name",
    [
        "maskrcnn_resnet50_fpn_v2",
        "ssd300_vgg16",
        "ssdlite320_mobilenet_v3_large",
    ],
)
def test_detectors_transform_images_as_they_do_themselves(name: str) -> None:
    entry = get_model(name)
    ours = entry.preprocessing()
    own = entry.build_weightless().transform.eval()
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    for height, width in SIZES[:3]:
        image = photo(height, width)
        expected: ImageList = own([preset(image)])[0]
        value = ours.image(image)
        assert torch.equal(value, expected.tensors[0])
        assert ours.output_size(height, width) == tuple(expected.tensors.shape[-2:])
    # Several images of one request are padded to one size, as the detector does it.
    images = [photo(150, 225), photo(225, 150)]
    together: ImageList = own([preset(image) for image in images])[0]
    assert torch.equal(ours.batch([ours.image(image) for image in images]), together.tensors)
    assert ours.describe()["mean"] == own.image_mean


@settings(max_examples=60, deadline=None)
@given(height=st.integers(1, 700), width=st.integers(1, 700))
def test_sizes_of_detectors_are_predicted(height: int, width: int) -> None:
    ours = get_model("fasterrcnn_mobilenet_v3_large_320_fpn").preprocessing()
    if min(ours.output_size(height, width)) == 0:
        return  # less than a pixel is left of the shorter side
    value = ours.image(PIL.Image.new("RGB", (width, height)))
    assert ours.output_size(height, width) == tuple(value.shape[-2:])


def test_clips_become_what_the_preset_makes() -> None:
    clip = torch.from_numpy(skimage.data.chelsea()).expand(2, 5, -1, -1, -1)
    clip = clip * torch.tensor([1, 0, 1, 0, 1], dtype=torch.uint8)[:, None, None, None]
    for name in ("r3d_18", "mvit_v2_s", "swin3d_t", "s3d"):
        ours = get_model(name).preprocessing()
        preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        expected = preset(clip.permute(0, 1, 4, 2, 3))
        value = ours.from_array(clip)
        assert torch.equal(value, expected)
        assert value.shape[:3] == (2, 3, 5)
        assert ours.output_size(300, 451) == tuple(value.shape[-2:])
        assert ours.layout == "NCTHW"
        with pytest.raises(BadTensor, match="clips"):
            ours.image(photo(30, 30))
        assert ours.describe()["crop_size"] == preset.crop_size


def test_frames_become_what_the_preset_makes() -> None:
    ours = get_model("raft_small").preprocessing()
    preset = torchvision.models.optical_flow.Raft_Small_Weights.DEFAULT.transforms()
    for height, width in SIZES:
        image = photo(height, width)
        expected, _ = preset(image, image)
        assert torch.equal(ours.image(image), expected)
        assert ours.output_size(height, width) == (height, width)


@pytest.mark.parametrize(
    "name", ["resnet18", "vit_b_16", "fcn_resnet50", "fasterrcnn_resnet50_fpn", "raft_small", "r3d_18"]
)
def test_another_size_may_be_asked_for(name: str) -> None:
    ours = get_model(name).preprocessing("DEFAULT", 96)
    assert ours.fixed_size
    assert ours.nominal_size() == (96, 96)
    for height, width in SIZES:
        assert ours.output_size(height, width) == (96, 96)
        if name != "r3d_18":
            assert ours.image(photo(height, width)).shape == (3, 96, 96)
    if name == "r3d_18":
        assert ours.from_array(torch.zeros(1, 2, 64, 80, 3, dtype=torch.uint8)).shape == (1, 3, 2, 96, 96)
    if name == "resnet18":  # 256 for a crop of 224: as much of the image is kept as before
        assert ours.describe()["resize_size"] == [110]
    # The published preprocessing of the same model is as it was.
    assert get_model(name).preprocessing().nominal_size() != (96, 96)


@pytest.mark.parametrize(
    ("resize", "image_size", "steps"),
    [
        ([72, 90], 64, ([72, 90], 64)),
        ([72, 90], 128, ([144, 180], 128)),
        ([64, 64], (64, 96), ([64, 96], (64, 96))),
        (48, 64, (48, 64)),  # smaller than the crop, which pads it
        (48, 32, (24, 32)),
    ],
)
def test_another_size_resizes_as_the_usual_one(
    resize: int | list[int], image_size: ImageSize, steps: tuple[int | list[int], int | tuple[int, int]]
) -> None:
    preset = preset_factory("image", {"resize_size": resize, "crop_size": 64, "mean": [0.5], "std": [0.25]})
    ours = ImagePreprocessing(preset(), image_size)
    decoder = Decoder(ours)
    theirs = torchvision.transforms.Compose(
        [
            torchvision.transforms.Resize(steps[0]),
            torchvision.transforms.CenterCrop(steps[1]),
            torchvision.transforms.ConvertImageDtype(torch.float32),
            torchvision.transforms.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    for height, width in SIZES:
        pixels = torchvision.transforms.functional.pil_to_tensor(photo(height, width))
        torch.testing.assert_close(ours.pixels(pixels), theirs(pixels), rtol=0, atol=0)
        row = decoder.pixels(pixels.permute(1, 2, 0))  # whose resizing is its own
        torch.testing.assert_close(decoder.batch(row[None])[0], theirs(pixels))


@pytest.mark.parametrize(
    "array",
    [
        torch.zeros(1, 3, 30, 30, dtype=torch.uint8),
        torch.zeros(30, 30, 3, dtype=torch.uint8),
        torch.zeros(0, 30, 30, 3, dtype=torch.uint8),
        torch.zeros(1, 0, 30, 3, dtype=torch.uint8),
        torch.zeros(1, 30, 0, 3, dtype=torch.uint8),
        torch.zeros(1, 2, 0, 30, 3, dtype=torch.uint8),
        torch.zeros(1, 0, 30, 30, 3, dtype=torch.uint8),
        torch.zeros(1, 30, 30, 3),
        torch.zeros(1, 2, 30, 30, 3, dtype=torch.uint8),
    ],
)
def test_arrays_of_another_form_are_refused(array: torch.Tensor) -> None:
    with pytest.raises(BadTensor, match=r"uint8 \[N, H, W, 3\]"):
        get_model("resnet18").preprocessing().from_array(array)
    if array.ndim != 5 or array.numel() == 0:
        with pytest.raises(BadTensor, match=r"uint8 \[N, T, H, W, 3\]"):
            get_model("r3d_18").preprocessing().from_array(array)


def test_sizes_that_differ_cannot_be_stacked() -> None:
    ours = get_model("fcn_resnet50").preprocessing()
    with pytest.raises(BadTensor, match="520 x 520, 520 x 700"):
        ours.batch([torch.zeros(3, 520, 700), torch.zeros(3, 520, 520)])
    assert ours.batch([torch.ones(3, 20, 30)] * 2).shape == (2, 3, 20, 30)
    assert isinstance(get_model("ssd300_vgg16").preprocessing(), DetectorPreprocessing)
