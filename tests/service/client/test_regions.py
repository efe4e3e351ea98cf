"""What the client sends for regions."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import PIL.Image
import pytest

from service.client import regions


@pytest.mark.parametrize("mode", ["1", "L", "I", "F"])
def test_masks_of_all_modes_are_png_files(mode):
    inside = np.arange(12).reshape(3, 4) % 3 == 0
    mask = PIL.Image.fromarray(inside).convert(mode)
    sent = PIL.Image.open(io.BytesIO(base64.b64decode(regions._mask(mask))))
    assert sent.format == "PNG"
    assert np.array_equal(np.asarray(sent) != 0, inside)


@pytest.mark.parametrize(
    ("field", "one", "form"), [("boxes", [0, 0, 9, 9], "boxes [x1, y1, x2, y2]"), ("points", [1, 2], "points [x, y]")]
)
def test_a_list_per_image_for_a_single_image_is_told_to_be_the_list_alone(field, one, form):
    """The client puts the regions of a single image in a list."""
    said = f"{field} must be a list of {form} for each image of a list, or one such list for a single image"
    with pytest.raises(ValueError, match=re.escape(said)):
        regions.lists(field, [[[one]]])


def test_numbers_are_finite():
    with pytest.raises(ValueError, match=r"image 1: boxes must be finite, but number 0 is \[0.0, 0.0, nan, 9.0\]"):
        regions.lists("boxes", [[], [[0, 0, float("nan"), 9]]])
