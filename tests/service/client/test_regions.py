"""What the client sends for regions."""

from __future__ import annotations

import base64
import io

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


def test_numbers_are_finite():
    with pytest.raises(ValueError, match=r"image 1: boxes must be finite, but number 0 is \[0.0, 0.0, nan, 9.0\]"):
        regions.lists("boxes", [[], [[0, 0, float("nan"), 9]]])
