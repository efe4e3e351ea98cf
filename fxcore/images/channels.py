"""Preprocessing for models whose input does not have three channels."""

from __future__ import annotations

import copy
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.images.preprocessing import Preprocessing

_LUMA = (0.299, 0.587, 0.114)
"""Luma weights of ITU-R 601, as in PIL's mode L."""


class OtherChannels(Preprocessing):
    """Preprocessing with the sizes of ``rgb``, for another number of channels.

    A one-channel input is the luma of the RGB image; other numbers of channels do not accept images. The luma is
    normalised by the averages of the mean and standard deviation of R, G and B.

    Args:
        rgb: the preprocessing of RGB images; normalising is its last step.
        channels: number of channels of the model's input.

    >>> from fxcore.images.preprocessing import ImagePreprocessing
    >>> from fxcore.images.presets import ImageClassification
    >>> rgb = ImagePreprocessing(ImageClassification(crop_size=2, resize_size=2, mean=(0.0,) * 3, std=(1.0,) * 3))
    >>> OtherChannels(rgb, 1).image(PIL.Image.new("RGB", (4, 4), (255, 0, 0)))[0, 0]
    tensor([0.2990, 0.2990])
    """

    def __init__(self, rgb: Preprocessing, channels: int) -> None:
        self._rgb = rgb
        self._plain = rgb.without_normalization()
        self._channels = channels
        self.fits = self.takes_images and rgb.fits
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

    def normalization(self) -> tuple[list[float], list[float]] | None:
        return ([self._mean], [self._std]) if self.takes_images else None

    def without_normalization(self) -> OtherChannels:
        if not self.takes_images:
            raise BadTensor(f"this model's input has {self._channels} channels: it takes tensors, not images")
        made = copy.copy(self)
        made._mean, made._std = 0.0, 1.0
        return made

    def image(self, image: PIL.Image.Image) -> Tensor:
        return self._normalized(self._plain.image(image))

    def pixels(self, pixels: Tensor) -> Tensor:
        return self._normalized(self._plain.pixels(pixels))

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self._rgb.output_size(height, width)

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        return self._rgb.largest_size(height, width)

    def nominal_size(self) -> tuple[int, int]:
        return self._rgb.nominal_size()

    def valid_box(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        return self._rgb.valid_box(height, width)

    def held(self, height: int, width: int) -> int:
        return self._rgb.held(height, width)

    def _normalized(self, image: Tensor) -> Tensor:
        if self._channels != 1:
            raise BadTensor(
                f"this model's input has {self._channels} channels and images have three: send tensors, float32 "
                f"[N, {self._channels}, H, W]"
            )
        return (luma(image) - self._mean) / self._std


def luma(image: Tensor) -> Tensor:
    """Return the luma ``[1, H, W]`` of an RGB image, floats ``[3, H, W]``."""
    return (image * torch.tensor(_LUMA).reshape(3, 1, 1)).sum(0, keepdim=True)
