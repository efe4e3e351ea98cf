"""Images at sizes of one's own, against torchvision's own resizing of the decoded tensor."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from fxcore import get_model
from fxcore.errors import BadTensor, Unsupported
from fxcore.graph.model_graph import model_graph
from fxcore.graph.multiples import multiple_of
from fxcore.images.channels import OtherChannels
from fxcore.images.decoding import Decoder
from fxcore.images.fitting import fitted
from tests.fxcore.images.test_placement import check

MODELS = ["resnet18", "timm.vit_tiny_patch16_224"]
PHOTO = (300, 451)


@pytest.fixture(scope="module")
def photo():
    noise = np.random.default_rng(0).integers(0, 256, (30, 41, 3), np.uint8)
    image = PIL.Image.fromarray(noise).resize((PHOTO[1], PHOTO[0]), PIL.Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resized(photo, model, height, width):
    """By torchvision, with the weights' interpolation and normalisation."""
    own = get_model(model).preprocessing().describe()
    image = F.resize(photo, [height, width], F.InterpolationMode(own["interpolation"]), antialias=True)
    return F.normalize(image / 255, own["mean"], own["std"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [(160, 160), (128, 192), (288, 96)])
def test_stretched(photo, model, size):
    stretched = fitted(get_model(model).preprocessing(), "stretch", size)
    assert stretched.nominal_size() == stretched.output_size(*PHOTO) == size
    torch.testing.assert_close(stretched.pixels(photo), resized(photo, model, *size))


@pytest.mark.parametrize("fit", ["stretch", "native"])
@pytest.mark.parametrize("model", ["resnet18", "efficientnet_b0", "timm.resnet18"])
def test_16_bits_stay_in_range_at_hard_edges(model, fit):
    """Bicubic resizing carries black and white out of range. PIL resizes floats."""
    edges = np.zeros(PHOTO, np.float32)
    edges[50:200, 100:300] = 1
    preprocessing = fitted(get_model(model).preprocessing(), fit, 96)
    height, width = preprocessing.output_size(*PHOTO)
    own = preprocessing.describe()
    filter = PIL.Image.Resampling[own["interpolation"].upper()]
    by_pil = torch.from_numpy(np.array(PIL.Image.fromarray(edges).resize((width, height), filter))).clamp(0, 1)
    deep = torch.from_numpy((edges * 65535).astype(np.uint16)).expand(3, -1, -1)
    expected = F.normalize(by_pil.expand(3, -1, -1), own["mean"], own["std"])
    torch.testing.assert_close(preprocessing.pixels(deep), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("size", "inner", "box"),
    [
        ((160, 160), (106, 160), (0, 27, 160, 133)),
        ((128, 192), (128, 192), (0, 0, 192, 128)),
        ((288, 96), (64, 96), (0, 112, 96, 176)),
        ((100, 400), (100, 150), (125, 0, 275, 100)),
    ],
)
def test_padded_with_what_normalising_makes_zero(photo, model, size, inner, box):
    padded = fitted(get_model(model).preprocessing(), "pad", size)
    x1, y1, x2, y2 = box
    assert padded.valid_box(*PHOTO) == box
    result = padded.pixels(photo)
    torch.testing.assert_close(result[:, y1:y2, x1:x2], resized(photo, model, *inner))
    result[:, y1:y2, x1:x2] = 0
    assert result.shape == (3, *size)
    assert not result.any()


@pytest.mark.parametrize(
    ("side", "multiple", "size"), [(224, 32, (224, 352)), (224, 14, (224, 336)), (10, 16, (16, 16))]
)
def test_native_rounds_each_side(photo, side, multiple, size):
    native = fitted(get_model("resnet18").preprocessing(), "native", side, multiple)
    assert native.output_size(*PHOTO) == size
    assert native.output_size(*PHOTO[::-1]) == size[::-1]
    assert not native.fixed_size
    torch.testing.assert_close(native.pixels(photo), resized(photo, "resnet18", *size))


@pytest.mark.parametrize(("size", "whole"), [((128, 192), (146, 219)), ((192, 96), (219, 329))])
def test_a_rectangle_is_cropped_of_what_covers_it_enlarged_as_by_the_weights(photo, size, whole):
    """The weights resize to 256 pixels and crop 224."""
    preprocessing = get_model("resnet18").preprocessing(image_size=size)
    assert preprocessing.largest_size(*PHOTO) == whole
    top, left = (round((have - keep) / 2) for have, keep in zip(whole, size, strict=True))
    expected = resized(photo, "resnet18", *whole)[:, top : top + size[0], left : left + size[1]]
    torch.testing.assert_close(preprocessing.pixels(photo), expected, atol=0.02, rtol=0)  # a level of uint8
    decoder = Decoder(preprocessing)
    row = decoder.pixels(photo.permute(1, 2, 0).contiguous())
    torch.testing.assert_close(decoder.batch(row[None])[0], preprocessing.pixels(photo))


def test_timm_crops_rectangles_itself(photo):
    import timm

    image = PIL.Image.fromarray(photo.permute(1, 2, 0).numpy())
    entry = get_model("timm.resnet18")
    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg("resnet18").to_dict())
    expected = timm.data.create_transform(**{**config, "input_size": (3, 128, 192)})(image)
    assert torch.equal(entry.preprocessing(image_size=(128, 192)).image(image), expected)


