"""The preprocessing of published weights, from an RGB image to an input tensor.

Classification, segmentation, video and optical flow use torchvision's presets; detectors use the model's own transform
(:mod:`fxcore.images.detector_preprocessing`). PIL images are resampled by PIL, as when the weights were trained, and
tensors by torch.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from torchvision.transforms import functional as F

from fxcore.errors import BadArgument, BadTensor
from fxcore.images.placement import Placement, cropped
from fxcore.images.presets import PIL_MODES
from fxcore.images.sizes import ImageSize, covering_size, resized_size, sides
from fxcore.tensors import dtype_name

_PIL_BYTES = 4
"""Bytes of an RGB pixel in PIL."""

_NORMALIZING_BYTES = 3 + 3 * 3 * 4
"""Peak bytes per pixel of normalising: three uint8 values, and three float32 tensors of three values."""


class Preprocessing(ABC):
    """Base class for converting images to a model's input, with a subclass for each kind of model.

    >>> from fxcore import get_model
    >>> preprocessing = get_model("resnet50").preprocessing()
    >>> preprocessing.image(PIL.Image.new("RGB", (640, 480))).shape
    torch.Size([3, 224, 224])
    >>> preprocessing.normalization()
    ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    """

    layout = "NCHW"
    #: whether images of different sizes are padded to form one batch, as for detectors
    pads = False
    #: whether images may be fitted to a size in other ways, by :func:`fxcore.images.fitting.fitted`
    fits = False

    @property
    def takes_images(self) -> bool:
        """Whether the model's input is made of a single image."""
        return self.layout == "NCHW"

    @property
    def rgb(self) -> Preprocessing:
        """The preprocessing of RGB images with the same sizes; differs from ``self`` if the input is not RGB."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the parameters by torchvision's names: sizes in pixels, mean and std for values in [0, 1]."""

    @abstractmethod
    def image(self, image: PIL.Image.Image) -> Tensor:
        """Convert one RGB image to float32 ``[C, H, W]``."""

    def pixels(self, pixels: Tensor) -> Tensor:
        """Convert one uint8 or uint16 image ``[3, H, W]`` to float32 ``[C, H, W]``.

        By default through a PIL image, which keeps the upper eight bits.
        """
        if pixels.dtype == torch.uint16:
            pixels = (pixels.int() >> 8).to(torch.uint8)
        return self.image(F.to_pil_image(pixels))

    @abstractmethod
    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the result of :meth:`image` for an image of that size."""

    @abstractmethod
    def nominal_size(self) -> tuple[int, int]:
        """Return height and width of the usual input."""

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the largest intermediate image in :meth:`image` for an image of that size.

        It is unbounded if the shorter side is resized to a fixed size and the longer side is cropped later.
        """
        return self.output_size(height, width)

    def placement(self, height: int, width: int) -> Placement:
        """Return the placement of an image of that size in the result of :meth:`image`."""
        return cropped((height, width), self.largest_size(height, width), self.output_size(height, width))

    def valid_box(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        """Return x1, y1, x2, y2 of an image of that size in the result of :meth:`image`, where the rest is padding;
        None for preprocessing that does not pad."""
        return None

    def held(self, height: int, width: int) -> int:
        """Return the peak bytes of :meth:`image` for an image of that size, not counting the image."""
        return _NORMALIZING_BYTES * (height * width + math.prod(self.output_size(height, width)))

    @property
    def fixed_size(self) -> bool:
        """Whether all images are brought to the same size."""
        return self.output_size(300, 900) == self.output_size(1700, 400)

    def from_array(self, array: Tensor) -> Tensor:
        """Convert uint8 images ``[N, H, W, 3]`` to the float32 batch that lossless files of them would give.

        Raises:
            BadTensor: ``array`` has another shape or dtype, or a size of 0.
        """
        if array.dtype != torch.uint8 or array.ndim != 4 or array.shape[-1] != 3 or array.numel() == 0:
            raise BadTensor(
                f"images to be preprocessed are uint8 [N, H, W, 3], each size at least 1; this is {_describe(array)}"
            )
        return torch.stack([self.pixels(one.permute(2, 0, 1)) for one in array])

    def normalization(self) -> tuple[list[float], list[float]] | None:
        """Return mean and standard deviation per channel, for values in [0, 1], if normalising is the last step; None
        if other steps follow, such as a detector's zero padding."""
        return None

    def without_normalization(self) -> Preprocessing:
        """Return the same preprocessing without its last step, normalising, so that values are in [0, 1].

        Raises:
            BadTensor: normalising is not the last step.
        """
        raise BadTensor("the normalisation of this model's images is not the last step of their preprocessing")

    def batch(self, images: Sequence[Tensor]) -> Tensor:
        """Stack images of the same size to a batch ``[N, C, H, W]``.

        Raises:
            BadTensor: the sizes differ, and this preprocessing does not pad.
        """
        sizes = {tuple(image.shape[-2:]) for image in images}
        if len(sizes) > 1:
            shown = ", ".join(f"{h} x {w}" for h, w in sorted(sizes)[:4])
            raise BadTensor(
                f"after preprocessing the images have different sizes ({shown}) and cannot form one tensor; send them "
                "one by one, ask for pool=avg, or make the extractor with image_size"
            )
        return torch.stack(list(images))


class ImagePreprocessing(Preprocessing):
    """Preprocessing for classification and segmentation: resize, optional centre crop, scale to [0, 1], normalise.

    A crop of ``image_size`` keeps the same share of the image as the published preprocessing: the image is resized to
    cover the crop enlarged by the published ratio of ``resize_size`` to ``crop_size``, or to exactly that size if
    ``resize_size`` is height and width.

    Attributes:
        preset: the transform that :meth:`image` applies.
    """

    fits = True

    def __init__(self, preset: Any, image_size: ImageSize | None = None) -> None:
        self.preset = preset
        self._covered: tuple[int, int] | None = None
        if image_size is not None:
            height, width = sides(image_size)
            if not hasattr(preset, "crop_size"):
                preset.resize_size = [height, width]
                return
            crop, resize = preset.crop_size[0], preset.resize_size
            enlarged = [
                max(1, round(part * side / crop))
                for part, side in zip((resize[0], resize[-1]), (height, width), strict=True)
            ]
            preset.crop_size = [height] if height == width else [height, width]
            preset.resize_size = enlarged
            if len(resize) == 1 and height == width:
                preset.resize_size = enlarged[:1]
            elif len(resize) == 1:
                self._covered = enlarged[0], enlarged[1]

    def normalization(self) -> tuple[list[float], list[float]] | None:
        return list(self.preset.mean), list(self.preset.std)

    def without_normalization(self) -> ImagePreprocessing:
        made = copy.copy(self)
        made.preset = _not_normalizing(self.preset)
        return made

    def describe(self) -> dict[str, Any]:
        return _described(self.preset, self.preset.antialias)

    def image(self, image: PIL.Image.Image) -> Tensor:
        return self._applied(image, image.height, image.width)

    def pixels(self, pixels: Tensor) -> Tensor:
        if self.preset.interpolation in PIL_MODES:
            return super().pixels(pixels)
        return self._applied(pixels, pixels.shape[-2], pixels.shape[-1])

    def _applied(self, image: Any, height: int, width: int) -> Tensor:
        preset = self.preset
        if self._covered is not None:  # a preset can only resize to a fixed size, or to a fixed shorter side
            preset = copy.copy(preset)
            preset.resize_size = list(self.largest_size(height, width))
        result: Tensor = preset(image)
        return result

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        crop = getattr(self.preset, "crop_size", None)
        if crop is not None:
            return crop[0], crop[-1]
        return self.largest_size(height, width)

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        if self._covered is not None:
            return covering_size(self._covered, height, width)
        return resized_size(self.preset.resize_size, height, width)

    def held(self, height: int, width: int) -> int:
        return resizing_bytes((height, width), self.largest_size(height, width), self.output_size(height, width))

    def nominal_size(self) -> tuple[int, int]:
        size = getattr(self.preset, "crop_size", None) or self.preset.resize_size
        return size[0], size[-1]


class FlowPreprocessing(Preprocessing):
    """Preprocessing for RAFT's frames: scale values to [-1, 1], and resize only if ``image_size`` is given."""

    def __init__(self, image_size: ImageSize | None = None) -> None:
        self._size = None if image_size is None else sides(image_size)

    def describe(self) -> dict[str, Any]:
        return {
            "resize_size": list(self._size) if self._size else None,
            "crop_size": None,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "interpolation": "bilinear",
            "antialias": True,
        }

    def image(self, image: PIL.Image.Image) -> Tensor:
        if self._size:
            image = F.resize(image, list(self._size))
        return self._frame(F.pil_to_tensor(image))

    def pixels(self, pixels: Tensor) -> Tensor:
        return self._frame(F.resize(pixels, list(self._size)) if self._size else pixels)

    @staticmethod
    def _frame(pixels: Tensor) -> Tensor:
        frame: Tensor = F.normalize(F.convert_image_dtype(pixels, torch.float), [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
        return frame

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self._size or (height, width)

    def nominal_size(self) -> tuple[int, int]:
        return self.output_size(520, 960)  # the size of torchvision's own RAFT example


class VideoPreprocessing(Preprocessing):
    """Preprocessing for clips: resize and crop frames, and permute ``[N, T, C, H, W]`` to ``[N, C, T, H, W]``."""

    layout = "NCTHW"

    def __init__(self, preset: Any, image_size: ImageSize | None = None) -> None:
        self._preset = preset
        if image_size is not None:
            height, width = sides(image_size)
            if height != width:
                raise BadArgument("clips are cropped to squares: image_size is one number")
            preset.resize_size = [max(height, round(s * height / preset.crop_size[0])) for s in preset.resize_size]
            preset.crop_size = [height, width]

    def describe(self) -> dict[str, Any]:
        return _described(self._preset, antialias=False)  # fixed in torchvision's preset, as in training

    def image(self, image: PIL.Image.Image) -> Tensor:
        raise BadTensor(
            "this is a video model: send clips as tensors, uint8 [N, T, H, W, 3] or float32 [N, 3, T, H, W]"
        )

    def normalization(self) -> tuple[list[float], list[float]] | None:
        return list(self._preset.mean), list(self._preset.std)

    def without_normalization(self) -> VideoPreprocessing:
        made = copy.copy(self)
        made._preset = _not_normalizing(self._preset)
        return made

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.nominal_size()

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        return resized_size(self._preset.resize_size, height, width)

    def nominal_size(self) -> tuple[int, int]:
        return self._preset.crop_size[0], self._preset.crop_size[1]

    def from_array(self, array: Tensor) -> Tensor:
        if array.dtype != torch.uint8 or array.ndim != 5 or array.shape[-1] != 3 or array.numel() == 0:
            raise BadTensor(
                f"clips to be preprocessed are uint8 [N, T, H, W, 3], each size at least 1; this is {_describe(array)}"
            )
        result: Tensor = self._preset(array.permute(0, 1, 4, 2, 3).contiguous())
        return result


def resizing_bytes(size: tuple[int, int], resized: tuple[int, int], kept: tuple[int, int]) -> int:
    """Return the peak bytes when PIL resizes in two passes, and the crop of size ``kept`` is normalised as floats."""
    return _PIL_BYTES * resized[1] * (size[0] + resized[0]) + _NORMALIZING_BYTES * math.prod(kept)


def _described(preset: Any, antialias: bool) -> dict[str, Any]:
    return {
        "resize_size": preset.resize_size,
        "crop_size": getattr(preset, "crop_size", None),
        "mean": preset.mean,
        "std": preset.std,
        "interpolation": preset.interpolation.value,
        "antialias": antialias,
    }


def _not_normalizing(preset: Any) -> Any:
    """Return a copy of a torchvision preset with mean 0 and std 1, which leave values exactly unchanged."""
    made = copy.copy(preset)
    made.mean, made.std = [0.0] * len(preset.mean), [1.0] * len(preset.std)
    return made


def _describe(array: Tensor) -> str:
    return f"{dtype_name(array.dtype)} {list(array.shape)}"
