"""The preprocessing of published weights: RGB image → input tensor.

It is torchvision's presets for classification, segmentation, video and optical flow, and for detectors the model's own
transform. PIL images are resampled by PIL, as when the weights were trained, and tensors by torch.
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

ImageSize = int | tuple[int, int]
"""The side of a square, or height and width, in pixels."""

_PIL_BYTES = 4
"""Bytes of an RGB pixel in PIL."""

_NORMALIZING_BYTES = 3 + 3 * 3 * 4
"""Peak bytes per pixel of normalising: three values as uint8, and in three float32 tensors."""


class Preprocessing(ABC):
    """Turns images into a model's input; a subclass for each kind of model.

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
    #: whether images may be brought to a size in another way, by :func:`fxcore.images.fitting.fitted`
    fits = False

    @property
    def takes_images(self) -> bool:
        """Whether the model's input is made of a single image."""
        return self.layout == "NCHW"

    @property
    def rgb(self) -> Preprocessing:
        """The preprocessing of RGB images of the same sizes; another one if the input has no three channels."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the parameters by torchvision's names: sizes in pixels, mean and std for values in [0, 1]."""

    @abstractmethod
    def image(self, image: PIL.Image.Image) -> Tensor:
        """One RGB image → float32 ``[C, H, W]``."""

    def pixels(self, pixels: Tensor) -> Tensor:
        """One image as a uint8 tensor ``[3, H, W]`` → float32 ``[C, H, W]``; by default by way of a PIL image."""
        return self.image(F.to_pil_image(pixels))

    @abstractmethod
    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result of :meth:`image` for an image of that size."""

    @abstractmethod
    def nominal_size(self) -> tuple[int, int]:
        """Height and width of the usual input."""

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the largest intermediate image in :meth:`image` for an image of that size.

        It is not bounded where the shorter side is resized to a size and the longer one is cropped later.
        """
        return self.output_size(height, width)

    def placement(self, height: int, width: int) -> Placement:
        """Return where the pixels of an image of that size are in the result of :meth:`image`."""
        return cropped((height, width), self.largest_size(height, width), self.output_size(height, width))

    def valid_box(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        """x1, y1, x2, y2 of an image of that size in the result of :meth:`image`, where the rest is padding; None of
        preprocessing that leaves no rest."""
        return None

    def held(self, height: int, width: int) -> int:
        """Peak bytes of :meth:`image` for an image of that size, without the image."""
        return _NORMALIZING_BYTES * (height * width + math.prod(self.output_size(height, width)))

    @property
    def fixed_size(self) -> bool:
        """Whether all images become the same size."""
        return self.output_size(300, 900) == self.output_size(1700, 400)

    def tensor(self, array: Tensor) -> Tensor:
        """uint8 images ``[N, H, W, 3]`` → the float32 batch, equal to that of the same images as lossless files.

        Raises:
            BadTensor: another shape or dtype, or a size of 0.
        """
        if array.dtype != torch.uint8 or array.ndim != 4 or array.shape[-1] != 3 or array.numel() == 0:
            raise BadTensor(
                f"images to be preprocessed are uint8 [N, H, W, 3], each size at least 1; this is {_describe(array)}"
            )
        return torch.stack([self.pixels(one.permute(2, 0, 1)) for one in array])

    def normalization(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation per channel, for values in [0, 1], if normalising is the last step; None if more
        follows, such as a detector's zero padding."""
        return None

    def without_normalization(self) -> Preprocessing:
        """Return the same preprocessing without normalising, its last step: values are in [0, 1].

        Raises:
            BadTensor: normalising is not the last step.
        """
        raise BadTensor("the normalisation of this model's images is not the last step of their preprocessing")

    def stack(self, images: Sequence[Tensor]) -> Tensor:
        """Images of one size → a batch ``[N, C, H, W]``.

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
    """Classification and segmentation: resize, perhaps a centre crop, scale to [0, 1], normalise.

    A crop of ``image_size`` keeps the share of the image that the published preprocessing keeps: the image is resized
    until it covers the crop enlarged by their ``resize_size`` over their ``crop_size``.
    """

    fits = True

    def __init__(self, preset: Any, image_size: ImageSize | None = None) -> None:
        self._preset = preset
        self._covered: tuple[int, int] | None = None
        if image_size is not None:
            height, width = sides(image_size)
            if not hasattr(preset, "crop_size"):
                preset.resize_size = [height, width]
                return
            enlarged = [
                max(side, round(preset.resize_size[0] * side / preset.crop_size[0])) for side in (height, width)
            ]
            if height == width:
                preset.resize_size, preset.crop_size = enlarged[:1], [height]
            else:
                self._covered = enlarged[0], enlarged[1]
                preset.resize_size, preset.crop_size = enlarged, [height, width]

    @property
    def preset(self) -> Any:
        """The transform that :meth:`image` applies."""
        return self._preset

    def normalization(self) -> tuple[list[float], list[float]] | None:
        return list(self._preset.mean), list(self._preset.std)

    def without_normalization(self) -> ImagePreprocessing:
        made = copy.copy(self)
        made._preset = _not_normalizing(self._preset)
        return made

    def describe(self) -> dict[str, Any]:
        preset = self._preset
        return {
            "resize_size": preset.resize_size,
            "crop_size": getattr(preset, "crop_size", None),
            "mean": preset.mean,
            "std": preset.std,
            "interpolation": preset.interpolation.value,
            "antialias": preset.antialias,
        }

    def image(self, image: PIL.Image.Image) -> Tensor:
        return self._applied(image, image.height, image.width)

    def pixels(self, pixels: Tensor) -> Tensor:
        return self._applied(pixels, pixels.shape[-2], pixels.shape[-1])

    def _applied(self, image: Any, height: int, width: int) -> Tensor:
        preset = self._preset
        if self._covered is not None:  # a preset resizes all images to one size, or to one shorter side
            preset = copy.copy(preset)
            preset.resize_size = list(self.largest_size(height, width))
        result: Tensor = preset(image)
        return result

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        crop = getattr(self._preset, "crop_size", None)
        if crop is not None:
            return crop[0], crop[-1]
        return self.largest_size(height, width)

    def largest_size(self, height: int, width: int) -> tuple[int, int]:
        if self._covered is not None:
            return covering_size(self._covered, height, width)
        return resized_size(self._preset.resize_size, height, width)

    def held(self, height: int, width: int) -> int:
        return resizing_bytes((height, width), self.largest_size(height, width), self.output_size(height, width))

    def nominal_size(self) -> tuple[int, int]:
        size = getattr(self._preset, "crop_size", None) or self._preset.resize_size
        return size[0], size[-1]


class DetectorPreprocessing(Preprocessing):
    """A detector's own ``GeneralizedRCNNTransform``: normalise, resize, pad to a multiple of the FPN's stride."""

    pads = True

    def __init__(self, transform: Any, image_size: ImageSize | None = None) -> None:
        self._transform = transform.eval()
        if image_size is not None:
            height, width = sides(image_size)
            transform.fixed_size = (width, height)

    def describe(self) -> dict[str, Any]:
        transform = self._transform
        fixed = transform.fixed_size
        return {
            "resize_size": list(reversed(fixed)) if fixed else [transform.min_size[-1]],
            "max_size": None if fixed else transform.max_size,
            "crop_size": None,
            "pad_to_multiple_of": transform.size_divisible,
            "mean": list(transform.image_mean),
            "std": list(transform.image_std),
            "interpolation": "bilinear",
            "antialias": False,
        }

    def image(self, image: PIL.Image.Image) -> Tensor:
        return self.pixels(F.pil_to_tensor(image))

    def pixels(self, pixels: Tensor) -> Tensor:
        batch: Tensor = self._transform([F.convert_image_dtype(pixels, torch.float)])[0].tensors
        return batch[0]

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        resized = self._resized(height, width)
        multiple = self._transform.size_divisible
        return -(-resized[0] // multiple) * multiple, -(-resized[1] // multiple) * multiple

    def placement(self, height: int, width: int) -> Placement:
        resized = self._resized(height, width)
        return Placement((height, width), resized[0] / height, resized[1] / width, 0, 0, resized)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        transform = self._transform
        if transform.fixed_size:
            return transform.fixed_size[1], transform.fixed_size[0]
        scale = min(transform.min_size[-1] / min(height, width), transform.max_size / max(height, width))
        return int(height * scale), int(width * scale)

    def nominal_size(self) -> tuple[int, int]:
        fixed = self._transform.fixed_size
        return self.output_size(*((fixed[1], fixed[0]) if fixed else (self._transform.min_size[-1],) * 2))

    def stack(self, images: Sequence[Tensor]) -> Tensor:
        # Each is padded to the multiple already, so the largest of them is the size that the detector would pad to.
        height, width = (max(image.shape[axis] for image in images) for axis in (-2, -1))
        batch = images[0].new_zeros(len(images), 3, height, width)
        for row, image in zip(batch, images, strict=True):
            row[:, : image.shape[-2], : image.shape[-1]] = image
        return batch


class FlowPreprocessing(Preprocessing):
    """RAFT's frames: values scaled to [-1, 1], resized only if ``image_size`` is given."""

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
    """Clips: frames resized and cropped, and ``[N, T, C, H, W]`` turned to ``[N, C, T, H, W]``."""

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
        preset = self._preset
        return {
            "resize_size": preset.resize_size,
            "crop_size": preset.crop_size,
            "mean": preset.mean,
            "std": preset.std,
            "interpolation": preset.interpolation.value,
            "antialias": False,  # fixed in torchvision's preset, which keeps what the models were trained with
        }

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

    def tensor(self, array: Tensor) -> Tensor:
        if array.dtype != torch.uint8 or array.ndim != 5 or array.shape[-1] != 3 or array.numel() == 0:
            raise BadTensor(
                f"clips to be preprocessed are uint8 [N, T, H, W, 3], each size at least 1; this is {_describe(array)}"
            )
        result: Tensor = self._preset(array.permute(0, 1, 4, 2, 3).contiguous())
        return result


def resizing_bytes(size: tuple[int, int], resized: tuple[int, int], kept: tuple[int, int]) -> int:
    """Peak bytes where PIL resizes in two passes, and the crop of size ``kept`` is normalised as floats."""
    return _PIL_BYTES * resized[1] * (size[0] + resized[0]) + _NORMALIZING_BYTES * math.prod(kept)


def sides(image_size: ImageSize) -> tuple[int, int]:
    """Return height and width of ``image_size``.

    >>> sides(224), sides((448, 672))
    ((224, 224), (448, 672))
    """
    return (image_size, image_size) if isinstance(image_size, int) else image_size


def covering_size(box: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Height and width of the smallest image of the same aspect ratio that covers ``box``, height and width.

    >>> covering_size((512, 768), 600, 900), covering_size((512, 768), 600, 600)
    ((512, 768), (768, 768))
    """
    if height * box[1] <= width * box[0]:
        return box[0], max(box[1], int(box[0] * width / height))
    return max(box[0], int(box[1] * height / width)), box[1]


def resized_size(size: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """Height and width after ``torchvision.transforms.functional.resize``; one number is the shorter side."""
    if len(size) == 2:
        return size[0], size[1]
    short, long = sorted((height, width))
    resized = int(size[0] * long / short)
    return (size[0], resized) if height <= width else (resized, size[0])


def _not_normalizing(preset: Any) -> Any:
    """Return a copy of one of torchvision's presets with mean 0 and std 1, which change no bit."""
    made = copy.copy(preset)
    made.mean, made.std = [0.0] * len(preset.mean), [1.0] * len(preset.std)
    return made


def _describe(array: Tensor) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"
