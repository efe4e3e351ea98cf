"""Photographs for the tests of images."""

from __future__ import annotations

import PIL.Image
import pytest
import skimage.data


@pytest.fixture(scope="module")
def cat() -> PIL.Image.Image:
    """300 x 451 pixels, RGB."""
    return PIL.Image.fromarray(skimage.data.chelsea())
