"""Heat-maps: what is larger than a screen is drawn smaller."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
import torch

from service.codecs import heatmap


def drawn(image: PIL.Image.Image) -> PIL.Image.Image:
    """The heat-map of a feature map that grows from left to right, over ``image`` as it is."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    tensor = torch.linspace(0, 1, 8).expand(1, 3, 2, 8)
    return PIL.Image.open(io.BytesIO(bytes(heatmap.write(buffer.getvalue(), None, tensor, "NCHW")[0])))


@pytest.mark.parametrize("size", [(4000, 1000), (1000, 4000), (3000, 3000), (3_000_000, 1), (1, 3_000_000)])
def test_large_images_are_drawn_smaller(size: tuple[int, int]) -> None:
    width, height = drawn(PIL.Image.new("RGB", size, (90, 120, 150))).size
    assert 0.99 * heatmap.MOST_PIXELS < width * height <= heatmap.MOST_PIXELS
    if min(size) > 1:
        assert width / height == pytest.approx(size[0] / size[1], rel=0.01)


def test_smaller_ones_show_the_same() -> None:
    ramp = np.linspace(0, 255, 1500).astype(np.uint8)
    large = PIL.Image.fromarray(np.broadcast_to(ramp, (1500, 1500))).convert("RGB")
    small = large.resize((750, 750), PIL.Image.Resampling.BILINEAR)
    assert drawn(small).size == (750, 750)
    both = drawn(large), drawn(small)
    assert both[0].size[0] < 1500
    seen = [np.asarray(one.resize((50, 50), PIL.Image.Resampling.BOX)).astype(float) for one in both]
    assert np.abs(seen[0] - seen[1]).max() < 3
