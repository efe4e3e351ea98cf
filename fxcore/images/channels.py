"""Preprocessing for models whose input has another number of channels than three."""

from __future__ import annotations

from typing import Any

import PIL.Image
import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.images.preprocessing import ImagePreprocessing, Preprocessing

_LUMA = (0.299, 0.587, 0.114)
"""ITU-R 601, as PIL's mode L."""


class OtherChannels(Preprocessing):
    """The same sizes as ``rgb``; images of one channel are the luma of its RGB images, of others there are none.

    They are normalised by the averages of the mean and standard deviation of R, G and B.

    Args:
        rgb: the preprocessing of RGB images.
        channels: of the model's input.

    >>> from fxcore.images.presets import ImageClassification
    >>> rgb = ImagePreprocessing(ImageClassification(crop_size=2, resize_size=2, mean=(0.0,) * 3, std=(1.0,) * 3))
    >>> OtherChannels(rgb, 1).image(PIL.Image.new("RGB", (4, 4), (255, 0, 0)))[0, 0]
    tensor([0.2990, 0.2990])
    """

    def __init__(self, rgb: ImagePreprocessing, channels: int) -> None:
        self._rgb = rgb
        self._plain = rgb.without_normalization()
        self._channels = channels
        mean, std = rgb.normalization() or ([0.0], [1.0])
        self._mean, self._std = sum(mean) / len(mean), sum(std) / len(std)

    @property
    def takes_images(self) -> bool:
        return self._channels == 1

    @property
    def rgb(self) -> Preprocessing:
        return self._rgb

    def describe(self) -> dict[str, Any]:
        return {**self._rgb.describe(), "mean": [self._mean], "std": [self._std]}

    def image(self, image: PIL.Image.Image) -> Tensor:
        return self._luma(self._plain.image(image))

    def pixels(self, pixels: Tensor) -> Tensor:
        return self._luma(self._plain.pixels(pixels))

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self._rgb.output_size(height, width)

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        return self._rgb.largest_size(height, width)

    def nominal_size(self) -> tuple[int, int]:
        return self._rgb.nominal_size()

    def held(self, height: int, width: int) -> int:
        return self._rgb.held(height, width)

    def _luma(self, image: Tensor) -> Tensor:
        if self._channels != 1:
            raise BadTensor(
                f"this model's input has {self._channels} channels and images have three: send tensors, float32 "
                f"[N, {self._channels}, H, W]"
            )
        weights = torch.tensor(_LUMA).reshape(3, 1, 1)
        return ((image * weights).sum(0, keepdim=True) - self._mean) / self._std
