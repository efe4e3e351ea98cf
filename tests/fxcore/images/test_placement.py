"""Boxes through resize, crop and padding: the pixels under a box are the same before and after."""

import numpy as np
import PIL.Image
import pytest
import torch

from fxcore import get_model
from fxcore.errors import BadBox, BadPoint
from fxcore.images.placement import Placement


def marked(height, width, box):
    """A black image with a white box."""
    pixels = np.zeros((height, width, 3), np.uint8)
    x1, y1, x2, y2 = box
    pixels[y1:y2, x1:x2] = 255
    return PIL.Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("model", "weights"),
    [("resnet50", "IMAGENET1K_V1"), ("resnet50", "IMAGENET1K_V2"), ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1")],
)
@pytest.mark.parametrize(("height", "width"), [(300, 451), (640, 333), (224, 224), (97, 120)])
def test_a_white_box_is_where_its_corners_are_carried_to(model, weights, height, width):
    """By its centre of mass and its area, which resizing keeps."""
    preprocessing = get_model(model).preprocessing(weights)
    box = (round(width * 0.4), round(height * 0.3), round(width * 0.6), round(height * 0.55))
    check(preprocessing, height, width, box)


@pytest.mark.parametrize(
    "model", ["fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "fcn_resnet50"]
)
@pytest.mark.parametrize(("height", "width"), [(300, 451), (640, 333)])
def test_the_same_where_whole_images_are_resized(model, height, width):
    check(get_model(model).preprocessing(), height, width, (30, 50, 200, 280))


def test_the_same_where_the_crop_is_larger_than_the_image():
    preprocessing = get_model("resnet18").preprocessing()
    preprocessing.preset.resize_size, preprocessing.preset.crop_size = [100], [151]
    check(preprocessing, 300, 451, (100, 50, 200, 280))


def check(preprocessing, height, width, box):
    placement = preprocessing.placement(height, width)
    mean, std = (torch.tensor(preprocessing.describe()[name]).reshape(3, 1, 1) for name in ("mean", "std"))
    pixels = preprocessing.image(marked(height, width, box)) * std + mean
    empty = preprocessing.image(marked(height, width, (0, 0, 0, 0))) * std + mean
    white = (pixels - empty)[0].clamp(0, 1)
    x1, y1, x2, y2 = placement.carry([box])[0].tolist()
    ys, xs = (torch.arange(side) + 0.5 for side in white.shape)
    assert white.sum() == pytest.approx((x2 - x1) * (y2 - y1), rel=0.01)
    assert (white.sum(0) * xs).sum() / white.sum() == pytest.approx((x1 + x2) / 2, abs=0.05)
    assert (white.sum(1) * ys).sum() / white.sum() == pytest.approx((y1 + y2) / 2, abs=0.05)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([10, 10, 20], "has 3 values"),
        ([10, 10, float("nan"), 20], "finite"),
        ([10, 10, 10, 20], "empty or inverted"),
        ([30, 10, 20, 20], "empty or inverted"),
        ([10, 10, 20, 482], "640 x 480 pixels"),
        ([-2, 10, 20, 20], "640 x 480 pixels"),
        ([0, 0, 70, 480], "the model sees"),
        ([10], "has 1 values"),
        ([10, float("inf")], "finite"),
        ([10, 482], "640 x 480 pixels"),
        ([-2, 10], "640 x 480 pixels"),
        ([70, 480], "the model sees"),
    ],
)
def test_boxes_and_points_that_are_none(wrong, said):
    """Of a landscape picture whose square middle is seen."""
    placement = Placement((480, 640), 1.0, 1.0, 0, 80, (480, 480))
    if len(wrong) > 2:
        carry, right, refused, kind = placement.carry, [100, 100, 200, 200], BadBox, "box"
    else:
        carry, right, refused, kind = placement.carry_points, [100, 100], BadPoint, "point"
    with pytest.raises(refused, match=said) as error:
        carry([right, wrong])
    assert error.value.extra[kind] == 1


def test_points_are_carried_as_the_corners_of_boxes():
    placement = Placement((480, 640), 0.5, 0.25, 8, 48, (224, 224))
    corners = placement.carry([[310, 50, 400, 250.5]])
    assert torch.equal(placement.carry_points([[310, 50], [400, 250.5]]), corners.reshape(2, 2))
