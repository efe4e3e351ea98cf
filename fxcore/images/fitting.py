"""Ways to fit an image to the size of a model's input, other than the weights' own resize and centre crop.

Images are resized as tensors (as PIL images in :data:`~fxcore.images.presets.PIL_MODES`), by
``torchvision.transforms.v2.functional.resize`` with antialiasing and the weights' interpolation, and normalised as in
training.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import PIL.Image
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from fxcore.errors import BadTensor, Unsupported
from fxcore.images.channels import OtherChannels
from fxcore.images.preprocessing import Preprocessing
from fxcore.images.presets import PIL_MODES
from fxcore.images.sizes import ImageSize, sides

Fit = Literal["crop", "stretch", "pad", "native"]

_FLOAT_BYTES = 3 * 4
"""Bytes of a pixel with three float32 values."""


class FittedPreprocessing(Preprocessing):
    """Preprocessing that resizes to a size, possibly pads, scales to [0, 1] and normalises.

    Subclasses determine the size.

    Args:
        own: the weights' own preprocessing, which determines interpolation and normalisation.
    """

    fits = True

    def __init__(self, own: Preprocessing) -> None:
        described = own.describe()
        self._interpolation = InterpolationMode(described["interpolation"])
        self.mean: list[float] = list(described["mean"])
        self._scale = self.mean, list(described["std"])

    def describe(self) -> dict[str, Any]:
        mean, std = self._scale
        return {
            "resize_size": None,
            "crop_size": None,
            "mean": mean,
            "std": std,
            "interpolation": self._interpolation.value,
            "antialias": True,
        }

    def normalization(self) -> tuple[list[float], list[float]] | None:
        return self._scale

    def without_normalization(self) -> FittedPreprocessing:
        made = copy.copy(self)
        made._scale = [0.0] * len(self.mean), [1.0] * len(self.mean)
        return made

    def image(self, image: PIL.Image.Image) -> Tensor:
        return self._finished(F.pil_to_tensor(self._resized(image, image.height, image.width)))

    def pixels(self, pixels: Tensor) -> Tensor:
        if self._interpolation in PIL_MODES:
            return super().pixels(pixels)
        height, width = pixels.shape[-2:]
        if pixels.dtype == torch.uint16:  # torchvision would wrap values that bicubic resizing carries out of range
            floats = F.to_dtype(pixels, torch.float32, scale=True)
            return self._finished(self._resized(floats, height, width).clamp(0, 1))
        return self._finished(self._resized(pixels, height, width))

    def held(self, height: int, width: int) -> int:
        resized = self.largest_size(height, width)
        # torch resizes floats in two passes, and widths first.
        passes = height * width + height * resized[1] + math.prod(resized)
        return _FLOAT_BYTES * (passes + 2 * math.prod(self.output_size(height, width)))

    def _resized(self, image: Any, height: int, width: int) -> Any:
        size = list(self.largest_size(height, width))
        return F.resize(image, size, interpolation=self._interpolation, antialias=True)

    def _finished(self, resized: Tensor) -> Tensor:
        floats = self._placed(F.to_dtype(resized, torch.float32, scale=True))
        result: Tensor = F.normalize(floats, *self._scale)
        return result

    def _placed(self, resized: Tensor) -> Tensor:
        """Place the resized image, floats in [0, 1], in the input."""
        return resized


class _OneSize(FittedPreprocessing):
    """Preprocessing that brings every image to ``size`` (height and width) by the method ``fit``."""

    fit: Fit

    def __init__(self, own: Preprocessing, size: tuple[int, int]) -> None:
        super().__init__(own)
        self._size = size

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "resize_size": list(self._size), "fit": self.fit}

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self._size

    def nominal_size(self) -> tuple[int, int]:
        return self._size


class Stretched(_OneSize):
    """Preprocessing that resizes every image to exactly ``size`` (height and width)."""

    fit = "stretch"


class Padded(_OneSize):
    """Preprocessing that resizes every image to fit into ``size`` (height and width), centres it, and pads it with the
    mean colour.

    >>> from fxcore import get_model
    >>> padded = Padded(get_model("resnet18").preprocessing(), (224, 224))
    >>> padded.valid_box(300, 600)
    (0, 56, 224, 168)
    >>> padded.image(PIL.Image.new("RGB", (600, 300), "white"))[0, ::56, 0]
    tensor([0.0000, 2.2489, 2.2489, 0.0000])
    """

    fit = "pad"

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        scale = min(self._size[0] / height, self._size[1] / width)
        return _scaled(height, scale, self._size[0]), _scaled(width, scale, self._size[1])

    def valid_box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return x1, y1, x2, y2 of an image of that size, in pixels of the input."""
        resized = self.largest_size(height, width)
        top, left = self._corner(*resized)
        return left, top, left + resized[1], top + resized[0]

    def _corner(self, height: int, width: int) -> tuple[int, int]:
        """Return the row and column of the input at which a resized image begins."""
        return (self._size[0] - height) // 2, (self._size[1] - width) // 2

    def _placed(self, resized: Tensor) -> Tensor:
        height, width = resized.shape[-2:]
        top, left = self._corner(height, width)
        # In float32, so that normalising turns it into zeros.
        mean = torch.tensor(self.mean, dtype=resized.dtype)[:, None, None]
        filled = mean.expand(len(resized), *self._size).clone()  # a model of one channel has a single mean
        filled[:, top : top + height, left : left + width] = resized
        return filled


