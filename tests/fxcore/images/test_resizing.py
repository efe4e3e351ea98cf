"""Resizing and cropping, against torchvision's of tensors: every bit is the same."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from fxcore.images import resizing
from fxcore.images.resizing import MODES, resize


def check(pixels: np.ndarray, size: tuple[int, int], kept: tuple[range, range], mode: str) -> None:
    """Assert that what is kept of an image resized to ``size`` is what torchvision makes there."""
    image = torch.from_numpy(np.array(pixels[..., :3])).permute(2, 0, 1)
    whole = F.resize(image, list(size), InterpolationMode(mode), antialias=True).permute(1, 2, 0).numpy()
    rows, columns = kept
    assert np.array_equal(resize(pixels, size, kept, mode), whole[rows.start : rows.stop, columns.start : columns.stop])


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, channels), np.uint8)


@settings(max_examples=200, deadline=None)
@given(*[st.integers(2, 400)] * 2, *[st.integers(2, 300)] * 2, st.sampled_from(sorted(MODES)), st.sampled_from([3, 4]))
@example(512, 512, 256, 256, "bilinear", 4)  # a half in one value of 64, which is rounded to the even one
@example(300, 300, 12, 12, "bicubic", 3)
@example(1, 400, 3, 2, "bicubic", 3)
@example(236, 54, 54, 26, "bilinear", 3)  # torch sums a single column in another way
def test_all_of_an_image(height: int, width: int, lines: int, columns: int, mode: str, channels: int):
    check(noise(height, width, channels), (lines, columns), (range(lines), range(columns)), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(480, 640), (1200, 1600), (180, 240)])
def test_what_a_crop_keeps_of_a_turned_image(size: tuple[int, int], mode: str):
    pixels = noise(*size, 4)[::-1].transpose(1, 0, 2)
    kept = range(40, 264), range(8, 232)
    check(pixels, (320, 240), kept, mode)
    assert resize(pixels, (320, 240), kept, mode).flags.c_contiguous


@pytest.mark.parametrize("value", [0, 255])
def test_edges_of_the_range(value: int):
    pixels = np.zeros((300, 300, 3), np.uint8)
    pixels[::2, :150] = 255 - value
    pixels[:, 150:] = value
    check(pixels, (256, 256), (range(256), range(256)), "bicubic")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("height", "width"), [(2400, 1700), (3000, 260)])
def test_images_become_many_times_smaller(height: int, width: int, mode: str):
    """Sums of many values, some of which are close to a half."""
    check(noise(height, width), (240, 200), (range(8, 232), range(180)), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kept", [(range(16, 240), range(10, 200)), (range(3, 8), range(256))])
def test_patterns_whose_sums_are_all_halves(kept: tuple[range, range], mode: str):
    """Stripes and a checkerboard take not twenty times as long as noise."""
    taken = []
    for pixels in (noise(1024, 1024, 4), np.indices((1024, 1024, 4))[:2].sum(0), np.indices((1024, 1024, 4))[1]):
        image = (pixels % 2 * 255).astype(np.uint8) if taken else pixels
        began = time.thread_time()
        resize(image, (256, 256), kept, mode)
        taken.append(time.thread_time() - began)
        check(image, (256, 256), kept, mode)
    assert max(taken) < 8 * max(taken[0], 0.02)


def test_torch_does_it_where_its_kernels_sum_otherwise(monkeypatch: pytest.MonkeyPatch):
    """As they may in another build, or without the vectorised ones."""
    pixels = noise(90, 70)
    right = resize(pixels, (50, 60), (range(3, 40), range(60)), "bicubic")
    monkeypatch.setattr(resizing, "_kernels_agree", lambda: False)
    assert np.array_equal(resize(pixels, (50, 60), (range(3, 40), range(60)), "bicubic"), right)


def test_kernels_agree_here():
    """Else every image is resized by torch, in several times the time."""
    assert resizing._kernels_agree()