@pytest.mark.parametrize("fit", ["stretch", "pad", "native"])
def test_boxes_follow(fit):
    """A white box is at the place that its corners are carried to: by its centre of mass and its area."""
    own = get_model("resnet18").preprocessing()
    check(fitted(own, fit, 192 if fit == "native" else (160, 256), 32), *PHOTO, (120, 60, 260, 180))


def test_padding_stays_zero_where_the_model_normalises(photo):
    padded = fitted(get_model("resnet18").preprocessing(), "pad", 100)
    mean, std = (torch.tensor(values)[:, None, None] for values in padded.normalization())
    plain = padded.without_normalization().pixels(photo)
    torch.testing.assert_close((plain - mean) / std, padded.pixels(photo))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "multiple"),
    [
        ("resnet18", 32),
        ("vit_b_32", 32),
        ("timm.test_vit", 16),
        ("timm.crossvit_9_240", 120),
        ("timm.pit_b_224", 28),
    ],
)
def test_multiple(model, multiple):
    entry = get_model(model)
    assert multiple_of(model_graph(entry, entry.structure())) == multiple


@pytest.mark.parametrize("fit", ["stretch", "pad", "native"])
def test_one_channel_is_the_luma(photo, fit):
    """Normalised by the averages of the mean and standard deviation, and padded with zeros."""
    own = get_model("resnet18").preprocessing()
    size = 160 if fit == "native" else (96, 163)
    grey, rgb = (fitted(one, fit, size) for one in (OtherChannels(own, 1), own))
    assert grey.describe()["mean"] == [pytest.approx((0.485 + 0.456 + 0.406) / 3)]
    assert grey.placement(*PHOTO) == rgb.placement(*PHOTO)
    assert grey.valid_box(*PHOTO) == rgb.valid_box(*PHOTO)
    height, width = grey.largest_size(*PHOTO)
    image = F.resize(photo, [height, width], antialias=True) / 255
    luma = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    expected = F.normalize(luma[None], [(0.485 + 0.456 + 0.406) / 3], [(0.229 + 0.224 + 0.225) / 3])
    left, top, right, bottom = grey.valid_box(*PHOTO) or (0, 0, width, height)
    result = grey.pixels(photo)
    assert result.shape == (1, *grey.output_size(*PHOTO))
    torch.testing.assert_close(result[:, top:bottom, left:right], expected, atol=1e-5, rtol=1e-5)
    result[:, top:bottom, left:right] = 0
    assert result.abs().max() < 1e-6


def test_refused():
    with pytest.raises(Unsupported, match="not a single image"):
        fitted(OtherChannels(get_model("resnet18").preprocessing(), 6), "pad", 320)
    with pytest.raises(Unsupported, match="fit=pad is not for this model"):
        fitted(get_model("fasterrcnn_resnet50_fpn").preprocessing(), "pad", 320)
    with pytest.raises(BadTensor, match="one number, the length of the shorter side"):
        fitted(get_model("resnet18").preprocessing(), "native", (320, 480))