class Native(FittedPreprocessing):
    """Preprocessing that keeps the aspect ratio: the shorter side becomes ``side``, both multiples of ``multiple``.

    >>> from fxcore import get_model
    >>> native = Native(get_model("resnet18").preprocessing(), 224, 32)
    >>> native.output_size(480, 640), native.output_size(1000, 300)
    ((224, 288), (736, 224))
    """

    def __init__(self, own: Preprocessing, side: int, multiple: int) -> None:
        super().__init__(own)
        self._side, self._multiple = side, multiple

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "resize_size": [self._side],
            "fit": "native",
            "multiple": self._multiple,
        }

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        scale = self._side / min(height, width)
        return self._rounded(height * scale), self._rounded(width * scale)

    def nominal_size(self) -> tuple[int, int]:
        return self.output_size(self._side, self._side)

    def _rounded(self, side: float) -> int:
        return max(1, round(side / self._multiple)) * self._multiple


def fitted(own: Preprocessing, fit: Fit, image_size: ImageSize | None, multiple: int = 1) -> Preprocessing:
    """Return the preprocessing that fits images to ``image_size`` by the method ``fit``.

    Args:
        own: the weights' own preprocessing.
        fit: the method; not ``crop``, which is the weights' own.
        image_size: size of the input; by default the weights' own crop. With ``native``, the shorter side.
        multiple: with ``native``, the number that each side is rounded to a multiple of.

    Raises:
        Unsupported: the model's inputs are not single images that the preprocessing resizes.
        BadTensor: ``image_size`` is two numbers with ``native``.
    """
    if not own.fits:
        raise Unsupported(
            f"fit={fit} is not for this model, whose input is not a single image that its weights resize; leave it out",
            field="fit",
            value=fit,
            available=["crop"],
        )
    made = _fitted(own, fit, image_size, multiple)
    return OtherChannels(made, 1) if isinstance(own, OtherChannels) else made


def _fitted(own: Preprocessing, fit: Fit, image_size: ImageSize | None, multiple: int) -> FittedPreprocessing:
    """Return the preprocessing of RGB images; see :func:`fitted`."""
    size = own.nominal_size() if image_size is None else sides(image_size)
    if fit == "stretch":
        return Stretched(own, size)
    if fit == "pad":
        return Padded(own, size)
    if image_size is not None and not isinstance(image_size, int):
        raise BadTensor("image_size: with fit=native it is one number, the length of the shorter side")
    return Native(own, min(size), multiple)


def _scaled(side: int, scale: float, most: int) -> int:
    return min(most, max(1, round(side * scale)))
